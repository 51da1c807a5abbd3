"""Ops whose results are rows, and the fused matmuls: through interlace, and as torch's sequence.

Of the matmuls M, N, K are those of the product that every rank does: M are all rows, gathered or not yet
scattered; N are the columns of this rank's weight; K is what this rank contracts. Weights lie as
``nn.Linear`` keeps them. Of the projections around an attention over heads, matmul + all-to-all and
all-to-all + matmul, M are the rows of one rank, and all ranks have the weight; rank r has the r-th part of
the N columns of all rows, or of K.

Results are compared with float64 in 1 row of 16, others in every call, all columns: a tile has at least
16 rows, so none is left out; up to 512 rows all are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import interlace
from interlace import reference
from interlace.arguments import checks
from interlace.benchmark import payload
from interlace.benchmark.plain import (
    AllGather,
    AllReduce,
    AllToAll,
    Plain,
    ReduceScatter,
    Tensors,
)
from interlace.runtime.core.place import Place
from interlace.runtime.tuning.tuning import Problem

ALL_ROWS = 512
ROW_STEP = 16
INPUT, WEIGHT = 0, 1
Expected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # value, bound, looser bound


class ByRows(ABC):
    """One op of a rank. ``m`` are all rows; ``settings``: what it has besides sizes."""

    op: str
    algorithms: tuple[str, ...] = checks.ALGORITHMS
    sizes: tuple[str, ...] = ("m", "n", "k")
    without = "has a shape; it takes --m, --n and --k"  # of other sizes
    defaults: ClassVar[dict[str, str]] = {}  # of sizes
    settings: tuple[str, ...] = ()
    shards = False  # whether the rows of a tuned problem are those of one rank
    varied: tuple[dict[str, int], ...] = ()  # values that tune tries with the kernels
    parted = ""  # "n" or "k", if ranks have equal parts of it
    scatters = False  # whether a result has this rank's rows only
    nbytes: int
    bus_factor: float | None
    flops: float = 0.0

    def __init__(self, place: Place, dtype: torch.dtype, *sizes: int) -> None:
        self.device, self.dtype = place.device, dtype
        self.rank, self.world_size = place.rank, place.world_size
        self.shape = dict(zip(self.sizes, sizes, strict=True))
        self.m, self.n = self.shape["m"], self.shape["n"]
        self.rows = self.m // self.world_size
        self.own = self.rank * self.rows  # the first row of this rank's part
        # first of the rows of the whole that a result has, and how many
        self.result_rows = (self.own, self.rows) if self.scatters else (0, self.m)
        self._expected: dict[int, Expected] = {}

    @classmethod
    def refuse(cls, world_size: int, m: int | None, dtype: str) -> None:
        """Raise ValueError if the op cannot be so."""
        if not dtype.startswith(("float", "bfloat")):
            raise ValueError(f"--dtype {dtype}: {cls.op} computes with floats")
        if (m or 0) % world_size:
            raise ValueError(
                f"--m {m}: {cls.op} shards rows, and world size {world_size} does not divide them"
            )

    @classmethod
    def refuse_widths(cls, world_size: int, n: int, k: int) -> None:
        """The same for the sizes besides rows."""
        size = {"": 0, "n": n, "k": k}[cls.parted]
        if size % world_size:
            raise ValueError(
                f"--{cls.parted} {size}: {cls.op} gives ranks parts of it, world size {world_size} does "
                "not divide it"
            )

    @classmethod
    def refuse_settings(cls, n: int, **settings: Any) -> None:
        """The same for what there is besides sizes; here nothing."""
        assert not settings, cls.op

    @classmethod
    def elements(cls, *sizes: int, **settings: Any) -> int:
        """The elements of a rank's tensors, or more: whether there is memory for them is asked before."""
        return math.prod(sizes)

    @classmethod
    def problem(cls, dtype: torch.dtype, sizes: Sequence[int], world_size: int) -> Problem:
        """What ``tune`` keeps of the op at these sizes, as the op itself asks for it."""
        m, n, k = (*sizes, 1)[:3]
        rows = m // world_size if cls.shards else m
        return Problem(cls.op, dtype, rows, n, k, world_size)

    @abstractmethod
    def inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`ours` and :meth:`theirs`."""

    def timed_inputs(self, call: int) -> Tensors:
        return self.inputs(call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        """The op of interlace."""
        raise NotImplementedError

    @abstractmethod
    def theirs(self, *tensors: Any) -> Any:
        """torch's operators, and collectives of torch.distributed's default group."""

    @abstractmethod
    def alone_inputs(self, call: int) -> Tensors:
        """Arguments of :meth:`alone`."""

    @abstractmethod
    def alone(self, *tensors: Any) -> Any:
        """torch's operators in this rank's memory, on what all ranks bring."""

    def symmetric(self, group_name: str) -> Callable[..., Any]:
        """torch's own fused op, over symmetric memory. Raises ValueError where torch has none."""
        raise ValueError(f"--baseline symm_mem: torch has no fused {self.op}")

    @abstractmethod
    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Right values and bounds for these rows of the result of ``call``."""

    def compared(self, call: int) -> torch.Tensor:
        """The rows of a result that are compared in ``call``."""
        count = self.result_rows[1]
        step = 1 if count <= ALL_ROWS else ROW_STEP
        return torch.arange(call % step, count, step, device=self.device)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        rows = self.compared(call)
        if call not in self._expected:
            self._expected[call] = self.expected(rows, call)
        value, bound, looser = self._expected[call]
        if result.shape[0] != self.result_rows[1]:
            return float("inf")
        return reference.worst_ratio(result[rows], value, looser if rounds_often else bound)

    def matrix(self, what: int, rows: int, columns: int, rank: int, call: int) -> torch.Tensor:
        """The payload of ``rank``, of which ``what`` tells the inputs of a call apart."""
        number = 2 * call + what
        flat = payload.vector(0, rows * columns, rank, number, self.dtype, self.device)
        return flat.view(rows, columns)


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
