"""The record of what a call on a GPU enqueues, so that it can be enqueued again: see ``plans.py``.

A :class:`PlanRecorder` sees the call go the long way. What it makes of it, a :class:`Plan`, knows memory
as "so many bytes into argument i" or "into result k", or by address if it lasts as long as the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import SymmetricBuffer, Workspace, bytes_of
from interlace.runtime.places.gpu.launch import PreparedLaunch
from interlace.runtime.places.gpu.stream import DeviceStream, programs_of

WHOLE: Any = object()  # the tree of a call that returns its one result

Address = tuple[int, int, int]
"""0 of an argument, 1 of a result; its index; bytes from its first element."""
View = tuple[int, int, torch.Size, tuple[int, ...], int]
"""As :data:`Address`, with shape, strides and offset in elements."""


@dataclass
class Launched:
    """A kernel with its values, and which of them are addresses that differ from call to call."""

    prepared: PreparedLaunch
    addresses: list[tuple[int, int, int, int]]  # position, and an Address


@dataclass(frozen=True)
class Bytes:
    """``count`` bytes of a dense argument from byte ``offset`` on, flat."""

    index: int
    count: int
    offset: int


PlannedTensor = View | Bytes | torch.Tensor


@dataclass
class Copied:
    destination: PlannedTensor
    source: PlannedTensor


@dataclass
class Signalled:
    """A signal by the stream itself: the method's name, and its arguments. The epoch is taken anew."""

    method: str
    arguments: tuple[int, ...]

    def again(self, stream: DeviceStream, workspace: Workspace) -> None:
        getattr(stream, self.method)(workspace, *self.arguments)


@dataclass
class PlanStep:
    """The items of one ``enqueue``, the finish last; ``words``: of a kernel without workspace."""

    workspace: Workspace | None
    pulled: bool
    items: list[Launched | Copied | Signalled] = field(default_factory=list)
    programs: int = 0  # of its kernels, together
    words: tuple[SymmetricBuffer, int] | None = None


@dataclass
class Plan:
    """``results``: dtype and shape of each; ``tree``: what the call returns, in views of them."""

    agreed: tuple[Call, list[bytes]] | None
    steps: list[PlanStep]
    results: list[tuple[torch.dtype, Sequence[int]]]
    tree: Any


class PlanRecorder:
    """A record of a call's enqueues. ``apart``: how ``arguments`` lie to each other is part of it."""

    def __init__(self, kind: Any, arguments: list[torch.Tensor], *, apart: bool = False) -> None:
        self.kind, self._arguments, self._apart = kind, arguments, apart
        self._agreed: list[tuple[Call, list[bytes]]] = []
        self._steps: list[PlanStep] = []
        self._items: list[list[Any]] = []  # of each step, as they were seen
        self._open = self._spoilt = False

    def agreed(self, call: Call, answers: list[bytes]) -> None:
        self._agreed.append((call, answers))

    def begins(
        self,
        workspace: Workspace | None,
        *,
        pulled: bool = False,
        words: tuple[SymmetricBuffer, int] | None = None,
    ) -> None:
        """An ``enqueue`` is about to put its items on the streams: the fields of its step."""
        self._steps.append(PlanStep(workspace, pulled, words=words))
        self._items.append([])
        self._open = True

    def signalled(self, stream: DeviceStream, method: str, *arguments: int) -> None:
        if self._open:  # else it is the wait before the op for the credits of the one before
            self.note(stream, Signalled(method, arguments))

    def note(self, stream: DeviceStream, item: Any) -> None:
        """``item``: a launch and what was prepared of it, destination and source of a copy, a signal."""
        if not self._open or not stream.follows:
            self._spoilt = True
        else:
            self._items[-1].append(item)

    def finished(self) -> None:
        self._open = False

    def spoil(self) -> None:
        """The call has done something that cannot be repeated: it gets no plan."""
        self._spoilt = True

    def plan(self, result: Any, lasting: Sequence[torch.Tensor]) -> Plan | None:
        """The plan, if all that was seen can be repeated."""
        if self._spoilt or self._open or not self._steps or len(self._agreed) > 1:
            return None
        where = _Where(self._arguments, lasting, apart=self._apart)
        try:
            tree = where.tree(result)
            steps = []
            for step, seen in zip(self._steps, self._items, strict=True):
                launches = [each[0] for each in seen if isinstance(each, tuple)]
                programs = sum(programs_of(x) for x in launches if isinstance(x, KernelLaunch))
                items = [where.item(each) for each in seen]
                steps.append(replace(step, items=items, programs=programs))
        except LookupError:
            return None
        agreed = self._agreed[0] if self._agreed else None
        if where.is_whole(result):
            return Plan(agreed, steps, [(result.dtype, result.shape)], WHOLE)
        return Plan(agreed, steps, where.results, tree)


class _Where:
    """Finds the tensor of an address. LookupError for memory that is not there the next time."""

    def __init__(
        self, arguments: list[torch.Tensor], lasting: Sequence[torch.Tensor], *, apart: bool
    ) -> None:
        self._arguments, self._apart = arguments, apart
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        self._made: dict[int, int] = {}  # storages of results, by address
        self.results: list[tuple[torch.dtype, Sequence[int]]] = []

    def tree(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if self._argument(result) is not None:  # which the caller has made
                view = self._view(result)
                if isinstance(view, Bytes):
                    raise LookupError
                return _Leaf(view)  # type: ignore[arg-type]
            if storage.data_ptr() not in self._made:
                self._made[storage.data_ptr()] = len(self.results)
                self.results.append((result.dtype, (storage.nbytes() // result.element_size(),)))
            index = self._made[storage.data_ptr()]
            if self.results[index][0] != result.dtype:
                raise LookupError
            return _Leaf((1, index, *_form(result)))
        if isinstance(result, (tuple, list)):
            return type(result)(self.tree(each) for each in result)
        if result is None or isinstance(result, bool):
            return result
        raise LookupError

    def is_whole(self, result: Any) -> bool:
        """Whether the call returns one dense tensor, which is all of its storage."""
        return (
            isinstance(result, torch.Tensor)
            and result.is_contiguous()
            and result.storage_offset() == 0
            and result.nbytes == result.untyped_storage().nbytes()
            and self._argument(result) is None
        )

    def item(self, item: Any) -> Launched | Copied | Signalled:
        if isinstance(item, Signalled):
            return item
        first, second = item
        if isinstance(first, torch.Tensor):
            return Copied(self._view(first), self._view(second))
        given = first.values()
        addresses = [
            (position, *address)
            for position, value in enumerate(second.in_order(given))
            if isinstance(value, torch.Tensor) and (address := self._address(value)) is not None
        ]
        return Launched(second, addresses)

    def _argument(self, tensor: torch.Tensor) -> int | None:
        """Index of the argument in ``tensor``'s storage; of several, the one that begins where it does.

        If it is known how they lie to each other, any that has where it begins.
        """
        storage = tensor.untyped_storage().data_ptr()
        near = [
            index
            for index, argument in enumerate(self._arguments)
            if storage and argument.untyped_storage().data_ptr() == storage
        ]
        if len(near) > 1:
            address = tensor.data_ptr()
            if self._apart:
                near = [index for index in near if _has(self._arguments[index], address)][:1]
            else:
                near = [index for index in near if self._arguments[index].data_ptr() == address]
            if len(near) != 1:  # the next time they may lie differently
                raise LookupError
        return near[0] if near else None

    def _owner(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Argument or result and its index; None for memory that lives as long as the group."""
        index = self._argument(tensor)
        if index is not None:
            return 0, index
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._made:
            return 1, self._made[storage]
        if storage in self._lasting:
            return None
        raise LookupError

    def _address(self, tensor: torch.Tensor) -> Address | None:
        owner = self._owner(tensor)
        if owner is None:
            return None
        kind, index = owner
        base = tensor.untyped_storage().data_ptr()
        if kind == 0:
            base = self._arguments[index].data_ptr()
        return kind, index, tensor.data_ptr() - base

    def _view(self, tensor: torch.Tensor) -> PlannedTensor:
        owner = self._owner(tensor)
        if owner is None:
            return tensor
        kind, index = owner
        shape, strides, offset = _form(tensor)
        first = 0
        if kind == 0:
            argument = self._arguments[index]
            first = int(argument.storage_offset())
            dtype, offset = argument.dtype, offset - first
        else:
            dtype = self.results[index][0]
        if dtype != tensor.dtype:
            if kind or tensor.dtype != torch.uint8 or not self._apart:
                raise LookupError
            return Bytes(index, shape[0], offset + first - first * dtype.itemsize)
        return kind, index, shape, strides, offset


@dataclass(frozen=True)
class _Leaf:
    view: View


def _has(dense: torch.Tensor, address: int) -> bool:
    return dense.data_ptr() <= address < dense.data_ptr() + max(1, dense.nbytes)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def viewed(
    view: PlannedTensor, arguments: list[torch.Tensor], results: list[torch.Tensor]
) -> torch.Tensor:
    if isinstance(view, torch.Tensor):
        return view
    if isinstance(view, Bytes):
        return bytes_of(arguments[view.index].detach())[view.offset : view.offset + view.count]
    kind, index, shape, strides, offset = view
    base = results[index] if kind else arguments[index].detach()
    return base.as_strided(shape, strides, offset + base.storage_offset())


def built(tree: Any, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> Any:
    if isinstance(tree, _Leaf):
        return viewed(tree.view, arguments, results)
    if isinstance(tree, (tuple, list)):
        return type(tree)(built(each, arguments, results) for each in tree)
    return tree
