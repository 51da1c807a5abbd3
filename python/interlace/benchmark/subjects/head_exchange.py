"""The projections around an attention over heads, at one shape: matmul + all-to-all, all-to-all + matmul.

M, N, K are those of the matmul that every rank does: M are the rows of one rank, N and K the columns and
rows of the weight, which all ranks have. Rank r has the r-th part of the N columns of all rows, or of K.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace import reference
from interlace.benchmark.subjects.by_rows import INPUT, Expected
from interlace.benchmark.subjects.fused import Fused
from interlace.benchmark.subjects.plain import AllToAll, Tensors
from interlace.benchmark.timing import payload
from interlace.runtime.core.place import Place


class _HeadExchange(Fused):
    """What is ``communicated`` has the extent of which ranks have parts."""

    communication = AllToAll
    varied = ({"group_m": 4}, {"group_m": 16})

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        self.each = self.shape[self.parted] // self.world_size
        self.all_rows = m * self.world_size

    @classmethod
    def refuse(cls, world_size: int, m: int | None, dtype: str) -> None:
        super().refuse(world_size, None, dtype)  # any number of rows of a rank

    def common(self, call: int) -> torch.Tensor:
        """The weight, the same on all ranks."""
        return self.weight(0, call)

    def matmul_inputs(self, call: int) -> Tensors:
        return self.matrix(INPUT, self.m, self.k, self.rank, call), self.common(call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        op: Any = getattr(interlace.functional, self.op)
        return lambda input, weight, buffer: op(input, weight, algorithm=algorithm)


class MatmulAllToAll(_HeadExchange):
    op = "matmul_all_to_all"
    parted = "n"

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        self.result_rows = (0, self.all_rows)

    def own_columns(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[:, self.rank * self.each : (self.rank + 1) * self.each]

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), self.collective.empty(self.all_rows, self.each))

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        product = torch.mm(input, weight).view(self.m, self.world_size, self.each)
        dist.all_to_all_single(buffer, product.transpose(0, 1).reshape(buffer.shape))
        result: torch.Tensor = buffer
        return result

    def alone_inputs(self, call: int) -> Tensors:
        """Besides, all ranks' products with the own columns."""
        own = self.own_columns(self.common(call))
        products = [
            self.matrix(INPUT, self.m, self.k, r, call) @ own for r in range(self.world_size)
        ]
        return (*self.matmul_inputs(call), torch.cat(products))

    def alone(self, *tensors: Any) -> torch.Tensor:
        input, weight, arrived = tensors
        output = torch.empty_like(arrived).copy_(arrived)
        begin = self.rank * self.m
        output[begin : begin + self.m] = self.own_columns(torch.mm(input, weight))
        return output

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        owners, index = rows // self.m, rows % self.m
        pieces = [
            payload.some_rows(index[owners == r], self.k, r, 2 * call + INPUT, self.dtype)
            for r in range(self.world_size)
        ]
        own = self.own_columns(self.common(call))
        value, bound = reference.all_gather_matmul(pieces, own, self.dtype, roundings=2)
        return value, bound, bound


class AllToAllMatmul(_HeadExchange):
    op = "all_to_all_matmul"
    communicated = parted = "k"

    def inputs(self, call: int) -> Tensors:
        input = self.matrix(INPUT, self.all_rows, self.each, self.rank, call)
        return input, self.common(call), self.collective.empty(self.all_rows, self.each)

    def by_columns(self, parts: torch.Tensor) -> torch.Tensor:
        """``[m, k]`` of what has come from each rank, one below the other."""
        return parts.view(self.world_size, self.m, self.each).transpose(0, 1).reshape(self.m, -1)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        dist.all_to_all_single(buffer, input)
        return torch.mm(self.by_columns(buffer), weight)

    def arriving(self, rows: torch.Tensor, call: int) -> list[torch.Tensor]:
        """Of these of the own rows what each rank has."""
        own = self.rank * self.m + rows
        return [
            payload.some_rows(own, self.each, source, 2 * call + INPUT, self.dtype)
            for source in range(self.world_size)
        ]

    def alone_inputs(self, call: int) -> Tensors:
        parts = self.arriving(torch.arange(self.m, device=self.device), call)
        return torch.cat(parts), self.common(call)

    def alone(self, *tensors: Any) -> torch.Tensor:
        parts, weight = tensors
        return torch.mm(self.by_columns(parts), weight)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        whole = torch.cat(self.arriving(rows, call), 1)
        value, bound = reference.matmul(whole, self.common(call), self.dtype, roundings=2)
        return value, bound, bound
