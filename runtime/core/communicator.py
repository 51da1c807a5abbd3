"""A communicator: one group of ranks, with its place, arena, streams and plans.

Every op of a group is an :func:`internal_form`. Its call has these steps::

    plan     on a GPU, a repeated call is enqueued from its plan, and the other steps are skipped
    check    validate the caller's arguments; if one rank refuses, all ranks refuse
    agree    ranks exchange their calls; a mismatch is an error before any byte moves
    lease    a workspace from the arena
    enqueue  copies, kernels and signals on the group's two streams
    finish   credit to the peers, epoch + 1
    Work     a handle on the result

Ops of one group run in the order of the calls. Groups share no memory and no streams, but a call waits
on the host for the other ranks' agreement. So ranks that share several groups must call their ops in the
same order, as torch.distributed requires too.
"""

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from interlace.runtime.compat.torch_modes import (
    above_autograd,
    foreign_modes,
    is_traced,
    modes_active,
    without_modes,
)
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call, PreparedCall, Start, Terms
from interlace.runtime.core.context import current
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import DeadlockError, DifferentOpsError, InterlaceError
from interlace.runtime.core.hooks import Form, Hook, HookedOp, OpHooks, log
from interlace.runtime.core.memory import Arena, Layout, Tables, Workspace
from interlace.runtime.core.place import Nodes, Place, positive_seconds
from interlace.runtime.core.stream import NOTHING, Event, Outcome, Settled
from interlace.runtime.core.work import Work

MESSAGE_LENGTH = 2000
MOST_CALLS = 1024


class Communicator:
    """One rank's view of a group.

    ``ranks`` are the group's members as ranks of the default group. Not to be shared by threads. Made by
    :func:`interlace.new_group`, :meth:`split` and so on; every op takes it as ``group``.

    >>> def on_rank():
    ...     group = interlace.new_group()
    ...     half = group.split([0])
    ...     group.barrier()
    ...     return (group.rank, group.world_size, half and half.ranks)
    >>> interlace.run(on_rank, 2)
    [(0, 2, (0,)), (1, 2, None)]
    """

    def __init__(self, place: Place, ranks: Sequence[int], hooks: OpHooks | None = None) -> None:
        """Share ``hooks`` with the communicator of the same ranks on another device."""
        self.place = place
        self.ranks = tuple(ranks)
        self.rank = place.rank
        self.device_type = place.device.type
        self.world_size = place.world_size
        place.known_as(self.ranks)
        self.compute = place.new_stream("compute")
        self.copying = place.new_stream("copy", priority=True)
        self.arena = Arena(
            place.allocate,
            self.world_size,
            spin_limit=place.poll_limit(),
            alike=not place.interpreted,
        )
        self.tables = Tables(place)
        self.table = self.tables.table
        self.calls: dict[Any, Call] = {}  # kept to be repeated
        self.derived: dict[Any, Any] = {}  # computed by algorithms from shapes and configurations
        self.numbers: dict[object, int] = {}  # that ranks have exchanged once
        self.plans: Any = place.new_plans(self)
        self._last_on_channel: dict[int, tuple[Event, bool]] = {}
        self._generation = 0
        self._closed = False
        self._out_of_step = ""  # the error, once ranks have called different ops
        self.hooks = OpHooks(self, hooks)
        self._since = time.perf_counter()
        self._log(f"made in {place.joining:.3f} s" if place.joining else "made")

    def on(self, *values: object) -> "Communicator":
        """Return these ranks' communicator on the first tensor's device; ``values`` may hold lists."""
        return self

    def check_recordable(self, *tensors: object) -> None:
        """Raise if autograd must record a call with ``tensors`` on virtual ranks of a GPU."""
        # torch runs all their nodes in the device's one thread: a waiting rank would block the others
        if self.place.virtual and self.world_size > 1 and requires_gradients(*tensors):
            raise InterlaceError(
                f"rank {self.rank}: gradients that communicate need ranks that are processes: "
                'interlace.run(..., place="cuda", processes=True); or call it under torch.no_grad()'
            )

    def on_all_devices(self) -> "Sequence[Communicator]":
        """Return the existing communicators of the same ranks, one per device."""
        return (self,)

    def _number(self, error: Exception, *, own: bool) -> None:
        """Add to ``error`` this rank's number if the error is its ``own``, and the numbering of ranks."""
        if not own:
            vars(error)["told"] = id(self)  # all ranks of this group raise it
        if isinstance(error, DifferentOpsError) and not self._out_of_step:
            self._out_of_step = str(error)
            self.place.fault(self._out_of_step)
        text = error.args[0] if error.args else None
        if not isinstance(text, str):
            return
        if own and f"on rank {self.rank}" not in text and not isinstance(error, InterlaceError):
            text = f"{text} (on rank {self.rank})"
        note = f" (rank r stands for r-th of the group's ranks {list(self.ranks)}, from 0)"
        whose = isinstance(error, DeadlockError) or text.endswith(note)  # it has the note already
        if self.ranks != tuple(range(self.world_size)) and not whose:
            text += note
        error.args = (text, *error.args[1:])

    def agree(self, op: str, part: object) -> list[Any]:
        """Return every rank's ``part`` (small and picklable), by rank. Collective, host only."""
        return self.told(Call(op, part=part))

    def told(self, call: Call) -> list[Any]:
        """Return :meth:`parts` of a call that consists of this exchange alone."""
        parts = self.parts(call)
        if self.plans is not None:
            self.plans.launched()
        return parts

    def parts(self, call: Call, messages: Callable[[Call], list[bytes]] | None = None) -> list[Any]:
        """Return every rank's part of ``call``, by rank, from ``messages(call)``; raise on a mismatch."""
        if self._closed or self._out_of_step:
            raise self._over(call.op)
        try:
            answers = (messages or self.messages)(call)
            if call.match is None and answers.count(call.message) == len(answers):
                return [call.part] * len(answers)
            return call.compared(answers)
        except (TypeError, ValueError, InterlaceError) as error:
            self._number(error, own=False)
            raise

    def messages(self, call: Call) -> list[bytes]:
        """Return every rank's message of ``call``, by rank. Collective, host only."""
        if self.world_size == 1:
            return [call.message]
        if self.plans is None:
            return self.place.exchange(call.message, call.op)
        return self.plans.agree(call)  # type: ignore[no-any-return]

    def accepting(self, op: str = "") -> "_Accepting":
        """Enclose the validation of an op's arguments: if one rank refuses, all ranks refuse.

        Without an ``op`` the other ranks are not notified. Errors name this rank.
        """
        return _Accepting(self, op)

    def refuse(self, op: str, error: Exception) -> None:
        """Notify the other ranks that this one does not take part in ``op``, because of ``error``.

        Otherwise they would wait for this rank, and match its next call with this one. They raise TypeError
        or ValueError. This rank then raises ``error``, of any class, to which its number is added.
        """
        self.place.recorder = None  # the next op is another call
        if vars(error).get("told") == id(self):  # the ranks compared it while they checked
            return
        words = str(error)  # the other ranks add this rank's number themselves
        self._number(error, own=True)
        alone = self.world_size == 1 or self._closed or self._out_of_step
        if isinstance(error, InterlaceError) or alone or not op:
            return
        vars(error)["told"] = id(self)  # an enclosing op does not notify again
        kind = TypeError if isinstance(error, TypeError) else ValueError
        named = words if isinstance(error, kind) else f"{type(error).__name__}: {words}"
        text = named[:MESSAGE_LENGTH]
        message = plain.dumps((op, kind is TypeError, text))  # instead of the terms
        doing = f"{op}, which this rank refused ({kind.__name__}: {text})"
        with contextlib.suppress(InterlaceError):  # the caller must see the misuse
            exchange = functools.partial(self.place.exchange, message, doing)
            self.place.submit(exchange, asynchronous=False).result()

    def barrier(self) -> None:
        """Return once every rank has called it, and the work that the callers issued before has ended."""
        self.place.arrive()
        self.agree("barrier", None)
        self.place.depart()

    def split(self, ranks: Sequence[int]) -> "Communicator | None":
        """Return a communicator over some of this group's ranks; None on the other ranks.

        Collective over this group, so every rank counts the same generations. Raises ValueError on every
        rank if ranks pass different ``ranks``.
        """
        self.told(Call("new_group", (("ranks", list(ranks)),)))
        self._generation += 1  # a rank that refuses does not reach this line
        if self.rank not in ranks:
            return None
        place = self.place.subgroup(tuple(ranks), self._generation)
        return Communicator(place, [self.ranks[rank] for rank in ranks])

    def set_timeout(self, seconds: timedelta | float) -> None:
        """Bound every later wait of this rank in this group by ``seconds``, a number or a timedelta.

        Not collective; groups made from this one later have it too. Raises ValueError if ``seconds`` is not
        positive or is more than a million, TypeError if it is not a number. Does nothing in ``sim``.

        >>> def on_rank():
        ...     interlace.new_group().set_timeout(60)
        >>> interlace.run(on_rank, 2)
        [None, None]
        """
        with self.accepting():
            number = positive_seconds("seconds", seconds)
        for communicator in self.on_all_devices():
            communicator.place.set_timeout(number)

    def reunited(self, ranks: Sequence[int] | None = None) -> tuple[Place, list[int]]:
        """End this group; return the place of the ranks that live, or of ``ranks``, and their numbers."""
        started = time.perf_counter()
        found = self.place.reunited(ranks)
        self._log(f"shrunk to its ranks {found[1]} in {time.perf_counter() - started:.3f} s")
        self.close()
        return found

    def run(
        self, op: str, start: Start, outputs: Sequence[torch.Tensor] = (), async_op: bool = False
    ) -> Any:
        """Run the launch side of an op, whose arguments were checked on this rank.

        ``outputs`` are the caller's tensors that it fills. Returns a :class:`Work` if ``async_op``;
        otherwise orders the caller's later work after the op and returns the result.
        """
        place, hooks = self.place, self.hooks
        if hooks.watching:
            return hooks.run(op, start, outputs, async_op)
        if modes_active() or above_autograd():
            _refuse_other_tensors(op)
            if foreign_modes():  # a selective checkpoint would keep the tensors that the op fills
                with without_modes():
                    return self.run(op, start, outputs, async_op)
        if hooks.naming:
            start = hooks.named(op, start)
        if self._closed or self._out_of_step:
            raise self._over(op)
        place.check()
        worker = place.worker
        idle = worker is None or not worker.unfinished or worker.inside
        if idle and (not async_op or place.alone):
            try:
                started = start()
            except BaseException as error:
                self._abort_on(op, error)
                raise
            outcome = NOTHING if started is None else _outcome(started)
            if self.plans is not None:
                self.plans.learn(op, outcome.result)
            if outcome.event is not None:
                place.hold_current(outcome.event, f"the end of {op}")
                place.check()
            return Work(op, place, Settled(outcome), outputs) if async_op else outcome.result
        try:
            future = place.submit(
                functools.partial(self._run_start, op, start), asynchronous=async_op
            )
        except BaseException as error:
            self._abort_on(op, error)
            raise
        work = Work(op, place, future, outputs)
        if self.plans is not None:
            self.plans.learn(op, future.result().result)  # complete: a GPU's host never waits
        if async_op:
            return work
        work.kept = False
        work.wait()
        return future.result().result

    def _run_start(self, op: str, start: Start) -> Outcome:
        if self._out_of_step:  # because of an op that was queued before this one
            raise self._over(op)
        try:
            return _outcome(start())
        except BaseException as error:
            self._abort_on(op, error)
            raise

    def _abort_on(self, op: str, error: BaseException) -> None:
        """Abort the group, unless all ranks raise ``error``: the other ranks would wait for this one."""
        self.place.recorder = None
        if isinstance(error, (TypeError, ValueError, InterlaceError)):
            self._number(error, own=False)
        elif self.world_size > 1:
            self.place.abort(f"{op} failed with {type(error).__name__}: {error}")

    def transfer(
        self,
        call: Call,
        start: Callable[[Engine], Future[Outcome]],
        tensor: torch.Tensor,
        peer: int | None = None,
        tag: int = 0,
    ) -> Work:
        """Let the engine send or receive ``tensor``; never block, in any order of calls."""
        if self.hooks.watching:
            return self.hooks.transfer(call, start, tensor, peer, tag)  # type: ignore[no-any-return]
        if self._closed or self._out_of_step:
            raise self._over(call.op)
        self.place.check()
        return Work(call.op, self.place, start(self.engine), [tensor])

    def register_hook(
        self,
        before: Callable[[HookedOp], object] | None = None,
        after: Callable[[HookedOp], object] | None = None,
        on_abort: Callable[["Communicator", BaseException], object] | None = None,
    ) -> RemovableHandle:
        """Register functions that are called around every op of this group on this rank.

        Several registrations are called in their order.

        Parameters
        ----------
        before : called with a :class:`HookedOp` before the op. If it raises, all ranks refuse the op,
            like any misuse. For a message this aborts the group, because the peer would wait for it.
        after : called with a :class:`HookedOp` when the op has ended, or when a later hook has refused it.
            For an asynchronous op it runs in the thread that ends the op; for an op on streams (``sim``,
            GPUs), in the ``wait`` or ``is_completed`` that finds it ended. If it raises, the op, or its
            ``Work.wait``, raises the same error.
        on_abort : called once, with the group and the cause, when an op finds that the group was aborted.

        Returns torch's ``RemovableHandle``: ``handle.remove()``, or ``with handle:``. Hooks do not see
        ops that hooks call; ``after`` of an asynchronous op must not call ops.
        Raises TypeError for an argument that is not callable, ValueError if all three are None.

        >>> def on_rank():
        ...     seen, group = [], interlace.new_group()
        ...     with group.register_hook(after=lambda call: seen.append((call.op, *call.inputs))):
        ...         interlace.all_reduce(torch.ones(2), group=group)
        ...     group.barrier()
        ...     return seen
        >>> interlace.run(on_rank, 2)[0]
        [('all_reduce', 'tensor')]
        """
        with self.accepting():
            handle = self.hooks.register(Hook(before, after, on_abort))
        for device in self.on_all_devices():
            device.hooks.watch()
        return handle

    @functools.cached_property
    def engine(self) -> Engine:
        """Return the engine of this group's plain collectives."""
        return self.place.new_engine(self)

    def call_of(self, op: str, terms: Terms, part: object) -> Call:
        """Return the call with these terms, the context's terms and this part; it is kept by all three."""
        before, behind = current().terms
        key = (op, terms := (*before, *terms, *behind), part)
        return self.calls.get(key) or self.remember(key, Call(op, terms, part=part))

    def remember(self, key: object, call: Call) -> Call:
        """Keep ``call`` for the next use of the same ``key``.

        In a group of one rank, which compares nothing later, raises as ``call.match`` does.
        """
        if self.world_size == 1 and call.match is not None:
            call.match((call.part,))
        if len(self.calls) >= MOST_CALLS:
            self.calls.clear()
        self.calls[key] = call
        return call

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> Event:
        """Lease, launch the work that ``body`` puts on the streams, finish; return the event of the end."""
        place = self.place
        workspace = self.arena.lease(layout, op)
        with place.launching():
            start = place.record_current()
            previous, was_pulled = self._last_on_channel.get(workspace.channel, (None, False))
            for stream in (self.compute, self.copying):
                stream.wait_event(start)
                if previous is not None:
                    stream.wait_event(previous)
            if was_pulled:
                # A kernel that pushes waits only for its receiver's credit. A third rank may still read
                # the data that the receiver had staged for it.
                self.compute.wait_credits(workspace)
            if place.recorder is not None:
                place.recorder.begins(workspace, pulled=layout.pulled)
            body(workspace)
            self.compute.wait_event(self.copying.record())
            self.compute.finish(workspace)
            end = self.compute.record()
        self.ended(workspace, end, pulled=layout.pulled)
        return end

    def ended(self, workspace: Workspace, end: Event, *, pulled: bool) -> None:
        """Note the event ``end`` of the op in ``workspace``, and ``pulled`` of its layout."""
        self._last_on_channel[workspace.channel] = (end, pulled)

    def was_pulled(self, workspace: Workspace) -> bool:
        """Return whether peers may still read data that the last op has left in ``workspace``."""
        return self._last_on_channel[workspace.channel][1]

    def _over(self, op: str) -> InterlaceError:
        if self._closed:
            return InterlaceError(f"rank {self.rank}: {op} on a group that was closed")
        return InterlaceError(
            f"rank {self.rank}: {op}: this group was aborted because its ranks are out of step. The first "
            f"mismatch: {self._out_of_step}"
        )

    @property
    def nodes(self) -> Nodes:
        """The ranks of each node, in a place of several nodes."""
        assert self.place.nodes is not None
        return self.place.nodes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of symmetric memory that this group holds on this rank."""
        return self.arena.nbytes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Free the memory once all ops have ended; later calls raise. Idempotent, not collective."""
        if not self._closed:
            self._closed = True
            self.place.finish()
            self.arena.close()
            self.place.close()
            self._log(f"closed after {time.perf_counter() - self._since:.3f} s")

    def _log(self, event: str) -> None:
        log.info("rank %d of group %s on %s: %s", self.rank, [*self.ranks], self.place.name, event)


class _Accepting:
    """The context of ``accepting``; a class, because a generator takes a microsecond longer."""

    __slots__ = ("_communicator", "_op")

    def __init__(self, communicator: Communicator, op: str) -> None:
        self._communicator, self._op = communicator, op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._communicator.refuse(self._op, error)


def _begun(communicator: Communicator, op: str, prepared: PreparedCall, async_op: bool) -> Any:
    return communicator.run(op, prepared[0], prepared[1], async_op)


def requires_gradients(*tensors: Any) -> bool:
    """Return whether autograd must record a call with these tensors and lists of tensors."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is None:  # the most frequent case, and faster than the next question
            continue
        if isinstance(tensor, torch.Tensor):
            if tensor.requires_grad:
                return True
        elif isinstance(tensor, (list, tuple)) and requires_gradients(*tensor):
            return True
    return False


def internal_form(
    op: str,
    check: Callable[..., object],
    *,
    fills: bool | None = None,
    names: Sequence[str] = (),
    begin: Callable[..., object] = _begun,
) -> Callable[..., Work | None]:
    """Return ``op`` for callers that have a communicator: a :class:`Work` if ``async_op``, else the result.

    The call runs from a plan if one exists; otherwise ``check(communicator, *tensors, *options)`` prepares
    it. ``fills``: whether the op fills the first of ``tensors`` (True) or makes its results (False); None
    if no plan may be made. ``names``: names of its arguments, if they differ from ``check``'s.
    """

    def run(
        communicator: Communicator,
        tensors: Sequence[object],
        options: tuple[object, ...] = (),
        async_op: bool = False,
    ) -> Any:
        if communicator.hooks.watching:
            return communicator.hooks.form(form, tensors, options, async_op)
        plans = communicator.plans
        if plans is not None:
            planned = plans.again(form, tensors, options, async_op=async_op)
            if planned is not None:
                return planned[0]
        try:
            prepared = check(communicator, *tensors, *options)
        except Exception as error:
            communicator.refuse(op, error)
            raise
        return begin(communicator, op, prepared, async_op)

    form = Form(op, check, fills, names, run)
    return run


def record_form(
    op: str, arguments: type, tensors: Sequence[str], check: Callable[..., object], **called: str
) -> Callable[..., Any]:
    """Return ``op`` for callers with a record of its arguments.

    Its call is ``form(communicator, given, outputs, async_op)``. As :func:`internal_form`, with
    ``check(communicator, given, outputs)``. ``tensors`` are the fields that are tensors; ``outputs``:
    tensors that the caller has made for the results, or None. ``called``: names of arguments whose fields
    have other names; "" for an argument that hooks do not see.
    """
    option_names = [field.name for field in fields(arguments) if field.name not in tensors]
    # from its dictionary, because attributes take longer
    tensors_of, others_of = operator.itemgetter(*tensors), operator.itemgetter(*option_names)
    order = [*tensors, "outputs", *option_names]

    def check_record(communicator: Communicator, *values: object) -> Any:
        known = dict(zip(order, values, strict=True))
        outputs = known.pop("outputs")
        return check(communicator, arguments(**known), outputs)

    names = [called.get(name, name) for name in order]
    run = internal_form(op, check_record, fills=False, names=names)

    def form(
        communicator: Communicator, record: object, outputs: object = None, async_op: bool = False
    ) -> Any:
        known = record.__dict__
        return run(communicator, (*tensors_of(known), outputs), others_of(known), async_op)

    return form


def composed_form(op: str, prepare: Callable[..., object]) -> Callable[..., Any]:
    """Return ``op`` as another form; ``prepare``, a ``check``, returns that form, its tensors and options.

    So the other form can run from a plan, which cannot hold torch code, and hooks see the caller's tensors.
    """
    return internal_form(op, prepare, begin=_run_composed)


def _run_composed(
    communicator: Communicator, _: str, prepared: Sequence[Any], async_op: bool
) -> Any:
    return prepared[0](communicator, *prepared[1:], async_op)


def _outcome(outcome: Outcome | Event | None) -> Outcome:
    return outcome if isinstance(outcome, Outcome) else Outcome(None, outcome)


def _refuse_other_tensors(op: str) -> None:
    if is_traced():
        raise TypeError(f"{op} would not be in the graph that is traced; use interlace.functional")
    if (kind := type(torch.empty(0))) is not torch.Tensor:
        raise TypeError(
            f"{op}: new tensors are {kind.__name__}s here, without memory; use interlace.functional"
        )
