"""The fused ops on fp8 operands with scales in processes, against float64."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from ranks import ranks
from sim.api.refusals import check_refused
from support import SCALES_BY_ROW

pytestmark = pytest.mark.skipif(
    not SCALES_BY_ROW, reason="before torch 2.12 a CPU multiplies no rows with scales"
)
FP8, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
GATHER, REDUCE = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
Case = tuple[tuple[Any, ...], dict[str, Any]]
HALF = torch.tensor(0.5)
FULL = {"out_dtype": torch.float32}


def of(rank: int, *shape: int, dtype: torch.dtype = FP8, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, other ones on each rank: sums of products of them are exact."""
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def scales(rank: int, *shape: int) -> torch.Tensor:
    """Powers of two, other ones on each rank."""
    return of(rank, *shape, dtype=torch.float32, seed=7).add(1).exp2()


def gathering(rank: int) -> dict[str, Case]:
    w, w2 = of(9, 16, 5), of(9, 3, 16, dtype=WIDE).t()
    two = [w, w2], [scales(9, 1, 5), torch.tensor(2.0)]
    biased = {**FULL, "bias": of(9, 5, dtype=torch.float32)}
    x, columns = of(rank, 2, 16), scales(9, 1, 5)
    return {
        "tensor-wise": ((x, w, HALF, HALF), FULL),
        "by row": ((x, w, scales(rank, 2, 1), columns), FULL),
        "rows only": ((x, w, scales(rank, 2, 1), HALF), FULL),
        "columns only": ((x, w, HALF, columns), FULL),
        "bias": ((x, w, HALF, HALF), biased),
        "halves": ((x, w, HALF, HALF), {}),
        "two, 3-D": ((of(rank, 3, 2, 16), two[0], scales(rank, 3, 2, 1), two[1], 1), FULL),
        "strided": ((of(rank, 16, 4).t(), w, scales(rank, 4, 1), HALF), biased),
        "no rows": ((x[:0], w, scales(rank, 0, 1), columns), biased),
        "one row": ((x[:1], w, scales(rank, 1, 1), HALF), FULL),
        "no rows, tensor-wise": ((x[:0], w, HALF, HALF), FULL),
    }


def reducing(rank: int, size: int) -> dict[str, Case]:
    n = 2 * size
    w, x, x3 = of(rank, 16, n, seed=1), of(rank, n, 16), of(rank, 3, n, 16)
    biased = {**FULL, "bias": of(9, n, dtype=torch.float32)}
    return {
        "tensor-wise": ((x, w, HALF * (rank + 1), HALF), FULL),
        "by row": ((x, w, scales(rank, n, 1), scales(rank, 1, n)), FULL),
        "bias": ((x, w, HALF, HALF), biased),
        "average": ((x, w, HALF, HALF, "avg"), biased),
        "3-D": ((x3, w, scales(rank, 3, n, 1), HALF, "sum", 1), FULL),
        "columns": ((x3, w, HALF, HALF, "sum", -1), biased),
        "halves": ((x, w, HALF, HALF), {}),
    }


def scaled(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return tensor.double() * scale.double()


def gathered(calls: Sequence[Case]) -> list[torch.Tensor]:
    """In float64, from all ranks' arguments."""
    (_, weight, _, weight_scale, *rest), options = calls[0]
    whole = torch.cat([scaled(args[0], args[2]) for args, _ in calls], rest[0] if rest else 0)
    weights, of_weights = (
        each if isinstance(each, list) else [each] for each in (weight, weight_scale)
    )
    bias = options.get("bias", 0)
    return [whole @ scaled(w, s) + bias for w, s in zip(weights, of_weights, strict=True)]


def reduced(calls: Sequence[Case], rank: int) -> list[torch.Tensor]:
    (_, _, _, _, *rest), options = calls[0]
    total = torch.stack([scaled(x, a) @ scaled(w, b) for (x, w, a, b, *_), _ in calls]).sum(0)
    if rest and rest[0] == "avg":
        total = total / len(calls)
    total = total + options.get("bias", 0)
    return [total.chunk(len(calls), rest[1] if len(rest) > 1 else 0)[rank]]


def called(op: str, *args: Any, **options: Any) -> list[torch.Tensor]:
    made = getattr(functional, op)(*args, **options)
    return [functional.wait(each) for each in (made if isinstance(made, list) else [made])]


def check(op: str, case: Case, right: Sequence[torch.Tensor]) -> None:
    arguments, options = case
    dtype = options.get("out_dtype", torch.bfloat16)
    for result, expected in zip(called(op, *arguments, **options), right, strict=True):
        assert (result.dtype, result.shape) == (dtype, expected.shape)
        # fp32 is exact but for a division by 3; bfloat16 rounds each product, and then their sum
        tolerance = 2 ** (-22 if dtype == torch.float32 else -6)
        if expected.numel():
            error = (result.double() - expected).abs().max()
            assert error <= tolerance * expected.abs().max()


@ranks(3)
def test_results() -> None:
    """A scale of a row comes with the row, and a bias is added once."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    for name, case in gathering(rank).items():
        check(GATHER, case, gathered([gathering(each)[name] for each in range(size)]))
    for name, case in reducing(rank, size).items():
        check(REDUCE, case, reduced([reducing(each, size)[name] for each in range(size)], rank))


ONE = torch.tensor(1.0)
RIGHT = {"input": of(0, 2, 16), "weight": of(0, 16, 6), "input_scale": ONE, "weight_scale": ONE}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (GATHER, {"input": torch.ones(2, 16)}, "float8_e4m3fn"),
    (GATHER, {"input_scale": torch.ones(3, 1)}, "input_scale must have"),
    (GATHER, {"weight_scale": torch.ones(6)}, "weight_scale must have"),
    (GATHER, {"gather_dim": 1}, "contracted"),
    (GATHER, {"input_scale": torch.ones(2, 1)}, "is by row"),
    (REDUCE, {"input_scale": ONE.double()}, "must be float32"),
    (REDUCE, {"reduce_op": "max"}, "sum, avg"),
]


@ranks(2)
def test_misuse_of_one_rank_is_known_to_all() -> None:
    for op, changes, text in REFUSED:
        check_refused(functools.partial(called, op), RIGHT, changes, text)
