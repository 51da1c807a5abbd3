"""Ranks of test_backend_failures.py: errors that C++ must see, modes, gradients, the end."""

import contextlib
import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import interlace
import torch_names
from guard import LIMIT
from multi.process_group.backend_ranks import own, world


class Seen(TorchDispatchMode):
    """A mode that only looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def backward_without_a_peer(path: str) -> str:
    """Rank 1 leaves before the backward of DistributedDataParallel, whose reducer is C++."""
    with world(path):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        if dist.get_rank() == 1:
            return "left"
        try:
            model(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"


def failing_under_a_mode(path: str) -> str:
    """An op that fails while a mode is active: its Work says so."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    dist.init_process_group(
        "interlace", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size
    )
    try:
        if rank == 1:
            return "left"
        with Seen():
            work = dist.all_reduce(own(), async_op=True)
        try:
            work.wait()
        except interlace.InterlaceError as error:
            return str(error)
        return "nothing was raised"
    finally:
        dist.destroy_process_group()


def under_a_mode(path: str) -> list[Any]:
    """Ops that torch hands back under another name, with a mode on rank 0 alone."""
    with world(path):
        rank, size = dist.get_rank(), dist.get_world_size()
        with Seen() if rank == 0 else contextlib.nullcontext():
            traded = torch.empty(size)
            dist.all_to_all_single(traded, torch.full((size,), float(rank)))
            gathered, scattered = torch.empty(size), torch.empty(1)
            with dist._coalescing_manager():
                torch_names.all_gather_single(gathered, own(0.0, 1))
            with dist._coalescing_manager():
                torch_names.reduce_scatter_single(scattered, torch.ones(size))
            received = torch.empty(1)
            sending = dist.isend(own(0.0, 1), (rank + 1) % size)
            source = dist.recv(received)
            sending.wait()
        return [traded.tolist(), gathered.tolist(), scattered.tolist(), received.tolist(), source]


def gradients(path: str) -> list[Any]:
    """Functional collectives whose results come to require grad while the op runs."""
    with world(path):
        group, size = dist.group.WORLD, dist.get_world_size()
        found = []
        for _ in range(5):
            x = torch.arange(2.0 * size, requires_grad=True)
            summed = funcol.all_reduce(x * 2, "sum", group) + 0
            part = funcol.reduce_scatter_tensor_autograd(x * 2, "sum", 0, group)
            (part * torch.ones(2)).sum().backward()  # torch 2.11 takes no expanded gradient
            assert x.grad is not None
            found = [summed.tolist(), part.tolist(), x.grad.tolist()]
        return found


def inference(path: str) -> list[float]:
    """Tensors made in inference mode, reduced outside it, in several sizes."""
    with world(path):
        found = []
        for size in (2, 50_000, 500_000):
            with torch.inference_mode():
                x, part = own(1.0, size), torch.empty(size // 2)
            dist.all_reduce(x)
            torch_names.reduce_scatter_single(part, x)
            found += [float(x[-1]), float(part[-1])]
        return found


def same_port(port: int, times: int) -> int:
    """Init and destroy with a store that rank 0 serves on one port."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    for turn in range(times):
        dist.init_process_group(
            "interlace",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=600),
        )
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        if float(x) != world_size:
            return turn
    return times


def bad_ranks(path: str) -> list[str]:
    """Roots and peers that are no ranks."""
    with world(path):
        x, said = torch.ones(1), []
        for call in (
            lambda: dist.broadcast(x, group_src=-1),
            lambda: dist.reduce(x, group_dst=9),
            lambda: dist.isend(x, group_dst=-1),
            lambda: dist.gather(x, None, group_dst=-1),
        ):
            try:
                call()
                said.append("nothing was raised")
            except ValueError as error:
                said.append(str(error))
        dist.all_reduce(x)
        return [*said, str(float(x))]


def another_default_group(path: str) -> list[int]:
    """gloo's group is destroyed and made again with the ranks turned round."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    interlace.groups.groups._default.set(None)
    kept, interlace.groups.groups._of_run = interlace.groups.groups._of_run, None
    try:
        found = []
        for turn, own_rank in enumerate((rank, size - 1 - rank)):
            store = dist.FileStore(f"{path}{turn}", size)
            dist.init_process_group("gloo", store=store, rank=own_rank, world_size=size)
            x = torch.tensor([interlace.get_rank()])
            interlace.broadcast(x, 1)
            found += [interlace.get_rank() == own_rank, int(x)]
            dist.barrier()
            dist.destroy_process_group()
        try:
            interlace.get_rank()
            found.append("nothing was raised")
        except interlace.InterlaceError as error:
            found.append("destroyed" in str(error))
        return found
    finally:
        interlace.groups.groups._of_run = kept
        if kept is not None:
            interlace.groups.groups._default.set(kept)


def groups_in_different_order() -> list[float]:
    """Async ops of two groups, begun in another order on every rank."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    groups = [interlace.new_group(range(world_size)) for _ in range(2)]
    tensors = [torch.ones(100_000), torch.full((3,), 2.0)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [interlace.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    for group in groups:
        group.close()
    return [float(tensor[-1]) for tensor in tensors]


def many_coalesced(count: int) -> float:
    tensors = [torch.full((1,), float(number)) for number in range(count)]
    interlace.all_reduce_coalesced(tensors)
    return float(sum(tensors))


def dropped_groups(count: int, pending: str, seconds: float = LIMIT / 2) -> bool:
    """Whether groups that nobody closed leave no descriptor and no thread, with ops that are pending."""

    def left() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    before = left()
    for _ in range(count):
        group = interlace.new_group(range(interlace.get_world_size()))
        group.barrier()
        if pending == "op":
            interlace.all_reduce(own(), group=group, async_op=True).wait()
        if (
            pending and interlace.get_rank() == 0
        ):  # and on no other rank, so it cannot end by itself
            if pending == "op":
                interlace.all_reduce(own(), group=group, async_op=True)
            elif pending == "message":
                interlace.irecv(own(), 1, group=group)
            else:
                interlace.isend(torch.ones(100_000), 1, group=group)
        del group
    interlace.barrier()
    until = time.monotonic() + seconds
    while left() > before and time.monotonic() < until:
        time.sleep(1e-2)
    return left() <= before


def in_another_thread() -> list[float]:
    """The default group of a rank is that of all its threads."""
    found: list[float] = []

    def reduce() -> None:
        x = torch.ones(1)
        interlace.all_reduce(x)
        found.append(float(x))

    thread = threading.Thread(target=reduce)
    thread.start()
    thread.join()
    return found
