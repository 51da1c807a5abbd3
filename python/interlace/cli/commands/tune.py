"""``interlace tune``: measure which configuration is fastest for some shapes, save it, and report the gain.

``benchmark/tune.py`` measures on the ranks, ``runtime/tuning/files.py`` writes. This file runs one shape
after another and writes each when it is done, so an interrupted run keeps its results.
"""

import datetime
import functools
import itertools
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import torch

import interlace
from interlace.arguments.words import RunPlace
from interlace.benchmark.figures import parse_size, parse_sizes
from interlace.benchmark.fused import ByRows
from interlace.benchmark.requests import DTYPES, FUSED, TUNED
from interlace.benchmark.tune import (
    AUTO,
    Timed,
    TuneCandidate,
    Tuned,
    TuneRequest,
    by_name,
    candidates,
    on_rank,
    search,
    untuned_choice,
)
from interlace.cli.commands.bench import MOST_RANKS, under_torchrun
from interlace.launcher import PLACES
from interlace.ops.matmul.formats import FORMATS
from interlace.ops.matmul.reduce import ONE_SHOT_BYTES
from interlace.output.consoles import Progress, write
from interlace.output.files import (
    draw_bars,
    file_of,
    file_to_write,
    refuse_outputs,
    refuse_unreadable,
    tell_written,
)
from interlace.output.machine import refuse_size
from interlace.output.options import CommandOptions, option
from interlace.runtime.tuning import files as cache, tuning
from interlace.runtime.tuning.files import NotOursError
from interlace.runtime.tuning.table import BUILDABLE
from interlace.runtime.tuning.tuning import Problem

SHAPES = {"sim": (64, 64, 64), "shm": (1024, 1024, 1024), "cuda": (8192, 3584, 8192)}
MOST_BUDGET = 1e5
MatmulShape = tuple[int, int, int]
TuneJob = tuple[str, tuple[int, ...]]

MEANING = """\
meaning of the figures:
  cuda  the time of the op on these GPUs: one process per GPU if there are as many GPUs as ranks, otherwise
        virtual ranks on one GPU, whose "links" are its memory. Tune on the machine where you run
  shm   the time of the op on this host's CPUs. tune chooses the algorithm, "pipelined" or "unfused"
  sim   the time of the simulator, which is interpreted Python: it says nothing about a GPU. It is used only
        if INTERLACE_TUNE_CACHE names the file, so that a seed is the same schedule everywhere

"""


@dataclass(frozen=True)
class TuneOptions(CommandOptions):
    """Measure which configuration of a fused op is fastest here, and save it.

    OP is listed below; by default it is all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce.
    Every candidate is checked against float64. The fastest go into a cache file: $INTERLACE_TUNE_CACHE, or
    interlace/tune.json in the user's cache folder. Calls of about the same shape, on the same
    number of ranks and the same device, use them. Ranks of a group never choose differently: if their
    files differ, the file of rank 0 counts.
    """

    epilog = MEANING
    statuses = ((1, "the result of a default choice is wrong"),)

    op: tuple[str, ...] = option(
        (), positional=True, nargs="*", metavar="OP", help=", ".join(TUNED)
    )
    m: str | None = option(None, metavar="ROWS", help="all rows; a list or range, as for bench")
    n: str | None = option(None, metavar="COLUMNS", help="columns of a rank's weight")
    k: str | None = option(None, metavar="INNER", help="contracted dimension of a rank")
    shapes: str | None = option(
        None, metavar="FILE", help="file with lines 'm n k' or 'm x n x k', # for comments"
    )
    dtype: str | None = option(
        None,
        choices=("float32", "float16", "bfloat16", "float64"),
        help="dtype (default bfloat16 on a GPU, float32 on a CPU)",
    )
    format: str | None = option(
        None,
        choices=tuple(FORMATS),
        help="block-scaled format of the operands; --dtype is the output dtype",
    )
    world_size: int | None = option(
        None,
        type=int,
        also="--ranks",
        help="number of ranks (default: the number of GPUs if there are several, else 2)",
    )
    place: str | None = option(
        None, choices=PLACES, help="default: cuda if there is a GPU, otherwise shm"
    )
    budget: float = option(
        60.0, type=float, metavar="SECONDS", help="total time for all measurements (default 60)"
    )
    dry_run: bool = option(
        False, action="store_true", help="only list the current choice and the candidates"
    )
    arch: int | None = option(
        None,
        type=int,
        choices=BUILDABLE,
        help="architecture that --dry-run assumes, so that it needs no GPU",
    )
    cache: str | None = option(
        None,
        metavar="FILE",
        help="write this file; to use it, set INTERLACE_TUNE_CACHE to its path",
    )
    plot: str | None = option(
        None,
        metavar="FILE",
        help="plot times of candidates as PNG or SVG (needs matplotlib); - draws them here",
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


def settings_of(options: TuneOptions) -> dict[str, Any]:
    """Return the settings besides sizes, by the names of the op's class."""
    return {} if options.format is None else {"format": options.format}


def check(options: TuneOptions) -> None:
    """Raise ValueError for options that are not possible, before anything runs."""
    for op in options.op:
        if op not in TUNED:
            raise ValueError(f"OP must be one of {', '.join(TUNED)}, got {op}")
        if options.format is not None and "format" not in TUNED[op].settings:
            raise ValueError(f"--format {options.format}: {op} takes no format")
    if under_torchrun():
        raise ValueError(
            "tune starts its own ranks, one process per GPU: start it without torchrun"
        )
    if not 0 < options.budget <= MOST_BUDGET:
        raise ValueError(
            f"--budget must be positive and at most {MOST_BUDGET:g} s, got {options.budget}"
        )
    if not 1 <= world_size_of(options) <= MOST_RANKS:
        raise ValueError(f"--world-size must be within 1..{MOST_RANKS}, got {options.world_size}")
    if options.arch is not None and not (options.dry_run and place_of(options) == "cuda"):
        raise ValueError("--arch needs --dry-run and place cuda")
    if place_of(options) == "cuda" and options.arch is None and not torch.cuda.is_available():
        raise ValueError(
            "--place cuda needs a CUDA device, and torch sees none; use --place shm or sim, or "
            "--dry-run --arch 90"
        )
    for op, shape in jobs_of(options):
        nbytes = TUNED[op].memory(dtype_of(options), *shape, **settings_of(options))
        if not options.dry_run:
            text = " x ".join(map(str, shape))
            refuse_size(text, nbytes, world_size_of(options), place_of(options))


def jobs_of(options: TuneOptions) -> list[TuneJob]:
    """Return every op with every shape whose sizes it has. Raise ValueError or OSError."""
    found = [
        (op, shape[: len(TUNED[op].sizes)])
        for op in ops_of(options)
        for shape in _shapes_of(options, TUNED[op])
    ]
    return list(dict.fromkeys(found))


def _shapes_of(options: TuneOptions, kind: type[ByRows]) -> list[tuple[int, ...]]:
    sizes = (options.m, options.n, options.k)
    if options.shapes is not None:
        if any(each is not None for each in sizes):
            raise ValueError("--shapes gives the shapes: leave out --m, --n and --k")
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
    for shape in shapes:
        kind.refuse(size, shape, dtype, **settings_of(options))
    return list(shapes)


def read_shapes(path: pathlib.Path) -> list[MatmulShape]:
    """Return the shapes in a file, one per line; errors name the line."""
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


GRACE = 300.0  # seconds over the budget after which a run is ended: compiling is slow


def tune(console: Any, options: TuneOptions) -> int:
    """Measure, write, print; return 1 if any default is wrong, otherwise 0. Raise ValueError or OSError."""
    check(options)
    jobs = jobs_of(options)
    if options.dry_run:
        _list(console, options, jobs)
        return 0
    file = file_to_write(options.cache, cache.path(), cache.VARIABLE)
    cache.FILE.refuse_unwritable(file)
    outputs = {"--cache": str(file), "--plot": file_of(options.plot)}
    refuse_outputs(outputs, {"--shapes": options.shapes})
    place, machine = place_of(options), _machine(options)
    console.print(
        f"[bold]tuning[/bold] on {machine.device}, place {place}, {world_size_of(options)} ranks, "
        f"{_name(options)}, triton {machine.triton}"
    )
    outcomes: list[tuple[TuneJob, Tuned]] = []
    unwritten: list[cache.CacheRow] = []
    failed: Exception | None = None
    with Progress("tune", len(jobs)) as progress:
        for number, job in enumerate(jobs):
            progress.begin(number, _text(job))
            outcome = _measure(options, job, len(jobs), progress)
            outcomes.append((job, outcome))
            if outcome.best.right and outcome.best.candidate.algorithm != AUTO:
                unwritten.append(_row(options, job, outcome))
            try:
                if unwritten:
                    cache.add(machine, unwritten, file)
                    unwritten.clear()
            except (OSError, NotOursError) as error:  # the measurements are still printed
                failed = error
    for job, outcome in outcomes:
        _print(console, job, outcome)
    if options.plot is not None:
        draw_bars(console, options.plot, [(_text(job), _times(found)) for job, found in outcomes])
    write(console, FIGURES[place], "dim")
    if unwritten and failed is not None:
        raise failed
    tell_written(console, file, cache.path(), cache.VARIABLE)
    return 0 if all(outcome.default.right for _, outcome in outcomes) else 1


def _machine(options: TuneOptions) -> cache.TunedMachine:
    place = place_of(options)
    return cache.machine(place, torch.device("cuda" if place == "cuda" else "cpu"))


def _capability(options: TuneOptions) -> int | None:
    if place_of(options) != "cuda":
        return None
    if options.arch is not None:
        return options.arch
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _problem(options: TuneOptions, job: TuneJob) -> Problem:
    op, shape = job
    about = dtype_of(options), shape, world_size_of(options)
    return TUNED[op].problem(*about, **settings_of(options))


def _of_products(op: str) -> bool:
    """Return whether tiles and cost model are the ones of a matmul."""
    return op.removesuffix("_norm") in FUSED


def _try(options: TuneOptions, job: TuneJob) -> list[TuneCandidate]:
    op, (m, n, *_) = job
    if not _of_products(op):
        return by_name(place_of(options), TUNED[op])
    dtype, problem = dtype_of(options), _problem(options, job)
    all_rows = problem.product == "matmul_all_reduce"
    one_shot = not all_rows or m * n * dtype.itemsize <= ONE_SHOT_BYTES
    return candidates(place_of(options), _capability(options), problem, one_shot=one_shot)


def _measure(options: TuneOptions, job: TuneJob, count: int, progress: Progress) -> Tuned:
    """Measure in one ``interlace.run``, or in one more for each candidate that cannot be run."""
    op, shape = job
    place, size = place_of(options), world_size_of(options)
    processes = place == "cuda" and torch.cuda.device_count() >= size > 1
    seconds, apart = options.budget / count, place == "shm" or processes
    request = TuneRequest(
        op, dtype_of(options), shape, tuple(_try(options, job)), seconds,
        virtual=place == "cuda" and not processes, settings=tuple(settings_of(options).items()),
    )  # fmt: skip

    def run(tried: TuneRequest) -> list[Timed]:
        with progress.on_ranks(apart=apart) as tick:
            found = interlace.run(
                on_rank, size, tried, tick, place=place, processes=processes,
                timeout=seconds + GRACE,
            )  # fmt: skip
        timed: list[Timed] = found[0]
        return timed

    return search(request, run)


def _row(options: TuneOptions, job: TuneJob, outcome: Tuned) -> cache.CacheRow:
    op, shape = job
    problem = _problem(options, job)
    found = outcome.by_algorithm
    return cache.CacheRow(
        op,
        tuning.dtype_name(problem),
        tuning.extents_of(problem),
        *tuning.bucket_of(problem),
        outcome.best.candidate.algorithm,
        {name: each.candidate.configuration for name, each in found.items()},
        {name: round(each.median, 3) for name, each in found.items()},
        round(outcome.default.median, 3),
        shape,
        problem.world_size,
        datetime.date.today().isoformat(),
    )


FIGURES = {
    "cuda": "Times of the ops on these GPUs, medians over blocks of the slowest rank.",
    "shm": "Times of the ops on this host's CPUs; they say nothing about a GPU.",
    "sim": "Times of the simulator, interpreted Python on one core: they say nothing about a "
    f"GPU, and the simulator uses the cache only if {cache.VARIABLE} names it.",
}


def _times(outcome: Tuned) -> list[tuple[str, float]]:
    """Return the medians of the candidates that ran and were right, fastest first."""
    ran = [each for each in outcome.timed if each.microseconds and each.right]
    ran.sort(key=lambda each: each.median)
    default = outcome.default
    return [
        (each.candidate.describe() + " (default)" * (each is default), each.median) for each in ran
    ]


def _print(console: Any, job: TuneJob, outcome: Tuned) -> None:
    line = functools.partial(write, console)
    default, best = outcome.default, outcome.best
    console.print(f"[bold]{_text(job)}[/bold]")
    line(f"  default  {default.median:12.1f} us   {default.candidate.describe()}")
    if best is default:
        line("  no candidate is faster by more than noise: the default stays")
    else:
        line(f"  best     {best.median:12.1f} us   {best.candidate.describe()}")
        line(f"  {outcome.factor:.2f} times as fast as the default", "green")
    wrong = [each for each in outcome.timed if not each.right]
    for each in wrong:
        text = (
            f"  WRONG: {each.candidate.describe()}: error {each.error:.3g} times the allowed error"
        )
        line(text, "red")
    for candidate, reason in outcome.skipped:
        line(f"  skipped: {candidate.describe()}: {reason}", "yellow")
    untried = [each for each in outcome.timed if not each.microseconds and each.right]
    tried = len(outcome.timed) - len(untried)
    more = f", {len(untried)} more did not fit into the budget" if untried else ""
    line(f"  {tried} candidates tried{more}", "dim")


def _list(console: Any, options: TuneOptions, jobs: list[TuneJob]) -> None:
    place, capability = place_of(options), _capability(options)
    rows: tuple[cache.CacheRow, ...] = ()
    if options.arch is None:
        file = pathlib.Path(options.cache) if options.cache else cache.path()
        rows = cache.rows_for(_machine(options), file)
    for job in jobs:
        problem = _problem(options, job)
        cached = tuning.nearest_cached(rows, problem)
        console.print(f"[bold]{_text(job)}[/bold], {_name(options)}")
        if not _of_products(job[0]):
            row = None if cached is None else cached[0]
            lines = [
                "now: what auto takes" if row is None else f"now: {row.algorithm}, {row.values}"
            ]
        else:
            algorithm, choice = untuned_choice(place, capability, problem)
            if cached is not None:
                choice = tuning.decide(capability, problem, cached)
                algorithm = choice.algorithm if place != "sim" and choice.algorithm else algorithm
            lines = [f"now: {algorithm}, by {choice.source}"]
            lines += [f"  {choice.configuration}"] if algorithm != "unfused" else []
        tried = _try(options, job)
        lines += [f"would try {len(tried)}:", *(f"  {each.describe()}" for each in tried)]
        for text in lines:
            write(console, f"  {text}")


def _name(options: TuneOptions) -> str:
    dtype = str(dtype_of(options)).removeprefix("torch.")
    return f"{options.format} to {dtype}" if options.format else dtype


def _text(job: TuneJob) -> str:
    op, shape = job
    return f"{op} {' x '.join(map(str, shape))}"
