"""Steps of computing and one all_reduce, on a host that is busy with something else.

A step multiplies two matrices for about STEP_SECONDS, as measured on the quiet host, in one or two threads
of torch, and sums one tensor over the ranks. Meanwhile some processes do nothing but keep cores busy.
Blocks of STEPS steps through gloo and through interlace alternate in the same processes; medians over
blocks.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from cpu.measure import Case, Measurement, Shape, beside_gloo, measure, on_ranks

import interlace
from interlace.benchmark.protocol import slowest

LOADS = (0, 2, 6, 12)
THREADS = (1, 2)
SIZES = (4 << 10, 1 << 20)
STEP_SECONDS, STEPS = 5e-3, 5
MATRIX = 512  # columns

_BUSY = "import os\nwhile os.getppid() == {}:\n for _ in range(10 ** 6): pass"


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    command = [sys.executable, "-S", "-c", _BUSY.format(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def _rows() -> int:
    """Return rows of a matrix whose product with a square one takes STEP_SECONDS; equal on all ranks."""
    operands, product = _operands(MATRIX)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        torch.mm(*operands, out=product)
        times.append(time.perf_counter() - start)
    return round(STEP_SECONDS / slowest(median(times)) * MATRIX)


def _operands(rows: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    return (torch.zeros(rows, MATRIX), torch.zeros(MATRIX, MATRIX)), torch.zeros(rows, MATRIX)


def on_rank(path: str, repetitions: int) -> list[Measurement]:
    found = []
    with beside_gloo(path) as both:
        rows = _rows()
        for load in LOADS:
            with busy_loops(load if interlace.get_rank() == 0 else 0):
                for threads, nbytes in itertools.product(THREADS, SIZES):
                    torch.set_num_threads(threads)
                    shape: Shape = {"bytes": nbytes, "busy loops": load, "threads": threads}
                    candidates = both(_step(rows, nbytes))
                    shape["dtype"] = "float32"
                    case = Case("5 ms and all_reduce", shape, "gloo", candidates)
                    found.append(measure(case, repetitions, calls=STEPS, warm_up=1))
    return found


def _step(rows: int, nbytes: int) -> Callable[[Any], None]:
    operands, product = _operands(rows)
    tensor = torch.zeros(nbytes // 4)

    def step(group: dist.ProcessGroup) -> None:
        torch.mm(*operands, out=product)
        dist.all_reduce(tensor, group=group)

    return step


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    return on_ranks(on_rank, world_size, repetitions) if world_size > 1 else []
