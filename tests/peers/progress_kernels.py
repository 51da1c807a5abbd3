"""An all-gather into a matmul in the style of torch's asynchronous tensor parallelism.

Copies on a stream push a shard to every peer, and behind each copy the stream writes the peer's progress
word. One kernel multiplies, and waits for the word of a shard before it loads from it.
"""

import torch
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import interlace

ROWS, WIDTH, ROUNDS = 16, 16, 2


@triton.jit
def gathered_matmul(gathered_ptr, b_ptr, output_ptr, progress_ptr, step, rank, world_size,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """A program per shard, the own one first."""
    source = (tl.program_id(0) + rank) % world_size
    while tl.atomic_add(progress_ptr + source, 0, sem="acquire", scope="sys") < step + 1:
        pass
    columns = tl.arange(0, WIDTH)
    shard = (source * ROWS + tl.arange(0, ROWS))[:, None] * WIDTH + columns[None, :]
    b = tl.load(b_ptr + columns[:, None] * WIDTH + columns[None, :])
    tl.store(output_ptr + shard, tl.dot(tl.load(gathered_ptr + shard), b))


def two_rounds():
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    gathered = symm_mem.empty(world_size, ROWS, WIDTH)
    words = symm_mem.empty(world_size, dtype=torch.uint32)
    words.zero_()
    handle, progress = symm_mem.rendezvous(gathered), symm_mem.rendezvous(words)
    output = torch.empty(world_size, ROWS, WIDTH)
    for step in range(ROUNDS):
        # what was gathered before has been read everywhere, and all words are there
        handle.barrier()
        shard = torch.full((ROWS, WIDTH), 1.0 + rank + 10 * step)
        for offset in range(world_size):
            peer = (rank + offset) % world_size
            handle.get_buffer(peer, gathered.shape, gathered.dtype)[rank].copy_(shard)
            flags = progress.get_buffer(peer, words.shape, words.dtype)
            progress.stream_write_value32(flags, rank, step + 1)
        gathered_matmul[(world_size,)](
            gathered, 2.0 * torch.eye(WIDTH), output, words.view(torch.int32), step, rank,
            world_size, ROWS, WIDTH,
        )  # fmt: skip
        for source in range(world_size):
            if not torch.all(output[source] == 2.0 * (1.0 + source + 10 * step)):
                raise AssertionError(f"rank {rank} has wrong rows of {source} in step {step}")
