"""``torch.distributed._symmetric_memory._nvshmem_triton`` on a CPU: NVSHMEM for torch's Triton kernels.

Signatures as in torch 2.13. All that copy are of block scope (``nvshmemx_putmem_block`` and so on); what
they order is in ``nvshmem.py``. torch's docstrings give other numbers for comparisons and operations than
NVSHMEM's headers do, which hold here: NVSHMEM_CMP_GE is 5, NVSHMEM_SIGNAL_SET 9, NVSHMEM_SIGNAL_ADD 10.
"""

from typing import Any

import triton.language as tl

from interlace.verify.shims import nvshmem
from interlace.verify.shims.nvshmem import (
    barrier_all,
    fence,
    my_pe,
    n_pes,
    quiet,
    signal_op,
    sync_all,
    wait_for_word,
    word_pointer,
)
from interlace.verify.shims.symmetric import number

__all__ = ["barrier_all", "fence", "my_pe", "n_pes", "quiet", "signal_op", "sync_all"]


def requires_nvshmem(jit_func: Any) -> Any:
    """The kernel as it is: there is nothing to link and to initialise."""
    return jit_func


def _bytes(one: Any, other: Any, nelems: Any) -> int:
    if one.type != other.type:
        raise TypeError(f"dest and source must be of one type, got {one.type} and {other.type}")
    width: int = one.type.element_ty.primitive_bitwidth
    return number(nelems) * width // 8


def put(dest: Any, source: Any, nelems: Any, pe: Any) -> None:
    """Copy to rank ``pe``. Returns when ``source`` may be written; orders nothing that follows."""
    nvshmem.putmem_block(dest, source, _bytes(dest, source, nelems), pe)


def get(dest: Any, source: Any, nelems: Any, pe: Any) -> None:
    """Copy from rank ``pe``; the data is there when it returns. Waits for no signal."""
    nvshmem.getmem_block(dest, source, _bytes(dest, source, nelems), pe)


get_nbi = get


def putmem_signal_block(
    dst: Any, src: Any, size_bytes: Any, signal: Any, sig_val: Any, sig_op: Any, pe: Any
) -> None:
    """Copy to rank ``pe``, then signal there: who waits for the signal sees the data."""
    nvshmem.putmem_signal_block(dst, src, size_bytes, signal, sig_val, sig_op, pe)


def wait_until(ivar: Any, cmp_op: Any, cmp_val: Any) -> Any:
    """Wait until an own int32 compares."""
    return wait_for_word(word_pointer(ivar, tl.int32), number(cmp_op), number(cmp_val))


def signal_wait_until(signal: Any, cmp: Any, cmp_val: Any) -> Any:
    """Wait until the own signal, of 64 bits, compares; what was ordered before it can be loaded."""
    return nvshmem.signal_wait_until(signal, cmp, cmp_val)
