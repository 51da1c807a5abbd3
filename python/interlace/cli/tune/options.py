"""The options of ``interlace tune``, and the shapes that they stand for."""

import itertools
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments.words import RunPlace
from interlace.benchmark.subjects.by_rows import ByRows
from interlace.benchmark.subjects.requests import DTYPES, FUSED, TUNED
from interlace.benchmark.timing.sizes import parse_size, parse_sizes
from interlace.cli.bench.options import MOST_RANKS, under_torchrun
from interlace.cli.output.files import refuse_unreadable
from interlace.cli.output.machine import refuse_size
from interlace.cli.output.options import CommandOptions, option
from interlace.launcher import PLACES
from interlace.runtime.tuning.chips import BUILDABLE

SHAPES = {"sim": (64, 64, 64), "shm": (1024, 1024, 1024), "cuda": (8192, 3584, 8192)}
MOST_BUDGET = 1e5
MatmulShape = tuple[int, int, int]
TuneJob = tuple[str, tuple[int, ...]]

MEANING = """\
what a figure means:
  cuda  the time of the op on these GPUs: one process per GPU if there are as many as ranks, else virtual
        ranks that share one, whose "links" are its memory: tune where you run
  shm   the time of the op on this host's CPUs. What is chosen is the algorithm, "pipelined" or "unfused"
  sim   the time of the simulator, which is interpreted Python: says nothing of a GPU. Read only where
        INTERLACE_TUNE_CACHE names the file, so that a seed is the same schedule everywhere
exit status: 0; 1 if a result is wrong; 2 for options that cannot be, and errors.
"""


@dataclass(frozen=True)
class TuneOptions(CommandOptions):
    """Measure which configuration of a fused op is fastest here, and remember it.

    OP is all_gather_matmul, matmul_reduce_scatter or matmul_all_reduce, all three if none is given;
    matmul_reduce_scatter_norm, matmul_all_reduce_norm, all_reduce_norm, reduce_scatter_norm, gather_normed;
    all_to_all_grouped_matmul, all_gather_grouped_matmul, grouped_matmul_combine; dispatch, combine;
    matmul_all_to_all, all_to_all_matmul; context_parallel_attention, context_parallel_attention_backward,
    distributed_decode.
    Every candidate is checked against float64. The fastest go into a cache file, where calls of about the
    same shape, on as many ranks and the same device, find them: $INTERLACE_TUNE_CACHE, or
    interlace/tune.json in the user's cache folder. Ranks of a group never choose differently; where their
    files differ, rank 0's counts.
    """

    epilog = MEANING

    op: tuple[str, ...] = option(
        (), positional=True, nargs="*", metavar="OP", help=", ".join(TUNED)
    )
    m: str | None = option(None, metavar="ROWS", help="all rows; a list or range, as bench has it")
    n: str | None = option(None, metavar="COLUMNS", help="columns of a rank's weight")
    k: str | None = option(None, metavar="INNER", help="what a rank contracts")
    shapes: str | None = option(
        None, metavar="FILE", help="lines 'm n k' or 'm x n x k', # for comments"
    )
    dtype: str | None = option(
        None,
        choices=("float32", "float16", "bfloat16", "float64"),
        help="default bfloat16 on a GPU, float32 on a CPU",
    )
    world_size: int | None = option(
        None, type=int, also="--ranks", help="ranks (default: the GPUs, if several; else 2)"
    )
    place: str | None = option(
        None, choices=PLACES, help="default: cuda where there is a GPU, else shm"
    )
    budget: float = option(60.0, type=float, metavar="SECONDS", help="in all (default 60)")
    dry_run: bool = option(
        False, action="store_true", help="only list what is chosen now, and what would be tried"
    )
    arch: int | None = option(
        None, type=int, choices=BUILDABLE, help="with --dry-run: as on such a GPU, without one"
    )
    cache: str | None = option(
        None, metavar="FILE", help="write there; INTERLACE_TUNE_CACHE then reads it"
    )
    plot: str | None = option(
        None,
        metavar="FILE",
        help="times of candidates as PNG or SVG (needs matplotlib); - draws them here",
    )

    def interprets(self) -> bool | None:
        check(self)
        return None if self.dry_run else place_of(self) != "cuda"


def place_of(options: TuneOptions) -> RunPlace:
    has_gpu = torch.cuda.is_available() or options.arch is not None
    chosen: Any = options.place or ("cuda" if has_gpu else "shm")
    return chosen  # type: ignore[no-any-return]


def world_size_of(options: TuneOptions) -> int:
    if options.world_size is not None:
        return options.world_size
    return max(2, torch.cuda.device_count() if place_of(options) == "cuda" else 0)


def ops_of(options: TuneOptions) -> list[str]:
    return list(dict.fromkeys(options.op)) or list(FUSED)


def dtype_of(options: TuneOptions) -> torch.dtype:
    return DTYPES[options.dtype or ("bfloat16" if place_of(options) == "cuda" else "float32")]


def check(options: TuneOptions) -> None:
    """Raise ValueError for what cannot be, before anything runs."""
    for op in options.op:
        if op not in TUNED:
            raise ValueError(f"{op}: is none of {', '.join(TUNED)}")
    if under_torchrun():
        raise ValueError("tune starts its ranks, one process per GPU: start it without torchrun")
    if not 0 < options.budget <= MOST_BUDGET:
        raise ValueError(
            f"--budget must be positive, got {options.budget}; the most is {MOST_BUDGET:g} s"
        )
    if not 1 <= world_size_of(options) <= MOST_RANKS:
        raise ValueError(f"--world-size must be within 1..{MOST_RANKS}, got {options.world_size}")
    if options.arch is not None and not (options.dry_run and place_of(options) == "cuda"):
        raise ValueError("--arch is for --dry-run in place cuda")
    if place_of(options) == "cuda" and options.arch is None and not torch.cuda.is_available():
        raise ValueError(
            "--place cuda needs a CUDA device, and torch sees none; use --place shm or sim, or "
            "--dry-run --arch 90"
        )
    for op, shape in jobs_of(options):
        nbytes = TUNED[op].elements(*shape) * dtype_of(options).itemsize
        if not options.dry_run:
            text = " x ".join(map(str, shape))
            refuse_size(text, nbytes, world_size_of(options), place_of(options))


def jobs_of(options: TuneOptions) -> list[TuneJob]:
    """Every op with every shape, as far as it has these sizes. Raises ValueError or OSError."""
    found = [
        (op, shape[: len(TUNED[op].sizes)])
        for op in ops_of(options)
        for shape in _shapes_of(options, TUNED[op])
    ]
    return list(dict.fromkeys(found))


def _shapes_of(options: TuneOptions, kind: type[ByRows]) -> list[tuple[int, ...]]:
    """(m, n, k) of each."""
    sizes = (options.m, options.n, options.k)
    if options.shapes is not None:
        if any(each is not None for each in sizes):
            raise ValueError("--shapes has the shapes: leave --m, --n and --k")
        refuse_unreadable("--shapes", options.shapes)
        shapes = read_shapes(pathlib.Path(options.shapes))
    else:
        defaults = SHAPES[place_of(options)]
        texts = [
            text if text is not None else kind.defaults.get(name, str(default))
            for name, text, default in zip("mnk", sizes, defaults, strict=True)
        ]
        parsed = [parse_sizes(text, f"--{name}") for name, text in zip("mnk", texts, strict=True)]
        shapes = [(m, n, k) for m, n, k in itertools.product(*parsed)]
    dtype, size = options.dtype or "float32", world_size_of(options)
    for m, n, k in shapes:
        kind.refuse(size, m, dtype)
        kind.refuse_widths(size, n, k)
    return list(shapes)


def read_shapes(path: pathlib.Path) -> list[MatmulShape]:
    """The shapes in a file, one per line; errors name the line."""
    shapes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"{path}, line {number}"
        parts = [part for part in re.split(r"[\s,]+|\s*x\s*", text) if part]
        if len(parts) != 3:
            raise ValueError(f"{where}: {text!r} must be three numbers, m n k")
        m, n, k = (parse_size(part, where) for part in parts)
        shapes.append((m, n, k))
    if not shapes:
        raise ValueError(f"{path}: has no shapes")
    return shapes
