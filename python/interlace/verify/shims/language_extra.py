"""``triton_dist.language.extra.language_extra`` on a CPU: barriers, and loads and stores with an order.

In Triton-distributed (1512a811) each is one PTX instruction, ``ld.global.acquire.gpu`` and so on, with
scope "gpu" and order "relaxed" unless told otherwise; every thread executes it, and so it is here.
"""

import triton
import triton.language as tl


@triton.jit
def __syncthreads():
    """The barrier of a program's threads."""
    tl.debug_barrier()


@triton.jit
def tid(axis: tl.constexpr):
    """The number of the thread; programs have one dimension of them."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.constexpr_function
def _letter(kind):
    """The constraint of inline PTX for the registers that hold it."""
    wide = kind.primitive_bitwidth == 64
    return ("d" if wide else "f") if kind.is_floating() else ("l" if wide else "r")


@triton.jit
def ld(ptr, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    """Load a word with an order and a scope."""
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    letter: tl.constexpr = _letter(kind)
    return tl.inline_asm_elementwise(
        f"ld.global.{semantic}.{scope}.b{bits} $0, [$1];", f"={letter},l", [ptr],
        dtype=ptr.dtype.element_ty, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def st(ptr, val, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    """Store a word with an order and a scope."""
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    letter: tl.constexpr = _letter(kind)
    tl.inline_asm_elementwise(
        f"st.global.{semantic}.{scope}.b{bits} [$1], $2; mov.u32 $0, 0;", f"=r,l,{letter}",
        [ptr.to(tl.int64, bitcast=True), tl.full((), val, kind)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def atomic_add(ptr, value, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    """Add to a word; what was there before."""
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    name: tl.constexpr = "f" if kind.is_floating() else "u"
    letter: tl.constexpr = _letter(kind)
    return tl.inline_asm_elementwise(
        f"atom.global.{semantic}.{scope}.add.{name}{bits} $0, [$1], $2;", f"={letter},l,{letter}",
        [ptr.to(tl.int64, bitcast=True), tl.full((), value, kind)],
        dtype=ptr.dtype.element_ty, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def atomic_cas(ptr, cmp_val, target_val, scope: tl.constexpr, semantic: tl.constexpr):
    """Set a word to ``target_val`` if it is ``cmp_val``; what was there before."""
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    letter: tl.constexpr = _letter(kind)
    return tl.inline_asm_elementwise(
        f"atom.global.{semantic}.{scope}.cas.b{bits} $0, [$1], $2, $3;",
        f"={letter},l,{letter},{letter}",
        [ptr.to(tl.int64, bitcast=True), tl.full((), cmp_val, kind), tl.full((), target_val, kind)],
        dtype=ptr.dtype.element_ty, is_pure=False, pack=1,
    )  # fmt: skip
