"""``triton_dist.language`` on a CPU: wait, notify and a peer's addresses.

Their effect on memory is the effect of the code that ``DistributedOpToLLVM.cpp`` of
ByteDance-Seed/Triton-distributed (1512a811) generates for NVIDIA's GPUs::

    wait            the lanes of every warp poll, with the given order and scope, until the words are equal
                    to the value, and meet by bar.warp.sync: all threads have acquired
    notify          thread 0 alone: membar, then a relaxed store or add. It has no barrier of the program:
                    without __syncthreads() before it the stores of other threads are not covered
      comm_scope    "gpu": membar.gl, at this rank; "intra_node": membar.sys, at the peer;
                    "inter_node" (the default): nvshmemx_signal_op, which has no membar
    consume_token   no instruction: it keeps the compiler from moving loads above the wait. The simulator
                    moves no loads, so it does not find a missing token
    vectors         in ``vectors.py``; manual shared memory and TMA are missing
"""

import triton
import triton.language as tl

from interlace_verify.shims.symmetric import my_pe, n_pes, ptx, remote_ptr
from interlace_verify.shims.triton_dist import missing
from interlace_verify.shims.triton_dist.vectors import (
    ThreadVector as vector,
    ld_vector,
    make_vector,
    simt_exec_region,
    st_vector,
    zeros_vector,
)

__all__ = ["ld_vector", "make_vector", "simt_exec_region", "st_vector", "vector", "zeros_vector"]
__getattr__ = missing.of("triton_dist.language")


@triton.jit
def rank(axis=-1):
    return my_pe()


@triton.jit
def num_ranks(axis=-1):
    return n_pes()


@triton.jit
def symm_at(ptr, rank):
    """Return the address at ``rank`` that corresponds to this rank's ``ptr``."""
    return remote_ptr(ptr, rank)


@triton.jit
def consume_token(value, token):
    """Return ``value``; the head of this file explains it."""
    return value


@triton.jit
def wait(barrierPtrs, numBarriers, scope: tl.constexpr, semantic: tl.constexpr, waitValue=1):
    """Poll ``numBarriers`` words from ``barrierPtrs`` on until each is ``waitValue``; return a token."""
    for index in range(0, numBarriers):
        _wait_for_word(barrierPtrs + index, waitValue, scope, semantic)
    return tl.full((), 1, tl.int32)


@triton.jit
def _wait_for_word(word, value, SCOPE: tl.constexpr, SEM: tl.constexpr):
    """Poll by the first lane of every warp."""
    kind: tl.constexpr = word.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    ptx(
        f"""
        {{
            .reg .pred %later;
            .reg .b{bits} %seen;
            mov.u32 $0, %laneid;
            setp.ne.u32 %later, $0, 0;
            @%later bra met;
        again:
            ld.{SEM}.{SCOPE}.global.b{bits} %seen, [$1];
            setp.ne.u{bits} %later, %seen, $2;
            @%later bra again;
        met:
            bar.warp.sync 0xffffffff;
        }}
        """,
        [word, tl.full((), value, kind)],
    )


@triton.jit
def notify(
    ptr, rank, signal=1, sig_op: tl.constexpr = "set", comm_scope: tl.constexpr = "inter_node"
):
    """Set the word ``ptr`` of ``rank``, or add to it, as ``comm_scope`` says."""
    tl.static_assert(sig_op == "set" or sig_op == "add", f"sig_op must be set or add, got {sig_op}")
    if comm_scope == "inter_node":
        _signal(remote_ptr(ptr, rank), signal, "", "sys", sig_op)
    elif comm_scope == "intra_node":
        _signal(remote_ptr(ptr, rank), signal, "membar.sys;", "sys", sig_op)
    else:
        tl.static_assert(
            comm_scope == "gpu",
            f"comm_scope must be gpu, intra_node or inter_node, got {comm_scope}",
        )
        _signal(ptr, signal, "membar.gl;", "gpu", sig_op)


@triton.jit
def _signal(word, value, FENCE: tl.constexpr, SCOPE: tl.constexpr, OPERATION: tl.constexpr):
    """Signal by thread 0."""
    kind: tl.constexpr = word.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    change: tl.constexpr = "st" if OPERATION == "set" else "red"
    suffix: tl.constexpr = f"u{bits}" if OPERATION == "set" else f"add.u{bits}"
    ptx(
        f"""
        {{
            .reg .pred %other;
            mov.u32 $0, %tid.x;
            setp.ne.u32 %other, $0, 0;
            @%other bra over;
            {FENCE}
            {change}.relaxed.{SCOPE}.global.{suffix} [$1], $2;
        over:
        }}
        """,
        [word, tl.full((), value, kind)],
    )
