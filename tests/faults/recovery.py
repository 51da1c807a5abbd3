"""After a death the survivors continue in a new group, down to the last rank, and leave nothing behind."""

import os
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import interlace
from faults.crew import LONG, Said, crew, folder
from faults.rows import Plan, Row, Trial
from multi.shm import test_shrink as shrinking
from processes import heard, started

KIB = 1024


def without_shrinking(rank: int, world_size: int, name: str, said: Any, hosts: int) -> None:
    """The control: after a death, ranks call the next op."""
    interlace.shrink = lambda *_: None  # type: ignore[assignment]
    shrinking.going_on(rank, world_size, name, said, hosts, timeout=5.0)


def killed_one_by_one(
    world_size: int, hosts: int, seed: int, name: str, broken: bool
) -> Iterator[Trial]:
    """Kill one or two random ranks at a time until one is left.

    The others must name the survivors and compute right sums (``going_on``). The time ends with the last
    report.
    """
    chance, moment = random.Random(seed), 0.0
    on_rank = without_shrinking if broken else shrinking.going_on
    with started(on_rank, world_size, name, hosts) as (processes, ends):
        alive, wait = list(range(world_size)), 5.0 if broken else LONG
        while True:
            try:
                for rank in alive:
                    while heard(ends[rank], wait) != alive:
                        pass  # a report of fewer deaths, if these came in turn
            except (AssertionError, EOFError) as error:
                yield Trial(False, said=f"rank {rank} of {alive}: {type(error).__name__} {error}")
                return
            if moment:
                yield Trial(True, [1e3 * (time.monotonic() - moment)])
            if len(alive) == 1:
                return
            for rank in chance.sample(alive, chance.randint(1, min(2, len(alive) - 1))):
                time.sleep(chance.random() * 0.02)
                moment = time.monotonic()
                processes[rank].kill()
                alive.remove(rank)


def going_on(sizes: Sequence[int], hosts: int, plan: Plan) -> Iterator[Trial]:
    done, seed = 0, 0
    while done < plan.trials:
        with folder() as name:
            size = sizes[seed % len(sizes)]
            for trial in killed_one_by_one(size, hosts, seed, name, plan.broken):
                yield trial
                done += 1
        seed += 1


def again_and_again(join: Any, end: Any, times: int, broken: bool) -> None:
    """Shrink often; report descriptors, threads and mappings before and after, and the growth in KiB."""
    join()
    if broken:  # a descriptor is left each time
        shrunk = interlace.shrink
        interlace.shrink = lambda *group: (os.dup(0), shrunk(*group))[1]  # type: ignore[assignment]
    shrinking.again_and_again(min(50, 2 * times))
    before, began = _resident(), time.monotonic()
    found = shrinking.again_and_again(times)
    ms = 1e3 * (time.monotonic() - began) / times
    end.send((found, (_resident() - before) // KIB, ms))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def leaving_nothing(place: str, plan: Plan) -> Iterator[Trial]:
    """Shrink groups one after the other; 1 KiB more for each is too much."""
    times = plan.trials
    with crew(place, 4, again_and_again, times, plan.broken) as team:
        found = team.all_said(seconds=10 * LONG)
    if ended := [said for said in found if isinstance(said, Said)]:
        yield Trial(False, said=str(ended))
        return
    right = all(
        after <= before and grown < max(times, 4 * KIB) for (before, after), grown, _ in found
    )
    slowest = max(ms for *_, ms in found)
    yield from [
        Trial(right, [slowest], f"before and after, and KiB more, by rank: {found}")
    ] * times


def rows() -> list[Row]:
    return [
        Row("going on without the killed", "shm", partial(going_on, (4, 2, 8), 1), 50, 4),
        Row("going on without the killed", "hosts", partial(going_on, (4, 2), 2), 50, 3),
        Row("nothing is left of a group", "shm", partial(leaving_nothing, "shm"), 1000, 100),
        Row("nothing is left of a group", "hosts", partial(leaving_nothing, "hosts"), 50, 10),
    ]
