"""Counts of the loops that matter, from SASS, for a table in docs/reference/kernel-counts.md; needs no GPU.

    python benchmarks/loop_counts.py benchmarks/results/loops.json --before benchmarks/results/loops.json

writes what the kernels of the imported interlace compile to, beside what they did before: ``--before`` is a
file of this script's, made with ``PYTHONPATH`` set to the ``python`` folder of an older checkout. Where it
has counts from before of a kernel, those are kept. ``python -m interlace build --json`` has all loops.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from circumstances import circumstances, said_by

import interlace
from interlace.tools.catalogue.build import build
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
FEW = 10  # instructions: such a loop polls an mbarrier
WHOLE = r"attention_\w+backward"  # kernels that have no loop of their own for edges


def counted() -> dict[str, Any]:
    """Every loop of ``CASES``, but those of FEW, and those that load an element at a time, for edges."""
    package = Path(interlace.__file__).parent
    wanted = [entry for arch in ARCHES for entry in entries(arch) if entry.name in CASES]
    rows = [
        {"kernel": report.name, "arch": report.arch, "registers": report.registers, **vars(loop)}
        for report in sorted(build(wanted), key=lambda report: list(CASES).index(report.name))
        for loop in report.loops
        if re.fullmatch(CASES[report.name], loop.where.split(" in ")[-1])
        and loop.instructions > FEW
        and (re.match(WHOLE, report.name) or not 0 < loop.loaded_bytes < 16 * loop.loads_in_flight)
    ]
    return {"commit": said_by("git", "-C", str(package), "rev-parse", "HEAD"), "loops": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    document = {**circumstances(), "protocol": "counts of instructions", **counted()}
    if options.before:
        older = json.loads(options.before.read_text())
        before = older.get("before", {"commit": older["commit"], "loops": []})
        known = {loop["kernel"] for loop in before["loops"]}
        more = [loop for loop in older["loops"] if loop["kernel"] not in known]
        document["before"] = {**before, "loops": before["loops"] + more}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
