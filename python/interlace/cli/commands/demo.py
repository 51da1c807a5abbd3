"""``interlace demo``: run the fused ops on real input, compare with float64, and show what happened when.

The expected results are in float64, each with an error bound that a correct result keeps. A text is cut
into words and punctuation. A fixed table turns each word into a vector, by the word's checksum. The word's
position is added, so that no two rows of the activations are equal. Table and weights are drawn from the
seed.

In the terminal each rank has two lanes, as wide as the console::

    rank 0  chunks |----3--2---1----|     the rank from which a chunk arrived; - while one is on its way
            tiles  |0000033..2221111|     whose rows the current tile multiplies; . while all wait

The activity that fills most of a cell is shown in it; work always wins over waiting. A cell holds one
arrival, so several arrivals at once spread sideways.
"""

import math
import pathlib
import re
import zipfile
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

import interlace
from interlace import reference, tracing
from interlace.groups import groups
from interlace.launcher import PLACES
from interlace.output.consoles import new_table, write
from interlace.output.files import (
    refuse_format,
    refuse_outputs,
    refuse_unreadable,
    require_matplotlib,
)
from interlace.output.machine import refuse_size
from interlace.output.options import CommandOptions, option, positive_int, seed_number, world_size
from interlace.output.page import PageEvent, PageView, Panel, write_page
from interlace.runtime.places.sim.scheduler.recording import (
    STEPS,
    TICKS,
    RecordedSpan,
    Recording,
    title_of,
    write_trace,
)
from interlace.runtime.tuning import configuration

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEFAULT_M, DEFAULT_N, DEFAULT_K = 512, 512, 256
VOCABULARY = 4096
SHIPPED_TEXT = "overlap.txt"
KEYS = ("activations", "weight1", "weight2")


@dataclass(frozen=True)
class DemoOptions(CommandOptions):
    """Run the fused ops on real input and draw what happened."""

    statuses = ((1, "an error exceeds its bound"),)

    ranks: int = option(4, type=world_size, also="--world-size", help="world size (default 4)")
    place: str = option("sim", choices=PLACES, help="place of the ranks (default sim)")
    m: int | None = option(None, type=positive_int, help="rows of the whole activations (tokens)")
    n: int | None = option(None, type=positive_int, help="hidden features of the MLP")
    k: int | None = option(None, type=positive_int, help="features of the activations")
    dtype: str = option(
        "bfloat16", choices=DTYPES, help="dtype of weights and activations (default bfloat16)"
    )
    seed: int = option(
        0, type=seed_number, help="seed of schedule, embedding and weights (default 0)"
    )
    text: str | None = option(None, metavar="FILE", help="text to take the tokens from")
    input: str | None = option(None, metavar="FILE", help="activations and weights, .npy or .pt")
    trace: str | None = option(None, metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    plot: str | None = option(None, metavar="FILE", help="draw the timeline (needs matplotlib)")
    html: str | None = option(None, metavar="FILE", help="write a page that shows what happened")

    def interprets(self) -> bool:
        return self.place != "cuda"


@dataclass(frozen=True)
class Workload:
    """``activations`` [m, k], ``weight1`` [k, n], ``weight2`` [n, k] of one dtype, and their origin."""

    activations: torch.Tensor
    weight1: torch.Tensor
    weight2: torch.Tensor
    origin: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        return (*self.activations.shape[:1], self.weight1.shape[1], self.activations.shape[1])


def from_text(
    path: str | None, dtype: torch.dtype, seed: int, m: int | None, n: int | None, k: int | None
) -> Workload:
    """Return the first ``m`` tokens of a text; a shorter text is repeated from its beginning."""
    m, n, k = m or DEFAULT_M, n or DEFAULT_N, k or DEFAULT_K
    if path is None:
        text = (resources.files("interlace") / "data" / SHIPPED_TEXT).read_text("utf-8")
        name = f"{SHIPPED_TEXT}, which ships with interlace"
    else:
        try:
            text = pathlib.Path(path).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {path}: not a text in UTF-8 ({error.reason})") from None
        name = path
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise ValueError(f"--text {path}: no words in it")
    _refuse_size(m, n, k)
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, k, generator=generator)
    tokens = torch.tensor([zlib.crc32(words[i % len(words)].lower().encode()) for i in range(m)])
    frequency = 10000.0 ** (-torch.arange(k) / k)  # how often a position turns, by column
    positions = torch.sin(torch.arange(m)[:, None] * frequency + torch.arange(k))
    activations = embedding[tokens % VOCABULARY] + positions
    weight1, weight2 = _weights(k, n, generator)
    again = f" (its {len(words)}, repeated)" if m > len(words) else ""
    origin = f"{m} tokens{again} of {name}"
    return Workload(activations.to(dtype), weight1.to(dtype), weight2.to(dtype), origin)


def from_file(
    path: str, dtype: torch.dtype, seed: int, m: int | None, n: int | None, k: int | None
) -> Workload:
    """Return the user's activations and weights. ``m`` takes the first rows; n and k must agree.

    ``.npy``: activations ``[m, k]``. ``.pt``: a tensor, or a dict with "activations" and optionally
    "weight1" ``[k, n]`` and "weight2" ``[n, k]``. Missing weights are drawn from the seed.
    """
    where = f"--input {path}"
    found = _read(path, where)
    activations = _matrix(f"{where}: activations", found["activations"], dtype)
    if m is not None and m > activations.shape[0]:
        raise ValueError(f"{where}: --m {m}, but activations have {activations.shape[0]} rows")
    activations = activations[: m or activations.shape[0]]
    inner = activations.shape[1]
    if k is not None and k != inner:
        raise ValueError(f"{where}: --k {k}, but activations have {inner} columns")
    weights = {
        key: _matrix(f"{where}: {key}", found[key], dtype) for key in KEYS[1:] if key in found
    }
    drawn = [key for key in KEYS[1:] if key not in weights]
    if "weight1" in weights:
        hidden = weights["weight1"].shape[1]
    else:
        hidden = weights["weight2"].shape[0] if "weight2" in weights else n or DEFAULT_N
    if n is not None and n != hidden:
        raise ValueError(f"{where}: --n {n}, but the weights have n = {hidden}")
    _refuse_size(activations.shape[0], hidden, inner)
    generated = _weights(inner, hidden, torch.Generator().manual_seed(seed))
    shapes = (("(k, n)", (inner, hidden)), ("(n, k)", (hidden, inner)))
    for key, weight, (form, shape) in zip(KEYS[1:], generated, shapes, strict=True):
        given = tuple(weights.setdefault(key, weight.to(dtype)).shape)
        if given != shape:
            raise ValueError(f"{where}: {key} has shape {given}, must be {form} = {shape}")
    origin = path + (f", {' and '.join(drawn)} drawn from the seed" if drawn else "")
    return Workload(activations, weights["weight1"], weights["weight2"], origin)


def _refuse_size(m: int, n: int, k: int) -> None:
    refuse_size(f"{m} x {n} x {k}", (m * k + k * n + m * n) * 8, 1, "sim")


def _weights(k: int, n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random weights that keep the magnitude of the values that they multiply."""
    first = torch.randn(k, n, generator=generator) / k**0.5
    return first, torch.randn(n, k, generator=generator) / n**0.5


def _read(path: str, where: str) -> dict[str, Any]:
    suffix = pathlib.Path(path).suffix
    if suffix not in (".npy", ".pt"):
        raise ValueError(f"{where}: must be a .npy or a .pt file")
    if suffix == ".npy":
        try:
            return {"activations": np.load(path, allow_pickle=False)}
        except (ValueError, EOFError) as error:
            raise ValueError(f"{where}: not an array in .npy format ({error})") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{where}: not a file of torch.save ({_first_line(error)})") from None
    except Exception as error:  # pickle.UnpicklingError: objects other than tensors
        raise ValueError(
            f"{where}: holds more than tensors, or is not a file of torch.save ({_first_line(error)})"
        ) from None
    if isinstance(content, torch.Tensor):
        return {"activations": content}
    if not isinstance(content, dict):
        raise TypeError(f"{where}: must hold a tensor or a dict, got {type(content).__name__}")
    unknown = [str(key) for key in content if key not in KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    if "activations" not in content:
        raise ValueError(f'{where}: the dict has no "activations"')
    return content


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]


def _matrix(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            raise TypeError(f"{name}: must be floating point, got {value.dtype}")
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: must be floating point, got {value.dtype}")
    if value.dim() != 2 or not value.numel():
        raise ValueError(f"{name}: must be a non-empty matrix, got shape {tuple(value.shape)}")
    if not bool(torch.isfinite(value.float()).all()):
        raise ValueError(f"{name}: has values that are not finite")
    converted = value.detach().to(dtype).contiguous()
    if not bool(torch.isfinite(converted).all()):
        largest = float(value.abs().max())
        raise ValueError(f"{name}: {largest:g} is more than {dtype} can hold")
    return converted


@dataclass(frozen=True)
class DemoCase:
    """One op: ``on_rank`` returns a rank's part, along ``part_dim``; ``expected`` the whole and bounds."""

    title: str
    formula: str
    story: str
    part_dim: int
    on_rank: Callable[[Workload], torch.Tensor]
    expected: Callable[[Workload, int], tuple[torch.Tensor, torch.Tensor]]


def _own_shard(whole: torch.Tensor, dim: int) -> torch.Tensor:
    parts = reference.split(whole, interlace.get_world_size(), dim)
    return parts[interlace.get_rank()].to(interlace.device())


def _gather(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply all rows of ``whole`` by ``weight``; this rank holds some of the rows."""
    input = _own_shard(whole, 0)
    with _visible_tiles(whole.shape[0], weight):
        output: torch.Tensor = interlace.all_gather_matmul(input, weight, algorithm="fused")
    return output


def _scatter(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks of ``input @ weight``."""
    with _visible_tiles(input.shape[0], weight):
        output: torch.Tensor = interlace.matmul_reduce_scatter(input, weight, algorithm="fused")
    return output


def _visible_tiles(rows: int, weight: torch.Tensor) -> AbstractContextManager[None]:
    """Make tiles small enough that a shard has several; compiled kernels keep their tiles."""
    if not groups.default_group().place.interpreted:
        return nullcontext()
    inner, columns = weight.shape
    block_m = _power_of_two(rows / interlace.get_world_size() / 2, 16, 128)
    return configuration.override(
        block_m=block_m,
        block_n=_power_of_two(columns / 2, 16, 256),
        block_k=_power_of_two(inner / 8, 32, 128),
        copy_rows=max(16, block_m // 4),
        chunks=2,
        programs=3,
    )


def _power_of_two(least: float, smallest: int, largest: int) -> int:
    return min(max(1 << (math.ceil(least) - 1).bit_length(), smallest), largest)


def _mlp_on_rank(work: Workload) -> torch.Tensor:
    hidden = _gather(work.activations, _own_shard(work.weight1, 1))
    return _scatter(torch.nn.functional.gelu(hidden), _own_shard(work.weight2, 0))


def _gather_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shards = reference.split(work.activations, ranks)
    return reference.all_gather_matmul(shards, work.weight1, work.activations.dtype)


def _scatter_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = reference.split(work.activations, ranks, 1)
    weights = reference.split(work.weight1, ranks)
    return reference.matmul_all_reduce(inputs, weights, work.activations.dtype)


def _mlp_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bound of the second matmul, with the error of the first and of gelu carried through it."""
    dtype = work.activations.dtype
    shards = reference.split(work.activations, ranks)
    # torch's gelu is a separate call: its input and its output are rounded
    hidden, off = reference.all_gather_matmul(
        shards, work.weight1, dtype, activation="gelu", roundings=2
    )
    inputs = reference.split(hidden, ranks, 1)
    weights = reference.split(work.weight2, ranks)
    value, bound = reference.matmul_all_reduce(inputs, weights, dtype)
    # The second matmul also rounds these errors: twice to dtype, and while it accumulates.
    unit, unit32 = reference.unit_roundoff(dtype), reference.unit_roundoff(torch.float32)
    growth = 1 + 4 * unit + 2 * reference.gamma(hidden.shape[1] + ranks + 8, unit32)
    return value, bound + growth * (off @ work.weight2.double().abs())


CASES = (
    DemoCase(
        "all_gather_matmul",
        "x @ weight1",
        "Every rank has some rows of x and some columns of weight1. It multiplies its own rows at "
        "once, and the rows of other ranks as their chunks arrive.",
        1,
        lambda work: _gather(work.activations, _own_shard(work.weight1, 1)),
        _gather_expected,
    ),
    DemoCase(
        "matmul_reduce_scatter",
        "x @ weight1",
        "Every rank has some of the k columns of x and rows of weight1, so its product is one part "
        "of a sum. Each finished tile is sent to the rank that adds it up; own rows come last.",
        0,
        lambda work: _scatter(_own_shard(work.activations, 1), _own_shard(work.weight1, 0)),
        _scatter_expected,
    ),
    DemoCase(
        "MLP",
        "gelu(x @ weight1) @ weight2",
        "Both in sequence, as a sequence-parallel layer of a transformer uses them. A bar in the tiles "
        "shows where gelu has finished and the second matmul begins.",
        0,
        _mlp_on_rank,
        _mlp_expected,
    ),
)


TIMEOUT = 1800.0
RECORDED = ("sim", "shm")  # places whose kernels are interpreted and report their tiles


@dataclass(frozen=True)
class CaseResult:
    """One case after its run: per rank (largest error, its ratio to the bound); None if not recorded."""

    case: DemoCase
    errors: list[tuple[float, float]]
    recording: Recording | None

    @property
    def correct(self) -> bool:
        return all(ratio <= 1 for _, ratio in self.errors)


def demo(console: Console, options: DemoOptions) -> int:
    """Run and print everything; return 0 if every error is within its bound, otherwise 1."""
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
    """Return the input, after all checks of options that could make the run useless."""
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
    dtype, sizes = DTYPES[options.dtype], (options.m, options.n, options.k)
    if options.input is not None:
        return from_file(options.input, dtype, options.seed, *sizes)
    return from_text(options.text, dtype, options.seed, *sizes)


def run_case(case: DemoCase, work: Workload, options: DemoOptions) -> CaseResult:
    place: Any = options.place
    with tracing.collect_runs() as runs:
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
        console.print(legend(console.options.ascii_only))


def report(console: Console, outcome: CaseResult, number: int) -> None:
    """Print the result of one case: a line per rank, then the timeline."""
    case, recording = outcome.case, outcome.recording
    console.print(f"\n[bold]{number}. {case.title}[/bold]   {case.formula}")
    console.print(Padding(case.story, (0, 0, 0, 3)), style="dim")
    table = new_table()
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
        console.print(Timeline(recording, len(outcome.errors)))


def _write(console: Console, options: DemoOptions, outcomes: Sequence[CaseResult]) -> None:
    parts = [(o.case.title, o.recording) for o in outcomes if o.recording is not None]
    if options.trace is not None:
        write_trace(pathlib.Path(options.trace), parts)
        write(console, f"Trace for ui.perfetto.dev: {options.trace}")
    if options.plot is not None:
        write_plot(pathlib.Path(options.plot), parts, options.ranks)
        write(console, f"Plot: {options.plot}")
    if options.html is not None:
        panels = [
            panel_of(f"{o.case.title}: {o.case.formula}", o.case.story, o.recording)
            for o in outcomes
            if o.recording is not None
        ]
        wrong = [outcome.case.title for outcome in outcomes if not outcome.correct]
        verdict = f"wrong: {', '.join(wrong)}" if wrong else "correct"
        facts = f"{options.ranks} ranks, {options.place}, {options.dtype}"
        write_page(options.html, "demo", verdict, facts, panels, bad=bool(wrong))
        write(console, f"Page: {options.html}")


# -- drawings --------------------------------------------------------------------------------------

NAMES = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red", "white", "bright_cyan")
LABELS = ("rank {:<3} chunks ", "         tiles  ")
NARROWEST = 20
DRAWN = ("tile", "sum")


@dataclass
class Timeline:
    """A rich renderable: the lanes of every rank of ``recording``, and a ruler."""

    recording: Recording
    world_size: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        start, end = self.recording.extent()
        margin = len(LABELS[1]) + 2
        scale = Scale(start, end, max(NARROWEST, options.max_width - margin))
        glyphs = Glyphs(options.ascii_only)
        for rank in range(self.world_size):
            lanes = (
                _chunk_cells(self.recording, rank, scale, glyphs),
                _tile_cells(self.recording, rank, scale, glyphs),
            )
            for label, cells in zip(LABELS, lanes, strict=True):
                line = Text(label.format(rank), no_wrap=True)
                line.append(glyphs.edge, "dim")
                for glyph, style in cells:
                    line.append(glyph, style)
                yield line.append(glyphs.edge, "dim")
        last = f"{(end - start) / TICKS:,.0f} {STEPS}"
        # the times of interpreted kernels must not look like real speed
        if self.recording.unit != STEPS:
            last = f"{(end - start) / TICKS / 1000:,.1f} ms in the interpreter"
        yield Text(" " * (margin - 1) + "0" + last.rjust(scale.cells - 1), "dim", no_wrap=True)


def legend(ascii_only: bool) -> Text:
    glyphs = Glyphs(ascii_only)
    text = Text(
        "  reading the timelines, where a rank is always the same digit and color:\n", "dim"
    )
    for lane, glyph, meaning in (
        ("chunks", f"{glyphs.under_way}1", "a chunk from rank 1 is on its way, and has arrived"),
        ("tiles", "1", "computes a tile of the rows that belong to rank 1"),
        ("", "+", "sums the parts of all ranks"),
        ("", glyphs.waiting, "all programs of the rank wait for chunks"),
    ):
        text.append(f"    {lane:<8}", "dim").append(f"{glyph:>2}", "bold")
        text.append(f"  {meaning}\n", "dim")
    text.rstrip()
    return text


class Glyphs:
    """Characters of the lanes, with replacements for consoles that have only ASCII."""

    def __init__(self, ascii_only: bool) -> None:
        self.under_way = "-" if ascii_only else "\u2500"
        self.waiting = "." if ascii_only else "\u00b7"
        self.edge = "|" if ascii_only else "\u2502"


class Scale:
    def __init__(self, start: int, end: int, cells: int) -> None:
        self.start, self.cells = start, cells
        self.per_cell = max(1, end - start) / cells

    def cell(self, time: int) -> int:
        return min(self.cells - 1, max(0, int((time - self.start) / self.per_cell)))

    def shares(self, span: RecordedSpan) -> Iterable[tuple[int, float]]:
        """Yield (cell, time in the cell) for every cell that ``span`` touches."""
        for cell in range(self.cell(span.start), self.cell(span.end) + 1):
            begin = self.start + cell * self.per_cell
            inside = min(span.end, begin + self.per_cell) - max(span.start, begin)
            yield cell, max(inside, 0.0)


ColouredCells = list[tuple[str, str]]


def name_of(rank: int | None) -> str:
    return NAMES[rank] if rank is not None and rank < len(NAMES) else "?"


def color_of(rank: int | None) -> str:
    return COLORS[(rank or 0) % len(COLORS)]


def _chunk_cells(recording: Recording, rank: int, scale: Scale, glyphs: Glyphs) -> ColouredCells:
    cells: ColouredCells = [(" ", "")] * scale.cells
    for span in recording.spans:
        if span.kind == "copy" and span.peer == rank and span.rank != rank:
            for cell, _ in scale.shares(span):
                cells[cell] = (glyphs.under_way, "dim " + color_of(span.rank))
    taken: set[int] = set()
    for signal in recording.arrivals(rank):
        at = scale.cell(signal.time)
        near = [c for c in (at, at + 1, at - 1, at + 2) if 0 <= c < scale.cells and c not in taken]
        cell = near[0] if near else at
        taken.add(cell)
        cells[cell] = (name_of(signal.source), "bold " + color_of(signal.source))
    return cells


def _tile_cells(recording: Recording, rank: int, scale: Scale, glyphs: Glyphs) -> ColouredCells:
    work: list[dict[tuple[str, int | None], float]] = [
        defaultdict(float) for _ in range(scale.cells)
    ]
    waiting: set[int] = set()
    first_of_op: dict[str, int] = {}
    for span in recording.spans:
        if span.rank != rank or span.kind not in (*DRAWN, "wait"):
            continue
        first_of_op.setdefault(span.op, span.start)
        for cell, share in scale.shares(span):
            if span.kind == "wait":
                waiting.add(cell)
            else:
                work[cell][span.kind, span.peer] += share + 1e-9
    cells: ColouredCells = []
    for cell, candidates in enumerate(work):
        if not candidates:
            cells.append((glyphs.waiting, "dim") if cell in waiting else (" ", ""))
            continue
        kind, peer = max(candidates, key=lambda key: candidates[key])
        if kind == "sum":
            cells.append(("+", "black on white"))
        else:
            cells.append((name_of(peer), "black on " + color_of(peer)))
    for start in sorted(first_of_op.values())[1:]:
        cells[scale.cell(start)] = (glyphs.edge, "bold")
    return cells


def write_plot(path: pathlib.Path, parts: Sequence[tuple[str, Recording]], world_size: int) -> None:
    """Draw one panel per (title, recording): arrivals and the programs of every rank."""
    figure = require_matplotlib()(figsize=(12, 1.6 + len(parts) * (0.7 + 0.62 * world_size)))
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for panel, (title, recording) in zip(panels, parts, strict=True):
        _plot_panel(panel, recording, world_size)
        panel.set_title(title, loc="left", fontsize=10, fontweight="bold")
    handles = [_patch(_shade(rank), f"rows of rank {rank}") for rank in range(min(world_size, 16))]
    handles += [_patch("0.35", "sum over ranks"), _patch("0.9", "waiting")]
    figure.legend(handles=handles, loc="lower center", ncol=min(len(handles), 9), frameon=False)
    figure.text(
        0.5,
        0.995,
        "upper line of a rank: chunks on their way to it, a triangle where one has arrived; "
        "below: its programs",
        ha="center",
        va="top",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.35 / figure.get_figheight(), 1, 0.985))
    figure.savefig(path, dpi=120)


def _plot_panel(panel: Any, recording: Recording, world_size: int) -> None:
    start, end = recording.extent()
    for rank in range(world_size):
        base = float(rank)
        own = [s for s in recording.spans if s.rank == rank and s.kind in (*DRAWN, "wait")]
        lanes = sorted({_program(s) for s in own if s.kind in DRAWN} or {_program(s) for s in own})
        height = 0.6 / max(1, len(lanes))
        for span in own:
            if _program(span) in lanes:
                y = base + 0.3 + lanes.index(_program(span)) * height
                shade = {"wait": "0.9", "sum": "0.35"}.get(span.kind, _shade(span.peer))
                _bar(panel, span, start, y, height * 0.9, shade)
        for span in recording.spans:
            if span.kind == "copy" and span.peer == rank and span.rank != rank:
                _bar(panel, span, start, base + 0.17, 0.06, _shade(span.rank))
        for signal in recording.arrivals(rank):
            x = (signal.time - start) / TICKS
            panel.plot(x, base + 0.17, "v", color=_shade(signal.source), markersize=6, mec="0.2")
    panel.set_xlim(0, (end - start) / TICKS)
    panel.set_ylim(world_size, 0)
    panel.set_yticks([rank + 0.5 for rank in range(world_size)])
    panel.set_yticklabels([f"rank {rank}" for rank in range(world_size)])
    panel.set_xlabel(recording.unit + ("" if recording.unit == STEPS else ", in the interpreter"))
    panel.spines[["top", "right"]].set_visible(False)


def _program(span: RecordedSpan) -> str:
    """Return the lane without the kernel's name: programs of successive ops share a line."""
    return span.lane.split(" ", 1)[-1]


def _bar(panel: Any, span: RecordedSpan, start: int, y: float, height: float, color: str) -> None:
    left, width = (span.start - start) / TICKS, (span.end - span.start) / TICKS
    panel.broken_barh([(left, width)], (y, height), facecolors=color, edgecolor="white", lw=0.3)


def _shade(rank: int | None) -> str:
    return f"C{(rank or 0) % 10}"


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def panel_of(title: str, text: str, recording: Recording) -> Panel:
    """Return a panel of ``recording``. An arrow starts at the span before the publish that ended a wait."""
    lanes = sorted({(span.rank, span.lane) for span in recording.spans})
    view, (first, _) = PageView(title, recording.unit, lanes), recording.extent()
    ends: dict[tuple[int, str], list[tuple[int, int]]] = {lane: [] for lane in lanes}
    for number, span in enumerate(recording.spans):
        lane, does, peer = (span.rank, span.lane), title_of(span), span.peer or 0
        start, end = (span.start - first) / TICKS, (span.end - first) / TICKS
        where = lanes.index(lane), start, end
        view.events.append(PageEvent(*where, span.kind, does, span.lines, peer=peer))
        ends[lane].append((span.end, number))
    numbers = {span: number for number, span in enumerate(recording.spans)}
    for wait, signal in recording.ended_by().items():
        before = sorted(ends.get((signal.source, signal.lane), []))
        place = bisect_right(before, (signal.time, len(numbers)))
        if place and signal.time > wait.start:  # otherwise nothing had to wait
            view.arrows.append((before[place - 1][1], numbers[wait], "wait"))
    return Panel(title, text, [view])
