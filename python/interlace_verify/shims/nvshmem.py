"""NVSHMEM's device functions as modelled primitives, named as in Triton-distributed's libshmem_device.

Their effects on memory follow NVSHMEM's page "Memory Ordering" (docs.nvidia.com/nvshmem). Where the page
leaves a choice, they follow the code for peers in one node (NVIDIA/nvshmem at 2d7d25f,
``src/include/non_abi/device/common/nvshmemi_common_device.cuh``)::

    putmem*            stores at the peer, not ordered with later accesses or signals; a store of one word
                       is relaxed, as it may be a flag that a peer polls
    putmem_signal*     stores, then the signal: a wait for the signal sees the data
    signal_op          a relaxed store or add of system scope: orders nothing by itself
    fence              orders this thread's stores, puts and signals, to each peer
    quiet              as fence, to all peers, and all have arrived: so other threads' signals after a
                       barrier come after them, too
    signal_wait_until  acquires: all that was ordered before the signal can be loaded
    barrier_all*       quiet, and all ranks meet
    sync_all*          all ranks meet
    ..._block, _warp   all threads call it, meet, act, and meet again (nvshmemi_threadgroup_sync)
    ... without suffix each thread that calls it acts; other threads' stores need a barrier to be covered

Not modelled: a ``_nbi`` put may read its source, and a ``_nbi`` get write its destination, up to the next
``quiet``; here both are done at once. A put with a signal orders its data and the program's earlier stores,
but not the program's earlier puts: they need a fence.

Every thread that comes to a function without suffix executes it: an adding ``signal_op`` without an ``if``
on the thread's number adds once for each thread.
"""

from collections.abc import Callable

import triton
import triton.language as tl

import interlace
from interlace.symmetric_memory import functions
from interlace_verify.ptx.calls import FUNCTIONS, TOGETHER
from interlace_verify.ptx.special import Threads
from interlace_verify.shims.symmetric import my_pe, n_pes, ptx, remote_ptr, run_ptx

__all__ = ["my_pe", "n_pes", "remote_ptr"]

NVSHMEM_CMP_EQ, NVSHMEM_CMP_NE, NVSHMEM_CMP_GT = map(tl.constexpr, (0, 1, 2))
NVSHMEM_CMP_LE, NVSHMEM_CMP_LT, NVSHMEM_CMP_GE = map(tl.constexpr, (3, 4, 5))
NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD = tl.constexpr(9), tl.constexpr(10)
NVSHMEM_TEAM_WORLD, NVSHMEM_TEAM_SHARED, NVSHMEMX_TEAM_NODE = map(tl.constexpr, (0, 1, 2))

_BLOCK = tl.constexpr(128)


@triton.jit
def address_of(pointer):
    return pointer.to(tl.int64, bitcast=True)


@triton.jit
def _put_word(to, source, KIND: tl.constexpr):
    value = tl.load(source.to(tl.pointer_type(KIND)))
    tl.atomic_xchg(to.to(tl.pointer_type(KIND)), value, sem="relaxed", scope="sys")


@triton.jit
def _copy_by_block(to, source, nbytes):
    to, source = address_of(to), address_of(source)
    if nbytes == 4 and (to | source) % 4 == 0:
        _put_word(to, source, tl.int32)
    elif nbytes == 8 and (to | source) % 8 == 0:
        _put_word(to, source, tl.int64)
    elif (to | source | nbytes) % 4 == 0:  # 4-byte words give clearer names in a race
        words = to.to(tl.pointer_type(tl.int32)), source.to(tl.pointer_type(tl.int32))
        _elements_by_block(words[0], words[1], nbytes // 4)
    else:
        parts = to.to(tl.pointer_type(tl.int8)), source.to(tl.pointer_type(tl.int8))
        _elements_by_block(parts[0], parts[1], nbytes)


@triton.jit
def _elements_by_block(to, source, count):
    for first in range(0, count, _BLOCK):
        offsets = first + tl.arange(0, _BLOCK)
        mask = offsets < count
        tl.store(to + offsets, tl.load(source + offsets, mask=mask), mask=mask)


@triton.jit
def _copy_by_threads(to, source, nbytes, first, threads):
    """Copy by each calling thread: from its ``first`` word on, every word of ``threads`` together."""
    to, source = address_of(to), address_of(source)
    if nbytes == 4 and (to | source) % 4 == 0:
        _words_by_threads(to, source, nbytes, first, threads, 4, ".relaxed.sys")
    elif nbytes == 8 and (to | source) % 8 == 0:
        _words_by_threads(to, source, nbytes, first, threads, 8, ".relaxed.sys")
    elif (to | source | nbytes) % 4 == 0:
        _words_by_threads(to, source, nbytes, first, threads, 4, "")
    else:
        _words_by_threads(to, source, nbytes, first, threads, 1, "")


@triton.jit
def _words_by_threads(to, source, nbytes, first, threads, SIZE: tl.constexpr, ORDER: tl.constexpr):
    # not tl.store, because thread 0 alone stores a scalar
    nbytes_and_start = tl.full((), nbytes, tl.int64), tl.full((), first * SIZE, tl.int64)
    run_ptx(
        f"""
        {{
            .reg .pred %over;
            .reg .b64 %at, %here;
            .reg .b{max(32, 8 * SIZE)} %word;
            mov.u64 %at, $4;
        MORE:
            setp.ge.s64 %over, %at, $3;
            @%over bra OVER;
            add.s64 %here, $2, %at;
            ld.global.b{8 * SIZE} %word, [%here];
            add.s64 %here, $1, %at;
            st{ORDER}.global.b{8 * SIZE} [%here], %word;
            add.s64 %at, %at, $5;
            bra MORE;
        OVER:
        }}
        """,
        (
            to,
            source,
            nbytes_and_start[0],
            nbytes_and_start[1],
            tl.full((), threads * SIZE, tl.int64),
        ),
    )


@triton.jit
def _sync_warp():
    run_ptx("bar.warp.sync 0xffffffff;")


@triton.jit
def _thread():
    return ptx("mov.u32 $0, %tid.x;", is_pure=True)


@triton.jit
def _put_begins():
    run_ptx("call nvshmem_put_begins, ();")


@triton.jit
def _put_ends():
    run_ptx("call nvshmem_put_ends, ();")


@triton.jit
def _order_put():
    """Order the data of a put before its signal, but no other puts."""
    run_ptx("call nvshmem_put_fence, ();")


@triton.jit
def fence():
    """Order this thread's stores, puts and signals before its later ones (``__threadfence_system``)."""
    run_ptx("fence.acq_rel.sys;")


@triton.jit
def quiet():
    """As :func:`fence`, and all have arrived. Other threads' signals after a barrier also cover them."""
    fence()
    run_ptx("call nvshmem_quiet, ();")


quiet_pe = quiet


@triton.jit
def putmem_block(dest, source, bytes, pe):
    """Copy ``bytes`` of the local ``source`` to ``dest`` of rank ``pe``. Orders no later access."""
    _put_begins()
    _store_by_block(dest, source, bytes, pe)
    _put_ends()


@triton.jit
def _store_by_block(dest, source, bytes, pe):
    tl.debug_barrier()
    _copy_by_block(remote_ptr(dest, pe), source, bytes)
    tl.debug_barrier()


@triton.jit
def putmem(dest, source, bytes, pe, qp_id=0):
    _put_begins()
    _copy_by_threads(remote_ptr(dest, pe), source, bytes, 0, 1)
    _put_ends()


@triton.jit
def putmem_warp(dest, source, bytes, pe):
    _put_begins()
    _store_by_warp(dest, source, bytes, pe)
    _put_ends()


@triton.jit
def _store_by_warp(dest, source, bytes, pe):
    _sync_warp()
    _copy_by_threads(remote_ptr(dest, pe), source, bytes, _thread() % 32, 32)
    _sync_warp()


putmem_nbi_block, putmem_nbi, putmem_nbi_warp = putmem_block, putmem, putmem_warp


@triton.jit
def getmem_block(dest, source, bytes, pe):
    """Copy ``bytes`` of ``source`` of rank ``pe`` to the local ``dest``. Does not wait for a signal."""
    tl.debug_barrier()
    _copy_by_block(dest, remote_ptr(source, pe), bytes)
    tl.debug_barrier()


@triton.jit
def getmem(dest, source, bytes, pe):
    _copy_by_threads(dest, remote_ptr(source, pe), bytes, 0, 1)


@triton.jit
def getmem_warp(dest, source, bytes, pe):
    _sync_warp()
    _copy_by_threads(dest, remote_ptr(source, pe), bytes, _thread() % 32, 32)
    _sync_warp()


getmem_nbi_block, getmem_nbi, getmem_nbi_warp = getmem_block, getmem, getmem_warp


@triton.jit
def int_p(dest, value, pe, qp_id=0):
    """Store one int32 at ``dest`` of rank ``pe``. It is a put, and not ordered either."""
    _put_begins()
    operands = address_of(remote_ptr(dest, pe)), tl.full((), value, tl.int32)
    run_ptx("st.relaxed.sys.global.b32 [$1], $2;", operands)
    _put_ends()


@triton.jit
def signal_op(sig_addr, signal, sig_op, pe):
    """Set the word ``sig_addr`` of rank ``pe``, or add to it. Relaxed, so it needs a fence before it."""
    operands = address_of(remote_ptr(sig_addr, pe)), tl.full((), signal, tl.int64)
    ptx(
        """
        {
            .reg .pred %add;
            call ($0), nvshmem_is_add, ($3);
            setp.ne.u32 %add, $0, 0;
            @%add red.relaxed.sys.global.add.u64 [$1], $2;
            @!%add st.relaxed.sys.global.u64 [$1], $2;
        }
        """,
        (operands[0], operands[1], tl.full((), sig_op, tl.int32)),
    )


def _is_add(operation: int) -> int:
    if operation not in (NVSHMEM_SIGNAL_SET.value, NVSHMEM_SIGNAL_ADD.value):
        raise ValueError(
            f"sig_op must be NVSHMEM_SIGNAL_SET (9) or NVSHMEM_SIGNAL_ADD (10), got {operation} on rank "
            f"{interlace.get_rank()}"
        )
    return int(operation == NVSHMEM_SIGNAL_ADD.value)


@triton.jit
def putmem_signal_block(dest, source, bytes, sig_addr, signal, sig_op, pe):
    """Copy to rank ``pe``, then one thread signals there. A wait for the signal sees the data."""
    _store_by_block(dest, source, bytes, pe)
    _order_put()
    if _thread() == 0:
        signal_op(sig_addr, signal, sig_op, pe)


@triton.jit
def putmem_signal(dest, source, bytes, sig_addr, signal, sig_op, pe):
    _copy_by_threads(remote_ptr(dest, pe), source, bytes, 0, 1)
    _order_put()
    signal_op(sig_addr, signal, sig_op, pe)


@triton.jit
def putmem_signal_warp(dest, source, bytes, sig_addr, signal, sig_op, pe):
    _store_by_warp(dest, source, bytes, pe)
    _order_put()
    if _thread() % 32 == 0:
        signal_op(sig_addr, signal, sig_op, pe)


putmem_signal_nbi_block, putmem_signal_nbi = putmem_signal_block, putmem_signal
putmem_signal_nbi_warp = putmem_signal_warp


@triton.jit
def compares(seen, cmp, value):
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
    """Poll the local ``word`` (32 or 64 bits) with acquire until it compares; return the value read."""
    run_ptx("call nvshmem_comparison, ($1);", [tl.full((), cmp, tl.int32)])
    seen = acquired(word)
    while not compares(seen, cmp, value):
        seen = acquired(word)
    return seen


@triton.jit
def acquired(word):
    """Return the value that each thread reads from ``word``, with acquire and scope sys."""
    kind: tl.constexpr = word.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    return ptx(f"ld.acquire.sys.global.b{bits} $0, [$1];", [word], kind)


def _comparison(cmp: int) -> None:
    if not 0 <= cmp <= NVSHMEM_CMP_GE.value:
        raise ValueError(
            f"cmp_ must be an NVSHMEM_CMP_*, 0 to 5, got {cmp} on rank {interlace.get_rank()}"
        )


@triton.jit
def signal_wait_until(sig_addr, cmp_, cmp_val):
    """Wait until the local signal compares. All that was ordered before the signal can be loaded then."""
    return wait_for_word(address_of(sig_addr).to(tl.pointer_type(tl.int64)), cmp_, cmp_val)


@triton.jit
def barrier_all():
    """Do ``quiet``, then all ranks meet: one program of each rank calls it."""
    quiet()
    sync_all()


@triton.jit
def sync_all():
    """All ranks meet: one program of each rank calls it. Earlier puts may not have arrived."""
    tl.debug_barrier()
    ptx(
        """
        {
            .reg .pred %one;
            mov.u32 $0, %tid.x;
            setp.eq.u32 %one, $0, 0;
            @%one call nvshmem_meet;
        }
        """
    )
    tl.debug_barrier()


barrier_all_block = barrier_all_warp = barrier_all
sync_all_block = sync_all_warp = sync_all


# -- teams: all ranks are in one node, so every known team has all ranks ---------------------------------


@triton.jit
def team_n_pes(team):
    operands = [tl.full((), team, tl.int32)]
    return ptx("call ($0), nvshmem_team_n_pes, ($1);", operands, is_pure=True)


@triton.jit
def team_translate_pe(src_team, pe_in_src_team, dest_team):
    return tl.full((), pe_in_src_team, tl.int32) + 0 * (
        team_n_pes(src_team) + team_n_pes(dest_team)
    )


@triton.jit
def team_my_pe(team):
    return team_translate_pe(NVSHMEM_TEAM_WORLD, my_pe(), team)


@triton.jit
def remote_mc_ptr(team, ptr):
    """Return the multicast address, for ``multimem`` instructions, of all ranks' memory at ``ptr``."""
    operands = tl.full((), team, tl.int32), address_of(ptr)
    address = ptx("call ($0), nvshmemx_mc_ptr, ($1, $2);", operands, tl.int64, True)
    return address.to(ptr.dtype, bitcast=True)


@triton.jit
def barrier(team):
    team_n_pes(team)
    barrier_all()


barrier_block = barrier_warp = team_sync_block = team_sync_warp = barrier


def team_size(team: int) -> int:
    if team not in (0, 1, 2):
        raise ValueError(
            "team must be NVSHMEM_TEAM_WORLD (0), NVSHMEM_TEAM_SHARED (1) or NVSHMEMX_TEAM_NODE (2), got "
            f"{team} on rank {interlace.get_rank()}"
        )
    return interlace.get_world_size()


def _multicast(team: int, address: int) -> int:
    team_size(team)
    handle = functions.handle_of(address)
    if handle is None:
        raise ValueError(
            f"ptr must be in symmetric memory that all ranks have, got address {address:#x} on rank "
            f"{interlace.get_rank()}"
        )
    return int(handle.multicast_ptr) + address - handle.buffer_ptrs[interlace.get_rank()]


def _tell(event: str, **named: bool) -> Callable[[Threads], None]:
    return lambda threads: threads.session.hooks.tell(event, threads.who(), **named)


TOGETHER.update(
    nvshmem_quiet=_tell("on_quiet"),
    nvshmem_put_fence=lambda threads: threads.session.hooks.fence(
        "acq_rel", "sys", threads.who(), puts=False
    ),
    nvshmem_put_begins=_tell("on_puts", begin=True),
    nvshmem_put_ends=_tell("on_puts", begin=False),
)
FUNCTIONS.update(
    nvshmem_is_add=_is_add,
    nvshmem_comparison=_comparison,
    nvshmem_team_n_pes=team_size,
    nvshmemx_mc_ptr=_multicast,
)
