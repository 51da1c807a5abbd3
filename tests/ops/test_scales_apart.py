"""Block-scaled operands whose values and scales are tensors, as torch's own ops take them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from interlace.groups.specs import describe
from interlace.ops.matmul.formats import E4M3, Scaled, quantize, swizzled
from ranks import ranks

Tensor = torch.Tensor
NONE: Any = ([None], [None], [torch.bfloat16], [False])


def numbers(rows: int, length: int, seed: int) -> Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(seed))


def fused_gather(x: Any, w: Any, scales: tuple[Any, Any], dim: int = 0) -> Any:
    op, group = torch.ops.symm_mem.fused_all_gather_scaled_matmul, describe(None, "")[0]
    return op(x, [w], scales[0], [scales[1]], dim, group, *NONE)[1][0]


def fused_scatter(x: Any, w: Any, scales: tuple[Any, Any]) -> Any:
    op, group = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, describe(None, "")[0]
    about = "sum", 0, 0, group, [*x.shape[:-1], w.shape[1]]
    return op(x, w, *scales, *about, out_dtype=torch.bfloat16)


def functional_gather(x: Any, w: Any, scales: tuple[Any, Any]) -> Any:
    return functional.wait(functional.all_gather_scaled_matmul(x, w, *scales))  # type: ignore[arg-type]


def functional_scatter(x: Any, w: Any, scales: tuple[Any, Any]) -> Any:
    return functional.wait(functional.scaled_matmul_reduce_scatter(x, w, *scales))


@pytest.mark.parametrize("form", [fused_gather, functional_gather, functional_scatter])
@ranks(2, place="sim")
def test_scales_by_block_on_one_rank_and_by_row_on_another(form: Callable[..., Any]) -> None:
    first = interlace.get_rank() == 0
    x, w = torch.ones(4, 256).to(E4M3), torch.ones(128, 256).to(E4M3).t()
    by_block, by_row = (
        (torch.ones(4, 2), torch.ones(2, 128)),
        (torch.ones(4, 1), torch.ones(1, 128)),
    )
    words = "kind of scales differs between ranks: by block on rank 0, one, or by row on rank 1"
    with pytest.raises(ValueError, match=words):
        form(x, w, by_block if first else by_row)
    assert form(x, w, by_block)[0, 0] == 256 * (1 + (form is functional_scatter))


@pytest.mark.parametrize(("inner", "columns"), [(100, 300), (128, 128)])
@ranks(2, place="sim")
def test_a_block_that_is_a_whole_row(inner: int, columns: int) -> None:
    rank = interlace.get_rank()
    x = quantize(numbers(4, inner, rank), "fp8_block128")
    for by_tile in (True, False):
        w = quantize(numbers(columns, inner, 9), "fp8_block128", weight=by_tile).t()
        right = interlace.all_gather_matmul(x, w)
        for form in (fused_gather, functional_gather):
            found = form(x.values, w.values, (x.scales, w.scales))
            if by_tile and columns > 128:
                assert torch.equal(found, right)  # type: ignore[arg-type]
            else:  # as scales by row, whose products are summed at once
                torch.testing.assert_close(found, right, rtol=2.0**-7, atol=2.0**-7)
        part = functional_scatter(x.values, w.values, (x.scales, w.scales))
        torch.testing.assert_close(
            part, interlace.matmul_reduce_scatter(x, w), rtol=2.0**-6, atol=2.0**-6
        )


@pytest.mark.parametrize(
    ("name", "rows"), [("fp8_block128", 80), ("mxfp8", 128), ("mxfp8", 130), ("nvfp4", 80)]
)
@ranks(2, place="sim")
def test_scales_of_all_ranks(name: Any, rows: int) -> None:
    """torch calls this "row-wise-replicated": each rank has the scales of the whole input."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    one = torch.ones(())
    whole = quantize(numbers(rows * size, 256, 1), name, whole=one if name == "nvfp4" else None)
    values, scales = (t[rank * rows :][:rows] for t in (whole.values, whole.scales))
    w = quantize(numbers(48, 256, 9), name, whole=one if name == "nvfp4" else None)
    right = interlace.all_gather_matmul(Scaled(values, scales, name), Scaled(*pair(w), name).t())
    given = whole.scales, w.scales.t()
    if w.scales.element_size() == 1:
        blocks = 256 // w.kind.block
        given = swizzled(whole.scales), swizzled(w.scales)
        if given[0].numel() == size * rows * blocks:  # the shape that torch wants then
            given = given[0].view(size * rows, blocks), given[1]
        else:
            given = swizzled(scales), given[1]
    assert torch.equal(fused_gather(values, w.values.t(), given), right)  # type: ignore[arg-type]


@ranks(2, place="sim")
def test_scales_that_may_be_of_one_rank_or_of_all_are_refused() -> None:
    x, w = quantize(numbers(64, 256, 1), "mxfp8"), quantize(numbers(48, 256, 9), "mxfp8")
    scales, weights = swizzled(x.scales), swizzled(w.scales)
    with pytest.raises(ValueError, match="pass this rank's as a flat tensor"):
        fused_gather(x.values, w.values.t(), (scales.view(128, -1), weights))
    assert fused_gather(x.values, w.values.t(), (scales, weights)).shape == (128, 48)


def pair(operand: Scaled) -> tuple[Tensor, Tensor]:
    return operand.values, operand.scales


@ranks(2, place="sim")
def test_swizzled_scales_of_the_shape_of_plain_ones() -> None:
    """``torch._scaled_mm`` decides by the number of scales, and so do the ops of ``torch.ops.symm_mem``."""
    x, w = quantize(numbers(128, 128, 1), "mxfp8"), quantize(numbers(16, 128, 2), "mxfp8")
    scales = swizzled(x.scales).view(x.scales.shape), swizzled(w.scales)
    right = interlace.all_gather_matmul(x, w.t())
    assert torch.equal(fused_gather(x.values, w.values.t(), scales), right)  # type: ignore[arg-type]
    part = interlace.matmul_reduce_scatter(x, w.t(), out_dtype=torch.float32)
    found = fused_scatter(x.values, w.values.t(), scales)
    torch.testing.assert_close(found.float(), part, rtol=2.0**-6, atol=2.0**-6)
    cube = x.values.view(2, 64, 128)
    assert torch.equal(fused_gather(cube, w.values.t(), scales).flatten(0, 1), right)  # type: ignore[arg-type]


@ranks(2, place="sim")
def test_k_is_not_gathered() -> None:
    x, w = quantize(torch.ones(4, 160), "mxfp8"), quantize(torch.ones(8, 320), "mxfp8").t()
    words = r"gather_dim=-1 is k, .* dimension of its blocks.* shape of input is \(4, 160\)"
    for form in (interlace.all_gather_matmul, functional.all_gather_matmul):
        with pytest.raises(ValueError, match=words):
            form(x, w, gather_dim=-1)
    scales = swizzled(x.scales), swizzled(w.t().scales)
    with pytest.raises(ValueError, match="gather_dim=1 is k"):
        fused_gather(x.values, w.values, scales, -1)


def operand(form: Any, matrix: Scaled, as_bytes: bool) -> tuple[Tensor, Tensor]:
    """Return values and scales, in torch's layout for torch's ops, with e8m0 scales or their bits."""
    of_torch = form in (fused_gather, fused_scatter)
    scales = swizzled(matrix.scales).view(128, -1) if of_torch else matrix.scales
    return matrix.values, scales.view(torch.uint8) if as_bytes else scales


@pytest.mark.parametrize(
    "form", [fused_gather, fused_scatter, functional_gather, functional_scatter]
)
@ranks(2, place="sim")
def test_bits_of_scales_are_scales(form: Callable[..., Any]) -> None:
    """Also on one rank only, and if the swizzled scales have the shape of plain ones."""
    first, k = interlace.get_rank() == 0, 128
    x, w = quantize(numbers(128, k, 1), "mxfp8"), quantize(numbers(128, k, 2), "mxfp8")
    results = []
    for bits in ((False, False), (True, True), (first, False), (False, first)):
        (values, scales), (weight, of_weight) = map(operand, (form, form), (x, w), bits)
        of_weight = of_weight if form in (fused_gather, fused_scatter) else of_weight.t()
        results.append(form(values, weight.t(), (scales, of_weight)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
@pytest.mark.parametrize(
    "form", [fused_gather, fused_scatter, functional_gather, functional_scatter]
)
@ranks(2, place="sim")
def test_other_dtypes_are_named_on_all_ranks(form: Callable[..., Any], dtype: torch.dtype) -> None:
    x = quantize(numbers(128, 128, 1), "mxfp8")
    wrong = torch.ones(x.scales.shape, dtype=dtype)
    other = swizzled(x.scales) if form in (fused_gather, fused_scatter) else x.scales
    for scales in ((wrong, wrong.t()), (wrong, other.t()), (other, wrong.t())):
        with pytest.raises(TypeError, match=f"scales .*got {dtype}"):
            form(x.values, x.values.t(), scales)
    values = x.values.to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"input: values of mxfp8 must be .*, got torch.bfloat16"):
        form(values, values.t(), (other, other if other.dim() == 1 else other.t()))
