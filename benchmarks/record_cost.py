"""The cost of the flight recorder: all_reduce of 4 KiB with it, and with the headers of messages alone.

    python benchmarks/record_cost.py [blocks]

Blocks of the two alternate in the same processes, 2 ranks in the place ``shm``; medians, in microseconds,
of blocks in which both ranks had their cores for themselves.
"""

import sys
import time
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.shm.machine_code import Steps
from interlace.runtime.places.shm.message_steps import Listed
from interlace.runtime.processes.recorder import FlightRecorder

CALLS = 100


class Headers(FlightRecorder):
    """A recorder that keeps neither op nor call site; the lists beside it have no times."""

    def told(self, op: bytes | str) -> int:
        return 0


def no_time(steps: Steps, address: object) -> None:
    pass


def on_rank(blocks: int) -> list[list[tuple[float, int]]]:
    """Return, for each way, the time of every block, and how often the rank lost its core in it."""
    place: Any = default_group().place
    engine: Any = default_group().engine
    kept, steps, vector = place.group.control.recorder, engine._steps, torch.ones(1024)
    ways: list[tuple[type, Any, dict[Any, Any], list[tuple[float, int]]]] = [
        (Headers, no_time, {}, []),
        (FlightRecorder, Steps.stamp, {}, []),
    ]
    for _ in range(blocks + 1):
        for kept.__class__, stamp, steps._kept, found in ways:
            Listed.stamp = stamp  # type: ignore[method-assign]
            vector.zero_()
            interlace.barrier()
            lost, begin = getrusage(RUSAGE_SELF).ru_nivcsw, time.perf_counter()
            for _ in range(CALLS):
                interlace.all_reduce(vector)
            took = (time.perf_counter() - begin) / CALLS * 1e6
            found.append((took, getrusage(RUSAGE_SELF).ru_nivcsw - lost))
    return [found[1:] for *_, found in ways]


if __name__ == "__main__":
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    (first, first_with), (second, second_with) = interlace.run(on_rank, 2, blocks, place="shm")
    pairs = [
        (one[0], two[0])
        for one, two, *others in zip(first, first_with, second, second_with, strict=True)
        if not any(lost for _, lost in (one, two, *others))
    ]
    without, with_it = (median(times) for times in zip(*pairs, strict=True))
    print(f"{without:.2f} us without, {with_it:.2f} us with it: {with_it / without - 1:+.1%}")
