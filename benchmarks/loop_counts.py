"""Counts of the loops that matter, from SASS, for a table in docs/reference/loop-counts.md; needs no GPU.

    FILE=benchmarks/results/loops.json; python benchmarks/loop_counts.py --out $FILE --before $FILE

writes the counts of the imported interlace's kernels, beside the counts before: ``--before`` is a file from
this script, made with ``PYTHONPATH`` set to the ``python`` folder of an older checkout. If it has counts
from before for a kernel, those are kept. ``python -m interlace build --json`` has all loops.

    python benchmarks/loop_counts.py --out benchmarks/results/packed.json --packed

writes the counts for products of block-scaled operands.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from circumstances import circumstances, said_by

import interlace
from interlace.ops.matmul.formats import FORMATS
from interlace.runtime.compiler.request import Entry
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import ARCHES, entries

SLOTS = "wait_contributions|wait_sources|publish_\\w+"
# Kernels by the names of ``interlace build``, and in which functions the loops stand that are counted.
CASES = {
    "all_gather bf16": "copy_elements",
    "reduce_scatter bf16": rf"sum_\w+|reduce_scatter_kernel|{SLOTS}",
    "reduce_scatter fp32": r"sum_\w+",
    "all_reduce bf16": r"sum_\w+",
    "matmul_reduce_scatter bf16 nk tma": rf"sum_\w+|produce_for_owners|{SLOTS}",
    "matmul_reduce_scatter bf16 nk pointers": r"sum_\w+",
    "node_sums stores": r"sum_\w+",
    "matmul_reduce_scatter bf16 kn tma": r"matmul_reduce_scatter_kernel",
    "matmul_reduce_scatter_roles bf16 kn tma": r"_store|multiply",
    "sum_tiles bf16 kn tma": r"sum_\w+",
    "attention bf16 head 64": "attend_run",
    "attention bf16 head 128": "attend_run",
    "attention bf16 head 256": "attend_run",
    "all_gather_attention bf16 head 128": "attend_run",
    "attention_queries_backward bf16 head 64": "_take_keys",
    "attention_queries_backward bf16 head 128": "_take_keys",
    "attention_queries_backward bf16 head 256": "_take_keys",
    "attention_keys_backward bf16 head 64": "_take_queries",
    "attention_keys_backward bf16 head 128": "_take_queries",
    "attention_keys_backward bf16 head 256": "_take_queries",
}
PACKED = {
    f"{op} {name} nk {how}{copiers}": "multiply_packed"
    for name in FORMATS
    for how in ("pointers", "tma")
    for op, copiers in (
        ("all_gather_matmul", " copiers"),
        ("matmul_reduce_scatter", ""),
        ("matmul_all_reduce", ""),
        ("grouped_matmul", " copiers"),
    )
}
FEW = 10  # instructions: such a loop polls an mbarrier


def _has_no_edges(kernel: str) -> bool:
    return kernel in PACKED or re.match(r"attention_\w+backward", kernel) is not None


def counted(
    cases: Mapping[str, str], more: Callable[[BuildReport, Entry], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return every loop of ``cases``, except FEW and loops that load single elements, for edges."""
    wanted = [entry for arch in ARCHES for entry in entries(arch) if entry.name in cases]
    both = sorted(
        zip(build(wanted), wanted, strict=True), key=lambda each: list(cases).index(each[1].name)
    )
    return [
        {"kernel": report.name, "arch": report.arch, **more(report, entry), **vars(loop)}
        for report, entry in both
        for loop in report.loops
        if re.fullmatch(cases[report.name], loop.where.split(" in ")[-1])
        and loop.instructions > FEW
        and (_has_no_edges(report.name) or not 0 < loop.loaded_bytes < 16 * loop.loads_in_flight)
    ]


def registers(report: BuildReport, entry: Entry) -> dict[str, Any]:
    return {"registers": report.registers}


def resources(report: BuildReport, entry: Entry) -> dict[str, Any]:
    """Return facts of a product, with its tile, which says how many numbers along k a round has."""
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K"
    tile: list[Any] = [entry.fixed[name] for name in names]
    tile[2] *= FORMATS[entry.variant.split()[0]].packed
    own = {"spills": report.spills, "warps": entry.num_warps, "tile": tile}
    return {**registers(report, entry), **own}


def write(options: argparse.Namespace, kind: str, rows: list[dict[str, Any]]) -> None:
    """Write the ``rows`` under the name ``kind``, and what ``--before`` has of the same kernels."""
    package = Path(interlace.__file__).parent
    commit = said_by("git", "-C", str(package), "rev-parse", "HEAD")
    document = {
        **circumstances(),
        "protocol": "counts of instructions",
        "commit": commit,
        kind: rows,
    }
    if options.before:
        older = json.loads(options.before.read_text())
        before = older.get("before", {"commit": older["commit"], kind: []})
        known = {row["kernel"] for row in before[kind]}
        more = [row for row in older[kind] if row["kernel"] not in known]
        document["before"] = {**before, kind: before[kind] + more}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    kind = (PACKED, resources) if options.packed else (CASES, registers)
    write(options, "loops", counted(*kind))


if __name__ == "__main__":
    main()
