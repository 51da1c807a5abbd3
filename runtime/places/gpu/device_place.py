"""The base of all places on GPUs: streams, submission, workspaces, residency, and how an op fails.

Epochs. An op's epoch is in device memory, and kernels read it there. The host counts along, by
workspace, as long as it can. From the first graph capture on, a replay can run ops of which the host does
not know, so then only kernels signal. Until then, streams themselves write epochs (``words_for``). Waits
are always kernels, which have a timeout. Only a write on another stream can end a stream's own wait, and
that stream may share its hardware queue and come after it.

Residency
---------
Residency decides which waiting kernels, of several groups, run on a GPU together. A persistent kernel that
waits for its peers keeps its multiprocessors until they come. Assume that each of two groups' kernels is
first on one rank, and that they do not fit together. Then neither can begin on the other rank::

    rank 0   | group A's kernel, all SMs: waits for rank 1 |   group B's has no SM
    rank 1   | group B's kernel, all SMs: waits for rank 0 |   group A's has no SM

So on each rank, kernels of several groups run at the same time only if all of their programs fit. Otherwise
the later one, in the order of the calls, waits on its stream for the end of the earlier. If ranks call the
ops of groups that they share in one order, as torch.distributed requires, nothing blocks. Of all ops in
flight, the first waits for no other op on any rank, and the ops beside it leave it room.

A program counts as a whole multiprocessor. Signal kernels, of one warp, do not count: they use the one that
``program_limit`` leaves. Copies and torch code wait for no other rank while they hold one.

An op that has to wait for another one joins it: from then on both are one *chain*, which never needs more
than its largest op. A single group is one chain and costs nothing: its ops follow each other anyway.

Ops that a graph replays are not seen. A program that replays graphs of several groups at the same time must
order the replays alike on all ranks, on one stream.
"""

import functools
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from interlace.kernels import signal, slots
from interlace.kernels.signal import ABORT_WORD, CLAIMED_WORD, HEADER_WORDS
from interlace.runtime.core.call import Call
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import SymmetricBuffer, Workspace, peers_of
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Event, Outcome, Settled, Stream
from interlace.runtime.places.gpu import driver, stream as streams
from interlace.runtime.places.gpu.launch import LaunchCache
from interlace.runtime.places.gpu.stream import DeviceEvent, DeviceStream, Point, StreamTarget


class Chain:
    """Ops that run one after another. ``group`` is the group of the last op, which has ``ends``."""

    __slots__ = ("ends", "group", "in_op", "largest")

    def __init__(self, group: int) -> None:
        self.group = group
        self.ends: list[Point] = []
        self.largest = self.in_op = 0


class Residency:
    """The kernels of one rank on one GPU of ``capacity`` multiprocessors; ``alone``: the only chain."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._chains: dict[int, Chain] = {}  # by group; the one with the oldest last op is first
        self.alone: Chain | None = None
        self._lock = threading.RLock()  # garbage collection may close a group while it is held

    def admit(self, group: int, programs: int, where: Any) -> list[Point]:
        """Register that ``group`` will launch so many programs at ``where``; return what they wait for."""
        chains = self._chains
        with self._lock:
            own_chain = chains.get(group)
            if own_chain is None:
                own_chain = chains[group] = Chain(group)
            own_chain.in_op += programs
            own_chain.largest = max(own_chain.largest, min(own_chain.in_op, self.capacity))
            waited: list[Point] = []
            other_chains = [chain for chain in chains.values() if chain is not own_chain]
            while (
                other_chains
                and own_chain.largest + sum(chain.largest for chain in other_chains) > self.capacity
            ):
                other = other_chains.pop(0)
                waited += other.ends
                own_chain.largest = max(own_chain.largest, other.largest)
                chains.pop(other.group, None)
            own_chain.ends.append(Point(where))
            self._count()
            return waited

    def ended(self, group: int, where: Any) -> None:
        """Register that the end of ``group``'s op was enqueued at ``where``, after all its kernels."""
        chain = self._chains.get(group)
        if chain is None or not chain.in_op:
            return
        with self._lock:
            chain.largest = max(chain.largest, min(chain.in_op, self.capacity))
            chain.in_op = 0
            chain.ends = [Point(where)]
            self._chains.pop(group, None)
            self._chains[group] = chain  # the youngest
            self._count()

    def forget(self, group: int) -> None:
        with self._lock:
            self._chains.pop(group, None)
            self._count()

    def _count(self) -> None:
        self.alone = next(iter(self._chains.values())) if len(self._chains) == 1 else None


_of_devices: dict[object, Residency] = {}


def residency(key: Any, capacity: int, known: dict[object, Residency] | None = None) -> Residency:
    """Return the residency of ``key``, one for all groups: from ``known``, or of a GPU of this process."""
    return (_of_devices if known is None else known).setdefault(key, Residency(capacity))


T = TypeVar("T")

POLLS_PER_SECOND = 1_000_000  # the most polls of a wait in a kernel


class DevicePlace(Place):
    """One rank on a GPU. ``poll_seconds`` bounds every wait in a kernel.

    Attributes
    ----------
    recorder : records what the current call enqueues, or None; see ``plans.py``.
    asynchronous : whether the current op is; its items then go to streams of the group's own.
    launches : the kernels that this rank has loaded.
    events : CUDA events that were used and are free now.
    replays : whether graphs may run ops of which the host does not know.
    high_priority : whether the group's own streams have precedence over others. Set before they are made.
    """

    interpreted = False
    direct_access = False
    high_priority = False

    def __init__(
        self, rank: int, world_size: int, device: torch.device, *, poll_seconds: float
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.asynchronous = False
        self.recorder: Any = None
        self.events: list[torch.cuda.Event] = []
        self.launches = LaunchCache(device, self._loaded)
        self.failure: Exception | None = None
        self._poll_seconds = poll_seconds
        self._index = device.index or 0
        self._caller: StreamTarget | None = None
        self._start: Point | None = None
        self._start_event: torch.cuda.Event | None = None
        self._deferred: list[Callable[[], None]] | None = None
        self._buffers: list[SymmetricBuffer] = []
        self._epochs: dict[int, int] = {}  # by address of this rank's memory: its expected EPOCH
        self.replays = False
        self._kept: list[object] | None = None
        self._in_flight: deque[tuple[Event | None, list[Any]]] = deque()
        self._side: torch.cuda.Stream | None = None
        self._one: torch.Tensor | None = None

    @abstractmethod
    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        """Allocate zeroed symmetric memory, which every rank may write once this returns. Collective."""

    def allocate(self, nbytes: int) -> SymmetricBuffer:
        if self.caller()[1]:
            raise InterlaceError(
                f"rank {self.rank}: an op needs {nbytes} bytes of symmetric memory, which cannot be made "
                "during a graph capture; call it once with tensors like these before the capture"
            )
        buffer = self._allocate(nbytes)
        if self._one is None:  # now, because both may synchronize the device
            self.alarm_stream()
            self._one = driver.pinned_tensor([1])
        self._buffers.append(buffer)
        self._epochs[buffer.addresses[self.rank]] = 0
        self._load_signals(buffer)
        return buffer

    def _load_signals(self, buffer: SymmetricBuffer) -> None:
        """Load the kernels that signal. A captured op needs them even if streams signalled before."""
        known: dict[str, Any] = {"peers": peers_of(buffer, self.world_size)}
        for kernel, rest in (
            (signal.publish_kernel, {"peer": 0, "slot_byte": 0}),
            (signal.wait_kernel, {"source": 0, "slot_byte": 0}),
            (slots.wait_credits_kernel, {}),
            (slots.finish_kernel, {}),
        ):
            launch = KernelLaunch(kernel, 1, {**known, **rest}, "a signal", num_warps=1)
            self.launches.prepare(launch, *self.caller())

    def _loaded(self, compiled: object) -> None:
        """Handle a loaded kernel: Triton's ``CompiledKernel``, with ``module`` and ``function``."""

    def agree(self, call: Call) -> list[bytes]:
        """Return every rank's message of ``call``, by rank; the caller compares them. Collective."""
        return self.exchange(call.message, call.op)

    def caller(self) -> StreamTarget:
        """Return the caller's current CUDA stream, and the graph capture that it is in."""
        if self._caller is not None:
            return self._caller
        handle = driver.current_stream(self._index)
        capture = driver.capture_of(handle)
        if capture:
            self.replays = True
        return handle, capture

    @property
    def capturing(self) -> bool:
        return bool(self.caller()[1])

    @contextmanager
    def launching(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Keep the caller's present stream until :meth:`leave`."""
        self._caller = self.caller()

    def leave(self) -> None:
        self._caller = None

    def about_to_use(self, target: StreamTarget) -> None:
        """Record now what must come before an item that is about to go to ``target``."""
        start = self._start
        if start is not None and start.target == target:
            start.record()
            self._start = None

    def new_stream(self, name: str, *, priority: bool = False) -> Stream:
        urgent = priority or self.high_priority
        stream = torch.cuda.Stream(self.device, priority=-1 if urgent else 0)
        return DeviceStream(self, stream, follows=name == "compute")

    def side_stream(self) -> torch.cuda.Stream:
        """Return a stream of the group's that no op uses. It may wait for an op."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device, priority=-1)
        return self._side

    def alarm_stream(self) -> torch.cuda.Stream:
        """Return a stream that never waits, for writes that end the waits of others; one for all groups."""
        return driver.alarm_stream(self._index)

    def submit_item(self, item: Callable[[], None]) -> None:
        """Run a stream item now, or with the rest of its op."""
        if self._deferred is None:
            item()
        else:
            self._deferred.append(item)

    def record_current(self) -> Event:
        event = DeviceEvent()
        event.submitted = True
        event.points = [self.start()]
        return event

    def start(self) -> Point:
        """Return where the caller's current stream is; it is recorded when the first item follows."""
        if self._start_event is None:
            self._start_event = torch.cuda.Event()
        # one event for all: a wait for an earlier op's event waits for this one's recording as well
        self._start = point = Point(self.caller(), self._start_event)
        return point

    def future_of(self, event: Event, value: object) -> torch.futures.Future[Any] | None:
        """Return a future that orders users of ``value`` after ``event``, as torch's own futures do."""
        if self.device.type != "cuda":
            return None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self.device])
        side = self.side_stream()
        assert isinstance(event, DeviceEvent)
        for point in event.points:
            side.wait_event(point.record())
        with torch.cuda.stream(side):
            future.set_result(value)  # notes where this stream is
        return future

    def hold_current(self, event: Event, waiting_for: str) -> None:
        assert isinstance(event, DeviceEvent)
        target = self.caller()
        for point in event.points:
            if point.target[0] != target[0] and point.target[1] == target[1]:
                streams.stream_of(target[0]).wait_event(point.record())
        for index, (end, _) in enumerate(self._in_flight):
            if end is event:
                del self._in_flight[index]
                return

    def arrive(self) -> None:
        if not self.capturing:
            torch.cuda.current_stream().synchronize()

    def submit(self, function: Callable[[], T], *, asynchronous: bool) -> Future[T]:
        """Run the launch side of an op: it enqueues, and returns at once."""
        before, self.asynchronous = self.asynchronous, asynchronous
        self._kept = [] if asynchronous else None
        try:
            result = function()
            if self._kept is not None:
                self.in_flight(result.event if isinstance(result, Outcome) else None, self._kept)
        finally:
            self.asynchronous, self._kept = before, None
        return Settled(result)

    def in_flight(self, event: Event | None, used: list[object]) -> None:
        """Keep ``used`` alive until ``event``, the end of an async op, was waited for or has passed."""
        if self._in_flight:
            self._prune()
        self._in_flight.append((event, used))

    def keep(self, *used: object) -> None:
        """Keep what an item uses until the op has ended, if it runs on streams of the group's own.

        Otherwise the caching allocator would give the memory of a freed tensor to the stream on which it
        was made, while this stream still uses it. ``record_stream`` would also work, but makes the
        allocator wait for events; here the caller's ``Work.wait()`` frees the memory.
        """
        if self._kept is not None:
            self._kept.extend(used)

    def _prune(self) -> None:
        """Free the memory of ops that have ended without being waited for."""
        while self._in_flight:
            event = self._in_flight[0][0]
            if isinstance(event, DeviceEvent) and any(point.target[1] for point in event.points):
                if self.capturing:
                    return
            elif event is not None and (self.capturing or not event.is_completed()):
                return
            self._in_flight.popleft()

    def _stream_words(self) -> driver.Driver | None:
        """Return the driver with which this rank's streams write words; None if they cannot or must not."""
        return driver.stream_words(self._index)

    def words_for(self, workspace: Workspace) -> tuple[driver.Driver | None, int]:
        """Return what writes the signals of the op in ``workspace`` (None: kernels), and its epoch."""
        self.caller()
        if self.replays:
            return None, 0
        finished = self._epochs[workspace.buffer.addresses[self.rank]]
        return self._stream_words(), finished + 1

    def finished(self, workspace: Workspace) -> None:
        """Note that the end of the op in ``workspace`` was enqueued."""
        self._epochs[workspace.buffer.addresses[self.rank]] += 1

    def counts(self, buffer: SymmetricBuffer, programs: int) -> None:
        """Note that ``programs`` were enqueued; each adds one in ``buffer`` when it has ended."""
        self._epochs[buffer.addresses[self.rank]] += programs

    @functools.cached_property
    def residency(self) -> Residency:
        """The object that orders the kernels of this rank's groups where they do not fit together."""
        return residency(self._index, self.program_limit + 1)

    @functools.cached_property  # it can be written, which mypy does not know
    def program_limit(self) -> int:  # type: ignore[override]
        """One multiprocessor is left for signals and sums of the group's streams."""
        properties = torch.cuda.get_device_properties(self.device)
        return max(2, int(properties.multi_processor_count) - 1)

    def poll_limit(self) -> int:
        return int(self._poll_seconds * POLLS_PER_SECOND)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def failure_of(self, number: int, *, completed: bool) -> Exception | None:
        return None if completed else self.failure

    def wake_kernels(self) -> None:
        """End every rank's waits in kernels, from any thread, by the copy engine, which is free.

        If streams share one hardware queue, this comes after the enqueued items: then a wait may end by its
        own timeout first.
        """
        if (one := self._one) is None:
            return

        def tell() -> None:
            for buffer in self.workspaces():
                for rank in range(self.world_size):
                    if buffer.mapped(rank):
                        word = self.header(buffer, rank)[ABORT_WORD : ABORT_WORD + 1]
                        word.copy_(one, non_blocking=True)

        streams.run_on(self.alarm_stream(), tell)

    def header(self, buffer: SymmetricBuffer, rank: int) -> torch.Tensor:
        return buffer.view(rank, 0, (HEADER_WORDS,), torch.int64)

    def workspaces(self) -> list[SymmetricBuffer]:
        return list(self._buffers)

    def ops_finished(self, buffer: SymmetricBuffer) -> int:
        """Return the number of ops' ends enqueued in a workspace, without replays of graphs."""
        return self._epochs.get(buffer.addresses[self.rank], 0)

    def trouble(self, doing: str) -> Exception | None:
        return self.failure

    def fail(self, error: Exception) -> None:
        """Keep the first ``error`` for the next call, and end every wait of every rank."""
        if self.failure is None:
            self.failure = error
            self.abort(str(error))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        self.check()
        for buffer in self._buffers:
            header = self.header(buffer, self.rank).cpu().tolist()
            if (error := signal_report(self.rank, header)) is not None:
                raise error

    def close(self) -> None:
        self._in_flight.clear()
        self.events.clear()
        self._buffers.clear()
        self._epochs.clear()
        self.launches.clear()
        if "residency" in self.__dict__:
            self.residency.forget(id(self))


def signal_report(rank: int, header: Sequence[int]) -> CollectiveTimeoutError | None:
    """Return the error that the status record in a channel's header describes, or None."""
    claimed, source, slot, expected, seen, program = header[CLAIMED_WORD : CLAIMED_WORD + 6]
    if not claimed or not expected:
        return None
    return CollectiveTimeoutError(
        f"rank {rank}: program {program} timed out waiting for rank {source}: slot at byte {slot} "
        f"was {seen}, expected {expected}",
        (source,),
    )
