"""Every device function of the shim of Triton-distributed that is one instruction: what it does."""

import torch
import triton
import triton.language as tl
import triton_dist
import triton_dist.language as dl
from triton_dist.language.extra import libshmem_device
from triton_dist.language.extra.cuda import language_extra as extra
from triton_dist.language.extra.cuda.language_extra import laneid, st, tid
from triton_dist.utils import (
    CUDA_CHECK,
    cudart,
    nvshmem_barrier_all_on_stream,
    nvshmem_create_tensor,
    nvshmem_create_tensors,
)

import interlace


@triton.jit
def threads_kernel(found):
    me, lane = tid(0), laneid()
    st(found + me, me * 1000 + lane)
    st(found + 128 + me, extra.__shfl_sync_i32(0xFFFFFFFF, me, 5))
    st(found + 256 + me, extra.__shfl_up_sync_i32(0xFFFFFFFF, me, 1))
    st(found + 384 + me, extra.__shfl_down_sync_i32(0xFFFFFFFF, me, 2))
    st(found + 512 + me, extra.__shfl_xor_sync_i32(0xFFFFFFFF, me, 3))
    st(found + 640 + me, extra.__ballot_sync(0xFFFFFFFF, (lane % 2 == 0).to(tl.int32)))
    if me == 0:
        st(found + 768, extra.ntid(0) + 10000 * tid(1) + 20000 * (extra.ntid(2) - 1))
        extra.st_b32(
            found + 769,
            extra.num_threads() + 1000 * extra.num_warps() + 10000 * extra.threads_per_warp(),
        )
        st(found + 770, extra.smid().to(tl.int32))
        later = extra.globaltimer() > 0
        st(
            found + 771,
            later.to(tl.int32)
            + (extra.globaltimer_lo() > 0).to(tl.int32)
            + extra.globaltimer_hi().to(tl.int32),
        )


def threads():
    found = torch.zeros(772, dtype=torch.int32)
    threads_kernel[(1,)](found)
    return found.tolist()


@triton.jit
def words_kernel(words, longs, count):
    me = tid(0)
    before = extra.atomic_add_per_warp(count, 2, "gpu", "relaxed")
    extra.__syncthreads()
    if laneid() == 3:
        st(words + 64 + me // 32, before)
    extra.arrive_inc(count, me, 100, "gpu")
    extra.wait_eq(count, me, 108, "gpu")
    if me == 40:
        extra.membar()
        extra.membar("gl")
        extra.__fence("acq_rel", "sys")
        a, b, c, d = extra.load_v4_u32(words)
        extra.st_v4_u32(words + 4, d, c, b, a)
        a, b, c, d = extra.load_v4_s32(words + 4)
        extra.st_v4_b32(words + 8, a + 10, b + 10, c + 10, d + 10)
        a, b, c, d = extra.load_v4_b32(words + 8, "sys", "acquire")
        extra.st_v4_b32(words + 12, a, b, c, d, "sys", "release")
        extra.st_v2_u32(words + 16, extra.ld_b32(words + 1), extra.ld_acquire(words + 2, "sys"))
        low, high = extra.load_v2_b64(longs)
        st(longs + 2, low + high)
        st(longs + 3, extra.pack_b32_v2(extra.ld(words), extra.ld(words + 3)).to(tl.int64))


def words():
    found, longs, count = (
        torch.zeros(68).int(),
        torch.tensor([5, 1 << 40, 0, 0]),
        torch.zeros(1).int(),
    )
    found[:4] = torch.tensor([1, 2, 3, 4])
    words_kernel[(1,)](found, longs, count)
    return found[:18].tolist(), sorted(found[64:].tolist()), longs.tolist(), count.item()


@triton_dist.jit
def vectors_kernel(numbers, sums, WIDTH: tl.constexpr):
    with dl.simt_exec_region() as (thread, size):
        if thread < 2:
            total = dl.zeros_vector(WIDTH, tl.float32)
            for row in range(3):
                part = dl.ld_vector(numbers + row * 2 * WIDTH + thread * WIDTH, vec_size=WIDTH)
                total = total + part.to(tl.float32) * 2
            dl.st_vector(sums + thread * WIDTH, total.to(sums.dtype.element_ty))
            pair = dl.ld_vector(numbers + thread * 2, vec_size=2)
            dl.st_vector(sums + 2 * WIDTH + thread * 2, pair - pair)
            if thread == 1:
                st(sums + 2 * WIDTH + 4, (total[0] + size).to(sums.dtype.element_ty))


def vectors():
    numbers = torch.arange(48).to(torch.bfloat16)
    sums = torch.full((21,), -1.0, dtype=torch.bfloat16)
    vectors_kernel[(1,)](numbers, sums, 8)
    return sums.tolist()


@triton.jit
def multicast_kernel(halves, floats, found):
    me, team = tid(0), libshmem_device.NVSHMEMX_TEAM_NODE
    there = libshmem_device.remote_mc_ptr(team, halves)
    of_floats = libshmem_device.remote_mc_ptr(team, floats)
    libshmem_device.barrier_block(team)
    if (me == 0) & (libshmem_device.team_my_pe(team) == 0):
        a, b, c, d = extra.multimem_ld_reduce_v4(there)
        extra.multimem_st_v4(there + 8, a, b, c, d)
        a, b, c, d = extra.multimem_ld_reduce_p_v4(there, me == 0)
        extra.multimem_st_v2(there + 16, a, b)
        extra.multimem_st_b32(there + 20, c)
        extra.multimem_st_p_b32(there + 22, d, me == 0)
        extra.multimem_st_b64(there + 24, extra.pack_b32_v2(a, b))
        e, f, g, h = extra.multimem_ld_reduce_v4(of_floats)
        extra.multimem_st_v4(of_floats + 4, e, f, g, h)
    libshmem_device.team_sync_block(team)
    if me == 0:
        st(
            found,
            libshmem_device.team_n_pes(team) * 10
            + libshmem_device.team_translate_pe(team, 1, team),
        )


def multicast():
    rank = interlace.get_rank()
    halves = nvshmem_create_tensor(32, torch.float16)
    floats = nvshmem_create_tensor(8, torch.float32)
    found = torch.zeros(1, dtype=torch.int32)
    halves.zero_()[:8], floats.zero_()[:4] = torch.arange(8) + rank, torch.arange(4) + 0.5 * rank
    nvshmem_barrier_all_on_stream()
    multicast_kernel[(1,)](halves, floats, found)
    nvshmem_barrier_all_on_stream()
    return halves[8:28].tolist(), floats[4:].tolist(), found.item()


def copies():
    """A copy to the peer by the copy engine, and a signal behind it, on a stream."""
    import nvshmem.bindings.nvshmem as host
    import nvshmem.core

    rank = interlace.get_rank()
    stream = torch.cuda.Stream()
    every = nvshmem_create_tensors((4,), torch.int32, rank, 2)
    signal = nvshmem_create_tensor(1, torch.int64).zero_()
    every[rank].copy_(torch.arange(4) + 10 * rank)
    others = nvshmem_create_tensor(8, torch.int32)
    nvshmem_barrier_all_on_stream(torch.cuda.current_stream())
    stream.wait_stream(torch.cuda.current_stream())
    kind = cudart.cudaMemcpyKind.cudaMemcpyDefault
    (error,) = cudart.cudaMemcpyAsync(
        others.data_ptr(), every[1 - rank].data_ptr(), 16, kind, stream.cuda_stream
    )
    CUDA_CHECK(error)
    host.putmem_signal_on_stream(
        others[4:].data_ptr(), every[rank].data_ptr(), 16, signal.data_ptr(), 7,
        nvshmem.core.SignalOp.SIGNAL_SET, 1 - rank, stream,
    )  # fmt: skip
    from triton_dist.utils import cuda

    equal = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    cuda.cuStreamWaitValue64(stream.cuda_stream, signal.data_ptr(), 7, equal)
    torch.cuda.current_stream().wait_stream(stream)
    return others.tolist(), host.team_n_pes(nvshmem.core.Teams.TEAM_NODE)


@triton.jit
def missing_kernel(words):
    libshmem_device.broadcast(0, words, words, 1, 0)


def missing():
    missing_kernel[(1,)](nvshmem_create_tensor(4, torch.int64))
