"""The rank that calls, and a peer's address: what device functions of one-sided libraries ask for.

Kernels call these functions while they are interpreted, in the context of the rank that launched them.
"""

from typing import Any

import triton.language as tl

import interlace
from interlace.groups import groups
from interlace.runtime.core.place import Place
from interlace.symmetric_memory import functions

_meetings: dict[Place, Place] = {}


def number(value: Any) -> int:
    """A scalar of a kernel, whether constant or not, as an int."""
    if isinstance(value, tl.constexpr):
        value = value.value
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else int(value)


def my_pe() -> int:
    """The rank that runs this program: NVSHMEM calls a process a PE, a processing element."""
    return interlace.get_rank()


def n_pes() -> int:
    """How many ranks there are."""
    return interlace.get_world_size()


def remote_ptr(pointer: Any, pe: Any) -> Any:
    """The address at rank ``pe`` of what this rank has at ``pointer``, in symmetric memory.

    ValueError for memory that is not symmetric, or that has not met, and for a rank that is not there.
    """
    rank, peer = my_pe(), number(pe)
    if not 0 <= peer < n_pes():
        raise ValueError(f"pe must be within 0..{n_pes() - 1}, got {peer} on rank {rank}")
    address = int(pointer.handle.data.ravel()[0])
    handle = functions.handle_of(address)
    if handle is None:
        raise ValueError(
            f"pointer must be into symmetric memory that all ranks have, got address {address:#x} on rank "
            f"{rank}"
        )
    shift = handle.buffer_ptrs[peer] - handle.buffer_ptrs[rank]
    return (pointer.to(tl.int64, bitcast=True) + shift).to(pointer.dtype, bitcast=True)


def meet() -> None:
    """All ranks' programs that call this wait for each other; what came before is before what follows."""
    place = groups.default_group().place
    if place not in _meetings:
        # a group of its own: the host's barriers are counted apart
        _meetings[place] = place.subgroup(tuple(range(place.world_size)), -1)
    own = _meetings[place]
    own.arrive()
    own.exchange(b"", "barrier_all")
    own.depart()
