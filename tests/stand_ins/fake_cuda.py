"""A fake GPU for the logic of the host: streams, events, graph captures, memory that is freed too early.

The driver and ``torch.cuda`` are replaced; interlace's own code is not. A stream is a queue. Enqueued items
run later: when the host synchronizes, or at random times. A seed draws the stream whose first item runs
next. Tensors are the CPU's.

These parts behave as on a GPU, so that a fault in the host's logic shows:

=====================  ==============================================================================
order                  by stream and event only; a wait that never ends is a ``DeviceHang``
kernels                get addresses, and are written down in ``fake_kernels.py`` as generators that
                       yield their conditions
memory                 an item on the stream that was current uses a tensor safely, however soon it is
                       dropped, as with the caching allocator; on another stream that is ``UseAfterFree``
captures               events from outside, queries, synchronization and unjoined streams are errors;
                       a replay runs the same addresses and values again
stream memory ops      write words of memory, with the values they were given
multiprocessors        if their number is given, a kernel begins when all its programs have one, and keeps
                       them to its end; each rank has a GPU
connections            if their number is given, streams share so many hardware queues (``fake_queues.py``),
                       torch's streams come from its pool, copy engines are busy at times, and a first
                       use waits for all earlier items: a kernel is loaded
=====================  ==============================================================================

``do(function)`` is torch code of the user on the current stream: a test fills or reads tensors by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.runtime.compat.torch_groups import tensor_over
from interlace.runtime.places.gpu.launch import PreparedLaunch
from stand_ins import fake_kernels
from stand_ins.fake_items import (
    Capture,
    CudaError,
    DeviceHang,
    Item,
    Lease,
    Marker,
    Steps,
    UseAfterFree,
    storage_of,
)
from stand_ins.fake_queues import hardware_queues
from stand_ins.models import fake_attention_kernels, fake_expert_kernels

# Seconds, and turns of the hosts: on a busy machine some host may not get its turn for a while.
MOST_IDLE, MOST_IDLE_TURNS = 0.7, 300
CPU = torch.device("cpu")
MODELS = fake_kernels, fake_expert_kernels, fake_attention_kernels
"""Modules with a function for each kernel, of its name."""

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


class FakeStream:
    def __init__(self, device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        self.cuda_stream = gpu().pooled_stream(priority) if handle is None else handle
        self.priority = priority

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def synchronize(self) -> None:
        gpu().synchronize(self.cuda_stream)

    def wait_event(self, event: FakeEvent) -> None:
        gpu().wait_marker(self.cuda_stream, event.marker)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


class FakeEvent:
    def __init__(self, **options: Any) -> None:
        self.marker: Marker | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        device = gpu()
        device.events_recorded += 1
        self.marker = device.mark(device.current if stream is None else stream.cuda_stream)

    def query(self) -> bool:
        if self.marker is None:
            return True
        if self.marker.capture or gpu().captures_under_way():
            raise CudaError("operation not permitted when stream is capturing")
        gpu().run_some()
        return self.marker.reached

    def synchronize(self) -> None:
        if self.marker is not None:
            gpu().run_until(lambda: self.marker is None or self.marker.reached)


class FakeGraph:
    """``torch.cuda.CUDAGraph`` with the used methods."""

    def __init__(self) -> None:
        self._capture: Capture | None = None

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        self._capture = gpu().begin_capture()

    def capture_end(self) -> None:
        assert self._capture is not None
        gpu().end_capture(self._capture)

    def replay(self) -> None:
        assert self._capture is not None
        gpu().replay(self._capture)


@contextlib.contextmanager
def capturing() -> Iterator[FakeGraph]:
    """Capture the calls of the block in a graph; an error leaves the capture open, as in torch."""
    graph = FakeGraph()
    graph.capture_begin()
    yield graph
    graph.capture_end()


installed: FakeGpu | None = None


def gpu() -> FakeGpu:
    assert installed is not None
    return installed


def end_current_stream() -> None:
    """Wait until all work on the current stream has ended."""
    gpu().synchronize(gpu().current)


class FakeGpu:
    """The device. ``seed`` draws the order of streams; ``eager`` is the chance that work starts at once."""

    def __init__(
        self,
        seed: int = 0,
        *,
        eager: float = 0.3,
        stream_words: bool = True,
        multiprocessors: int = 0,
        connections: int | None = None,
    ) -> None:
        self.multiprocessors = multiprocessors
        self._hardware = hardware_queues(connections)
        self._random = random.Random(seed)
        self._eager, self._has_words = eager, stream_words
        self._queues: dict[int, list[Item]] = {0: []}
        self._owners: dict[int, int] = {}
        self._current = threading.local()
        self._streams = 0
        self._alarms: dict[int, int] = {}
        self._used: set[Any] = set()
        self._captures: list[Capture] = []
        self._number = 0
        self._leases: dict[int, set[Lease]] = {}
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self.forms: weakref.WeakKeyDictionary[PreparedLaunch, list[Form | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.running: PreparedLaunch | None = None
        self.let_hosts_run: Callable[[], None] | None = None
        self.events_recorded = 0
        self.loads: list[str] = []
        self.launches: list[str] = []
        self.words_written = 0

    # -- streams -------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        return int(getattr(self._current, "handle", 0))

    def new_stream(self) -> int:
        self._streams += 1
        self._queues[self._streams] = []
        self._owners[self._streams] = threading.get_ident()
        if self._hardware is not None:
            self._hardware.add(self._streams, self._context)
        return self._streams

    @property
    def _context(self) -> int:
        """Return the process of the calling thread; virtual ranks are threads of one process."""
        return 0 if self.let_hosts_run is None else threading.get_ident()

    def pooled_stream(self, priority: int) -> int:
        if self._hardware is None:
            return self.new_stream()
        pooled = self._hardware.of_the_pool(self._context, priority)
        handle = self._hardware.known(pooled)
        if handle is None:
            handle = self.new_stream()
            self._hardware.add_pooled(handle, pooled)
        return handle

    def alarm_stream(self) -> FakeStream:
        """Replaces ``driver.alarm_stream``: one stream per process, not from torch's pool."""
        context = self._context
        if context not in self._alarms:
            self._alarms[context] = self.new_stream()
        return FakeStream(handle=self._alarms[context])

    def first_use(self) -> None:
        """Load a kernel or make memory: the process waits for all of its enqueued work."""
        if self._hardware is None or self.captures_under_way():
            return
        own = threading.get_ident()
        pending = [
            item
            for handle, queue in self._queues.items()
            if self.let_hosts_run is None or self._owners.get(handle) == own
            for item in queue
        ]
        left = {id(item) for item in pending}
        self.run_until(
            lambda: not any(id(item) in left for queue in self._queues.values() for item in queue)
        )

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self._current.handle = stream.cuda_stream
        try:
            yield
        finally:
            self._current.handle = before

    def capture_of(self, handle: int) -> Capture | None:
        return next((each for each in self._captures if handle in each.streams), None)

    def captures_under_way(self) -> bool:
        """Return the captures of this thread; captures of other ranks do not count."""
        return any(capture.thread == threading.get_ident() for capture in self._captures)

    def enqueue(
        self, handle: int, label: str, steps: Steps, marker: Marker | None = None, programs: int = 0
    ) -> None:
        item = Item(label, steps, marker, programs=programs)
        capture = self.capture_of(handle)
        if capture is not None:
            capture.streams[handle].append(item)
            capture.items.append((handle, item))
            return
        self._queues[handle].append(item)
        if self._hardware is not None:
            self._hardware.enqueued(handle, item)
        if self._random.random() < self._eager:
            self.run_some()

    def mark(self, handle: int) -> Marker:
        capture = self.capture_of(handle)
        number = 0 if capture is None else capture.number
        marker = Marker(number, leases=frozenset(self._leases.get(handle, ())))

        def steps() -> Iterator[Callable[[], bool]]:
            marker.reached = True
            return iter(())

        self.enqueue(handle, "event", steps, marker)
        return marker

    def wait_marker(self, handle: int, marker: Marker | None) -> None:
        if marker is None:
            return
        capture = self.capture_of(handle)
        theirs = next((c for c in self._captures if c.number == marker.capture), None)
        if marker.capture and theirs is None:
            raise CudaError("event was last recorded in a capturing stream")
        if theirs is not None and capture is None:
            theirs.streams[handle] = []  # the stream joins the capture
            capture = theirs
        elif capture is not theirs:
            raise CudaError("dependency created on uncaptured work in another stream")
        if capture is not None and handle == capture.origin:
            capture.joined |= {h for h, items in capture.streams.items() if _has(items, marker)}

        for lease in marker.leases:
            if lease.owner == handle:
                lease.secure()
        self._leases.setdefault(handle, set()).update(marker.leases)

        def steps() -> Iterator[Callable[[], bool]]:
            yield lambda: marker.reached

        self.enqueue(handle, "wait for an event", steps)

    # -- running -------------------------------------------------------------------------------

    def _step(self, handle: int, queue: list[Item]) -> bool:
        """Execute the head of a stream; return False if it must wait."""
        item, hardware = queue[0], self._hardware
        if hardware is not None and not hardware.may_go_on(handle, item):
            return False
        if item.condition is not None and not item.condition():
            return False
        if item.running is None:
            if item.programs and not self._fits(queue, item):
                return False
            item.running = item.steps()
        try:
            item.condition = next(item.running)
        except StopIteration:
            queue.pop(0)
        if hardware is not None:
            hardware.went_on(handle, item, ended=not queue or queue[0] is not item)
        return True

    def _fits(self, queue: list[Item], item: Item) -> bool:
        """Return whether all programs of a kernel find a multiprocessor, if their number is limited."""
        handles = {id(each): handle for handle, each in self._queues.items()}
        owner = self._owners.get(handles[id(queue)])  # each rank has one GPU
        used = sum(
            each[0].programs
            for handle, each in self._queues.items()
            if each and each[0].running is not None and self._owners.get(handle) == owner
        )
        return not self.multiprocessors or used + item.programs <= self.multiprocessors

    def run_some(self, steps: int = 3) -> bool:
        progress = False
        for _ in range(steps):
            queues = [(handle, queue) for handle, queue in self._queues.items() if queue]
            self._random.shuffle(queues)
            if not any(self._step(handle, queue) for handle, queue in queues):
                break
            progress = True
        return progress

    def run_until(self, done: Callable[[], bool]) -> None:
        since, turns = time.monotonic(), 0
        while not done():
            idle = time.monotonic() > since + MOST_IDLE and turns > MOST_IDLE_TURNS
            if self.run_some(1):
                since, turns = time.monotonic(), 0
            elif self.let_hosts_run is not None and not idle:
                self.let_hosts_run()
                turns += 1
            else:
                heads = [queue[0].label for queue in self._queues.values() if queue]
                raise DeviceHang(f"nothing can go on; at the heads of streams: {heads}")

    def synchronize(self, handle: int | None = None) -> None:
        if self.captures_under_way() or self.capture_of(handle or 0) is not None:
            raise CudaError("operation not permitted when stream is capturing")
        handles = [handle] if handle is not None else list(self._queues)
        if handle is None and self.let_hosts_run is not None:  # threads are processes
            own = threading.get_ident()
            handles = [each for each in handles if self._owners.get(each) == own]
        queues = [self._queues[each] for each in handles]
        self.run_until(lambda: not any(queues))

    # -- graphs --------------------------------------------------------------------------------

    def begin_capture(self) -> Capture:
        self._number += 1
        capture = Capture(self._number, self.current, {self.current: []})
        self._captures.append(capture)
        return capture

    def end_capture(self, capture: Capture) -> None:
        self._captures.remove(capture)
        for handle, items in capture.streams.items():
            last = max((i for i, item in enumerate(items) if item.marker is None), default=-1)
            joined = any(
                item.marker is not None and self._awaited(capture, item.marker)
                for item in items[last + 1 :]
            )
            if handle != capture.origin and last >= 0 and not joined:
                raise CudaError("capturing stream has unjoined work")

    def _awaited(self, capture: Capture, marker: Marker) -> bool:
        return any(_has(capture.streams[handle], marker) for handle in capture.joined)

    def replay(self, capture: Capture) -> None:
        """Enqueue the captured work on the current stream."""
        markers = [item.marker for _, item in capture.items if item.marker is not None]
        start = self.mark(self.current)

        def begin() -> Iterator[Callable[[], bool]]:
            for marker in markers:
                marker.reached = False
            return iter(())

        self.enqueue(self.current, "replay", begin)
        begun = self.mark(self.current)
        handles = {each: self.new_stream() for each in capture.streams}
        for handle in handles.values():
            self.wait_marker(handle, begun)
        for each, item in capture.items:
            self.enqueue(handles[each], item.label, item.steps, item.marker, item.programs)
        for end in [self.mark(handle) for handle in handles.values()]:
            self.wait_marker(self.current, end)
        del start

    # -- memory --------------------------------------------------------------------------------

    def know(self, tensor: torch.Tensor) -> None:
        """Note that a launch gets an address within the memory of ``tensor``."""
        storage = tensor.untyped_storage()
        self._known = {
            start: known for start, known in self._known.items() if not known[1].expired()
        }
        self._known[storage.data_ptr()] = (storage.nbytes(), StorageWeakRef(storage))

    def _owner(self, address: int) -> StorageWeakRef:
        for start, (nbytes, reference) in self._known.items():
            if start <= address < start + max(1, nbytes) and not reference.expired():
                return reference
        raise UseAfterFree(f"nobody has memory at {address:#x}")

    def lease(self, handle: int, forms: dict[int, Form]) -> tuple[Lease, fake_kernels.Memory]:
        """Return a function from address to tensor for the run of an item on stream ``handle``."""
        owners = {address: self._owner(address) for address in forms}
        lease = Lease(self.current, list(owners.values()))
        if handle == self.current or self.capture_of(handle) is not None:
            lease.secure()
        else:
            self._leases.setdefault(handle, set()).add(lease)

        def tensor(address: int, view: fake_kernels.View | None = None) -> torch.Tensor:
            *given, dtype = forms[address]
            shape, strides = view or given
            owner = storage_of(owners[address])
            if owner is None:
                raise UseAfterFree(f"a tensor of shape {tuple(shape)} was freed before its use")
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            nbytes = (last + 1) * dtype.itemsize if 0 not in shape else 0
            assert address + nbytes <= owner.data_ptr() + owner.nbytes(), "beyond the memory"
            flat = tensor_over(address, nbytes, CPU).view(dtype)
            return flat.as_strided(shape, strides)

        return lease, tensor

    def torch_code(self, stream: FakeStream | None, function: Callable[[], Any]) -> None:
        """Replaces ``cuda_stream.run_on``."""
        handle = self.current if stream is None else stream.cuda_stream
        code = getattr(function, "__code__", None)
        copies = code is not None and "copy_" in code.co_names
        if code is not None and code not in self._used and not copies:
            self._used.add(code)  # a kernel of torch's, which is loaded now; a copy needs none
            self.first_use()

        def steps() -> Iterator[Callable[[], bool]]:
            busy = self._random.randrange(5) if copies and self._hardware is not None else 0
            yield from [lambda: True] * busy  # turns in which the copy engine does something else
            function()

        self.enqueue(handle, "torch", steps)

    def do(self, function: Callable[[], Any]) -> None:
        """Run torch code of the user on the current stream."""
        self.torch_code(None, function)

    # -- kernels and words ---------------------------------------------------------------------

    def write_word(self, handle: int, address: int, value: int) -> None:
        self.words_written += 1

        def steps() -> Iterator[Callable[[], bool]]:
            ctypes.c_int64.from_address(address).value = value
            return iter(())

        self.enqueue(handle, f"write {value}", steps)

    def launch(self, name: str, handle: int, arguments: dict[str, Any], programs: int) -> None:
        self.launches.append(name)
        assert self.running is not None
        forms = {
            value: form
            for value, form in zip(arguments.values(), self.forms[self.running], strict=True)
            if form is not None
        }
        lease, tensor = self.lease(handle, forms)
        model = next(getattr(module, name) for module in MODELS if hasattr(module, name))
        captured = self.capture_of(handle) is not None
        given = {**arguments, "grid": programs}

        def steps() -> Iterator[Callable[[], bool]]:
            yield from model(fake_kernels.Arguments(given, tensor))
            if not captured:
                lease.held, lease.over = [], True

        self.enqueue(handle, name, steps, programs=programs)


def _has(items: list[Item], marker: Marker) -> bool:
    return any(item.marker is marker for item in items)
