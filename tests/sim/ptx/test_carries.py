"""Carries and borrows: whole numbers longer than a register, against Python's, and what needs them."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import interlace
from sim.ptx.ptx_texts import computed

EDGES = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**96 - 2**64, 2**127, 2**128 - 1)


def pairs(count: int = 32) -> list[tuple[int, int]]:
    """Numbers of 128 bits, some of which carry through a whole word."""
    random = np.random.default_rng(0)
    drawn = [int.from_bytes(random.bytes(16), "little") for _ in range(2 * count)]
    given = [*EDGES, *drawn]
    return [(given[i], given[(5 * i + 1) % len(given)]) for i in range(count)]


def in_words(number: int, count: int) -> list[int]:
    return [number >> 32 * i & 2**32 - 1 for i in range(count)]


def of_words(row: Any) -> int:
    return sum(int(word) << 32 * i for i, word in enumerate(row))


def loaded(words: int) -> str:
    """Of a thread's words the first half are %r10 and on, the others %r30 and on."""
    return " ".join(
        f"ld.global.b32 %r{(10 if i < words // 2 else 30 - words // 2) + i}, [%rd2+{4 * i}];"
        for i in range(words)
    )


def stored(words: int) -> str:
    return " ".join(f"st.global.b32 [%rd1+{4 * i}], %r{50 + i};" for i in range(words))


def halves(result: str) -> str:
    """%rd10 and %rd11 are the first number, %rd12 and %rd13 the second; ``result`` names %rd14, %rd15."""
    packed = " ".join(
        f"mov.b64 %rd{10 + i}, {{%r{low}, %r{low + 1}}};" for i, low in enumerate((10, 12, 30, 32))
    )
    return f"{packed} {result} mov.b64 {{%r50, %r51}}, %rd14; mov.b64 {{%r52, %r53}}, %rd15;"


def chain(name: str) -> str:
    body = [f"{name}.cc.u32 %r50, %r10, %r30;"]
    body += [f"{name}c.cc.u32 %r{50 + i}, %r{10 + i}, %r{30 + i};" for i in (1, 2)]
    return " ".join([*body, f"{name}c.s32 %r53, %r13, %r33;"])


@pytest.mark.parametrize(
    ("body", "exact"),
    [
        (chain("add"), lambda a, b: a + b),
        (chain("sub"), lambda a, b: a - b),
        (
            halves("add.cc.u64 %rd14, %rd10, %rd12; addc.u64 %rd15, %rd11, %rd13;"),
            lambda a, b: a + b,
        ),
        (
            halves("sub.cc.s64 %rd14, %rd10, %rd12; subc.s64 %rd15, %rd11, %rd13;"),
            lambda a, b: a - b,
        ),
        (  # 64 bits times 64, and the first number's upper half
            halves("mad.lo.cc.u64 %rd14, %rd10, %rd12, %rd11; madc.hi.u64 %rd15, %rd10, %rd12, 0;"),
            lambda a, b: (a % 2**64) * (b % 2**64) + (a >> 64),
        ),
    ],
)
def test_numbers_of_several_registers(body: str, exact: Any) -> None:
    given = [in_words(a, 4) + in_words(b, 4) for a, b in pairs()]
    found = computed(loaded(8) + body + stored(4), given, words=8)[:, :4]
    assert [of_words(row) for row in found] == [exact(a, b) % 2**128 for a, b in pairs()]


def test_a_product_by_words_is_that_of_the_ptx_isa() -> None:
    """128 bits of 64 x 64: low parts with .cc, high parts with what they carry."""
    body = """
        mul.lo.u32 %r50, %r10, %r30;       mul.hi.u32 %r51, %r10, %r30;
        mad.lo.cc.u32 %r51, %r10, %r31, %r51;  madc.hi.u32 %r52, %r10, %r31, 0;
        mad.lo.cc.u32 %r51, %r11, %r30, %r51;  madc.hi.cc.u32 %r52, %r11, %r30, %r52;
        addc.u32 %r53, 0, 0;
        mad.lo.cc.u32 %r52, %r11, %r31, %r52;  madc.hi.u32 %r53, %r11, %r31, %r53;"""
    given = [(a % 2**64, b % 2**64) for a, b in pairs()]
    words = [in_words(a, 2) + in_words(b, 2) for a, b in given]
    found = computed(loaded(4) + body + stored(4), words, words=4)
    assert [of_words(row) for row in found] == [a * b for a, b in given]


def test_a_signed_high_product_and_a_guard_keep_to_their_threads() -> None:
    body = """
        setp.lt.u32 %p1, %r1, 16;
        add.cc.u32 %r2, -1, 1;
        @%p1 add.cc.u32 %r2, 1, 1;
        madc.hi.s32 %r50, %r10, %r30, 0;"""
    given = np.random.default_rng(1).integers(-(2**31), 2**31, (32, 2), np.int64)
    found = computed(loaded(2) + body + stored(1), given.astype(np.uint32), words=2)[:, 0]
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
