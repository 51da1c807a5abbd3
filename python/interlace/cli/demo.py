"""``interlace demo``: the fused ops on real input, compared with float64, and what happened when.

Three cases, each a run of its own with its own recording::

    all_gather_matmul       x W1        rows of x are sharded, and gathered inside the matmul
    matmul_reduce_scatter   x W1        k is sharded; partial sums leave tile by tile
    MLP                     gelu(x W1) W2   both in a row: how a sequence-parallel layer uses them
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import interlace
from interlace import groups, launcher, reference
from interlace.cli import chrome_trace, timeline, workload
from interlace.cli.workload import Workload
from interlace.runtime import configuration, trace
from interlace.runtime.trace import Recording

if TYPE_CHECKING:
    from rich.console import Console

TIMEOUT = 1800.0
GELU_SLOPE = 1.13  # the largest slope of gelu is 1.1289
GELU_ROUNDINGS = 8  # of fp32, relative to its argument, in torch's gelu


@dataclass(frozen=True)
class DemoOptions:
    """Arguments of the command; None takes the default, or the size of the input file."""

    ranks: int = 4
    place: str = "sim"
    m: int | None = None
    n: int | None = None
    k: int | None = None
    dtype: str = "bfloat16"
    seed: int = 0
    text: str | None = None
    input: str | None = None
    trace: str | None = None
    plot: str | None = None


@dataclass(frozen=True)
class Case:
    """``on_rank`` gives a rank's part; ``expected`` the float64 result of all and its error bound.

    Parts lie side by side along ``part_dim``.
    """

    title: str
    formula: str
    story: str
    part_dim: int
    on_rank: Callable[[Workload], torch.Tensor]
    expected: Callable[[Workload, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Outcome:
    """One case, run: per rank (largest error, its ratio to the bound); None where nothing is seen."""

    case: Case
    errors: list[tuple[float, float]]
    recording: Recording | None

    @property
    def correct(self) -> bool:
        return all(ratio <= 1 for _, ratio in self.errors)


def demo(console: Console, options: DemoOptions) -> int:
    """Run and print everything; 0 if every error is within its bound, else 1.

    Raises OSError, ValueError or TypeError for input that cannot be used, before anything runs.
    """
    work = _load(options)
    _headline(console, options, work)
    outcomes = []
    for number, case in enumerate(CASES, 1):
        with console.status(f"{case.title}, {number} of {len(CASES)}"):
            outcome = run_case(case, work, options)
        outcomes.append(outcome)
        report(console, outcome, number)
    if options.place == "cuda":
        console.print("No timeline: compiled kernels do not report their tiles.", style="dim")
    _write(console, options, outcomes)
    worst = max(ratio for outcome in outcomes for _, ratio in outcome.errors)
    if all(outcome.correct for outcome in outcomes):
        console.print(
            f"Correct: every error is within the bound that follows from {options.dtype} "
            f"(at most {worst:.0%} of it).",
            style="bold green",
        )
        return 0
    wrong = ", ".join(outcome.case.title for outcome in outcomes if not outcome.correct)
    console.print(f"WRONG: errors beyond the bound in {wrong}.", style="bold red")
    return 1


def _load(options: DemoOptions) -> Workload:
    """The input, after everything that could make the run useless has been looked at."""
    if options.dtype not in workload.DTYPES:
        known = ", ".join(workload.DTYPES)
        raise ValueError(f"--dtype must be one of {known}, got {options.dtype!r}")
    if options.place not in launcher.PLACES:
        known = ", ".join(launcher.PLACES)
        raise ValueError(f"--place must be one of {known}, got {options.place!r}")
    for name in ("ranks", "m", "n", "k"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be positive, got {value}")
    if options.text is not None and options.input is not None:
        raise ValueError("--text and --input exclude each other")
    for name in ("trace", "plot"):
        path = getattr(options, name)
        if path is not None and options.place == "cuda":
            raise ValueError(f"--{name} needs --place sim or shm: compiled kernels are not recorded")
        if path is not None and not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name} {path}: the folder does not exist")
    if options.plot is not None:
        timeline.require_matplotlib()
    dtype, sizes = workload.DTYPES[options.dtype], (options.m, options.n, options.k)
    if options.input is not None:
        return workload.from_file(options.input, dtype, options.seed, *sizes)
    return workload.from_text(options.text, dtype, options.seed, *sizes)


def run_case(case: Case, work: Workload, options: DemoOptions) -> Outcome:
    """Run ``case`` on all ranks and measure it."""
    simulated = options.place == "sim"
    with trace.recording() if simulated else nullcontext() as recorder:
        answers = interlace.run(
            _on_rank,
            options.ranks,
            CASES.index(case),
            work,
            place=options.place,
            seed=options.seed,
            timeout=TIMEOUT,
        )
    recorded = [part for _, part in answers if part is not None]
    if recorder is not None:
        recorded.append(recorder.recording())
    value, bound = case.expected(work, options.ranks)
    errors = []
    parts = zip(
        (output for output, _ in answers),
        reference.split(value, options.ranks, case.part_dim),
        reference.split(bound, options.ranks, case.part_dim),
        strict=True,
    )
    for output, expected, allowed in parts:
        ratio = reference.worst_ratio(output, expected, allowed)
        error = (output.double() - expected).abs()
        errors.append((float(error.max()) if error.numel() else 0.0, ratio))
    return Outcome(case, errors, trace.merge(recorded) if recorded else None)


# -- on the ranks ----------------------------------------------------------------------------------


def _on_rank(case: int, work: Workload) -> tuple[torch.Tensor, Recording | None]:
    """This rank's part of the result, and what it recorded where every rank does so for itself."""
    interpreted = groups.default_group().place.interpreted
    own_recorder = interpreted and trace.current() is None
    interlace.barrier()
    with trace.recording() if own_recorder else nullcontext() as recorder:
        output = CASES[case].on_rank(work)
    return output.cpu(), None if recorder is None else recorder.recording()


def _own(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's shard, on its device."""
    parts = reference.split(whole, interlace.get_world_size(), dim)
    return parts[interlace.get_rank()].to(interlace.device())


def _gather(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with _visible_tiles(input.shape[0], weight.shape[1], weight.shape[0]):
        output: torch.Tensor = interlace.all_gather_matmul(input, weight, algorithm="fused")
    return output


def _scatter(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = -(-input.shape[0] // interlace.get_world_size())
    with _visible_tiles(rows, weight.shape[1], weight.shape[0]):
        output: torch.Tensor = interlace.matmul_reduce_scatter(input, weight, algorithm="fused")
    return output


def _visible_tiles(rows: int, columns: int, inner: int) -> Any:
    """Tiles small enough that a shard has several; where kernels are compiled, the usual ones."""
    if not groups.default_group().place.interpreted:
        return nullcontext()
    block_m = _power_of_two(rows / 2, 16, 128)
    return configuration.override(
        block_m=block_m,
        block_n=_power_of_two(columns / 2, 16, 128),
        block_k=_power_of_two(inner / 8, 32, 128),
        copy_rows=max(16, block_m // 4),
        chunks=2,
        programs=3,
    )


def _power_of_two(least: float, smallest: int, largest: int) -> int:
    """The first that is at least ``least``, within bounds."""
    size = smallest
    while size < least and size < largest:
        size *= 2
    return size


def _gather_on_rank(work: Workload) -> torch.Tensor:
    return _gather(_own(work.activations, 0), _own(work.weight1, 1))


def _scatter_on_rank(work: Workload) -> torch.Tensor:
    return _scatter(_own(work.activations, 1), _own(work.weight1, 0))


def _mlp_on_rank(work: Workload) -> torch.Tensor:
    hidden = _gather(_own(work.activations, 0), _own(work.weight1, 1))
    return _scatter(torch.nn.functional.gelu(hidden), _own(work.weight2, 0))


# -- float64 ---------------------------------------------------------------------------------------


def _gather_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shards = reference.split(work.activations, ranks)
    dtype = work.activations.dtype
    value = reference.all_gather_matmul_reference(shards, work.weight1)
    return value, reference.all_gather_matmul_bound(shards, work.weight1, dtype)


def _scatter_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = reference.split(work.activations, ranks, 1)
    weights = reference.split(work.weight1, ranks)
    dtype = work.activations.dtype
    value = reference.matmul_all_reduce_reference(inputs, weights)
    return value, reference.matmul_all_reduce_bound(inputs, weights, dtype)


def _mlp_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bound of the second matmul, and what the first and gelu may be off, carried through it."""
    dtype = work.activations.dtype
    unit, unit32 = reference.unit_roundoff(dtype), reference.unit_roundoff(torch.float32)
    before, before_error = _gather_expected(work, ranks)
    hidden = torch.nn.functional.gelu(before)
    off = GELU_SLOPE * before_error + GELU_ROUNDINGS * unit32 * (before.abs() + before_error)
    off = off + unit * (hidden.abs() + off) + reference.half_denormal(dtype)
    inputs = reference.split(hidden, ranks, 1)
    weights = reference.split(work.weight2, ranks)
    value = reference.matmul_all_reduce_reference(inputs, weights)
    bound = reference.matmul_all_reduce_bound(inputs, weights, dtype)
    # The second matmul rounds what is off, too: twice to dtype, and while it accumulates.
    growth = 1 + 4 * unit + 2 * reference.gamma(hidden.shape[1] + ranks + 8, unit32)
    return value, bound + growth * (off @ work.weight2.double().abs())


CASES = (
    Case(
        "all_gather_matmul",
        "x @ weight1",
        "Every rank has some rows of x and some columns of weight1. It multiplies its own rows at "
        "once, and the others' as chunks of them arrive.",
        1,
        _gather_on_rank,
        _gather_expected,
    ),
    Case(
        "matmul_reduce_scatter",
        "x @ weight1",
        "Every rank has some of the k columns of x and rows of weight1, so its product is one part "
        "of a sum. Tiles leave for the rank that adds them up as they are done; own rows last.",
        0,
        _scatter_on_rank,
        _scatter_expected,
    ),
    Case(
        "MLP",
        "gelu(x @ weight1) @ weight2",
        "Both in a row: how a sequence-parallel layer of a transformer uses them.",
        0,
        _mlp_on_rank,
        _mlp_expected,
    ),
)


# -- printing --------------------------------------------------------------------------------------


def _headline(console: Console, options: DemoOptions, work: Workload) -> None:
    m, n, k = work.sizes
    ranks = f"{options.ranks} rank{'s' if options.ranks != 1 else ''}"
    where = {
        "sim": "simulated in this process",
        "shm": "one process each, kernels interpreted",
        "cuda": "sharing the current GPU",
    }[options.place]
    console.print(f"[bold]interlace demo[/bold]: {ranks}, {where} (place {options.place})")
    console.print(f"  input    {work.origin}", highlight=False, markup=False)
    console.print(
        f"  shapes   x [{m}, {k}], weight1 [{k}, {n}], weight2 [{n}, {k}], {options.dtype}, "
        f"seed {options.seed}",
        highlight=False,
        markup=False,
    )


def report(console: Console, outcome: Outcome, number: int) -> None:
    """Print what one case did: a line per rank, then the timeline."""
    from rich.box import SIMPLE_HEAD
    from rich.padding import Padding
    from rich.table import Table

    case, recording = outcome.case, outcome.recording
    console.print(f"\n[bold]{number}. {case.title}[/bold]  {case.formula}", highlight=False)
    console.print(Padding(case.story, (0, 0, 0, 3)), style="dim")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("rank", "max error", "of bound", "bytes sent", "tiles", "before last chunk"):
        table.add_column(header, justify="right")
    for rank, (error, ratio) in enumerate(outcome.errors):
        style = "" if ratio <= 1 else "bold red"
        sent = tiles = overlap = "-"
        if recording is not None:
            sent, tiles = f"{recording.bytes_sent(rank):,}", str(len(recording.tiles(rank)))
            done = recording.overlap(rank)
            overlap = "-" if done is None else f"{done[0]} = {done[0] / done[1]:.0%}"
        table.add_row(str(rank), f"{error:.2e}", f"{ratio:.0%}", sent, tiles, overlap, style=style)
    console.print(Padding(table, (0, 0, 0, 3)))
    if recording is not None:
        console.print(timeline.Timeline(recording, len(outcome.errors)))


def _write(console: Console, options: DemoOptions, outcomes: Sequence[Outcome]) -> None:
    parts = [(o.case.title, o.recording) for o in outcomes if o.recording is not None]
    if options.trace is not None:
        chrome_trace.write_trace(pathlib.Path(options.trace), parts)
        console.print(f"Trace for ui.perfetto.dev: {options.trace}", highlight=False, markup=False)
    if options.plot is not None:
        timeline.write_plot(pathlib.Path(options.plot), parts, options.ranks)
        console.print(f"Plot: {options.plot}", highlight=False, markup=False)
