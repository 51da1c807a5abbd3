"""``torch.distributed._symmetric_memory._nvshmem_triton`` on a CPU: NVSHMEM for torch's Triton kernels.

Signatures are as in torch 2.13. All copies have block scope (``nvshmemx_putmem_block`` and so on);
``nvshmem.py`` says what they order. torch's docstrings give other numbers for comparisons and operations
than NVSHMEM's headers. The headers hold here: NVSHMEM_CMP_GE is 5, NVSHMEM_SIGNAL_SET 9, NVSHMEM_SIGNAL_ADD
10.
"""

from typing import Any

import triton
import triton.language as tl

from interlace_verify.shims import nvshmem

_AS_THEY_ARE = """
    barrier_all fence my_pe n_pes putmem_signal_block quiet signal_op signal_wait_until sync_all
"""
globals().update({name: getattr(nvshmem, name) for name in _AS_THEY_ARE.split()})


def requires_nvshmem(jit_func: object) -> Any:
    """Return the kernel unchanged, as it needs no linking and no initialisation."""
    return jit_func


@triton.jit
def _bytes(dest, source, nelems):
    tl.static_assert(dest.dtype == source.dtype, "dest and source must be of one type")
    return nelems * (dest.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def put(dest, source, nelems, pe):
    """Copy to rank ``pe``. Returns when ``source`` may be written; orders no later access."""
    nvshmem.putmem_block(dest, source, _bytes(dest, source, nelems), pe)


@triton.jit
def get(dest, source, nelems, pe):
    """Copy from rank ``pe``. The data is there when it returns. Does not wait for a signal."""
    nvshmem.getmem_block(dest, source, _bytes(dest, source, nelems), pe)


get_nbi = get


@triton.jit
def wait_until(ivar, cmp_op, cmp_val):
    word = nvshmem.address_of(ivar).to(tl.pointer_type(tl.int32))
    return nvshmem.wait_for_word(word, cmp_op, cmp_val)
