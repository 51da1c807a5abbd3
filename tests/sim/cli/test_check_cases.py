"""Cases of ``interlace check``: on a GPU every dtype on the main tile, which the large shape has."""

import itertools
import json

import pytest

from interlace.cli.commands import check


def test_every_dtype_runs_on_the_main_tile() -> None:
    cases = list(check.cases("cuda"))
    ops = {(case.op, case.variant, case.world_size) for case in cases if case.n}
    found = {
        (case.op, case.variant, case.world_size, case.dtype) for case in cases if case.m == 2048
    }
    wanted = {(*op, dtype) for op, dtype in itertools.product(ops, ("bf16", "fp16", "fp32"))}
    assert wanted <= found and len(ops) > 20


def test_what_is_left_out_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.check(None, check.CheckOptions("cpu", 0, (1,), 0.0, True)) == check.LEFT_OUT
    said = json.loads(capsys.readouterr().out)
    assert said["left_out"] > 5 and len(said["cases"]) <= 1
    with pytest.raises(ValueError, match=r"no cases on \[5\] ranks"):
        check.check(None, check.CheckOptions("cpu", ranks=(5,)))
