"""The place ``sim``: all ranks in one process, every schedule reproducible from its seed.

User code of a rank, its streams and all programs of its kernels are tasks of one scheduler. A stream is
a queue; while it has items, one task runs them in order. Tasks of different streams and ranks interleave
wherever work on GPUs could overlap: between the pieces of a copy, around every atomic.

Torch code of the user runs at once in the user task. So waiting for an op blocks that task, and reading
an output before the wait reads the present content: the same mistake as on a GPU, with the same effect.

Messages from rank to rank: one mailbox per group, matched in the order of the calls::

    send     copies the tensor, and is complete; a later end reports refusals, see ``MessageEnd``
    recv     a future; a message that fits settles it, in either order of arrival
    matched  the receiver's mail stream copies the message into the tensor, after the receiver's work
             before the recv and the sender's before the send; the future has the end of that copy

Multicast addresses of interpreted kernels are numbers that stand for an offset in every rank's memory.
On a GPU the switch resolves a multicast address; here this table does, for the ``multimem`` instructions
that ``multimem.py`` runs. The numbers lie where no process has memory, so every other use of them fails.
"""

import contextvars
import functools
import itertools
import sys
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from interlace.kernels.signal import CREDIT_WORDS, EPOCH_WORD
from interlace.runtime.compat import stand_ins
from interlace.runtime.compat.triton_launcher import PROGRAMS, driver_of
from interlace.runtime.core.call import MessageEnd, mismatch, take_first
from interlace.runtime.core.errors import BlockedWait, InterlaceError, SourceText, rank_error
from interlace.runtime.core.launch import KernelLaunch, checked_grid
from interlace.runtime.core.memory import (
    RED_ZONE,
    Array,
    LocalMemory,
    SymmetricBuffer,
    Workspace,
    aligned_memory,
    bytes_of,
)
from interlace.runtime.core.place import Nodes, Place, table
from interlace.runtime.core.stream import Event, Outcome, Stream
from interlace.runtime.places.sim.choice import programs
from interlace.runtime.places.sim.scheduler import recording
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler, TaskFailed
from interlace.runtime.places.sim.scheduler.source_lines import line_of, user_frame, user_line

_SPACING = 1 << 40  # the largest buffer
_numbers = itertools.count(1 << 16)
_bases: dict[int, tuple[int, tuple[int, ...]]] = {}  # number: bytes, and addresses by rank


def address_for(owner: object, nbytes: int, bases: Sequence[int]) -> int:
    """Return an address for ``nbytes`` at ``bases`` of all ranks; valid as long as ``owner`` lives."""
    assert nbytes <= _SPACING
    number = next(_numbers)
    _bases[number] = nbytes, tuple(bases)
    weakref.finalize(owner, _bases.pop, number, None)
    return number * _SPACING


def addresses(address: int, nbytes: int) -> list[int]:
    """Return the addresses of ``nbytes`` at a multicast address, by rank. LookupError if there are none.

    An address slightly beyond a buffer is so on every rank, and the checks of accesses find it.
    """
    number, offset = divmod(address, _SPACING)
    size, bases = _bases.get(number, (0, ()))
    if not bases or offset + nbytes > size + RED_ZONE:
        raise LookupError
    return [base + offset for base in bases]


@dataclass(frozen=True, eq=False)
class Message:
    """``data``: bytes of rank ``source`` at ``sent``, copied; ``refused``: errors for the sender."""

    source: int
    destination: int
    tag: int
    dtype: torch.dtype
    data: torch.Tensor
    sent: Event
    refused: deque[Exception]


@dataclass(eq=False)
class Receive(MessageEnd):
    """A receive of ``rank``; ``source`` is None for any. Its copy runs on ``stream`` after ``posted``."""

    rank: int
    source: int | None
    tag: int
    tensor: torch.Tensor
    stream: Stream
    posted: Event
    scheduler: Scheduler
    waiting: Callable[[], BlockedWait]
    refused: deque[Exception]

    def __post_init__(self) -> None:
        super().__init__()
        self._context = contextvars.copy_context()  # callbacks run in the receiver's context

    def fits(self, message: Message) -> bool:
        to = (message.destination, message.tag) == (self.rank, self.tag)
        return to and self.source in (None, message.source)

    def settle(self, message: Message) -> None:
        self._context.run(self._settle, message)

    def _settle(self, message: Message) -> None:
        numel = message.data.nbytes // message.dtype.itemsize
        about = self.tag, message.source, message.dtype, numel
        problem = mismatch(self.tensor, self.rank, *about)
        if problem is not None:
            self.set_exception(problem)
            if message.source != self.rank:
                message.refused.append(type(problem)(*problem.args))
            return
        self.stream.wait_event(self.posted)
        self.stream.wait_event(message.sent)
        self.stream.copy(bytes_of(self.tensor), message.data, f"from rank {message.source}")
        self.set_result(Outcome(None, self.stream.record(), lambda: message.source))

    def result(self, timeout: float | None = None) -> Outcome:
        """Block the user task; return the outcome. ``timeout`` has no effect: only the run has a clock."""
        if not self.done():
            self.scheduler.block(self.done, self.waiting)
        return super().result(0)


@dataclass
class Mailbox:
    """Sent messages that are not yet received, receives that are not yet matched; refusals, by sender."""

    messages: list[Message] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    refused: defaultdict[int, deque[Exception]] = field(default_factory=lambda: defaultdict(deque))

    def post(self, message: Message) -> None:
        """Give ``message`` to the first receive that matches it, now or later."""
        receive = take_first(self.receives, lambda each: each.fits(message))
        if receive is None:
            self.messages.append(message)
        else:
            receive.settle(message)

    def take(self, receive: Receive) -> None:
        """Give ``receive`` the first message that matches it, now or later."""
        message = take_first(self.messages, receive.fits)
        if message is None:
            self.receives.append(receive)
        else:
            receive.settle(message)


COPY_PIECES = 3
UNDEFINED = 0xFF  # in every byte: nan of all float formats, -1 of integers


@dataclass
class _SimGroup:
    """The state that the ranks of one group share: messages and buffers, by sequence number."""

    exchanges: dict[int, dict[int, bytes]] = field(default_factory=dict)
    allocations: dict[int, dict[int, LocalMemory]] = field(default_factory=dict)
    departures: Counter[int] = field(default_factory=Counter)
    observed: list[Array] = field(default_factory=list)
    mail: Mailbox = field(default_factory=Mailbox)


class SimWorld:
    """One simulated run: its scheduler and the groups of its ranks.

    ``modules``: by rank and text of PTX, the variables of launched modules, by name.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.observer = scheduler.observer
        self.groups: defaultdict[object, _SimGroup] = defaultdict(_SimGroup)
        self.modules: defaultdict[object, dict[str, torch.Tensor]] = defaultdict(dict)
        self.user_streams: Any = None  # from ``user_code.py``, if user code has streams


class SimEvent(Event):
    """An event that completes when its stream reaches it."""

    def __init__(self, place: "SimPlace", *, completed: bool = False) -> None:
        self._place = place
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed

    def synchronize(self) -> None:
        self._place.hold_host(self, "an event")


class SimStream(Stream):
    """A queue of items and, while there are any, a task that runs them."""

    def __init__(self, place: "SimPlace", name: str) -> None:
        self._place = place
        self._name = name
        self._scheduler, self._observer = place.world.scheduler, place.world.observer
        self._items: deque[tuple[SourceText, str, Callable[[], Any], torch.Tensor | None]] = deque()
        self._busy = False
        self.running = SourceText("")  # the label of the current item, and where it was enqueued

    def _enqueue(
        self, label: str, item: Callable[[], object], copied_to: torch.Tensor | None = None
    ) -> None:
        where = line_of(user_frame(sys._getframe(1)) if self._scheduler.observed else None)
        source = SourceText(f"{label}, enqueued at {where}" if where else label, where.frames)
        self._items.append((source, label, item, copied_to))
        if not self._busy:
            self._busy = True
            self._scheduler.spawn(
                self._place.global_rank, f"stream {self._name}", self._work_off, owner=self
            )

    def _work_off(self) -> None:
        while self._items:
            self.running, label, item, copied_to = self._items.popleft()
            start = self._observer.now()
            item()
            self._observer.on_item(self._scheduler.current, self._name, label, start, copied_to)
            self._scheduler.changed()
        self._busy = False

    def _block(
        self, ready: Callable[[], bool], reason: str, values: Callable[[], tuple[int, int]] | None
    ) -> None:
        def describe() -> BlockedWait:
            seen, expected = (None, None) if values is None else values()
            rank, lane = self._place.global_rank, f"stream {self._name}"
            return BlockedWait(rank, lane, reason, seen, expected)

        if not ready():
            self._scheduler.block(ready, describe)

    def launch(self, launch: KernelLaunch) -> None:
        def item() -> None:
            ended = self._scheduler.spawn_programs(launch, self._place.global_rank)
            self._block(ended, f"{launch.name} of {launch.op}", None)

        self._enqueue(launch.name, item)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        def item() -> None:
            if destination.dim() == 0 or destination.shape[0] < COPY_PIECES:
                destination.copy_(source)
                return
            pieces = zip(destination.chunk(COPY_PIECES), source.chunk(COPY_PIECES), strict=True)
            for to_part, from_part in pieces:
                to_part.copy_(from_part)
                self._scheduler.changed()

        self._enqueue(label, item, destination)

    def call(self, function: Callable[[], object], label: str) -> None:
        self._enqueue(label, function)

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        self._enqueue(
            f"publish slot {slot} of rank {peer}",
            lambda: self._signal(workspace.slots(peer, slot, 1), _epoch(workspace), workspace.op),
        )

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        def item() -> None:
            self._wait_signals(
                workspace.slots(workspace.rank, slot, 1),
                _epoch(workspace),
                lambda seen: f"slot {slot} from rank {source} in {workspace.op}",
            )

        self._enqueue(f"wait slot {slot} from rank {source}", item)

    def wait_credits(self, workspace: Workspace) -> None:
        def item() -> None:
            self._wait_signals(
                _credits(workspace, workspace.rank),
                _epoch(workspace) - 1,
                lambda seen: f"credit of rank {int(seen.argmin())} in {workspace.op}",
            )

        self._enqueue("wait for credits", item)

    def finish(self, workspace: Workspace) -> None:
        def item() -> None:
            epoch = _epoch(workspace)
            for peer in range(workspace.world_size):
                if not workspace.buffer.mapped(peer):
                    continue  # the op has put its credits there itself
                credit = _credits(workspace, peer)[workspace.rank : workspace.rank + 1]
                self._signal(credit, epoch, workspace.op)
                self._scheduler.changed()
            workspace.header(workspace.rank)[EPOCH_WORD] = epoch

        self._enqueue("finish", item)

    def _signal(self, slot: torch.Tensor, epoch: int, op: str) -> None:
        slot.numpy()[0] = epoch
        self._observer.on_signal(self._scheduler.current, slot, op)

    def _wait_signals(
        self, slots: torch.Tensor, epoch: int, describe: Callable[[Any], str]
    ) -> None:
        """Hold this stream until all ``slots`` are at least ``epoch``, as ``wait_kernel`` does."""
        seen = slots.numpy()
        if int(seen.min()) < epoch:
            self._block(
                lambda: int(seen.min()) >= epoch, describe(seen), lambda: (int(seen.min()), epoch)
            )
        self._observer.on_signals_seen(self._scheduler.current, slots)

    def record(self) -> Event:
        event = SimEvent(self._place)

        def item() -> None:
            event.completed = True
            self._observer.on_record(self._scheduler.current, event)

        self._enqueue("event", item)
        return event

    def wait_event(self, event: Event) -> None:
        def item() -> None:
            if not event.is_completed():
                self._block(event.is_completed, "an event", None)
            self._observer.on_wait_event(self._scheduler.current, event)

        self._enqueue("wait for event", item)


def _epoch(workspace: Workspace) -> int:
    """Return the epoch of the op that runs now on the workspace's channel."""
    return int(workspace.header(workspace.rank)[EPOCH_WORD]) + 1


def _credits(workspace: Workspace, rank: int) -> torch.Tensor:
    return workspace.header(rank)[CREDIT_WORDS : CREDIT_WORDS + workspace.world_size]


class SimPlace(Place):
    """One simulated rank of one group. ``members`` are ranks of the run, in group order."""

    name = "sim"
    device = torch.device("cpu")
    program_limit = PROGRAMS
    simulated = True
    interpreted = True
    direct_access = False

    def __init__(self, world: SimWorld, members: tuple[int, ...], rank: int, key: Any) -> None:
        self.world, self._scheduler, self._observer = world, world.scheduler, world.observer
        self.rank = rank
        self.world_size = len(members)
        self.global_rank = members[rank]
        compiled_for = world.scheduler.compiled_for
        self.compiled = compiled_for is not None
        self.descriptors = compiled_for is None or compiled_for >= 90
        self._members = members
        self._key = key
        self._group = world.groups[key]
        self._exchanged = 0
        self._allocated = 0
        self._barriers = 0
        self._mail_stream: Stream | None = None

    def _waiting(self, describe: Callable[[], str]) -> Callable[[], BlockedWait]:
        """Return a function that describes a wait of the user task for ``what()``."""
        task = self._scheduler.current
        return lambda: BlockedWait(self.global_rank, "user code", describe(), where=user_line(task))

    def _meet(self, box: Mapping[int, object], doing: str) -> None:
        """Block the user task until every rank has put a value into ``box``."""

        def missing() -> str:
            ranks = [self._members[r] for r in range(self.world_size) if r not in box]
            return f"ranks {ranks} to call {doing}"

        if len(box) < self.world_size:
            self._scheduler.block(lambda: len(box) == self.world_size, self._waiting(missing))

    def _in_step(self, box: Mapping[int, object], doing: str) -> None:
        """Meet, and order all earlier work on every rank before all later work on every rank."""
        self._finish_stream()
        task = self._scheduler.current
        self._observer.on_meeting(task, id(box), self.world_size)
        self._meet(box, doing)
        self._observer.on_met(task, id(box))

    def _finish_stream(self) -> None:
        """Let the host wait for its current stream, if user code has streams."""
        stream = self._scheduler.user_stream()
        if stream is not None:
            stream.synchronize()

    def arrive(self) -> None:
        self._finish_stream()
        meeting = ("barrier", self._key, self._barriers)
        self._observer.on_meeting(self._scheduler.current, meeting, self.world_size)

    def depart(self) -> None:
        self._observer.on_met(self._scheduler.current, ("barrier", self._key, self._barriers))
        self._barriers += 1

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        number, self._exchanged = self._exchanged, self._exchanged + 1
        box = self._group.exchanges.setdefault(number, {})
        box[self.rank] = payload
        self._scheduler.changed()
        self._meet(box, doing)
        self._group.exchanges.pop(number - 2, None)  # all ranks have left that exchange
        return [box[rank] for rank in range(self.world_size)]

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        data = bytes_of(tensor).clone()
        refused = self._group.mail.refused[self.rank]
        sent = self.record_current()
        self._group.mail.post(Message(self.rank, peer, tag, tensor.dtype, data, sent, refused))
        self._scheduler.changed()
        future = MessageEnd()
        future.refused = refused
        future.set_result(Outcome(None, None))
        return future

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        source = "any rank" if peer is None else f"rank {self._members[peer]}"
        if self._mail_stream is None:
            self._mail_stream = self.new_stream("mail")
        receive = Receive(
            self.rank,
            peer,
            tag,
            tensor,
            stream=self._mail_stream,
            posted=self.record_current(),
            scheduler=self._scheduler,
            waiting=self._waiting(lambda: f"a message from {source} with tag {tag}"),
            refused=self._group.mail.refused[self.rank],
        )
        self._group.mail.take(receive)
        self._scheduler.changed()
        return receive

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        parts = self.share(self.new_memory((nbytes,)), "an allocation of symmetric memory")
        buffer = SymmetricBuffer.over(self.rank, [torch.from_numpy(part) for (part,) in parts])
        buffer.multicast = address_for(buffer, nbytes, buffer.addresses)
        return buffer

    def new_memory(self, sizes: Sequence[int]) -> LocalMemory:
        parts = []
        for index, size in enumerate(sizes):
            whole = aligned_memory(size + 2 * RED_ZONE)
            if self._scheduler.observed:
                self._group.observed.append(whole)  # kept: an address means one thing in one run
            owner = np.frombuffer(whole.data, np.uint8)  # ends with its last view
            part = owner[RED_ZONE : RED_ZONE + size]
            kind = "signal pad" if index else "symmetric buffer"
            known = self._scheduler.memory
            allocation = known.add(self.global_rank, part.ctypes.data, size, kind)
            weakref.finalize(owner, allocation.free).atexit = False
            self._observer.on_allocate(self.global_rank, torch.from_numpy(part), allocation.name)
            parts.append(part)
        return LocalMemory(parts, (self.world, self.global_rank))

    def undefine(self, part: Array) -> None:
        part.fill(UNDEFINED)
        self._observer.on_undefined(torch.from_numpy(part))

    def announce(self, tensor: torch.Tensor) -> None:
        self._scheduler.memory.of_tensor(tensor, self.global_rank)

    def owns(self, memory: LocalMemory) -> bool:
        return bool(memory.origin == (self.world, self.global_rank))

    def share(self, memory: LocalMemory, doing: str) -> list[Sequence[Array]]:
        number, self._allocated = self._allocated, self._allocated + 1
        box = self._group.allocations.setdefault(number, {})
        box[self.rank] = memory
        self._in_step(box, doing)
        shared = [box[rank].parts for rank in range(self.world_size)]
        self._group.departures[number] += 1
        if self._group.departures[number] == self.world_size:
            box.clear()  # memory lives as long as its users; the box stays: its id names a meeting
        return shared

    def multicast(self, owner: object, parts: Sequence[Array]) -> int:
        return address_for(owner, len(parts[0]), [part.ctypes.data for part in parts])

    def run_kernel(
        self, launch: KernelLaunch, waited_for: Callable[[], Sequence[int]], timeout: float | None
    ) -> None:
        if not self._scheduler.inside:
            raise InterlaceError(f"{launch.op}: this memory is of a simulated run that has ended")
        launch.kernel[launch.extents](**launch.arguments)

    def launch_ptx(
        self,
        source: Any,
        grid: tuple[int, ...],
        values: Sequence[object],
        variables: Mapping[str, torch.Tensor],
    ) -> None:
        """Run ``source``, a ``PtxSource``, on the current stream, as user code launches a kernel."""
        if not self.compiled:
            raise InterlaceError(f'place="ptx" runs PTX; this rank is in place="{self.name}"')
        kept = self.world.modules[self.global_rank, source.kernel.text]
        source.load(kept, variables, self._scheduler.memory, self.global_rank)
        arguments = {str(index): value for index, value in enumerate(values)}
        self._scheduler.launch(source, checked_grid(grid), arguments, {})

    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        return SimStream(self, name)

    def record_current(self) -> Event:
        stream = self._scheduler.user_stream()
        return self.host_point() if stream is None else stream.record()

    def host_point(self) -> Event:
        event = SimEvent(self, completed=True)
        self._observer.on_record(self._scheduler.current, event)
        return event

    def hold_current(self, event: Event, waiting_for: str) -> None:
        stream = self._scheduler.user_stream()
        if stream is None:
            self.hold_host(event, waiting_for)
        else:
            stream.wait_event(event)

    def hold_host(self, event: Event, waiting_for: str) -> None:
        """Block the user task until ``event``."""
        if not event.is_completed():
            self._scheduler.block(event.is_completed, self._waiting(lambda: waiting_for))
        self._observer.on_wait_event(self._scheduler.current, event)

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        members = tuple(self._members[rank] for rank in ranks)
        key = (self._key, members, generation)
        return SimPlace(self.world, members, ranks.index(self.rank), key)

    def abort(self, reason: str) -> None:
        """Do nothing: an exception of any task ends the whole run, so no rank has to be notified."""

    def close(self) -> None:
        """Do nothing: memory ends with the run."""


Around = Callable[[SimWorld], AbstractContextManager[Callable[[SimPlace], None]]]

AROUND: contextvars.ContextVar[Around] = contextvars.ContextVar(
    "interlace_around_runs", default=lambda world: nullcontext(lambda place: None)
)
"""Entered around each run; yields a function that each rank calls before its code (``user_code.py``)."""


def run_sim(
    on_rank: Callable[[SimPlace], object],
    world_size: int,
    *,
    seed: int = 0,
    timeout: float | None = None,
    scheduler: Scheduler | None = None,
    arch: int | None = None,
) -> list[Any]:
    """Run ``on_rank(place)`` per rank, by ``scheduler`` or a new one with ``seed``; return results by rank.

    With ``arch``, 80 for sm_80, kernels are compiled for that architecture, and their PTX is run.
    """
    if scheduler is None:
        factory = programs(arch)
        scheduler = Scheduler(seed, timeout=timeout, observer=recording.current(), programs=factory)
    world = SimWorld(scheduler)
    results: list[object] = [None] * world_size
    members = tuple(range(world_size))
    scheduler.observer.attach(lambda: scheduler.steps)

    def main(rank: int) -> None:
        place = SimPlace(world, members, rank, "world")
        begin(place)
        results[rank] = on_rank(place)
        scheduler.finished.append(f"rank {rank} has returned")

    for rank in members:
        scheduler.spawn(rank, "user code", functools.partial(main, rank))
    try:
        arch = scheduler.compiled_for or 90
        with driver_of(arch), stand_ins.simulating(), AROUND.get()(world) as begin:
            scheduler.run()
    except TaskFailed as failure:
        assert failure.__cause__ is not None
        if isinstance(failure.__cause__, KeyboardInterrupt):
            raise failure.__cause__ from None
        raise rank_error(failure.task.rank, failure.__cause__) from failure.__cause__
    return results


def separate_nodes(place: Place, of: Sequence[int], put: str = "stores") -> Place:
    """Let ``place``, where all memory is mapped, work as if each node mapped only its own memory.

    For tests on one node, or in ``sim``. Data that would be put is stored ("stores"), or fetched by the
    receiver ("late"). ``of`` is the node of every rank. Call it before a communicator is made of ``place``.
    """
    assert len(of) == place.world_size, (of, place.world_size)
    place.nodes = Nodes(tuple(of), put)
    allocate = place.allocate
    here = of[place.rank]

    def allocate_apart(nbytes: int) -> SymmetricBuffer:
        whole = allocate(nbytes)
        addresses = whole.peers.tolist()
        near = [address if of[rank] == here else 0 for rank, address in enumerate(addresses)]
        return SymmetricBuffer(
            whole.rank,
            nbytes,
            table(near, addresses).to(whole.peers.device),
            # An empty part keeps the memory alive.
            [part if of[rank] == here else part[:0] for rank, part in enumerate(whole.peer_bytes)],
        )

    place.allocate = allocate_apart  # type: ignore[method-assign]
    return place
