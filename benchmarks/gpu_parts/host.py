"""Parts of ``gpu.py`` about the host, compute-sanitizer, and ops on one rank.

The first has the host's time per call and graph replays. The last one times attention, norms and experts
against torch's operators.
"""

import functools
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_parts.timing import Record, Time, alternating, close, dtype_here, on_ranks, record

import interlace
from interlace.benchmark.requests import OPS, BenchRequest, measure

FOLDER = str(Path(__file__).parents[1])
CALLS = 200
REPLAYS = 100
SHAPE, DRY_SHAPE = (256, 256, 256), (32, 32, 32)


CASE = """
import sys; sys.path.insert(0, sys.argv[1])
import interlace
from gpu_parts.host import products
print(interlace.run(lambda: products(interlace.device()).sum().item(), 2, place="cuda", timeout=240))
"""


def products(device: torch.device) -> torch.Tensor:
    torch.manual_seed(interlace.get_rank())
    x = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
    y = interlace.all_gather_matmul(x, w, algorithm="fused")
    return interlace.matmul_reduce_scatter(y, w.t().contiguous(), algorithm="fused")


def host(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """Times of both fused ops in a world of one: on the host, eager, replayed; replays are checked."""
    where: dict[str, Any] = {"place": "sim"}
    if not dry_run:
        where = {"place": "cuda", "processes": True}  # with plans
    m, n, k = DRY_SHAPE if dry_run else SHAPE
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        case, given = f"{op} W=1, {m} x {n} x {k}", (op, m, n, k, repetitions)
        yield on_ranks("host", case, _host, *given, **where)


def _host(op: str, m: int, n: int, k: int, repetitions: int) -> Record:
    device = interlace.device()
    cuda = device.type == "cuda"
    dtype = dtype_here()
    x = torch.randn(m, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype).t()
    call = functools.partial(getattr(interlace, op), x, w, algorithm="fused")
    correct = close(call(), torch.mm(x, w))
    seconds = []
    for _ in range(repetitions + 1):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS if cuda else 1):
            call()
        seconds.append((time.perf_counter() - start) / (CALLS if cuda else 1) * 1e6)
    times = {
        "host": Time.of(seconds[1:]),
        **alternating({"eager": [call]}, repetitions, graph=False),
    }
    derived: dict[str, float] = {}
    if cuda:
        graph, output = torch.cuda.CUDAGraph(), torch.empty(0)
        with torch.cuda.graph(graph):
            output = call()
        right = 0
        for _ in range(REPLAYS):
            x.normal_()
            graph.replay()
            right += close(output, torch.mm(x, w))
        correct &= right == REPLAYS
        times |= alternating({"replay": [graph.replay]}, repetitions, graph=False)
        derived["replays_right"] = float(right)
    return record(times, correct, **derived)


def sanitizer(dry_run: bool, repetitions: int) -> Iterator[Record]:
    """memcheck and racecheck of one small run of both fused ops on two virtual ranks."""
    if dry_run:
        return
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise RuntimeError("compute-sanitizer is not installed here: nothing was checked")
    for tool in ("memcheck", "racecheck"):
        start = time.perf_counter()
        answer = subprocess.run(
            [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CASE, FOLDER],
            capture_output=True,
            text=True,
            timeout=240,
        )
        spent = (time.perf_counter() - start) * 1e6
        clean = answer.returncode == 0
        if not clean:
            print(answer.stdout[-2000:], answer.stderr[-2000:])
        found = record({"run": Time.of([spent])}, clean)
        yield {"part": "sanitizer", "case": tool, **found}


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
