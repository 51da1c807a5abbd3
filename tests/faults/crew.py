"""A crew: ranks as processes of this machine, in the place that a row asks for, and what they say."""

import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import interlace
from faults.rows import NotHere, Plan, Trial
from interlace.groups import groups
from interlace.runtime.places.connect import connect_place
from processes import heard, started

LONG = 60.0
"""Seconds: the timeout of a group in which no wait is to pass its own."""

BRIEF = 1.0
"""Seconds: that of a group in which waits are to pass it, in a control."""

MISUSE = ("ValueError", "TypeError")
SILENT, ENDED, NOT_HERE = "silence", "end of the rank", "not here"


class Said(NamedTuple):
    """The result of a call on a rank: the class and text of its exception, its begin and its end."""

    kind: str
    text: str
    begun: float
    ended: float


def tried(call: Callable[[], Any]) -> Said:
    """Return the exception of ``call``; if it returns, ``kind`` is empty and ``text`` is its result."""
    begun = time.monotonic()
    try:
        kind, text = "", str(call())
    except (RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
        kinds = [each.__name__ for each in type(error).__mro__]
        kind = next((name for name in kinds if name in MISUSE), kinds[0])
        text = str(error)
    return Said(kind, text, begun, time.monotonic())


def joined(
    place: str, store: Any, rank: int, world_size: int, timeout: float, name: str = "faults"
) -> Any:
    """Join a group of all ranks in ``shm``, on two ``hosts``, on ``one each``, or with gloo.

    Return the module whose functions are the collectives.
    """
    if place == "gloo":
        options: Any = {"rank": rank, "world_size": world_size, "store": store}
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **options)
        return dist
    os.environ["INTERLACE_TRUST_NETWORK"] = "1"
    host = {"hosts": f"host {2 * rank // world_size}", "one each": f"host {rank}"}.get(place)
    joined_place = connect_place(store, rank, world_size, timeout=timeout, name=name, host=host)
    groups.install(joined_place, all_threads=True)
    return interlace


def _member(
    rank: int,
    world_size: int,
    place: str,
    end: Any,
    port: int,
    timeout: float,
    on_rank: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    # hides the text that C++ prints if it ends the process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that newer releases have too
    store = TCPStore("127.0.0.1", port, is_master=False)
    store.add("members", 1)
    while store.add("members", 0) < world_size:  # to start a process may take longer than to join
        time.sleep(1e-3)

    def join() -> Any:
        return joined(place, store, rank, world_size, timeout)

    try:
        on_rank(join, end, *arguments)
    except NotHere as reason:
        end.send(Said(NOT_HERE, str(reason), 0.0, 0.0))
    except Exception:
        end.send(Said(ENDED, traceback.format_exc(), 0.0, time.monotonic()))
    end.close()
    while True:  # the other's first message is read before this process ends
        time.sleep(LONG)


class Crew:
    """The processes of some ranks. ``said(rank)`` returns the next message of a rank."""

    def __init__(self, processes: list[Any], ends: list[Any]) -> None:
        self.processes, self._ends = processes, ends
        self.ranks = range(len(processes))

    def said(self, rank: int, seconds: float = LONG) -> Any:
        """Return the next message of a rank, or a :class:`Said` of its silence or its end."""
        try:
            return heard(self._ends[rank], seconds)
        except AssertionError:
            return Said(SILENT, f"rank {rank} says nothing for {seconds:g} s", 0.0, 0.0)
        except EOFError:
            self.processes[rank].join(1.0)
            code = self.processes[rank].exitcode
            return Said(ENDED, f"rank {rank} ended with {code}", 0.0, 0.0)

    def all_said(self, ranks: Sequence[int] | None = None, seconds: float = LONG) -> list[Any]:
        until = time.monotonic() + seconds
        ranks = self.ranks if ranks is None else ranks
        return [self.said(rank, max(0.1, until - time.monotonic())) for rank in ranks]

    def reports(self, seconds: float = LONG) -> list[Any]:
        """Return the next message of every rank; a rank without one is an error."""
        found = self.all_said(seconds=seconds)
        for each in found:
            if isinstance(each, Said) and each.kind == NOT_HERE:
                raise NotHere(each.text)
            if isinstance(each, Said) and each.kind in (SILENT, ENDED):
                raise RuntimeError(str(each))
        return found

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank, and return the time."""
        moment = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return moment


@contextmanager
def crew(
    place: str, world_size: int, on_rank: Callable[..., Any], *arguments: Any, timeout: float = LONG
) -> Iterator[Crew]:
    """Start processes that call ``on_rank(join, end, *arguments)``.

    ``join()`` joins the group and returns the module of the collectives; messages through ``end`` go to
    :meth:`Crew.said`.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rest = (store.port, timeout, on_rank, arguments)
    with started(_member, world_size, place, *rest) as (processes, ends):
        yield Crew(processes, ends)


def repeated(
    place: str,
    world_size: int,
    on_rank: Callable[..., Any],
    judged: Callable[[list[Any]], Trial],
    plan: Plan,
    *arguments: Any,
) -> Iterator[Trial]:
    """Start ranks that report once for each trial, and judge the reports of all ranks."""
    timeout, wait = (BRIEF, LONG / 4) if plan.broken else (LONG, LONG)
    more = *arguments, plan.trials, plan.broken
    with crew(place, world_size, on_rank, *more, timeout=timeout) as team:
        for _ in range(plan.trials):
            yield judged(team.reports(wait))


def moments(seed: int, longest: float) -> Iterator[float]:
    """Random seconds, the same in every run."""
    chance = random.Random(seed)
    while True:
        yield chance.random() * longest


def sum_is_right(api: Any, count: int = 1000) -> bool:
    """Return whether the bits of an all_reduce of every rank's number are right."""
    rank, world_size = api.get_rank(), api.get_world_size()
    whole = torch.arange(float(count)) + rank
    api.all_reduce(whole)
    expected = torch.arange(float(count)) * world_size + sum(range(world_size))
    return torch.equal(whole, expected)
