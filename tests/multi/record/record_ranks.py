"""Functions of ranks for the tests of the flight recorder."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.processes import dump
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.recorder import RankRecord

LINE = "interlace.all_reduce(vector)  # the call site"


def own_group() -> HostGroup:
    place: Any = default_group().place
    group: HostGroup = place.group
    return group


def own_record() -> RankRecord:
    record = dump.record_of(own_group(), own_group().rank)
    assert record is not None
    return record


def many(count: int) -> RankRecord:
    """Ops of one kind, more than are kept, then of others."""
    vector = torch.ones(4)
    for _ in range(count):
        interlace.all_reduce(vector)  # the call site
    interlace.all_gather(torch.empty(2, 3), torch.zeros(3))
    interlace.reduce_scatter(torch.empty(3), torch.zeros(6))
    interlace.broadcast_object_list([b"nobody's business" * 9], src=0)
    interlace.all_reduce(torch.ones(4), async_op=True).wait()  # type: ignore[union-attr]
    return own_record()


def to_one_another() -> tuple[RankRecord, RankRecord]:
    """A message; what is recorded before it has come and afterwards."""
    vector = torch.ones(4)
    if interlace.get_rank() == 0:
        interlace.barrier()
        interlace.send(vector, 1, tag=7)
        return own_record(), own_record()
    work = interlace.irecv(vector, 0, tag=7)
    before = own_record()
    interlace.barrier()
    work.wait()
    return before, own_record()


def killed(folder: str, ops: int) -> None:
    """Rank 1 is killed after so many ops; the others call one more."""
    os.environ[dump.VARIABLE] = folder
    vector = torch.ones(4)
    for _ in range(ops):
        interlace.all_reduce(vector)  # the call site
    if interlace.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    interlace.all_reduce(vector)  # the call site


def killed_elsewhere(folder: str) -> None:
    """Rank 1 ends ops of three groups, in two of them with one other rank; then it is killed."""
    os.environ[dump.VARIABLE] = folder
    vector = torch.ones(4)
    groups = [interlace.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
    for group in groups:
        if not isinstance(group, int):  # a member
            interlace.all_reduce(vector, group=group)
    if interlace.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    interlace.all_reduce(vector)


def other_op(folder: str) -> str:
    """Rank 1 calls another op than the others."""
    os.environ[dump.VARIABLE] = folder
    vector = torch.ones(4)
    interlace.all_reduce(vector)
    try:
        if interlace.get_rank() == 1:
            interlace.broadcast(vector, 0)
        else:
            interlace.all_reduce(vector)
    except ValueError as error:
        return str(error)
    finally:
        os.environ[dump.VARIABLE] = "off"
    return ""


def stopped(folder: str, op: str) -> bool:
    """Rank 1 stops itself between two ops; the file with its process id says that it is about to."""
    os.environ[dump.VARIABLE] = folder
    vector = torch.ones(4)
    interlace.all_reduce(vector)
    rank = interlace.get_rank()
    Path(folder, f"pid.{rank}.part").write_text(str(os.getpid()))
    Path(folder, f"pid.{rank}.part").rename(Path(folder, f"pid.{rank}"))
    try:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if op == "all_reduce":
            interlace.all_reduce(vector)  # the call site
        elif rank == 1:
            interlace.send(vector, 0)
        elif rank == 0:
            interlace.recv(vector, 1)
        interlace.barrier()
        while not Path(folder, "enough").exists():
            time.sleep(0.01)
    finally:
        os.environ[dump.VARIABLE] = "off"
    return signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
