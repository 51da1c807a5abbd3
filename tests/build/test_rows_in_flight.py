"""Bytes that kernels which move, sum or norm rows have on their way, by SASS: as many as are needed."""

import pathlib
from dataclasses import replace
from typing import Any

import pytest

from interlace.tools.catalogue.build import build
from interlace.tools.catalogue.catalogue import entries
from mutants.mutations import Edit, Mutant, importable
from sim.benchmark.model_support import module


@pytest.mark.thorough
def test_each_loop_has_enough_on_its_way() -> None:
    """A multiprocessor needs 32 KiB in flight, or 16 KiB of data that comes from a cache."""
    benchmark = module("rows_in_flight")
    rows = benchmark.counted()
    assert {row["kernel"].split()[0] for row in rows} == set(benchmark.KERNELS)
    few: list[dict[str, Any]] = [
        row
        for row in rows
        if row["function"] in benchmark.MOVE
        and row["bytes"] < benchmark.FLOOR // (1 + (row["function"] in benchmark.AGAIN))
    ]
    assert not few, few


SLOT_BY_SLOT = Mutant(
    "rows of one slot after the other",
    "kernels/experts/combine.py",
    (Edit("loop_unroll_factor=4", "loop_unroll_factor=1"),),
)


@pytest.mark.thorough
def test_control_slots_one_after_the_other_are_seen(tmp_path: pathlib.Path) -> None:
    (shipped,) = [each for each in entries(90) if each.name == "combine bf16 weighted"]
    SLOT_BY_SLOT.write(tmp_path)
    changed = shipped.module.replace("interlace.kernels", SLOT_BY_SLOT.package)
    with importable(tmp_path):
        reports = build([shipped, replace(shipped, module=changed)])
    assert not any(report.error for report in reports), reports
    threads = 32 * shipped.num_warps
    # By file: a mutant that was compiled earlier has a path without a file.
    bytes_ = [
        max(loop.bytes_in_flight for loop in report.loops if loop.where.startswith("combine.py"))
        for report in reports
    ]
    floor = module("rows_in_flight").FLOOR
    assert bytes_[0] * threads >= floor > bytes_[1] * threads, bytes_
