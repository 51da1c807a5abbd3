"""The place ``shm``: one process per rank, all on one host; symmetric memory is memfd mappings.

``processes`` has what it needs of its host: joining, small messages, waiting, the death of peers. Async ops
run in one thread per group, in the order of submission. Streams run every item at once, in the calling
thread, so events are always complete. If a stream waits for something, a peer must publish it, or this rank
must have done so before the wait.

User code may launch kernels in a process of place ``shm`` by ``kernel[grid](...)``. Triton's own
interpreter runs the programs of a grid one after another, and a program that waits spins for ever. That
suffices until kernels wait for peers. So from the first memory that user code shares with peers, until the
place is closed, launches are done as follows::

    drain      async ops of the worker come first, so ops and launches keep the order of the calls
    lock       one interpreter session at a time in a process: it waits for another thread's session
    run        all programs of the grid as coroutines, exact arithmetic, inline PTX
    idle       while all of them wait: yield the core, bounded by the group's timeout, and watch for peers
               that died and for aborts, in every group whose memory user code shares

The replacements stay in Triton's classes: another thread may have a session open when a place closes, and
would put them back. Without a place they do nothing.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from interlace.kernels.signal import ABORT_WORD, CREDIT_WORDS, EPOCH_WORD, HEADER_WORDS
from interlace.runtime.compat.triton_interpreter import InterpretedFunction, KernelInterface
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import AbortedError, BlockedWait, InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import (
    WORD,
    Array,
    LocalMemory,
    SymmetricBuffer,
    Workspace,
    split,
    starts,
)
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Event, Stream
from interlace.runtime.places.shm.engine import HostEngine
from interlace.runtime.places.sim.choice import programs
from interlace.runtime.places.sim.interpreter import session
from interlace.runtime.places.sim.scheduler import recording
from interlace.runtime.places.sim.scheduler.scheduler import run_interpreted
from interlace.runtime.processes import dump as record, rendezvous
from interlace.runtime.processes.atomics import Cells, load_acquire, store_release
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.recorder import called_from
from interlace.runtime.processes.segment import SharedSegment
from interlace.runtime.processes.waiting import Kind
from interlace.runtime.processes.worker import OrderedWorker, close_at_exit

_places: "list[weakref.ref[ShmPlace]]" = []  # all ShmPlaces
_installed = False


def route(place: "ShmPlace") -> None:
    """From now on, kernels of user code may wait for the peers of ``place``. Idempotent."""
    _install()
    if place not in _open_places():
        _places.append(weakref.ref(place))


def unroute(place: "ShmPlace") -> None:
    """From now on, kernels no longer wait for the peers of ``place``. Idempotent."""
    _places[:] = [reference for reference in _places if reference() not in (None, place)]


def _open_places() -> "list[ShmPlace]":
    return [place for reference in list(_places) if (place := reference()) is not None]


def _usable(places: "list[ShmPlace]") -> "list[ShmPlace]":
    """Return the places whose group has not failed. If all have, raise the error of one."""
    usable = []
    failure: InterlaceError | None = None
    for place in places:
        try:
            place.check()
            usable.append(place)
        except InterlaceError as error:
            failure = error
    if not usable:
        assert failure is not None
        raise failure
    return usable


class _Launches:
    """A replacement of a session's hooks, of which only the launch is called."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        places = _usable(_open_places())
        hooks = [place.group.idle_hook() for place in places]

        def idle(wait: BlockedWait) -> None:
            for hook in hooks:
                hook(wait)

        name, warps = kernel.__name__, options.get("num_warps", 4)
        launch = KernelLaunch(kernel, grid, arguments, name, num_warps=warps)
        run_interpreted(launch, places[0].rank, idle, programs(None))


def _install() -> None:
    """Replace how kernels are launched, once, while no session has its own replacement."""
    global _installed
    with session._session_lock:
        if _installed or session.is_open():
            return
        _installed = True
        stock_run, stock_getitem = InterpretedFunction.run, KernelInterface.__getitem__
        routed = session._replacement_of_run(_Launches())  # type: ignore[arg-type]

        def run(kernel: object, *args: object, **named: object) -> Any:
            return (routed if _open_places() else stock_run)(kernel, *args, **named)

        def getitem(kernel: object, grid: object) -> Callable[..., Any]:
            launch = stock_getitem(kernel, grid)

            def in_order(*args: object, **named: object) -> Any:
                # While a worker runs an op, its session handles all launches of the process.
                for place in (places := _open_places()):
                    place.worker.drain()
                if not places:
                    return launch(*args, **named)
                with session._session_lock:
                    return launch(*args, **named)

            return in_order

        InterpretedFunction.run = run
        KernelInterface.__getitem__ = getitem


os.register_at_fork(after_in_child=_places.clear)


class CompletedEvent(Event):
    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class InlineStream(Stream):
    """Runs items at once. ``group`` is the group of the host's ranks."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group

    def launch(self, launch: KernelLaunch) -> None:
        run_interpreted(launch, self._group.rank, self._group.idle_hook())
        # Waits in a kernel return early once the group is aborted: its results are invalid.
        everyone = range(self._group.world_size)
        self._group.check_during(f"{launch.op}, in {launch.name}", everyone)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        destination.copy_(source)

    def call(self, function: Callable[[], object], label: str) -> None:
        function()

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        bases = workspace.buffer.addresses
        epoch = _epoch(bases[workspace.rank])
        store_release(bases[peer] + workspace.slot_byte(slot), epoch)

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        base = workspace.buffer.addresses[workspace.rank]
        epoch = _epoch(base)
        doing = f"{workspace.op}, waiting for slot {slot} to reach epoch {epoch}"
        self._hold(base, {source: workspace.slot_byte(slot)}, epoch, doing)

    def wait_credits(self, workspace: Workspace) -> None:
        base = workspace.buffer.addresses[workspace.rank]
        credits = {rank: (CREDIT_WORDS + rank) * WORD for rank in range(workspace.world_size)}
        doing = f"{workspace.op}, waiting for the end of the op before it on this channel"
        self._hold(base, credits, _epoch(base) - 1, doing)

    def _hold(self, base: int, words: Mapping[int, int], value: int, doing: str) -> None:
        """Return when these words of this rank's memory, by writing rank, are at least ``value``."""
        cells = Cells([*(base + word for word in words.values()), base + ABORT_WORD * WORD])

        def late() -> list[int]:
            *seen, aborted = cells.load_acquire()
            missing = [rank for rank, has in zip(words, seen, strict=True) if has < value]
            if missing and aborted:
                self._raise_abort(doing, missing)
            return missing

        if first := late():
            self._group.wait_until(lambda: not late(), doing, first)

    def finish(self, workspace: Workspace) -> None:
        bases = workspace.buffer.addresses
        own_base = bases[workspace.rank]
        if load_acquire(own_base + ABORT_WORD * WORD):
            self._raise_abort(f"the end of {workspace.op}", range(workspace.world_size))
        epoch = _epoch(own_base)
        credits = [base + (CREDIT_WORDS + workspace.rank) * WORD for base in bases]
        Cells(credits).store_release(epoch)
        store_release(own_base + EPOCH_WORD * WORD, epoch)

    def record(self) -> Event:
        return CompletedEvent()

    def wait_event(self, event: Event) -> None:
        """Do nothing: an item has ended when its call returns."""

    def _raise_abort(self, doing: str, waited_for: Sequence[int]) -> None:
        """Raise: the channel is invalid, because a rank aborted or a kernel's wait timed out."""
        self._group.check_during(doing, waited_for)
        raise AbortedError(f"{doing}: a kernel of this group has given up waiting")


def _epoch(own_base: int) -> int:
    """Return the epoch of the op that runs now on the channel whose header is at ``own_base``."""
    return load_acquire(own_base + EPOCH_WORD * WORD) + 1


def _show(memory: Sequence[Iterable[torch.Tensor]]) -> None:
    if (recorder := recording.current()) is not None:
        for rank, parts in enumerate(memory):
            for part in parts:
                recorder.on_allocate(rank, part)


PENDING_SECONDS = 0.5  # for an op that is running when its process ends

T = TypeVar("T")


class CpuPlace(Place):
    """One rank that is a CPU process. Asynchronous ops run in a thread, in the order of calls."""

    device = torch.device("cpu")
    interpreted = True
    compiled = False
    worker: OrderedWorker
    group: HostGroup

    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        return InlineStream(self.group)

    def record_current(self) -> Event:
        return CompletedEvent()

    def hold_current(self, event: Event, waiting_for: str) -> None:
        event.synchronize()

    def bound(self) -> float:
        return self.group.bound()

    def fault(self, reason: str) -> None:
        record.dump(self.group, reason)

    def finish(self) -> None:
        self.worker.drain()

    def submit(self, function: Callable[[], T], *, asynchronous: bool) -> Future[T]:
        """Run the launch side of an op; in the worker if ``asynchronous``, or while it is busy."""
        asynchronous = asynchronous and not self.alone
        if not self.worker.inside and (asynchronous or self.worker.unfinished):
            return self.worker.submit(called_from(function))
        return super().submit(function, asynchronous=asynchronous)


class ShmPlace(CpuPlace):
    """One rank of a group of processes on one host."""

    name = "shm"
    direct_access = True
    check: Callable[[], None]

    def __init__(self, group: HostGroup) -> None:
        self.rank, self.world_size, self.group = group.rank, group.world_size, group
        self.joining = time.monotonic() - group.since
        self.check = group.check
        self.alone = group.world_size == 1
        self.worker = OrderedWorker("interlace ops")
        self._buffers: list[weakref.ref[SymmetricBuffer]] = []
        self._engine: HostEngine | None = None
        close_at_exit(self, instead_of=group)

    def known_as(self, ranks: Sequence[int]) -> None:
        record.known_as(self.group, ranks)

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> "ShmPlace":
        return ShmPlace(self.group.subgroup(ranks, f"{'-'.join(map(str, ranks))}/{generation}"))

    def reunited(self, ranks: Sequence[int] | None) -> tuple[Place, list[int]]:
        roll = rendezvous.MemoryRoll(self.group)
        group, left = rendezvous.reunite(roll, ranks, self.group.of_some)
        return ShmPlace(group), left

    def set_timeout(self, seconds: float) -> None:
        self.group.timeout = seconds

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        """Implements ``Place.allocate``. Errors: as in ``HostGroup``. Unmapped with the last tensor."""
        if nbytes < 0:
            raise ValueError(f"rank {self.rank}: nbytes must not be negative, got {nbytes}")
        self.worker.drain()
        mappings = self.group.allocate(nbytes, f"an allocation of {nbytes} bytes")
        tensors = [torch.from_numpy(mapping.array()) for mapping in mappings]
        _show([[tensor] for tensor in tensors])
        buffer = SymmetricBuffer.over(self.rank, tensors)
        self._buffers = [ref for ref in self._buffers if ref() is not None]
        self._buffers.append(weakref.ref(buffer))
        return buffer

    def new_memory(self, sizes: Sequence[int]) -> LocalMemory:
        """Return memory of this process. It keeps a descriptor open until it is released."""
        segment = self.group.new_segment(starts(sizes)[-1])
        return LocalMemory(split(segment.mapping.array(), sizes), segment)

    def owns(self, memory: LocalMemory) -> bool:
        return isinstance(memory.origin, SharedSegment)

    def share(self, memory: LocalMemory, doing: str) -> list[Sequence[Array]]:
        """Return the parts of every rank's ``memory``. From now on user kernels may wait for peers."""
        self.worker.drain()
        sizes = [len(part) for part in memory.parts]
        mappings = self.group.share(memory.origin, doing)
        shared: list[Sequence[Array]] = [split(mapping.array(), sizes) for mapping in mappings]
        shared[self.rank] = memory.parts
        self.group.shared_ranges.add([parts[0] for parts in shared])
        _show([map(torch.from_numpy, parts) for parts in shared])
        route(self)
        return shared

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        if self.worker.unfinished:
            self.worker.drain()  # messages are sent in the order of the calls, on every rank
        return self.group.exchange(payload, doing)

    def new_engine(self, communicator: object) -> Engine:
        self._engine = HostEngine(self.group)
        return self._engine

    def run_kernel(
        self, launch: KernelLaunch, waited_for: Callable[[], Sequence[int]], timeout: float | None
    ) -> None:
        patience = self.group.patience(timeout, kind=Kind.OF_MANY)

        def idle(wait: BlockedWait) -> None:
            patience.step(launch.op, waited_for())

        run_interpreted(launch, self.rank, idle)

    def late(self, peers: Sequence[int] = ()) -> Sequence[int]:
        blame = self.group.blame
        if not peers and (awaited := blame.awaited(self.rank)) is not None:
            peers = (awaited,)
        return blame.culprits(peers)

    def trouble(self, doing: str) -> Exception | None:
        """Return the error of a death or an abort. A peer that has left in good order causes none."""
        present = [rank for rank in range(self.world_size) if not self.group.has_left(rank)]
        return self.group.interruption(doing, [rank for rank in present if rank != self.rank])

    def abort(self, reason: str) -> None:
        """Implements ``Place.abort``. The reason is published before a buffer's ABORT word."""
        self.group.abort(reason)
        for reference in self._buffers:
            buffer = reference()
            if buffer is not None and buffer.nbytes >= HEADER_WORDS * WORD:
                bases = buffer.peers.tolist()
                Cells([base + ABORT_WORD * WORD for base in bases]).store_release(1)

    def close(self) -> None:
        """Leave the group after its messages. Memory is freed with the last tensor over it. Idempotent."""
        unroute(self)
        if not self.worker.close(PENDING_SECONDS):
            self.group.close(self.linger)  # ends the waits in the group
            self.worker.close()
        self._buffers = []
        if self._engine is None:
            self.group.close(self.linger)
        else:
            self._engine.mail.close(lambda: self.group.close(self.linger))
