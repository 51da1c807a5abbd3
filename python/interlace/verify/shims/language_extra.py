"""``triton_dist.language.extra.language_extra`` on a CPU: barriers, and loads and stores with an order.

In Triton-distributed (1512a811) each is one PTX instruction, ``ld.global.acquire.gpu`` and so on, with
scope "gpu" and order "relaxed" unless told otherwise; every thread executes it.
"""

from typing import Any

import triton
import triton.language as tl


def __syncthreads() -> None:
    """The barrier of a program's threads."""
    tl.debug_barrier()


@triton.jit
def tid(axis: tl.constexpr):
    """The number of the thread; programs have one dimension of them."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


def ld(ptr: Any, scope: str = "gpu", semantic: str = "relaxed") -> Any:
    """Load a word with an order and a scope."""
    return tl.atomic_add(ptr, 0, sem=semantic, scope=scope)


def st(ptr: Any, val: Any, scope: str = "gpu", semantic: str = "relaxed") -> None:
    """Store a word with an order and a scope."""
    tl.atomic_xchg(ptr, val, sem=semantic, scope=scope)


def atomic_add(ptr: Any, value: Any, scope: str = "gpu", semantic: str = "relaxed") -> Any:
    """Add to a word; what was there before."""
    return tl.atomic_add(ptr, value, sem=semantic, scope=scope)


@triton.jit
def atomic_cas(ptr, cmp_val, target_val, scope: tl.constexpr, semantic: tl.constexpr):
    """Set a word to ``target_val`` if it is ``cmp_val``; what was there before."""
    kind: tl.constexpr = ptr.dtype.element_ty
    old = tl.full((), cmp_val, kind)
    return tl.atomic_cas(ptr, old, tl.full((), target_val, kind), sem=semantic, scope=scope)
