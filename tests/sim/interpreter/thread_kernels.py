"""Kernels whose threads differ: one of them polls or signals, all write; for test_threads.py."""

import numpy as np
import torch
import triton
import triton.language as tl

import interlace
from interlace import symmetric_memory

COUNT = 256


@triton.jit
def thread():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def threads():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %ntid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def raise_flag(flag, value):
    tl.inline_asm_elementwise(
        "st.global.release.sys.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [flag, value],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def poll(flag, value):
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %late;
        again:
            ld.global.acquire.sys.u32 $0, [$1];
            setp.lt.u32 %late, $0, $2;
            @%late bra again;
        }
        """,
        "=r,l,r",
        [flag, value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def warps_meet():
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def meet(HOW: tl.constexpr):
    if HOW == "program":
        tl.debug_barrier()
    elif HOW == "warp":
        warps_meet()


@triton.jit(do_not_specialize=["rank", "step"])
def hand_on(data, flag, output, rank, step, COUNT: tl.constexpr, WHO: tl.constexpr,
            BEFORE: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """Rank 0 stores a block at rank 1 and raises a flag; the threads of rank 1 below WHO wait for it."""
    offsets = tl.arange(0, COUNT)
    if rank == 0:
        tl.store(data + offsets, step * 1000 + offsets)
        meet(BEFORE)
        if thread() == 0:
            raise_flag(flag, step + 1)
    else:
        if thread() < WHO:
            poll(flag, step + 1)
        meet(AFTER)
        tl.store(output + offsets, tl.load(data + offsets))


def handed_on(who: int, before: str, after: str, num_warps: int) -> None:
    data, flag = (symmetric_memory.empty(n, dtype=torch.int32).zero_() for n in (COUNT, 1))
    at_1 = [
        symmetric_memory.rendezvous(each, None).get_buffer(1, each.shape, each.dtype)
        for each in (data, flag)
    ]
    rank, output = interlace.get_rank(), torch.zeros(COUNT, dtype=torch.int32)
    for step in range(2):
        interlace.barrier()
        hand_on[(1,)](*at_1, output, rank, step, COUNT, who, before, after, num_warps=num_warps)
        if rank == 1 and output.tolist() != [step * 1000 + i for i in range(COUNT)]:
            raise AssertionError("what was not there yet was read")


@triton.jit
def number(by_all, by_one, counts, STRIDE: tl.constexpr):
    """Every thread stores its number, by inline PTX and by tl.store."""
    tl.inline_asm_elementwise(
        "st.global.u32 [$1], $2; mov.u32 $0, 0;", "=r,l,r", [by_all + STRIDE * thread(), thread()],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(by_one + thread(), thread())
    tl.store(counts, threads())


def numbered(num_warps: int, stride: int = 1) -> tuple[list[int], list[int], int]:
    """One array follows directly after the other."""
    by_all, by_one = map(torch.from_numpy, np.full((2, 256), -1, np.int32))
    count = torch.zeros(1, dtype=torch.int32)
    number[(1,)](by_all, by_one, count, stride, num_warps=num_warps)
    return by_all.tolist(), by_one.tolist(), int(count.item())


@triton.jit
def wait_alone(flag):
    if thread() == 0:
        poll(flag, 1)


def waited_in_vain() -> None:
    wait_alone[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def special(output, REGISTER: tl.constexpr):
    """The text is put together at run time."""
    text: tl.constexpr = "mov.u32 $0, %" + REGISTER + ";"
    tl.store(output, tl.inline_asm_elementwise(text, "=r", [], tl.int32, True, 1))


def put_together() -> None:
    special[(1,)](torch.zeros(1, dtype=torch.int32), "tid.x")


@triton.jit
def unknown(output):
    tl.store(output, thread())
    tl.inline_asm_elementwise("brkpt; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


def refused() -> None:
    unknown[(1,)](torch.zeros(1, dtype=torch.int32))


def nested() -> None:
    @triton.jit
    def inside(output):
        tl.store(output, thread())

    inside[(1,)](torch.zeros(1, dtype=torch.int32))
