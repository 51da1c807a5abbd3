"""Stories of schedules and waits: what matters is told, and where."""

from typing import Any

import torch
import triton
import triton.language as tl

from interlace.verify import races, schedules


@triton.jit
def wait_for(flags, COMPILED: tl.constexpr):
    if COMPILED:
        thread = tl.inline_asm_elementwise(
            "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1
        )
        if thread < 2:
            tl.inline_asm_elementwise(
                "{ .reg .u32 %t; .reg .pred %p; a: atom.global.acquire.sys.cas.b32 %t, [$1], 1, 0; "
                "setp.eq.u32 %p, %t, 1; @!%p bra a; mov.u32 $0, %t; }",
                "=r,l",
                [flags + thread],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        while tl.atomic_add(flags, 0, sem="acquire", scope="sys") != 1:
            pass


@triton.jit
def waiting_kernel(flags, COMPILED: tl.constexpr):
    tl.debug_barrier()
    wait_for(flags, COMPILED)


def waits(compiled: bool) -> None:
    waiting_kernel[(1,)](torch.tensor([3, 7], dtype=torch.int32), compiled)


def test_a_wait_that_does_not_end_shows_what_it_has_seen_and_who_called() -> None:
    for compiled, seen in ((True, "seen 3 and 7"), (False, "seen 3")):
        ((_, text),) = races(waits, 1, compiled, seeds=1).errors
        assert f"{seen} at test_stories.py:" in text, text
        assert ", called from test_stories.py:" in text.partition("wait_for")[2], text


@triton.jit
def last_kernel(parts, count, scratch, out, N: tl.constexpr, B: tl.constexpr):
    """The last of a grid adds up; it does not acquire. ``scratch`` is of each program alone."""
    i = tl.arange(0, B)
    program = tl.program_id(0)
    tl.store(parts + program * B + i, program + 1.0 + tl.zeros([B], tl.float32))
    tl.atomic_add(scratch + program, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acquire", scope="gpu") == N - 1:
        total = tl.zeros([B], tl.float32)
        for j in range(N):
            total += tl.load(parts + j * B + i)
        tl.store(out + i, total)


def adds_up() -> Any:
    parts, count, out = torch.empty(32), torch.zeros(5, dtype=torch.int32), torch.empty(16)
    last_kernel[(2,)](parts, count, count[1:], out, 2, 16)
    assert out[0] == 3


def test_a_shrunk_schedule_shows_what_several_tasks_access() -> None:
    failure = schedules(adds_up, 1, n=3, store_buffers=True, workers=1).failure
    assert failure is not None
    shown, whole = "\n".join(failure.story), "\n".join(failure.told.lines())
    assert "barrier" in whole and "(relaxed, gpu)" in whole
    assert "barrier" not in shown and "(relaxed, gpu)" not in shown
    assert shown.count("add (acquire, gpu)") == 2
