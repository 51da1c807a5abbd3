"""``interlace build``: compile every kernel for the named architectures, without a GPU, and judge it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from interlace.cli.output.consoles import new_console
from interlace.cli.output.progress import counted
from interlace.runtime.compiler.build import STRICT_ARCHES, Report
from interlace.runtime.compiler.build import build as build_entries
from interlace.runtime.compiler.catalogue import Entry, entries
from interlace.runtime.compiler.catalogue_nodes import linked
from interlace.runtime.core.errors import PlaceUnavailableError

if TYPE_CHECKING:
    from rich.console import Console

NUMBERS = ("registers", "stack", "spills", "shared", "tensor_cores")  # of a report


def build(
    console: Console,
    arches: list[int],
    as_json: bool,
    nvshmem: str | None = None,
    kernels: list[str] | None = None,
) -> int:
    """Build the catalogue for ``arches`` (90 is 9.0), or these ``kernels`` of it; a line per variant.

    Kernels that put are linked with NVSHMEM's device library too, if it is installed or in the folder
    ``nvshmem``; stderr says so if it is not.

    1 if an entry does not compile, breaks an ordering rule, lacks tensor-core instructions, or, on
    9.0 and 10.0, is a default that spills; else 0. With ``as_json`` a list goes to stdout instead.
    ValueError for a kernel that the catalogue does not have.
    """
    wanted = [entry for arch in arches for entry in entries(arch)]
    wanted += [entry for arch in arches for entry in _linked(arch, nvshmem)]
    if kernels is not None:
        known = list(dict.fromkeys(entry.name.split()[0] for entry in wanted))
        for name in kernels:
            if name not in known:
                raise ValueError(f"--kernel {name}: is none of {', '.join(known)}")
        wanted = [entry for entry in wanted if entry.name.split()[0] in kernels]
    with counted() as begin:
        reports = build_entries(wanted, on_report=begin("compiling", len(wanted)))
    show(console, reports, as_json)
    return 1 if any(report.problems() for report in reports) else 0


def _linked(arch: int, folder: str | None) -> list[Entry]:
    """The variants that are linked with NVSHMEM; none, and a message, where it is not installed."""
    try:
        return linked(arch, folder)
    except PlaceUnavailableError as error:
        if folder is not None:
            raise
        text = f"not linked with NVSHMEM: {error}"
        new_console(stderr=True).print(text, style="yellow", soft_wrap=True)
        return []


def show(console: Console, reports: list[Report], as_json: bool) -> None:
    """A line per report, or all of them as JSON."""
    if as_json:
        facts = [{**asdict(report), "problems": report.problems()} for report in reports]
        console.out(json.dumps(facts, indent=2))
    else:
        _render(console, reports)


def _render(console: Console, reports: list[Report]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="registers per thread, bytes of stack, spill instructions, bytes of shared memory, "
        "tensor-core instructions",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kernel, variant", min_width=28)
    for column in ("sm", "regs", "stack", "spills", "shared", "tensor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict")
    kernels = list(dict.fromkeys(report.name.split(" ")[0] for report in reports))
    kernel = ""
    for report in sorted(reports, key=lambda report: kernels.index(report.name.split(" ")[0])):
        name, _, variant = report.name.partition(" ")
        if name != kernel:
            kernel = name
            table.add_row(Text(kernel, "bold"))
        problems = report.problems()
        numbers = [None if report.error is not None else getattr(report, name) for name in NUMBERS]
        if problems:
            verdict = Text("; ".join(problems), "red")
        elif not report.spills and not report.stack:
            verdict = Text("good", "green")
        else:
            why = "older chip" if report.arch not in STRICT_ARCHES else "not a default"
            verdict = Text(f"spills ({why})", "yellow")
        table.add_row(
            Text(f"  {variant or 'any'}"),
            str(report.arch),
            *("-" if number is None else str(number) for number in numbers),
            verdict,
        )
    console.print(table)
    failed = sum(bool(report.problems()) for report in reports)
    console.print(f"{len(reports)} built, {failed} not as they should be.")
