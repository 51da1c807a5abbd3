"""Kernels that call functions of the shims, one after the other: what they do, not what they order."""

import iris
import torch
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem
import triton
import triton.language as tl
import triton_dist.language as dl
from iris.mem.triton.context import Context
from triton_dist.language.extra import libshmem_device
from triton_dist.language.extra.language_extra import atomic_add, atomic_cas, ld, st, tid
from triton_dist.utils import nvshmem_create_tensor


@triton.jit
def iris_kernel(mine, theirs, counts, bases, rank, peer, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    iris.get(mine + offsets, theirs + offsets, rank, peer, bases)
    iris.put(theirs + offsets, theirs + BLOCK + offsets, rank, rank, bases, mask=offsets < 2)
    iris.copy(mine + offsets, theirs + 2 * BLOCK + offsets, peer, rank, rank, bases)
    for _ in range(3):
        iris.atomic_add(counts, 1, rank, peer, bases, scope="sys")
    iris.atomic_max(counts + 1, 5 + rank, rank, peer, bases, scope="sys")
    iris.atomic_cas(counts + 2, 0, 7 + rank, rank, peer, bases, scope="sys")


def by_iris():
    ctx = iris.iris()
    rank = ctx.get_rank()
    mine, theirs = ctx.full((4,), 1.0 + rank), ctx.zeros(12)
    counts = ctx.zeros(3, dtype=torch.int32)
    ctx.barrier()
    iris_kernel[(1,)](mine, theirs, counts, ctx.get_heap_bases(), rank, 1 - rank, 4)
    ctx.barrier()
    return theirs.tolist(), counts.tolist()


@triton.jit
def context_kernel(context, mine, theirs, counts, rank, peer, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    ctx = Context.initialize(context, rank, 2)
    ctx.store(theirs + offsets, ctx.load(mine + offsets, from_rank=peer), to_rank=peer)
    ctx.put(mine + offsets, theirs + BLOCK + offsets, peer, mask=offsets < 2)
    ctx.atomic_add(counts, 3, to_rank=peer, sem="relaxed", scope="sys")
    ctx.atomic_cas(counts + 1, 0, 7 + rank, peer, scope="sys")


def by_context():
    ctx = iris.iris()
    rank = ctx.get_rank()
    mine, theirs = ctx.full((4,), 1.0 + rank), ctx.zeros(8)
    counts = ctx.zeros(2, dtype=torch.int32)
    ctx.barrier()
    context_kernel[(1,)](ctx.get_device_context(), mine, theirs, counts, rank, 1 - rank, 4)
    ctx.barrier()
    return theirs.tolist(), counts.tolist()


@triton.jit
def by_threads_kernel(numbers, counts, FROM: tl.constexpr):
    """Threads 37 and 38 put a word each, and warp 3 a few; each of them, and nobody for them."""
    pe = 1 - libshmem_device.my_pe()
    thread = tid(0)
    if (thread == 37) | (thread == 38):
        here = thread - 37
        libshmem_device.int_p(numbers + here, 5 + thread, pe)
        libshmem_device.putmem_signal(
            numbers + 2 + here, numbers + FROM + here, 4, counts, 1, 10, pe
        )
    if thread // 32 == 3:
        libshmem_device.putmem_signal_nbi_warp(numbers + 4, numbers + FROM, 160, counts, 1, 10, pe)
    libshmem_device.signal_wait_until(counts, 0, 3)
    if thread // 32 == 2:
        libshmem_device.getmem_warp(numbers + 2 * FROM, numbers + FROM, 7, pe)
    libshmem_device.barrier_all()


def by_threads():
    numbers = symm_mem.empty(160, dtype=torch.int32)
    handle = symm_mem.rendezvous(numbers, "0")
    counts = nvshmem_create_tensor((1,), torch.int64)
    counts.zero_()
    numbers.zero_()[64:104] = torch.arange(40) + 300 * (1 + handle.rank)
    handle.barrier()
    by_threads_kernel[(1,)](numbers, counts, 64)
    return numbers[:44].tolist(), numbers[128:131].tolist(), counts.tolist()


@triton.jit
def nvshmem_kernel(numbers, counts, BLOCK: tl.constexpr):
    pe = 1 - libshmem_device.my_pe()
    libshmem_device.putmem(numbers + BLOCK, numbers, 4 * BLOCK, pe)
    libshmem_device.int_p(numbers + 2 * BLOCK, 9 + pe, pe)
    if tid(0) == 0:
        libshmem_device.signal_op(counts, 2, 10, pe)
    libshmem_device.signal_op(counts, 3, libshmem_device.NVSHMEM_SIGNAL_ADD, pe)  # all threads
    libshmem_device.signal_wait_until(counts, 5, 2 + 3 * 128)
    libshmem_device.barrier_all()
    nvshmem.get(numbers + 3 * BLOCK, numbers + BLOCK, BLOCK, pe)
    nvshmem.putmem_signal_block(numbers + 4 * BLOCK, numbers, 4 * BLOCK, counts + 1, 1, 9, pe)
    nvshmem.signal_wait_until(counts + 1, 0, 1)


def by_nvshmem():
    numbers = symm_mem.empty(20, dtype=torch.int32)
    handle = symm_mem.rendezvous(numbers, "0")
    counts = nvshmem_create_tensor((2,), torch.int64)
    counts.zero_()
    numbers.zero_()[:4] = torch.arange(4, dtype=torch.int32) + 10 * handle.rank
    handle.barrier()
    nvshmem_kernel[(1,)](numbers, counts, 4)
    handle.barrier()
    return numbers.tolist(), counts.tolist()


@triton.jit
def float_words_kernel(words):
    if tid(0) == 3:
        st(words, 2.5, "sys", "release")
        atomic_add(words, 1.5, "sys", "relaxed")
        st(words + 1, ld(words, "sys", "acquire") * 2)


def by_float_words():
    words = torch.zeros(2)
    float_words_kernel[(1,)](words)
    return words.tolist()


@triton.jit
def words_kernel(words, seen):
    peer = (dl.rank() + 1) % dl.num_ranks()
    dl.notify(words, peer, signal=3)
    dl.notify(words + 1, dl.rank(), signal=4, comm_scope="gpu")
    dl.notify(words + 2, peer, signal=2, sig_op="add", comm_scope="intra_node")
    dl.wait(words + 1, 1, "sys", "acquire", waitValue=4)
    dl.wait(words, 1, "sys", "acquire", waitValue=3)
    dl.wait(words + 2, 1, "sys", "acquire", waitValue=2)
    mine = dl.symm_at(
        words + tid(0), dl.rank()
    )  # beyond the end for most threads, which do not use it
    if tid(0) == 0:
        st(mine + 3, 1 + atomic_cas(words + 2, 2, 6, "sys", "acq_rel"), semantic="release")
        tl.store(seen, ld(words + 3, "gpu", "acquire") + ld(mine + 2))


def by_words():
    words = nvshmem_create_tensor(4, torch.int64).zero_()
    symm_mem.rendezvous(words, "0").barrier()
    seen = torch.zeros(1, dtype=torch.int64)
    words_kernel[(1,)](words, seen)
    return words.tolist(), seen.item()


@triton.jit
def wrong_kernel(words, pe, sig_op):
    libshmem_device.signal_op(words, 1, sig_op, pe)


def wrong_peer():
    wrong_kernel[(1,)](nvshmem_create_tensor(4, torch.int64), 2, 9)


def wrong_memory():
    wrong_kernel[(1,)](torch.zeros(4, dtype=torch.int64), 0, 9)


def wrong_operation():
    wrong_kernel[(1,)](nvshmem_create_tensor(4, torch.int64), 0, 0)


def heap_used_up():
    iris.iris(1 << 12).empty(1 << 12)
