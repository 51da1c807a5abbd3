"""PTX of lanes that run together, of shared memory and of all ranks, as others write it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.ptx.ptx_forms import MINUS, B, F, Form, H, bits


class LaneForm(NamedTuple):
    """Register %r1 is the lane, %r2 what it has been given; ``expected`` are the lanes' %r3, in bits."""

    text: str
    expected: Sequence[int]
    used: str = ""


LANES = range(32)
GIVEN = [lane * 2654435761 % 2**32 for lane in LANES]
DISTRIBUTED = "Triton-distributed"
EVEN, ODD = 0x55555555, 0xAAAAAAAA
P_ODD = "and.b32 %r4, %r1, 1; setp.ne.s32 %p1, %r4, 0;"
OWN_HALF = f"{P_ODD} selp.b32 %r5, {ODD}, {EVEN}, %p1;"
OF_LANES = [
    LaneForm("shfl.sync.idx.b32 %r3, %r2, 7, 31, -1;", [GIVEN[7]] * 32, f"{DISTRIBUTED}, FlashInfer"),
    LaneForm("shfl.sync.bfly.b32 %r3, %r2, 5, 31, -1;", [GIVEN[i ^ 5] for i in LANES], DISTRIBUTED),
    LaneForm("shfl.sync.down.b32 %r3, %r2, 3, 31, -1;", [GIVEN[i + 3 if i < 29 else i] for i in LANES],
     DISTRIBUTED),
    LaneForm("shfl.sync.up.b32 %r3, %r2, 3, 0, -1;", [GIVEN[i - 3 if i > 2 else i] for i in LANES],
     DISTRIBUTED),
    LaneForm("shfl.sync.idx.b32 %r3, %r2, 2, 0x181f, -1;", [GIVEN[i // 8 * 8 + 2] for i in LANES]),
    LaneForm("shfl.sync.down.b32 %r4|%p1, %r2, 3, 31, -1; selp.b32 %r3, 1, 0, %p1;",
     [int(i < 29) for i in LANES]),
    LaneForm(f"{P_ODD} vote.sync.ballot.b32 %r3, %p1, -1;", [ODD] * 32, DISTRIBUTED),
    LaneForm(f"{P_ODD} vote.sync.all.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;", [0] * 32),
    LaneForm(f"{P_ODD} vote.sync.any.pred %p2, %p1, -1; selp.b32 %r3, 1, 0, %p2;", [1] * 32),
    LaneForm(f"{OWN_HALF} vote.sync.uni.pred %p2, %p1, %r5; selp.b32 %r3, 1, 0, %p2;", [1] * 32),
    LaneForm(f"{P_ODD} match.any.sync.b32 %r3, %r4, -1;", [ODD if i % 2 else EVEN for i in LANES]),
    LaneForm(f"{P_ODD} match.all.sync.b32 %r3|%p2, %r4, -1;", [0] * 32),
    LaneForm(f"{OWN_HALF} match.all.sync.b64 %r3|%p2, 9, %r5;", [ODD if i % 2 else EVEN for i in LANES]),
    LaneForm(f"{P_ODD} mov.b32 %r3, 0; @%p1 activemask.b32 %r3;", [ODD if i % 2 else 0 for i in LANES]),
    LaneForm("elect.sync %r3|%p1, -1; selp.b32 %r3, 1, 0, %p1;", [1, *[0] * 31],
     f"{DISTRIBUTED}, FlashInfer"),
    LaneForm(f"{P_ODD} mov.b32 %r3, 9; @%p1 elect.sync %r3|%p2, {ODD};",
     [1 if i % 2 else 9 for i in LANES]),
    LaneForm(f"{P_ODD} bar.red.popc.u32 %r3, 0, %p1;", [16] * 32),
    LaneForm(f"{P_ODD} barrier.cta.red.and.pred %p2, 1, 32, %p1; selp.b32 %r3, 1, 0, %p2;", [0] * 32),
    LaneForm(f"{P_ODD} bar.red.or.pred %p2, 2, !%p1; selp.b32 %r3, 1, 0, %p2;", [1] * 32),
    LaneForm("bar.sync 3, 32; barrier.sync.aligned 0; mov.b32 %r3, 7;", [7] * 32, DISTRIBUTED),
    LaneForm("redux.sync.add.s32 %r3, %r2, -1;", [sum(GIVEN) % 2**32] * 32),
    LaneForm("redux.sync.max.u32 %r3, %r2, -1;", [max(GIVEN)] * 32),
    LaneForm("redux.sync.xor.b32 %r3, %r1, -1;", [0] * 32),
    LaneForm(f"{OWN_HALF} redux.sync.add.u32 %r3, %r1, %r5;", [256 if i % 2 else 240 for i in LANES]),
    LaneForm("cvt.rn.f32.u32 %r4, %r1; redux.sync.max.NaN.f32 %r3, %r4, -1;", [bits(31)] * 32, "Triton"),
    LaneForm("cvt.rn.f32.u32 %r4, %r1; neg.f32 %r4, %r4; redux.sync.min.abs.f32 %r3, %r4, -1;", [0] * 32),
    LaneForm("mov.b32 %r4, memory; atom.shared.add.u32 %r5, [%r4], 1; bar.warp.sync -1;"
     "ld.shared.b32 %r3, [%r4]; sub.u32 %r3, %r3, 0xA5A5A5A5;", [32] * 32, "FlashInfer"),
    LaneForm(
     "mov.b32 %r4, memory; mad.lo.u32 %r4, %r1, 16, %r4; st.shared.v4.b32 [%r4], {%r1, %r2, %r1, %r2};"
     ".reg .b128 whole; ld.shared.b128 whole, [%r4]; mov.b128 {%rd5, %rd6}, whole;"
     "cvt.u32.u64 %r3, %rd6;", list(LANES), "FlashInfer"),
    LaneForm(".shared .align 4 .b32 flag; .shared .b64 pair[2]; st.shared.b64 [pair+8], 5;"
     "st.shared.b32 [flag], %r1; ld.shared.b32 %r3, [pair+8];", [5] * 32, DISTRIBUTED),
    LaneForm("mov.b64 %rd5, memory; cvta.shared.u64 %rd6, %rd5; mul.wide.u32 %rd7, %r1, 4;"
     "add.s64 %rd6, %rd6, %rd7; st.b32 [%rd6], %r2; isspacep.shared %p1, %rd6;"
     "cvta.to.shared.u64 %rd7, %rd6; cvt.u32.u64 %r5, %rd7; @%p1 ld.shared.b32 %r3, [%r5];", GIVEN,
     DISTRIBUTED),
    LaneForm("setp.lt.u32 %p1, %r1, 16; mov.b64 %rd5, memory; cvta.shared.u64 %rd6, %rd5;"
     "selp.b64 %rd6, %rd6, %rd2, %p1; ld.b32 %r3, [%rd6];",
     [0xA5A5A5A5 if i < 16 else GIVEN[i] for i in LANES]),
]  # fmt: skip


SGLANG = "SGLang, Megatron-core"


def by_switch(
    text: str,
    given: Sequence[int],
    expected: int,
    used: str,
    first: Any,
    second: Any,
    after: Any = (),
) -> Form:
    return Form(text, given, expected, used, first, after, 90, second)


OF_ALL_RANKS = [
    by_switch("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {a, b, c, d}, [m];", [], B(4,
     6), SGLANG, [B(1, 2)] * 4, [B(3, 4)] * 4),
    by_switch("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {d, a, b, c}, [m];", [], F(4),
     "Megatron-core", [F(1)] * 4, [F(3)] * 4),
    by_switch("multimem.ld_reduce.acquire.sys.global.add.v4.f32 {d, a, b, c}, [m];", [], F(4),
     "Triton-distributed", [F(1)] * 4, [F(3)] * 4),
    by_switch("multimem.ld_reduce.weak.global.add.v2.f16x2 {d, a}, [m];", [], H(4, 6), "", [H(1, 2)] * 2,
     [H(3, 4)] * 2),
    by_switch("multimem.ld_reduce.relaxed.sys.global.min.v4.bf16x2 {d, a, b, c}, [m];", [], B(1, -4), "",
     [B(1, 2)] * 4, [B(3, -4)] * 4),
    by_switch("multimem.ld_reduce.relaxed.sys.global.max.s64 dl, [m];", [], 7, "", [7, 0], [MINUS, MINUS]),
    by_switch("multimem.ld_reduce.relaxed.sys.global.and.b32 d, [m];", [], 4, "", [6], [12]),
    by_switch("multimem.ld_reduce.relaxed.gpu.global.add.s32 d, [m];", [], 1, "", [2], [MINUS]),
    by_switch("multimem.st.relaxed.sys.global.v4.f32 [m], {a, b, a, b};", [1, 2], 0, SGLANG, [0] * 4,
     [0] * 4, [1, 2, 1, 2]),
    by_switch("multimem.st.relaxed.sys.global.v2.f32 [m], {a, b};", [1, 2], 0, "Megatron-core", [0], [0],
     [1, 2]),
    by_switch("multimem.st.global.b32 [m], a;", [9], 0, "Triton-distributed", [0], [0], [9]),
    by_switch("multimem.red.release.sys.global.add.u32 [m], a;", [5], 0, "SGLang", [1], [1], [6]),
    by_switch("multimem.red.relaxed.sys.global.or.b32 [m], a;", [5], 0, "", [2], [2], [7]),
    by_switch("multimem.red.relaxed.sys.global.max.s32 [m], a;", [5], 0, "", [2], [2], [5]),
    by_switch("multimem.red.relaxed.sys.global.add.v4.f32 [m], {a, a, a, a};", [F(2)], 0, "", [F(1)] * 4,
     [F(1)] * 4, [F(3)] * 4),
    by_switch("multimem.red.relaxed.sys.global.add.v2.bf16x2 [m], {a, a};", [B(1, 2)], 0, "", [B(1, 1)] * 2,
     [B(1, 1)] * 2, [B(2, 3)] * 2),
]  # fmt: skip
"""Those at multicast addresses; the second rank does nothing."""
