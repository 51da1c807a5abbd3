"""Casts to and from bf16, fp16 and fp8 in the interpreter: every pattern and every rounding case.

The oracle is torch. Where torch differs from the hardware (fp8 overflow; integers and fp64 to
bf16, which torch rounds twice) it is written out here.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from cases.exact_numbers import (
    BF16,
    E4M3,
    F32,
    LARGEST,
    NARROW,
    any_bits,
    every,
    rounded,
    rounding_cases,
    same,
)
from interlace.runtime.compat.stand_ins import replaced
from interlace.runtime.places.sim.interpreter.exact import exact_arithmetic


@triton.jit
def cast(x_ptr, out_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


pytestmark = pytest.mark.skipif(
    not isinstance(cast, interpreter.InterpretedFunction),
    reason="triton was loaded for the compiler: set TRITON_INTERPRET=1",
)


@pytest.fixture
def exact() -> Iterator[None]:
    with replaced(*exact_arithmetic()):
        yield


def run_cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast[(1,)](x, out, N=x.numel(), ROUNDING=rounding)
    return out


@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("target", [*NARROW, F32, torch.float64])
def test_cast_of_every_pattern(exact: None, source: torch.dtype, target: torch.dtype) -> None:
    if source == target or (target == torch.float64 and source in LARGEST):
        return
    x = every(source)
    want = x.double() if target == torch.float64 else rounded(x.float(), target)
    assert same(run_cast(x, target), want)


@pytest.mark.parametrize("target", NARROW)
def test_cast_rounds_to_nearest_even(exact: None, target: torch.dtype) -> None:
    x = rounding_cases(target)
    assert same(run_cast(x, target), rounded(x, target))
    x = any_bits(1 << 15, seed=1)
    assert same(run_cast(x, target), rounded(x, target))


@pytest.mark.parametrize("target", NARROW)
def test_cast_toward_zero(exact: None, target: torch.dtype) -> None:
    cases = rounding_cases(target)
    x = torch.cat([cases, any_bits(cases.numel(), seed=2)])
    got = run_cast(x, target, "rtz").float()
    finite = x.isfinite()
    assert bool((got.abs() <= x.abs())[finite].all())
    nearest = rounded(x, target).float()
    short = finite & (nearest.abs() <= x.abs())  # nearest went toward zero by itself
    assert torch.equal(got[short], nearest[short])
    exact_already = finite & (nearest == x)
    assert torch.equal(got[exact_already], x[exact_already])
    assert bool(got[x.isnan()].isnan().all())


@pytest.mark.parametrize("target", [torch.int32, torch.int8, torch.int64])
def test_bf16_to_integer(exact: None, target: torch.dtype) -> None:
    x = every(BF16)
    x = torch.where(x.float().abs() < 127, x, torch.zeros((), dtype=BF16))
    assert torch.equal(run_cast(x, target), x.to(target))


def test_bf16_and_bool(exact: None) -> None:
    x = every(BF16)
    assert torch.equal(run_cast(x, torch.bool), x.to(torch.bool))
    truth = torch.tensor([True, False] * 8)
    assert same(run_cast(truth, BF16), truth.to(BF16))


@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integer_to_bf16_rounds_once(exact: None, source: torch.dtype) -> None:
    info = torch.iinfo(source)
    x = torch.from_numpy(np.random.default_rng(3).integers(info.min, info.max, 1024))
    x >>= torch.arange(1024) % info.bits  # every magnitude
    tie = [(1 << 24) + (1 << 16), (1 << 24) + (1 << 16) + 1, (1 << 24) + (1 << 16) - 1]
    x[:3] = torch.tensor(tie if info.bits > 16 else [0, 1, 2])
    if info.bits == 64:
        x[3:6] = torch.tensor([(1 << 61) + (1 << 53) + d for d in (-1, 0, 1)])
        x[6:8] = torch.tensor([info.min, info.max])
    x = x.to(source)
    want = torch.tensor([nearest_even(int(v), 8) for v in x], dtype=torch.float64).to(BF16)
    assert same(run_cast(x, BF16), want)


def nearest_even(value: int, digits: int) -> float:
    shift = max(abs(value).bit_length() - digits, 0)
    quotient, rest = divmod(abs(value), 1 << shift)
    half = (1 << shift) >> 1
    if shift and (rest > half or (rest == half and quotient & 1)):
        quotient += 1
    return float(quotient << shift) * (-1 if value < 0 else 1)


def test_fp64_to_bf16_rounds_once(exact: None) -> None:
    tie = 1 + 2**-8
    x = torch.tensor([tie + 2**-40, tie, tie - 2**-40, 1e300], dtype=torch.float64)
    assert run_cast(x, BF16).tolist() == [1 + 2**-7, 1.0, 1.0, torch.inf]


@pytest.mark.filterwarnings("ignore")
def test_stock_interpreter_is_wrong() -> None:
    assert not same(run_cast(rounding_cases(E4M3), BF16), rounding_cases(E4M3).to(BF16))
    cases = rounding_cases(E4M3)
    assert not same(run_cast(cases, E4M3), rounded(cases, E4M3))
