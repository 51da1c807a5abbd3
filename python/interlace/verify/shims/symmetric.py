"""The rank that calls, and a peer's address: what device functions of one-sided libraries ask for.

Kernels call these functions by inline PTX, whether they are interpreted or compiled and run; they act in
the context of the rank that launched them.
"""

import triton
import triton.language as tl

import interlace
from interlace.groups import groups
from interlace.runtime.core.place import Place
from interlace.runtime.ptx.calls import FUNCTIONS
from interlace.symmetric_memory import functions

_meetings: dict[Place, Place] = {}


@triton.jit
def my_pe():
    """The rank that runs this program: NVSHMEM calls a process a PE, a processing element."""
    return tl.inline_asm_elementwise(
        "call ($0), nvshmem_my_pe, ();", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def n_pes():
    """How many ranks there are."""
    return tl.inline_asm_elementwise(
        "call ($0), nvshmem_n_pes, ();", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def remote_ptr(pointer, pe):
    """The address at rank ``pe`` of what this rank has at ``pointer``, in symmetric memory.

    ValueError for memory that is not symmetric, or that has not met, and for a rank that is not there.
    """
    address = tl.inline_asm_elementwise(
        "call ($0), nvshmem_ptr, ($1, $2);", "=l,l,r",
        [pointer.to(tl.int64, bitcast=True), tl.full((), pe, tl.int32)],
        dtype=tl.int64, is_pure=True, pack=1,
    )  # fmt: skip
    return address.to(pointer.dtype, bitcast=True)


def address_at(address: int, pe: int) -> int:
    """What :func:`remote_ptr` gives, as a number, for the rank that calls."""
    rank, count = interlace.get_rank(), interlace.get_world_size()
    peer = pe - (1 << 32) if pe >> 31 else pe
    if not 0 <= peer < count:
        raise ValueError(f"pe must be within 0..{count - 1}, got {peer} on rank {rank}")
    handle = functions.handle_of(address)
    if handle is None:
        raise ValueError(
            f"pointer must be into symmetric memory that all ranks have, got address {address:#x} on rank "
            f"{rank}"
        )
    return address + handle.buffer_ptrs[peer] - handle.buffer_ptrs[rank]


def _meet() -> None:
    """All ranks' programs that call this wait for each other; what came before is before what follows."""
    place = groups.default_group().place
    if place not in _meetings:
        # a group of its own: the host's barriers are counted apart
        _meetings[place] = place.subgroup(tuple(range(place.world_size)), -1)
    own = _meetings[place]
    own.arrive()
    own.exchange(b"", "barrier_all")
    own.depart()


FUNCTIONS.update(
    nvshmem_my_pe=interlace.get_rank,
    nvshmem_n_pes=interlace.get_world_size,
    nvshmem_ptr=address_at,
    nvshmem_meet=_meet,
)
