"""The fused ops on fp8 operands with scales, by kernels and by torch, against float64.

fp8 numbers have few bits, so their products are exact in fp32. The bound is the bound of a matmul of the
scaled operands: each scale is one more rounding.
"""

import functools
from typing import Any

import pytest
import torch

import interlace
from interlace import functional, reference
from interlace.ops.matmul.reference import _sum_error as sum_error
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.api.refusals import both, check_refused
from sim.norms.counted import launches
from support import SCALES_BY_ROW, laid_out, noise, poisoned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F32, BF16 = torch.float32, torch.bfloat16
SMALL = {f"block_{axis}": 16 for axis in "mnk"} | {"programs": 2, "chunks": 2, "copy_rows": 4}
K, N = 40, 24


def numbers(rank: int, call: int, *shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return noise(rank, call, shape).to(dtype)


def weight_of(call: int, k: int = K, n: int = N, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Return a weight of (k, n) that is contiguous along k, as torch requires."""
    return numbers(7, call, n, k, dtype=dtype).t()


def scale_of(kind: str, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return one number, equal on all ranks, or one per row or column."""
    if kind == "tensor":
        return torch.tensor(0.37)
    return noise(rank, 50, shape).abs() + 0.1


def check(
    actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, *roundings: torch.dtype
) -> None:
    """``roundings``: the dtypes of roundings on the way, the last first."""
    for dtype in roundings:
        error = reference.rounded(error, expected, dtype)
    assert reference.worst_ratio(actual, expected, error) <= 1


KINDS = [("tensor", "tensor"), ("row", "row"), ("row", "tensor"), ("tensor", "row")]
BY_TORCH = pytest.param(
    "unfused",
    marks=pytest.mark.skipif(
        not SCALES_BY_ROW, reason="before torch 2.12 a CPU multiplies no rows with scales"
    ),
)
ALGORITHMS = pytest.mark.parametrize("algorithm", ["fused", BY_TORCH])


@ALGORITHMS
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)], ids=["e4m3", "e4m3-e5m2"])
@pytest.mark.parametrize("copiers", [0, 2])
@pytest.mark.parametrize(("world", "rows"), [(1, 37), (3, 37), (2, 1), (2, 0)])
def test_all_gather(
    kinds: tuple[str, str],
    dtypes: tuple[torch.dtype, torch.dtype],
    copiers: int,
    world: int,
    rows: int,
    algorithm: Any,
) -> None:
    k, layout = (K, "transposed") if copiers else (48, "contiguous")
    shards = [laid_out(numbers(rank, 1, rows, k, dtype=dtypes[0]), layout) for rank in range(world)]
    row_scales = [scale_of(kinds[0], rank, (rows, 1)) for rank in range(world)]
    weight, column_scale = weight_of(2, k, dtype=dtypes[1]), scale_of(kinds[1], 9, (1, N))
    bias = noise(0, 3, (N,))
    whole = torch.cat(shards)
    scale = torch.cat(row_scales) if kinds[0] == "row" else row_scales[0]
    value, error = reference.scaled_matmul(whole, weight, scale, column_scale)
    error = error + reference.unit_roundoff(F32) * ((value + bias.double()).abs() + error)

    def on_rank() -> None:
        rank = interlace.get_rank()
        operands = shards[rank], weight, row_scales[rank], column_scale
        options: Any = {"return_gathered": True, "out_dtype": F32, "algorithm": algorithm}
        made = functional.all_gather_scaled_matmul(*operands, bias=bias, **options)
        gathered, output = (functional.wait(each) for each in made)
        assert torch.equal(gathered.float(), whole.float())
        check(output, value + bias.double(), error, F32)

    with poisoned(), override(**SMALL, copiers=copiers, output_descriptors=True):
        interlace.run(on_rank, world)


@ALGORITHMS
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_reduce_scatter(kinds: tuple[str, str], dim: int, reduce_op: str, algorithm: Any) -> None:
    """Each rank scales and rounds its products before they are sent. The reference is in fp32 because
    torch rounds before it scales.
    """
    world, lengths, dtype = 2, (4, 6), BF16 if algorithm == "fused" else F32
    inputs = [numbers(rank, 1, *lengths, K) for rank in range(world)]
    weights = [weight_of(10 + rank) for rank in range(world)]
    row_scales = [scale_of(kinds[0], rank, (*lengths, 1)) * (rank + 1) for rank in range(world)]
    column_scales = [scale_of(kinds[1], 20 + rank, (1, N)) for rank in range(world)]
    bias = noise(0, 3, (N,)).to(dtype)

    parts = [
        reference.scaled_matmul(*each)
        for each in zip(inputs, weights, row_scales, column_scales, strict=True)
    ]
    unit = reference.unit_roundoff(F32)
    total, error = reference.sum_of_rounded(parts, dtype, unit, reduce_op)
    total = total + bias.double()
    error = error + unit * (total.abs() + error)

    def on_rank() -> None:
        rank = interlace.get_rank()
        operands = inputs[rank], weights[rank], row_scales[rank], column_scales[rank]
        options: Any = {"bias": bias, "algorithm": algorithm, "out_dtype": dtype}
        made = functional.scaled_matmul_reduce_scatter(*operands, reduce_op, dim, **options)
        assert made.is_contiguous() and made.dtype == dtype
        own = total.chunk(world, dim)[rank], error.chunk(world, dim)[rank]
        check(functional.wait(made), *own, dtype)

    with poisoned(), override(**SMALL):
        interlace.run(on_rank, world)


@ALGORITHMS
def test_several_weights_share_the_gather(algorithm: Any) -> None:
    """One weight has a scale per column, the other has one number."""
    weights = [weight_of(1, n=16), weight_of(2, n=8, dtype=E5M2)]
    scales = [scale_of("row", 1, (1, 16)), torch.tensor(2.0)]

    whole = torch.cat([numbers(rank, 1, 3, 5, K) for rank in range(2)], 1)
    half = torch.tensor(0.5)

    def on_rank() -> None:
        x = numbers(interlace.get_rank(), 1, 3, 5, K)
        options: Any = {"out_dtype": F32, "algorithm": algorithm}
        made = functional.all_gather_scaled_matmul(x, weights, half, scales, 1, **options)
        for output, weight, scale in zip(made, weights, scales, strict=True):
            right = reference.scaled_matmul(whole, weight, half, scale)
            check(functional.wait(output), *right, F32)

    with poisoned(), override(**SMALL):
        interlace.run(on_rank, 2)


def test_auto_is_the_kernel_where_it_can_be() -> None:
    """All ranks use torch if the weight of one rank is contiguous along n."""
    column_major, half = weight_of(1, 16, 16), torch.tensor(0.5)

    def on_rank(rowwise_on: int) -> torch.Tensor:
        rank = interlace.get_rank()
        weight = column_major.contiguous() if rank == rowwise_on else column_major
        x = numbers(rank, 1, 16, 16)
        made = functional.all_gather_scaled_matmul(x, weight, half, half, out_dtype=F32)
        return functional.wait(made)

    with launches() as seen:
        kernel = interlace.run(on_rank, 2, -1)
    assert "all_gather_matmul_kernel" in seen
    with launches() as seen:
        plain = interlace.run(on_rank, 2, 1)
    assert "all_gather_matmul_kernel" not in seen
    for one, other in zip(kernel, plain, strict=True):
        torch.testing.assert_close(one, other)


ONE = torch.tensor(1.0)
X, W = numbers(0, 1, 16, 16), weight_of(1, 16, 16)
GATHER, REDUCE = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (GATHER, {"input": torch.ones(16, 16)}, "TypeError: float8_e4m3fn"),
    (GATHER, {"input_scale": torch.ones(3, 1)}, "input_scale must have"),
    (GATHER, {"weight_scale": torch.ones(6)}, "weight_scale must have"),
    (GATHER, {"gather_dim": 1}, "contracted"),
    (GATHER, {"input_scale": torch.ones(16, 1)}, "is by row"),
    (GATHER, {"algorithm": both("fused"), "weight": W.contiguous()},
     "contiguous along k, strides are (16, 1), on rank 1"),
    (GATHER, {"algorithm": both("fused"), "out_dtype": torch.float64},
     "out_dtype must be float32, float16 or bfloat16"),
    (GATHER, {"algorithm": "pipelined"}, "algorithm must be one of auto, fused, unfused"),
    (REDUCE, {"input_scale": ONE.double()}, "TypeError: must be float32"),
    (REDUCE, {"use_fast_accum": True},
     "use_fast_accum differs between ranks: False on rank 0, True on rank 1"),
]  # fmt: skip


def called(op: str, **arguments: Any) -> torch.Tensor:
    return functional.wait(getattr(functional, op)(**arguments))


@pytest.mark.parametrize(("op", "changes", "text"), REFUSED)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_known_to_all(op: str, changes: dict[str, Any], text: str) -> None:
    right = {"input": X, "weight": W, "input_scale": ONE, "weight_scale": ONE}
    check_refused(functools.partial(called, op), right, changes, text)


@pytest.mark.parametrize(("k", "n"), [(40, 1), (1, 24), (1, 1)])
@pytest.mark.parametrize("strides", [(1, 1), (1, 64), (64, 1)])
def test_one_row_or_column_has_no_stride_that_matters(
    k: int, n: int, strides: tuple[int, int]
) -> None:
    if (k > 1 and strides[0] > 1) or (n > 1 and strides[1] > 1):
        strides = strides[::-1]  # a dimension of one element has the odd stride
    weight = torch.empty_strided((k, n), strides, dtype=E4M3).copy_(weight_of(2, k, n))
    scale = scale_of("row", 9, (1, n))
    world, lengths = 2, (4, 6)

    inputs = [numbers(rank, 1, *lengths, k) for rank in range(world)]
    value, error = reference.scaled_matmul(torch.cat(inputs), weight, ONE, scale)
    parts = [reference.scaled_matmul(x, weight, ONE, scale) for x in inputs]
    total = sum(value for value, _ in parts)
    magnitudes = [value.abs() + error for value, error in parts]
    bound = sum_error([e for _, e in parts], magnitudes, reference.unit_roundoff(F32))

    def on_rank() -> None:
        rank, options = interlace.get_rank(), {"out_dtype": F32, "algorithm": "fused"}
        operands: Any = inputs[rank], weight, ONE, scale
        gathered = functional.all_gather_scaled_matmul(*operands, **options)
        reduced = functional.scaled_matmul_reduce_scatter(*operands, "sum", 1, **options)
        check(functional.wait(gathered), value, error, F32)
        own = total.chunk(world, 1)[rank], bound.chunk(world, 1)[rank]
        check(functional.wait(reduced), *own, F32)

    with poisoned(), override(**SMALL):
        interlace.run(on_rank, world)
