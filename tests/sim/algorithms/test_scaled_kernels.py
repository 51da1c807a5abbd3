"""The fused kernels on fp8 operands with scales, against float64.

fp8 numbers have few bits, so their products are exact in fp32, and the bound is that of a matmul of the
scaled operands: each scale is one more rounding.
"""

from typing import Any

import pytest
import torch

import interlace
from interlace import functional, reference
from interlace.ops.matmul.reference import _sum_error as sum_error
from interlace.runtime.tuning.configuration import override
from support import failure, noise, poisoned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16 = torch.float32, torch.bfloat16
SMALL = {f"block_{axis}": 16 for axis in "mnk"} | {"programs": 2, "chunks": 2, "copy_rows": 4}
K, N = 40, 24


def numbers(rank: int, call: int, *shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return noise(rank, call, shape).to(dtype)


def weight_of(call: int, k: int = K, n: int = N, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """(k, n), contiguous along k, as torch asks for."""
    return numbers(7, call, n, k, dtype=dtype).t()


def scale_of(kind: str, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """One number, equal on all ranks, or one per row or column."""
    if kind == "tensor":
        return torch.tensor(0.37)
    return noise(rank, 50, shape).abs() + 0.1


def check(
    actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, *roundings: torch.dtype
) -> None:
    """``roundings``: to which dtypes it was rounded on the way, the last first."""
    for dtype in roundings:
        error = reference.rounded(error, expected, dtype)
    assert reference.worst_ratio(actual, expected, error) <= 1


KINDS = [("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("tensor", "row")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)], ids=["e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize("copiers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_all_gather(
    kinds: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype], copiers: int, world: int
) -> None:
    """Rows of 2 chunks; the scales of the rows come with them. By descriptors where k allows it."""
    rows, k = 37, K if copiers else 48
    shards = [numbers(rank, 1, rows, k, dtype=dtypes[0]) for rank in range(world)]
    row_scales = [scale_of(kinds[0], rank, (rows, 1)) for rank in range(world)]
    weight, column_scale = weight_of(2, k, dtype=dtypes[1]), scale_of(kinds[1], 9, (1, N))
    bias = noise(0, 3, (N,))

    def on_rank() -> list[torch.Tensor]:
        rank = interlace.get_rank()
        made = functional.all_gather_scaled_matmul(
            shards[rank],
            weight,
            row_scales[rank],
            column_scale,
            bias=bias,
            return_gathered=True,
            out_dtype=F32,
            algorithm="fused",
        )
        return [functional.wait(each) for each in made]

    whole = torch.cat(shards)
    scale = torch.cat(row_scales) if kinds[0] == "row" else row_scales[0]
    value, error = reference.scaled_matmul(whole, weight, scale, column_scale)
    error = error + reference.unit_roundoff(F32) * ((value + bias.double()).abs() + error)
    with poisoned(), override(**SMALL, copiers=copiers, output_descriptors=True):
        for gathered, output in interlace.run(on_rank, world):
            assert torch.equal(gathered.float(), whole.float())
            check(output, value + bias.double(), error, F32)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_reduce_scatter(kinds: tuple[str, str], dim: int, reduce_op: str) -> None:
    """Products are scaled by each rank's own scales and rounded before they travel."""
    world, lengths = 2, (4, 6)
    inputs = [numbers(rank, 1, *lengths, K) for rank in range(world)]
    weights = [weight_of(10 + rank) for rank in range(world)]
    row_scales = [scale_of(kinds[0], rank, (*lengths, 1)) * (rank + 1) for rank in range(world)]
    column_scales = [scale_of(kinds[1], 20 + rank, (1, N)) for rank in range(world)]
    bias = noise(0, 3, (N,)).to(BF16)

    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        made = functional.scaled_matmul_reduce_scatter(
            inputs[rank],
            weights[rank],
            row_scales[rank],
            column_scales[rank],
            reduce_op,
            dim,
            bias=bias,
            algorithm="fused",
        )
        assert made.is_contiguous()
        return functional.wait(made)

    parts = [
        reference.scaled_matmul(*each)
        for each in zip(inputs, weights, row_scales, column_scales, strict=True)
    ]
    unit = reference.unit_roundoff(F32)
    total, error = reference.sum_of_rounded(parts, BF16, unit, reduce_op)
    total = total + bias.double()
    error = error + unit * (total.abs() + error)
    with poisoned(), override(**SMALL):
        results = interlace.run(on_rank, world)
    expected = zip(total.chunk(world, dim), error.chunk(world, dim), strict=True)
    for mine, (value, bound) in zip(results, expected, strict=True):
        assert mine.dtype == BF16
        check(mine, value, bound, BF16)


def test_several_weights_share_the_gather() -> None:
    """One with a scale per column, one with one number: both are taken per column then."""
    weights = [weight_of(1, n=16), weight_of(2, n=8, dtype=E5M2)]
    scales = [scale_of("row", 1, (1, 16)), torch.tensor(2.0)]

    def on_rank() -> list[torch.Tensor]:
        x = numbers(interlace.get_rank(), 1, 3, 5, K)
        made = functional.all_gather_scaled_matmul(
            x, weights, torch.tensor(0.5), scales, 1, out_dtype=F32, algorithm="fused"
        )
        return [functional.wait(each) for each in made]

    whole = torch.cat([numbers(rank, 1, 3, 5, K) for rank in range(2)], 1)
    with poisoned(), override(**SMALL):
        for outputs in interlace.run(on_rank, 2):
            for output, weight, scale in zip(outputs, weights, scales, strict=True):
                check(
                    output, *reference.scaled_matmul(whole, weight, torch.tensor(0.5), scale), F32
                )


def test_auto_is_the_kernel_where_it_can_be() -> None:
    """A weight that is contiguous along n is torch's, on every rank if it is on one."""
    column_major = weight_of(1, 16, 16)
    seen: list[tuple[int, str]] = []

    def on_rank(rowwise_on: int) -> torch.Tensor:
        from interlace.ops.matmul import scaled

        rank = interlace.get_rank()
        gather = scaled.gather_fused
        scaled.gather_fused = lambda *a, **k: (seen.append((rank, "kernel")), gather(*a, **k))[1]
        try:
            weight = column_major.contiguous() if rank == rowwise_on else column_major
            half = torch.tensor(0.5)
            made = functional.all_gather_scaled_matmul(
                numbers(rank, 1, 16, 16), weight, half, half, out_dtype=F32
            )
            return functional.wait(made)
        finally:
            scaled.gather_fused = gather

    kernel = interlace.run(on_rank, 2, -1)
    assert {rank for rank, _ in seen} == {0, 1}
    seen.clear()
    plain = interlace.run(on_rank, 2, 1)
    assert not seen
    for one, other in zip(kernel, plain, strict=True):
        torch.testing.assert_close(one, other)


def misuse(options: dict[str, Any], weight: torch.Tensor) -> BaseException:
    half = torch.tensor(0.5)
    return failure(
        lambda: functional.all_gather_scaled_matmul(
            numbers(0, 1, 16, 16), weight, half, half, **options
        ),
        2,
    )


def test_what_the_kernel_cannot_do_is_said() -> None:
    error = misuse({"algorithm": "fused"}, weight_of(1, 16, 16).contiguous())
    assert isinstance(error, ValueError)
    assert "contiguous along k, strides are (16, 1), on rank 0" in str(error)
    error = misuse({"algorithm": "fused", "out_dtype": torch.float64}, weight_of(1, 16, 16))
    assert "out_dtype must be float32, float16 or bfloat16" in str(error)
    error = misuse({"algorithm": "pipelined"}, weight_of(1, 16, 16))
    assert "algorithm must be one of auto, fused, unfused" in str(error)


@pytest.mark.parametrize(("k", "n"), [(40, 1), (1, 24), (1, 1)])
@pytest.mark.parametrize("strides", [(1, 1), (1, 64), (64, 1)])
def test_one_row_or_column_has_no_stride_that_matters(
    k: int, n: int, strides: tuple[int, int]
) -> None:
    if (k > 1 and strides[0] > 1) or (n > 1 and strides[1] > 1):
        strides = strides[::-1]  # the odd one is that of the dimension of one element
    weight = torch.empty_strided((k, n), strides, dtype=E4M3).copy_(weight_of(2, k, n))
    one, scale = torch.tensor(1.0), scale_of("row", 9, (1, n))
    world, lengths = 2, (4, 6)

    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        x = numbers(interlace.get_rank(), 1, *lengths, k)
        gathered = functional.all_gather_scaled_matmul(
            x, weight, one, scale, out_dtype=F32, algorithm="fused"
        )
        reduced = functional.scaled_matmul_reduce_scatter(
            x, weight, one, scale, "sum", 1, out_dtype=F32, algorithm="fused"
        )
        return functional.wait(gathered), functional.wait(reduced)

    inputs = [numbers(rank, 1, *lengths, k) for rank in range(world)]
    value, error = reference.scaled_matmul(torch.cat(inputs), weight, one, scale)
    parts = [reference.scaled_matmul(x, weight, one, scale) for x in inputs]
    total = sum(value for value, _ in parts)
    magnitudes = [value.abs() + error for value, error in parts]
    bound = sum_error([e for _, e in parts], magnitudes, reference.unit_roundoff(F32))
    with poisoned(), override(**SMALL):
        for rank, (gathered, reduced) in enumerate(interlace.run(on_rank, world)):
            check(gathered, value, error, F32)
            check(reduced, total.chunk(world, 1)[rank], bound.chunk(world, 1)[rank], F32)


def test_ranks_agree_on_how_to_accumulate() -> None:
    def on_rank() -> None:
        rank, half = interlace.get_rank(), torch.tensor(0.5)
        functional.scaled_matmul_reduce_scatter(
            numbers(0, 1, 16, 16), weight_of(1, 16, 16), half, half, use_fast_accum=rank == 1
        )

    error = failure(on_rank, 2)
    assert "use_fast_accum differs between ranks: False on rank 0, True on rank 1" in str(error)
