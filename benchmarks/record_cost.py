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
from interlace.runtime.record import recorder

CALLS = 2000


class Headers(recorder.FlightRecorder):
    """A recorder that keeps neither op nor call site nor time."""

    def begins(
        self, ring: int, number: int, one: int, two: int, three: int, four: int, op: Any
    ) -> None:
        at = ring + number % recorder.ENTRIES * recorder.ENTRY
        recorder._entry(self._bytes, at, number, one, two, three, four, 0, 0, 0)


def on_rank(blocks: int) -> list[float]:
    place: Any = default_group().place
    kept, vector = place.group.control.recorder, torch.ones(1024)
    times: dict[type, list[float]] = {Headers: [], recorder.FlightRecorder: []}
    for _ in range(blocks + 1):
        for kind, found in times.items():
            kept.__class__ = kind
            vector.zero_()
            interlace.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                interlace.all_reduce(vector)
            found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return [median(found[1:]) for found in times.values()]


if __name__ == "__main__":
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    (without, with_it), *_ = interlace.run(on_rank, 2, blocks, place="shm")
    print(f"{without:.2f} us without, {with_it:.2f} us with it: {with_it / without - 1:+.1%}")
