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

A :class:`PlanRecorder` sees the call go the long way. What it makes of it, a :class:`Plan`, knows memory
as "so many bytes into argument i" or "into result k", or by address if it lasts as long as the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from interlace.runtime.compat.torch_modes import PLAIN_TYPES, modes_active
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current
from interlace.runtime.core.hooks import Form
from interlace.runtime.core.launch import ALIGNMENT, KernelLaunch
from interlace.runtime.core.memory import CHANNELS, SymmetricBuffer, Workspace, bytes_of
from interlace.runtime.core.stream import Outcome, Settled
from interlace.runtime.core.work import Work
from interlace.runtime.places.gpu.device_place import DevicePlace
from interlace.runtime.places.gpu.launch import PreparedLaunch
from interlace.runtime.places.gpu.stream import (
    DeviceEvent,
    DeviceStream,
    Point,
    StreamTarget,
    programs_of,
)

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
    tree: object


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

    def note(self, stream: DeviceStream, item: object) -> None:
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

    def tree(self, result: object) -> object:
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

    def is_whole(self, result: object) -> bool:
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


def built(tree: object, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> Any:
    if isinstance(tree, _Leaf):
        return viewed(tree.view, arguments, results)
    if isinstance(tree, (tuple, list)):
        return type(tree)(built(each, arguments, results) for each in tree)
    return tree


MOST_PLANS = 512
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))

_MISSED: Any = object()


@dataclass(slots=True)
class _Again:
    """A call that is made again: its plan, its tensors and their addresses."""

    kind: object
    plan: Plan
    arguments: list[torch.Tensor]
    addresses: list[int]


class PlanAgreement(Protocol):
    """The methods of ``agreement.py`` that plans need."""

    def agree(self, call: Call) -> list[bytes]: ...
    def mismatch(self) -> Exception | None: ...
    def launched(self) -> None: ...


class Plans:
    """The plans of one communicator on a GPU; ``check_processes`` raises what its group has failed with."""

    def __init__(
        self,
        communicator: Communicator,
        place: DevicePlace,
        agreement: PlanAgreement,
        check_processes: Callable[[], None],
    ) -> None:
        self._communicator, self._place = communicator, place
        self._agreement, self._check_processes = agreement, check_processes
        self._plans: dict[object, Plan] = {}
        self._end: DeviceEvent | None = None
        # the message of a call, and the answers to it, that had to go the long way for them
        self._answered: tuple[bytes, list[bytes]] | None = None
        self.hits = 0

    # -- the short way -------------------------------------------------------------------------

    def again(
        self, form: Form, tensors: Sequence[object], options: tuple[object, ...], *, async_op: bool
    ) -> tuple[object] | None:
        """(result,) of a call of a known kind, or its (Work,) if ``async_op``.

        None for another, which then goes the long way, and is watched.
        """
        op, into = form.op, form.fills
        if into is None:
            return None
        call = self._prepared(op, tensors, options, into=into)
        if call is None:
            return None
        result = self._repeated(op, call, tensors[0] if into else (), async_op=async_op)
        if result is _MISSED:
            self._place.recorder = PlanRecorder(call.kind, call.arguments, apart=into)
            return None
        self.hits += 1
        return (result,)

    def _prepared(
        self, op: str, tensors: Sequence[Any], options: tuple[Any, ...], *, into: bool
    ) -> _Again | None:
        """The call, if its kind is known; else None, and it is watched if it may be planned."""
        place = self._place
        place.recorder = self._answered = None  # of a call that failed
        if modes_active() or self._communicator.closed:
            return None
        arguments: list[torch.Tensor] = []
        addresses: list[int] = []
        key: list[Any] = [
            op,
            self._communicator.arena.turn % CHANNELS,
            options,
            current().key,
        ]
        try:
            for given in tensors:
                if given is None:
                    key.append(None)
                    continue
                for each in given if type(given) in (list, tuple) else (given,):
                    if each is None:
                        key.append(None)
                    elif type(each) in PLAIN_TYPES and not each.is_neg():
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
            place.recorder = PlanRecorder(kind, arguments, apart=into)
            return None
        return _Again(kind, plan, arguments, addresses)

    def _repeated(self, op: str, call: _Again, outputs: object, *, async_op: bool) -> object:
        """The result of ``call``, made again, or its Work; _MISSED if it has to go the long way."""
        place = self._place
        if place.failure is not None or self._agreement.mismatch() is not None:
            place.check()
        self._check_processes()
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

    def _run(self, call: _Again) -> object:
        place, plan = self._place, call.plan
        if not self._will_lease(plan.steps):
            del self._plans[call.kind]  # the workspaces have grown
            return _MISSED
        if plan.agreed is not None:
            agreed, answers = plan.agreed
            now = self._agreement.agree(agreed)
            if now is not answers and now != answers:
                self._answered = (agreed.message, now)
                return _MISSED
        device = place.device
        results = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in plan.results]
        bases = call.addresses, [result.data_ptr() for result in results]
        for step in plan.steps:
            self._repeat(step, bases, call.arguments, results)
        self._agreement.launched()
        return results[0] if plan.tree is WHOLE else built(plan.tree, call.arguments, results)

    def _will_lease(self, steps: Sequence[PlanStep]) -> bool:
        """Whether the next ops would get the workspace, or the words, of each step, one after another."""
        arena = self._communicator.arena
        turn = arena.turn
        for step in steps:
            if step.workspace is None:
                if arena.words is None or arena.words.buffer is not step.words[0]:  # type: ignore[index]
                    return False
                continue
            channel = arena.channels[turn % CHANNELS]
            if channel is None or channel.buffer is not step.workspace.buffer:
                return False
            turn += 1
        return True

    def _leased_again(self, workspace: Workspace) -> Workspace:
        """The next workspace, which is ``workspace``, free for ops that push."""
        self._communicator.arena.turn += 1
        if self._communicator.was_pulled(workspace):
            self._communicator.compute.wait_credits(workspace)
        return workspace

    def _repeat(
        self,
        step: PlanStep,
        bases: tuple[list[int], list[int]],
        arguments: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        communicator, place = self._communicator, self._place
        stream = communicator.compute
        assert isinstance(stream, DeviceStream)
        workspace = step.workspace and self._leased_again(step.workspace)
        if step.programs:
            stream.admit(step.programs)
        target = stream.enter()
        for item in step.items:
            if type(item) is Launched:
                prepared = item.prepared
                if item.addresses or prepared.scratch is not None:  # which is of one launch
                    values = prepared.values.copy()
                    for position, of_results, index, offset in item.addresses:
                        values[position] = bases[of_results][index] + offset
                    prepared.again(*target, values)
                else:
                    prepared.run(target[0])
            elif type(item) is Signalled:
                assert workspace is not None
                item.again(stream, workspace)
            else:
                assert isinstance(item, Copied)
                destination = viewed(item.destination, arguments, results)
                stream.copy(destination, viewed(item.source, arguments, results), "planned")
        stream.ended()
        if workspace is None:
            assert step.words is not None
            place.counts(*step.words)
            return
        place.finished(workspace)
        communicator.ended(workspace, self._end_of(target), pulled=step.pulled)

    def _end_of(self, target: StreamTarget) -> DeviceEvent:
        """The end of what is enqueued; one for all ops as long as nobody had to wait for it."""
        end = self._end
        if end is None or end.points[0].target != target or end.points[0].recorded:
            end = self._end = DeviceEvent()
            end.points, end.submitted = [Point(target)], True
        return end

    # -- the long way, watched -----------------------------------------------------------------

    def agree(self, call: Call) -> list[bytes]:
        """Every rank's message of ``call``, which may be a part of what is being planned."""
        answered, self._answered = self._answered, None
        if answered is not None and answered[0] == call.message:
            answers = answered[1]
        else:
            answers = self._place.agree(call)
        if self._place.recorder is not None:
            self._place.recorder.agreed(call, answers)
        return answers

    def lasting_tensors(self) -> list[torch.Tensor]:
        """The tensors on the device that live as long as the group does."""
        arena = self._communicator.arena
        buffers = arena.buffers() + ([] if arena.words is None else [arena.words.buffer])
        memory = [part for buffer in buffers for part in buffer.peer_bytes]
        tables = self._communicator.tables.lasting.values()
        return [*tables, *(buffer.peers for buffer in buffers), *memory]

    def launched(self) -> None:
        """The host has enqueued all that it has agreed on."""
        self._agreement.launched()

    def learn(self, op: str, result: object) -> None:
        """The call of ``op`` that went the long way has returned ``result``."""
        self.launched()
        recorder, self._place.recorder = self._place.recorder, None
        if recorder is None or recorder.kind[0] != op:
            return
        plan = recorder.plan(result, self.lasting_tensors())
        if plan is not None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[recorder.kind] = plan


def _where_they_lie(
    key: list[Any], given: Sequence[Any], tensors: list[torch.Tensor], addresses: list[int]
) -> bool:
    """Add to ``key`` how ``given`` (all: ``tensors``) lie to the first; False if not dense, or apart."""
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
