"""The log of ``--sarif``: one result for each cause, at the line where it is."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from interlace.runtime.compiler.request import definition
from interlace.verify import Fault, LintReport
from interlace_verify.command import sarif
from interlace_verify.schedule_check import check as schedule_check
from interlace_verify.suite import jobs as suite
from interlace_verify.suite.jobs import CheckPlan, JobResult

WAITS = """
import interlace
import torch
import triton
import triton.language as tl


@triton.jit
def waits(flag_ptr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass


def in_vain():
    waits[(1,)](torch.zeros(1, dtype=torch.int32))
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    (tmp_path / ".git").mkdir()
    (tmp_path / "vain.py").write_text(WAITS)
    with contextlib.chdir(tmp_path), mock.patch.object(schedule_check, "SHRINK_RUNS", 2):
        yield tmp_path


def log() -> dict[str, Any]:
    (run,) = json.loads(pathlib.Path("log.sarif").read_text())["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert all(" " in rule["shortDescription"]["text"] for rule in rules)
    return dict(run)


def written(results: list[JobResult]) -> list[tuple[str, list[str], bool]]:
    """Return the rule of each result, the text of its lines, and whether it has a code flow."""
    sarif.write("log.sarif", results)
    run = log()
    source = pathlib.Path("vain.py").read_text().splitlines()

    def line(place: dict[str, dict[str, dict[str, int]]]) -> str:
        return source[place["physicalLocation"]["region"]["startLine"] - 1].strip()

    return [(r["ruleId"], [*map(line, r["locations"])], "codeFlows" in r) for r in run["results"]]


def test_a_deadlock_that_several_checks_find_is_one_result(folder: pathlib.Path) -> None:
    plan, target = CheckPlan((2,), 1, 1, (90,)), "vain.py::in_vain"
    jobs = suite.function_jobs(target, suite.load_function(target), plan)
    results = [job.result() for job in jobs if job.check != "lint"]
    assert [bool(result.findings) for result in results] == [True] * 3
    poll = 'while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:'
    assert written(results) == [("schedules/DeadlockError", [poll], True)]
    (result,) = log()["results"]
    text = result["message"]["text"]
    assert "(again with schedules(..., seeds=[0])): " in text and "vain.py:10 in waits" in text
    assert len(text) < 1000 and "context switches" not in text


def test_a_fault_of_compiled_code_without_a_line_is_at_its_kernel(folder: pathlib.Path) -> None:
    text = JobResult("vain.py::in_vain", "lint", "waits sm_90", "1 variant", ("no registers",), 0.1)
    place = definition("vain.py", "waits")
    report = LintReport(kernel="waits", arch=90, findings=(Fault("spills", "3"),), place=place)
    assert written([text, dataclasses.replace(text, report=report)]) == [
        ("lint", ["def in_vain():"], False),
        ("lint/spills", ["def waits(flag_ptr):"], False),
    ]


def test_a_fingerprint_is_of_the_line_and_not_of_its_number(folder: pathlib.Path) -> None:
    def mark() -> str:
        place = definition("vain.py", "waits")
        report = LintReport(kernel="waits", arch=90, findings=(Fault("spills", "3"),), place=place)
        text = JobResult("vain.py::in_vain", "lint", "waits sm_90", "", ("no",), 0.1, report)
        written([text])
        (result,) = log()["results"]
        return str(result["partialFingerprints"]["primaryLocationLineHash"])

    first = mark()
    (folder / "vain.py").write_text("# a line before it\n" + WAITS)
    assert mark() == first
    (folder / "vain.py").write_text(WAITS.replace("waits(flag_ptr)", "waits(flag_ptr, other=1)"))
    assert mark() != first
