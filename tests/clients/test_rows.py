"""The comparison of `make clients` sees one wrong bit, and the page has the table of its results."""

import json
import shutil
from typing import Any

import pytest

from clients import run

SAME = {"losses": [2.0, 1.0]}


def row(**changed: Any) -> dict[str, Any]:
    return {"ranks": 2, "failed": {}, "difference": 0.0, "first": 2.0, "last": 1.0, **changed}


def test_one_bit_of_one_loss_is_a_difference() -> None:
    assert run.difference([SAME, SAME], [SAME, SAME]) == 0
    other = {"losses": [2.0, 1.0 + 2**-24]}
    assert 0 < run.difference([SAME, SAME], [SAME, other]) < run.BOUND
    with pytest.raises(ValueError, match="shorter"):
        run.difference([SAME], [{"losses": [2.0]}])
    with pytest.raises(AssertionError, match="without a step"):
        run.difference([{"losses": []}], [{"losses": []}])


def test_what_works() -> None:
    assert run.right(row())
    assert run.right(row(ranks=4, difference=1e-7))
    for wrong in (
        {"difference": 1e-7},
        {"ranks": 4, "difference": 1e-4},
        {"difference": float("nan")},
        {"last": 2.0},
        {"failed": {"interlace": "no"}},
    ):
        assert not run.right(row(**wrong)), wrong


def test_ranks_that_end_without_a_word_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match=r"ranks ended with \[1, 1\]"):
        run.run_backend("megatron_gpt", "gloo", 2)


def test_the_page_has_the_table_of_the_results() -> None:
    results, page = json.loads(run.RESULTS.read_text()), run.PAGE.read_text()
    assert set(results) == set(run.clients())
    assert page == run.in_page(page, results)
