"""PTX of whole kernels: warps, shared memory, divergence; each against an independent formula."""

from typing import Any

import numpy as np
import pytest
import torch

import interlace
from interlace.runtime.core.errors import InterlaceError
from sim.ptx.ptx_texts import computed, kernel

LANES = np.arange(32)
NUMBERS = (LANES * 2654435761 % 2**32).astype(np.uint32)
LOAD, STORE = "ld.global.b32 %r2, [%rd2];", "st.global.b32 [%rd1], %r3;"


def one(body: str, given: Any = NUMBERS, **options: Any) -> list[int]:
    return [int(each) for each in computed(LOAD + body + STORE, given, **options)[:, 0]]


@pytest.mark.parametrize(
    ("body", "source"),
    [
        ("shfl.sync.bfly.b32 %r3, %r2, 5, 31, -1;", LANES ^ 5),
        ("shfl.sync.idx.b32 %r3, %r2, 7, 31, -1;", LANES * 0 + 7),
        ("shfl.sync.down.b32 %r3, %r2, 3, 31, -1;", np.where(LANES < 29, LANES + 3, LANES)),
        ("shfl.sync.up.b32 %r3, %r2, 3, 0, -1;", np.where(LANES >= 3, LANES - 3, LANES)),
        # segments of 8 lanes
        ("shfl.sync.idx.b32 %r3, %r2, 2, 0x181f, -1;", LANES // 8 * 8 + 2),
    ],
)
def test_shuffles(body: str, source: Any) -> None:
    assert one(body) == NUMBERS[source].tolist()


def test_a_shuffle_says_whether_its_source_is_there() -> None:
    body = "shfl.sync.down.b32 %r4|%p1, %r2, 3, 31, -1; selp.b32 %r3, 1, 0, %p1;"
    assert one(body) == (LANES < 29).astype(int).tolist()


def test_reductions_of_a_warp() -> None:
    assert one("redux.sync.add.s32 %r3, %r2, -1;") == [int(NUMBERS.sum() % 2**32)] * 32
    assert one("redux.sync.max.u32 %r3, %r2, -1;") == [int(NUMBERS.max())] * 32


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("bfe.u32 %r3, %r2, 4, 6;", [int(x) >> 4 & 63 for x in NUMBERS]),
        ("bfe.s32 %r3, %r2, 4, 1;", [(-(int(x) >> 4 & 1)) % 2**32 for x in NUMBERS]),
        ("bfe.u32 %r3, %r2, 28, 9;", [int(x) >> 28 for x in NUMBERS]),
        (
            "shf.l.wrap.b32 %r3, %r2, %r2, 5;",
            [int(x) << 5 & 2**32 - 1 | int(x) >> 27 for x in NUMBERS],
        ),
        ("shf.r.clamp.b32 %r3, %r2, %r1, 40;", LANES.tolist()),
        ("prmt.b32 %r3, %r2, %r1, 0x0123;", [int(x) for x in NUMBERS.byteswap()]),
        (
            "prmt.b32 %r3, %r2, 0, 0xBA98;",
            [sum((int(x) >> 8 * i + 7 & 1) * 255 << 8 * i for i in range(4)) for x in NUMBERS],
        ),
        ("lop3.b32 %r3, %r2, %r1, 7, 0x96;", [int(x) ^ i ^ 7 for i, x in enumerate(NUMBERS)]),
        ("mul.hi.u32 %r3, %r2, %r2;", [int(x) * int(x) >> 32 for x in NUMBERS]),
    ],
)
def test_integers_of_a_kernel(body: str, expected: list[int]) -> None:
    assert one(body) == expected


def test_pairs_are_rounded_once() -> None:
    values = torch.linspace(-3, 300, 64).reshape(32, 2)
    body = """
        ld.global.v2.b32 {%r2, %r3}, [%rd2];
        cvt.rn.bf16x2.f32 %r4, %r3, %r2;
        st.global.b32 [%rd1], %r4;"""
    found = computed(body, values.numpy().view(np.uint32), words=2)[:, 0].copy()
    expected = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert found.view(np.uint16).tolist() == expected.reshape(-1).tolist()


# -- matrices --------------------------------------------------------------------------------------

G, T = LANES // 4, LANES % 4  # as the PTX ISA names them


def packed(matrix: torch.Tensor, rows: Any, columns: Any, by_column: bool = False) -> Any:
    """Two neighbours of ``matrix`` in a register: along a row, or down a column."""
    step = (1, 0) if by_column else (0, 1)
    bits = matrix.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[rows, columns] | bits[rows + step[0], columns + step[1]] << 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_product_of_16_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)
    registers = [packed(a, G + r, 2 * T + k) for k in (0, 8) for r in (0, 8)]
    registers += [packed(b, 2 * T + k, G, by_column=True) for k in (0, 8)]
    sums = [c.numpy()[G + r, 2 * T + e] for r in (0, 8) for e in (0, 1)]
    given = np.stack([*registers, *(each.view(np.uint32) for each in sums)], axis=1)
    name = "f16" if dtype == torch.float16 else "bf16"
    body = f"""
        ld.global.v2.b32 {{%r2, %r3}}, [%rd2]; ld.global.v2.b32 {{%r4, %r5}}, [%rd2+8];
        ld.global.v2.b32 {{%r6, %r7}}, [%rd2+16]; ld.global.v2.b32 {{%r8, %r9}}, [%rd2+24];
        ld.global.v2.b32 {{%r10, %r11}}, [%rd2+32];
        mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32
            {{%r12, %r13, %r14, %r15}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, {{%r8, %r9, %r10, %r11}};
        st.global.v2.b32 [%rd1], {{%r12, %r13}}; st.global.v2.b32 [%rd1+8], {{%r14, %r15}};"""
    found = computed(body, given, words=10)[:, :4].view(np.float32)
    expected = (a.double() @ b.double() + c.double()).numpy()
    for index, (r, e) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
        np.testing.assert_allclose(found[:, index], expected[G + r, 2 * T + e], rtol=0, atol=1e-5)


def test_matrix_product_of_tf32() -> None:
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randint(-8, 8, s, generator=generator).float() for s in ((16, 8), (8, 8))]
    a, b = (each.numpy() for each in whole)
    left = [a[G + r, T + k] for k in (0, 4) for r in (0, 8)]
    given = np.stack([*left, b[T, G], b[T + 4, G]], axis=1).astype(np.float32).view(np.uint32)
    body = """
        ld.global.v2.b32 {%r2, %r3}, [%rd2]; ld.global.v2.b32 {%r4, %r5}, [%rd2+8];
        ld.global.v2.b32 {%r6, %r7}, [%rd2+16]; mov.b32 %r8, 0f3F800000;
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
            {%r12, %r13, %r14, %r15}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%r8, %r8, %r8, %r8};
        st.global.v2.b32 [%rd1], {%r12, %r13}; st.global.v2.b32 [%rd1+8], {%r14, %r15};"""
    found = computed(body, given, words=6)[:, :4].view(np.float32)
    for index, (r, e) in enumerate([(0, 0), (0, 1), (8, 0), (8, 1)]):
        assert found[:, index].tolist() == (a @ b + 1)[G + r, 2 * T + e].tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed: bool) -> None:
    """Lane 4 g + t gets numbers 2 t and 2 t + 1 of row g of each matrix; transposed, of column g."""
    numbers = np.arange(256, dtype=np.uint16)  # 4 matrices of 8 x 8; a lane stores a row
    body = f"""
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd2];
        mov.b32 %r6, memory; shl.b32 %r7, %r1, 4; add.s32 %r6, %r6, %r7;
        st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{".trans" if transposed else ""}.shared.b16
            {{%r8, %r9, %r10, %r11}}, [%r6];
        st.global.v4.b32 [%rd1], {{%r8, %r9, %r10, %r11}};"""
    found = computed(body, numbers.view(np.uint32), words=4).view(np.uint16).reshape(32, 4, 2)
    matrices = numbers.reshape(4, 8, 8)
    rows = matrices.swapaxes(1, 2) if transposed else matrices
    for half in (0, 1):
        assert found[:, :, half].T.tolist() == rows[:, G, 2 * T + half].tolist()


# -- threads that part -----------------------------------------------------------------------------

DIVERGING = """
    and.b32 %r4, %r1, 3;
    mov.b32 %r3, 0;
    setp.eq.s32 %p1, %r4, 0;
    @%p1 bra MEET;
    again:
    add.s32 %r3, %r3, %r1;
    sub.s32 %r4, %r4, 1;
    setp.ne.s32 %p2, %r4, 0;
    @%p2 bra again;
    MEET:
    shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1;"""


def test_threads_that_part_meet_again() -> None:
    """Lane i goes round i % 4 times; the shuffle after that needs all of them."""
    assert one(DIVERGING) == ((LANES ^ 1) % 4 * (LANES ^ 1)).tolist()


def test_a_thread_may_wait_for_one_of_its_own_warp() -> None:
    body = """
        setp.eq.s32 %p1, %r1, 31;
        @%p1 bra GIVE;
        poll: ld.relaxed.gpu.global.b32 %r3, [%rd4];
        setp.eq.s32 %p2, %r3, 0;
        @%p2 bra poll;
        bra.uni DONE;
        GIVE: mov.b32 %r3, 7; st.relaxed.gpu.global.b32 [%rd4], %r3;
        DONE:"""
    flag = "ld.param.b64 %rd4, [kernel_param_1];"
    assert one(flag + body, np.zeros(32)) == [7] * 32


def test_barriers_that_not_all_reach_are_an_error() -> None:
    body = """
        setp.eq.s32 %p1, %r1, 0; @%p1 bra END;
        bar.warp.sync -1;
        END: shfl.sync.idx.b32 %r3, %r2, 0, 31, -1;"""
    with pytest.raises(InterlaceError, match=r"wait for each other, at .*(bar.warp|shfl)"):
        one(body)


def test_barriers_join_warps() -> None:
    """Each of 64 threads reads what one of the other warp has written."""
    body = """
        mov.b32 %r5, memory; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6;
        st.shared.b32 [%r7], %r2;
        bar.sync 0;
        xor.b32 %r8, %r6, 128; add.s32 %r7, %r5, %r8; ld.shared.b32 %r3, [%r7];"""
    given = np.arange(64) * 3
    assert one(body, given, threads=64) == given[np.arange(64) ^ 32].tolist()


@pytest.mark.parametrize(("wait", "there"), [("wait_group 0", True), ("wait_group 1", False)])
def test_copies_are_there_when_their_group_was_waited_for(wait: str, there: bool) -> None:
    """And lanes whose length is 0 fill with zeros, from any address."""
    body = f"""
        mov.b32 %r5, memory; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6;
        mov.b32 %r8, 7; st.shared.b32 [%r7], %r8;
        setp.lt.s32 %p1, %r1, 16; selp.b32 %r9, 4, 0, %p1; selp.b64 %rd5, %rd2, 3, %p1;
        cp.async.ca.shared.global [%r7], [%rd5], 4, %r9;
        cp.async.commit_group;
        cp.async.{wait};
        ld.shared.b32 %r3, [%r7];"""
    copied = np.where(LANES < 16, NUMBERS, 0).tolist()
    assert one(body) == (copied if there else [7] * 32)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            "frobnicate.b32 %r3, %r2;",
            r"instruction 'frobnicate.b32' is not known.*line \d+: frobnicate",
        ),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "mma"),
        ("cp.async.bulk.commit_group;", "instruction 'cp.async.bulk.commit_group' is not known"),
        ("ld.local.b32 %r3, [%rd1];", "state space '.local' is not known"),
    ],
)
def test_what_is_not_known_is_named(body: str, match: str) -> None:
    with pytest.raises(NotImplementedError, match=match):
        one(body)


def test_shared_memory_ends() -> None:
    with pytest.raises(ValueError, match="byte 4096 of shared memory, which has 4096 bytes"):
        one("mov.b32 %r4, 4096; ld.shared.b32 %r3, [%r4];")


def test_ptx_is_for_its_place() -> None:
    with pytest.raises(interlace.InterlaceError, match='place="ptx" runs PTX'):
        interlace.run(lambda: interlace.verify.launch_ptx(kernel(""), 1), 1)
    with pytest.raises(TypeError, match="kernel has 2 parameters, and was given 3 values"):
        interlace.run(lambda: interlace.verify.launch_ptx(kernel(""), 1, 1, 2, 3), 1, place="ptx")
