"""Fused ops with a norm in their tail, against torch's sequence: matmul, collective, addition, norm.

As in ``fused.py``, whose sums these are. Every rank has the residual of its rows and RMSNorm's weight,
which stay the same in all calls. The sum is compared with float64; the normed rows with the float64 norm of
that sum.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace import reference
from interlace.benchmark.subjects.fused import (
    Expected,
    Fused,
    MatmulAllReduce,
    MatmulReduceScatter,
)
from interlace.benchmark.subjects.plain import Tensors
from interlace.runtime.core.place import Place
from interlace.runtime.numerics.norms import RowNorm

EPS = 1e-6
RESIDUAL, NORM = -2, -1  # calls that are never made


class _WithNorm(Fused):
    """Of a class of ``fused.py`` the same with a norm; results are (normed rows, sum)."""

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        first, count = self.result_rows
        # rank 0's: the residual of a row is the same on all ranks
        self._residual = self.matrix(0, m, n, 0, RESIDUAL)[first : first + count].contiguous()
        self._weight = self.matrix(0, 1, n, 0, NORM).view(-1)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        op = getattr(interlace, self.op.removesuffix("_norm"))
        norm = interlace.RMSNorm(self._weight, EPS)
        how = {"algorithm": algorithm, "residual": self._residual, "norm": norm}
        return lambda input, weight, buffer: op(input, weight, **how)

    def _finished(self, total: torch.Tensor) -> Any:
        total = total + self._residual
        return F.rms_norm(total, (self.n,), self._weight, EPS), total

    def theirs(self, *tensors: Any) -> Any:
        return self._finished(super().theirs(*tensors))  # type: ignore[safe-super]

    def alone(self, *tensors: Any) -> Any:
        return self._finished(super().alone(*tensors))  # type: ignore[safe-super]

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        raise ValueError(f"--baseline symm_mem: torch has no fused {self.op}")

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        value, bound, looser = super().expected(rows, call)
        residual = self._residual[rows]
        total, bound = reference.with_residual((value, bound), residual, self.dtype)
        _, looser = reference.with_residual((value, looser), residual, self.dtype)
        return total, bound, looser

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        normed, total = result
        worst = super().check(total, call, rounds_often)
        norm = RowNorm("rms", EPS, self._weight)
        value, bound = reference.norm(total, norm, self.dtype)
        if rounds_often:  # torch may round before it multiplies with the weight
            bound = bound + value.abs() * reference.unit_roundoff(self.dtype)
        return max(worst, reference.worst_ratio(normed, value, bound))


class MatmulReduceScatterNorm(_WithNorm, MatmulReduceScatter):
    op = "matmul_reduce_scatter_norm"

    def inputs(self, call: int) -> Tensors:
        return MatmulReduceScatter.inputs(self, call)


class MatmulAllReduceNorm(_WithNorm, MatmulAllReduce):
    op = "matmul_all_reduce_norm"

    def inputs(self, call: int) -> Tensors:
        return MatmulAllReduce.inputs(self, call)
