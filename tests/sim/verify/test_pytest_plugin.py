"""The pytest plugin: bodies as ranks, races that fail a test, and an import that costs nothing."""

import pathlib
import subprocess
import sys

import pytest

import interlace.verify  # before pytester takes note of what is imported  # noqa: F401

pytest_plugins = ("pytester",)
PYTHON = pathlib.Path(__file__).parents[3] / "python"
FAULTS = """
import interlace, pytest, torch

@pytest.fixture
def right():
    return 3.0

@pytest.mark.interlace(ranks=2, seeds=2)
def test_sum(right):
    total = torch.ones(4) + interlace.get_rank()
    interlace.all_reduce(total)
    assert total.tolist() == [right] * 4

class TestRanks:
    @pytest.mark.interlace(ranks=3, seeds=[4])
    @pytest.mark.parametrize("least", [1, 3])
    def test_method(self, least):
        assert interlace.get_world_size() > least, "too few ranks"

@pytest.mark.interlace(seeds=1)
def test_deadlock():
    if interlace.get_rank() == 0:
        interlace.barrier()

def early():
    total = torch.ones(4)
    work = interlace.all_reduce(total, async_op=True)
    total.sum()  # before it is waited for
    work.wait()

def ordered():
    total = torch.ones(4)
    interlace.all_reduce(total)

@pytest.mark.interlace(seeds=1)
def test_race():
    early()

def test_races_are_collected(races):
    assert races(ordered, 2, seeds=1).clean
    assert races(early, 2, seeds=[0]).findings
    races(early, 3, seeds=[0])

def test_no_race(races):
    races(ordered, 2, seeds=1)

@pytest.mark.interlace(seed=1)
def test_misspelt():
    pass

@pytest.mark.interlace(4)
def test_not_by_name():
    pass

@pytest.mark.interlace(seeds=1)
async def test_that_no_call_runs():
    assert False

@pytest.mark.interlace(seeds=1)
def test_skipped_on_a_rank():
    if interlace.get_rank() == 1:
        pytest.skip("no such size")
    interlace.barrier()

def test_none_of_it():
    pass
"""


def test_what_passes_and_what_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PYTHON)
    pytester.makepyfile(test_them=FAULTS)
    options = ("--strict-markers", "-p", "no:interlace", "-p", "interlace_pytest.plugin", "-rA")
    result = pytester.runpytest_inprocess(*options)
    outcomes = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in result.outlines
        if line.startswith(("PASSED ", "FAILED ", "ERROR "))
    }
    assert outcomes == {
        "test_sum": "PASSED",
        "TestRanks::test_method[1]": "PASSED",
        "TestRanks::test_method[3]": "FAILED",
        "test_deadlock": "FAILED",
        "test_race": "FAILED",
        "test_races_are_collected": "FAILED",
        "test_no_race": "PASSED",
        "test_misspelt": "FAILED",
        "test_not_by_name": "FAILED",
        "test_that_no_call_runs": "FAILED",
        "test_none_of_it": "PASSED",
    }
    text = result.stdout.str()
    assert "3 ranks, 1 schedule" in text and "seed 4: RankAssertionError" in text
    assert "too few ranks" in text
    assert "deadlock: nothing can run (seed 0)" in text
    collected = text.partition("test_races_are_collected ")[2].partition("test_misspelt ")[0]
    assert "2 ranks, 1 schedule" in collected and "3 ranks, 1 schedule" in collected
    assert "in early" in collected and "replays" not in collected
    assert "unexpected keyword argument 'seed'; the mark is interlace(ranks=2, seeds=10" in text
    result.assert_outcomes(passed=4, failed=7, skipped=1)
    assert "no such size" in text


def test_the_plugin_is_found_and_imports_neither_torch_nor_interlace() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((PYTHON.parent / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["interlace"]
    code = f"import sys, {module}; print({{'torch', 'triton', 'interlace'}} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PYTHON, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
