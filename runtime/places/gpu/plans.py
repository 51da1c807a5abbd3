"""Plans: a call on a GPU like an earlier one costs the host almost nothing.

All that Python does between the call and the launches (checks, algorithm, configuration, grid, tables,
arguments) follows from the shapes, strides, dtypes and options of the call and from what the ranks have
agreed on. So the first call of a kind is watched: what it enqueues is recorded, with its addresses as "so
many bytes into argument i" or "into result k". The next call makes new results, fills in the addresses, and
launches::

    again     known kind?  ranks still agree?  same workspaces?   then launch, and return the results
    learn     at the end of a call without a plan: make one, if all that it has enqueued can be repeated

Kernels, copies and signals on the group's ``compute`` stream can be repeated, if their tensors are
arguments, results, or live as long as the group (workspaces, tables). Torch code, temporaries and the copy
stream cannot; such calls never have a plan. There is a plan for every workspace that a call may use,
because they are used in turn. A plan holds no tensor of a caller's; it knows memory by address only if it
lives as long as the group.

Agreement is as for every call (``Place.agree``). If it has changed, as with shards of another length, the
call continues without the plan, with the answers that it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from interlace.runtime.places.gpu.agreement import Agreement
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

Tensors = list[torch.Tensor]
Counted = tuple[SymmetricBuffer, int]
"""Memory in which the programs of a kernel without workspace count themselves, and their number."""
Address = tuple[int, int, int]
"""0 for an argument, 1 for a result; its index; bytes from its first element."""


@dataclass(frozen=True)
class View:
    """Like :data:`Address`, with shape, strides and offset in elements."""

    kind: int
    index: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


@dataclass
class Launched:
    """A kernel with its values, and the positions of addresses that differ from call to call."""

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
    """A signal by the stream itself: the method's name, and its arguments. The epoch is read again."""

    method: str
    arguments: tuple[int, ...]

    def again(self, stream: DeviceStream, workspace: Workspace) -> None:
        getattr(stream, self.method)(workspace, *self.arguments)


@dataclass
class PlanStep:
    """The items of one ``enqueue``, the finish last; ``words``: for a kernel without workspace."""

    workspace: Workspace | None
    pulled: bool
    items: list[Launched | Copied | Signalled] = field(default_factory=list)
    programs: int = 0  # programs of all its kernels
    words: Counted | None = None


@dataclass
class Plan:
    """``results``: dtype and shape of each; ``tree``: what the call returns, as views of them."""

    agreed: tuple[Call, list[bytes]] | None
    steps: list[PlanStep]
    results: list[tuple[torch.dtype, Sequence[int]]]
    tree: object


class PlanRecorder:
    """A record of a call's enqueues. ``apart`` includes how ``arguments`` are placed to each other."""

    def __init__(self, kind: Any, arguments: Tensors, *, apart: bool = False) -> None:
        self.kind, self._arguments, self._apart = kind, arguments, apart
        self._agreed: list[tuple[Call, list[bytes]]] = []
        self._steps: list[PlanStep] = []
        self._items: list[list[Any]] = []  # the items of each step, as recorded
        self._open = self._spoilt = False

    def agreed(self, call: Call, answers: list[bytes]) -> None:
        self._agreed.append((call, answers))

    def begins(
        self, workspace: Workspace | None, *, pulled: bool = False, words: Counted | None = None
    ) -> None:
        """Begin a step with these fields: an ``enqueue`` is about to put its items on the streams."""
        self._steps.append(PlanStep(workspace, pulled, words=words))
        self._items.append([])
        self._open = True

    def signalled(self, stream: DeviceStream, method: str, *arguments: int) -> None:
        if self._open:  # otherwise it is the wait before the op for the credits of the previous one
            self.note(stream, Signalled(method, arguments))

    def note(self, stream: DeviceStream, item: object) -> None:
        """Record ``item``: a launch and its prepared form, a copy's destination and source, a signal."""
        if not self._open or not stream.follows:
            self._spoilt = True
        else:
            self._items[-1].append(item)

    def finished(self) -> None:
        self._open = False

    def spoil(self) -> None:
        """Give the call no plan: it has done something that cannot be repeated."""
        self._spoilt = True

    def plan(self, result: Any, lasting: Sequence[torch.Tensor]) -> Plan | None:
        """Return the plan, or None if something that was recorded cannot be repeated."""
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
    """Finds the tensor of an address. LookupError for memory that will not exist the next time."""

    def __init__(self, arguments: Tensors, lasting: Sequence[torch.Tensor], *, apart: bool) -> None:
        self._arguments, self._apart = arguments, apart
        self._lasting = {tensor.untyped_storage().data_ptr() for tensor in lasting}
        self._made: dict[int, int] = {}  # storages of results, by address
        self.results: list[tuple[torch.dtype, Sequence[int]]] = []

    def tree(self, result: object) -> object:
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if self._argument(result) is not None:  # the caller has made it
                if isinstance(view := self._view(result), Bytes):
                    raise LookupError
                return view
            if storage.data_ptr() not in self._made:
                self._made[storage.data_ptr()] = len(self.results)
                self.results.append((result.dtype, (storage.nbytes() // result.element_size(),)))
            index = self._made[storage.data_ptr()]
            if self.results[index][0] != result.dtype:
                raise LookupError
            return View(1, index, *_form(result))
        if isinstance(result, (tuple, list)):
            return type(result)(self.tree(each) for each in result)
        if result is None or isinstance(result, bool):
            return result
        raise LookupError

    def is_whole(self, result: object) -> bool:
        """Return whether the call returns one dense tensor that covers all of its storage."""
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
        addresses = [
            (position, *address)
            for position, value in enumerate(second.in_order(first.values()))
            if isinstance(value, torch.Tensor) and (address := self._address(value)) is not None
        ]
        return Launched(second, addresses)

    def _argument(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the argument in ``tensor``'s storage; of several, the one with its beginning.

        If their relative places are known, it is any one that has its beginning.
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
            if len(near) != 1:  # the next time they may be placed differently
                raise LookupError
        return near[0] if near else None

    def _owner(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return 0 or 1 (argument or result) and its index; None for memory of the group's lifetime."""
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
        if (owner := self._owner(tensor)) is None:
            return None
        kind, index = owner
        base = tensor.untyped_storage() if kind else self._arguments[index]
        return kind, index, tensor.data_ptr() - base.data_ptr()

    def _view(self, tensor: torch.Tensor) -> PlannedTensor:
        if (owner := self._owner(tensor)) is None:
            return tensor
        kind, index = owner
        shape, strides, offset = _form(tensor)
        first, dtype = 0, self.results[index][0] if kind else self._arguments[index].dtype
        if not kind:
            first = int(self._arguments[index].storage_offset())
        if dtype != tensor.dtype:
            if kind or tensor.dtype != torch.uint8 or not self._apart:
                raise LookupError
            return Bytes(index, shape[0], offset - first * dtype.itemsize)
        return View(kind, index, shape, strides, offset - first)


def _has(dense: torch.Tensor, address: int) -> bool:
    return dense.data_ptr() <= address < dense.data_ptr() + max(1, dense.nbytes)


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def view_of(view: PlannedTensor, arguments: Tensors, results: Tensors) -> torch.Tensor:
    if isinstance(view, torch.Tensor):
        return view
    if isinstance(view, Bytes):
        return bytes_of(arguments[view.index].detach())[view.offset : view.offset + view.count]
    base = results[view.index] if view.kind else arguments[view.index].detach()
    return base.as_strided(view.shape, view.strides, view.offset + base.storage_offset())


def built(tree: object, arguments: Tensors, results: Tensors) -> Any:
    if isinstance(tree, View):
        return view_of(tree, arguments, results)
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
    arguments: Tensors
    addresses: list[int]


class Plans:
    """The plans of one communicator on a GPU. ``check_processes`` raises the error of its group."""

    def __init__(
        self,
        communicator: Communicator,
        place: DevicePlace,
        agreement: Agreement,
        check_processes: Callable[[], None],
    ) -> None:
        self._communicator, self._place = communicator, place
        self._agreement, self._check_processes = agreement, check_processes
        self._plans: dict[object, Plan] = {}
        self._end: DeviceEvent | None = None
        # the message of a call whose answers ruled out its plan, and these answers
        self._answered: tuple[bytes, list[bytes]] | None = None
        self.hits = 0

    def again(
        self, form: Form, tensors: Sequence[object], options: tuple[object, ...], *, async_op: bool
    ) -> tuple[object] | None:
        """Repeat a call of a known kind: (result,), or (its Work,) if ``async_op``; None for others."""
        op, into = form.op, form.fills
        if into is None:
            return None
        if (call := self._prepare(op, tensors, options, into=into)) is None:
            return None
        result = self._repeat_call(op, call, tensors[0] if into else (), async_op=async_op)
        if result is _MISSED:
            self._place.recorder = PlanRecorder(call.kind, call.arguments, apart=into)
            return None
        self.hits += 1
        return (result,)

    def _prepare(
        self, op: str, tensors: Sequence[Any], options: tuple[Any, ...], *, into: bool
    ) -> _Again | None:
        """Return the call if its kind is known. Otherwise return None, and watch the call if possible."""
        place = self._place
        place.recorder = self._answered = None  # left by a call that failed
        if modes_active() or self._communicator.closed:
            return None
        arguments: Tensors = []
        addresses: list[int] = []
        turn = self._communicator.arena.turn % CHANNELS
        key: list[Any] = [op, turn, options, current().key]
        try:
            for operand in tensors:
                if operand is None:
                    key.append(None)
                    continue
                for each in operand if type(operand) in (list, tuple) else (operand,):
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
                key.append(0)  # the end of a list
            if into:
                if not _where_they_lie(key, tensors, arguments, addresses):
                    return None
            elif arguments and arguments[0].dtype is torch.float32:
                key.append(torch.get_float32_matmul_precision())
            kind = tuple(key)
            plan = self._plans.get(kind)
        except (LookupError, RuntimeError, TypeError):
            # it is not a tensor, has no strides, or is an option that is a list
            return None
        if plan is None:
            place.recorder = PlanRecorder(kind, arguments, apart=into)
            return None
        return _Again(kind, plan, arguments, addresses)

    def _repeat_call(self, op: str, call: _Again, outputs: object, *, async_op: bool) -> object:
        """Make ``call`` again and return its result or Work; _MISSED if it has to be made without plan."""
        place = self._place
        if place.failure is not None or self._agreement.mismatch() is not None:
            place.check()
        self._check_processes()
        place.enter()
        try:
            if async_op:
                return self._start_on_stream(op, call, outputs)
            return self._run(call)
        finally:
            place.leave()

    def _start_on_stream(self, op: str, call: _Again, outputs: Any) -> Any:
        """Repeat ``call`` on the group's own stream and return its Work."""
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
        filled = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return Work(op, place, Settled(Outcome(result, end)), filled)

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
        addresses = [result.data_ptr() for result in results]
        for step in plan.steps:
            self._repeat(step, call, results, addresses)
        self._agreement.ops.launched()
        return results[0] if plan.tree is WHOLE else built(plan.tree, call.arguments, results)

    def _will_lease(self, steps: Sequence[PlanStep]) -> bool:
        """Return whether the next ops would get the workspace, or the words, of each step in turn."""
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
        """Return the next workspace, which is ``workspace``, free for ops that push."""
        self._communicator.arena.turn += 1
        if self._communicator.was_pulled(workspace):
            self._communicator.compute.wait_credits(workspace)
        return workspace

    def _repeat(self, step: PlanStep, call: _Again, results: Tensors, addresses: list[int]) -> None:
        communicator, place, bases = self._communicator, self._place, (call.addresses, addresses)
        stream = communicator.compute
        assert isinstance(stream, DeviceStream)
        workspace = step.workspace and self._leased_again(step.workspace)
        if step.programs:
            stream.admit(step.programs)
        target = stream.enter()
        for item in step.items:
            if type(item) is Launched:
                prepared = item.prepared
                if item.addresses or prepared.scratch is not None:  # scratch belongs to one launch
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
                destination = view_of(item.destination, call.arguments, results)
                stream.copy(destination, view_of(item.source, call.arguments, results), "planned")
        stream.ended()
        if workspace is None:
            assert step.words is not None
            place.counts(*step.words)
            return
        place.finished(workspace)
        communicator.ended(workspace, self._end_of(target), pulled=step.pulled)

    def _end_of(self, target: StreamTarget) -> DeviceEvent:
        """Return the end of what is enqueued; one object for all ops until something waits for it."""
        end = self._end
        if end is None or end.points[0].target != target or end.points[0].recorded:
            end = self._end = DeviceEvent()
            end.points, end.submitted = [Point(target)], True
        return end

    def agree(self, call: Call) -> list[bytes]:
        """Return every rank's message of ``call``, which may be a part of what is being recorded."""
        answered, self._answered = self._answered, None
        if answered is not None and answered[0] == call.message:
            answers = answered[1]
        else:
            answers = self._place.agree(call)
        if self._place.recorder is not None:
            self._place.recorder.agreed(call, answers)
        return answers

    def lasting_tensors(self) -> Tensors:
        """Return the tensors on the device that live as long as the group."""
        arena = self._communicator.arena
        buffers = arena.buffers() + ([] if arena.words is None else [arena.words.buffer])
        memory = [part for buffer in buffers for part in buffer.peer_bytes]
        tables = self._communicator.tables.lasting.values()
        return [*tables, *(buffer.peers for buffer in buffers), *memory]

    def launched(self) -> None:
        """Record that the host has enqueued all that it has agreed on."""
        self._agreement.ops.launched()

    def learn(self, op: str, result: object) -> None:
        """Make a plan of the call of ``op`` that was made without one and has returned ``result``."""
        self.launched()
        recorder, self._place.recorder = self._place.recorder, None
        if recorder is None or recorder.kind[0] != op:
            return
        if (plan := recorder.plan(result, self.lasting_tensors())) is not None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[recorder.kind] = plan


def _where_they_lie(
    key: list[Any], operands: Sequence[Any], tensors: Tensors, addresses: list[int]
) -> bool:
    """Add to ``key`` how ``operands`` (all: ``tensors``) lie to the first. False if not dense or apart."""
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.dtype in COMPLEX and tensor.is_conj()):
            return False
    first = last = index = 0
    for operand in operands:
        start = end = addresses[index]
        for _ in range(1 if isinstance(operand, torch.Tensor) else len(operand)):
            if addresses[index] != end:
                return False
            end += tensors[index].nbytes
            index += 1
        if not last:
            first, last = start, end
        else:
            key.append(start - first if start < last and first < end else None)
    return True
