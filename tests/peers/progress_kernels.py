"""An all-gather into a matmul in the style of torch's asynchronous tensor parallelism and of Kraken.

A stream of its own pulls the peers' shards, by the copy engine, and behind each shard writes a progress
word. Meanwhile one kernel on the current stream multiplies, and waits for the word of a shard before it
loads from it; its own shard it reads in place.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

ROWS, WIDTH, ROUNDS = 16, 16, 2

_gathered: dict[int, torch.Tensor] = {}


@triton.jit
def gathered_matmul(shard_ptr, gathered_ptr, b_ptr, output_ptr, progress_ptr, rank, world_size,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """A program per shard, the own one first."""
    source = (tl.program_id(0) + rank) % world_size
    columns = tl.arange(0, WIDTH)
    rows = tl.arange(0, ROWS)[:, None] * WIDTH + columns[None, :]
    if source == rank:
        a = tl.load(shard_ptr + rows)
    else:
        while tl.atomic_add(progress_ptr + source, 0, sem="acquire", scope="sys") == 0:
            pass
        a = tl.load(gathered_ptr + source * ROWS * WIDTH + rows)
    b = tl.load(b_ptr + columns[:, None] * WIDTH + columns[None, :])
    tl.store(output_ptr + source * ROWS * WIDTH + rows, tl.dot(a, b))


def gather_with_progress(shard, gathered, progress):
    """Pull the peers' shards on a stream, which is returned."""
    handle = symm_mem.rendezvous(shard, dist.group.WORLD)
    stream = symm_mem._get_backend_stream(priority=-1)
    handle.barrier()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(1, handle.world_size):
            source = (handle.rank + step) % handle.world_size
            gathered[source].copy_(handle.get_buffer(source, shard.shape, shard.dtype))
            handle.stream_write_value32(progress, offset=source, val=1)
        handle.barrier()
    return stream


def all_gather_matmul(shard, b):
    """The product, and ``gathered``, one tensor for all calls of the rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if 0 not in _gathered:
        _gathered[0] = torch.empty(world_size, ROWS, WIDTH, device=b.device)
    output = torch.empty_like(_gathered[0])
    progress = torch.zeros(world_size, dtype=torch.uint32, device=b.device)
    stream = gather_with_progress(shard, _gathered[0], progress)
    gathered_matmul[(world_size,)](
        shard, _gathered[0], b, output, progress.view(torch.int32), rank, world_size, ROWS, WIDTH
    )
    torch.cuda.current_stream().wait_stream(stream)
    return output


def two_rounds():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    shard = symm_mem.empty(ROWS, WIDTH, device=f"cuda:{rank}")
    for step in range(ROUNDS):
        shard.fill_(1.0 + rank + 10 * step)
        output = all_gather_matmul(shard, 2.0 * torch.eye(WIDTH, device="cuda"))
        for source in range(world_size):
            if not torch.all(output[source] == 2.0 * (1.0 + source + 10 * step)):
                raise AssertionError(f"rank {rank} has wrong rows of {source} in step {step}")
