"""Inline PTX in the interpreter: threads, memory, and how programs and ranks signal each other."""

import pytest
import torch

import interlace
from sim.interpreter import ptx_kernels
from sim.interpreter.ptx_kernels import in_memory

I32, I64 = torch.int32, torch.int64

# -- threads ---------------------------------------------------------------------------------------


def test_threads_count() -> None:
    """All threads run a text without a guard; Triton stores scalars as thread 0."""
    out = torch.zeros(12, dtype=I32)
    interlace.run(lambda: ptx_kernels.thread_numbers[(2, 3)](out), 1)
    assert out.view(3, 4).tolist() == [[0, 128, y, 3] for y in range(3)]
    asm = """{ .reg .pred p; .reg .u32 t; .reg .u64 a; mov.u32 t, %tid.x; setp.lt.u32 p, t, 4;
        mad.wide.u32 a, t, 4, $1; @p red.global.add.u32 [a], t; mov.u32 $0, t; }"""
    memory = torch.zeros(5, dtype=I32)
    assert interlace.run(lambda: in_memory(asm, memory), 1) == [0]
    assert memory.tolist() == [0, 1, 2, 3, 0]
    every = torch.zeros(1, dtype=I32)
    interlace.run(lambda: in_memory("red.global.add.u32 [$1], 1; mov.u32 $0, 0;", every), 1)
    assert every.item() == 128


def test_threads_meet_at_barriers() -> None:
    asm = """{ .reg .pred p, q; .reg .u32 t, seen;
        mov.u32 t, %tid.x;
        setp.ge.u32 p, t, 64;
        @!p bra meet;
        red.global.add.u32 [$1+4], 1;
        bar.warp.sync 0xffffffff;
        setp.eq.u32 q, t, 100;
        @q ld.global.u32 seen, [$1+4];
        @q st.global.u32 [$1], seen;
    meet:
        bar.sync 0;
        ld.global.u32 $0, [$1]; }"""
    memory = torch.zeros(2, dtype=I32)
    seen = interlace.run(lambda: in_memory(asm, memory), 1)[0]
    assert seen == memory[0].item() and seen >= 32 and memory[1].item() == 64


def test_clocks_grow_and_are_no_real_clocks() -> None:
    asm = """{ .reg .u64 a, b; mov.u64 a, %globaltimer; mov.u64 b, %clock64; sub.u64 $0, b, a; }"""
    assert interlace.run(lambda: in_memory(asm, torch.zeros(1), I64), 2) == [1000, 1000]


# -- signals ---------------------------------------------------------------------------------------


def test_thread_i_signals_rank_i() -> None:
    """Every thread waits for another rank than it has signalled, so threads must take turns."""
    world = 4

    def on_rank() -> None:
        for _ in range(2):
            ptx_kernels.barrier_by_threads[(1,)](out, flag_table, interlace.get_rank(), world)

    for seed in range(3):
        out = torch.zeros(1, dtype=I32)
        flags = [torch.zeros(world, dtype=I32) for _ in range(world)]
        flag_table = torch.tensor([flag.data_ptr() for flag in flags])
        interlace.run(on_rank, world, seed=seed)
        assert out.item() == 2 * world and not any(map(torch.any, flags))


WAIT = """{{ .reg .pred p; .reg .b32 seen;
    again: {load}.u32 seen, [$1]; setp.ne.u32 p, seen, {expected}; @p bra again; }}"""


@pytest.mark.parametrize("load", ["ld.global.acquire.sys", "ld.volatile.global", "ld.global"])
def test_programs_hand_over(load: str) -> None:
    """A poll by plain loads is not a correct wait, but it must let other programs run."""

    def on_rank() -> list[int]:
        out, data, flag = (torch.zeros(n, dtype=I32) for n in (4, 4, 1))
        wait = WAIT.format(load=load, expected=1)
        ptx_kernels.hand_over[(2,)](out, data, flag, wait)
        return out.tolist()

    for seed in range(5):
        assert interlace.run(on_rank, 1, seed=seed) == [[7] * 4]


@pytest.mark.parametrize("load", ["ld.global.relaxed.sys", "ld.volatile.global"])
def test_a_wait_for_what_never_comes_is_a_deadlock(load: str) -> None:
    def on_rank() -> None:
        out, data, flag = (torch.zeros(n, dtype=I32) for n in (4, 4, 1))
        ptx_kernels.hand_over[(2,)](out, data, flag, WAIT.format(load=load, expected=2))

    with pytest.raises(interlace.DeadlockError, match=r"ptx_kernels\.py:\d+ in hand_over"):
        interlace.run(on_rank, 1)


def test_other_deadlocks() -> None:
    flags = torch.zeros(8, dtype=I32)
    asm = """{ .reg .pred p; .reg .b32 old; again: atom.acquire.sys.cas.b32 old, [$1], 1, 0;
        setp.ne.u32 p, old, 1; @p bra again; }"""
    for count in (1, 2):
        with pytest.raises(interlace.DeadlockError, match="on_pointers"):
            interlace.run(lambda n=count: ptx_kernels.on_pointers[(1,)](flags, n, asm), 1)
    with pytest.raises(interlace.DeadlockError, match="spin_outside"):
        interlace.run(lambda: ptx_kernels.spin_outside[(1,)](flags), 1)
