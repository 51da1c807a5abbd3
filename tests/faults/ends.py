"""Ranks that are killed or stopped at random moments, and whom the others blame for it."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import interlace
from faults.crew import BRIEF, LONG, Crew, crew, moments, sum_is_right, tried
from faults.rows import Plan, Row, Trial
from guard import busy
from interlace.groups import groups
from interlace.runtime.places.hosts.host_map import Card, Joining
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import Rendezvous

RANKS = 4
BOUND = 2.0
"""The timeout of groups of which a rank is stopped, in seconds of a quiet machine."""
OF = {"shm": LONG, "hosts": LONG, "gloo": BOUND}
"""The timeout of joining; that of gloo cannot be changed afterwards."""
JOINING = 3.0
"""That of groups of which a rank is killed while they join, of a quiet machine."""
LATE = 12.0
"""Seconds after it in which all have said so: the answers of others, who are asked for whom they wait, and
the end of connections between hosts."""


def blind() -> None:
    """The control: no rank checks whether the others are alive."""
    HostGroup._death = lambda *_: None  # type: ignore[method-assign]
    Rendezvous.hung_up = lambda *_: []  # type: ignore[method-assign]
    Rendezvous.died = lambda *_: RuntimeError("something is wrong")  # type: ignore[assignment,method-assign]
    HostLinks._lost = lambda *_: None  # type: ignore[method-assign]
    Card.check_living = lambda *_: None  # type: ignore[method-assign]
    Joining.why = lambda _, error: error  # type: ignore[method-assign]


def collectives(api: Any, chance: random.Random) -> None:
    """Call a random collective that every backend has, with 4 bytes to 4 MiB."""
    count = 1 << chance.randrange(21)
    mine = torch.ones(count)
    which = chance.randrange(3)
    if which == 0:
        api.all_reduce(mine)
    elif which == 1:
        api.broadcast(mine, chance.randrange(RANKS))
    else:
        api.all_gather_into_tensor(torch.empty(RANKS * count), mine)


def messages(api: Any, chance: random.Random) -> None:
    """Every rank sends to the next, and receives from the one before."""
    rank, count = api.get_rank(), 1 << chance.randrange(19)
    sending = api.isend(torch.ones(count), (rank + 1) % RANKS)
    api.recv(torch.empty(count), (rank - 1) % RANKS)
    sending.wait()


def until_an_error(join: Any, end: Any, ops: Any, bound: float, broken: bool) -> None:
    """Report "at work" after the first op, run ops with timeout ``bound``, and report the last error."""
    if broken:
        blind()
    api, chance = join(), random.Random(7)
    assert sum_is_right(api)
    if api is interlace:
        groups.default_group().place.set_timeout(bound)
    end.send("at work")

    def work() -> None:
        while True:
            ops(api, chance)

    end.send(tried(work))


def while_joining(join: Any, end: Any, broken: bool) -> None:
    """Report "about to join", and then the result of the join and of ops."""
    if broken:
        blind()
    end.send("about to join")

    def work() -> None:
        api = join()
        while True:
            api.barrier()

    end.send(tried(work))


def blamed(
    team: Crew, number: signal.Signals, delay: float, chance: random.Random, wait: float
) -> Trial:
    """Send the signal to a random rank after ``delay``; all others must name it."""
    team.reports()
    victim = chance.choice(team.ranks)
    time.sleep(delay)
    moment = team.send(victim, number)
    others = [rank for rank in team.ranks if rank != victim]
    said = dict(zip(others, team.all_said(others, wait), strict=True))
    died = rf"rank {victim} \(pid \d+\) died|ranks? \[?{victim}\]?.* have not joined"
    named = died if number == signal.SIGKILL else rf"for ranks \[{victim}\]"
    wrong = [
        f"rank {r}: {s.kind}: {s.text}" for r, s in said.items() if not re.search(named, s.text)
    ]
    times = [(each.ended - moment) * 1e3 for each in said.values() if each.ended]
    return Trial(not wrong, times, "; ".join(wrong))


def killed(place: str, ops: Any, plan: Plan) -> Iterator[Trial]:
    chance, delays = random.Random(1), moments(1, 0.03)
    for _ in range(plan.trials):
        bound = BRIEF if plan.broken else LONG
        with crew(place, RANKS, until_an_error, ops, bound, plan.broken, timeout=OF[place]) as team:
            yield blamed(team, signal.SIGKILL, next(delays), chance, LONG / 2)


def killed_while_joining(place: str, plan: Plan) -> Iterator[Trial]:
    """Kill a rank while it joins.

    A rank that dies before its first message is noticed only at the timeout, so the control kills later.
    """
    chance, delays = random.Random(2), moments(2, 0.3 * busy() if plan.broken else 0.03)
    for _ in range(plan.trials):
        timeout = BRIEF if plan.broken else JOINING * busy()
        with crew(place, RANKS, while_joining, plan.broken, timeout=timeout) as team:
            yield blamed(team, signal.SIGKILL, next(delays), chance, LONG / 2)


BUSY_LOOPS = 3
"""For each core."""


@contextmanager
def crowd() -> Iterator[None]:
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(BUSY_LOOPS * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def killed_in_a_crowd(plan: Plan) -> Iterator[Trial]:
    with crowd():
        yield from killed("shm", collectives, plan)


def stopped(place: str, ops: Any, plan: Plan) -> Iterator[Trial]:
    """The control waits without a bound."""
    chance, delays = random.Random(3), moments(3, 0.03)
    for _ in range(plan.trials):
        bound = BOUND * busy()
        wait = bound + 0.5 if plan.broken else bound + LATE * busy()
        bound = LONG if plan.broken else bound
        with crew(place, RANKS, until_an_error, ops, bound, False, timeout=OF[place]) as team:
            yield blamed(team, signal.SIGSTOP, next(delays), chance, wait)


def rows() -> list[Row]:
    found = []
    for place, many in (("shm", 50), ("hosts", 20)):
        found += [
            Row("killed in a collective", place, partial(killed, place, collectives), many, 2),
            Row("killed in point to point", place, partial(killed, place, messages), many, 2),
            Row("stopped in a collective", place, partial(stopped, place, collectives), 5, 1),
            Row("stopped in point to point", place, partial(stopped, place, messages), 5, 1),
        ]
    gloo = partial(killed, "gloo", collectives), partial(stopped, "gloo", collectives)
    return [
        Row("killed while joining", "shm", partial(killed_while_joining, "shm"), 50, 3),
        Row("killed while joining", "hosts", partial(killed_while_joining, "hosts"), 15, 3),
        *found,
        Row("killed, beside busy loops", "shm", killed_in_a_crowd, 50, 2),
        Row("killed in a collective", "gloo", gloo[0], 10, 1, beside=True),
        Row("stopped in a collective", "gloo", gloo[1], 2, 1, beside=True),
    ]
