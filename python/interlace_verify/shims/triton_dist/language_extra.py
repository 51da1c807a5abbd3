"""``triton_dist.language.extra.language_extra`` on a CPU: one instruction of PTX for each thread.

In Triton-distributed (1512a811, ``extra/cuda/language_extra.py``) each of these functions is one PTX
instruction, which every thread executes. Here it is the same instruction, as the PTX ISA describes it. The
default order is "relaxed" and the default scope "gpu". Accesses of vectors, of four words and by
``multimem`` are weak, accesses of pairs of words are volatile. There is no clock: each read of it returns a
larger number.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads, num_warps, smid

from interlace_verify.shims.symmetric import ptx, run_ptx
from interlace_verify.shims.triton_dist import missing
from interlace_verify.shims.triton_dist.vectors import ld_vector, st_vector

__all__ = ["ld_vector", "num_threads", "num_warps", "smid", "st_vector"]
__getattr__ = missing.of("triton_dist.language.extra.language_extra")


@triton.constexpr_function
def threads_per_warp():
    return 32


@triton.jit
def __syncthreads():
    tl.debug_barrier()


@triton.constexpr_function
def _axis(axis):
    return "xyz"[axis]


@triton.jit
def tid(axis: tl.constexpr):
    """Return the number of the thread; programs have one dimension of threads."""
    return ptx(f"mov.u32 $0, %tid.{_axis(axis)};", is_pure=True)


@triton.jit
def ntid(axis: tl.constexpr):
    return ptx(f"mov.u32 $0, %ntid.{_axis(axis)};", is_pure=True)


@triton.jit
def laneid():
    return ptx("mov.u32 $0, %laneid;", is_pure=True)


@triton.jit
def globaltimer():
    """Return the clock of the device, in nanoseconds."""
    return ptx("mov.u64 $0, %globaltimer;", dtype=tl.uint64)


@triton.jit
def globaltimer_lo():
    return ptx("mov.u32 $0, %globaltimer_lo;", dtype=tl.uint32)


@triton.jit
def globaltimer_hi():
    return ptx("mov.u32 $0, %globaltimer_hi;", dtype=tl.uint32)


# -- fences, loads and stores ----------------------------------------------------------------------------


@triton.jit
def membar(scope: tl.constexpr = "cta"):
    """Fence this thread: ``membar`` of "cta", "gl" (the GPU) or "sys", which is ``fence.sc``."""
    run_ptx(f"membar.{scope};")


@triton.jit
def fence(semantic: tl.constexpr = "sc", scope: tl.constexpr = "gpu"):
    run_ptx(f"fence.{semantic}.{scope};")


__fence = fence


@triton.jit
def ld(ptr, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    return ptx(f"ld.global.{semantic}.{scope}.b{bits} $0, [$1];", [ptr], kind)


@triton.jit
def ld_b32(ptr):
    return ld(ptr, "gpu", "relaxed")


@triton.jit
def ld_acquire(ptr, scope: tl.constexpr = "gpu"):
    return ld(ptr, scope, "acquire")


@triton.jit
def st(ptr, val, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    run_ptx(f"st.global.{semantic}.{scope}.b{bits} [$1], $2;", [ptr, tl.full((), val, kind)])


@triton.jit
def st_b32(ptr, val0):
    st(ptr, val0, "gpu", "relaxed")


@triton.constexpr_function
def _ordered(semantic, scope):
    return "".join(f".{word}" for word in (semantic, scope) if word)


@triton.jit
def _load_four(ptr, OPERATION: tl.constexpr):
    kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return ptx(f"{OPERATION} {{$0, $1, $2, $3}}, [$4];", [ptr], kinds)


@triton.jit
def _of_kind(words, KIND: tl.constexpr):
    return (
        words[0].to(KIND, bitcast=True),
        words[1].to(KIND, bitcast=True),
        words[2].to(KIND, bitcast=True),
        words[3].to(KIND, bitcast=True),
    )


@triton.jit
def load_v4_u32(ptr):
    return _of_kind(_load_four(ptr, "ld.global.v4.b32"), tl.uint32)


@triton.jit
def load_v4_s32(ptr):
    return _load_four(ptr, "ld.global.v4.b32")


@triton.jit
def load_v4_b32(ptr, scope: tl.constexpr = "", semantic: tl.constexpr = ""):
    """Load four words at once; an order of "" is weak."""
    return _load_four(ptr, f"ld.global{_ordered(semantic, scope)}.v4.b32")


@triton.jit
def load_v2_b64(ptr):
    return ptx("ld.volatile.global.v2.b64 {$0, $1}, [$2];", [ptr], (tl.int64, tl.int64))


@triton.jit
def st_v4_b32(ptr, val0, val1, val2, val3, scope: tl.constexpr = "", semantic: tl.constexpr = ""):
    run_ptx(
        f"st.global{_ordered(semantic, scope)}.v4.b32 [$1], {{$2, $3, $4, $5}};",
        [ptr, val0, val1, val2, val3],
    )


@triton.jit
def st_v4_u32(ptr, val0, val1, val2, val3):
    st_v4_b32(ptr, val0, val1, val2, val3, "gpu", "relaxed")


@triton.jit
def st_v2_u32(ptr, val0, val1):
    run_ptx("st.volatile.global.v2.u32 [$1], {$2, $3};", [ptr, val0, val1])


@triton.jit
def pack_b32_v2(val0, val1):
    """Return two 32-bit words as one of 64 bits, the first one in the lower half."""
    return ptx("mov.b64 $0, {$1, $2};", [val0, val1], tl.uint64, True)


# -- atomics and signals ---------------------------------------------------------------------------------


@triton.jit
def atomic_add(ptr, value, scope: tl.constexpr = "gpu", semantic: tl.constexpr = "relaxed"):
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    name: tl.constexpr = "f" if kind.is_floating() else "u"
    return ptx(
        f"atom.global.{semantic}.{scope}.add.{name}{bits} $0, [$1], $2;",
        [ptr, tl.full((), value, kind)],
        kind,
    )


@triton.jit
def atomic_add_per_warp(barrier_ptr, value, scope: tl.constexpr, semantic: tl.constexpr):
    """Add to a word by the first thread of each warp; return the old value to all threads of it."""
    before = tl.full((), 0, barrier_ptr.dtype.element_ty)
    if laneid() == 0:
        before = atomic_add(barrier_ptr, value, scope, semantic)
    return __shfl_sync_i32(0xFFFFFFFF, before, 0)


@triton.jit
def atomic_cas(ptr, cmp_val, target_val, scope: tl.constexpr, semantic: tl.constexpr):
    kind: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = kind.primitive_bitwidth
    return ptx(
        f"atom.global.{semantic}.{scope}.cas.b{bits} $0, [$1], $2, $3;",
        [ptr, tl.full((), cmp_val, kind), tl.full((), target_val, kind)],
        kind,
    )


@triton.jit
def red_release(barrier_ptr, value, scope: tl.constexpr = "gpu"):
    """Add to an int32 with release, by every thread."""
    run_ptx(
        f"red.release.{scope}.global.add.s32 [$1], $2;", [barrier_ptr, tl.full((), value, tl.int32)]
    )


@triton.jit
def arrive_inc(barrier_ptr, thread_idx, value, scope: tl.constexpr = "gpu"):
    """Let all threads meet, then thread 0 adds with release."""
    __syncthreads()
    if thread_idx == 0:
        red_release(barrier_ptr, value, scope)


arrive_inc_asm = arrive_inc


@triton.jit
def wait_eq(barrier_ptr, thread_idx, value, scope: tl.constexpr):
    """Let thread 0 poll with acquire until a word is ``value``, then all threads meet."""
    if thread_idx == 0:
        while ld_acquire(barrier_ptr, scope) != value:
            pass
    __syncthreads()


# -- the threads of a warp -------------------------------------------------------------------------------


@triton.jit
def _shuffled(mask, value, lane, MODE: tl.constexpr, CLAMP: tl.constexpr):
    return ptx(
        f"shfl.sync.{MODE}.b32 $0, $1, $2, {CLAMP}, $3;",
        [value, tl.full((), lane, tl.int32), tl.full((), mask, tl.uint32)],
        value.dtype,
    )


@triton.jit
def __shfl_sync_i32(mask, value, laneid):
    return _shuffled(mask, value, laneid, "idx", 31)


@triton.jit
def __shfl_up_sync_i32(mask, value, delta):
    """Return the ``value`` of the thread ``delta`` before; the first threads keep their own."""
    return _shuffled(mask, value, delta, "up", 0)


@triton.jit
def __shfl_down_sync_i32(mask, value, delta):
    """Return the ``value`` of the thread ``delta`` after; the last threads keep their own."""
    return _shuffled(mask, value, delta, "down", 31)


@triton.jit
def __shfl_xor_sync_i32(mask, value, delta):
    return _shuffled(mask, value, delta, "bfly", 31)


@triton.jit
def __ballot_sync(mask, predicate):
    return ptx(
        """
        {
            .reg .pred %yes;
            setp.ne.b32 %yes, $1, 0;
            vote.sync.ballot.b32 $0, %yes, $2;
        }
        """,
        [tl.full((), predicate, tl.int32), tl.full((), mask, tl.uint32)],
    )


# -- all ranks at once -----------------------------------------------------------------------------------


@triton.constexpr_function
def _suffix(kind):
    names = {tl.float32: "f32", tl.bfloat16: "bf16x2", tl.float16: "f16x2"}
    if kind not in names:
        raise ValueError(f"multimem takes float32, bfloat16 and float16, got {kind}")
    return names[kind]


@triton.constexpr_function
def _register(kind):
    return tl.float32 if kind == tl.float32 else tl.int32


@triton.constexpr_function
def _precision(kind, accumulated):
    if accumulated is not None and accumulated != tl.float32:
        raise ValueError(f"acc_dtype must be float32, got {accumulated}")
    return "" if kind == tl.float32 else ".acc::f32"


@triton.jit
def multimem_ld_reduce_v4(ptr, acc_dtype: tl.constexpr = None):
    """Return sums over ranks of 128 bits at a multicast address, in four 32-bit registers, weak."""
    kind: tl.constexpr = ptr.dtype.element_ty
    text: tl.constexpr = (
        f"multimem.ld_reduce.global.add{_precision(kind, acc_dtype)}.v4.{_suffix(kind)}"
    )
    return _of_kind(_load_four(ptr, text), _register(kind))


@triton.jit
def multimem_ld_reduce_p_v4(ptr, mask):
    """Do :func:`multimem_ld_reduce_v4` with acquire and scope sys, by threads whose ``mask`` is not 0."""
    kind: tl.constexpr = ptr.dtype.element_ty
    words = ptx(
        f"""
        {{
            .reg .pred %there;
            setp.ne.s32 %there, $5, 0;
            @%there multimem.ld_reduce.acquire.sys.global.add.v4.{_suffix(kind)} {{$0, $1, $2, $3}}, [$4];
        }}
        """,
        [ptr, mask.to(tl.int32)],
        (tl.int32, tl.int32, tl.int32, tl.int32),
    )
    return _of_kind(words, _register(kind))


@triton.jit
def multimem_st_b32(ptr, val0):
    run_ptx("multimem.st.global.b32 [$1], $2;", [ptr, val0])


@triton.jit
def multimem_st_b64(ptr, val0):
    run_ptx("multimem.st.global.b64 [$1], $2;", [ptr, val0])


@triton.jit
def multimem_st_p_b32(ptr, val, mask):
    run_ptx(
        """
        {
            .reg .pred %there;
            setp.ne.s32 %there, $3, 0;
            @%there multimem.st.global.b32 [$1], $2;
        }
        """,
        [ptr, val, mask.to(tl.int32)],
    )


@triton.jit
def multimem_st_v2(ptr, val0, val1):
    kind: tl.constexpr = ptr.dtype.element_ty
    run_ptx(f"multimem.st.global.v2.{_suffix(kind)} [$1], {{$2, $3}};", [ptr, val0, val1])


@triton.jit
def multimem_st_v4(ptr, val0, val1, val2, val3):
    kind: tl.constexpr = ptr.dtype.element_ty
    run_ptx(
        f"multimem.st.global.v4.{_suffix(kind)} [$1], {{$2, $3, $4, $5}};",
        [ptr, val0, val1, val2, val3],
    )
