"""``interlace demo``: the fused ops on real input, compared with float64, and what happened when."""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

import interlace
from interlace import reference, tracing
from interlace.cli.demo import page, timeline, workload
from interlace.cli.demo.cases import CASES, DemoCase
from interlace.cli.demo.workload import DemoOptions, Workload
from interlace.cli.output.consoles import write
from interlace.cli.output.files import refuse_format, refuse_outputs, refuse_unreadable
from interlace.cli.output.page import write_page
from interlace.runtime.places.sim.scheduler import chrome_trace
from interlace.runtime.places.sim.scheduler.recording import Recording

TIMEOUT = 1800.0
RECORDED = ("sim", "shm")  # places whose kernels are interpreted, and report their tiles


@dataclass(frozen=True)
class CaseResult:
    """One case, run: per rank (largest error, its ratio to the bound); None where nothing is seen."""

    case: DemoCase
    errors: list[tuple[float, float]]
    recording: Recording | None

    @property
    def correct(self) -> bool:
        return all(ratio <= 1 for _, ratio in self.errors)


def demo(console: Console, options: DemoOptions) -> int:
    """Run and print everything; 0 if every error is within its bound, else 1."""
    work = _load(options)
    _headline(console, options, work)
    outcomes = []
    for number, case in enumerate(CASES, 1):
        with console.status(f"{case.title}, {number} of {len(CASES)}"):
            outcome = run_case(case, work, options)
        outcomes.append(outcome)
        report(console, outcome, number)
    if options.place not in RECORDED:
        console.print("No timeline: compiled kernels do not report their tiles.", style="dim")
    console.print()
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
    if options.text is not None and options.input is not None:
        raise ValueError("--text and --input exclude each other")
    inputs = {"--text": options.text, "--input": options.input}
    outputs = {"--trace": options.trace, "--plot": options.plot, "--html": options.html}
    for name, path in inputs.items():
        if path is not None:
            refuse_unreadable(name, path)
    for name, path in outputs.items():
        if path is not None and options.place not in RECORDED:
            raise ValueError(f"{name} needs --place sim or shm: no compiled kernel is recorded")
    refuse_outputs(outputs, inputs)
    if options.place == "cuda" and not torch.cuda.is_available():
        raise ValueError("--place cuda needs a CUDA device, torch sees none; use sim, shm or ptx")
    if options.plot is not None:
        refuse_format(options.plot)
    dtype, sizes = workload.DTYPES[options.dtype], (options.m, options.n, options.k)
    if options.input is not None:
        return workload.from_file(options.input, dtype, options.seed, *sizes)
    return workload.from_text(options.text, dtype, options.seed, *sizes)


def run_case(case: DemoCase, work: Workload, options: DemoOptions) -> CaseResult:
    place: Any = options.place
    with tracing.collected() as runs:
        answers = interlace.run(
            _on_rank,
            options.ranks,
            CASES.index(case),
            work,
            place=place,
            seed=options.seed,
            timeout=TIMEOUT,
        )
    value, bound = case.expected(work, options.ranks)
    expected = reference.split(value, options.ranks, case.part_dim)
    bounds = reference.split(bound, options.ranks, case.part_dim)
    errors = []
    for output, right, allowed in zip(answers, expected, bounds, strict=True):
        ratio = reference.worst_ratio(output, right, allowed)
        error = (output.double() - right).abs()
        errors.append((float(error.max()) if error.numel() else 0.0, ratio))
    return CaseResult(case, errors, runs[0][1] if place in RECORDED else None)


def _on_rank(case: int, work: Workload) -> torch.Tensor:
    """This rank's part of the result."""
    interlace.barrier()
    return CASES[case].on_rank(work).cpu()


def _headline(console: Console, options: DemoOptions, work: Workload) -> None:
    m, n, k = work.sizes
    ranks = f"{options.ranks} rank{'s' if options.ranks != 1 else ''}"
    where = {
        "sim": f"simulated in this process, schedule {options.seed}",
        "shm": "one process each, kernels interpreted",
        "cuda": "sharing the current GPU",
        "ptx": f"simulated, the PTX of kernels run on this CPU, schedule {options.seed}",
    }[options.place]
    console.print(f"[bold]interlace demo[/bold]: {ranks}, {where}")
    write(console, f"  input   {work.origin}")
    sizes = f"x [{m}, {k}], weight1 [{k}, {n}], weight2 [{n}, {k}]"
    write(console, f"  shapes  {sizes}, {options.dtype}")
    if options.place in RECORDED:
        console.print(timeline.legend(console.options.ascii_only))


def report(console: Console, outcome: CaseResult, number: int) -> None:
    """Print what one case did: a line per rank, then the timeline."""
    case, recording = outcome.case, outcome.recording
    console.print(f"\n[bold]{number}. {case.title}[/bold]   {case.formula}")
    console.print(Padding(case.story, (0, 0, 0, 3)), style="dim")
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("rank", "max error", "of bound", "bytes sent", "tiles", "before last chunk"):
        table.add_column(header, justify="right")
    for rank, (error, ratio) in enumerate(outcome.errors):
        style = "" if ratio <= 1 else "bold red"
        sent = tiles = overlap = "-"
        if recording is not None:
            sent, tiles = f"{recording.bytes_sent(rank):,}", str(len(recording.tiles(rank)))
            done = recording.overlap(rank)
            overlap = "-" if done is None else f"{done[0]} ({done[0] / done[1]:.0%})"
        table.add_row(str(rank), f"{error:.1e}", f"{ratio:.0%}", sent, tiles, overlap, style=style)
    console.print(Padding(table, (0, 0, 0, 3), expand=False))
    if recording is not None:
        console.print()
        console.print(timeline.Timeline(recording, len(outcome.errors)))


def _write(console: Console, options: DemoOptions, outcomes: Sequence[CaseResult]) -> None:
    parts = [(o.case.title, o.recording) for o in outcomes if o.recording is not None]
    if options.trace is not None:
        chrome_trace.write_trace(pathlib.Path(options.trace), parts)
        write(console, f"Trace for ui.perfetto.dev: {options.trace}")
    if options.plot is not None:
        timeline.write_plot(pathlib.Path(options.plot), parts, options.ranks)
        write(console, f"Plot: {options.plot}")
    if options.html is not None:
        panels = [
            page.panel_of(f"{o.case.title}: {o.case.formula}", o.case.story, o.recording)
            for o in outcomes
            if o.recording is not None
        ]
        wrong = [outcome.case.title for outcome in outcomes if not outcome.correct]
        verdict = f"wrong: {', '.join(wrong)}" if wrong else "correct"
        facts = f"{options.ranks} ranks, {options.place}, {options.dtype}"
        write_page(options.html, "demo", verdict, facts, panels, bad=bool(wrong))
        write(console, f"Page: {options.html}")
