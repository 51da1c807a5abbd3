"""The table of faults: its short form holds, and a row is only as good as its control."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from faults import limits, strangers
from faults.__main__ import BEGIN, END, PAGE, chosen, in_page, with_rows
from faults.rows import HEAD, NotHere, Plan, Row, Trial, quantile, ran, table
from tiers import few, thorough

ROOT = Path(__file__).parents[2]


def always(right: bool) -> Row:
    return Row("a fault", "shm", lambda plan: [Trial(right, [1.0, 3.0])] * plan.trials, 4, 2)


def guarded(plan: Plan) -> Iterable[Trial]:
    yield Trial(not plan.broken, [2.0])


def test_a_row_holds_if_all_is_right_and_its_control_is_not() -> None:
    found = ran(Row("a fault", "shm", guarded), short=False, minutes=1)
    assert found.holds
    assert found.cells() == ["a fault", "shm", "1", "1", "2", "2", "2", "yes", "fails"]
    assert not ran(always(False), short=False, minutes=1).holds


def test_a_control_that_passes_is_an_error() -> None:
    found = ran(always(True), short=False, minutes=1)
    assert not found.wrong and not found.holds
    assert found.cells() == ["a fault", "shm", "4", "4", "1", "3", "3", "yes", "PASSES"]


def test_a_measurement_that_ends_early_is_wrong_and_one_that_cannot_be_made_is_neither() -> None:
    def ends(plan: Plan) -> Iterable[Trial]:
        yield Trial(True)
        raise ValueError("of the harness")

    def cannot(plan: Plan) -> Iterable[Trial]:
        raise NotHere("needs root")

    found = ran(Row("a fault", "shm", ends), short=True, minutes=1)
    assert not found.holds and "of the harness" in found.wrong[0].said
    assert ran(Row("a fault", "shm", lambda plan: []), short=True, minutes=1).cells()[-2] == "no"
    found = ran(Row("a fault", "shm", cannot), short=True, minutes=1)
    assert found.holds and "| not run: needs root | - |" in table([found])


def test_quantiles() -> None:
    hundred = list(range(1, 101))
    assert [quantile(hundred, share) for share in (0.5, 0.99, 1.0)] == ["50", "99", "100"]
    assert [quantile([0.123], 0.5), quantile([], 0.5)] == ["0.12", "-"]


def test_the_page_has_the_table_and_its_rows() -> None:
    page = PAGE.read_text()
    shown = page.partition(BEGIN)[2].partition(END)[0]
    assert HEAD in shown and in_page(page, shown.strip("\n")) == page
    cells = [line[2:].split(" | ")[:2] for line in shown.splitlines() if line.startswith("| ")]
    names = [[row.fault, row.place] for row in chosen([])]
    assert cells[1:] and all(each in names for each in cells[1:])


def test_a_row_that_is_run_alone_takes_its_own_place() -> None:
    results = [ran(always(True), short=False, minutes=1)]
    page = "| a fault | hosts | 1 |\n| a fault | shm | old |\n| other | shm | 2 |\n"
    made = with_rows(page, results).splitlines()
    assert made[0] == "| a fault | hosts | 1 |" and made[2] == "| other | shm | 2 |"
    assert made[1] == "| a fault | shm | 4 | 4 | 1 | 3 | 3 | yes | PASSES |"


@pytest.mark.parametrize("place", few(["shm", "hosts"], "shm"))
def test_a_forked_child_disturbs_nobody(place: str) -> None:
    """A child once told the peers of its parent on other hosts that the group was aborted."""
    assert [trial for trial in strangers.forked(place, Plan(2)) if not trial.right] == []
    assert not all(trial.right for trial in strangers.forked(place, Plan(1, broken=True)))


@thorough
def test_a_rank_without_descriptors_is_named_by_all() -> None:
    """Survivors once blamed each other."""
    assert [trial for trial in limits.without_descriptors(Plan(12)) if not trial.right] == []
    assert not all(trial.right for trial in limits.without_descriptors(Plan(1, broken=True)))


@thorough
def test_the_short_form_holds() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "faults", "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
