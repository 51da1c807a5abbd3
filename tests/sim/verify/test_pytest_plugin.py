"""The pytest plugin: bodies as ranks, races that fail a test, and an import that costs nothing."""

import pathlib
import subprocess
import sys

import pytest

import interlace.functional  # both before pytester takes note of what is imported
import interlace.verify  # noqa: F401

pytest_plugins = ("pytester",)
PYTHON = pathlib.Path(__file__).parents[3] / "python"
FAULTS = """
import interlace, pytest, torch, unittest

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

@pytest.mark.interlace(seeds=1)
def test_skipped_on_a_rank():
    if interlace.get_rank() == 1:
        pytest.skip("no such size")
    interlace.barrier()

def test_none_of_it():
    pass

@pytest.fixture
def late(races):
    yield
    races(early, 2, seeds=1)

def test_race_of_a_fixture_that_ends(late):
    pass

def test_fixture_by_name(request):
    request.getfixturevalue("races")(early, 2, seeds=1)

@pytest.mark.interlace(ranks=3)
class TestNearer:
    @pytest.mark.interlace(seeds=1)
    def test_class_and_method(self):
        assert interlace.get_world_size() == 3

@pytest.mark.interlace(ranks=4, seeds=1)
class TestDerived(TestNearer):
    @pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.interlace(ranks=2))])
    def test_classes(self, size):
        assert interlace.get_world_size() == size
    test_class_and_method = None

@pytest.mark.interlace(ranks=3, seeds=1)
class Case(unittest.TestCase):
    def setUp(self):
        self.size = 3
    def test_passes(self):
        self.assertEqual(interlace.get_world_size(), self.size)
    def test_fails(self):
        self.assertEqual(interlace.get_rank(), 0)
    def test_skips(self):
        self.skipTest("in a case")
    @unittest.expectedFailure
    def test_expected(self):
        early()
"""
WRONG = """
import pytest

@pytest.mark.interlace(seed=1)
def test_misspelt():
    pass

@pytest.mark.interlace(4)
def test_not_by_name():
    pass

@pytest.mark.interlace(store_buffers="yes")
@pytest.mark.parametrize("a", [1, 2])
def test_store_buffers(a):
    pass

@pytest.mark.interlace(seeds=(seed for seed in (1, 2)))
def test_seeds():
    pass

@pytest.mark.interlace(seeds=[1.5])
def test_a_seed():
    pass

@pytest.mark.interlace(ranks=0)
def test_ranks():
    pass

@pytest.mark.interlace
async def test_that_no_call_runs():
    assert False

@pytest.mark.interlace(seeds=1)
def test_right():
    pass
"""
WRONG_CLASS = """
import pytest, unittest

@pytest.mark.interlace(timeout="1")
class TestTimeout(unittest.TestCase):
    def test_it(self):
        pass
"""
NO_FUNCTION = """
import pytest

pytestmark = pytest.mark.interlace

def function():
    "
    >>> 1
    1
    "
""".replace('"', '"' * 3)
OPTIONS = ("--strict-markers", "-p", "no:interlace", "-p", "interlace_pytest.plugin", "-rA")


def test_what_passes_and_what_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PYTHON)
    pytester.makepyfile(test_them=FAULTS)
    result = pytester.runpytest_inprocess(*OPTIONS)
    outcomes = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in result.outlines
        if line.startswith(("PASSED ", "FAILED ", "ERROR ", "XFAIL "))
    }
    assert outcomes == {
        "test_sum": "PASSED",
        "TestRanks::test_method[1]": "PASSED",
        "TestRanks::test_method[3]": "FAILED",
        "test_deadlock": "FAILED",
        "test_race": "FAILED",
        "test_races_are_collected": "FAILED",
        "test_no_race": "PASSED",
        "test_none_of_it": "PASSED",
        "test_race_of_a_fixture_that_ends": "ERROR",
        "test_fixture_by_name": "FAILED",
        "TestNearer::test_class_and_method": "PASSED",
        "TestDerived::test_classes[4]": "PASSED",
        "TestDerived::test_classes[2]": "PASSED",
        "Case::test_passes": "PASSED",
        "Case::test_fails": "FAILED",
        "Case::test_expected": "XFAIL",
    }
    text = result.stdout.str()
    assert "3 ranks, 1 schedule" in text and "seed 4: RankAssertionError" in text
    assert "too few ranks" in text
    assert "deadlock: nothing can run (seed 0)" in text
    collected = text.partition("test_races_are_collected ")[2].partition("test_fixture_by_name ")[0]
    assert "2 ranks, 1 schedule" in collected and "3 ranks, 1 schedule" in collected
    assert "in early" in collected and "replays" not in collected
    result.assert_outcomes(passed=9, failed=6, skipped=2, xfailed=1, errors=1)
    assert "no such size" in text and "in a case" in text


def test_a_wrong_mark_fails_its_own_test_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PYTHON)
    monkeypatch.setenv("COLUMNS", "300")  # of a line of the summary
    pytester.makepyfile(test_them=WRONG, test_class=WRONG_CLASS, test_doctest=NO_FUNCTION)
    result = pytester.runpytest_inprocess(*OPTIONS, "--doctest-modules")
    result.assert_outcomes(passed=1, failed=10)
    told = dict(
        line.partition("::")[2].split(" - Failed: ", 1)
        for line in result.outlines
        if line.startswith("FAILED ")
    )
    assert "another exception" not in result.stdout.str()
    stores = told.pop("test_store_buffers[1]"), told.pop("test_store_buffers[2]")
    assert stores == ("store_buffers must be a bool, got 'yes'",) * 2
    how = "the mark is interlace(ranks=2, seeds=10, store_buffers=False, timeout=300.0), by name; got "
    seeds = told.pop("test_seeds")
    assert seeds.startswith("seeds must be a number of schedules or a list, got <generator object")
    assert told == {
        "test_misspelt": how + "seed",
        "test_not_by_name": how + "4",
        "test_a_seed": "seeds must be ints, got 1.5",
        "test_ranks": "ranks must be within 1..64, got 0",
        "test_that_no_call_runs": "the body is async or a generator: a call would not run its body",
        "TestTimeout::test_it": "timeout must be a number of seconds or a timedelta, got '1'",
        "test_doctest.function": "the mark interlace is for functions, got a DoctestItem",
    }


def test_the_plugin_is_found_and_imports_neither_torch_nor_interlace() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((PYTHON.parent / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["interlace"]
    code = f"import sys, {module}; print({{'torch', 'triton', 'interlace'}} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PYTHON, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
