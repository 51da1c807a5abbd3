"""Ranks of test_norms_shm.py. A module of its own, because new processes import it."""

import torch

import interlace
from interlace import reference
from interlace.runtime.numerics.norms import RowNorm

OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm")
ROWS, INNER, COLUMNS = 5, 8, 24


def _numbers(rank: int, call: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(shape, generator=generator).bfloat16()


def every_op(algorithm: str, quantize: bool) -> list[str]:
    """The ops that were right, gathered where they scatter; 5 rows, which no two ranks share evenly."""
    rank, world, right = interlace.get_rank(), interlace.get_world_size(), []
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
        right.append(op)
    return right
