"""Plans: a call on a GPU whose like was made before costs the host next to nothing.

All that Python does between the call and the launches - checks, algorithm, configuration, grid, tables,
arguments - follows from the shapes, strides, dtypes and options of the call and from what the ranks have
agreed on. So the first call of its kind is watched, and what it enqueues is written down with its addresses
as "so many bytes into argument i", or "into result k"; the next makes new results, puts addresses in their
place, and launches::

    again     known kind?  ranks still agree?  same workspaces?   then launch, and return the results
    learn     at the end of a call that went the long way: a plan, if all it has enqueued can be repeated

What can be: kernels, copies and signals on the group's ``compute`` stream, whose tensors are arguments,
results, or live as long as the group (workspaces, tables). Torch code, temporaries and the copy stream
cannot; such calls go the long way every time. There is a plan for every workspace that a call may come to,
for they are used in turn. A plan holds no tensor of a caller's.

Agreement is as for every call (``Place.agree``). If it has changed, as with shards of another length,
the long way goes on with the answers that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from interlace.runtime import configuration
from interlace.runtime.call import Call
from interlace.runtime.cuda_launch import ALIGNMENT, Prepared
from interlace.runtime.cuda_stream import DeviceEvent, DeviceStream, Point, Target
from interlace.runtime.device_place import DevicePlace
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import Layout, Workspace, bytes_of
from interlace.runtime.stream import Outcome, Settled
from interlace.runtime.work import Work

if TYPE_CHECKING:
    from interlace.runtime.communicator import Communicator

MOST_PLANS = 512
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_MISSED: Any = object()
_WHOLE: Any = object()  # the tree of a call that returns its one result

modes_active = torch._C._len_torch_dispatch_stack

Address = tuple[int, int, int]
"""0 of an argument, 1 of a result; its index; bytes from its first element."""
View = tuple[int, int, torch.Size, tuple[int, ...], int]
"""As :data:`Address`, with shape, strides and offset in elements."""


@dataclass
class Launched:
    """A kernel with its values, and which of them are addresses that differ from call to call."""

    prepared: Prepared
    addresses: list[tuple[int, int, int, int]]  # position, and an Address


@dataclass(frozen=True)
class Bytes:
    """``count`` bytes of a dense argument from byte ``offset`` on, flat."""

    index: int
    count: int
    offset: int


Part = View | Bytes | torch.Tensor


@dataclass
class Copied:
    destination: Part
    source: Part


@dataclass
class Signalled:
    """A publish, a wait, or a wait for credits by the stream itself: the name of the method, and for what.

    It takes the epoch anew, and is done by a kernel in a graph capture, as the first time it would be.
    """

    method: str
    arguments: tuple[int, ...]

    def again(self, stream: DeviceStream, workspace: Workspace) -> None:
        getattr(stream, self.method)(workspace, *self.arguments)


@dataclass
class Step:
    """What one ``Communicator.enqueue`` has put on the stream, the finish last."""

    workspace: Workspace
    pulled: bool
    items: list[Launched | Copied | Signalled] = field(default_factory=list)


@dataclass
class Plan:
    """``results``: dtype and shape of each; ``tree``: what the call returns, in views of them."""

    agreed: tuple[Call, list[bytes]] | None
    steps: list[Step]
    results: list[tuple[torch.dtype, Sequence[int]]]
    tree: Any


@dataclass(slots=True)
class _Again:
    """A call that is made again: its plan, its tensors and their addresses."""

    kind: Any
    plan: Plan
    arguments: list[torch.Tensor]
    addresses: list[int]


class Plans:
    """The plans of one communicator on a GPU."""

    def __init__(self, communicator: Communicator, place: DevicePlace) -> None:
        self._communicator, self._place = communicator, place
        self._plans: dict[Any, Plan] = {}
        self._end: DeviceEvent | None = None
        self.hits = 0

    # -- the short way -------------------------------------------------------------------------

    def again(
        self, op: str, tensors: Sequence[Any], options: tuple[Any, ...], *, async_op: bool
    ) -> tuple[Any] | None:
        """(result,) of a fused call of a known kind, or its (Work,) if ``async_op``.

        None for another, which then goes the long way, and is watched.
        """
        call = self._prepared(op, tensors, options, into=False)
        if call is None:
            return None
        result = self._repeated(op, call, (), async_op=async_op)
        if result is _MISSED:
            self._place.watcher = Watcher(call.kind, call.arguments)
            return None
        self.hits += 1
        return (result if async_op or result is not None else True,)

    def again_into(
        self,
        op: str,
        outputs: torch.Tensor | Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        options: tuple[Any, ...],
        *,
        async_op: bool,
    ) -> tuple[Work | None] | None:
        """As :meth:`again`, of a plain collective that fills ``outputs``: (its Work or None,)."""
        call = self._prepared(op, (outputs, *inputs), options, into=True)
        if call is None:
            return None
        result = self._repeated(op, call, outputs, async_op=async_op)
        if result is _MISSED:
            self._place.watcher = Watcher(call.kind, call.arguments, apart=True)
            return None
        self.hits += 1
        return (result,)

    def _prepared(
        self, op: str, tensors: Sequence[Any], options: tuple[Any, ...], *, into: bool
    ) -> _Again | None:
        """The call, if its kind is known; else None, and it is watched if it may be planned.

        ``into``: the op writes the first of ``tensors``.
        """
        place = self._place
        place.watcher = self._communicator.answered = None  # of a call that failed
        if modes_active() or configuration.overridden() or self._communicator.closed:
            return None
        arguments: list[torch.Tensor] = []
        addresses: list[int] = []
        key: list[Any] = [op, self._communicator.next_channel, options]
        try:
            for given in tensors:
                if given is None:
                    key.append(None)
                    continue
                for each in given if type(given) in (list, tuple) else (given,):
                    if each is None:
                        key.append(None)
                    elif type(each) in PLAIN and not each.is_neg():
                        address = each.data_ptr()
                        key += (
                            each.shape, each.stride(), each.dtype, each.get_device(),
                            address % ALIGNMENT,
                        )  # fmt: skip
                        arguments.append(each)
                        addresses.append(address)
                    else:
                        return None
                key.append(0)  # where a list ends
            if into:
                if not _where_they_lie(key, tensors, arguments, addresses):
                    return None
            elif arguments and arguments[0].dtype is torch.float32:
                key.append(torch.get_float32_matmul_precision())
            kind = tuple(key)
            plan = self._plans.get(kind)
        except (LookupError, RuntimeError, TypeError):
            # no tensor, one without strides, an option that is a list
            return None
        if plan is None:
            place.watcher = Watcher(kind, arguments, apart=into)
            return None
        return _Again(kind, plan, arguments, addresses)

    def _repeated(self, op: str, call: _Again, outputs: Any, *, async_op: bool) -> Any:
        """The result of ``call``, made again, or its Work; _MISSED if it has to go the long way."""
        place = self._place
        place.check()
        place.enter()
        try:
            if async_op:
                return self._started(op, call, outputs)
            return self._run(call)
        finally:
            place.leave()

    def _started(self, op: str, call: _Again, outputs: Any) -> Any:
        """Repeat ``call`` on the group's own stream; its Work."""
        place, stream = self._place, self._communicator.compute
        assert isinstance(stream, DeviceStream)
        before, place.asynchronous = place.asynchronous, True
        try:
            stream.follow(place.start())
            result = self._run(call)
            if result is _MISSED:
                return _MISSED
            end = DeviceEvent()
            stream.mark(end)
        finally:
            place.asynchronous = before
        place.in_flight(end, [call.arguments, result])
        given = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return Work(op, place, Settled(Outcome(result, end)), given)

    def _run(self, call: _Again) -> Any:
        communicator, place, plan = self._communicator, self._place, call.plan
        if not communicator.will_lease(plan.steps):
            del self._plans[call.kind]  # the workspaces have grown
            return _MISSED
        if plan.agreed is not None:
            agreed, answers = plan.agreed
            now = place.agree_again(agreed)
            if now is not answers and now != answers:
                communicator.answered = (agreed.message, now)
                return _MISSED
        device = place.device
        results = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in plan.results]
        bases = call.addresses, [result.data_ptr() for result in results]
        for step in plan.steps:
            self._repeat(step, bases, call.arguments, results)
        return results[0] if plan.tree is _WHOLE else _built(plan.tree, results)

    def _repeat(
        self,
        step: Step,
        bases: tuple[list[int], list[int]],
        arguments: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        communicator, place = self._communicator, self._place
        stream = communicator.compute
        assert isinstance(stream, DeviceStream)
        workspace = communicator.lease_again(step.workspace)
        target = stream.enter()
        for item in step.items:
            if type(item) is Launched:
                prepared = item.prepared
                if item.addresses or not prepared.repeatable:
                    values = prepared.values.copy()
                    for position, of_results, index, offset in item.addresses:
                        values[position] = bases[of_results][index] + offset
                    prepared.again(*target, values)
                else:
                    prepared.run(target[0])
            elif type(item) is Signalled:
                item.again(stream, workspace)
            else:
                assert isinstance(item, Copied)
                destination = _view(item.destination, arguments, results)
                stream.copy(destination, _view(item.source, arguments, results), "planned")
        place.finished(workspace)
        communicator.ended(workspace, self._end_of(target), pulled=step.pulled)

    def _end_of(self, target: Target) -> DeviceEvent:
        """The end of what is enqueued; one for all ops as long as nobody had to wait for it."""
        end = self._end
        if end is None or end.points[0].target != target or end.points[0].recorded:
            end = self._end = DeviceEvent()
            end.points, end.submitted = [Point(target)], True
        return end

    # -- the long way, watched -----------------------------------------------------------------

    def learn(self, op: str, result: Any) -> None:
        """The call of ``op`` that went the long way has returned ``result``."""
        watcher, self._place.watcher = self._place.watcher, None
        if watcher is None or watcher.kind[0] != op:
            return
        plan = watcher.plan(result, self._communicator.lasting_tensors())
        if plan is not None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[watcher.kind] = plan


class Watcher:
    """What a call of a ``kind`` enqueues; ``arguments`` are its tensors.

    ``apart``: how they lie to each other is part of the kind.
    """

    def __init__(self, kind: Any, arguments: list[torch.Tensor], *, apart: bool = False) -> None:
        self.kind, self._arguments, self._apart = kind, arguments, apart
        self._agreed: list[tuple[Call, list[bytes]]] = []
        self._steps: list[tuple[Workspace, bool, list[Any]]] = []
        self._open = self._spoilt = False

    def agreed(self, call: Call, answers: list[bytes]) -> None:
        self._agreed.append((call, answers))

    def begins(self, workspace: Workspace, layout: Layout) -> None:
        """An ``enqueue`` is about to put its items on the streams."""
        self._steps.append((workspace, layout.pulled, []))
        self._open = True

    def launched(self, stream: DeviceStream, launch: KernelLaunch, prepared: Prepared) -> None:
        self._note(stream, (launch, prepared))

    def copied(self, stream: DeviceStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._note(stream, (destination, source))

    def signalled(self, stream: DeviceStream, method: str, *arguments: int) -> None:
        if self._open:  # else it is the wait before the op for the credits of the one before
            self._note(stream, Signalled(method, arguments))

    def _note(self, stream: DeviceStream, item: Any) -> None:
        if not self._open or not stream.follows:
            self._spoilt = True
        else:
            self._steps[-1][2].append(item)

    def finished(self) -> None:
        self._open = False

    def spoil(self) -> None:
        """Something that cannot be repeated."""
        self._spoilt = True

    def plan(self, result: Any, lasting: Sequence[torch.Tensor]) -> Plan | None:
        """The plan, if all that was seen can be repeated."""
        if self._spoilt or self._open or not self._steps or len(self._agreed) > 1:
            return None
        where = _Where(self._arguments, lasting, apart=self._apart)
        try:
            tree = where.tree(result)
            steps = [
                Step(workspace, pulled, [where.item(item) for item in items])
                for workspace, pulled, items in self._steps
            ]
        except LookupError:
            return None
        agreed = self._agreed[0] if self._agreed else None
        if where.is_whole(result):
            return Plan(agreed, steps, [(result.dtype, result.shape)], _WHOLE)
        return Plan(agreed, steps, where.results, tree)


class _Where:
    """Which tensor an address belongs to. LookupError for memory that is not there the next time."""

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
            if self._argument(result) is not None:
                raise LookupError
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
        )

    def item(self, item: Any) -> Launched | Copied | Signalled:
        if isinstance(item, Signalled):
            return item
        first, second = item
        if isinstance(first, torch.Tensor):
            return Copied(self._view(first), self._view(second))
        given = list(first.arguments.values())
        addresses = [
            (position, *address)
            for position, value in enumerate(second.in_order(given))
            if isinstance(value, torch.Tensor) and (address := self._address(value)) is not None
        ]
        return Launched(second, addresses)

    def _argument(self, tensor: torch.Tensor) -> int | None:
        """Of arguments in one storage the one that begins where ``tensor`` does; there must be one such.

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
        """None for what lasts."""
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

    def _view(self, tensor: torch.Tensor) -> Part:
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


def _where_they_lie(
    key: list[Any], given: Sequence[Any], tensors: list[torch.Tensor], addresses: list[int]
) -> bool:
    """Add to ``key`` how what is ``given``, tensors and lists of them, lies to the first of these.

    ``tensors`` are all of them. False if there is no plan for such: one is not dense, or a list not one
    memory.
    """
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.dtype in COMPLEX and tensor.is_conj()):
            return False
    first = last = index = 0
    for each in given:
        start = end = addresses[index]
        for _ in range(1 if isinstance(each, torch.Tensor) else len(each)):
            if addresses[index] != end:
                return False
            end += tensors[index].nbytes
            index += 1
        if not last:
            first, last = start, end
        else:
            key.append(start - first if start < last and first < end else None)
    return True


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _view(view: Part, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> torch.Tensor:
    if isinstance(view, torch.Tensor):
        return view
    if isinstance(view, Bytes):
        return bytes_of(arguments[view.index].detach())[view.offset : view.offset + view.count]
    kind, index, shape, strides, offset = view
    base = results[index] if kind else arguments[index].detach()
    return base.as_strided(shape, strides, offset + base.storage_offset())


def _built(tree: Any, results: list[torch.Tensor]) -> Any:
    if isinstance(tree, _Leaf):
        return _view(tree.view, [], results)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_built(each, results) for each in tree)
    return tree
