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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from interlace.runtime.compat.torch_modes import PLAIN_TYPES, modes_active
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current
from interlace.runtime.core.hooks import Form
from interlace.runtime.core.kernel_arguments import ALIGNMENT
from interlace.runtime.core.memory import CHANNELS, Workspace
from interlace.runtime.core.stream import Outcome, Settled
from interlace.runtime.core.work import Work
from interlace.runtime.places.gpu.device_place import DevicePlace
from interlace.runtime.places.gpu.plan_recorder import (
    WHOLE,
    Copied,
    Launched,
    Plan,
    PlanRecorder,
    PlanStep,
    Signalled,
    built,
    viewed,
)
from interlace.runtime.places.gpu.stream import DeviceEvent, DeviceStream, Point, StreamTarget

MOST_PLANS = 512
COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))

_MISSED: Any = object()


@dataclass(slots=True)
class _Again:
    """A call that is made again: its plan, its tensors and their addresses."""

    kind: Any
    plan: Plan
    arguments: list[torch.Tensor]
    addresses: list[int]


class PlanAgreement(Protocol):
    """The methods of ``cuda_processes/agreement.py`` that plans need."""

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
        self._plans: dict[Any, Plan] = {}
        self._end: DeviceEvent | None = None
        # the message of a call, and the answers to it, that had to go the long way for them
        self._answered: tuple[bytes, list[bytes]] | None = None
        self.hits = 0

    # -- the short way -------------------------------------------------------------------------

    def again(
        self, form: Form, tensors: Sequence[Any], options: tuple[Any, ...], *, async_op: bool
    ) -> tuple[Any] | None:
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

    def _repeated(self, op: str, call: _Again, outputs: Any, *, async_op: bool) -> Any:
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

    def _run(self, call: _Again) -> Any:
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

    def learn(self, op: str, result: Any) -> None:
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
