"""Kernels in the style of Triton-distributed: a queue between neighbours, and puts by each warp.

Queue: program 0 of rank r fills slots of rank r + 1, program 1 empties its own; a word per slot counts
turns: even, the slot is free; odd, it is full. Puts: every warp sends slices of its own to all ranks; when
those of all have arrived, one thread for each rank signals there.
"""

import torch
import triton.language as tl
import triton_dist
import triton_dist.language as dl
from triton_dist.language.extra import libshmem_device
from triton_dist.language.extra.language_extra import __syncthreads, tid
from triton_dist.utils import (
    NVSHMEM_SIGNAL_DTYPE,
    nvshmem_barrier_all_on_stream,
    nvshmem_create_tensor,
)

import interlace

BLOCK, SLOTS, BLOCKS = 32, 2, 5


@triton_dist.jit
def queue_kernel(input_ptr, output_ptr, queue_ptr, signal_ptr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    rank = dl.rank()
    to_rank = (rank + 1) % dl.num_ranks()
    if tl.program_id(0) == 0:
        for i in range(BLOCKS):
            slot, turn = i % SLOTS, i // SLOTS
            free = dl.symm_at(signal_ptr, to_rank) + slot
            token = dl.wait(free, 1, "sys", "acquire", waitValue=2 * turn)
            input_ptr = dl.consume_token(input_ptr, token)
            theirs = dl.symm_at(queue_ptr, to_rank) + slot * BLOCK
            tl.store(theirs + offsets, tl.load(input_ptr + i * BLOCK + offsets))
            __syncthreads()
            dl.notify(signal_ptr + slot, to_rank, signal=2 * turn + 1, comm_scope="intra_node")
    else:
        for i in range(BLOCKS):
            slot, turn = i % SLOTS, i // SLOTS
            token = dl.wait(signal_ptr + slot, 1, "sys", "acquire", waitValue=2 * turn + 1)
            queue_ptr = dl.consume_token(queue_ptr, token)
            tl.store(output_ptr + i * BLOCK + offsets, tl.load(queue_ptr + slot * BLOCK + offsets))
            __syncthreads()
            dl.notify(signal_ptr + slot, rank, signal=2 * turn + 2, comm_scope="intra_node")


def one_launch():
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    queue = nvshmem_create_tensor((SLOTS * BLOCK,), torch.float32)
    signal = nvshmem_create_tensor((SLOTS,), NVSHMEM_SIGNAL_DTYPE)
    signal.fill_(0)
    nvshmem_barrier_all_on_stream()
    mine = torch.arange(BLOCKS * BLOCK) + 1000.0 * rank
    output = torch.empty(BLOCKS * BLOCK)
    queue_kernel[(2,)](mine, output, queue, signal, BLOCKS, SLOTS, BLOCK)
    theirs = torch.arange(BLOCKS * BLOCK) + 1000.0 * ((rank - 1) % world_size)
    if not torch.equal(output, theirs):
        raise AssertionError(f"rank {rank} has wrong data")


@triton_dist.jit
def slices_kernel(
    source_ptr, gathered_ptr, signal_ptr, output_ptr, SLICES: tl.constexpr, SLICE: tl.constexpr
):
    rank, num_ranks = dl.rank(), dl.num_ranks()
    thread = tid(axis=0)
    for number in range(thread // 32, num_ranks * SLICES, 4):
        there = number % SLICES * SLICE
        libshmem_device.putmem_nbi_warp(
            gathered_ptr + rank * SLICES * SLICE + there,
            source_ptr + there,
            SLICE * 4,
            number // SLICES,
        )
    libshmem_device.quiet()
    __syncthreads()
    if thread < num_ranks:
        libshmem_device.signal_op(signal_ptr + rank, 1, libshmem_device.NVSHMEM_SIGNAL_SET, thread)
        libshmem_device.signal_wait_until(signal_ptr + thread, libshmem_device.NVSHMEM_CMP_EQ, 1)
    __syncthreads()
    offsets = tl.arange(0, SLICES * SLICE)
    for owner in range(num_ranks):
        here = owner * SLICES * SLICE + offsets
        tl.store(output_ptr + here, tl.load(gathered_ptr + here))


def slices():
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    source = nvshmem_create_tensor((8 * BLOCK,), torch.float32)
    gathered = nvshmem_create_tensor((world_size, 8 * BLOCK), torch.float32)
    signal = nvshmem_create_tensor((world_size,), NVSHMEM_SIGNAL_DTYPE)
    source.copy_(torch.arange(8 * BLOCK) + 1000.0 * rank)
    signal.fill_(0)
    nvshmem_barrier_all_on_stream()
    output = torch.empty(world_size, 8 * BLOCK)
    slices_kernel[(1,)](source, gathered, signal, output, 8, BLOCK)
    every = torch.arange(8 * BLOCK) + 1000.0 * torch.arange(world_size)[:, None]
    if not torch.equal(output, every):
        raise AssertionError(f"rank {rank} has wrong data")
