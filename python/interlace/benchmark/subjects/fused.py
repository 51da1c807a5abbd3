"""The fused ops, at one shape: through interlace, and as torch's sequence of a matmul and a collective.

M, N, K are those of the matmul that every rank does: M are all rows, gathered or not yet scattered; N are
the columns of this rank's weight; K is what this rank contracts. Weights lie as ``nn.Linear`` keeps them.
Results are compared with float64 in 1 row of 16, others in every call, all columns: a tile has at least
16 rows, so none is left out; up to 512 rows all are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

import interlace
from interlace import reference
from interlace.arguments import checks
from interlace.benchmark.subjects.plain import AllGather, AllReduce, Plain, ReduceScatter, Tensors
from interlace.benchmark.timing import payload
from interlace.runtime.core.place import Place

ALL_ROWS = 512
ROW_STEP = 16
INPUT, WEIGHT = 0, 1
Expected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # value, bound, looser bound


class Fused(ABC):
    """One fused op of a rank. ``communication`` is the collective in it, ``communicated`` its columns."""

    op: str
    communication: type[Plain]
    communicated = "n"
    algorithms = checks.ALGORITHMS
    sizes = ("m", "n", "k")
    without = "has a shape; it takes --m, --n and --k"  # of other sizes

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        self.device, self.dtype = place.device, dtype
        self.rank, self.world_size = place.rank, place.world_size
        self.m, self.n, self.k = m, n, k
        self.shape = {"m": m, "n": n, "k": k}
        self.rows = m // self.world_size
        nbytes = m * self.shape[self.communicated] * dtype.itemsize
        self.collective = self.communication(place, dtype, nbytes)
        self.nbytes, self.bus_factor = nbytes, self.collective.bus_factor
        self.flops = 2 * m * n * k
        self.own = self.rank * self.rows  # the first row of this rank's part
        self.result_rows = (0, m)  # first of the rows of the whole that a result has, and how many
        self._expected: dict[int, Expected] = {}

    @classmethod
    def refuse(cls, world_size: int, m: int | None, dtype: str) -> None:
        """Raise ValueError if the op cannot be so."""
        if not dtype.startswith(("float", "bfloat")):
            raise ValueError(f"--dtype {dtype}: {cls.op} multiplies floats")
        if (m or 0) % world_size:
            raise ValueError(
                f"--m {m}: {cls.op} shards rows, and world size {world_size} does not divide them"
            )

    def matrix(self, what: int, rows: int, columns: int, rank: int, call: int) -> torch.Tensor:
        number = 2 * call + what
        flat = payload.vector(0, rows * columns, rank, number, self.dtype, self.device)
        return flat.view(rows, columns)

    def weight(self, rank: int, call: int) -> torch.Tensor:
        """``[k, n]``, a transposed view."""
        return self.matrix(WEIGHT, self.n, self.k, rank, call).t()

    @abstractmethod
    def inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`ours`, :meth:`theirs`: input, weight, a buffer of the communicated size."""

    def ours(self, algorithm: str) -> Callable[..., Any]:
        op = getattr(interlace, self.op)
        return lambda input, weight, buffer: op(input, weight, algorithm=algorithm)

    @abstractmethod
    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        """torch.mm and a collective of torch.distributed's default group."""

    @abstractmethod
    def alone_inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`alone`."""

    @abstractmethod
    def alone(self, *tensors: Any) -> torch.Tensor:
        """torch.mm, copies and sums in this rank's memory of what all ranks bring."""

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        """torch's own fused op, over symmetric memory. Raises ValueError where torch has none."""
        raise ValueError(f"--baseline symm_mem: torch has no fused {self.op}")

    def matmul_inputs(self, call: int) -> Tensors:
        return self.matrix(INPUT, self.m, self.k, self.rank, call), self.weight(self.rank, call)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Right values and bounds for these rows of the result of ``call``. Here: of a sum over ranks."""
        rows = rows + self.result_rows[0]
        inputs = [
            payload.some_rows(rows, self.k, rank, 2 * call + INPUT, self.dtype)
            for rank in range(self.world_size)
        ]
        weights = [self.weight(rank, call) for rank in range(self.world_size)]
        value, bound = reference.matmul_all_reduce(inputs, weights, self.dtype)
        products = [a.double() @ b.double() for a, b in zip(inputs, weights, strict=True)]
        return value, bound, bound + payload.often_rounded(products, self.dtype)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        count = self.result_rows[1]
        step = 1 if count <= ALL_ROWS else ROW_STEP
        rows = torch.arange(call % step, count, step, device=self.device)
        if call not in self._expected:
            self._expected[call] = self.expected(rows, call)
        value, bound, looser = self._expected[call]
        if result.shape[0] != count:
            return float("inf")
        return reference.worst_ratio(result[rows], value, looser if rounds_often else bound)


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

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        self.result_rows = (self.own, self.rows)

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
