"""``triton_dist.language`` on a CPU: wait, notify and a peer's addresses.

What they do to memory is what ``DistributedOpToLLVM.cpp`` of ByteDance-Seed/Triton-distributed (1512a811)
makes of them for NVIDIA's GPUs::

    wait            the lanes of every warp poll, with the order and scope that were given, until the words
                    are equal to the value, and meet by bar.warp.sync: all threads have acquired
    notify          thread 0 alone: membar, then a relaxed store or add. No barrier of the program: without
                    __syncthreads() before it the stores of other threads are not covered
      comm_scope    "gpu": membar.gl, at this rank; "intra_node": membar.sys, at the peer;
                    "inter_node" (the default): nvshmemx_signal_op, which has no membar
    consume_token   nothing that runs: it keeps the compiler from moving loads above the wait. The
                    simulator moves none, so that a token is missing is not found
"""

from typing import Any

import triton
import triton.language as tl

from interlace.verify.shims import nvshmem
from interlace.verify.shims.symmetric import my_pe, n_pes, number, remote_ptr


def rank(axis: Any = -1) -> int:
    """The rank that runs this program."""
    return my_pe()


def num_ranks(axis: Any = -1) -> int:
    """How many ranks there are."""
    return n_pes()


def symm_at(ptr: Any, rank: Any) -> Any:
    """The address at ``rank`` of what this rank has at ``ptr``."""
    return remote_ptr(ptr, rank)


def consume_token(value: Any, token: Any) -> Any:
    """``value``: see the head of this file."""
    return value


@triton.jit
def wait(
    barrierPtrs,
    numBarriers,
    scope: tl.constexpr,
    semantic: tl.constexpr,
    waitValue=1,
):
    """Poll ``numBarriers`` words from ``barrierPtrs`` on until each is ``waitValue``; a token."""
    for index in range(0, numBarriers):
        word = barrierPtrs + index
        seen = tl.atomic_add(word, 0, sem=semantic, scope=scope)
        while seen != waitValue:
            seen = tl.atomic_add(word, 0, sem=semantic, scope=scope)
    return tl.full((), 1, tl.int32)


def notify(
    ptr: Any,
    rank: Any,
    signal: Any = 1,
    sig_op: str = "set",
    comm_scope: str = "inter_node",
) -> None:
    """Set the word ``ptr`` of ``rank``, or add to it, as ``comm_scope`` says."""
    operations = {"set": nvshmem.NVSHMEM_SIGNAL_SET, "add": nvshmem.NVSHMEM_SIGNAL_ADD}
    if sig_op not in operations:
        raise ValueError(f"sig_op must be one of {', '.join(operations)}, got {sig_op!r}")
    value = tl.full((), number(signal), tl.int64)
    if comm_scope == "inter_node":
        nvshmem.signal_op(ptr, value, operations[sig_op], rank)
    elif comm_scope == "intra_node":
        _signal(remote_ptr(ptr, rank), value, "sys", sig_op)
    elif comm_scope == "gpu":
        _signal(ptr, value, "gpu", sig_op)
    else:
        raise ValueError(f"comm_scope must be gpu, intra_node or inter_node, got {comm_scope!r}")


@triton.jit
def _signal(word, value, SCOPE: tl.constexpr, OPERATION: tl.constexpr):
    tl.inline_asm_elementwise(
        f"fence.acq_rel.{SCOPE}; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    # an atomic of tl's is one thread's, too
    if OPERATION == "set":
        tl.atomic_xchg(word, value, sem="relaxed", scope=SCOPE)
    else:
        tl.atomic_add(word, value, sem="relaxed", scope=SCOPE)
