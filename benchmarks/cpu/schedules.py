"""The speed of checks of kernels: ``verify.schedules`` and ``verify.races``, microseconds per schedule.

Not against gloo, and not in ``shm``: simulated ranks in this process and in the workers that it forks.

schedules       one launch of a kernel with 8 programs on every rank, which exchange blocks; with 1 and
                2 worker processes, stores at once and late. The figures include the time of forks.
inline PTX      the same for docs/examples/one_shot_all_reduce.py, whose flags are inline PTX
races           three ops in flight, the race detector on and off: ``interlace.run`` of the same seeds
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from circumstances import in_turn
from cpu.measure import Measurement, Shape

import interlace
from interlace import symmetric_memory
from interlace.runtime.tuning.configuration import override
from interlace.verify import races, schedules
from interlace_verify.suite.jobs import load_function

PROGRAMS, BLOCK = 8, 64
SCHEDULES, SEEDS = 64, 4
RECIPE = Path(__file__).parents[2] / "docs" / "examples" / "one_shot_all_reduce.py"
TILES: dict[str, int | bool] = {"block_elements": 16, "programs": 2}


@triton.jit  # type: ignore[untyped-decorator]
def exchange_kernel(buffers_ptr, pads_ptr, input_ptr, output_ptr, rank,  # type: ignore[no-untyped-def]
                    WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """``output = sum over ranks of input``: push a block to all, signal, wait, add up what came."""
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    buffers = buffers_ptr.to(tl.pointer_type(tl.int64))
    pads = pads_ptr.to(tl.pointer_type(tl.int64))
    part = tl.num_programs(0) * BLOCK
    x = tl.load(input_ptr + offsets)
    for peer in range(WORLD_SIZE):
        theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        tl.store(theirs + rank * part + offsets, x)
    tl.debug_barrier()
    for peer in range(WORLD_SIZE):
        flags = tl.load(pads + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + pid * WORLD_SIZE + rank, 1, sem="release", scope="sys")
    own = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    own_flags = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(WORLD_SIZE):
        flag = own_flags + pid * WORLD_SIZE + source
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        total += tl.load(own + source * part + offsets)
    tl.store(output_ptr + offsets, total)


def exchange(kernel: Any, parts: int) -> torch.Tensor:
    """One launch of ``kernel`` on every rank; its buffer has ``parts`` times the elements."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    count = PROGRAMS * BLOCK
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(parts * count))
    output = torch.empty(count)
    kernel[(PROGRAMS,)](
        handle.buffer_ptrs_dev,
        handle.signal_pad_ptrs_dev,
        torch.arange(count) + 1000.0 * rank,
        output,
        rank,
        WORLD_SIZE=world_size,
        BLOCK=BLOCK,
    )
    return output


def gathers() -> None:
    """Three all-gathers in flight, by interlace's own kernel."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    with override(**TILES):
        outputs = [torch.empty(40 * world_size) for _ in range(3)]
        works = [
            interlace.all_gather(
                output, torch.full((40,), float(rank)), algorithm="kernel", async_op=True
            )
            for output in outputs
        ]
        for work in works:
            assert work is not None
            work.wait()


def rate(fn: Callable[[], Any], world_size: int, workers: int, late: bool) -> float:
    report = schedules(fn, world_size, n=SCHEDULES, workers=workers, store_buffers=late)
    assert report.clean, str(report)
    return report.seconds / report.schedules


def raced(world_size: int) -> float:
    begin = time.perf_counter()
    report = races(gathers, world_size, seeds=SEEDS)
    assert report.clean, str(report)
    return (time.perf_counter() - begin) / SEEDS


def plain(world_size: int) -> float:
    begin = time.perf_counter()
    for seed in range(SEEDS):
        interlace.run(gathers, world_size, seed=seed)
    return (time.perf_counter() - begin) / SEEDS


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    shape: Shape = {"programs": PROGRAMS, "block": BLOCK, "dtype": "float32"}
    found = []
    for op, kernel, parts in (
        ("schedules", exchange_kernel, world_size),
        ("schedules of inline PTX", load_function(f"{RECIPE}::one_shot_all_reduce"), 1),
    ):
        fn = partial(exchange, kernel, parts)
        candidates = {
            f"{workers} worker{'s' if workers > 1 else ''}{', late stores' if late else ''}": partial(
                rate, fn, world_size, workers, late
            )
            for late in (False, True)
            for workers in (1, 2)
        }
        found.append(_measured(op, world_size, shape, "1 worker", candidates, repetitions))
    return [
        *found,
        _measured(
            "races of all_gather",
            world_size,
            {"calls": 3, "elements": 40, "dtype": "float32"},
            "interlace.run",
            {"interlace.run": partial(plain, world_size), "races": partial(raced, world_size)},
            repetitions,
        ),
    ]


def _measured(
    op: str,
    world_size: int,
    shape: Shape,
    baseline: str,
    candidates: Mapping[str, Callable[[], float]],
    repetitions: int,
) -> Measurement:
    times = in_turn(candidates, repetitions, 2, lambda name: candidates[name]() * 1e6)
    medians = {name: median(values) for name, values in times.items()}
    return Measurement(op, world_size, shape, baseline, medians, repetitions)
