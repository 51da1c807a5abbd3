"""Block-scaled formats: quantisation within each format's bound, layouts, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies
from torch.testing._internal.common_quantized import _bfloat16_to_float4_e2m1fn_x2, to_blocked

from interlace.ops.matmul import formats
from interlace.ops.matmul.formats import E4M3, E8M0, FORMATS, FP4_NUMBERS, Scaled, quantize

STEP = {
    "fp8_block128": 2.0**-4,
    "mxfp8": 2.0**-4,
    "mxfp8_e5m2": 2.0**-3,
    "mxfp4": 0.25,
    "nvfp4": 0.25,
}
"""Half the distance of two neighbours, relative to the larger."""
LEAST = {
    "fp8_block128": 2.0**-10,
    "mxfp8": 2.0**-10,
    "mxfp8_e5m2": 2.0**-17,
    "mxfp4": 0.25,
    "nvfp4": 0.25,
}
"""Half the least number above zero."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of many magnitudes."""
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
    scale = found.scales.float() * (1.0 if found.whole is None else found.whole)
    across = FORMATS[name].across if weight else 1
    scale = scale.repeat_interleave(across, 0)[:rows].repeat_interleave(FORMATS[name].block, 1)
    bound = torch.maximum(STEP[name] * x.abs(), LEAST[name] * scale[:, : 2 * half])
    saturated = bound + x.abs() * (
        2.0**-4 if name == "nvfp4" else 0.0
    )  # its scales are rounded, too
    assert torch.all((found.dequantize() - x).abs() <= saturated * (1 + 2.0**-20))
    assert torch.equal(found.t().dequantize(), found.dequantize().T)
    found.check_scales()


def test_e2m1_rounds_as_torch_does() -> None:
    x = torch.linspace(-6, 6, 4096).bfloat16().view(64, 64)
    mine = formats.pairs(x.float()).view(torch.uint8)
    assert torch.equal(mine, _bfloat16_to_float4_e2m1fn_x2(x).view(torch.uint8))
    assert sorted(set(formats.unpaired(mine).abs().flatten().tolist())) == list(FP4_NUMBERS)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_a_scale_is_the_least_power_of_two_that_loses_no_number(name: str) -> None:
    largest = torch.tensor(formats.LARGEST[FORMATS[name].values])
    more = torch.nextafter(largest, torch.tensor(math.inf))
    for size, scale in ((largest, 1.0), (more, 2.0), (largest / 2, 0.5), (more / 2, 1.0)):
        assert quantize(size.expand(1, 32), name).scales.float().item() == scale


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
            "values of mxfp8 must be torch.float8_e4m3fn, got torch.float32",
        ),
        (
            FP8,
            ONES.float(),
            "mxfp8",
            TypeError,
            "scales of mxfp8 must be torch.float8_e8m0fnu, got",
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
    """Of 150 rows 128 have the first scale, and 22 the second."""
    values = torch.zeros(150, 64)
    values[:100] = 1.0
    scales = torch.tensor([[1.0], [0.0]])
    Scaled(values.to(E4M3), scales, "fp8_block128").check_scales()
    with pytest.raises(ValueError, match=r"got 0.0 at \(0, 0\)"):
        Scaled(values.to(E4M3), scales.flip(0), "fp8_block128").check_scales()


def test_swizzled_scales_are_known_by_their_shape() -> None:
    """Of 128 x 4 scales the transposed ones are as many."""
    scales = torch.ones(128, 4).to(E8M0)
    values = torch.zeros(128, 128).to(E4M3)
    for taken in (scales, formats.swizzled(scales), formats.swizzled(scales).view(32, 16)):
        Scaled(values, taken, "mxfp8")
    with pytest.raises(ValueError, match=r"must be \(128, 4\), or in the layout"):
        Scaled(values, scales.T, "mxfp8")


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
