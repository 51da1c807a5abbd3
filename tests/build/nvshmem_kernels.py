"""A kernel that calls all of nodes/nvshmem.py, to be linked, and one that calls what there is not."""

import triton
import triton.language as tl
from triton.language import core

from interlace.kernels.nodes import nvshmem


@triton.jit
def every_function_kernel(address_ptr, results_ptr, nbytes, pe, LINKED: tl.constexpr):
    """Of no use but to be linked."""
    if LINKED:
        nvshmem.put_block(address_ptr, address_ptr, nbytes, pe)
        nvshmem.put_signal_block(
            address_ptr, address_ptr, nbytes, address_ptr, 1, nvshmem.SIGNAL_SET, pe
        )
        nvshmem.put_signal_nbi_block(
            address_ptr, address_ptr, nbytes, address_ptr, 1, nvshmem.SIGNAL_ADD, pe
        )
        lane = tl.arange(0, 32)
        nvshmem.signal(address_ptr + lane, 1, nvshmem.SIGNAL_SET, lane)
        nvshmem.wait_until(address_ptr, nvshmem.COMPARE_GE, 1)
        value = nvshmem.signal_wait_until(address_ptr, nvshmem.COMPARE_EQ, 2)
        tl.store(results_ptr, value)
        nvshmem.fence()
        nvshmem.quiet()
        tl.store(results_ptr + 1, nvshmem.peer_pointer(address_ptr, pe))
        tl.store(results_ptr + 2, nvshmem.multicast_pointer(nvshmem.TEAM_SHARED, address_ptr))
        nvshmem.barrier_block(nvshmem.TEAM_WORLD)
        nvshmem.sync_block(nvshmem.TEAM_NODE)
        tl.store(results_ptr + 3, nvshmem.my_pe() + nvshmem.n_pes())


@core.extern
def nvshmem_no_such_function(address, _semantic=None):
    """Not in any library."""
    kinds = (core.dtype("int64"),)
    value = _semantic.cast(_semantic.to_tensor(address), kinds[0])
    return core.extern_elementwise(
        "",
        "",
        [value],
        {kinds: ("nvshmem_no_such_function", core.dtype("int64"))},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def missing_function_kernel(address_ptr, LINKED: tl.constexpr):
    """Must not compile, with a library or without."""
    if LINKED:
        tl.store(address_ptr, nvshmem_no_such_function(address_ptr))
