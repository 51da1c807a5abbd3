"""Cases of ``interlace check``: on a GPU every dtype on the main tile, which the large shape has."""

from __future__ import annotations

import itertools

from interlace.cli.commands import check


def test_every_dtype_runs_on_the_main_tile() -> None:
    cases = list(check.cases("cuda"))
    ops = {(case.op, case.variant, case.world_size) for case in cases if case.n}
    found = {
        (case.op, case.variant, case.world_size, case.dtype) for case in cases if case.m == 2048
    }
    wanted = {(*op, dtype) for op, dtype in itertools.product(ops, ("bf16", "fp16", "fp32"))}
    assert wanted <= found and len(ops) > 20
