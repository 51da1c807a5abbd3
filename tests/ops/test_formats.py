"""Block-scaled formats: quantisation within each format's bound, layouts, and what is refused."""

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from torch.testing._internal.common_quantized import _bfloat16_to_float4_e2m1fn_x2, to_blocked

import interlace
from interlace import reference
from interlace.ops.matmul import formats
from interlace.ops.matmul.formats import E4M3, E5M2, E8M0, FORMATS, FP4_NUMBERS, Scaled, quantize
from ranks import ranks


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(
        -8, 8, shape, generator=generator
    )


@pytest.mark.parametrize("name", FORMATS)
@given(
    rows=strategies.integers(0, 140), half=strategies.integers(0, 150), weight=strategies.booleans()
)
@settings(max_examples=15, deadline=None)
def test_every_number_is_within_half_a_step(name: str, rows: int, half: int, weight: bool) -> None:
    x = numbers(rows, 2 * half)
    found = quantize(x, name, weight=weight)
    assert found.shape == x.shape
    exact = x.double()
    _, bound = reference.block_scaled(found, (exact, torch.zeros_like(exact)))
    assert torch.all((found.dequantize() - exact).abs() <= bound * (1 + 2.0**-20))
    assert torch.equal(found.t().dequantize(), found.dequantize().T)
    found.check_scales()


def test_e2m1_rounds_as_torch_does() -> None:
    x = torch.linspace(-6, 6, 4096).bfloat16().view(64, 64)
    mine = formats.pairs(x.float()).view(torch.uint8)
    assert torch.equal(mine, _bfloat16_to_float4_e2m1fn_x2(x).view(torch.uint8))
    assert sorted(set(formats.unpair(mine).abs().flatten().tolist())) == list(FP4_NUMBERS)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_a_scale_is_the_least_power_of_two_that_loses_no_number(name: str) -> None:
    largest = torch.tensor(formats.LARGEST[FORMATS[name].values])
    more = torch.nextafter(largest, torch.tensor(math.inf))
    for size, scale in ((largest, 1.0), (more, 2.0), (largest / 2, 0.5), (more / 2, 1.0)):
        assert quantize(size.expand(1, 32), name).scales.float().item() == scale
    for power, byte in ((-128, 0), (-127, 0), (-126, 1)):  # byte 0 is 2**-127
        scales = quantize((largest * 2.0**power).expand(1, 32), name).scales
        assert scales.view(torch.uint8).item() == byte


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_what_is_no_number(name: str) -> None:
    zeros = quantize(torch.zeros(3, 256), name)
    zeros.check_scales()
    assert not zeros.dequantize().any()
    for wrong in (math.nan, math.inf):
        x = torch.ones(2, 256)
        x[1, 200] = wrong
        found = quantize(x, name).dequantize()
        assert found[1, 200].isnan()
        assert FORMATS[name].whole or torch.equal(found[0], torch.ones(256))


@pytest.mark.parametrize("name", FORMATS)
def test_a_finite_number_stays_finite(name: str) -> None:
    """The largest numbers of float32, with a relative error of at most half a step; see formats.md."""
    end = torch.tensor(torch.finfo(torch.float32).max).view(torch.int32)
    sizes = (end - torch.arange(0, 1 << 23, 9973, dtype=torch.int32)).view(torch.float32)
    x = torch.zeros(2 * len(sizes), 128)
    x[:, 0] = torch.cat([sizes, -sizes])
    half_step = {E4M3: 1 / 16, E5M2: 1 / 8, formats.FP4: 1 / 4}[FORMATS[name].values]
    wholes = (None, 1.3e35, 2e35, 1e37, 3.4e38) if FORMATS[name].whole else (None,)
    for whole in wholes:
        found = quantize(x, name, whole=None if whole is None else torch.tensor(whole))
        found.check_scales()
        relative = (found.dequantize().double() / x.double())[:, 0] - 1
        assert relative.isfinite().all() and relative.abs().max() <= half_step


@pytest.mark.parametrize(
    ("name", "most"), [("mxfp8", 3.19e38), ("mxfp8_e5m2", 2.98e38), ("mxfp4", 2.55e38)]
)
def test_the_largest_numbers_saturate(name: str, most: float) -> None:
    """The numbers of formats.md."""
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert f"{quantize(x, name).dequantize()[0, 0].item():.2e}" == f"{most:.2e}"


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (1, 1), (200, 7), (300, 9)])
def test_swizzled_scales_are_those_of_torch(rows: int, blocks: int) -> None:
    scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8).view(E8M0)
    swizzled = formats.swizzled(scales)
    assert torch.equal(swizzled.view(torch.uint8), to_blocked(scales).view(torch.uint8))
    values = torch.zeros(rows, 32 * blocks).to(E4M3)
    taken = Scaled(values, swizzled, "mxfp8")
    assert torch.equal(taken.scales.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("length", [2, 128, 330])
def test_packed_rows_multiply_as_their_numbers(name: str, length: int) -> None:
    left, right = (
        quantize(numbers(5, length), name),
        quantize(numbers(7, length, seed=1), name, weight=True).t(),
    )
    packed = formats.packed_rows(left), formats.packed_rows(right)
    assert packed[0].shape == (5, FORMATS[name].row_bytes(length))
    assert packed[1].shape == (FORMATS[name].row_bytes(length), 7)
    made = formats.multiply_packed(*packed, FORMATS[name])
    exact = left.dequantize(torch.float64) @ right.dequantize(torch.float64)
    sizes = left.dequantize(torch.float64).abs() @ right.dequantize(torch.float64).abs()
    assert torch.all((made - exact).abs() <= 2.0**-22 * sizes)


def stored(scaled: Scaled) -> Any:
    file = io.BytesIO()
    torch.save({"weight": scaled}, file)
    file.seek(0)
    return torch.load(file)["weight"]


def pickled(scaled: Scaled) -> Any:
    return pickle.loads(pickle.dumps(scaled))


def moved(scaled: Scaled) -> Scaled:
    return scaled.to("cpu")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", [stored, pickled, moved, copy.copy, copy.deepcopy])
def test_copies_have_all_that_there_is(name: str, way: Callable[[Scaled], Scaled]) -> None:
    plain = quantize(numbers(150, 96), name, weight=True)
    for scaled in (plain, plain.t(), plain.packed(), plain.t().packed()):
        found = way(scaled)
        assert (found.format, found.inner, found.shape) == (name, scaled.inner, scaled.shape)
        assert (
            found.scales.shape == scaled.scales.shape and found.values.dtype == plain.values.dtype
        )
        assert torch.equal(found.dequantize(), scaled.dequantize())
        packed = formats.packed_rows(found)
        assert torch.equal(packed, formats.packed_rows(scaled))
        is_packed = "rows" in vars(scaled)
        assert is_packed == (packed.data_ptr() == found.values.data_ptr())
        shares = found.values.data_ptr() == scaled.values.data_ptr()
        assert shares == (way in (moved, copy.copy))


@pytest.mark.parametrize("name", FORMATS)
def test_on_another_device(name: str) -> None:
    x = quantize(numbers(5, 64), name)
    for scaled in (x, x.t(), x.packed()):
        found = scaled.to("meta")
        assert found.values.is_meta and found.scales.is_meta and found.shape == scaled.shape
        assert found.whole is None or found.whole.is_meta
    with pytest.raises(
        TypeError, match=rf"{name}; dequantize\(torch.bfloat16\) returns the numbers"
    ):
        x.to(torch.bfloat16)  # type: ignore[arg-type]


def test_only_the_same_object_is_equal() -> None:
    x = quantize(numbers(5, 64), "nvfp4")
    assert x == x and x != quantize(numbers(5, 64), "nvfp4") and x != 1
    assert {x: 1}[x] == 1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1), (4, 1)])
def test_whole_is_one_number_or_one_for_each_row(shape: tuple[int, ...]) -> None:
    x, whole = numbers(4, 64), torch.full(shape, 0.25)
    made = quantize(x, "nvfp4", whole=whole)
    taken = Scaled(made.values, made.scales, "nvfp4", whole)
    plain = Scaled(made.values, made.scales, "nvfp4").dequantize() * 0.25
    for found in (made, taken, taken.packed(), taken.t().packed().t()):
        assert torch.equal(found.dequantize(), plain)
        found.check_scales()
    for wrong in ((4,), (1, 4), (2,), (4, 1, 1)):
        words = rf"whole must have one element, or .* \(4, 1\); got shape {re.escape(str(wrong))}"
        with pytest.raises(ValueError, match=words):
            quantize(x, "nvfp4", whole=torch.ones(wrong))
        with pytest.raises(ValueError, match=words):
            Scaled(made.values, made.scales, "nvfp4", torch.ones(wrong))
    for nothing in (0.0, -2.0):
        with pytest.raises(ValueError, match=f"must be greater than 0, got {nothing}"):
            quantize(x, "nvfp4", whole=torch.tensor(nothing))


WHOLES = (1e-40, 1e-21, 1e20, 3e38)


@pytest.mark.parametrize("left_whole", WHOLES)
@pytest.mark.parametrize("right_whole", WHOLES)
def test_products_of_small_and_large_tensors(left_whole: float, right_whole: float) -> None:
    """The result is correct if fp32 can hold it: the product of both scales must not overflow first."""
    left, right = quantize(numbers(5, 64), "nvfp4"), quantize(numbers(7, 64, seed=1), "nvfp4").t()
    scales = torch.tensor([left_whole]), torch.tensor([right_whole])
    left, right = (
        Scaled(each.values, each.scales, "nvfp4", whole, each.inner)
        for each, whole in zip((left, right), scales, strict=True)
    )
    made = formats.multiply_packed(*map(formats.packed_rows, (left, right)), FORMATS["nvfp4"])
    ones = [Scaled(e.values, e.scales, "nvfp4", None, e.inner) for e in (left, right)]
    a, b = (each.dequantize(torch.float64) for each in ones)
    factor = scales[0].double() * scales[1].double()
    exact, sizes = a @ b * factor, a.abs() @ b.abs() * factor
    finite = exact.abs() <= torch.finfo(torch.float32).max
    assert torch.all((made - exact).abs()[finite] <= (2.0**-20 * sizes + 2.0**-148)[finite])
    assert torch.all(made.isinf() | finite)

    def op() -> Any:
        return interlace.all_gather_matmul(left, right, out_dtype=torch.float32, algorithm="fused")

    assert torch.equal(interlace.run(op, 1)[0], made)


@pytest.mark.parametrize("length", [48, 128])
def test_where_torch_multiplies_on_a_cpu_it_is_the_same(length: int) -> None:
    """torch on a CPU supports only one scale per row or per tensor."""
    x, weight = numbers(16, length), numbers(32, length, seed=1)
    left, right = quantize(x, "fp8_block128"), quantize(weight, "fp8_block128")
    same_scale = [torch.full((rows, 4), scale).to(E8M0) for rows, scale in ((16, 0.5), (32, 4.0))]
    cases = [(left, right, left.scales, right.scales.t())]
    for values in (E4M3, E5M2) if length == 128 else ():
        of_values = [each.clamp(-240, 240).to(values) for each in (x, weight)]
        pair = [Scaled(*each, "mxfp8") for each in zip(of_values, same_scale, strict=True)]
        cases.append((*pair, torch.tensor(0.5), torch.tensor(4.0)))  # type: ignore[arg-type]
    for a, b, a_scale, b_scale in cases:
        how: Any = {"out_dtype": torch.float32}
        torchs = torch._scaled_mm(a.values, b.values.t(), a_scale, b_scale, **how)
        packed = formats.packed_rows(a), formats.packed_rows(b.t())
        made = formats.multiply_packed(*packed, a.kind)
        sizes = a.dequantize(torch.float64).abs() @ b.t().dequantize(torch.float64).abs()
        assert torch.all((made - torchs).abs() <= 2.0**-18 * sizes)


FP8 = torch.zeros(4, 64).to(E4M3)
ONES = torch.ones(4, 2).to(E8M0)


@pytest.mark.parametrize(
    ("values", "scales", "format", "error", "words"),
    [
        (FP8, ONES, "fp8", ValueError, "format must be one of fp8_block128, mxfp8"),
        (
            FP8.float(),
            ONES,
            "mxfp8",
            TypeError,
            "values of mxfp8 must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float32",
        ),
        (
            FP8,
            ONES.float(),
            "mxfp8",
            TypeError,
            "scales of mxfp8 must be torch.float8_e8m0fnu or torch.uint8, got torch.float32",
        ),
        (
            FP8,
            ONES[:, :1],
            "mxfp8",
            ValueError,
            r"scales of mxfp8 must be \(4, 2\), or in the layout SWIZZLE_32_4_4 \(512,\) or \(32, 16\)",
        ),
        (FP8[0], ONES, "mxfp8", ValueError, "at least 2 dimensions"),
        (FP8, torch.ones(2, 1), "fp8_block128", ValueError, r"must be \(4, 1\) or \(1, 1\)"),
        (FP8, [1.0], "fp8_block128", TypeError, "scales must be a tensor, got list"),
        (FP8, ONES.to("meta"), "mxfp8", ValueError, "scales are on meta, values on cpu"),
    ],
)
def test_a_wrong_operand_is_refused(
    values: torch.Tensor, scales: torch.Tensor, format: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Scaled(values, scales, format)


@pytest.mark.parametrize("scale", [0.0, math.nan, -1.0, math.inf])
def test_a_scale_that_is_not_above_zero_is_refused(scale: float) -> None:
    wrong = Scaled(torch.ones(4, 64).to(E4M3), torch.full((4, 1), scale), "fp8_block128")
    with pytest.raises(
        ValueError, match=rf"must be finite and greater than 0, got {scale} at \(0, 0\)"
    ):
        wrong.check_scales()
    if scale == 0.0:  # which loses nothing of zeros
        Scaled(FP8, torch.zeros(4, 1), "fp8_block128").check_scales()


def test_a_scale_is_of_its_own_band_of_rows() -> None:
    values = torch.zeros(150, 64)
    values[:100] = 1.0
    scales = torch.tensor([[1.0], [0.0]])
    Scaled(values.to(E4M3), scales, "fp8_block128").check_scales()
    with pytest.raises(ValueError, match=r"got 0.0 at \(0, 0\)"):
        Scaled(values.to(E4M3), scales.flip(0), "fp8_block128").check_scales()


def test_swizzled_scales_are_known_by_their_shape() -> None:
    """128 x 4 scales and their transpose have equal numbers of elements."""
    scales = torch.ones(128, 4).to(E8M0)
    values = torch.zeros(128, 128).to(E4M3)
    for taken in (scales, formats.swizzled(scales), formats.swizzled(scales).view(32, 16)):
        Scaled(values, taken, "mxfp8")
    with pytest.raises(ValueError, match=r"must be \(128, 4\), or in the layout"):
        Scaled(values, scales.T, "mxfp8")


def test_inductor_packs_rows() -> None:
    """Inductor has no promotion for parts of a tensor of e4m3, which are the scales of nvfp4."""

    def packed(x: torch.Tensor) -> torch.Tensor:
        return formats.packed_rows(quantize(x, "nvfp4"))

    x = numbers(5, 160)
    assert torch.equal(torch.compile(packed, fullgraph=True)(x), packed(x))


@pytest.mark.parametrize("name", FORMATS)
def test_results_do_not_depend_on_the_default_dtype(name: str) -> None:
    left, right = quantize(numbers(5, 64), name), quantize(numbers(7, 64, seed=1), name).t()
    packed = formats.packed_rows(left), formats.packed_rows(right)
    wanted = formats.multiply_packed(*packed, FORMATS[name]), left.dequantize()
    torch.set_default_dtype(torch.float64)
    try:
        found = formats.multiply_packed(*packed, FORMATS[name]), left.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    for mine, right_one in zip(found, wanted, strict=True):
        assert mine.dtype == right_one.dtype
        assert torch.equal(mine, right_one)


@pytest.mark.parametrize(
    ("x", "format", "error", "words"),
    [
        (torch.ones(2, 3), "nvfp4", ValueError, "must be even"),
        (torch.ones(4), "mxfp8", ValueError, "at least 2 dimensions"),
        (torch.ones(2, 2, dtype=torch.int32), "mxfp8", TypeError, "got torch.int32"),
        (None, "mxfp8", TypeError, "got NoneType"),
        (torch.ones(2, 2).to_sparse(), "mxfp8", TypeError, "strided tensor, got torch.sparse_coo"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    x: torch.Tensor, format: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        quantize(x, format)


def test_a_quantized_tensor_has_no_gradient() -> None:
    x = torch.ones(2, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="quantize has no gradient"):
        quantize(x, "mxfp8")
    with torch.no_grad():
        quantize(x, "mxfp8")


@pytest.mark.filterwarnings("error")
def test_sums_that_overflow_are_infinite_without_a_warning() -> None:
    large = quantize(torch.full((1, 64), 3e38), "mxfp8")
    rows = formats.packed_rows(large)
    assert formats.multiply_packed(rows, rows.mT, large.kind).isinf().all()


@pytest.mark.parametrize("name", FORMATS)
@ranks(2, place="sim")
def test_torchs_deterministic_mode(name: Any) -> None:
    """In it torch fills new tensors, for which not all dtypes have code."""
    x, w = quantize(torch.ones(3, 64), name), quantize(torch.ones(4, 64), name).t()

    def results() -> tuple[Any, Any]:
        floats = x.dequantize(), w.dequantize()
        return interlace.all_gather_matmul(x, w), interlace.matmul_all_reduce(*floats, format=name)

    right = results()
    torch.use_deterministic_algorithms(True)
    try:
        found = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, found, right))
