"""A communicator: one group of ranks, with its place, arena, streams and plans.

Every op of a group goes through :meth:`Communicator.run`, which is the life of an op::

    agree    ranks exchange what they were asked for; a mismatch is an error before any byte moves
    lease    a workspace from the arena
    enqueue  copies, kernels and signals on the group's two streams
    finish   credit to the peers, epoch + 1
    Work     a handle on the result

Ops of one group run in the order of the calls. Groups share no memory and no streams, but a call waits
on the host for the other ranks' agreement: ranks that share several groups call their ops in the same
order, as torch.distributed asks for too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.core.call import Call, Refusal, compare
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import DifferentOpsError, InterlaceError
from interlace.runtime.core.memory import Arena, Layout, SymmetricBuffer, Workspace
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.core.torch_modes import modes_active
from interlace.runtime.core.work import Work

CHANNELS = 2
MESSAGE_LENGTH = 2000
MOST_CALLS = 1024
MOST_PASSING_TABLES = 64
DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class Communicator:
    """One rank's view of a group.

    ``ranks`` are the group's members as ranks of the default group. Not to be shared by threads. Made by
    :func:`interlace.new_group`, :meth:`split` and so on; every op takes it as ``group``.

    >>> import interlace
    >>> def on_rank():
    ...     group = interlace.new_group()
    ...     half = group.split([0])
    ...     group.barrier()
    ...     return (group.rank, group.world_size, half and half.ranks)
    >>> interlace.run(on_rank, 2)
    [(0, 2, (0,)), (1, 2, None)]
    """

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        self.place = place
        self.ranks = tuple(ranks)
        self.rank = place.rank
        self.device_type = place.device.type
        self.world_size = place.world_size
        self.compute = place.new_stream("compute")
        self.copying = place.new_stream("copy", priority=True)
        self._arena = Arena(
            place.allocate,
            self.world_size,
            channels=CHANNELS,
            spin_limit=place.poll_limit(),
            alike=not place.interpreted,
        )
        self._last_on_channel: dict[int, tuple[Event, bool]] = {}
        self._tables: dict[Any, torch.Tensor] = {}
        self._passing_tables: dict[Any, torch.Tensor] = {}
        self._engine: Engine | None = None
        self.calls: dict[Any, Call] = {}  # that come again and again; the API's
        self._generation = 0
        self._closed = False
        self._out_of_step = ""  # since which call, once ranks have called different ops
        self.elsewhere: Callable[[], Communicator] | None = None
        self.also: list[
            Communicator
        ] = []  # those of the same ranks on other devices, as far as made
        self.answered: tuple[bytes, list[bytes]] | None = (
            None  # an agreement that is reached already
        )
        self.plans: Any = place.new_plans(self)
        self.words: Any = None  # memory of algorithms/low_latency.py, once there is a need

    def on(self, *values: Any) -> Communicator:
        """The communicator of the same ranks on the device of the first tensor among ``values``.

        These are what the caller has given, which may be lists, or no tensors at all. ``elsewhere()`` is
        the communicator for GPUs of a process group that serves both, and is made collectively.
        """
        if self.elsewhere is None or self.device_type == "cuda":
            return self
        return self.elsewhere() if kind_of(values) == "cuda" else self

    # -- host-side agreement -------------------------------------------------------------------

    @contextlib.contextmanager
    def _numbered(self) -> Iterator[None]:
        """Errors count ranks within the group; say so where that is not how the caller counts."""
        try:
            yield
        except (TypeError, ValueError, InterlaceError) as error:
            self._number(error)
            raise

    def _number(self, error: Exception) -> None:
        if isinstance(error, DifferentOpsError):
            self._out_of_step = self._out_of_step or str(error)
        note = f" (rank r stands for r-th of the group's ranks {list(self.ranks)}, from 0)"
        own_count = self.ranks != tuple(range(self.world_size))
        if own_count and error.args and not str(error.args[0]).endswith(note):
            error.args = (f"{error.args[0]}{note}", *error.args[1:])

    def agree(self, op: str, mine: Any) -> list[Any]:
        """Every rank's ``mine`` (small and picklable), by rank. Collective, host only."""
        with self._numbered():
            return self._agree(op, mine)

    def _agree(self, op: str, mine: Any) -> list[Any]:
        if self._closed or self._out_of_step:
            raise self._over(op)
        if self.world_size == 1:
            return [mine]
        return compare(self.messages(Call(op, part=mine)))

    def messages(self, call: Call) -> list[bytes]:
        """Every rank's message of ``call``, by rank, to be compared. Collective, host only."""
        if self.world_size == 1:
            return [call.message]
        answered, self.answered = self.answered, None
        if answered is not None and answered[0] == call.message:
            answers = answered[1]
        else:
            answers = self.place.agree(call)
        self.noted(call, answers)
        return answers

    def noted(self, call: Call, answers: list[bytes]) -> None:
        """Ranks have agreed on ``call``, which may be a part of what is being planned."""
        if self.plans is not None and self.place.watcher is not None:
            self.place.watcher.agreed(call, answers)

    @contextlib.contextmanager
    def accepting(self, op: str) -> Iterator[None]:
        """Around the validation of an op's arguments: what one rank refuses, all ranks refuse.

        Otherwise the others would wait for this rank, and take its next call for this one. They raise
        TypeError or ValueError; this rank what it raised, of any class.
        """
        try:
            with self._numbered():
                yield
        except InterlaceError:
            self.place.watcher = None
            raise
        except Exception as error:
            self.place.watcher = None  # what follows is another call
            if self.world_size > 1 and not self._closed and not self._out_of_step:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                text = str(error)
                if not isinstance(error, (TypeError, ValueError)):
                    text = f"{type(error).__name__} on rank {self.rank}: {text}"
                refusal = Refusal(kind, text[:MESSAGE_LENGTH])
                message = refusal.message(op)
                doing = f"{op}, which this rank refused ({kind.__name__}: {refusal.text})"
                with contextlib.suppress(InterlaceError):  # the misuse is what the caller must see
                    self.place.submit(
                        lambda: self.place.exchange(message, doing), asynchronous=False
                    ).result()
            raise

    def barrier(self) -> None:
        """Return once every rank has called it, and what their callers had issued has finished."""
        self.place.arrive()
        self.agree("barrier", None)
        self.place.depart()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator over some of this group's ranks; None on the others.

        Collective over this group, so that every rank counts the same generations. Raises ValueError on
        every rank if they ask for different ``ranks``.
        """
        answers = self.agree("new_group", tuple(ranks))
        for rank, theirs in enumerate(answers):
            if theirs != tuple(ranks):
                raise ValueError(
                    f"new_group: ranks differs between ranks: {list(ranks)} on rank {self.rank}, "
                    f"{list(theirs)} on rank {rank}"
                )
        self._generation += 1  # not for what a rank refused, for that one does not come here
        if self.rank not in ranks:
            return None
        place = self.place.subgroup(tuple(ranks), self._generation)
        return Communicator(place, [self.ranks[rank] for rank in ranks])

    # -- ops -----------------------------------------------------------------------------------

    def table(
        self, key: Any, rows: Callable[[], Sequence[Sequence[int]]], *, passing: bool = False
    ) -> torch.Tensor:
        """An int64 table for kernels, computed and moved to the device once per ``key``.

        ``passing``: one of so many keys that old tables are given up, unless a captured graph has them.
        """
        table = self._tables.get(key)
        if table is None and passing:
            table = self._passing_tables.get(key)
            if table is not None and self.place.capturing:
                self._tables[key] = table
        if table is None:
            if self.place.capturing:
                raise InterlaceError(
                    f"rank {self.rank}: an op needs a table that cannot be made during a graph capture; "
                    "call it once with tensors like these before the capture"
                )
            flat = [value for row in rows() for value in row] or [0]
            table = torch.tensor(flat, dtype=torch.int64).to(self.place.device)
            tables = self._passing_tables if passing else self._tables
            if passing and len(tables) >= MOST_PASSING_TABLES:
                del tables[next(iter(tables))]
            tables[key] = table
        return table

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> Event:
        """Lease, launch what ``body`` puts on the streams, finish; the event of the op's end."""
        workspace = self._arena.lease(layout, op)
        with self.place.launching():
            start = self.place.record_current()
            previous, was_pulled = self._last_on_channel.get(workspace.channel, (None, False))
            for stream in (self.compute, self.copying):
                stream.wait_event(start)
                if previous is not None:
                    stream.wait_event(previous)
            if was_pulled:
                # A kernel that pushes waits for its receiver's credit only; a third rank may still
                # be reading what the receiver had staged for it.
                self.compute.wait_credits(workspace)
            if self.plans is not None and self.place.watcher is not None:
                self.place.watcher.begins(workspace, layout)
            body(workspace)
            self.compute.wait_event(self.copying.record())
            self.compute.finish(workspace)
            end = self.compute.record()
        self.ended(workspace, end, pulled=layout.pulled)
        return end

    def watch_words(self, buffer: SymmetricBuffer, programs: int) -> None:
        """An op that leases nothing is about to launch ``programs``, whose memory is ``buffer``."""
        if self.plans is not None and self.place.watcher is not None:
            self.place.watcher.begins_words(buffer, programs)

    def ended(self, workspace: Workspace, end: Event, *, pulled: bool) -> None:
        """``end`` is that of the op in ``workspace``; ``pulled`` as of its layout."""
        self._last_on_channel[workspace.channel] = (end, pulled)

    # -- what was enqueued before, once more: see ``cuda/plans.py`` ------------------------------

    @property
    def next_channel(self) -> int:
        """The channel of the next op."""
        return self._arena.next_channel

    def will_lease(self, steps: Sequence[Any]) -> bool:
        """Whether the next ops would get the ``workspace`` or the ``words`` of each, one after another."""
        after = 0
        for step in steps:
            if step.workspace is None:
                if self.words is None or self.words.buffer is not step.words[0]:
                    return False
            elif self._arena.next_buffer(after) is not step.workspace.buffer:
                return False
            else:
                after += 1
        return True

    def lease_again(self, workspace: Workspace) -> Workspace:
        """The next workspace, which is ``workspace``, free for ops that push."""
        self._arena.skip()
        if self._last_on_channel[workspace.channel][1]:
            self.compute.wait_credits(workspace)
        return workspace

    def lasting_tensors(self) -> list[torch.Tensor]:
        """What lives on the device as long as this group does."""
        buffers = self._arena.buffers()
        if self.words is not None:
            buffers = [*buffers, self.words.buffer]
        memory = [part for buffer in buffers for part in buffer.peer_bytes]
        return [*self._tables.values(), *(buffer.peers for buffer in buffers), *memory]

    def may_run_now(self) -> bool:
        """Whether a synchronous op may run in the caller, without an engine. Raises if the group failed."""
        place = self.place
        if self._closed or modes_active():
            return False
        place.check()
        return place.idle

    def run(self, op: str, function: Callable[[], Outcome], *, async_op: bool) -> Any:
        """Run the host part of an op. A :class:`Work` if ``async_op``, else what it waits for."""

        def numbered() -> Outcome:
            if self._out_of_step:  # since an op that was queued before this one
                raise self._over(op)
            with self._numbered():
                return function()

        if self._out_of_step:
            raise self._over(op)
        if modes_active():
            _refuse_other_tensors(op)
        self.place.check()
        try:
            future: Future[Outcome] = self.place.submit(numbered, asynchronous=async_op)
        except BaseException:
            self.place.watcher = None
            raise
        work = Work(op, self.place, future)
        if self.plans is not None:
            self.plans.learn(op, future.result().result)  # which is there: a GPU's host never waits
        return work if async_op else work.wait()

    @property
    def engine(self) -> Engine:
        """What does the plain collectives of this group."""
        if self._engine is None:
            self._engine = self.place.new_engine(self)
        return self._engine

    def collective(
        self,
        call: Call,
        start: Callable[[Engine], Event | None],
        outputs: Sequence[torch.Tensor] = (),
        *,
        async_op: bool,
    ) -> Work | None:
        """Let the engine run ``call``: ``start`` is given the engine and calls one of its methods.

        ``outputs`` are the caller's tensors that it fills. A :class:`Work` if ``async_op``; otherwise
        None, when the caller's later work is ordered after the op.
        """

        place = self.place
        if self._closed or self._out_of_step:
            raise self._over(call.op)
        if modes_active():
            _refuse_other_tensors(call.op)
        place.check()
        if place.idle and (not async_op or place.alone):
            try:
                event = start(self._engine or self.engine)
            except BaseException as error:
                self._failed(call.op, error)
                raise
            if self.plans is not None:
                self.plans.learn(call.op, None)
            if event is not None:
                place.hold_current(event, f"the end of {call.op}")
                place.check()
            return Work(call.op, place, None, outputs) if async_op else None

        def numbered() -> Outcome:
            if self._out_of_step:  # since an op that was queued before this one
                raise self._over(call.op)
            try:
                return Outcome(None, start(self.engine))
            except BaseException as error:
                self._failed(call.op, error)
                raise

        work = Work(call.op, place, place.submit(numbered, asynchronous=async_op), outputs)
        if self.plans is not None:
            self.plans.learn(call.op, None)
        if async_op:
            return work
        work.wait()
        return None

    def remember(self, key: Any, call: Call) -> Call:
        """Keep ``call`` for the next time the same is asked for.

        Raises as ``call.match`` does in a group of one rank, which compares nothing later.
        """
        if self.world_size == 1 and call.match is not None:
            call.match((call.part,))
        if len(self.calls) >= MOST_CALLS:
            self.calls.clear()
        self.calls[key] = call
        return call

    def _failed(self, op: str, error: BaseException) -> None:
        """An op failed. What is no agreed error would leave the other ranks waiting for this one."""
        self.place.watcher = None
        if isinstance(error, (TypeError, ValueError, InterlaceError)):
            self._number(error)
        elif self.world_size > 1:
            self.place.abort(f"{op} failed with {type(error).__name__}: {error}")

    def _over(self, op: str) -> InterlaceError:
        if self._closed:
            return InterlaceError(f"rank {self.rank}: {op} on a group that was closed")
        return InterlaceError(
            f"rank {self.rank}: {op}: the ranks of this group are out of step, and it is over. It began "
            f"with: {self._out_of_step}"
        )

    def transfer(
        self, call: Call, start: Callable[[Engine], Future[Outcome]], tensor: torch.Tensor
    ) -> Work:
        """Let the engine send or receive ``tensor``; it never blocks, whatever the order of calls."""
        if self._closed or self._out_of_step:
            raise self._over(call.op)
        self.place.check()
        return Work(call.op, self.place, start(self.engine), [tensor])

    @property
    def multicast(self) -> bool:
        """Whether one store reaches all ranks. The same on all; collective before the first op."""
        return self._arena.multicast()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of symmetric memory that this group holds on this rank."""
        return self._arena.nbytes + (self.words.nbytes if self.words else 0)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Give memory and handles back; later calls raise. Idempotent, not collective."""
        if not self._closed:
            self._closed = True
            self._arena.close()
            self.words = None
            self.place.close()


def kind_of(value: Any) -> str:
    """The type of the device that has the first tensor of ``value``, "" if there is none in it."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, (list, tuple)):
        return next((kind for each in value if (kind := kind_of(each))), "")
    if hasattr(value, "__dlpack_device__"):
        return "cuda" if int(value.__dlpack_device__()[0]) in DLPACK_CUDA else "cpu"
    return ""


def _refuse_other_tensors(op: str) -> None:
    """TypeError under a mode of torch that makes tensors of its own of those that an op works with."""
    made = type(torch.empty(0))
    if made is not torch.Tensor:
        raise TypeError(
            f"{op}: under this dispatch mode new tensors are {made.__name__}s, which have no memory to "
            "communicate; use interlace.functional"
        )
