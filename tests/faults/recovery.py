"""After a death the survivors continue in a new group, down to the last rank, and leave nothing behind."""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import interlace
import ranks
from faults.crew import LONG, Said, crew, folder
from faults.rows import Plan, Row, Trial
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from processes import heard, started

KIB = 1024


def install(
    rank: int, world_size: int, folder: str, hosts: int, timeout: float = ranks.LONG
) -> None:
    torch.set_num_threads(1)
    os.environ.update(ranks.SECRET)
    group = ranks.joined(rank, world_size, folder, hosts=hosts, timeout=timeout)
    groups.install(group.place, all_threads=True)


def shrink_after_each_death(
    rank: int, world_size: int, folder: str, said: Any, hosts: int = 1, timeout: float = ranks.LONG
) -> None:
    """Call ops, shrink after each death, and report the survivors each time until one is left."""
    install(rank, world_size, folder, hosts, timeout)
    while True:
        try:
            left = torch.empty(interlace.get_world_size(), dtype=torch.int64)
            interlace.all_gather_into_tensor(left, torch.tensor([rank]))
            ids = left.tolist()
            said.send(ids)
            if len(ids) == 1:
                return
            chance = random.Random(str(ids))
            while True:
                count = 4 << (2 * chance.randrange(8))
                whole = torch.arange(float(count)) + rank
                interlace.all_reduce(whole)
                expected = torch.arange(float(count)) * len(ids) + sum(ids)
                assert torch.equal(whole, expected), (whole, expected)
                if chance.random() < 0.1:
                    interlace.new_group().close()
        except InterlaceError:
            interlace.shrink()


def shrink_often(times: int) -> list[tuple[int, int, int]]:
    """Shrink without a loss; return descriptors, threads and mappings before, half-way and after."""
    found = []
    for number in range(times + 1):
        interlace.shrink()
        whole = torch.ones(100)
        interlace.all_reduce(whole)
        assert whole[0] == interlace.get_world_size()
        if number in (times // 4, times):
            maps = sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
            found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), maps))
    return found


def without_shrinking(rank: int, world_size: int, name: str, said: Any, hosts: int) -> None:
    """The control: after a death, ranks call the next op."""
    interlace.shrink = lambda *_: None  # type: ignore[assignment]
    shrink_after_each_death(rank, world_size, name, said, hosts, timeout=5.0)


def killed_one_by_one(
    world_size: int, hosts: int, seed: int, name: str, broken: bool, wait: float = LONG
) -> Iterator[Trial]:
    """Kill one or two random ranks at a time until one is left.

    The others must name the survivors and compute right sums (``shrink_after_each_death``). The time ends
    with the last report.
    """
    chance, moment = random.Random(seed), 0.0
    on_rank = without_shrinking if broken else shrink_after_each_death
    with started(on_rank, world_size, name, hosts) as (processes, ends):
        alive, wait = list(range(world_size)), 5.0 if broken else wait
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
                processes[alive[0]].join(wait)
                if code := processes[alive[0]].exitcode:
                    yield Trial(False, said=f"the last rank ended with {code}")
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
    shrink_often(min(50, 2 * times))
    before, began = _resident(), time.monotonic()
    found = shrink_often(times)
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
