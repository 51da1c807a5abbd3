"""The output of ``interlace bench``: the table, JSON, the plot."""

import json
import math
import pathlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from interlace.benchmark.runs.results import BenchRow, SizeResult
from interlace.benchmark.timing import protocol
from interlace.benchmark.timing.subject import BASELINE, PART
from interlace.cli.bench.options import BenchOptions
from interlace.cli.output.consoles import write
from interlace.cli.output.files import require_matplotlib

CACHED = "in cache"  # marks inputs that could not be rotated past the cache


def render(console: Any, options: BenchOptions, results: Sequence[SizeResult]) -> None:
    console.print(_title(results))
    headers, lines = table(results)
    _print_table(console, headers, lines)
    for note in notes(results):
        write(console, note, "dim")
    for result in results:
        for said in filter(None, [result.failed, *(row.said for row in result.rows)]):
            write(console, f"{result.label}: {said}", "red")
    wrong = sorted({row.name for r in results for row in r.rows if row.right is False})
    failed = any(result.failed for result in results)
    if wrong or failed:
        what = ", ".join(wrong) if wrong else options.target.rpartition("::")[2]
        write(console, f"WRONG results: {what}.", "red")
    elif any(row.right is None and row.role != PART for r in results for row in r.rows):
        console.print("Not checked: there is nothing to compare with.")
    else:
        console.print("[green]All results are right.[/green]")


def _title(results: Sequence[SizeResult]) -> str:
    sizes = next((result.sizes for result in results if result.sizes is not None), None)
    if sizes is None:
        return "interlace bench"
    ranks = f"{sizes.world_size} rank{'s' if sizes.world_size != 1 else ''}"
    return f"[bold]{sizes.op}[/bold], {sizes.dtype}, {ranks}, place {sizes.place} ({sizes.device})"


def table(results: Sequence[SizeResult]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells; columns that no row has a figure for are left out."""
    names = list(dict.fromkeys(n for result in results for row in result.rows for n in row.speedup))
    columns: list[tuple[str, Any]] = [
        ("time\nus", lambda row: _number(row.microseconds.median)),
        ("+-", lambda row: f"{row.microseconds.relative:.0%}"),
        ("algbw\nGB/s", lambda row: _number(row.algbw)),
        ("busbw\nGB/s", lambda row: _number(row.busbw)),
        ("TFLOP\n/s", lambda row: _number(row.tflops)),
        ("overlap", lambda row: "" if row.overlap is None else f"{row.overlap:.0%}"),
        *[
            (f"times\n{name}", lambda row, name=name: _number(row.speedup.get(name)))
            for name in names
        ],
        ("result", _verdict),
    ]
    lines = []
    for result in results:
        if result.failed:
            cells = ["" for _ in columns[:-1]]
            lines.append([result.label, "", *cells, "WRONG"])
        for index, row in enumerate(result.rows):
            label = result.label if index == 0 else ""
            lines.append([label, row.name, *[cell(row) for _, cell in columns]])
    headings = dict.fromkeys(result.heading for result in results if result.sizes is not None)
    headers = [", ".join(headings) or "size", "candidate", *[name for name, _ in columns]]
    kept = [i for i in range(len(headers)) if i < 2 or any(line[i] for line in lines)]
    return [headers[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _number(value: float | None) -> str:
    """Three digits, without an exponent.

    >>> _number(0.12345), _number(12.345), _number(12345.6), _number(None)
    ('0.123', '12.3', '12,346', '')
    """
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def _verdict(row: BenchRow) -> str:
    if row.right is None:
        return "" if row.role == PART else "not checked"
    if row.right:
        return "right"
    finite = row.error is not None and math.isfinite(row.error)
    return f"WRONG ({row.error:.3g} x allowed)" if finite else "WRONG"


def _print_table(console: Any, headers: list[str], lines: list[list[str]]) -> None:
    """Cells below each other; names of candidates, in the second column, begin at its left."""
    names = [["", *header.split("\n")][-2:] for header in headers]
    heads = [[name[i] for name in names] for i in range(2)]
    widths = [max(len(line[i]) for line in [*heads, *lines]) for i in range(len(headers))]
    rule = ["-" * (sum(widths) + 2 * len(widths) - 2)]
    for line in [*heads, rule, *lines]:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=False)]
        cells[1:2] = [cell.ljust(widths[1]) for cell in line[1:2]]
        text = "  ".join(cells).rstrip()
        write(console, text, "bold red" if line[-1].startswith("WRONG") else "")
    console.print()


def notes(results: Sequence[SizeResult]) -> list[str]:
    """Notes that a reader of the results needs, each once."""
    found = []
    for result in results:
        sizes = result.sizes
        if sizes is None:
            continue
        if sizes.place == "sim":
            found.append("Times are those of the simulator: they say nothing about any machine.")
        if sizes.left_out:
            found.append(f"Left out of all: {', '.join(sizes.left_out)}.")
        found += [
            f"{result.label}: {row.name} took longer than its matmul and its communication one after the "
            "other, hence the overlap below 0: sizes are too small to gain, or something else was running."
            for row in result.rows
            if row.overlap is not None and row.overlap < 0
        ]
        small = any(0 < row.rotated_bytes < sizes.cache_bytes for row in result.rows)
        if small and sizes.place != "sim":
            found.append(
                f"{result.label}: inputs may be {CACHED}: all sets together are smaller than the last "
                f"cache, {sizes.cache_bytes >> 20} MiB."
            )
    return list(dict.fromkeys(found))


def write_json(path: pathlib.Path, options: BenchOptions, results: Sequence[SizeResult]) -> None:
    """Everything: options, machine, protocol, all blocks of all rows."""
    from interlace import __version__
    from interlace.cli.output.machine import inspect_machine

    document = {
        "interlace": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": asdict(options),
        "machine": inspect_machine(),
        "protocol": {
            "block": f"calls that fill {protocol.BLOCK_SECONDS} s, at most {protocol.MOST_CALLS}",
            "order": "candidates alternate block by block",
            "time": "slowest rank, from a barrier before the block to the end of its device's work",
            "statistic": "median over blocks",
        },
        "units": {
            "microseconds": "per call",
            "algbw, busbw": "10**9 bytes/s, nccl-tests' definitions",
            "tflops": "10**12/s, one rank",
        },
        "results": [result.to_dict() for result in results],
        "right": all(result.right for result in results),
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def times(results: Sequence[SizeResult]) -> list[tuple[str, list[tuple[str, float]]]]:
    """The medians of what was measured, for bars."""
    measured = [result for result in results if result.rows]
    return [(r.label, [(row.name, row.microseconds.median) for row in r.rows]) for r in measured]


def write_plot(path: pathlib.Path, results: Sequence[SizeResult]) -> None:
    """A line per candidate over the sizes: bus bandwidth, or time where there is none; quartiles shaded."""
    figure = require_matplotlib()(figsize=(8, 5))
    axes = figure.subplots()
    measured = [result for result in results if result.sizes is not None]
    names = list(dict.fromkeys(row.name for result in measured for row in result.rows))
    rated = all(row.busbw is not None for r in measured for row in r.rows if row.role != PART)
    for name in names:
        points = [(i, row) for i, r in enumerate(measured) for row in r.rows if row.name == name]
        role = points[0][1].role
        if rated and role == PART:
            continue
        drawn = []
        for i, row in points:
            spread = row.microseconds
            carried = (row.busbw or 0.0) * spread.median
            values = spread.median, spread.low, spread.high
            drawn.append((i, *(carried / each if rated else each for each in values)))
        x, middle, low, high = zip(*drawn, strict=True)
        style = {BASELINE: "--", PART: ":"}.get(role, "-")
        line = axes.plot(x, middle, style, marker="o", label=name)
        axes.fill_between(x, low, high, color=line[0].get_color(), alpha=0.2)
    axes.set_xticks(range(len(measured)), [r.label for r in measured], rotation=30, ha="right")
    axes.set_ylabel("bus bandwidth, GB/s" if rated else "time of a call, us")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.set_title(_title(results).replace("[bold]", "").replace("[/bold]", ""), fontsize=10)
    if names:
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
