"""The place ``cuda`` with virtual ranks: several ranks of one process share one GPU.

Symmetric memory is one plain allocation per rank. All allocations are in one address space, so the kernels
run as they would between GPUs, including publishing and waiting. Every rank has its own streams.

Three rules keep it from blocking:

- persistent grids share the SMs, so that all ranks' kernels are resident together (``program_limit``);
- the launches of one op happen together: ranks first allocate and compile, then meet, then launch. No rank
  does anything that might synchronize the device (an allocation, a module load) while a kernel of another
  rank polls for a launch that is still to come;
- ranks launch in step, item by item: every rank has already enqueued what an item waits for. So one
  hardware queue suffices, and streams may share queues in any way.

The launch sides of the ranks are threads that take turns (:class:`Turns`). Only one rank's user code runs
at a time; the turn passes on when a rank waits for the others. So two threads never use global state of
torch and Triton (random generators, compile caches) at once.
"""

import contextvars
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.runtime.core.errors import (
    AbortedError,
    CollectiveTimeoutError,
    InterlaceError,
    PlaceUnavailableError,
    rank_error,
)
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Place
from interlace.runtime.places.gpu.device_place import DevicePlace, Residency, residency
from interlace.runtime.places.gpu.driver import gpu_problem


@dataclass(eq=False)
class Meeting:
    """One point at which the ranks of a group meet, with the object that each has brought."""

    size: int
    brought: dict[int, object] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.brought) == self.size


class Turns:
    """Lets one thread run at a time and lets threads meet; shared by all ``world_size`` ranks of a run."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self._condition = threading.Condition()
        self._running = False
        self.world_size = self._ranks_left = world_size
        self._waiting: list[Meeting] = []
        self._meetings: dict[object, Meeting] = {}
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.failed: str | None = None
        self.residencies: dict[object, Any] = {}  # by rank; see device_place.py

    def take(self) -> None:
        with self._condition:
            self._take()

    def _take(self) -> None:
        self._condition.wait_for(lambda: not self._running)
        self._running = True

    def finish(self) -> None:
        with self._condition:
            self._ranks_left -= 1
            self._running = False
            self._condition.notify_all()

    def fail(self, reason: str) -> None:
        with self._condition:
            self.failed = self.failed or reason
            self._condition.notify_all()

    def _stuck(self) -> bool:
        """Return whether every remaining rank waits for a meeting that is not complete."""
        return len(self._waiting) == self._ranks_left and not any(
            meeting.complete for meeting in self._waiting
        )

    def meet(self, key: object, rank: int, size: int, bring: object, doing: str) -> list[Any]:
        """Wait until ``size`` ranks have come to ``key``. Return what they brought, by rank.

        Raises AbortedError once another rank has failed. Raises CollectiveTimeoutError after the deadline,
        or at once when no remaining rank could still come.
        """
        with self._condition:
            meeting = self._meetings.setdefault(key, Meeting(size))
            meeting.brought[rank] = bring
            self._running = False
            self._waiting.append(meeting)
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: meeting.complete or self.failed is not None or self._stuck(),
                timeout=max(0.0, self._deadline - time.monotonic()),
            )
            stuck = self._stuck()
            self._take()
            self._waiting.remove(meeting)
            if meeting.complete:
                return [meeting.brought[r] for r in range(size)]
            if self.failed is not None:
                raise AbortedError(f"rank {rank} stopped in {doing}: {self.failed}")
            missing = tuple(r for r in range(size) if r not in meeting.brought)
            why = "which will never come" if stuck else f"not finished within {self.timeout:g} s"
            raise CollectiveTimeoutError(
                f"rank {rank} waits in {doing} for ranks {list(missing)}, {why}", missing
            )

    def forget(self, key: object) -> None:
        """Delete a meeting that every rank has left."""
        with self._condition:
            self._meetings.pop(key, None)


def run_threads(on_rank: Callable[[int], object], world_size: int, turns: Turns) -> list[Any]:
    """Run ``on_rank(rank)`` on a thread per rank. Return results by rank, or raise the first exception."""
    results: list[object] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        turns.take()
        try:
            results[rank] = on_rank(rank)
        except BaseException as error:
            errors.append((rank, error))
            turns.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            turns.finish()

    threads = []
    for rank in range(world_size):
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(main, rank), name=f"interlace rank {rank}", daemon=True
        )
        threads.append(thread)
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = next((e for e in errors if not isinstance(e[1], AbortedError)), errors[0])
        raise rank_error(*first) from first[1]
    return results


class VirtualRankPlace(DevicePlace):
    """One virtual rank of one group. ``members`` are ranks of the run, in group order."""

    name = "cuda"
    virtual = True

    def __init__(self, turns: Turns, members: tuple[int, ...], rank: int, key: Any) -> None:
        poll_seconds = min(turns.timeout, 20.0)
        super().__init__(rank, len(members), current_device(), poll_seconds=poll_seconds)
        self._turns, self._members, self._key = turns, members, key
        self._meetings = 0

    def _meet(self, bring: object, doing: str) -> list[Any]:
        number, self._meetings = self._meetings, self._meetings + 1
        answers = self._turns.meet((self._key, number), self.rank, self.world_size, bring, doing)
        self._turns.forget((self._key, number - 2))
        return answers

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return self._meet(payload, doing)

    def _allocate(self, nbytes: int) -> SymmetricBuffer:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream().synchronize()  # peers may write as soon as they know the address
        parts = self._meet(buffer, "an allocation of symmetric memory")
        return SymmetricBuffer.over(self.rank, parts)

    def subgroup(self, ranks: tuple[int, ...], generation: int) -> Place:
        members = tuple(self._members[rank] for rank in ranks)
        key = (self._key, members, generation)
        return VirtualRankPlace(self._turns, members, ranks.index(self.rank), key)

    @contextmanager
    def launching(self) -> Iterator[None]:
        with super().launching():
            self._deferred = []
            try:
                yield
                items = self._deferred
            finally:
                self._deferred = None
            longest = max(self._meet(len(items), "the launch of an op"))
            for number in range(longest):
                if number < len(items):
                    items[number]()
                self._meet(None, "the launch of an op")

    @functools.cached_property
    def residency(self) -> Residency:
        """The residency of this rank's share of the GPU, the same for all its groups."""
        capacity, known = self.program_limit + 1, self._turns.residencies
        return residency(self._members[self.rank], capacity, known)

    @functools.cached_property  # can be written, which mypy does not know
    def program_limit(self) -> int:  # type: ignore[override]
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return max(2, sms // self._turns.world_size - 1)

    def check(self) -> None:
        super().check()
        if self._turns.failed is not None:
            raise InterlaceError(f"rank {self.rank}: the group has failed: {self._turns.failed}")

    def abort(self, reason: str) -> None:
        self._turns.fail(reason)
        self.wake_kernels()


def run_virtual_ranks(
    on_rank: Callable[[Place], object], world_size: int, *, timeout: float
) -> list[Any]:
    """Run ``on_rank(place)`` on ``world_size`` virtual ranks of the current GPU; results by rank."""
    problem = gpu_problem()
    if problem:
        raise PlaceUnavailableError(
            f'place "cuda" cannot be used here: {problem}; use place="sim" or "shm"'
        )
    device = torch.cuda.current_device()
    turns = Turns(world_size, timeout)
    members = tuple(range(world_size))
    places: list[VirtualRankPlace] = []

    def main(rank: int) -> object:
        torch.cuda.set_device(device)
        place = VirtualRankPlace(turns, members, rank, "world")
        places.append(place)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            result = on_rank(place)
            place.exchange(b"", "the end of the run")
            place.settle()
        return result

    try:
        return run_threads(main, world_size, turns)
    except BaseException:
        for place in places:
            place.abort("the run failed")  # wakes every kernel that still polls
        torch.cuda.synchronize()
        raise


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
