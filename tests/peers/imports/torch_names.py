"""Uses of torch's names, when a file is imported, as files of other libraries have them."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import ProcessGroup

packet = torch.ops.symm_mem.one_shot_all_reduce
overload = packet.default
TABLE = {overload: "a sum", torch.ops.symm_mem.two_shot_all_reduce_.default: "another"}


class Pools:
    pool: torch.cuda.MemPool | None = None
    stream: torch.cuda.Stream | torch.cuda.Event | None = None
    group: dist.ProcessGroup | None = None


class Pool(torch.cuda.MemPool):
    def __init__(self) -> None:
        super().__init__(use_on_oom=True)


class Stream(torch.cuda.Stream): ...


class Guard(torch.cuda.device_of): ...


class Group(ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 1)


def kinds() -> int:
    group = dist.group.WORLD
    assert type(group) is ProcessGroup is dist.ProcessGroup is dist.distributed_c10d.ProcessGroup
    assert type(dist.new_group([0, 1])) is dist.ProcessGroup
    assert isinstance(Group(), ProcessGroup) and type(Group()) is not ProcessGroup
    assert issubclass(Group, ProcessGroup) and not isinstance(group, Group)
    with torch.cuda.use_mem_pool(Pool()), Guard(torch.zeros(1)), Stream():
        assert isinstance(Pool(), torch.cuda.MemPool) and isinstance(Stream(), torch.cuda.Stream)
    return dist.get_rank()


def sums() -> list[list[float]]:
    assert isinstance(packet, OpOverloadPacket) and isinstance(overload, OpOverload)
    assert TABLE[packet.default] == "a sum" and packet.overloads() == ["default"]
    x = symm_mem.empty(4, device="cuda").fill_(1.0 + dist.get_rank())
    symm_mem.rendezvous(x, dist.group.WORLD)
    name = dist.group.WORLD.group_name
    ops = torch.ops.symm_mem
    called = packet, overload, ops.one_shot_all_reduce, ops.one_shot_all_reduce.default
    return [op(x, "sum", name).tolist() for op in called]
