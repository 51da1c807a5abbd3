"""Kernels with inline PTX, as users of torch symmetric memory write them, for test_inline_ptx*.py."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def compute(out_ptr, a_ptr, b_ptr, N: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Apply one text to every element of two tensors."""
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, tl.inline_asm_elementwise(ASM, CONSTRAINTS, [a, b], dtype, False, 1))


@triton.jit
def on_memory(out_ptr, memory_ptr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Apply one text to a pointer."""
    dtype = out_ptr.dtype.element_ty
    result = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [memory_ptr], dtype, False, 1)
    tl.store(out_ptr, result)


@triton.jit
def on_pointers(memory_ptr, N: tl.constexpr, ASM: tl.constexpr):
    """Apply one text to a tensor of pointers; nothing uses its result."""
    pointers = memory_ptr + tl.arange(0, N)
    tl.inline_asm_elementwise(ASM, "=r, l", [pointers], tl.int32, False, 1)


@triton.jit
def two_results(out_ptr, a_ptr):
    """Return sum and difference, of different types."""
    a = tl.load(a_ptr)
    total, difference = tl.inline_asm_elementwise(
        """
        {
            .reg .s32 t;
            sub.s32 t, $2, $3;
            cvt.s64.s32 $1, t;
            cvt.rn.f32.s32 $0, $2;
        }
        """,
        "=f,=l,r,r",
        [a, 5],
        dtype=(tl.float32, tl.int64),
        is_pure=True,
        pack=1,
    )
    tl.store(out_ptr, total.to(tl.int64))
    tl.store(out_ptr + 1, difference)


@triton.jit
def packed(out_ptr, a_ptr, N: tl.constexpr):
    """Four bytes are in one register."""
    at = tl.arange(0, N)
    doubled = tl.inline_asm_elementwise(
        """
        {
            .reg .b8 byte<4>;
            mov.b32 {byte0, byte1, byte2, byte3}, $4;
            cvt.u32.u8 $0, byte0;
            cvt.u32.u8 $1, byte1;
            cvt.u32.u8 $2, byte2;
            cvt.u32.u8 $3, byte3;
        }
        """,
        "=r,=r,=r,=r,r",
        [tl.load(a_ptr + at)],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )
    tl.store(out_ptr + at, doubled)


@triton.jit
def thread_numbers(out_ptr):
    """Return the numbers of a program and its thread 0."""
    x, threads, program, programs = tl.inline_asm_elementwise(
        """
        mov.u32 $0, %tid.x;
        mov.u32 $1, %ntid.x;
        mov.u32 $2, %ctaid.y;
        mov.u32 $3, %nctaid.y;
        """,
        "=r,=r,=r,=r",
        [],
        dtype=(tl.uint32, tl.uint32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    out_ptr += 4 * tl.program_id(1)
    tl.store(out_ptr, x)
    tl.store(out_ptr + 1, threads)
    tl.store(out_ptr + 2, program)
    tl.store(out_ptr + 3, programs)


# -- signals ---------------------------------------------------------------------------------------


@triton.jit
def hand_over(out_ptr, data_ptr, flag_ptr, WAIT: tl.constexpr):
    """Program 1 writes and signals; program 0 waits and reads."""
    if tl.program_id(0) == 1:
        tl.store(data_ptr + tl.arange(0, 4), tl.full((4,), 7, tl.int32))
        tl.inline_asm_elementwise(
            """
            bar.sync 0;
            membar.sys;
            st.global.release.sys.u32 [$1], 1;
            """,
            "=r,l",
            [flag_ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(WAIT, "=r,l", [flag_ptr], tl.int32, is_pure=False, pack=1)
        tl.store(out_ptr + tl.arange(0, 4), tl.load(data_ptr + tl.arange(0, 4)))


@triton.jit
def spin_outside(flag_ptr):
    """The loop is Triton's, the load is the text's."""
    seen = tl.zeros((), tl.int32)
    while seen == 0:
        seen = tl.inline_asm_elementwise(
            "ld.global.acquire.sys.u32 $0, [$1];", "=r,l", [flag_ptr], tl.int32, False, 1
        )


# -- launches --------------------------------------------------------------------------------------

LETTERS = {
    torch.int16: "h",
    torch.int32: "r",
    torch.int64: "l",
    torch.float32: "f",
    torch.float64: "d",
}


def computed(asm: str, a: list[Any], b: list[Any], out: torch.dtype, given: torch.dtype) -> Any:
    """Return ``$0`` after ``asm`` with ``$1`` and ``$2``, for every element; inside a rank."""
    letter = LETTERS[given]
    result = torch.zeros(len(a), dtype=out)
    left, right = torch.tensor(a, dtype=given), torch.tensor(b, dtype=given)
    constraints = f"={LETTERS[out]}, {letter}, {letter}"
    compute[(1,)](result, left, right, len(a), asm, constraints)
    return result.tolist()


def in_memory(asm: str, memory: torch.Tensor, out: torch.dtype = torch.int32) -> Any:
    """Return ``$0`` after ``asm``, with the address of ``memory`` in ``$1``; inside a rank."""
    result = torch.zeros(1, dtype=out)
    on_memory[(1,)](result, memory, asm, f"={LETTERS[out]},l")
    return result.item()
