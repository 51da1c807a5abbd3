"""Rows for the table of loops in docs/performance.md: what a round of a kernel's loops does, no GPU needed.

    python benchmarks/loop_counts.py --of sum_contributions "reduce_scatter bf16" "all_reduce fp32"

Names are those of ``python -m interlace build``, which has the same counts in its JSON; ``--of`` names the
functions whose loops are wanted, and ``--arch`` the architectures. What stands outside of all loops is "-".
"""

from __future__ import annotations

import argparse

from interlace.runtime.compiler.build import Report, build
from interlace.runtime.compiler.catalogue import ARCHES, entries
from interlace.runtime.compiler.lint.loops import Loop


def row(report: Report, loop: Loop) -> str:
    cells = (
        report.name,
        f"sm_{report.arch}",
        report.registers,
        loop.where.split(" in ")[-1] or "-",
        loop.instructions,
        loop.tensor_maps,
        loop.barriers,
        loop.wgmma_waits,
        loop.loads_in_flight,
        loop.loaded_bytes,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="+", metavar="NAME")
    parser.add_argument("--of", default="-", metavar="FUNCTION,...")
    parser.add_argument("--arch", default=",".join(str(arch) for arch in ARCHES))
    options = parser.parse_args()
    arches = [int(arch) for arch in options.arch.split(",")]
    found = [entry for arch in arches for entry in entries(arch) if entry.name in options.kernels]
    print(
        "| kernel | sm | registers | loop of | instructions | maps | barriers | waits | loads | bytes |"
    )
    print("|" + " --- |" * 10)
    for report in sorted(build(found), key=lambda report: options.kernels.index(report.name)):
        for loop in report.loops:
            if (loop.where.split(" in ")[-1] or "-") in options.of.split(","):
                print(row(report, loop))


if __name__ == "__main__":
    main()
