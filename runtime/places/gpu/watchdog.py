"""The watchdog of a rank on a GPU: a thread that finds failures while the host goes on.

A rank's host enqueues work and does not wait for it, so another thread has to look. There is one thread per
place. It sleeps while no work runs; otherwise it looks every 50 ms for

=======================  ============================================================================
a wait that timed out    in a kernel: its record in the header of the workspace
peers                    a process that ended, a group that was aborted (``place.trouble()``)
=======================  ============================================================================

If it finds one, it fails the place: it keeps the error for the next call and aborts the group on all ranks,
and every wait in every kernel returns. Results that are computed after that are void.

The thread does not query CUDA, because queries would end another thread's graph capture. It copies a
header to pinned memory in one look and reads it in the next.
"""

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from interlace.kernels.signal import ABORT_WORD, CLAIMED_WORD, EPOCH_WORD, HEADER_WORDS
from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.places.gpu import driver

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
        """End the thread. Idempotent."""
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
        """Return whether enqueued work may not have ended."""
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
                    mirror = driver.pinned([0] * HEADER_WORDS)
                    self._headers[index] = (buffer, mirror)
                mirror.copy_(place.header(buffer, place.rank), non_blocking=True)


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
