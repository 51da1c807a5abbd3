"""Bytes on their way in kernels that move, sum or norm rows, from SASS.

They are a table of docs/reference/rows-in-flight.md::

    python benchmarks/rows_in_flight.py benchmarks/results/rows.json --before benchmarks/results/rows.json

No GPU is needed; ``--before`` is as in ``loop_counts.py``. A program of a persistent kernel has a
multiprocessor to itself; of the others as many share one as its registers, shared memory and warps allow.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loop_counts import write

from interlace.runtime.compiler.request import Entry
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import entries

ARCH, COLUMNS = 90, 4096  # for all rows of the catalogue
FLOOR = 32 << 10  # bytes that a multiprocessor should have on their way
REGISTERS, SHARED, WARPS = 64 << 10, 228 << 10, 64  # per multiprocessor of 9.0
RESERVED = 1 << 10  # bytes of shared memory that a program takes besides its own

Rows = Callable[[Mapping[str, Any]], float]
WORDS = {"bf16": COLUMNS // 2, "fp32": COLUMNS, "fp8e4nv": COLUMNS // 4}


def _slots(c: Mapping[str, Any]) -> float:
    return c["BLOCK_ROWS"] * c["BLOCK_COLUMNS"] / WORDS[c["dtype"]]


def _elements(c: Mapping[str, Any]) -> float:
    return c["BLOCK_ROWS"] * c["BLOCK_COLUMNS"] / COLUMNS


def _summed(c: Mapping[str, Any]) -> float:
    return c.get("SUM_ROWS", c["BLOCK_ROWS"]) * c["BLOCK_COLUMNS"] / COLUMNS


def _slice(c: Mapping[str, Any]) -> float:
    return c["ROWS"]


def _block(c: Mapping[str, Any]) -> float:
    return c["ROWS"] * min(c["COLUMNS"], COLUMNS) / COLUMNS


NORM: dict[str, Rows] = {"norm_rows": _slice, "sum_rows": _block, "sum_contributions": _block}
NORM |= {"store_normed": _block, "scale_of_rows": _block}
KERNELS: dict[str, dict[str, Rows]] = {
    "dispatch_send": {"_send_tokens": lambda c: c["BLOCK_ROWS"], "copy_listed_rows": _slots},
    "dispatch_receive": {
        "dispatch_receive_kernel": lambda c: c["BLOCK_ROWS"],
        "_sort_tokens": lambda c: c["BLOCK_ROWS"] / c["TOPK"],
        "copy_listed_rows": _slots,
    },
    "combine": {"copy_rows": _elements, "sum_slots": _summed},
    "grouped_matmul_combine": {"sum_slots": _summed},
    "reduce_norm": {**NORM, "copy_rows|copy_elements": _block},
    "matmul_reduce_scatter_norm": NORM,
    "matmul_all_reduce_norm": NORM,
    "decode_attention": {"attend_run|decode_attention_kernel": lambda c: c["BLOCK_N"]},
}
"""Of each kernel the functions whose loops count, and how many rows a round of one does."""
MOVE = (
    "copy_listed_rows", "copy_rows", "copy_elements", "sum_slots", "sum_contributions", "store_normed",
    "attend_run", "decode_attention_kernel",
)  # fmt: skip
"""Functions whose loops load rows, and are held to ``FLOOR``."""
AGAIN = ("store_normed",)
"""Those that load what the same program has just stored, out of a cache, and are held to half of it."""
SHARING = ("decode_attention",)  # their programs are not persistent


def programs(entry: Entry, report: BuildReport) -> int:
    if entry.kernel.removesuffix("_kernel") not in SHARING:
        return 1
    of_thread = -(-report.registers // 8) * 8
    by_registers = REGISTERS // (of_thread * 32 * entry.num_warps)
    return min(by_registers, SHARED // (report.shared + RESERVED), WARPS // entry.num_warps)


def counted() -> list[dict[str, Any]]:
    """For each kernel and function the loop that has most bytes on their way, and barriers of all."""
    wanted = [e for e in entries(ARCH) if e.kernel.removesuffix("_kernel") in KERNELS and e.default]
    rows = []
    for entry, report in zip(wanted, build(wanted), strict=True):
        constants = {**entry.fixed, "dtype": entry.variant.split()[0]}
        for functions, rows_of in KERNELS[entry.kernel.removesuffix("_kernel")].items():
            found = [
                each
                for each in report.loops
                if re.fullmatch(functions, each.where.split(" in ")[-1])
            ]
            if not found:
                continue
            most = max(found, key=lambda loop: loop.bytes_in_flight)
            threads, sharing = 32 * entry.num_warps, programs(entry, report)
            about = {"kernel": entry.name, "function": most.where.split(" in ")[-1]}
            size = {"registers": report.registers, "threads": threads, "programs": sharing}
            moved = {
                "bytes_of_thread": most.bytes_in_flight,
                "bytes": most.bytes_in_flight * threads * sharing,
            }
            barriers = {
                "barriers": most.barriers,
                "barriers_per_row": round(most.barriers / rows_of(constants), 2),
            }
            rows.append({**about, **size, **moved, **barriers})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path)
    write(parser.parse_args(), "rows", counted())


if __name__ == "__main__":
    main()
