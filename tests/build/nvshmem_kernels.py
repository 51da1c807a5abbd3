"""A kernel that calls all of node_puts.py, to be linked, and one that calls what there is not."""

import triton
import triton.language as tl
from triton.language import core

from interlace.kernels import node_puts as nvshmem


@triton.jit
def every_function_kernel(address_ptr, nbytes, pe, LINKED: tl.constexpr):
    if LINKED:
        nvshmem.put_signal_nbi_block(
            address_ptr, address_ptr, nbytes, address_ptr, 1, nvshmem.SIGNAL_SET, pe
        )
        lane = tl.arange(0, 32)
        nvshmem.signal(address_ptr + lane, 1, nvshmem.SIGNAL_SET, lane)
        nvshmem.wait_until(address_ptr, nvshmem.COMPARE_GE, 1)
        nvshmem.quiet()


@core.extern
def nvshmem_no_such_function(address, _semantic=None):
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
    if LINKED:
        tl.store(address_ptr, nvshmem_no_such_function(address_ptr))
