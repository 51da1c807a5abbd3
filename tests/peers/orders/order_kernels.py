"""Kernels that need a fence of one kind; each is right with it, and a race without."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from multimem_kernels import add_up, meet, send_to_all
from triton_dist.language.extra import libshmem_device
from triton_dist.language.extra.language_extra import tid
from triton_dist.utils import nvshmem_create_tensor

COUNT = 32


@triton.jit
def fence_addresses(FENCED: tl.constexpr):
    if FENCED:
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def to_all_kernel(multicast, own, counts, out, rank, WORLD: tl.constexpr, FENCED: tl.constexpr,
                  COUNT: tl.constexpr):  # fmt: skip
    """Store by the multicast address, load by the ordinary one."""
    offsets = tl.arange(0, COUNT)
    addresses = multicast + 4 * (rank * COUNT + offsets).to(tl.int64)
    send_to_all(addresses, tl.full([COUNT], rank + 1.0, tl.float32))
    if FENCED == "by one thread":
        tl.debug_barrier()
        if tid(0) == 0:
            fence_addresses(True)
    else:
        fence_addresses(FENCED)
    meet(counts, 1, rank, WORLD)
    tl.debug_barrier()
    for source in range(WORLD):
        here = source * COUNT + offsets
        tl.store(out + here, tl.load(own + here))


@triton.jit
def from_all_kernel(multicast, own, counts, out, rank, WORLD: tl.constexpr, FENCED: tl.constexpr,
                    COUNT: tl.constexpr):  # fmt: skip
    """Store by the ordinary address, load by the multicast one."""
    offsets = tl.arange(0, COUNT)
    tl.store(own + offsets, tl.full([COUNT], rank + 1.0, tl.float32))
    meet(counts, 1, rank, WORLD)
    tl.debug_barrier()
    fence_addresses(FENCED)
    tl.store(out + offsets, add_up(multicast + 4 * offsets.to(tl.int64)))


def by_switch(kernel, fenced):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = symm_mem.empty(world_size * COUNT)
    counts = symm_mem.empty(world_size, dtype=torch.int32)
    counts.zero_()
    handle, words = (symm_mem.rendezvous(each, dist.group.WORLD) for each in (tensor, counts))
    handle.barrier()
    out = torch.zeros(world_size * COUNT)
    table = words.buffer_ptrs_dev
    kernel[(1,)](handle.multicast_ptr, tensor, table, out, rank, world_size, fenced, COUNT,
                 num_warps=1)  # fmt: skip
    assert out.min() > 0 or kernel is from_all_kernel


def to_all(fenced):
    by_switch(to_all_kernel, fenced)


def from_all(fenced):
    by_switch(from_all_kernel, fenced)


@triton.jit
def puts_kernel(inbox, source, signal, out, KIND: tl.constexpr, FENCED: tl.constexpr,
                COUNT: tl.constexpr):  # fmt: skip
    """Two puts to the next rank, of which the second one signals: it does not stand for the first."""
    pe = (libshmem_device.my_pe() + 1) % libshmem_device.n_pes()
    if KIND == "int_p":
        if tid(0) == 0:
            libshmem_device.int_p(inbox.to(tl.pointer_type(tl.int32)), 7, pe)
    else:
        libshmem_device.putmem_nbi_block(inbox, source, 4 if KIND == "a word" else 4 * COUNT, pe)
    if FENCED:
        if KIND == "one thread fences":
            if tid(0) == 0:
                libshmem_device.fence()
        else:
            libshmem_device.fence()
    libshmem_device.putmem_signal_nbi_block(
        inbox + COUNT, source + COUNT, 4 * COUNT, signal, 1, 9, pe
    )
    libshmem_device.signal_wait_until(signal, 0, 1)
    tl.debug_barrier()
    offsets = tl.arange(0, COUNT)
    tl.store(out + COUNT + offsets, tl.load(inbox + COUNT + offsets))
    tl.store(out + offsets, tl.load(inbox + offsets))


@triton.jit
def meeting_kernel(inbox, source, signal, out, KIND: tl.constexpr, FENCED: tl.constexpr,
                   COUNT: tl.constexpr):  # fmt: skip
    """A put, and a meeting of all ranks, which completes puts or does not."""
    pe = (libshmem_device.my_pe() + 1) % libshmem_device.n_pes()
    libshmem_device.putmem_block(inbox, source, 4 * COUNT, pe)
    if FENCED:
        libshmem_device.barrier_all()
    else:
        libshmem_device.sync_all()
    offsets = tl.arange(0, COUNT)
    tl.store(out + offsets, tl.load(inbox + offsets))


def puts(kind, fenced):
    inbox, source = (nvshmem_create_tensor((2 * COUNT,), torch.float32) for _ in range(2))
    signal = nvshmem_create_tensor((1,), torch.int64)
    inbox.zero_(), source.fill_(1), signal.zero_()
    dist.barrier()
    kernel = meeting_kernel if kind == "a meeting" else puts_kernel
    kernel[(1,)](inbox, source, signal, torch.empty(2 * COUNT), kind, fenced, COUNT, num_warps=1)
