"""``interlace tune``: measure which configuration is fastest for some shapes, keep it, say what it gained.

``runs/tune.py`` measures on the ranks, ``runtime/tuning/cache.py`` writes; here one shape
comes after another, each written when it is done, so an interrupted run keeps what it has.
"""

import datetime
import functools
import pathlib
from typing import Any

import torch

import interlace
from interlace.benchmark.runs.tune import AUTO, Timed, Tuned, TuneRequest, on_rank, search
from interlace.benchmark.runs.tune_candidates import TuneCandidate, by_name, candidates, untuned
from interlace.benchmark.subjects.requests import FUSED, TUNED
from interlace.cli.output import bars
from interlace.cli.output.consoles import write
from interlace.cli.output.files import file_to_write, refuse_outputs, tell_written
from interlace.cli.output.progress import Progress
from interlace.cli.tune import options as tune_options
from interlace.cli.tune.options import TuneJob, TuneOptions, dtype_of, place_of, world_size_of
from interlace.ops.matmul.reduce import ONE_SHOT_BYTES
from interlace.runtime.tuning import cache, tuning
from interlace.runtime.tuning.files import NotOursError
from interlace.runtime.tuning.tuning import Problem

GRACE = 300.0  # seconds over the budget after which a run is given up: compiling is slow


def tune(console: Any, options: TuneOptions) -> int:
    """Measure, write, print; 1 if any default is wrong, else 0. Raises ValueError or OSError."""
    tune_options.check(options)
    jobs = tune_options.jobs_of(options)
    if options.dry_run:
        _list(console, options, jobs)
        return 0
    file = file_to_write(options.cache, cache.path(), cache.VARIABLE)
    cache.FILE.refuse_unwritable(file)
    outputs = {"--cache": str(file), "--plot": bars.file_of(options.plot)}
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
            outcome = _measured(options, job, len(jobs), progress)
            outcomes.append((job, outcome))
            if outcome.best.right and outcome.best.candidate.algorithm != AUTO:
                unwritten.append(_row(options, job, outcome))
            try:
                if unwritten:
                    cache.add(machine, unwritten, file)
                    unwritten.clear()
            except (OSError, NotOursError) as error:  # what was measured is still to be printed
                failed = error
    for job, outcome in outcomes:
        _print(console, job, outcome)
    if options.plot is not None:
        bars.draw(console, options.plot, [(_text(job), _times(found)) for job, found in outcomes])
    write(console, MEANING[place], "dim")
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
    return TUNED[op].problem(dtype_of(options), shape, world_size_of(options))


def _of_products(op: str) -> bool:
    """Whether tiles and cost model are those of a matmul."""
    return op.removesuffix("_norm") in FUSED


def _tried(options: TuneOptions, job: TuneJob) -> list[TuneCandidate]:
    op, (m, n, *_) = job
    if not _of_products(op):
        return by_name(place_of(options), TUNED[op])
    dtype, problem = dtype_of(options), _problem(options, job)
    all_rows = problem.product == "matmul_all_reduce"
    one_shot = not all_rows or m * n * dtype.itemsize <= ONE_SHOT_BYTES
    return candidates(place_of(options), _capability(options), problem, one_shot=one_shot)


def _measured(options: TuneOptions, job: TuneJob, count: int, progress: Progress) -> Tuned:
    """One ``interlace.run``, or as many as candidates cannot be run."""
    op, shape = job
    place, size = place_of(options), world_size_of(options)
    processes = place == "cuda" and torch.cuda.device_count() >= size > 1
    seconds, apart = options.budget / count, place == "shm" or processes
    request = TuneRequest(
        op, dtype_of(options), shape, tuple(_tried(options, job)), seconds,
        virtual=place == "cuda" and not processes,
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


MEANING = {
    "cuda": "Times are those of the ops on these GPUs, medians over blocks of the slowest rank.",
    "shm": "Times are those of the ops on this host's CPUs; they say nothing of a GPU.",
    "sim": "Times are those of the simulator, interpreted Python on one core: they say nothing of a "
    f"GPU, and the simulator uses the cache only where {cache.VARIABLE} names it.",
}


def _times(outcome: Tuned) -> list[tuple[str, float]]:
    """The medians of what ran and was right, fastest first."""
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
        text = f"  WRONG: {each.candidate.describe()}: error {each.error:.3g} times what is allowed"
        line(text, "red")
    for candidate, reason in outcome.skipped:
        line(f"  skipped: {candidate.describe()}: {reason}", "yellow")
    untried = [each for each in outcome.timed if not each.microseconds and each.right]
    tried = len(outcome.timed) - len(untried)
    more = f", {len(untried)} more did not fit into the budget" if untried else ""
    line(f"  {tried} candidates tried{more}", "dim")


def _list(console: Any, options: TuneOptions, jobs: list[TuneJob]) -> None:
    """Print what is chosen now and why, and what would be tried."""
    place, capability = place_of(options), _capability(options)
    rows: tuple[cache.CacheRow, ...] = ()
    if options.arch is None:
        file = pathlib.Path(options.cache) if options.cache else cache.path()
        rows = cache.rows_for(_machine(options), file)
    for job in jobs:
        problem = _problem(options, job)
        cached = tuning.cached(rows, problem)
        console.print(f"[bold]{_text(job)}[/bold], {_name(options)}")
        if not _of_products(job[0]):
            row = None if cached is None else cached[0]
            lines = [
                "now: what auto takes" if row is None else f"now: {row.algorithm}, {row.values}"
            ]
        else:
            algorithm, choice = untuned(place, capability, problem)
            if cached is not None:
                choice = tuning.decide(capability, problem, cached)
                algorithm = choice.algorithm if place != "sim" and choice.algorithm else algorithm
            lines = [f"now: {algorithm}, by {choice.source}"]
            lines += [f"  {choice.configuration}"] if algorithm != "unfused" else []
        tried = _tried(options, job)
        lines += [f"would try {len(tried)}:", *(f"  {each.describe()}" for each in tried)]
        for text in lines:
            write(console, f"  {text}")


def _name(options: TuneOptions) -> str:
    return str(dtype_of(options)).removeprefix("torch.")


def _text(job: TuneJob) -> str:
    op, shape = job
    return f"{op} {' x '.join(map(str, shape))}"
