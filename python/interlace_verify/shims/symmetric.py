"""The calling rank, and a peer's addresses, for device functions of one-sided libraries.

Kernels call these functions by inline PTX, both when they are interpreted and when they are compiled. The
functions act in the context of the rank that launched the kernel.
"""

from typing import Any

import triton
import triton.language as tl

import interlace
from interlace.groups import groups
from interlace.runtime.core.place import Place
from interlace.symmetric_memory import functions
from interlace_verify.ptx.calls import FUNCTIONS

_meetings: dict[Place, Place] = {}


def ptx(
    text: Any, values: Any = (), dtype: Any = tl.int32, is_pure: Any = False, _semantic: Any = None
) -> Any:
    """Return each thread's results of a piece of PTX: its operands $0, $1, ...; then come ``values``."""
    known = {} if _semantic is None else {"_semantic": _semantic}
    kinds = tl.core._unwrap_if_constexpr(dtype)
    results = kinds if isinstance(kinds, (tuple, tl.tuple)) else [kinds]
    letters = [f"={_letter(tl.core._unwrap_if_constexpr(kind))}" for kind in results]
    letters += [_letter(value.dtype) for value in values]
    several = len(values) > 1  # Triton does not mix pointers with other numbers
    operands = [
        value.to(tl.int64, bitcast=True, **known) if several and value.dtype.is_ptr() else value
        for value in values
    ]
    options = {"dtype": kinds, "is_pure": is_pure, "pack": 1}
    return tl.inline_asm_elementwise(text, ",".join(letters), operands, **options, **known)


def run_ptx(text: object, values: object = (), _semantic: object = None) -> None:
    """Run a piece of PTX without a result: $1 is the first of ``values``."""
    ptx(f"{tl.core._unwrap_if_constexpr(text)} mov.u32 $0, 0;", values, _semantic=_semantic)


def _letter(kind: Any) -> str:
    if kind.is_ptr():
        return "l"
    bits = kind.primitive_bitwidth
    return (
        {64: "d", 32: "f"}.get(bits, "h")
        if kind.is_floating()
        else {64: "l", 16: "h"}.get(bits, "r")
    )


for _function in (ptx, run_ptx):
    vars(_function).update(__triton_builtin__=True, is_interpreted=True)


@triton.jit
def my_pe():
    """Return the rank that runs this program. NVSHMEM calls a process a PE, a processing element."""
    return ptx("call ($0), nvshmem_my_pe, ();", is_pure=True)


@triton.jit
def n_pes():
    return ptx("call ($0), nvshmem_n_pes, ();", is_pure=True)


@triton.jit
def remote_ptr(pointer, pe):
    """Return the address at rank ``pe`` of this rank's symmetric memory at ``pointer``.

    ValueError for memory that is not symmetric or not on all ranks yet, and for a rank that does not exist.
    """
    operands = pointer.to(tl.int64, bitcast=True), tl.full((), pe, tl.int32)
    address = ptx("call ($0), nvshmem_ptr, ($1, $2);", operands, tl.int64, True)
    return address.to(pointer.dtype, bitcast=True)


def address_at(address: int, pe: int) -> int:
    """Return the result of :func:`remote_ptr` for the calling rank, as a number."""
    rank, count = interlace.get_rank(), interlace.get_world_size()
    peer = pe - (1 << 32) if pe >> 31 else pe
    if not 0 <= peer < count:
        raise ValueError(f"pe must be within 0..{count - 1}, got {peer} on rank {rank}")
    handle = functions.handle_of(address)
    if handle is None:
        raise ValueError(
            f"pointer must be in symmetric memory that all ranks have, got address {address:#x} on rank "
            f"{rank}"
        )
    return address + handle.buffer_ptrs[peer] - handle.buffer_ptrs[rank]


def _meet() -> None:
    """Let the calling programs of all ranks wait for each other. It orders accesses before and after."""
    place = groups.default_group().place
    if place not in _meetings:
        # its own group, so that the host's barriers are counted apart
        _meetings[place] = place.subgroup(tuple(range(place.world_size)), -1)
    meeting = _meetings[place]
    meeting.arrive()
    meeting.exchange(b"", "barrier_all")
    meeting.depart()


FUNCTIONS.update(
    nvshmem_my_pe=interlace.get_rank,
    nvshmem_n_pes=interlace.get_world_size,
    nvshmem_ptr=address_at,
    nvshmem_meet=_meet,
)
