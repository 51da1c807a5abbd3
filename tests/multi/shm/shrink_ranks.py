"""Ranks that go on without those that died, for test_shrink.py."""

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore

import interlace
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.connect import connect_place
from interlace.runtime.places.hosts import host_map
from interlace.runtime.places.hosts.regroup import HostsRoll
from interlace.runtime.processes import rendezvous

TIMEOUT = 600.0


def joined(
    rank: int, world_size: int, folder: str, hosts: int = 1, timeout: float | None = None
) -> None:
    """Join the default group, on so many hosts; the store ends with rank 0 if they are several."""
    torch.set_num_threads(1)
    os.environ["INTERLACE_SECRET"] = "of the ranks of test_shrink.py"
    chosen = Path(folder) / "port"
    if hosts == 1:
        store: Any = FileStore(f"{folder}/store", world_size)
    elif rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        chosen.with_suffix(".new").write_text(str(store.port))
        chosen.with_suffix(".new").rename(chosen)
    else:
        while not chosen.exists():
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(chosen.read_text()), is_master=False)
    host = f"host {rank * hosts // world_size}"
    place = connect_place(store, rank, world_size, timeout=TIMEOUT, name="shrinking", host=host)
    assert place.name == ("shm" if hosts == 1 else "hosts")
    place.set_timeout(timeout or TIMEOUT)
    groups.install(place, all_threads=True)


def to_the_last(rank: int, world_size: int, folder: str, said: Any, hosts: int = 1) -> None:
    """Calls ops, shrinks when a rank has died, and says who is left each time, until it is alone."""
    joined(rank, world_size, folder, hosts)
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


def killed_while_joining(
    rank: int, world_size: int, folder: str, said: Any, when: str, hosts: int = 1
) -> None:
    """Rank 1 leaves by its end; rank 2 ends at the point ``when`` of the first attempt to go on."""
    joined(rank, world_size, folder, hosts)
    if rank == 1:
        os._exit(1)
    if rank == 2:
        if when == "after coming":
            rendezvous.MemoryMeeting.cards = lambda *rest: os._exit(1)  # type: ignore[assignment,method-assign]
        elif when == "after its card":
            inner = rendezvous.MemoryMeeting.cards

            def cards(self: Any, *rest: Any) -> Any:
                inner(self, *rest)
                os._exit(1)

            rendezvous.MemoryMeeting.cards = cards  # type: ignore[method-assign]
        else:
            roll: Any = rendezvous.MemoryRoll if hosts == 1 else HostsRoll
            say = roll.say

            def ends(self: Any, what: int, value: int) -> None:
                if what != rendezvous.RESULT or when == "said so":
                    say(self, what, value)
                if what == rendezvous.RESULT:
                    os._exit(1)

            roll.say = ends
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


def again_and_again_on_two_hosts(
    rank: int, world_size: int, folder: str, said: Any, times: int
) -> None:
    joined(rank, world_size, folder, hosts=2)
    again_and_again(4)
    gc.collect()
    gc.disable()
    said.send(again_and_again(times))


def stopped(rank: int, world_size: int, folder: str, said: Any, hosts: int, timeout: float) -> None:
    """Calls ops until one fails, then shrinks: what it says, and who is left; or why not."""
    joined(rank, world_size, folder, hosts, timeout)
    interlace.barrier()
    said.send("up")
    try:
        while True:
            interlace.all_reduce(torch.ones(1000))
    except InterlaceError as error:
        said.send(str(error))
    try:
        group = interlace.shrink()
        whole = torch.tensor([float(rank)])
        interlace.all_reduce(whole)
        said.send((group.place.name, group.world_size, whole.item()))
    except InterlaceError as error:
        said.send(str(error))


def in_another_order(rank: int, world_size: int, folder: str, said: Any, hosts: int) -> None:
    """Ranks that mean to go on with each other in different orders, then with all; and then agree."""
    joined(rank, world_size, folder, hosts)
    for call in (
        lambda: interlace.rebuild(None, [0, 1] if rank == 0 else [1, 0]),
        lambda: interlace.shrink() if rank == 0 else interlace.rebuild(None, [0, 1]),
    ):
        try:
            call()
            said.send("nothing")
        except ValueError as error:
            said.send(str(error))
    group = interlace.rebuild(None, [1, 0])
    whole = torch.tensor([float(rank)])
    interlace.broadcast(whole, 0, group=group)
    said.send((group.rank, whole.item()))


def after_a_death(rank: int, world_size: int, folder: str, said: Any) -> None:
    """What is left on two hosts of a group whose rank 3 has died: works, workspaces, groups."""
    joined(rank, world_size, folder, hosts=2)
    old: Any = groups.default_group()
    near: Any = [interlace.new_group([0, 1]), interlace.new_group([2, 3])][rank // 2]
    square = torch.ones(64, 64)
    interlace.matmul_all_reduce(square, square, group=near)  # so it has workspaces
    work: Any = interlace.irecv(torch.ones(4), 3) if rank < 3 else None
    interlace.barrier()
    if rank == 3:
        os._exit(1)

    def tell(*calls: Any) -> None:
        for call in calls if rank != 1 else ():
            try:
                call()
                said.send("nothing")
            except InterlaceError as error:
                said.send(str(error))

    tell(
        work.wait,
        lambda: interlace.all_reduce(torch.ones(4)),
        lambda: interlace.all_reduce(torch.ones(4), group=near),
        lambda: interlace.matmul_all_reduce(square, square, group=near),
    )
    new = interlace.shrink()
    half = interlace.rebuild(new, [2, 0]) if rank != 1 else None
    tell(
        lambda: interlace.matmul_all_reduce(square, square, group=near),
        lambda: interlace.all_reduce(torch.ones(4), group=old),
        lambda: interlace.shrink(old),
        lambda: interlace.all_reduce(torch.ones(4), group=new),
    )
    if half is not None:
        whole = torch.tensor([float(rank)])
        interlace.broadcast(whole, half.ranks[0], group=half)
        said.send((half.ranks, whole.item()))


def replaced(
    rank: int, world_size: int, folder: str, said: Any, message: bool, hosts: int = 1
) -> None:
    """Rank 1 becomes another program, the others wait for it, and go on without it."""
    joined(rank, world_size, folder, hosts)
    interlace.barrier()
    if rank == 1:
        os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({TIMEOUT})"])
    try:
        if message and rank == 0:
            interlace.recv(torch.ones(1), 1)
        interlace.barrier()
    except InterlaceError as error:
        said.send(str(error))
    interlace.shrink()
    said.send(interlace.get_world_size())


def of_torch(rank: int, world_size: int, folder: str, said: Any, port: int, hosts: int) -> None:
    """torch's groups, whose store rank 0 serves, after rank 0 has died; rank 1 is not in one of them."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), INTERLACE_SECRET="of of_torch"
    )
    if hosts > 1:
        host_map.this_host = lambda: f"host {rank % hosts}"
    dist.init_process_group("interlace", rank=rank, world_size=world_size)
    part: Any = dist.new_group([0, 2, 3])
    dist.barrier()
    if rank == 0:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(4))
    except InterlaceError as error:
        said.send(str(error))
    if rank > 1:
        part = interlace.shrink(part)
        whole = torch.tensor([float(rank)])
        dist.broadcast(whole, 3, group=part)
        dist.barrier(part)
        said.send((dist.get_process_group_ranks(part), dist.get_rank(part), whole.item()))
    interlace.shrink()
    assert dist.group.WORLD.interlace_communicator.place.name == ("shm" if hosts == 1 else "hosts")
    half = dist.new_group([0])
    whole = torch.full((4,), float(rank))
    dist.all_reduce(whole)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    said.send((dist.get_rank(), dist.get_world_size(), whole[0].item(), dist.get_world_size(half)))
    dist.destroy_process_group()
