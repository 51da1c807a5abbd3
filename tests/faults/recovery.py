"""The ends of groups: survivors of a death continue in a new one, and pending ops end with their group."""

import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import interlace
import ranks
from faults.crew import LONG, Said, repeated, tried
from faults.rows import Plan, Row, Trial
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from multi.process_group.test_backend_failures import dropped_groups
from processes import heard, started


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
        with tempfile.TemporaryDirectory(prefix="interlace-faults-") as name:
            size = sizes[seed % len(sizes)]
            for trial in killed_one_by_one(size, hosts, seed, name, plan.broken):
                yield trial
                done += 1
        seed += 1


# -- the end of a group, and of its last reference -----------------------------------------------------


def closing(join: Any, end: Any, times: int, broken: bool) -> None:
    """Close a group while an op runs, and report the result of its wait.

    In the control one rank closes it without a call of the op.
    """
    api, chance = join(), random.Random(1)
    rank = api.get_rank()
    for number in range(times):
        group, out = api.new_group(), torch.full((1000,), float(rank))
        time.sleep(chance.random() * 0.01 * rank)
        if broken and rank:
            work = None
        elif number % 2:
            work = api.all_reduce(out, group=group, async_op=True)
        elif rank:
            work = api.isend(out, 0, group=group)
        else:
            work = api.irecv(out, 1, group=group)
        group.close()
        said = tried(work.wait) if work is not None else Said("", "", 0.0, 0.0)
        end.send((said, bool(out.eq(1).all())))


def completed(reports: list[Any]) -> Trial:
    right = all(not said.kind and whole for said, whole in reports)
    return Trial(right, [1e3 * (said.ended - said.begun) for said, _ in reports], str(reports))


def dropping(join: Any, end: Any, times: int, broken: bool) -> None:
    """Drop a group with an op pending on rank 0; in the control a descriptor is left each time."""
    join()
    if broken:
        new_group = interlace.new_group
        interlace.new_group = lambda *some: (os.dup(0), new_group(*some))[1]  # type: ignore[assignment]
    for number in range(times):
        pending = ("op", "message", "large message")[number % 3]
        end.send(dropped_groups(1, pending, LONG / 20 if broken else LONG / 2))


def all_true(reports: list[Any]) -> Trial:
    return Trial(reports == [True, True], said=str(reports))


def rows() -> list[Row]:
    close, drop = (closing, completed), (dropping, all_true)
    return [
        Row("going on without the killed", "shm", partial(going_on, (4, 2, 8), 1), 50, 4),
        Row("going on without the killed", "hosts", partial(going_on, (4, 2), 2), 50, 3),
        Row("closed before the wait", "shm", partial(repeated, "shm", 2, *close), 50, 4),
        Row("closed before the wait", "hosts", partial(repeated, "hosts", 2, *close), 50, 4),
        Row("dropped with ops pending", "shm", partial(repeated, "shm", 2, *drop), 60, 6),
        Row("dropped with ops pending", "hosts", partial(repeated, "hosts", 2, *drop), 60, 6),
    ]
