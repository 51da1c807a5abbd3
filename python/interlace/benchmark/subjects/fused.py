"""The fused ops, at one shape: through interlace, and as torch's sequence of a matmul and a collective.

M, N, K are those of the matmul that every rank does: M are all rows, gathered or not yet scattered; N are
the columns of this rank's weight; K is what this rank contracts. Weights lie as ``nn.Linear`` keeps them.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

import interlace
from interlace import reference
from interlace.benchmark.subjects.by_rows import INPUT, WEIGHT, ByRows, Expected
from interlace.benchmark.subjects.plain import AllGather, AllReduce, Plain, ReduceScatter, Tensors
from interlace.benchmark.timing import payload
from interlace.runtime.core.place import Place


class Fused(ByRows):
    """One fused op of a rank. ``communication`` is the collective in it, ``communicated`` its columns."""

    communication: type[Plain]
    communicated = "n"
    shards = True

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        self.k, self.flops = k, 2 * m * n * k
        self.nbytes = m * self.shape[self.communicated] * dtype.itemsize
        self.collective = self.communication(place, dtype, self.nbytes)
        self.bus_factor = self.collective.bus_factor

    @classmethod
    def elements(cls, *sizes: int, **settings: Any) -> int:
        m, n, k = sizes
        return m * k + k * n + m * n

    def weight(self, rank: int, call: int) -> torch.Tensor:
        """``[k, n]``, a transposed view."""
        return self.matrix(WEIGHT, self.n, self.k, rank, call).t()

    def ours(self, algorithm: str) -> Callable[..., Any]:
        """Called with input, weight, and a buffer of the communicated size, which is torch's."""
        op = getattr(interlace, self.op)
        return lambda input, weight, buffer: op(input, weight, algorithm=algorithm)

    @abstractmethod
    def theirs(self, input: Any, weight: Any, buffer: Any) -> Any:
        """torch.mm and a collective of torch.distributed's default group."""

    def matmul_inputs(self, call: int) -> Tensors:
        return self.matrix(INPUT, self.m, self.k, self.rank, call), self.weight(self.rank, call)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Here: of a sum over ranks."""
        rows = rows + self.result_rows[0]
        inputs = [
            payload.some_rows(rows, self.k, rank, 2 * call + INPUT, self.dtype)
            for rank in range(self.world_size)
        ]
        weights = [self.weight(rank, call) for rank in range(self.world_size)]
        value, bound = reference.matmul_all_reduce(inputs, weights, self.dtype)
        products = [a.double() @ b.double() for a, b in zip(inputs, weights, strict=True)]
        return value, bound, bound + payload.often_rounded(products, self.dtype)


class AllGatherMatmul(Fused):
    op = "all_gather_matmul"
    communication = AllGather
    communicated = "k"

    def inputs(self, call: int) -> Tensors:
        shard = self.matrix(INPUT, self.rows, self.k, self.rank, call)
        return shard, self.weight(self.rank, call), self.collective.empty(self.m, self.k)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        return torch.mm(self.collective.theirs(buffer, input), weight)

    def alone_inputs(self, call: int) -> Tensors:
        shards = [self.matrix(INPUT, self.rows, self.k, r, call) for r in range(self.world_size)]
        buffer = self.collective.empty(self.m, self.k)
        return torch.cat(shards), self.weight(self.rank, call), buffer

    def alone(self, gathered: Any, weight: Any, buffer: Any) -> torch.Tensor:
        return torch.mm(buffer.copy_(gathered), weight)

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        op = torch.ops.symm_mem.fused_all_gather_matmul
        return lambda input, weight, buffer: op(input, [weight], 0, group_name)[1][0]

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        owners, index = rows // self.rows, rows % self.rows
        pieces = [
            payload.some_rows(index[owners == r], self.k, r, 2 * call + INPUT, self.dtype)
            for r in range(self.world_size)
        ]
        weight = self.weight(self.rank, call)
        value, bound = reference.all_gather_matmul(pieces, weight, self.dtype, roundings=2)
        return value, bound, bound


class _MatmulReduce(Fused):
    """Ops that sum products over ranks."""

    def alone_inputs(self, call: int) -> Tensors:
        """Besides, every rank's product for the own rows, ``[world_size, rows, n]``."""
        end = self.own + self.rows
        products = [
            self.matrix(INPUT, self.m, self.k, r, call)[self.own : end] @ self.weight(r, call)
            for r in range(self.world_size)
        ]
        return (*self.matmul_inputs(call), torch.stack(products))

    def _summed(self, product: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """The own rows of all ranks' products."""
        parts[self.rank].copy_(product[self.own : self.own + self.rows])
        return torch.sum(parts, 0, dtype=parts.dtype)


class MatmulReduceScatter(_MatmulReduce):
    op = "matmul_reduce_scatter"
    communication = ReduceScatter
    scatters = True

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), self.collective.empty(self.rows, self.n))

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        output: torch.Tensor = self.collective.theirs(buffer, torch.mm(input, weight))
        return output

    def alone(self, *tensors: Any) -> torch.Tensor:
        input, weight, parts = tensors
        return self._summed(torch.mm(input, weight), parts)

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        op = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return lambda input, weight, buffer: op(input, weight, "sum", 0, group_name)


class MatmulAllReduce(_MatmulReduce):
    op = "matmul_all_reduce"
    shards = False
    communication = AllReduce

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), None)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        product: torch.Tensor = self.collective.theirs(torch.mm(input, weight))
        return product

    def alone_inputs(self, call: int) -> Tensors:
        """Besides, the sums of the other rows, which their owners would send."""
        total = sum(
            self.matrix(INPUT, self.m, self.k, r, call) @ self.weight(r, call)
            for r in range(self.world_size)
        )
        return (*super().alone_inputs(call), total)

    def alone(self, *tensors: Any) -> torch.Tensor:
        input, weight, parts, sums = tensors
        product = torch.mm(input, weight)
        end = self.own + self.rows
        product[self.own : end] = self._summed(product, parts)
        product[: self.own].copy_(sums[: self.own])
        product[end:].copy_(sums[end:])
        return product
