"""NVSHMEM's device functions as modelled primitives, by the names of Triton-distributed's libshmem_device.

What each does to memory follows NVSHMEM's page "Memory Ordering" (docs.nvidia.com/nvshmem) and, where that
leaves a choice, the code for peers in one node (NVIDIA/nvshmem at 2d7d25f,
``src/include/non_abi/device/common/nvshmemi_common_device.cuh``)::

    putmem*            stores at the peer, in no order with what follows, signals neither
    putmem_signal*     stores, then the signal: who waits for the signal sees the data
    signal_op          a relaxed store or add of system scope: orders nothing by itself
    fence              orders this thread's stores, puts and signals, to each peer
    quiet              as fence, to all peers, and they have arrived
    signal_wait_until  acquires: what was ordered before the signal can be loaded
    barrier_all*       quiet, and all ranks meet
    ..._block          all threads call it, meet, act, and meet again (nvshmemi_threadgroup_sync)
    ... without suffix one thread calls it; others' stores are not covered without a barrier

What is not modelled: that a ``_nbi`` put may read its source, and a ``_nbi`` get write its destination,
up to the next ``quiet``; here both are done at once. A put with a signal orders, besides its data, what
the program stored before; on a network it does not. A function without suffix acts once here, as thread 0;
on a GPU it acts in every thread that is not kept from it, so a ``signal_op`` that adds without an ``if`` on
the thread's number adds once here and 128 times there.
"""

from typing import Any

import triton
import triton.language as tl

from interlace.verify.shims.symmetric import meet, my_pe, n_pes, number, remote_ptr

__all__ = ["my_pe", "n_pes", "remote_ptr"]

NVSHMEM_CMP_EQ, NVSHMEM_CMP_NE, NVSHMEM_CMP_GT = 0, 1, 2
NVSHMEM_CMP_LE, NVSHMEM_CMP_LT, NVSHMEM_CMP_GE = 3, 4, 5
NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD = 9, 10

_BLOCK = tl.constexpr(128)
_OPERATIONS = {NVSHMEM_SIGNAL_SET: "set", NVSHMEM_SIGNAL_ADD: "add"}


def word_pointer(address: Any, kind: Any) -> Any:
    """``address``, a pointer of any type or an integer, as a pointer to words of type ``kind``."""
    return tl.cast(address, tl.pointer_type(kind), bitcast=True)


def _copy(to: Any, source: Any, nbytes: Any, *, by_block: bool) -> None:
    """Words of 4 bytes where all is a multiple of that, else bytes: what a race names is then readable."""
    count = number(nbytes)
    if count < 0:
        raise ValueError(f"bytes must not be negative, got {count} on rank {my_pe()}")
    addresses = [int(each.handle.data.ravel()[0]) for each in (to, source)]
    words = not any(each % 4 for each in (*addresses, count))
    kind = tl.int32 if words else tl.uint8
    copy = _copy_by_block if by_block else _copy_by_thread
    copy(word_pointer(to, kind), word_pointer(source, kind), count // 4 if words else count)


@triton.jit
def _copy_by_block(to, source, count):
    for first in range(0, count, _BLOCK):
        offsets = first + tl.arange(0, _BLOCK)
        mask = offsets < count
        tl.store(to + offsets, tl.load(source + offsets, mask=mask), mask=mask)


@triton.jit
def _copy_by_thread(to, source, count):
    for index in range(0, count):
        tl.store(to + index, tl.load(source + index))


@triton.jit
def fence():
    """Order this thread's stores, puts and signals before its later ones (``__threadfence_system``)."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


quiet = quiet_pe = fence


def putmem_block(dest: Any, source: Any, bytes: Any, pe: Any) -> None:
    """Copy ``bytes`` of the own ``source`` to ``dest`` of rank ``pe``; orders nothing that follows."""
    tl.debug_barrier()
    _copy(remote_ptr(dest, pe), source, bytes, by_block=True)
    tl.debug_barrier()


def putmem(dest: Any, source: Any, bytes: Any, pe: Any, qp_id: Any = 0) -> None:
    """As :func:`putmem_block`, by one thread."""
    _copy(remote_ptr(dest, pe), source, bytes, by_block=False)


putmem_nbi_block, putmem_nbi = putmem_block, putmem
putmem_warp = putmem_nbi_warp = putmem


def getmem_block(dest: Any, source: Any, bytes: Any, pe: Any) -> None:
    """Copy ``bytes`` of ``source`` of rank ``pe`` to the own ``dest``. Waits for no signal."""
    tl.debug_barrier()
    _copy(dest, remote_ptr(source, pe), bytes, by_block=True)
    tl.debug_barrier()


def getmem(dest: Any, source: Any, bytes: Any, pe: Any) -> None:
    """As :func:`getmem_block`, by one thread."""
    _copy(dest, remote_ptr(source, pe), bytes, by_block=False)


getmem_nbi_block, getmem_nbi = getmem_block, getmem
getmem_warp = getmem_nbi_warp = getmem


def int_p(dest: Any, value: Any, pe: Any, qp_id: Any = 0) -> None:
    """Store one int32 at ``dest`` of rank ``pe``; a put, and as unordered."""
    tl.store(word_pointer(remote_ptr(dest, pe), tl.int32), value)


def signal_op(sig_addr: Any, signal: Any, sig_op: Any, pe: Any) -> None:
    """Set the word ``sig_addr`` of rank ``pe``, or add to it. Relaxed: a fence comes before, or a race."""
    operation = _OPERATIONS.get(number(sig_op))
    if operation is None:
        raise ValueError(
            f"sig_op must be NVSHMEM_SIGNAL_SET ({NVSHMEM_SIGNAL_SET}) or NVSHMEM_SIGNAL_ADD "
            f"({NVSHMEM_SIGNAL_ADD}), got {number(sig_op)} on rank {my_pe()}"
        )
    word = remote_ptr(word_pointer(sig_addr, tl.int64), pe)
    change = tl.atomic_xchg if operation == "set" else tl.atomic_add
    change(word, tl.full((), number(signal), tl.int64), sem="relaxed", scope="sys")


def putmem_signal_block(
    dest: Any, source: Any, bytes: Any, sig_addr: Any, signal: Any, sig_op: Any, pe: Any
) -> None:
    """Copy to rank ``pe``, then signal there: who waits for the signal sees the data."""
    putmem_block(dest, source, bytes, pe)
    fence()
    signal_op(sig_addr, signal, sig_op, pe)


def putmem_signal(
    dest: Any, source: Any, bytes: Any, sig_addr: Any, signal: Any, sig_op: Any, pe: Any
) -> None:
    """As :func:`putmem_signal_block`, by one thread."""
    putmem(dest, source, bytes, pe)
    fence()
    signal_op(sig_addr, signal, sig_op, pe)


putmem_signal_nbi_block, putmem_signal_nbi = putmem_signal_block, putmem_signal
putmem_signal_warp = putmem_signal_nbi_warp = putmem_signal


@triton.jit
def compares(seen, cmp, value):
    """Whether ``seen`` stands to ``value`` as NVSHMEM's comparison ``cmp`` says."""
    return (
        ((cmp == 0) & (seen == value))
        | ((cmp == 1) & (seen != value))
        | ((cmp == 2) & (seen > value))
        | ((cmp == 3) & (seen <= value))
        | ((cmp == 4) & (seen < value))
        | ((cmp == 5) & (seen >= value))
    )


@triton.jit
def wait_for_word(word, cmp, value):
    """Poll the own ``word`` with acquire until it compares; the value that was seen."""
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while not compares(seen, cmp, value):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    return seen


def signal_wait_until(sig_addr: Any, cmp_: Any, cmp_val: Any) -> Any:
    """Wait until the own signal compares; what was ordered before it can be loaded then."""
    comparison = number(cmp_)
    if not NVSHMEM_CMP_EQ <= comparison <= NVSHMEM_CMP_GE:
        raise ValueError(
            f"cmp_ must be an NVSHMEM_CMP_*, 0 to 5, got {comparison} on rank {my_pe()}"
        )
    return wait_for_word(word_pointer(sig_addr, tl.int64), comparison, number(cmp_val))


def barrier_all() -> None:
    """``quiet``, and all ranks meet: one program of each calls it."""
    tl.debug_barrier()
    fence()
    meet()
    tl.debug_barrier()


barrier_all_block = barrier_all_warp = barrier_all
sync_all = sync_all_block = sync_all_warp = barrier_all
