"""Ranks that go on without those that died, for test_shrink.py."""

import os
import random
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore

import interlace
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.one_host import meetings
from interlace.runtime.start.connect import connect_place

TIMEOUT = 120.0


def joined(rank: int, world_size: int, folder: str) -> None:
    store = FileStore(f"{folder}/store", world_size)
    place = connect_place(store, rank, world_size, timeout=TIMEOUT, name="shrinking")
    groups.install(place, all_threads=True)


def to_the_last(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Calls ops, shrinks when a rank has died, and says who is left each time, until it is alone."""
    torch.set_num_threads(1)
    joined(rank, world_size, folder)
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


def killed_while_joining(rank: int, world_size: int, folder: str, said: Any, when: str) -> None:
    """Rank 1 leaves by its end; rank 2 ends at the point ``when`` of the first attempt to go on."""
    joined(rank, world_size, folder)
    if rank == 1:
        os._exit(1)
    group: Any = groups.default_group()
    if rank == 2:
        if when == "after coming":
            meetings.MemoryMeeting.cards = lambda *rest: os._exit(1)  # type: ignore[assignment,method-assign]
        elif when == "after its card":
            inner = meetings.MemoryMeeting.cards

            def cards(self: Any, *rest: Any) -> Any:
                inner(self, *rest)
                os._exit(1)

            meetings.MemoryMeeting.cards = cards  # type: ignore[method-assign]
        else:
            release = group.place.group.release

            def ends(index: int, value: int) -> None:
                if index != meetings.JOINED or when == "said so":
                    release(index, value)
                if index == meetings.JOINED:
                    os._exit(1)

            group.place.group.release = ends
    interlace.shrink()
    said.send(interlace.get_world_size())
    try:
        whole = torch.tensor([float(rank)])
        interlace.all_reduce(whole)
    except InterlaceError:
        interlace.shrink()
        whole = torch.tensor([float(rank)])
        interlace.all_reduce(whole)
    said.send(whole.item())


def again_and_again(times: int) -> list[tuple[int, int, int]]:
    """Shrinks a group that has lost nobody; descriptors, threads and mappings before, half-way, after."""
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


def after_the_end() -> list[str]:
    """What a group that was shrunk says, its work and its symmetric memory."""
    old = interlace.new_group()
    memory = interlace.symmetric_memory.empty(4)
    interlace.symmetric_memory.rendezvous(memory, old)
    work = interlace.all_reduce(torch.ones(4), group=old, async_op=True)
    work.wait()
    new = interlace.shrink(old)
    said = [str(new.ranks)]
    for call in (
        lambda: interlace.all_reduce(torch.ones(4), group=old),
        lambda: interlace.shrink(old),
        lambda: interlace.rebuild(new, [0, 9]),
    ):
        try:
            call()
        except (InterlaceError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def without_rank_0(seconds: float) -> str:
    group = interlace.new_group(timeout=seconds)
    try:
        return str(interlace.get_rank() and interlace.shrink(group))
    except interlace.CollectiveTimeoutError as error:
        return str(error)


def of_torch(rank: int, world_size: int, folder: str, said: Any, port: int) -> None:
    """torch's default group, whose store rank 0 serves, after rank 0 has died."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("interlace", rank=rank, world_size=world_size)
    part = dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(4))
    except InterlaceError as error:
        said.send(str(error))
    try:
        interlace.shrink(part)
    except ValueError as error:
        said.send(str(error))
    interlace.shrink()
    half = dist.new_group([0])
    whole = torch.full((4,), float(rank))
    dist.all_reduce(whole)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    said.send((dist.get_rank(), dist.get_world_size(), whole[0].item(), dist.get_world_size(half)))
    dist.destroy_process_group()
