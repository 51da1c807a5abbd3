"""Inline PTX in the interpreter: threads, memory, and how programs and ranks signal each other."""

from typing import Any

import pytest
import torch

import interlace
from interlace import symmetric_memory, verify
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


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "b32", "s32", "u64", "f32", "f64"])
@pytest.mark.parametrize(
    ("load", "store"),
    [
        ("ld.global", "st.global"),
        ("ld.volatile", "st.volatile"),
        ("ld.relaxed.gpu.global", "st.relaxed.cta"),
        ("ld.global.acquire.sys", "st.global.release.sys"),
        ("ld.weak.global.L1::no_allocate", "st.global.wt"),
    ],
)
def test_loads_and_stores(load: str, store: str, kind: str) -> None:
    bits = int(kind[1:])
    memory = torch.arange(-1, 47).to(torch.int8)
    memory[2 * bits // 8 + bits // 8 - 1] = -100
    before = memory.clone()
    register = "b16" if bits == 8 else f"b{bits}"
    asm = f"""{{ .reg .{register} t; {load}.{kind} t, [$1 + {2 * bits // 8}]; {store}.{kind} [$1], t;
        mov.u32 $0, 0; }}"""
    interlace.run(lambda: in_memory(asm, memory), 1)
    size = bits // 8
    assert torch.equal(memory[:size], before[2 * size : 3 * size])
    assert torch.equal(memory[size:], before[size:])


def test_loads_extend_into_wider_registers_and_vectors_are_one_access_each() -> None:
    memory = torch.tensor([-1, 2, 3, 4], dtype=I32)

    def on_rank() -> list[int]:
        return [
            in_memory("ld.s8 $0, [$1];", memory, I64),
            in_memory("ld.u8 $0, [$1];", memory, I64),
            in_memory(
                "{.reg .u32 a<4>; ld.v4.u32 {a0, a1, a2, a3}, [$1]; mov.u32 $0, a3;}", memory
            ),
            in_memory("ld.acquire.sys.global.v2.u32 {_, $0}, [$1];", memory),
            in_memory("st.v2.u32 [$1+8], {8, 9}; mov.u32 $0, 0;", memory),
        ]

    assert interlace.run(on_rank, 1)[0] == [-1, 255, 4, 2, 0]
    assert memory.tolist() == [-1, 2, 8, 9]


# -- signals ---------------------------------------------------------------------------------------


BLOCKS, COUNT = 2, 8
UP = ptx_kernels.RAISE.format(sem="release", scope="sys")
DOWN = ptx_kernels.LOWER.format(sem="acquire", scope="sys")


def exchanged(world: int, up: str = UP, down: str = DOWN, meet: bool = True) -> list[list[int]]:
    """Return the results of a rank in each of three rounds."""
    memory = symmetric_memory.empty(BLOCKS * world * COUNT, dtype=I32)
    handle = symmetric_memory.rendezvous(memory, None)
    flags, buffers = handle.signal_pad_ptrs_dev, handle.buffer_ptrs_dev
    totals = []
    for _ in range(3):
        out = torch.zeros(BLOCKS * COUNT, dtype=I32)
        ptx_kernels.exchange[(BLOCKS,)](
            out, flags, buffers, handle.rank, world, COUNT, up, down, meet
        )
        totals.append(out.unique().tolist())
    return totals


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_meet(world: int) -> None:
    for seed in range(3):
        expected = [[world * (world + 1) // 2]] * 3
        assert interlace.run(exchanged, world, world, seed=seed) == [expected] * world


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"up": UP.replace("release", "relaxed")}, "weak order"),
        ({"down": DOWN.replace("acquire", "relaxed")}, "weak order"),
        ({"up": UP.replace("sys", "gpu")}, "narrow scope"),
        ({"meet": False}, "no barrier"),
    ],
)
@pytest.mark.parametrize("store_buffers", [False, True])
def test_races_are_found(change: dict[str, Any], kind: str | None, store_buffers: bool) -> None:
    report = verify.races(exchanged, 2, 2, seeds=1, store_buffers=store_buffers, **change)
    kinds = {finding.kind for finding in report.findings}
    # without a barrier a load may come before its thread's wait has ended: then it needs more than that
    assert kinds & {kind, "write-read"} if kind else not kinds
    assert report.clean == (kind is None) and not report.errors


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
