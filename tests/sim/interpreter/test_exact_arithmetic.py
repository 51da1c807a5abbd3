"""Arithmetic on bf16, fp16 and fp8 tiles in the interpreter, against torch in fp32 rounded once.

The last test is the negative control: the stock interpreter answers the same questions wrongly.
"""

import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from cases.exact_numbers import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    LARGEST,
    NARROW,
    any_bits,
    every,
    pair,
    rounded,
    rounding_cases,
    same,
)
from interlace.runtime.compat.stand_ins import replacing
from interlace.runtime.places.sim.interpreter.exact import exact_arithmetic
from interlace.verify import races
from tiers import few


@triton.jit
def binary(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, N)
    out = OP(tl.load(x_ptr + at), tl.load(y_ptr + at))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty))


@triton.jit
def fused(x_ptr, y_ptr, z_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    out = tl.fma(tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at))
    tl.store(out_ptr + at, out)


@triton.jit
def dot(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    out = tl.dot(a, b, out_dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * N + n[None, :], out)


@triton.jit
def reduce(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, OP: tl.constexpr, AXIS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    out = OP(x, AXIS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.arange(0, N if AXIS == 0 else M), out)


@triton.jit
def own_sum(a, b):
    return a + b


@triton.jit
def constants(x_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, tl.full((N,), 1.5, dtype))
    tl.store(out_ptr + N + at, tl.zeros((N,), dtype))
    tl.store(out_ptr + 2 * N + at, tl.load(x_ptr + at, mask=at < n, other=-3.0))
    tl.store(out_ptr + 3 * N + at, (tl.load(x_ptr + at) * 0.5 + 1.0).to(dtype))


@triton.jit
def atomic_add(x_ptr, out_ptr):
    tl.atomic_add(x_ptr, 1.5)
    at = tl.arange(0, 8)
    before = tl.atomic_add(x_ptr + 8 + at, at.to(tl.float32), mask=at < 5)
    tl.store(out_ptr + at, before, mask=at < 5)
    tl.atomic_add(x_ptr + at % 2, 256.0)


@triton.jit
def padded(x_ptr, out_ptr, N: tl.constexpr):
    inside = tl.make_tensor_descriptor(x_ptr, [1, N], [N, 1], [2, N], padding_option="nan")
    tile = inside.load([0, 0])
    at = tl.arange(0, 2)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, tile)


pytestmark = pytest.mark.skipif(
    not isinstance(binary, interpreter.InterpretedFunction),
    reason="triton was loaded for the compiler: set TRITON_INTERPRET=1",
)


@pytest.fixture
def exact() -> Iterator[None]:
    with replacing(*exact_arithmetic()):
        yield


# Elementwise

Op = Callable[[Any, Any], Any]
OPERATIONS: dict[str, tuple[Op, Op]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "truediv": (operator.truediv, operator.truediv),
    "fmod": (operator.mod, torch.fmod),
    "abs": (lambda x, y: tl.abs(x), lambda x, y: x.abs()),
    # 0 - x before Triton had the operation
    "neg": (
        lambda x, y: -x,
        lambda x, y: -x if hasattr(interpreter.interpreter_builder, "create_fneg") else 0 - x,
    ),
    "where": (lambda x, y: tl.where(x < y, x, 1.5), lambda x, y: torch.where(x < y, x, 1.5)),
}
"""Those of Triton, and of torch."""


def run_binary(op: Op, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    binary[(1,)](x, y, out, N=x.numel(), OP=op)
    return out


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", OPERATIONS)
def test_elementwise(exact: None, dtype: torch.dtype, op: str) -> None:
    if op in ("fmod", "truediv") and dtype in LARGEST:
        return  # no such operation in triton
    x, y = pair(dtype, 4096, seed=4)
    of_triton, of_torch = OPERATIONS[op]
    want = rounded(of_torch(x.float(), y.float()), dtype)
    assert same(run_binary(of_triton, x, y, dtype), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_high_products_have_no_sign(exact: None, dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    x = torch.tensor([-1, -1, 7, -(1 << bits - 1)] * 4, dtype=dtype)
    y = torch.tensor([-1, 2, 5, -3] * 4, dtype=dtype)
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    want = [(a % 2**bits * (b % 2**bits)) >> bits for a, b in pairs]
    found = run_binary(lambda x, y: tl.umulhi(x, y), x, y, dtype)
    assert [each % 2**bits for each in found.tolist()] == want


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("op", [operator.lt, operator.ge, operator.eq, operator.ne])
@pytest.mark.parametrize("target", [torch.int32, BF16, F32])
def test_comparisons(exact: None, dtype: torch.dtype, op: Op, target: torch.dtype) -> None:
    x, y = pair(dtype, 512, seed=5)
    y[100:200] = x[100:200]
    want = op(x.float(), y.float())
    assert torch.equal(run_binary(op, x, y, target), want.to(target))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_min_max_return_the_number(exact: None, dtype: torch.dtype, name: str) -> None:
    x, y = pair(dtype, 512, seed=6)
    want = getattr(torch, f"f{name[:3]}")(x.float(), y.float())
    found = run_binary(lambda x, y: getattr(tl, name)(x, y), x, y, F32)
    assert torch.equal(found.nan_to_num(7e7), want.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_exp_and_clamp(exact: None, dtype: torch.dtype) -> None:
    x, y = pair(dtype, 512, seed=7)
    got, want = run_binary(lambda x, y: tl.exp(x.to(tl.float32)), x, y, F32), x.float().exp()
    assert torch.allclose(got, want, rtol=2**-20, equal_nan=True)
    number = torch.where(y.isnan(), x, y).float()
    got = run_binary(lambda x, y: tl.clamp(x, y, y), x, y, F32)
    assert torch.equal(got[~y.isnan()], number[~y.isnan()])


def test_fma_fp32_rounds_once(exact: None) -> None:
    generator = torch.Generator().manual_seed(8)
    x, y = (torch.randn(512, generator=generator) for _ in range(2))
    z = -(x * y) * torch.tensor([1.0, 1.0 + 2**-23, 0.5, 2**-26]).repeat(128)
    z[::8] = torch.randn(64, generator=generator)
    out = torch.empty(512)
    fused[(1,)](x, y, z, out, N=512)
    for a, b, c, got in zip(x.tolist(), y.tolist(), z.tolist(), out, strict=True):
        true = Fraction(a) * Fraction(b) + Fraction(c)
        error = abs(Fraction(got.item()) - true)
        for way in (torch.inf, -torch.inf):
            other = torch.nextafter(got, torch.tensor(way)).item()
            assert error <= abs(Fraction(other) - true)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_fma_narrow(exact: None, dtype: torch.dtype) -> None:
    x, y = pair(dtype, 512, seed=9)
    z = pair(dtype, 512, seed=10)[0]
    out = torch.empty(512, dtype=dtype)
    fused[(1,)](x, y, z, out, N=512)
    # fp64 holds the product exactly, and with these magnitudes the sum as well.
    true = x.double() * y.double() + z.double()
    # torch goes through fp32 on the way to bf16, which makes a tie of no draw of these seeds.
    half = torch.from_numpy(true.numpy().astype(np.float16))
    assert same(out, half if dtype == F16 else true.to(BF16))


# Dot, reductions, constants


@pytest.mark.parametrize(("left", "right"), [(BF16, BF16), (F16, F16), (E4M3, E5M2), (E5M2, E5M2)])
def test_dot(exact: None, left: torch.dtype, right: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    a = rounded(torch.randn(16, 64, generator=generator), left)
    b = rounded(torch.randn(64, 32, generator=generator), right)
    out = torch.empty(16, 32)
    dot[(1,)](a, b, out, M=16, N=32, K=64)
    bound = 64 * 2**-24 * (a.double().abs() @ b.double().abs())
    assert bool(((out.double() - a.double() @ b.double()).abs() <= bound).all())


def test_dot_accumulates_fp16_in_fp32(exact: None) -> None:
    a = torch.full((16, 2048), 1.0, dtype=F16)
    b = torch.full((2048, 16), 1.0009765625, dtype=F16)
    b[::2] = -1.0
    out = torch.empty(16, 16, dtype=F16)
    dot[(1,)](a, b, out, M=16, N=16, K=2048)
    assert torch.equal(out, torch.full_like(out, 1.0))


def whole_numbers(dtype: torch.dtype) -> torch.Tensor:
    """16 x 32 small integers: every order of fp32 additions gives the same, exact sum."""
    generator = torch.Generator().manual_seed(12)
    return torch.randint(-4, 9, (16, 32), generator=generator).to(dtype)


SUM: Op = lambda x, axis: tl.sum(x, axis)  # noqa: E731


def run_reduce(op: Op, x: torch.Tensor, axis: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape[1 - axis], dtype=dtype)
    reduce[(1,)](x, out, M=x.shape[0], N=x.shape[1], OP=op, AXIS=axis)
    return out


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reductions(exact: None, dtype: torch.dtype, axis: int, op: str) -> None:
    x = whole_numbers(dtype)
    want = rounded(
        x.float().sum(axis) if op == "sum" else getattr(x.float(), f"a{op}")(axis), dtype
    )
    assert same(run_reduce(lambda x, axis: getattr(tl, op)(x, axis), x, axis, dtype), want)


def last_row(rows: Any) -> Any:
    return tl.max(tl.where(tl.arange(0, 16)[:, None] == 15, rows, 0), 0)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_other_reductions(exact: None, dtype: torch.dtype) -> None:
    x = whole_numbers(dtype)

    def check(op: Op, want: torch.Tensor, dtype: torch.dtype = dtype) -> None:
        assert same(run_reduce(op, x, 0, dtype), want.to(dtype).contiguous())

    check(lambda x, axis: tl.argmax(x, axis), x.float().argmax(0), torch.int32)
    check(lambda x, axis: tl.sum(x) + tl.zeros((32,), x.dtype), x.float().sum().expand(32))
    x = x.abs() + 1
    column = x.float().sum(0)
    check(lambda x, axis: last_row(tl.cumsum(x, 0)), column)
    check(lambda x, axis: tl.reduce(x, axis, own_sum), column)
    check(lambda x, axis: last_row(tl.associative_scan(x, 0, tl.standard._sum_combine)), column)


@triton.jit
def kept_dimensions(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    largest, index = tl.max(x, AXIS, return_indices=True, keep_dims=True)
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :],
             tl.sum(x, AXIS, keep_dims=True) + largest + index + x)  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_dimensions_that_are_kept(exact: None, axis: int) -> None:
    x = whole_numbers(F32)
    out = torch.empty_like(x)
    kept_dimensions[(1,)](x, out, M=16, N=32, AXIS=axis)
    largest, index = x.max(axis, keepdim=True)
    index = (x == largest).int().argmax(axis, keepdim=True)  # the first
    assert torch.equal(out, x.sum(axis, keepdim=True) + largest + index + x)


def test_long_sum_does_not_stall(exact: None) -> None:
    ones = torch.ones(4096, 1, dtype=BF16)
    assert run_reduce(SUM, ones, 0, BF16).item() == 4096  # bf16 additions stop at 256


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_constants(exact: None, dtype: torch.dtype) -> None:
    x = pair(dtype, 64, seed=13)[0]
    out = torch.empty(4, 64, dtype=dtype)
    constants[(1,)](x, out, 40, N=64)
    full = torch.full((64,), 1.5, dtype=dtype)
    loaded = torch.where(torch.arange(64) < 40, x, torch.tensor(-3.0, dtype=dtype))
    scaled = (x.float() * 0.5).to(dtype)
    want = [full, torch.zeros_like(full), loaded, (scaled.float() + 1.0).to(dtype)]
    for got, wanted in zip(out, want, strict=True):
        assert same(got, wanted)


def test_descriptor_padding_is_nan(exact: None) -> None:
    x = torch.ones(1, 16, dtype=BF16)
    out = torch.zeros(2, 16, dtype=BF16)
    padded[(1,)](x, out, N=16)
    assert torch.equal(out[0], x[0]) and bool(out[1].isnan().all())


@pytest.mark.parametrize(
    ("dtype", "arch"),
    few([(BF16, None), (F16, None), (BF16, 80), (BF16, 90)], (BF16, None), (BF16, 90)),
)
def test_atomic_sums_are_rounded_one_by_one(dtype: torch.dtype, arch: int | None) -> None:
    """Before 9.0 a GPU does them by a loop of swaps, which is not a race. The swapped word may begin with
    the last element.
    """
    x, out = torch.ones(13, dtype=dtype), torch.zeros(8, dtype=dtype)
    report = races(lambda: atomic_add[(1,)](x, out), 1, seeds=1, arch=arch)
    assert report.clean, str(report)
    total = torch.tensor(2.5, dtype=dtype)
    for _ in range(4):
        total = (total.float() + 256).to(dtype)
    assert x.tolist() == [total, 1025 if dtype == F16 else 1024, *[1] * 6, 1, 2, 3, 4, 5]
    assert out.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


# How the overrides come and go


def test_overrides_leave_nothing() -> None:
    builder = interpreter.interpreter_builder
    kinds = (interpreter.ReduceOps, interpreter.ScanOps)

    def state() -> tuple[Any, ...]:
        return (dict(vars(builder)), *(kind.apply_impl for kind in kinds))

    before = state()
    with pytest.raises(KeyError), replacing(*exact_arithmetic()):
        inside = state()
        raise KeyError
    assert state() == before
    assert inside[0].keys() - before[0].keys() >= {"binary_op", "get_bf16"}


# Negative control: without the replacements the same questions are answered wrongly.


@pytest.mark.filterwarnings("ignore")
def test_stock_interpreter_is_wrong() -> None:
    x, y = pair(BF16, 512, seed=14)
    assert not same(run_binary(operator.add, x, y, BF16), (x.float() + y.float()).to(BF16))
    numbers = whole_numbers(BF16)
    assert not same(run_reduce(SUM, numbers, 0, BF16), numbers.float().sum(0).to(BF16))
    out = torch.empty(16, 32)
    a, b = whole_numbers(BF16), torch.ones(32, 32, dtype=BF16)
    dot[(1,)](a, b, out, M=16, N=32, K=32)
    assert not torch.equal(out, a.float() @ b.float())
    cases = rounding_cases(E4M3)
    assert not same(run_cast(cases, BF16), cases.to(BF16))
    assert not same(run_cast(cases, E4M3), rounded(cases, E4M3))


@triton.jit
def cast(x_ptr, out_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING))


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
