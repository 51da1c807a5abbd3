"""A part of ``gpu.py``: attention, norms and experts on one rank, against torch's operators."""

from collections.abc import Iterator
from typing import Any

from gpu_parts.timing import Record, Time, on_ranks, record

from interlace.benchmark.requests import OPS, BenchRequest, measure

Sizes = tuple[int, ...]
TOKENS = (8192, 16, 128), (32, 2, 16)  # on a GPU, and in a dry run
PRODUCTS = (4096, 4096, 4096), (16, 16, 16)
ROWS = (4096, 4096), (16, 16)
ALONE: dict[str, tuple[tuple[str, ...], tuple[Sizes, Sizes]]] = {
    "context_parallel_attention": (("all_gather fused", "ring fused"), TOKENS),
    "context_parallel_attention_backward": (("all_gather fused",), TOKENS),
    "distributed_decode": (("fused",), TOKENS),
    "matmul_reduce_scatter_norm": (("fused",), PRODUCTS),
    "reduce_scatter_norm": (("fused",), ROWS),
    "all_to_all_grouped_matmul": (("fused",), PRODUCTS),
    "grouped_matmul_combine": (("fused",), PRODUCTS),
    "matmul_all_to_all": (("fused",), PRODUCTS),
    "all_to_all_matmul": (("fused",), PRODUCTS),
    "dispatch": (("fused",), ROWS),
    "combine": (("fused",), ROWS),
}


def requests(dry_run: bool, repetitions: int) -> Iterator[BenchRequest]:
    """Yield the request for each op."""
    for op, (algorithms, sizes) in ALONE.items():
        shape: Any = dict(zip(OPS[op].sizes, sizes[dry_run], strict=True))
        dtype = "float32" if dry_run else "bfloat16"
        how = algorithms, ("torch",), repetitions
        yield BenchRequest(op, dtype, *how, **shape, virtual=not dry_run)


def ops(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """Every result is compared with float64, as ``interlace bench`` does it."""
    for request in requests(dry_run, repetitions):
        shape = " x ".join(str(getattr(request, name)) for name in OPS[request.target].sizes)
        place = "sim" if dry_run else "cuda"
        yield on_ranks("ops", f"{request.target}, {shape}", _measured, request, place=place)


def _measured(request: BenchRequest) -> Record:
    found = measure(request, lambda done, total: None)
    times = {row.name: Time.of(row.blocks) for row in found.rows}
    fractions = {f"{row.name}_of_torch": row.speedup["torch"] for row in found.rows if row.speedup}
    correct = all(row.right is not False for row in found.rows)
    return record(times, correct, **fractions)
