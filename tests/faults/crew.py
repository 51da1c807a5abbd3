"""A crew: ranks as processes of this machine, in the place that a row asks for, and what they say."""

import os
import random
import signal
import tempfile
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
from interlace.groups import groups
from interlace.runtime.places.connect import connect_place
from processes import heard, started

LONG = 60.0
"""Seconds: the timeout of a group in which no wait is to pass its own."""

BRIEF = 1.0
"""Seconds: that of a group in which waits are to pass it, in a control."""

MISUSE = ("ValueError", "TypeError")


class Said(NamedTuple):
    """What a call came to on a rank: the class of its exception, its text, and when it began and ended."""

    kind: str
    text: str
    begun: float
    ended: float


def tried(call: Callable[[], Any]) -> Said:
    """What ``call`` raises; ``kind`` is empty if it returns, and ``text`` what it returned then."""
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
    """Join a group of all: in ``shm``, on two ``hosts`` of which each has half the ranks, on ``one each``,
    or with gloo.

    Returns the module whose functions are the collectives.
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
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # what C++ prints when it ends the process, as it may
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
    except Exception:
        end.send(Said("end of the rank", traceback.format_exc(), 0.0, time.monotonic()))
    end.close()
    while True:  # who has something to say first is heard before this process ends
        time.sleep(LONG)


class Crew:
    """The processes of some ranks. ``said(rank)`` is the next that a rank sends."""

    def __init__(self, processes: list[Any], ends: list[Any], store: TCPStore) -> None:
        self.processes, self.store, self._ends = processes, store, ends
        self.ranks = range(len(processes))

    def said(self, rank: int, seconds: float = LONG) -> Any:
        """What the rank says next; that it says nothing, or that it has ended, is a :class:`Said` too."""
        try:
            return heard(self._ends[rank], seconds)
        except AssertionError:
            return Said("silence", f"rank {rank} says nothing for {seconds:g} s", 0.0, 0.0)
        except EOFError:
            self.processes[rank].join(1.0)
            code = self.processes[rank].exitcode
            return Said("end of the rank", f"rank {rank} ended with {code}", 0.0, 0.0)

    def all_said(self, ranks: Sequence[int] | None = None, seconds: float = LONG) -> list[Any]:
        until = time.monotonic() + seconds
        ranks = self.ranks if ranks is None else ranks
        return [self.said(rank, max(0.1, until - time.monotonic())) for rank in ranks]

    def send(self, rank: int, number: signal.Signals) -> float:
        """Send a signal to a rank; when that was."""
        moment = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return moment


@contextmanager
def crew(
    place: str, world_size: int, on_rank: Callable[..., Any], *arguments: Any, timeout: float = LONG
) -> Iterator[Crew]:
    """Processes that call ``on_rank(join, end, *arguments)``: ``join()`` joins the group and returns the
    module of the collectives; what is sent through ``end`` is for :meth:`Crew.said`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rest = (store.port, timeout, on_rank, arguments)
    with started(_member, world_size, place, *rest) as (processes, ends):
        yield Crew(processes, ends, store)


def moments(seed: int, longest: float) -> Iterator[float]:
    """Random seconds, the same in every run."""
    chance = random.Random(seed)
    while True:
        yield chance.random() * longest


def sum_is_right(api: Any, count: int = 1000) -> bool:
    """Whether an all_reduce of the whole group, of every rank's number, comes out to the bit."""
    rank, world_size = api.get_rank(), api.get_world_size()
    whole = torch.arange(float(count)) + rank
    api.all_reduce(whole)
    expected = torch.arange(float(count)) * world_size + sum(range(world_size))
    return torch.equal(whole, expected)


@contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="interlace-faults-") as name:
        yield name
