"""The pytest plugin: bodies as ranks, races that fail a test, and an import that costs nothing."""

import pathlib
import subprocess
import sys

import pytest

import interlace.functional  # both before pytester takes note of what is imported
import interlace.verify  # noqa: F401
from cases.texts import texts_beside

pytest_plugins = ("pytester",)
PYTHON = pathlib.Path(__file__).parents[3] / "python"
PARTS = texts_beside(__file__, "plugin_tests.txt")
OPTIONS = ("--strict-markers", "-p", "no:interlace", "-p", "interlace_pytest.plugin", "-rA")


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.syspath_prepend(PYTHON)
    monkeypatch.setenv("COLUMNS", "300")  # of a line of the summary
    return pytester


def test_what_passes_and_what_fails(tests: pytest.Pytester) -> None:
    tests.makepyfile(test_them=PARTS["test_them"])
    result = tests.runpytest_inprocess(*OPTIONS)
    outcomes = {
        line.split()[1].partition("::")[2]: line.split()[0]
        for line in result.outlines
        if line.startswith(("PASSED ", "FAILED ", "ERROR ", "XFAIL "))
    }
    assert outcomes == dict(line.split()[::-1] for line in PARTS["outcomes"].splitlines())
    text = result.stdout.str()
    assert "3 ranks, 1 schedule" in text and "seed 4: RankAssertionError" in text
    assert "too few ranks" in text
    assert "deadlock: nothing can run (seed 0)" in text
    collected = text.partition("test_races_are_collected ")[2].partition("test_fixture_by_name ")[0]
    assert "2 ranks, 1 schedule" in collected and "3 ranks, 1 schedule" in collected
    assert "in early" in collected and "replays" not in collected
    result.assert_outcomes(passed=9, failed=6, skipped=2, xfailed=1, errors=1)
    assert "no such size" in text and "in a case" in text


def test_a_wrong_mark_fails_its_own_test_alone(tests: pytest.Pytester) -> None:
    tests.makepyfile(**{name: PARTS[name] for name in ("test_wrong", "test_class", "test_doctest")})
    result = tests.runpytest_inprocess(*OPTIONS, "--doctest-modules")
    result.assert_outcomes(passed=1, failed=10)
    told = dict(
        line.partition("::")[2].split(" - Failed: ", 1)
        for line in result.outlines
        if line.startswith("FAILED ")
    )
    assert "another exception" not in result.stdout.str()
    seeds = told.pop("test_seeds")
    assert seeds.startswith("seeds must be a number of schedules or a list, got <generator object")
    assert told == dict(line.split(": ", 1) for line in PARTS["told"].splitlines())


def test_the_plugin_is_found_and_imports_neither_torch_nor_interlace() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((PYTHON.parent / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["interlace"]
    code = f"import sys, {module}; print({{'torch', 'triton', 'interlace'}} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PYTHON, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
