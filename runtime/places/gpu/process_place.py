"""Ranks on GPUs that are processes, one per rank, and the place ``cuda`` for those on one node.

Another place of the same ranks, ``processes``, does all that needs no GPU: ``shm`` if they share a host,
``hosts`` otherwise. It joins the group over any store, exchanges small messages, knows which peers live,
and delivers an abort. This file has the GPU's part: agreement that does not delay the CPU
(``agreement.py``), a watchdog, and closing both in order.

Nothing here depends on CUDA_DEVICE_MAX_CONNECTIONS. Each item that a rank enqueues waits only for items
that every rank enqueues before it, so one hardware queue suffices.

The watchdog is a thread that finds failures while the host enqueues work and does not wait for it. There is
one per place. It sleeps while no work runs. Otherwise it looks every 50 ms for kernels whose wait timed out
(a record in the header of the workspace says so), and for peers that ended or aborted the group. It then
fails the place: it keeps the error for the next call and aborts the group on all ranks, and every wait in
every kernel returns.

The thread does not query CUDA, because queries would end another thread's graph capture. It copies a
header to pinned memory in one look and reads it in the next.
"""

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.kernels.signal import ABORT_WORD, EPOCH_WORD, HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import AbortedError, PlaceUnavailableError
from interlace.runtime.core.memory import SymmetricBuffer, Workspace
from interlace.runtime.core.place import Place
from interlace.runtime.core.stream import Continued, Event, Outcome
from interlace.runtime.places.gpu import driver
from interlace.runtime.places.gpu.agreement import Agreement
from interlace.runtime.places.gpu.device_place import DevicePlace, signal_report
from interlace.runtime.places.gpu.memory import IpcMemory, MemoryRefused, TorchMemory
from interlace.runtime.places.gpu.plans import Plans
from interlace.runtime.places.gpu.stream import DeviceEvent, Point
from interlace.runtime.processes import dump as record

LOOK_SECONDS = 0.05
IDLE_LOOK_SECONDS = 1.0  # if graphs are replayed without the host's knowledge
_UNKNOWN = torch.empty(0)


class Watchdog:
    """Watches ``place``, a DevicePlace; its thread starts with the first :meth:`look_after`."""

    def __init__(self, place: Any) -> None:
        self._place = weakref.ref(place)
        self._wanted = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._headers: list[tuple[SymmetricBuffer, torch.Tensor]] = []

    def look_after(self) -> None:
        """Wake the watchdog, because work was enqueued."""
        if self._wanted.is_set():
            return
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="interlace watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _watch(self) -> None:
        place = self._place()
        if place is None:
            return
        if place.device.type == "cuda":
            torch.cuda.set_device(place.device)
        driver.leave_captures_alone()
        del place
        while not self._stopped:
            self._wanted.wait(IDLE_LOOK_SECONDS)
            place = self._place()
            if self._stopped or place is None or place.failure is not None:
                return
            if self._wanted.is_set() or place.replays:
                self.look(place)
            del place
            time.sleep(LOOK_SECONDS)

    def look(self, place: Any) -> None:
        problem = self._problem(place)
        place.reached({b.addresses[place.rank]: int(m[EPOCH_WORD]) for b, m in self._headers})
        if problem is not None:
            place.fail(problem)

    def _problem(self, place: Any) -> Exception | None:
        problem: Exception | None = place.trouble("work on the GPU")
        if problem is not None:
            return problem
        for _, mirror in self._headers:
            header = mirror.tolist()
            problem = signal_report(place.rank, header)
            if problem is None and header[ABORT_WORD]:
                problem = AbortedError(
                    f"rank {place.rank}: a wait in a kernel of another rank of the group has timed out"
                )
            if problem is not None:
                return problem
        self._wanted.clear()
        if self._busy(place):
            self._wanted.set()
        self._copy_headers(place)
        return None

    def _busy(self, place: Any) -> bool:
        return len(self._headers) < len(place.workspaces()) or any(
            int(mirror[EPOCH_WORD]) < place.ops_finished(buffer) for buffer, mirror in self._headers
        )

    def _copy_headers(self, place: Any) -> None:
        """Copy the headers of this rank's workspaces to the host, for the next look."""
        buffers = place.workspaces()
        known = {id(buffer): mirror for buffer, mirror in self._headers}
        self._headers = [(buffer, known.get(id(buffer), _UNKNOWN)) for buffer in buffers]
        with torch.cuda.stream(place.alarm_stream()):
            for index, (buffer, mirror) in enumerate(self._headers):
                if mirror is _UNKNOWN:
                    mirror = driver.pinned_tensor([0] * HEADER_WORDS)
                    self._headers[index] = (buffer, mirror)
                mirror.copy_(place.header(buffer, place.rank), non_blocking=True)


def _call(op: str, tensor: torch.Tensor) -> Call:
    return Call(op, (("dtype", tensor.dtype), ("shape", tuple(tensor.shape))))


_places: "weakref.WeakSet[DeviceProcessPlace]" = weakref.WeakSet()


class DeviceProcessPlace(DevicePlace):
    """One rank of a group of processes on GPUs. ``processes``, its place without GPUs, is closed with it.

    ``timeout``, in seconds, bounds every wait on the device; other waits have the timeout of ``processes``.
    """

    def __init__(self, processes: Any, device: torch.device, *, timeout: float) -> None:
        super().__init__(processes.rank, processes.world_size, device, poll_seconds=timeout)
        self.processes, self.joining = processes, processes.joining
        self.timeout = timeout
        self._agreement = Agreement(processes)
        self._watchdog: Watchdog | None = None
        self._memory: Any = None
        self._closed = False
        _places.add(self)

    def known_as(self, ranks: Sequence[int]) -> None:
        self.processes.known_as(ranks)
        group = self.processes.group
        record.known_as(group, [ranks[rank] for rank in group.names], ranks)

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return self._agreement.exchange(payload, doing)

    def agree(self, call: Call) -> list[bytes]:
        self._check_calls()
        return self._agreement.agree(call)

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self._agreement.number

    def _check_calls(self) -> None:
        """Raise if ranks have called different ops, as far as they have noted it."""
        problem = self._agreement.mismatch()
        if problem is not None:
            self.fail(problem)
            raise problem

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        return self._of(self.processes.subgroup(ranks, generation))

    def reunited(self, ranks: Sequence[int] | None) -> tuple[Place, list[int]]:
        processes, left = self.processes.reunited(ranks)
        return self._of(processes), left

    def _of(self, processes: Place) -> Place:
        place = type(self)(processes, self.device, timeout=self.timeout)
        place.high_priority = self.high_priority
        return place

    def bound(self) -> float:
        return float(self.processes.bound())

    def set_timeout(self, seconds: float) -> None:
        self.timeout = self._poll_seconds = seconds
        self.processes.set_timeout(seconds)
        for buffer in self.workspaces():
            self.header(buffer, self.rank)[SPIN_LIMIT_WORD] = self.poll_limit()

    def new_plans(self, communicator: Any) -> Any:
        return Plans(communicator, self, self._agreement, self.processes.check)

    @functools.cached_property
    def _host_engine(self) -> Engine:
        """The engine of messages. A message is a copy off the GPU, one of ``processes``, and a copy back.

        It is right for every tag and order, also for receives from any rank. It is not fast, and the
        sender's host waits for its GPU. The receiver's host does not: its ``Work.wait()`` waits for the
        message, which cannot be enqueued, and then only orders the stream.
        """
        engine: Engine = self.processes.new_engine(None)
        return engine

    def _bring(self, to: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy to the GPU, on a stream of the group's that waits for nothing; from any thread."""
        side = self.side_stream()
        with torch.cuda.stream(side):
            to.copy_(source)
            event = DeviceEvent()
            event.points, event.submitted = [Point((int(side.cuda_stream), 0))], True
            event.points[0].record()
        return event

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        copy = tensor.detach().to("cpu", copy=True)  # waits for the work that produces it
        return self._host_engine.send(_call("send", tensor), copy, peer, tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        self._order_messages()
        arrived: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)

        def then(outcome: Outcome) -> Outcome:
            return Outcome(None, self._bring(tensor.detach(), arrived), outcome.source)

        arriving = self._host_engine.recv(_call("recv", tensor), arrived, peer, tag)
        return Continued(arriving, then)

    def _order_messages(self) -> None:
        """Order the copies of received messages after the caller's earlier work."""
        self.side_stream().wait_stream(torch.cuda.current_stream())

    def finished(self, workspace: Workspace) -> None:
        super().finished(workspace)
        self._note_end(workspace.buffer)

    def counts(self, buffer: SymmetricBuffer, programs: int) -> None:
        super().counts(buffer, programs)
        self._note_end(buffer)

    def _note_end(self, buffer: SymmetricBuffer) -> None:
        epoch = None if self.replays else self.ops_finished(buffer)
        self._agreement.ops.enqueued(buffer.addresses[self.rank], epoch)
        self._start_watchdog().look_after()

    def reached(self, epochs: Mapping[int, int]) -> None:
        """Note how many ops the device has ended in each of this rank's workspaces, by address."""
        self._agreement.ops.reached(epochs)

    def _start_watchdog(self) -> Watchdog:
        if self._watchdog is None:
            self._watchdog = Watchdog(self)
        return self._watchdog

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._check_calls()
        self.processes.check()

    def failure_of(self, number: int, *, completed: bool) -> Exception | None:
        problem = self._agreement.mismatch()
        if problem is not None:
            self.fail(problem)
            if number < self._agreement.differs:
                return None if completed else self.failure
            return problem
        return super().failure_of(number, completed=completed)

    def trouble(self, doing: str) -> Exception | None:
        if self.failure is not None:
            return self.failure
        return self._agreement.mismatch() or self.processes.trouble(doing)

    def fault(self, reason: str) -> None:
        self.processes.fault(reason)

    def fail(self, error: Exception) -> None:
        if self.failure is None:
            self._agreement.ops.failed(error)
        super().fail(error)

    def abort(self, reason: str) -> None:
        """Implements ``Place.abort``; it also ends every wait on this rank's GPU and its peers'."""
        self.processes.abort(reason)
        self.wake_kernels()

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def close(self) -> None:
        """Leave the group. Symmetric memory is freed with the last tensor over it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_watching()
        if self._memory is not None:
            self._buffers.clear()
            self._memory.close()
        super().close()
        self.processes.linger = self.linger
        self.processes.close()


def _at_exit() -> None:
    """End threads that use CUDA: they must not return into an interpreter that is gone."""
    for place in list(_places):
        place._stop_watching()


atexit.register(_at_exit)


class CudaPlace(DeviceProcessPlace):
    """One rank on one GPU of one node. Ranks on one GPU take turns on it, which is right, but slow."""

    name = "cuda"
    _overlapping = False

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        if self.world_size == 1:
            allocated = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            return SymmetricBuffer.over(0, [allocated])
        if self._memory is not None:
            again: SymmetricBuffer = self._memory.allocate(nbytes, overlapping=self._overlapping)
            return again
        # the group's first memory decides its kind: the first that all ranks can have
        properties = torch.cuda.get_device_properties(self.device)
        name = str(getattr(properties, "uuid", self.device))
        names = self.exchange(name.encode(), "an allocation of symmetric memory")
        self._overlapping = len(set(names)) < self.world_size
        known = self.rank, self.world_size, self.device, self.exchange
        kinds: list[Callable[[], Any]] = [lambda: TorchMemory(*known, seconds=self.timeout)]
        reasons = []
        if self.processes.direct_access:  # all ranks are on one host
            kinds.append(lambda: IpcMemory(self.processes, self.device, self.exchange))
        for make in kinds:
            memory = make()
            try:
                buffer: SymmetricBuffer = memory.allocate(nbytes, overlapping=self._overlapping)
            except MemoryRefused as error:
                memory.close()
                reasons.append(f"{memory.kind}: {error}")
                continue
            self._memory = memory
            return buffer
        raise PlaceUnavailableError(
            f"rank {self.rank}: the group's GPUs cannot share memory; {'; '.join(reasons)}"
        )
