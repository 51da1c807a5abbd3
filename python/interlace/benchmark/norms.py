"""Ops with a norm in their tail, against torch's sequence: a sum over ranks, addition, norm.

The sum is over products, as in ``fused.py``, or over existing rows. Every rank has the residual of its rows
and the norm's vectors, which stay the same in all calls. The sum is compared with float64; the normed rows
with the float64 norm of that sum.

``check`` also uses LayerNorm (``norm="layer"``), and fp8 and block-scaled formats (``quantize``), which
the baseline in torch does not have.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

import interlace
from interlace import reference
from interlace.benchmark import protocol
from interlace.benchmark.fused import (
    ByRows,
    Expected,
    Fused,
    MatmulAllReduce,
    MatmulReduceScatter,
)
from interlace.benchmark.plain import AllReduce, Plain, ReduceScatter, Tensors
from interlace.ops.matmul.formats import Scaled
from interlace.ops.matmul.norms import GATHERED_ROWS
from interlace.runtime.core.place import Place
from interlace.runtime.numerics.norms import LARGEST, SMALLEST_SCALE, RowNorm

EPS = 1e-6
RESIDUAL, NORM, BIAS = -2, -1, -3  # numbers that no call has


class _WithNorm(ByRows):
    """A sum with a norm, from a class of sums; results are (normed rows, sum)."""

    def __init__(
        self,
        place: Place,
        dtype: torch.dtype,
        *sizes: int,
        norm: str = "rms",
        quantize: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(place, dtype, *sizes, **settings)
        # rank 0's: the residual of a row is the same on all ranks
        self._residuals = self.matrix(0, self.m, self.n, 0, RESIDUAL)
        first, count = self.result_rows
        self._residual = self._residuals[first : first + count].contiguous()
        self._weight = self.matrix(0, 1, self.n, 0, NORM).view(-1)
        bias = self.matrix(0, 1, self.n, 0, BIAS).view(-1) if norm == "layer" else None
        self._norm, self._quantize = RowNorm(norm, EPS, self._weight, bias), quantize

    def _how(self, algorithm: str) -> dict[str, Any]:
        """Return arguments of interlace's ops."""
        how = {"algorithm": algorithm, "residual": self._residual, "norm": self._norm}
        return how | {"quantize": self._quantize}

    def theirs(self, *tensors: Any) -> Any:
        total = super().theirs(*tensors) + self._residual  # type: ignore[safe-super]
        return F.rms_norm(total, (self.n,), self._weight, EPS), total

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        value, bound, looser = super().expected(rows, call)  # type: ignore[safe-super]
        residual = self._residual[rows]
        total, bound = reference.with_residual((value, bound), residual, self.dtype)
        _, looser = reference.with_residual((value, looser), residual, self.dtype)
        return total, bound, looser

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        normed, total = result
        worst = super().check(total, call, rounds_often)
        return max(worst, self._error_of_norm(normed, total, rounds_often))

    def _error_of_norm(self, normed: Any, total: torch.Tensor, often: bool) -> float:
        """Return the error of ``normed`` for exactly these sums; quantised: with scales or ``Scaled``."""
        value, bound = reference.norm(total, self._norm, self.dtype)
        if isinstance(normed, Scaled):
            whole = None if normed.whole is None else normed.whole.new_ones(())
            largest = ((value.abs() + bound) * 1.0001).float()
            most = interlace.quantize(largest, normed.format, whole=whole)  # type: ignore[arg-type]
            if not bool((normed.scales.float() <= most.scales.float()).all()):
                return float("inf")
            value, bound = reference.block_scaled(normed, (value, bound))
            normed = normed.dequantize(torch.float64)
        elif self._quantize:
            largest = (value.abs() + bound).amax(-1, keepdim=True) / LARGEST
            values, scale = normed
            if not bool((scale <= 1.0001 * largest + SMALLEST_SCALE).all()):
                return float("inf")
            value, bound = reference.dequantized((values, scale), (value, bound))
            normed = values.double() * scale.double()
        if often:  # torch may round before it multiplies with the weight
            bound = bound + value.abs() * reference.unit_roundoff(self.dtype)
        return reference.worst_ratio(normed, value, bound)


class _ProductWithNorm(_WithNorm, Fused):
    def ours(self, algorithm: str) -> Callable[..., Any]:
        op = getattr(interlace, self.op.removesuffix("_norm"))
        how = {**self.options(algorithm), **self._how(algorithm)}
        return lambda input, weight, buffer: op(input, weight, **how)


class MatmulReduceScatterNorm(_ProductWithNorm, MatmulReduceScatter):
    op = "matmul_reduce_scatter_norm"


class MatmulAllReduceNorm(_ProductWithNorm, MatmulAllReduce):
    op = "matmul_all_reduce_norm"


class _Sums(ByRows):
    """Existing rows, summed over ranks; the tensors are the collective's."""

    sizes = ("m", "n")
    without = "has rows and columns; it takes --m and --n"
    communication: type[Plain]

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int) -> None:
        super().__init__(place, dtype, m, n)
        self.nbytes = m * n * dtype.itemsize
        self.collective = self.communication(place, dtype, self.nbytes)
        self.bus_factor = self.collective.bus_factor

    def inputs(self, call: int) -> Tensors:
        return self.collective.inputs(call)

    def timed_inputs(self, call: int) -> Tensors:
        return self.collective.timed_inputs(call)

    def theirs(self, *tensors: Any) -> Any:
        total = getattr(self.collectives, self.communication.op)(*tensors)
        return total.view(-1, self.n)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        parts = [
            protocol.some_rows(rows + self.result_rows[0], self.n, rank, call, self.dtype)
            for rank in range(self.world_size)
        ]
        value, bound = reference.reduce(parts)
        return value, bound, bound + protocol.often_rounded(parts, self.dtype)


class _SumsWithNorm(_WithNorm, _Sums):
    varied = tuple(
        {"block_elements": elements, "num_warps": warps}
        for elements in (1024, 2048, 4096)
        for warps in (4, 8)
    )
    more: ClassVar[Mapping[str, Any]] = {}

    def ours(self, algorithm: str) -> Callable[..., Any]:
        op: Any = interlace.reduce_scatter_norm if self.scatters else interlace.all_reduce_norm
        how = {**self._how(algorithm), **self.more}
        return lambda *tensors: op(tensors[-1].view(self.m, self.n), **how)


class AllReduceNorm(_SumsWithNorm):
    op = "all_reduce_norm"
    communication = AllReduce


class ReduceScatterNorm(_SumsWithNorm):
    op = "reduce_scatter_norm"
    communication = ReduceScatter
    scatters = True


class GatherNormed(ReduceScatterNorm):
    """All ranks get all normed rows: torch's norm is followed by an all-gather."""

    op = GATHERED_ROWS.name
    more: ClassVar = GATHERED_ROWS.options

    def theirs(self, *tensors: Any) -> Any:
        normed, total = super().theirs(*tensors)
        return self.collectives.all_gather(normed.new_empty(self.m, self.n), normed), total

    def _totals(self, call: int) -> torch.Tensor:
        """Return the sums of all rows, rounded once; sums of a few payloads are exact in fp32."""
        parts = [self.collective.of(rank, call).double() for rank in range(self.world_size)]
        total = torch.stack(parts).sum(0).view(self.m, self.n) + self._residuals
        return total.to(self.dtype)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        normed, total = result
        if normed.shape[0] != self.m:
            return float("inf")
        own = normed[self.own : self.own + self.rows]
        worst = super().check((own, total), call, rounds_often)
        totals = self._totals(call)
        if rounds_often:  # the baselines' sums may be off by roundings, and their norms by as much
            value, bound = reference.norm(totals, RowNorm("rms", EPS, self._weight), self.dtype)
            parts = [self.collective.of(rank, call) for rank in range(self.world_size)]
            off = protocol.often_rounded(parts, self.dtype).view_as(totals)
            off = off + totals.double().abs() * reference.unit_roundoff(self.dtype)
            rms = totals.double().square().mean(-1, keepdim=True).sqrt()
            weight = self._weight.double().abs() / rms
            more = weight * off + value.abs() * (off / rms).amax(-1, keepdim=True)
            more = more + value.abs() * reference.unit_roundoff(self.dtype)
            return max(worst, reference.worst_ratio(normed, value, bound + more))
        return max(worst, self._error_of_norm(normed, totals, rounds_often))
