"""Streams and events of a GPU. Events are recorded only if one CUDA stream has to wait for another.

The group's ``compute`` stream is a logical one. For an op that the caller waits for, its items go to the
caller's current CUDA stream: nothing forks or joins, no event is needed, the caching allocator sees all
memory used where it was allocated, and a graph captures the op like the caller's own kernels. For an
asynchronous op, its items go to a stream of the group's own. Either way they run in the order of the calls:
when the logical stream moves to another CUDA stream, that one waits first.

A :class:`Point` is a place in a CUDA stream, and costs nothing until another stream waits for it. Only then
is a CUDA event recorded, which may be later in the stream than the point, never earlier. If later is wrong,
the point is recorded at once: at the end of an asynchronous op, and at the start of any op, when its first
item is about to follow.

In a graph capture, points of another capture or of none are not waited for. The streams that the caller
captures and replays in order the capture after earlier work, and the replays.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from interlace.kernels import signal, slots
from interlace.runtime.core.launch import KernelFunction, KernelLaunch
from interlace.runtime.core.memory import SymmetricBuffer, Workspace, peers_of
from interlace.runtime.core.stream import Event, Stream
from interlace.runtime.places.gpu.launch import PreparedLaunch

StreamTarget = tuple[int, int]
"""A CUDA stream's handle, and the number of the graph capture that it is in, or 0."""


_numbers = itertools.count()


class Point:
    """The place after all that was enqueued on a CUDA stream so far.

    ``event`` is recorded instead of a new one; it then means its last recording. ``pool`` has events that
    no point needs any more, and receives this one's: there is one event for every op in flight.
    """

    __slots__ = ("_event", "_pool", "number", "recorded", "target")

    def __init__(
        self,
        target: StreamTarget,
        event: torch.cuda.Event | None = None,
        pool: list[torch.cuda.Event] | None = None,
    ) -> None:
        self.target = target
        self.number = next(_numbers)  # later points in a stream have larger numbers
        self._event, self.recorded, self._pool = event, False, pool

    def __del__(self) -> None:
        # a wait for the event waits for this recording of it, even if another one follows
        if self._pool is not None and self._event is not None and not self.target[1]:
            self._pool.append(self._event)

    def record(self) -> torch.cuda.Event:
        if self._event is None:
            self._event = self._pool.pop() if self._pool else torch.cuda.Event()
        if not self.recorded:
            self.recorded = True
            self._event.record(stream_of(self.target[0]))
        return self._event


def stream_of(handle: int) -> torch.cuda.Stream:
    """Return torch's object for a CUDA stream; 0 is the default stream of the current device."""
    return _external(handle) if handle else torch.cuda.default_stream()


@functools.lru_cache(maxsize=1024)
def _external(handle: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle)


def run_on(stream: torch.cuda.Stream | None, function: Callable[[], object]) -> None:
    """Call torch code on ``stream``; None is the caller's current one, which needs no change."""
    if stream is None:
        function()
        return
    with torch.cuda.stream(stream):
        function()


class DeviceEvent(Event):
    """Several points. They are known once the items that it stands for were submitted."""

    __slots__ = ("points", "submitted")

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.submitted = False

    def is_completed(self) -> bool:
        """Return False for a point in a graph capture, which every replay reaches again."""
        if not self.submitted or any(point.target[1] for point in self.points):
            return False
        return all(point.record().query() for point in self.points)

    def synchronize(self) -> None:
        for point in self.points:
            point.record().synchronize()


def programs_of(launch: KernelLaunch) -> int:
    """Return the number of programs of ``launch`` that may hold multiprocessors while they wait."""
    x, y, z = launch.extents
    return x * y * z if launch.num_warps > 1 else 0


class DeviceStream(Stream):
    """An ordered queue of one rank, on a separate CUDA stream, or on the caller's if it ``follows``."""

    def __init__(self, place: Any, stream: torch.cuda.Stream, *, follows: bool) -> None:
        self._place = place  # a DevicePlace
        self._own = stream
        self._own_handle = int(stream.cuda_stream)
        self.follows = follows
        self._last: dict[int, StreamTarget] = {}  # target of the last item, eager and in a capture
        self._end: Point | None = None  # after the last item, if it was asked for
        self._waiting: dict[StreamTarget, Point] = {}
        self._waited: dict[StreamTarget, Point] = {}  # the next item comes after these
        self._depends: Workspace | None = None  # the workspace of the op that has waited for data

    def target(self) -> StreamTarget:
        """Return the CUDA stream to which the next item would go."""
        caller: StreamTarget = self._place.caller()
        if self.follows and not self._place.asynchronous:
            return caller
        return self._own_handle, caller[1]

    def enter(self) -> StreamTarget:
        """Return where the next item goes, after waiting for all that must come before it."""
        target = self.target()
        capture = target[1]
        last = self._last.get(capture)
        if last != target:
            if last is not None:
                self.follow(Point(last, pool=self._place.events))
            elif capture:  # the first item in this capture; nothing remains of earlier captures
                self._last = {key: known for key, known in self._last.items() if not key}
                self._waited = {key: known for key, known in self._waited.items() if not key[1]}
            self._last[capture] = target
        self._place.about_to_use(target)
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for where, point in waiting.items():
                if where[1] == capture:
                    self._order_after(point, target)
                elif not where[1]:
                    self._waiting[where] = point  # for the first eager item
        self._end = None
        return target

    def _order_after(self, point: Point, target: StreamTarget) -> None:
        known = self._waited.get(point.target)
        if point.target[0] != target[0] and (known is None or known.number < point.number):
            stream = self._own if target[0] == self._own_handle else stream_of(target[0])
            stream.wait_event(point.record())
            self._waited[point.target] = point

    def follow(self, point: Point) -> None:
        """Order the next item after ``point``."""
        known = self._waiting.get(point.target)
        if known is None or known.number < point.number:
            self._waiting[point.target] = point

    def _do(self, function: Callable[[], object]) -> None:
        """Call torch code with the CUDA stream of this stream as the current one."""
        run_on(self._own if self.enter()[0] == self._own_handle else None, function)

    def launch(self, launch: KernelLaunch) -> None:
        prepared = self._launch(launch)
        if self._place.recorder is not None:
            self._place.recorder.note(self, (launch, prepared))

    def _launch(self, launch: KernelLaunch) -> PreparedLaunch:
        prepared: PreparedLaunch = self._place.launches.prepare(launch, *self.target())
        self._place.keep(launch.arguments, prepared)
        programs = programs_of(launch)

        def item() -> None:
            if programs:
                self.admit(programs)
            prepared.run(self.enter()[0])

        self._place.submit_item(item)
        return prepared

    def admit(self, programs: int) -> None:
        """Make the next items wait until so many programs fit the GPU; see ``device_place.py``."""
        group, residency = id(self._place), self._place.residency
        alone = residency.alone
        if alone is not None and alone.group == group:  # the only group: its ops follow each other
            alone.in_op += programs
            alone.ends.append(Point(self.target()))
            return
        for point in residency.admit(group, programs, self.target()):
            self.follow(point)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, label: str) -> None:
        if self._place.recorder is not None:
            self._place.recorder.note(self, (destination, source))
        self._place.keep(destination, source)
        self._place.submit_item(
            lambda: self._do(lambda: destination.copy_(source, non_blocking=True))
        )

    def call(self, function: Callable[[], object], label: str) -> None:
        if self._place.recorder is not None:
            self._place.recorder.spoil()
        self._place.keep(function)
        self._place.submit_item(lambda: self._do(function))

    def _signal(self, kernel: KernelFunction, workspace: Workspace, **rest: int) -> KernelLaunch:
        peers = peers_of(workspace.buffer, workspace.world_size)
        return KernelLaunch(kernel, 1, {"peers": peers, **rest}, workspace.op, num_warps=1)

    def publish(self, workspace: Workspace, peer: int, slot: int) -> None:
        """Signal by the stream itself, unless it has waited for data, because that wait may have timed out.

        A kernel checks whether it did. A wait for credits holds the stream instead.
        """
        if self._place.recorder is not None:
            self._place.recorder.signalled(self, "publish", peer, slot)
        words, epoch = self._place.words_for(workspace)
        slot_byte = workspace.slot_byte(slot)
        if words is None or self._depends is workspace:
            kernel = signal.publish_kernel
            self._launch(self._signal(kernel, workspace, peer=peer, slot_byte=slot_byte))
            return
        address = workspace.buffer.addresses[peer] + slot_byte
        self._place.submit_item(lambda: words.write(self.enter()[0], address, epoch))

    def wait(self, workspace: Workspace, source: int, slot: int) -> None:
        if self._place.recorder is not None:
            self._place.recorder.signalled(self, "wait", source, slot)
        self._depends = workspace
        arguments = {"source": source, "slot_byte": workspace.slot_byte(slot)}
        self._launch(self._signal(signal.wait_kernel, workspace, **arguments))

    def wait_credits(self, workspace: Workspace) -> None:
        if self._place.recorder is not None:
            self._place.recorder.signalled(self, "wait_credits")
        self._launch(self._signal(slots.wait_credits_kernel, workspace))

    def finish(self, workspace: Workspace) -> None:
        self.launch(self._signal(slots.finish_kernel, workspace))
        self._place.submit_item(self.ended)
        if self._place.recorder is not None:
            self._place.recorder.finished()
        self._place.finished(workspace)

    def counted(self, buffer: SymmetricBuffer, programs: int) -> None:
        self._place.submit_item(self.ended)
        if self._place.recorder is not None:
            self._place.recorder.finished()
        self._place.counts(buffer, programs)

    def ended(self) -> None:
        """Note that the end of an op was enqueued here, after all its kernels."""
        self._place.residency.ended(id(self._place), self.target())

    def record(self) -> Event:
        event = DeviceEvent()
        self._place.submit_item(lambda: self.mark(event))
        return event

    def mark(self, event: DeviceEvent) -> None:
        """Give ``event`` the points at which this stream is now."""
        last = self._last.get(self.target()[1])
        if last is not None and (self._end is None or self._end.target != last):
            self._end = Point(last, pool=self._place.events)
            if last[0] == self._own_handle:
                # at once: the host may go on to enqueue items that a wait must not include
                self._end.record()
        if last is not None and self._end is not None:
            event.points.append(self._end)
        if self._waiting:
            event.points.extend(self._waiting.values())
        event.submitted = True

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, DeviceEvent)

        def run() -> None:
            for point in event.points:
                self.follow(point)

        self._place.submit_item(run)
