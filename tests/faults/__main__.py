"""Provoke every fault that interlace promises something about, and say in a table what came of each.

    make faults                               all of it, and the table of docs/explanation/reliability.md
    make faults MINUTES=10                    with a longer soak
    PYTHONPATH=tests python -m faults --short               a little of each, without the page
    PYTHONPATH=tests python -m faults --only soak killed    rows whose names have one of these words;
                                                            the page keeps the others

The exit status is 1 if a row does not hold, or if its control does: the same measurement without what
protects against the fault, which must come out wrong.
"""

import argparse
import multiprocessing
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["INTERLACE_TUNE_CACHE"] = os.environ["INTERLACE_CALIBRATION"] = "off"
os.environ["INTERLACE_RECORD"] = "off"  # failures here are provoked, and nobody reads of them

import torch

from faults import ends, limits, mismatches, recovery, soak, strangers
from faults.rows import Result, Row, ran, table

PAGE = pathlib.Path(__file__).parents[2] / "docs/explanation/reliability.md"
BEGIN, END = "<!-- faults: make faults -->", "<!-- end of faults -->"
PRELOADED = ["interlace", "torch.distributed", "faults.crew", "warmed_up"]
FAMILIES = (mismatches, ends, recovery, limits, strangers, soak)


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {platform.system()} {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores (load {load:.1f} at the beginning), no GPU, Python "
        f"{platform.python_version()}, torch {torch.__version__}"
    )


def chosen(words: Sequence[str], *, short: bool = False) -> list[Row]:
    """Return rows whose names have one of ``words``, or all; a short run has no rows for comparison."""
    rows = [row for family in FAMILIES for row in family.rows() if not (short and row.beside)]
    named = [(row, f"{row.fault} {row.place}") for row in rows]
    return [row for row, name in named if not words or any(word in name for word in words)]


def in_page(page: str, made: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{made.strip()}\n\n{END}{rest.partition(END)[2]}"


def with_rows(page: str, results: Sequence[Result]) -> str:
    """Replace the lines of these rows in ``page``."""
    for result in results:
        cells = result.cells()
        begin = re.escape(f"| {cells[0]} | {cells[1]} |")
        page = re.sub(rf"^{begin}.*$", lambda _, c=cells: f"| {' | '.join(c)} |", page, flags=re.M)
    return page


def report(result: Result, seconds: float) -> None:
    cells = result.cells()
    print(f"[{seconds:4.0f} s] " + " | ".join(cells), flush=True)
    for trial in result.wrong[:3] if not result.row.beside else []:
        print(f"         wrong: {trial.said:.2000}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of the soak (2)")
    parser.add_argument("--short", action="store_true", help="less of each, and not into the page")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="rows whose names have one of these words; the page keeps the others",
    )
    parser.add_argument("--list", action="store_true", help="the rows, and nothing else")
    options = parser.parse_args(arguments)
    rows = chosen(options.only, short=options.short)
    if options.list or not rows:
        print("\n".join(f"{row.fault}, {row.place}" for row in rows) or "there is no such row")
        return 0 if rows else 2
    multiprocessing.set_forkserver_preload(PRELOADED)
    where, began, results = machine(), time.monotonic(), []
    for row in rows:
        results.append(ran(row, short=options.short, minutes=options.minutes))
        report(results[-1], time.monotonic() - began)
    made = f"{where}.\n\n{table(results)}"
    print(f"\n{made}")
    if not options.short:
        page = PAGE.read_text()
        PAGE.write_text(with_rows(page, results) if options.only else in_page(page, made))
        subprocess.run([sys.executable, str(PAGE.parents[1] / "draw.py"), "faults"], check=True)
    failed = [f"{each.row.fault} ({each.row.place})" for each in results if not each.holds]
    print(
        f"{time.monotonic() - began:.0f} s; "
        + (f"not as promised: {', '.join(failed)}" if failed else "all hold")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
