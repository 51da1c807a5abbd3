"""The cost of the flight recorder: all_reduce of 4 KiB with it, and with the headers of messages alone.

    python benchmarks/record_cost.py [blocks]

Blocks of the two alternate in the same processes, 2 ranks in the place ``shm``; medians, in microseconds.
"""

import sys
import time
from statistics import median
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.shm.machine_code.steps import Steps
from interlace.runtime.places.shm.message_steps import Listed
from interlace.runtime.record.recorder import FlightRecorder

CALLS = 2000


class Headers(FlightRecorder):
    """A recorder that keeps neither op nor call site."""

    def told(self, op: bytes | str) -> int:
        return 0


def no_time(steps: Steps, address: object) -> None:
    pass


def on_rank(blocks: int) -> list[float]:
    place: Any = default_group().place
    steps: Any = default_group().engine
    kept, steps, vector = place.group.control.recorder, steps._steps, torch.ones(1024)
    ways: list[tuple[type, Any, dict[Any, Any], list[float]]] = [
        (Headers, no_time, {}, []),
        (FlightRecorder, Steps.stamp, {}, []),
    ]
    for _ in range(blocks + 1):
        for kept.__class__, stamp, steps._kept, found in ways:
            Listed.stamp = stamp  # type: ignore[method-assign]
            vector.zero_()
            interlace.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                interlace.all_reduce(vector)
            found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return [median(found[1:]) for *_, found in ways]


if __name__ == "__main__":
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    (without, with_it), *_ = interlace.run(on_rank, 2, blocks, place="shm")
    print(f"{without:.2f} us without, {with_it:.2f} us with it: {with_it / without - 1:+.1%}")
