"""The launch side of virtual ranks: threads of one process that take turns.

Only one rank's user code runs at a time; the turn passes on when a rank waits for the others. Global
state of torch and Triton (random generators, compile caches) is therefore never used by two threads at
once. Nothing here knows about GPUs.
"""

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from interlace.runtime.core.errors import AbortedError, CollectiveTimeoutError, rank_error


@dataclass(eq=False)
class Meeting:
    """One point where the ranks of a group meet: what each has brought."""

    size: int
    brought: dict[int, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.brought) == self.size


class Turns:
    """Lets one thread run at a time and lets them meet; shared by all ``world_size`` ranks of a run."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self._condition = threading.Condition()
        self._running = False
        self.world_size = self._ranks_left = world_size
        self._waiting: list[Meeting] = []
        self._meetings: dict[Any, Meeting] = {}
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.failed: str | None = None
        self.residencies: dict[Any, Any] = {}  # by rank; see residency.py

    def take(self) -> None:
        with self._condition:
            self._take()

    def _take(self) -> None:
        self._condition.wait_for(lambda: not self._running)
        self._running = True

    def finish(self) -> None:
        """The rank whose turn it is has ended."""
        with self._condition:
            self._ranks_left -= 1
            self._running = False
            self._condition.notify_all()

    def fail(self, reason: str) -> None:
        with self._condition:
            self.failed = self.failed or reason
            self._condition.notify_all()

    def _stuck(self) -> bool:
        """Whether every rank that is left waits for a meeting that is not complete."""
        return len(self._waiting) == self._ranks_left and not any(
            meeting.complete for meeting in self._waiting
        )

    def meet(self, key: Any, rank: int, size: int, bring: Any, doing: str) -> list[Any]:
        """Wait until ``size`` ranks have come to ``key``; what they brought, by rank.

        Raises AbortedError once another rank has failed, CollectiveTimeoutError past the deadline, or
        at once when no rank is left that could still come.
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

    def forget(self, key: Any) -> None:
        """Drop a meeting that every rank has left."""
        with self._condition:
            self._meetings.pop(key, None)


def run_threads(on_rank: Callable[[int], Any], world_size: int, turns: Turns) -> list[Any]:
    """Run ``on_rank(rank)`` on a thread per rank; results by rank, or the first rank's exception."""
    results: list[Any] = [None] * world_size
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
