"""``fold`` for every op, every dtype and one to five parts, against numpy and Python's integers."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cases.support_table import MOVED_DTYPES, defined
from interlace.runtime.numerics import reductions
from interlace.runtime.numerics.reductions import DTYPES, REDUCE_OPS, check, fold
from stand_ins.replaced import replaced

COUNTS = (1, 2, 3, 5)
ELEMENTS = 67  # odd, and more than a vector register takes at once
WHOLE = [d for d in DTYPES if not d.is_floating_point and not d.is_complex and d != torch.bool]
FLOATING = [d for d in DTYPES if d.is_floating_point]
COMPLEX = [d for d in DTYPES if d.is_complex]
ALL = [(op, dtype) for dtype in DTYPES for op in REDUCE_OPS if defined(op, dtype)]


@pytest.fixture(params=[4, reductions.PIECE], ids=["pieces", "whole"], autouse=True)
def piece(request: pytest.FixtureRequest) -> Iterator[None]:
    with replaced((reductions, "PIECE", request.param)):
        yield


def random_parts(dtype: torch.dtype, count: int, elements: int = ELEMENTS) -> list[torch.Tensor]:
    """Return parts of any bits, with NaN, infinity and the limits of integers; sums get modest values."""
    generator = torch.Generator().manual_seed(count)
    if dtype == torch.bool:
        return [torch.rand(elements, generator=generator) < 0.6 for _ in range(count)]
    if dtype.is_complex:
        real = [torch.randn(elements, 2, generator=generator) for _ in range(count)]
        return [torch.view_as_complex(part).to(dtype) for part in real]
    if dtype in (torch.float32, torch.float64):
        parts = [torch.randn(elements, generator=generator).to(dtype) for _ in range(count)]
        for at, special in enumerate((math.nan, math.inf, -math.inf, 3e38)):
            for number, part in enumerate(parts[: elements and 2]):
                part[at * 3 + number : at * 3 + number + 2] = special
        return parts
    size = elements * dtype.itemsize
    raw = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    parts = [line.clone().view(dtype) for line in raw]
    for number, part in enumerate(parts if dtype in FLOATING else ()):  # in one part alone
        part[number : number + 1] = torch.full((1,), math.nan).to(dtype)
    for part in parts if dtype in WHOLE and elements else ():
        part.numpy()[[0, -1]] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return parts


def integers(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.tolist()]


def wrapped(value: int, dtype: torch.dtype) -> int:
    span = 1 << (8 * dtype.itemsize)
    value %= span
    return value if torch.iinfo(dtype).min == 0 or value < span // 2 else value - span


def whole_expected(op: str, parts: Sequence[torch.Tensor]) -> list[int]:
    dtype = parts[0].dtype
    steps: dict[str, Callable[[int, int], int]] = {
        "sum": operator.add,
        "product": operator.mul,
        "min": min,
        "max": max,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
    }
    expected = []
    for column in zip(*(integers(part) for part in parts), strict=True):
        if op != "avg":
            expected.append(wrapped(functools.reduce(steps[op], column), dtype))
            continue
        total = wrapped(sum(column), torch.uint64 if dtype == torch.uint64 else torch.int64)
        quotient = abs(total) // len(column)
        expected.append(quotient if total >= 0 else -quotient)
    return expected


def floating_expected(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce by numpy in order, in fp32 or fp64, and round to the dtype once."""
    dtype = parts[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = [part.to(wide).numpy() for part in parts]
    steps: dict[str, Any] = {
        "sum": np.add,
        "avg": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }
    with np.errstate(all="ignore"):
        total = functools.reduce(steps[op], values)
        if op == "avg":
            total = total / values[0].dtype.type(len(parts))
    return torch.from_numpy(np.asarray(total)).to(dtype)


def complex_expected(op: str, parts: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    """Reduce by numpy in double precision, where order and rounding do not matter."""
    values = [part.to(torch.complex128).numpy() for part in parts]
    total = functools.reduce(np.multiply if op == "product" else np.add, values)
    return np.asarray(total / len(parts) if op == "avg" else total)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal values, zeros of either sign, NaN where NaN is."""
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    torch.testing.assert_close(got.to(wide), expected.to(wide), rtol=0, atol=0, equal_nan=True)


def folded(op: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce in poisoned memory; the parts must not change."""
    before = [part.clone() for part in parts]
    output = torch.empty_like(parts[0])
    output.view(torch.uint8).fill_(0 if output.dtype == torch.bool else 0x5A)
    fold(op, parts, output)
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part.view(torch.uint8), old.view(torch.uint8))
    return output


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers(dtype: torch.dtype) -> None:
    for op, count in itertools.product(REDUCE_OPS, COUNTS):
        parts = random_parts(dtype, count)
        assert integers(folded(op, parts)) == whole_expected(op, parts), op


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_floating_numbers_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    for op, count in itertools.product(("sum", "avg", "product", "min", "max"), COUNTS):
        parts = random_parts(dtype, count)
        assert_same(folded(op, parts), floating_expected(op, parts))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype: torch.dtype, count: int) -> None:
    parts = random_parts(dtype, count)
    scale = sum(part.to(torch.complex128).abs() for part in parts).numpy()
    magnitude = functools.reduce(np.multiply, [p.to(torch.complex128).abs().numpy() for p in parts])
    for op in ("sum", "avg", "product"):
        error = np.abs(folded(op, parts).to(torch.complex128).numpy() - complex_expected(op, parts))
        # one rounding of each component per step, three in a product, half a unit each
        bound = 3 * count * torch.finfo(dtype).eps * (magnitude if op == "product" else scale)
        assert (error <= bound + torch.finfo(dtype).smallest_normal).all(), op


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_sums_of_complex_numbers_are_sums_of_their_components() -> None:
    for dtype, real in ((torch.complex32, torch.float16), (torch.complex64, torch.float32)):
        parts = random_parts(dtype, 3)
        for op in ("sum", "avg"):
            pairs = [torch.view_as_real(part).contiguous() for part in parts]
            expected = floating_expected(op, pairs)
            assert expected.dtype == real
            assert_same(torch.view_as_real(folded(op, parts)), expected)


@pytest.mark.parametrize("count", COUNTS)
def test_bool_is_logic(count: int) -> None:
    parts = random_parts(torch.bool, count)
    columns = list(zip(*(part.tolist() for part in parts), strict=True))
    for op in REDUCE_OPS:
        if op in ("sum", "max", "bor"):
            expected = [any(column) for column in columns]
        elif op == "bxor":
            expected = [sum(column) % 2 == 1 for column in columns]
        else:
            expected = [all(column) for column in columns]
        output = folded(op, parts)
        assert output.tolist() == expected, op
        assert int(output.view(torch.uint8).max()) <= 1, op


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("count", COUNTS)
def test_the_output_may_be_any_one_of_the_parts(count: int) -> None:
    for op, dtype in ALL:
        expected = folded(op, random_parts(dtype, count))
        for aliased in range(count):
            parts = random_parts(dtype, count)
            fold(op, parts, parts[aliased])
            got, want = parts[aliased].view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(got, want), (op, dtype, aliased)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (2, 3)])
def test_any_shape(shape: tuple[int, ...], count: int) -> None:
    for op, dtype in ALL:
        flat = random_parts(dtype, count, math.prod(shape))
        output = folded(op, [part.view(shape) for part in flat])
        assert output.shape == shape
        raw = folded(op, flat).view(torch.uint8)
        assert torch.equal(output.view(-1).view(torch.uint8), raw), (op, dtype)


def test_tensors_with_strides() -> None:
    parts = [torch.arange(24.0).view(4, 6).add_(r).t() for r in range(3)]
    output = torch.empty(4, 6).t()
    fold("sum", parts, output)
    assert torch.equal(output, parts[0] * 3 + 3)


def test_unrounded_sums() -> None:
    parts = [torch.full((5,), value).to(torch.bfloat16) for value in (1.0, 2.0**-8)]
    output = torch.empty(5)
    reductions.fold_unrounded("sum", parts, output)
    assert output.tolist() == [1 + 2.0**-8] * 5
    reductions.fold_unrounded("avg", parts, output)
    assert output.tolist() == [0.5 + 2.0**-9] * 5
    reductions.fold_unrounded("avg", parts[1:], output)
    assert output.tolist() == [2.0**-8] * 5


def test_what_is_not_defined_says_so() -> None:
    with pytest.raises(TypeError, match=r'^op "max" is not defined for torch.complex64$'):
        check("max", torch.complex64)
    with pytest.raises(TypeError, match=r'^op "band" is not defined for torch.float32$'):
        check("band", torch.float32)
    with pytest.raises(TypeError, match=r'^op "sum" is not defined for torch.bits8$'):
        check("sum", torch.bits8)
    with pytest.raises(ValueError, match=r"op must be one of sum, avg, .*got 'mean'"):
        check("mean", torch.float32)
    for op, dtype in ALL:
        check(op, dtype)


def test_every_dtype_of_torch_is_listed() -> None:
    of_torch = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert set(MOVED_DTYPES) == of_torch - quantized
    assert len(set(MOVED_DTYPES)) == len(MOVED_DTYPES)
    for dtype in MOVED_DTYPES:
        assert torch.empty(3, dtype=dtype).view(torch.uint8).numel() == 3 * dtype.itemsize
    assert {dtype for dtype in DTYPES if defined("sum", dtype)} == set(DTYPES)
