"""Code as it is written for a process and a GPU per rank: functions that each rank runs."""

import functools
import threading
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from cuda.bindings import driver
from torch.distributed.device_mesh import init_device_mesh

WORDS: dict[str, torch.Tensor] = {}
calls = 0
lock = threading.Lock()


class Workspaces:
    made: ClassVar[list[int]] = []


@functools.lru_cache
def workspace(nbytes):
    Workspaces.made.append(nbytes)
    return symm_mem.get_symm_mem_workspace(dist.group.WORLD.group_name, min_size=nbytes)


def caches_are_each_ranks_own():
    """What a process would find in its modules after two calls; the same in every run."""
    global calls
    for _ in range(2):
        calls += 1 + dist.get_rank()
        with lock:  # which the other ranks' processes do not have
            dist.barrier()
        WORDS.setdefault("own", torch.full((2,), dist.get_rank(), device="cuda"))
        handle = workspace(64)
    assert handle.rank == dist.get_rank() and handle is workspace(64)
    assert Workspaces.made == [64]
    return calls, [words.tolist() for words in WORDS.values()]


def names_of_a_gpu():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(f"cuda:{rank}")
    x = torch.ones(4, device=torch.device("cuda", rank)).cuda()
    assert torch.cuda.is_available() and torch.cuda.device_count() == world_size
    assert x.is_cuda and x.device == torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.nvtx.range("mesh"):
        mesh = init_device_mesh("cuda", (1, world_size))
    assert mesh.get_group(1).size() == world_size and torch.cuda.max_memory_allocated() == 0
    dist.all_reduce(x, op=dist.ReduceOp.SUM, group=dist.new_group([0, 1]))
    pad = symm_mem.rendezvous(symm_mem.empty(4, device="cuda"), dist.group.WORLD).get_signal_pad(0)
    assert symm_mem.rendezvous(x, dist.group.WORLD) is None and pad.dtype == torch.uint32
    dist.destroy_process_group()
    return x.tolist()


def read_by_the_host():
    """Whoever looks at a tensor waits for what the current stream has been given."""
    stream, looks = (
        torch.cuda.Stream(),
        (list, np.asarray, np.from_dlpack, torch.Tensor.numpy, repr),
    )
    found = []
    for look in looks:
        x = torch.zeros(1, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                x.add_(1 + dist.get_rank())
            found.append(str(look(x)))
    return found


def pipelined():
    """torch's own pipeline of asynchronous tensor parallelism, on two streams."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard, b = torch.full((4, 8), 1.0 + rank, device="cuda"), 3 * torch.eye(8, device="cuda")
    gathered, output = (torch.empty(4 * world_size, 8, device="cuda") for _ in range(2))
    symm_mem._pipelined_all_gather_and_consume(
        shard,
        lambda part, source: torch.mm(part, b, out=output.chunk(world_size)[source]),
        gathered,
        dist.group.WORLD.group_name,
    )
    reference = torch.ops.symm_mem.fused_all_gather_matmul(
        shard, [b], gather_dim=0, group_name=dist.group.WORLD.group_name
    )
    torch.testing.assert_close([gathered, output], [reference[0], reference[1][0]])


@triton.jit
def twice_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets))


@torch.library.custom_op("interlace_gpu_code::twice", mutates_args=(), device_types="cuda")
def twice(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    twice_kernel[(1,)](x.view(4, 4).t().reshape(-1), y, 16)  # which copies, as any op of torch's
    return y


def waits_for_values(told=True):
    """One stream waits for a word that another writes, with what came before it; the host for an event."""
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    x, weight = torch.zeros(16, device="cuda"), torch.eye(16, device="cuda", requires_grad=True)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    for stream in (producer, consumer):
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(consumer):
        equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
        driver.cuStreamWaitValue32(consumer.cuda_stream, words.data_ptr() + 4, 7, equal)
        y = torch.nn.functional.linear(twice(x)[None], weight)
    with producer:
        x.fill_(1 + dist.get_rank())
        if told:
            driver.cuStreamWriteValue32(producer.cuda_stream, words.data_ptr() + 4, 7, 0)
    ready = consumer.record_event()
    while not ready.query():
        pass
    torch.cuda.current_stream().wait_event(ready)
    y.sum().backward()
    torch.cuda.synchronize()
    return y[0, :2].tolist(), weight.grad[0, :2].tolist()
