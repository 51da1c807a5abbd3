"""The table of faults: its short form and its controls, and ranks that end while they join hosts."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from faults import limits, strangers
from faults.__main__ import BEGIN, END, PAGE, chosen, in_page, with_rows
from faults.crew import crew, joined, tried
from faults.rows import HEAD, NotHere, Plan, Row, Trial, quantile, ran, table, trials
from guard import MOST
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.wires import Wires
from interlace.runtime.processes import rendezvous
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.signed_store import PolledStore
from tiers import few, thorough

ROOT = Path(__file__).parents[2]


def guarded(plan: Plan) -> Iterable[Trial]:
    yield Trial(not plan.broken, [2.0])


def always_right(plan: Plan) -> Iterable[Trial]:
    return [Trial(True, [1.0, 3.0])] * plan.trials


def always_wrong(plan: Plan) -> Iterable[Trial]:
    return [Trial(False)] * plan.trials


def ends_early(plan: Plan) -> Iterable[Trial]:
    yield Trial(True)
    raise ValueError("of the harness")


def cannot(plan: Plan) -> Iterable[Trial]:
    raise NotHere("needs root")


@pytest.mark.parametrize(
    ("measure", "holds", "cells"),
    [
        (guarded, True, "1 | 1 | 2 | 2 | 2 | yes | fails"),
        (always_right, False, "4 | 4 | 1 | 3 | 3 | yes | PASSES"),
        (always_wrong, False, "4 | 0 | - | - | - | no | fails"),
        (ends_early, False, "2 | 1 | - | - | - | no | fails"),
        (lambda plan: [], False, "0 | 0 | - | - | - | no | PASSES"),
        (cannot, True, "- | - | - | - | - | not run: needs root | -"),
    ],
)
def test_rows(measure: Callable[[Plan], Iterable[Trial]], holds: bool, cells: str) -> None:
    """A row holds if all is right and its control is not; without a measurement it is no failure."""
    found = ran(Row("a fault", "shm", measure, 4, 2), short=False, minutes=1)
    assert found.holds == holds
    assert table([found]).splitlines()[2] == f"| a fault | shm | {cells} |"


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
    results = [ran(Row("a fault", "shm", always_right, 4, 2), short=False, minutes=1)]
    page = "| a fault | hosts | 1 |\n| a fault | shm | old |\n| other | shm | 2 |\n"
    made = with_rows(page, results).splitlines()
    assert made[0] == "| a fault | hosts | 1 |" and made[2] == "| other | shm | 2 |"
    assert made[1] == "| a fault | shm | 4 | 4 | 1 | 3 | 3 | yes | PASSES |"


def check_both(row: Row, count: int) -> None:
    """The promises of a row must hold, and its control must fail."""
    assert [trial for trial in trials(row, Plan(count)) if not trial.right] == []
    assert not all(trial.right for trial in trials(row, Plan(1, broken=True)))


@pytest.mark.parametrize("place", few(["shm", "hosts"], "shm"))
def test_a_forked_child_disturbs_nobody(place: str) -> None:
    """A child once told the peers of its parent on other hosts that the group was aborted."""
    check_both(strangers.forked(place), 2)


@thorough
def test_a_rank_without_descriptors_is_named_by_all() -> None:
    """Survivors once blamed each other."""
    check_both(limits.DESCRIPTORS, 12)


@thorough
def test_the_short_form_holds() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "faults", "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


STEPS = {
    "meets its host": (StoreMeeting, "cards", 1),
    "has met its host": (StoreMeeting, "forget", 1),
    "publishes its address": (PolledStore, "set", 1),
    "reads addresses": (PolledStore, "get", 1),
    "connects with the first": (PolledStore, "get", 3),
    "has connected once": (PolledStore, "set", 2),
    "says the secret": (HostLinks, "_authenticate", 1),
    "connects for bytes": (Wires, "connect", 1),
    "has connected with those before it": (Wires, "_accept", 1),
}
"""By name, the function that a rank does not survive, and at which of its calls."""


def ends_at(step: str) -> None:
    owner, name, number = STEPS[step]
    known, calls = getattr(owner, name), 0

    def called(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os._exit(1)
        return known(*arguments)

    setattr(owner, name, called)


def ends(join: Any, end: Any, victim: int, step: str) -> None:
    """Rank ``victim`` ends at this step; the others report their errors."""
    meet = rendezvous.meet

    def met(store: Any, rank: int, *rest: Any) -> Any:
        rendezvous.meet = meet
        found = meet(store, rank, *rest)
        if rank == victim:
            ends_at(step)
        return found

    rendezvous.meet = met

    def work() -> None:
        api = join()
        while True:
            api.barrier()

    end.send(tried(work))


LONG = 2 * MOST
"""A timeout that no test reaches."""


def all_name(victim: int, place: str, size: int, step: str, timeout: float) -> None:
    with crew(place, size, ends, victim, step, timeout=timeout) as team:
        said = team.all_said([rank for rank in team.ranks if rank != victim], MOST)
    for each in said:
        found = rf"rank {victim} \(pid \d+\) died|ranks \[{victim}\] have not joined"
        assert re.search(found, each.text), said


@pytest.mark.parametrize(
    ("step", "victim"),
    few([(step, rank) for step in STEPS for rank in (0, 3)], ("connects with the first", 3)),
)
def test_who_ends_is_named_on_all_hosts_long_before_the_timeout(step: str, victim: int) -> None:
    all_name(victim, "hosts", 4, step, LONG)


@thorough
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", list(STEPS)[2:])
def test_who_ends_alone_on_its_host_is_named_at_the_timeout(step: str, size: int) -> None:
    """No process of the same host sees the end: the rank only stops to answer."""
    all_name(size - 1, "one each", size, step, 5.0)


def serves(join: Any, end: Any, port: int) -> None:
    """Ranks join by a store that rank 0 serves, which ends when all have a card."""
    about = TCPStore("127.0.0.1", port, is_master=False)
    rank = about.add("ranks", 1) - 1
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        about.set("port", str(store.port))
        ends_at("meets its host")
    else:
        store = TCPStore("127.0.0.1", int(about.get("port")), is_master=False)
    end.send(rank)
    end.send(tried(lambda: joined("hosts", store, rank, 4, LONG)))


@thorough
def test_the_end_of_the_rank_that_serves_the_store_is_named() -> None:
    """Without the store no rank can tell the others."""
    about = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with crew("hosts", 4, serves, about.port) as team:
        ranks = team.all_said(seconds=MOST)
        said = {rank: team.said(n, MOST) for n, rank in enumerate(ranks) if rank}
    for each in said.values():
        assert re.search(r"rank 0 \(pid \d+\) died|which is that of rank 0 unless", each.text), said
