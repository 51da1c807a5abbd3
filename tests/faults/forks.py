"""Children that a rank forks: they are told that the group is not theirs, and the parent goes on."""

import os
import select
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from faults.crew import BRIEF, LONG, Said, crew, sum_is_right, tried
from faults.rows import Plan, Row, Trial
from interlace.runtime.places.hosts import links
from interlace.runtime.places.one_host.group import HostGroup

RANKS = 2


def in_a_child(call: Any, seconds: float) -> str:
    """What ``call`` raises in a forked child, and after how many ms; empty if it takes longer than that."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
        child = os.fork()
    if child == 0:
        # also if its parent ends before: it would keep open what the parent writes to
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        said = tried(call)
        os.write(write_end, f"{1e3 * (said.ended - said.begun)} {said.kind}: {said.text}".encode())
        os._exit(0)
    os.close(write_end)
    text = b""
    if select.select([read_end], [], [], seconds)[0]:
        text = os.read(read_end, 1 << 16)
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return text.decode()


def on_rank(join: Any, end: Any, times: int, broken: bool) -> None:
    """Says what a child was told, and whether the ranks go on, ``times`` times."""
    if broken:
        HostGroup.disown = lambda *_: None  # type: ignore[method-assign]
    api = join()
    if broken:
        links._links.clear()
    for _ in range(times):
        said = in_a_child(partial(api.all_reduce, torch.ones(4)), BRIEF if broken else LONG / 2)
        end.send((said, tried(partial(sum_is_right, api))))


def forked(place: str, plan: Plan) -> Iterator[Trial]:
    timeout = BRIEF if plan.broken else LONG
    with crew(place, RANKS, on_rank, plan.trials, plan.broken, timeout=timeout) as team:
        for _ in range(plan.trials):
            # Without the protection a rank may have lost its connections, and says nothing any more.
            found = team.all_said(seconds=LONG / 4 if plan.broken else LONG)
            if isinstance(ended := found[0], Said) or isinstance(ended := found[1], Said):
                yield Trial(False, said=str(ended))
                return
            told = all("a forked child has to make its own" in said for said, _ in found)
            times = [float(said.split()[0]) for said, _ in found if said]
            yield Trial(told and all(goes.text == "True" for _, goes in found), times, str(found))


def rows() -> list[Row]:
    return [
        Row("a forked child uses the group", "shm", partial(forked, "shm"), 100, 10),
        Row("a forked child uses the group", "hosts", partial(forked, "hosts"), 100, 10),
    ]
