"""PTX of whole kernels: warps, shared memory, divergence; each against an independent formula."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import interlace
from sim.ptx.ptx_texts import computed, kernel, octets

LANES = np.arange(32)
NUMBERS = (LANES * 2654435761 % 2**32).astype(np.uint32)
LOAD, STORE = "ld.global.b32 %r2, [%rd2];", "st.global.b32 [%rd1], %r3;"


def one(body: str, given: Any = NUMBERS) -> list[int]:
    return [int(each) for each in computed(LOAD + body + STORE, given)[:, 0]]


# -- matrices --------------------------------------------------------------------------------------

G, T = LANES // 4, LANES % 4  # as the PTX ISA names them


def words(matrix: Any, name: str) -> Any:
    """(rows, registers) of what lies next to each other in a row."""
    return octets(matrix, name).view("u4")


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (16, "f32 f16 f16"),
        (8, "f32 bf16 bf16"),
        (16, "f16 f16 f16"),
        (8, "f32 tf32 tf32"),
        (4, "f32 tf32 tf32"),
        (32, "f32 e4m3 e5m2"),
        (32, "s32 s8 u8"),
        (16, "s32 u8 u8"),
    ],
)
def test_matrix_products(depth: int, names: str) -> None:
    """Lane (g, t) has registers of rows g and g + 8 of A, of column g of B, and pairs of C and D."""
    total, left, right = names.split()
    random = np.random.default_rng(depth)
    low = 0 if "u8" in names else -4
    a, b = (random.integers(low, 5, (n, depth)).astype(np.float32) for n in (16, 8))
    c = random.integers(0, 9, (16, 8)).astype(np.float32)
    first, second, sums = words(a, left), words(b, right), words(c, total)
    parts = range(first.shape[1] // 4)  # every fourth register of a row
    each = [first[G + 8 * (i % 2), T + 4 * (i // 2)] for i in range(2 * len(parts))]
    each += [second[G, T + 4 * i] for i in parts]
    pairs = 8 // sums.shape[1]  # in a register
    of_sums = [(8 * (i * pairs // 2), i * pairs % 2) for i in range(4 // pairs)]
    each += [sums[G + row, (2 * T + e) // pairs] for row, e in of_sums]
    names_of = [f"%r{10 + i}" for i in range(len(each))]
    d = [f"%r{40 + i}" for i in range(len(of_sums))]
    ends = [0, len(parts) * 2, len(parts) * 3, len(each)]
    operands = [names_of[i:j] for i, j in itertools.pairwise(ends)]
    body = f"""
        {" ".join(f"ld.global.b32 {r}, [%rd2+{4 * i}];" for i, r in enumerate(names_of))}
        mma.sync.aligned.m16n8k{depth}.row.col.{total}.{left}.{right}.{total}
            {", ".join("{" + ", ".join(each) + "}" for each in (d, *operands))};
        {" ".join(f"st.global.b32 [%rd1+{4 * i}], {r};" for i, r in enumerate(d))}"""
    arch = 90 if "e4m3" in names else 80
    found = computed(body, np.stack(each, axis=1), words=len(each), arch=arch)[:, : len(d)]
    expected = words((a @ b.T + c).astype(np.float32), total)
    for index, (row, e) in enumerate(of_sums):
        assert found[:, index].tolist() == expected[G + row, (2 * T + e) // pairs].tolist()


def test_matrix_product_of_fp64() -> None:
    a, b, c = (np.random.default_rng(0).random(shape) for shape in ((8, 4), (8, 4), (8, 8)))
    given = np.stack([a[G, T], b[G, T], c[G, 2 * T], c[G, 2 * T + 1]], axis=1)
    body = """
        ld.global.v2.b64 {%rd4, %rd5}, [%rd2]; ld.global.v2.b64 {%rd6, %rd7}, [%rd2+16];
        mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd6, %rd7}, {%rd4}, {%rd5}, {%rd6, %rd7};
        st.global.v2.b64 [%rd1], {%rd6, %rd7};"""
    found = computed(body, given.view(np.uint32), words=8)[:, :4].copy().view(np.float64)
    for e in (0, 1):
        np.testing.assert_allclose(found[:, e], (a @ b.T + c)[G, 2 * T + e], rtol=1e-15)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_shared_memory(transposed: bool) -> None:
    """Lane 4 g + t gets numbers 2 t and 2 t + 1 of row g of each matrix; transposed, of column g.

    And puts them back where they were.
    """
    numbers = np.arange(256, dtype=np.uint16)  # 4 matrices of 8 x 8; a lane stores a row
    turned = ".trans" if transposed else ""
    body = f"""
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd2];
        mov.b32 %r6, memory; shl.b32 %r7, %r1, 4; add.s32 %r6, %r6, %r7;
        st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r6];
        stmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 [%r6+2048], {{%r8, %r9, %r10, %r11}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6+2048];
        st.global.v4.b32 [%rd1], {{%r8, %r9, %r10, %r11}};
        st.global.v4.b32 [%rd1+16], {{%r2, %r3, %r4, %r5}};"""
    given = np.zeros((32, 8), np.uint32)
    given[:, :4] = numbers.view(np.uint32).reshape(32, 4)
    words = computed(body, given, words=8, arch=90)
    assert (words[:, 4:] == given[:, :4]).all()
    found = words[:, :4].copy().view(np.uint16).reshape(32, 4, 2)
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


# -- carries -------------------------------------------------------------------------------------


def test_a_signed_high_product_and_a_guard_keep_to_their_threads() -> None:
    body = """
        setp.lt.u32 %p1, %r1, 16;
        add.cc.u32 %r2, -1, 1;
        @%p1 add.cc.u32 %r2, 1, 1;
        ld.global.v2.b32 {%r10, %r30}, [%rd2];
        madc.hi.s32 %r50, %r10, %r30, 0;
        st.global.b32 [%rd1], %r50;"""
    given = np.random.default_rng(1).integers(-(2**31), 2**31, (32, 2), np.int64)
    found = computed(body, given.astype(np.uint32), words=2)[:, 0]
    carried = np.arange(32) >= 16
    assert found.view(np.int32).tolist() == ((given[:, 0] * given[:, 1] >> 32) + carried).tolist()


@triton.jit
def waves_kernel(x, sines, cosines, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(sines + at, tl.sin(value))
    tl.store(cosines + at, tl.cos(value))


def test_sines_of_large_numbers() -> None:
    """Their argument is reduced by a table of digits of 2 / pi, and carries."""
    given = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x = (given * torch.tensor([[3.0], [1e6], [1e20], [1e37]])).reshape(-1)

    def on_rank() -> list[torch.Tensor]:
        found = [torch.empty(128), torch.empty(128)]
        waves_kernel[(1,)](x, *found, N=128)
        return found

    sines, cosines = interlace.run(on_rank, 1, place="ptx")[0]
    exact = x.numpy().astype(np.float64)
    for found, of_numpy in ((sines, np.sin(exact)), (cosines, np.cos(exact))):
        assert np.abs(found.numpy() - of_numpy).max() < 2**-22  # 2 ulp of what is at most 1


# -- what is refused -------------------------------------------------------------------------------


def test_shared_memory_ends() -> None:
    with pytest.raises(ValueError, match="byte 4096 of shared memory, which has 4096 bytes"):
        one("mov.b32 %r4, 4096; ld.shared.b32 %r3, [%r4];")


def test_ptx_is_for_its_place() -> None:
    with pytest.raises(interlace.InterlaceError, match='place="ptx" runs PTX'):
        interlace.run(lambda: interlace.verify.launch_ptx(kernel(""), 1), 1)
    with pytest.raises(ValueError, match="grid must be 1 to 3 whole numbers"):
        interlace.run(lambda: interlace.verify.launch_ptx(kernel(""), (1, 1, 1, 1)), 1, place="ptx")
    with pytest.raises(TypeError, match="kernel has 2 parameters, got 3 values"):
        interlace.run(lambda: interlace.verify.launch_ptx(kernel(""), 1, 1, 2, 3), 1, place="ptx")
