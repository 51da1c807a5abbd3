"""Reductions whose rows are normed, on ranks that are processes."""

import copy

import pytest
import torch

import interlace
from interlace import reference
from interlace.runtime.numerics.norms import RowNorm
from ranks import ranks
from tiers import few

OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm")
ROWS, INNER, COLUMNS = 5, 8, 24


def _numbers(rank: int, call: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
@pytest.mark.parametrize("quantize", few([False, True], True))
@ranks(2)
def test_every_op(algorithm: str, quantize: bool) -> None:
    """5 rows, which no two ranks share evenly, gathered where an op scatters; "fused" is the kernel."""
    rank, world = interlace.get_rank(), interlace.get_world_size()
    weight, residual = _numbers(0, 3, COLUMNS), _numbers(0, 4, ROWS, COLUMNS)
    for op in OPS:
        matmul, scattered = op.startswith("matmul"), "scatter" in op
        inputs = [_numbers(r, 1, ROWS, INNER if matmul else COLUMNS) for r in range(world)]
        weights = [_numbers(r, 2, INNER, COLUMNS) for r in range(world)]
        own = reference.split(residual, world)[rank] if scattered else residual
        given = (inputs[rank], weights[rank]) if matmul else (inputs[rank],)
        how = {"gather_normed": True} if scattered else {}
        norm = interlace.RMSNorm(weight, 0.5)
        kind = "fp8" if quantize else None
        made, total = getattr(interlace, op)(
            *given, residual=own, norm=norm, quantize=kind, algorithm=algorithm, **how
        )
        found = (
            reference.matmul_all_reduce(inputs, weights, torch.bfloat16)
            if matmul
            else reference.reduce(inputs)
        )
        value, bound = reference.with_residual(found, residual, torch.bfloat16)
        parts: list[torch.Tensor] = [torch.empty(0)] * world
        interlace.all_gather_object(parts, total)
        whole = torch.cat(parts) if scattered else total
        assert reference.worst_ratio(whole, value, bound) <= 1, op
        right_norm = reference.norm(whole, RowNorm("rms", 0.5, weight), torch.bfloat16)
        if quantize:
            rows: list[torch.Tensor] = [torch.empty(0)] * world
            interlace.all_gather_object(rows, made[0])
            assert torch.equal(rows[rank].view(torch.uint8), made[0].view(torch.uint8))
            right_norm = reference.dequantized(made, right_norm)
            made = made[0].double() * made[1].double()
        assert reference.worst_ratio(made, *right_norm) <= 1, op


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_what_torch_does_not_unpickle_goes_to_ranks_and_comes_back(dtype: torch.dtype) -> None:
    given = torch.arange(6).view(2, 3).t().to(dtype)
    for found in interlace.run(copy.deepcopy, 2, {"rows": [given]}, place="shm"):
        (back,) = found["rows"]
        assert back.dtype == dtype and back.tolist() == given.tolist()
