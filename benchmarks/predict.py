"""Predicted times of the fused ops on GPUs that are not here: ``python benchmarks/predict.py``.

The package ``model`` is a discrete-event model of tiles, SMs, copy engines and links;
docs/explanation/model.md says how it works and how far to trust it, and docs/reference/predictions.md has
its predictions. This script prints for one machine its parameters with their sources, published speedups
beside the model's, and predictions on 8 ranks and on 2 to 128 nodes. It also prints the recommended
chunks and orders, and results that depend on unpublished figures. Nothing of it is measured, unless
``benchmarks/results`` has files of ``gpu.py`` for the machine's device, which are used and named.

--machine NAME  h100x8 (default), h100x8-500w, h800x8, h200x8, h200x1 (virtual ranks), h200-pcie
--json FILE     everything that is printed, and the parameters
--plot FOLDER   plots as model-*.png (needs matplotlib)
--fit           fit the fitted parameters again, print them, and nothing else
--docs          put the tables and plots into their two pages and docs/images
--nodes N       at most so many nodes; 128 take half of the time
--table NAME    only this table and its plot, by its name in the two pages; may be repeated
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from model import tables as tables
from model.choose import recommended
from model.fit import calibrated
from model.published import Compared, compare_all
from model.simulation.machines import MACHINES, ModelMachine, machine_named
from model.tables import Progress, Table, draw_all

from interlace.arguments.paths import refuse_unwritable
from interlace.output.files import require_matplotlib

DOCS = Path(__file__).parents[1] / "docs"
PAGES = DOCS / "explanation/model.md", DOCS / "reference/predictions.md"
IMAGES = DOCS / "images"
MARK = re.compile(r"(<!-- model (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def report(name: str) -> Progress:
    started = time.monotonic()

    def say(text: str) -> None:
        if sys.stderr.isatty():
            spent = time.monotonic() - started
            print(f"\r\033[K{name}: {spent:3.0f} s, {text}", end="", file=sys.stderr, flush=True)

    return say


def all_tables(
    machine: ModelMachine,
    progress: Progress,
    most_nodes: int = tables.NODES[-1],
    only: Sequence[str] | None = None,
) -> tuple[list[Table], list[Compared]]:
    """Everything for one machine, the published figures for all; or ``only`` these tables."""
    found: list[Compared] = []
    if only is None or {"published", "summary", "outside"} & set(only):
        found = compare_all(progress)

    makers: dict[str, Callable[[], Table | None]] = {
        "parameters": lambda: tables.parameters(machine),
        "published": lambda: tables.published(found),
        "summary": lambda: tables.summary(found),
        "outside": lambda: tables.outside(found),
        "not-modelled": tables.not_modelled,
    }
    if machine.name in ("h200x1", "h200-pcie"):
        makers["one-gpu"] = lambda: tables.one_gpu(machine, progress)
    else:
        makers |= {
            "one-node": lambda: tables.one_node(machine, progress),
            "recommended": lambda: tables.recommendation(machine, progress),
            "orders": lambda: tables.orders_of(machine, progress),
            "nodes": lambda: tables.several_nodes(machine, progress, most_nodes),
            "sensitivity": lambda: tables.sensitivity(machine, progress),
        }
    makers["measured"] = lambda: tables.measured(machine)
    for name in only or ():
        if name not in makers:
            raise ValueError(f"{machine.name} has no table {name!r}; it has {', '.join(makers)}")
    made = [make() for name, make in makers.items() if only is None or name in only]
    return [table for table in made if table is not None], found


def page_with(text: str, made: Sequence[Table]) -> str:
    """``text`` with every marked table that is in ``made`` written anew."""
    by_name = {table.name: table for table in made}

    def again(match: re.Match[str]) -> str:
        begin, name, old, end = match.groups()
        return begin + (by_name[name].markdown() if name in by_name else old) + end

    return MARK.sub(again, text)


def document(machine: ModelMachine, made: Sequence[Table]) -> str:
    chunks = recommended(machine) if any(table.name == "recommended" for table in made) else []
    return json.dumps(
        {
            "what": "predicted by benchmarks/predict.py; nothing here is measured unless it says so",
            "machine": machine.name,
            "parameters": {
                name: {"value": getattr(machine, name), "source": source}
                for name, source in machine.sources.items()
            },
            "tables": [
                {"name": t.name, "title": t.title, "head": t.head, "rows": t.rows, "note": t.note}
                for t in made
            ],
            "recommended": [asdict(chunk) for chunk in chunks],
        },
        indent=1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="h100x8", choices=MACHINES, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--nodes", type=int, default=tables.NODES[-1], metavar="N")
    parser.add_argument("--table", action="append", metavar="NAME")
    options = parser.parse_args(arguments)
    if options.nodes < 1:
        parser.error(f"--nodes must be at least 1, got {options.nodes}")
    if options.json:  # found out before anything is computed
        try:
            refuse_unwritable("--json", str(options.json))
        except ValueError as error:
            parser.error(str(error))
    progress = report("model")
    if options.fit:
        print(f"\r{tables.refitted(progress).text()}")
        return 0
    if options.docs and options.machine != "h100x8":
        parser.error("--docs is for the default machine")
    if options.plot or options.docs:
        require_matplotlib()
    machine = calibrated(machine_named(options.machine))
    try:
        made, found = all_tables(machine, progress, options.nodes, options.table)
    except ValueError as error:
        parser.error(str(error))
    progress("done\n")
    for table in made:
        print(table.text())
    folders = [options.plot] if options.plot else []
    if options.docs:
        for page in PAGES:
            page.write_text(page_with(page.read_text(), made))
            print(f"written to {page}")
        folders.append(IMAGES)
    several = next((table for table in made if table.name == "nodes"), None)
    for folder in folders:
        for path in draw_all(machine, found, several, folder, progress, options.table):
            print(f"written to {path}")
    if options.json:
        options.json.write_text(document(machine, made) + "\n")
        print(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
