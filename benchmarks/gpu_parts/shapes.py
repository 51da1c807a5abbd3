"""Parts of ``gpu.py``: the matmul alone against torch.mm, by default and configured otherwise; few rows."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from gpu_parts.lone_rank import LoneRank
from gpu_parts.overlap import timed_together
from gpu_parts.timing import (
    Record,
    alternating,
    close,
    dtype_here,
    inputs_past_cache,
    launch_now,
    on_ranks,
    record,
)

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.tuning.configuration import choose

WORLD_SIZE = 8  # a lone rank is one of them: its N is a layer's share
ROWS = (1024, 2048, 4096, 8192, 16384)
LAYERS = {  # (N, K) per rank of 8: fused gate and up projection, fused QKV
    "Llama-70B up": (7168, 8192),
    "Llama-70B QKV": (1280, 8192),
    "Llama-405B up": (13312, 16384),
    "Llama-405B QKV": (2304, 16384),
}
VARIANTS: dict[str, dict[str, Any]] = {  # differences from the table's row
    "the table's row": {},
    "4 stages, stored in 4 parts": {"num_stages": 4, "epilogue_subtile": 4},
    "tiles of 128 x 128, 5 stages": {"block_n": 128, "num_stages": 5},
    "1 chunk per shard": {"chunks": 1},
    "32 chunks per shard, or of one tile's rows": {"chunks": 32},
    "warps with roles": {"warp_roles": True},
}
VARIED = ("Llama-70B up", "Llama-70B QKV")
VARIED_ROWS = 8192
SMALL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_CALLS = 16
ENOUGH_MICROSECONDS = 3000.0
PEAK = 8e14  # operations per second, to guess how many calls make a measurable time


def every_size() -> list[tuple[str, int, int, int]]:
    """Name, M, N and K of what :func:`matmul` measures."""
    return [(name, m, n, k) for name, (n, k) in LAYERS.items() for m in ROWS]


def lone_rank(
    world_size: int, m: int, n: int, k: int, dtype: torch.dtype, values: dict[str, Any] | None
) -> LoneRank:
    """``values``: what differs from the table's row; None for the configuration that an op would take."""
    configuration = None
    if values is not None:
        row = choose(default_group().place, dtype, m // world_size, n, k)
        configuration = replace(row, **values)
    return LoneRank(world_size, m, n, k, dtype, configuration)


def matmul(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """The kernel with flags preset, with waits and without, against torch.mm."""
    place = "sim" if dry_run else "cuda"
    for case, m, n, k in [("tiny", 64, 32, 48)] if dry_run else every_size():
        yield on_ranks(
            "matmul", f"{case}, {m} x {n} x {k}", _alone, m, n, k, repetitions, place=place
        )


def variants(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """The same with the table's row for the shape, and with one thing changed in it at a time."""
    place = "sim" if dry_run else "cuda"
    for name in VARIED[: 1 if dry_run else None]:
        m, n, k = (64, 32, 48) if dry_run else (VARIED_ROWS, *LAYERS[name])
        for what, values in VARIANTS.items():
            case = f"{name}, {m} x {n} x {k}, {what}"
            yield on_ranks("variants", case, _alone, m, n, k, repetitions, values, place=place)


def _alone(
    m: int, n: int, k: int, repetitions: int, values: dict[str, Any] | None = None
) -> Record:
    device = interlace.device()
    dtype = dtype_here()
    world_size = WORLD_SIZE if device.type == "cuda" else 2
    lone = lone_rank(world_size, m, n, k, dtype, values)
    lone.gathered.copy_(torch.randn(m, k, device=device, dtype=dtype))
    lone.shard.copy_(lone.gathered[: lone.rows[0]])
    lone.preset()
    per_set = (n * k + m * n) * dtype.itemsize
    enough = max(2, round(ENOUGH_MICROSECONDS / (2e6 * m * n * k / PEAK)))
    sets = max(inputs_past_cache(per_set, device), min(MOST_CALLS, enough))
    pool = inputs_past_cache(per_set, device)
    weights = [torch.randn(n, k, device=device, dtype=dtype).t() for _ in range(pool)]
    outputs = [torch.full((m, n), float("nan"), device=device, dtype=dtype) for _ in range(pool)]
    stream = lone.group.compute
    kernels = {
        waits: [
            lone.consumer(weight, output, waits=waits)
            for weight, output in zip(weights, outputs, strict=True)
        ]
        for waits in (True, False)
    }
    library = [
        functools.partial(torch.mm, lone.gathered, weight, out=output)
        for weight, output in zip(weights, outputs, strict=True)
    ]
    launches = {
        waits: [functools.partial(launch_now, kernel, stream) for kernel in kernels[waits]]
        for waits in kernels
    }
    ways: dict[str, Sequence[Callable[[], object]]] = {
        "torch.mm": library,
        "kernel": launches[True],
        "kernel without waits": launches[False],
    }
    candidates: dict[str, Sequence[Callable[[], object]]] = {
        name: [calls[i % pool] for i in range(sets)] for name, calls in ways.items()
    }
    correct = True
    wanted = [torch.mm(lone.gathered, weight) for weight in weights]
    for waits in (True, False):
        for launch, output in zip(kernels[waits], outputs, strict=True):
            output.fill_(float("nan"))
            launch_now(launch, stream)
        lone.settle()
        correct &= all(close(*pair) for pair in zip(outputs, wanted, strict=True))
    times = alternating(candidates, repetitions)
    lone.settle()  # before its memory goes
    mine, bare, torchs = (
        times[each].median for each in ("kernel", "kernel without waits", "torch.mm")
    )
    found = record(
        times,
        correct,
        fraction_of_torch=torchs / mine,
        cost_of_waits=mine / bare - 1,
        tflops=2e-6 * m * n * k / mine,
    )
    assert lone.configuration is not None
    return found | {"configuration": asdict(lone.configuration), "chunk_rows": lone.chunk}


def small(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """Few rows in all: what "auto" takes may not be slower than unfused, on W processes."""
    where: dict[str, Any] = {"place": "sim"} if dry_run else {"place": "cuda", "processes": True}
    cases = [(2, 4, 32, 48), (2, 32, 32, 48)] if dry_run else every_small_size()
    for world_size, m, n, k in cases:
        case, shape = f"W={world_size}, {m} x {n} x {k}", (m, n, k, repetitions)
        yield on_ranks("small", case, _few_rows, *shape, world_size=world_size, **where)


def every_small_size() -> list[tuple[int, int, int, int]]:
    """Ranks, M, N and K of what :func:`small` measures."""
    return [(ranks, m, 7168, 8192) for ranks in (2, 4, 8) for m in SMALL_ROWS if m % ranks == 0]


def _few_rows(m: int, n: int, k: int, repetitions: int) -> Record:
    device, world_size = interlace.device(), interlace.get_world_size()
    dtype = dtype_here()
    torch.manual_seed(interlace.get_rank())
    shard = torch.randn(m // world_size, k, device=device, dtype=dtype)
    weight = torch.randn(n, k, device=device, dtype=dtype).t()
    candidates = {
        name: functools.partial(interlace.all_gather_matmul, shard, weight, algorithm=name)
        for name in ("auto", "unfused")
    }
    correct = close(candidates["auto"](), candidates["unfused"]())
    times = timed_together(candidates, repetitions)
    relative = times["auto"].median / times["unfused"].median
    return record(times, correct, relative_to_unfused=relative)
