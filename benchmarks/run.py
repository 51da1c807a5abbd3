"""One runner for all benchmarks on a CPU host: ``python benchmarks/run.py [--ranks 2,4] [--op NAME]``.

Prints medians and ratios against a baseline of the same run, and writes them as JSON into
``benchmarks/results/`` with commit, machine and protocol. Ops run in ``shm`` against gloo; ``schedules``
times the checks of ``interlace.verify``, on simulated ranks; ``hosts``, which has to be asked for by name,
needs network namespaces. Traps that the protocol answers:

- a machine that others use: candidates alternate within a repetition, medians, no best-of;
- a barrier inside the timed region flatters slow starts: the barrier is before it, and the slowest
  rank counts;
- more threads than cores: every rank gets cores / ranks threads, baselines too;
- a baseline that allocates while ours does not, or the other way round: matmuls allocate their result
  on both sides; buffers that torch.distributed wants from its caller are made before.
"""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from circumstances import circumstances, new_result
from cpu.fused import SHAPES, cases
from cpu.measure import Measurement, gloo, measure, on_ranks
from rich.table import Table

from interlace.output.consoles import new_console, write_table

OPS = tuple(SHAPES)
SIZED = ("torch_backend", "messages")  # modules that start their ranks themselves, with sizes
OWN_RANKS = (*SIZED, "functional", "schedules", "crowds")  # and without
ASKED = ("hosts",)  # run only by name: a machine may not be able to run them


def on_rank(path: str, op: str, repetitions: int) -> list[Measurement]:
    with gloo(path):
        return [measure(case, repetitions) for case in cases(op)]


def run(op: str, world_size: int, repetitions: int, sizes: list[int] | None) -> list[Measurement]:
    if op in OWN_RANKS + ASKED:
        how = {"sizes": sizes} if op in SIZED else {}
        module = importlib.import_module(f"cpu.{op}")
        own: list[Measurement] = module.measurements(world_size, repetitions, **how)
        return own
    return on_ranks(on_rank, world_size, op, repetitions)


def show(console: Any, measurements: list[Measurement]) -> None:
    # modules may have ops of the same name, with other candidates
    for op, *names in dict.fromkeys((m.op, *m.microseconds) for m in measurements):
        rows = [m for m in measurements if [m.op, *m.microseconds] == [op, *names]]
        table = Table(
            title=f"{op}, {rows[0].shape['dtype']}: median us (times as fast as {rows[0].baseline})"
        )
        table.add_column("ranks", justify="right")
        table.add_column(" x ".join(k for k, v in rows[0].shape.items() if isinstance(v, int)))
        for name in names:
            table.add_column(name, justify="right")
        rated = ["interlace", "copy_"] if "copy_" in names else []
        for name in rated:
            table.add_column(f"{name} GB/s", justify="right")
        for row in rows:
            cells = [
                f"{row.microseconds[name]:,.{1 if row.microseconds[name] < 100 else 0}f}"
                + ("" if name == row.baseline else f" ({row.ratio(name):.2f})")
                for name in names
            ]
            shape = " x ".join(str(v) for v in row.shape.values() if isinstance(v, int))
            moved = int(row.shape["bytes"]) * int(row.shape.get("in flight", 1)) if rated else 0
            rates = [f"{moved / row.microseconds[name] / 1e3:.2f}" for name in rated]
            table.add_row(str(row.world_size), shape, *cells, *rates)
        write_table(console, table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="world sizes, comma-separated")
    parser.add_argument(
        "--op",
        choices=OPS + OWN_RANKS + ASKED,
        action="append",
        help="only this module; repeatable",
    )
    parser.add_argument("--bytes", help=f"sizes for {' and '.join(SIZED)}, comma-separated")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file (default: a new one in results/)")
    options = parser.parse_args()
    sizes = [int(part) for part in options.bytes.split(",")] if options.bytes else None
    console = new_console()
    measurements: list[Measurement] = []
    for world_size in [int(part) for part in options.ranks.split(",")]:
        for op in options.op or OPS + OWN_RANKS:
            with console.status(f"{op} on {world_size} ranks ..."):
                measurements += run(op, world_size, options.repetitions, sizes)
    show(console, measurements)
    facts = circumstances()
    out = options.out or new_result("cpu", facts)
    out.parent.mkdir(exist_ok=True)
    document = {**facts, "measurements": [asdict(m) for m in measurements]}
    out.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"written to {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
