"""Ranks of test_backend.py: groups: how many, which ranks, their names and their end."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import interlace
import torch_names
from multi.process_group.backend_ranks import Tagged, own, world


def many_groups(path: str, count: int) -> tuple[float, int]:
    """All groups at once, used in turn."""
    with world(path):
        groups = [dist.new_group() for _ in range(count)]
        x = torch.ones(1)
        for group in groups:
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        return float(x), len({group.group_name for group in groups})


def meshes(path: str) -> list[Any]:
    """Sums along the two dims of a mesh, over subgroups and over a group in another order."""
    from torch.distributed.device_mesh import init_device_mesh

    with world(path):
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        sums = []
        for name in ("rows", "columns"):
            x = torch.full((1,), 10.0**rank)
            dist.all_reduce(x, group=mesh.get_group(name))
            sums.append(float(x))
        mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        x = torch.full((1,), 10.0**rank)
        dist.all_reduce(x, group=mine)
        sums.append(float(x))
        kept = {"sort_ranks": False} if torch_names.NEW_GROUP_SORTS else {}
        turned = dist.new_group([3, 1], **kept)
        if turned != dist.GroupMember.NON_GROUP_MEMBER:
            out = torch.empty(2)
            torch_names.all_gather_single(out, torch.tensor([float(rank)]), group=turned)
            interlace.all_reduce(x, group=turned)
            return [sums, dist.get_rank(turned), out.tolist(), float(x)]
        return [sums]


def again(path: str, times: int) -> list[Any]:
    """Init and destroy with one store, whose keys stay; then a call on a group that has ended."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(path, world_size)
    sums = []
    for turn in range(times):
        dist.init_process_group("interlace", store=store, rank=rank, world_size=world_size)
        group = dist.group.WORLD
        x = own(100.0 * turn, 1)
        dist.all_reduce(x)
        sums.append(float(x))
        dist.destroy_process_group()
    try:
        group.allreduce([own()])
    except interlace.InterlaceError as error:
        return [sums, str(error)]
    return [sums, "nothing was raised"]


def names(path: str) -> list[Any]:
    with world(path) as group:
        dist.all_reduce(own())
        dist.barrier()
        second = dist.new_group(group_desc="for names")
        return [
            group.name(),
            dist.get_backend(),
            bool(group.group_name),
            second.group_desc,
            second.group_name != group.group_name,
            group._get_sequence_number_for_group(),
            dist.distributed_c10d._get_object_coll_device(group),
        ]


def elsewhere(path: str) -> list[Any]:
    """Tensors on another device than the group; as the only device is the CPU, the group's is changed."""
    with world(path) as group:
        place = SimpleNamespace(device=torch.device("cuda"))
        size, rank = dist.get_world_size(), dist.get_rank()

        def tagged(*values: float) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32).as_subclass(Tagged)

        with mock.patch.object(group, "_place", place):
            reduced, gathered, sent = tagged(rank, 1.0), tagged(*[0.0] * size), tagged(rank)
            dist.all_reduce(reduced)
            torch_names.all_gather_single(gathered, sent)
            pieces = [tagged(0.0) for _ in range(size)]
            dist.all_gather(pieces, sent, async_op=True).wait()
            scattered = tagged(0.0)
            torch_names.reduce_scatter_single(scattered, tagged(*range(size)))
            try:
                dist.send(sent, (rank + 1) % size)
                refused = "nothing was raised"
            except interlace.PlaceUnavailableError as error:
                refused = str(error)
        found = [reduced, gathered, torch.cat(pieces), scattered, sent]
        return [*(each.tolist() for each in found), refused]


def aborted(path: str) -> str:
    """Rank 1 aborts while rank 0 waits for it."""
    with world(path) as group:
        try:
            if dist.get_rank() == 1:
                group.abort()
                return "aborted"
            dist.all_reduce(own())
        except interlace.AbortedError as error:
            return str(error)
        return "nothing was raised"


def destroyed_before_wait(path: str, kind: str, backend: str) -> list[float]:
    """The least and the most of what comes by ops that are under way when their group is destroyed."""
    count = 3_000_000 if kind == "large messages" else 1000
    with world(path, backend):
        rank = dist.get_rank()
        x, y = torch.full((count,), float(rank + 1)), torch.zeros(count)
        if rank == 1:
            time.sleep(0.7)  # the other waits for this one by then, or has destroyed its group
        works: list[Any] = []
        if kind == "collective":
            works.append(dist.all_reduce(x, async_op=True))
            y = x
        else:
            works += [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    return [float(y.min()), float(y.max())]
