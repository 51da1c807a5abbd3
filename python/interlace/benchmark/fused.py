"""Ops whose results are rows, and the fused matmuls: through interlace, and as torch's sequence.

For matmuls M, N, K are the sizes of the product on every rank. M is the number of all rows, gathered or not
yet scattered, N of the columns of this rank's weight, K of the numbers that this rank contracts. Weights
have the layout of ``nn.Linear``. For the projections around an attention over heads, M is the number of
rows of one rank, and all ranks have the weight. Rank r has the r-th part of the N columns of all rows, or
of K. With a block-scaled format (``--format``) both operands are quantised before, and the dtype is the
result's. Baselines move values and scales together.

Results are compared with float64 in 1 row of 16, other rows in every call, all columns. A tile has at least
16 rows, so every tile is compared. Up to 512 rows, all rows are compared.

For an op with a norm, the sum is compared with float64, and the normed rows with the float64 norm of that
sum. ``check`` also uses LayerNorm (``norm="layer"``), and fp8 and block-scaled formats (``quantize``),
which the baseline in torch does not have.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

import interlace
from interlace import reference
from interlace.benchmark import protocol
from interlace.benchmark.baselines import TORCH, TorchCollectives
from interlace.benchmark.plain import (
    AllGather,
    AllReduce,
    AllToAll,
    MeasuredOp,
    Plain,
    ReduceScatter,
    Tensors,
)
from interlace.ops.matmul.formats import (
    FORMATS,
    Scaled,
    format_named,
    multiply_packed,
    packed_rows,
    unpacked_rows,
)
from interlace.ops.matmul.norms import GATHERED_ROWS
from interlace.runtime.core.place import Place
from interlace.runtime.numerics.norms import LARGEST, SMALLEST_SCALE, RowNorm
from interlace.runtime.tuning.tuning import Problem, tuned_as

ALL_ROWS = 512
ROW_STEP = 16
INPUT, WEIGHT = 0, 1
Expected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # value, bound, looser bound


class ByRows(MeasuredOp):
    """One op of a rank. ``m`` is the number of all rows; baselines replace ``collectives``."""

    sizes: tuple[str, ...] = ("m", "n", "k")
    without = "has a shape; it takes --m, --n and --k"
    collectives: TorchCollectives = TORCH
    shards = False  # whether a tuned problem has the rows of one rank
    varied: tuple[dict[str, int], ...] = ()  # values that tune tries with the kernels
    packed = ""  # "n" or "k", the elements of rows that a format packs
    parted = ""  # "n" or "k", if ranks have equal parts of it, and not of the rows
    scatters = False  # whether a result has this rank's rows only

    def __init__(self, place: Place, dtype: torch.dtype, *sizes: int) -> None:
        super().__init__(place, dtype)
        self.shape = dict(zip(self.sizes, sizes, strict=True))
        self.m, self.n = self.shape["m"], self.shape["n"]
        self.rows = self.m // self.world_size
        self.own = self.rank * self.rows  # the first row of this rank's part
        # first of the rows of the whole that a result has, and how many
        self.result_rows = (self.own, self.rows) if self.scatters else (0, self.m)
        self._expected: dict[int, Expected] = {}

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        shape = dict(zip(cls.sizes, sizes, strict=False))
        m, part = shape["m"], shape.get(cls.parted, 0)
        if not dtype.startswith(("float", "bfloat")):
            raise ValueError(f"--dtype {dtype}: {cls.op} computes with floats")
        if m % world_size and not cls.parted:
            raise ValueError(
                f"--m {m}: {cls.op} shards rows, and world size {world_size} does not divide them"
            )
        if part % world_size:
            raise ValueError(
                f"--{cls.parted} {part}: {cls.op} gives ranks parts of it, world size {world_size} does "
                "not divide it"
            )
        format, row = settings.get("format"), shape.get(cls.packed, 0)
        if format and row % format_named(format).packed:
            raise ValueError(
                f"--{cls.packed} {row}: {format} has two numbers in a byte; give an even size"
            )

    @classmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, **settings: Any) -> int:
        return math.prod(sizes) * dtype.itemsize

    @classmethod
    def problem(
        cls, dtype: torch.dtype, sizes: Sequence[int], world_size: int, *, format: str = ""
    ) -> Problem:
        """Return the key under which ``tune`` keeps the op at these sizes; the op uses the same."""
        m, n, k = (*sizes, 1)[:3]
        kind = FORMATS.get(format)
        if kind is not None:
            dtype, k = torch.uint8, kind.row_bytes(k)
        rows = m // world_size if cls.shards else m
        return Problem(cls.op, dtype, rows, n, k, world_size, **tuned_as(kind))

    @abstractmethod
    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Return right values and bounds for these rows of the result of ``call``."""

    def compared(self, call: int) -> torch.Tensor:
        """Return the rows of a result that are compared in ``call``."""
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

    def matrix(self, operand: int, rows: int, columns: int, rank: int, call: int) -> torch.Tensor:
        """Return the payload of ``rank``; ``operand`` is the number of the input in a call."""
        number = 2 * call + operand
        flat = protocol.vector(0, rows * columns, rank, number, self.dtype, self.device)
        return flat.view(rows, columns)


class Fused(ByRows):
    """One fused op of a rank. ``communication`` is the collective in it, ``communicated`` its columns.

    ``format``: the operands', if they are block-scaled; then the gathered rows are bytes.
    """

    communication: type[Plain]
    communicated = "n"
    packed = "k"
    shards = True
    settings: tuple[str, ...] = ("format",)

    def __init__(
        self, place: Place, dtype: torch.dtype, m: int, n: int, k: int, *, format: str = ""
    ) -> None:
        super().__init__(place, dtype, m, n, k)
        self.k, self.flops, self.format = k, 2 * m * n * k, FORMATS.get(format)
        self.row, self.row_dtype = k, dtype  # elements of a row of the input, and their dtype
        if self.format is not None:
            self.row, self.row_dtype = self.format.row_bytes(k), torch.uint8
        row_bytes = n * dtype.itemsize
        if self.communicated == "k":
            row_bytes = self.row * self.row_dtype.itemsize
        self.nbytes = m * row_bytes
        moved = self.row_dtype if self.communicated == "k" else dtype
        self.collective = self.communication(place, moved, self.nbytes)
        self.bus_factor = self.collective.bus_factor

    @classmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, format: str = "", **settings: Any) -> int:
        m, n, k = sizes
        row = FORMATS[format].row_bytes(k) if format else k * dtype.itemsize
        return (m + n) * row + m * n * dtype.itemsize

    def operand(self, numbers: torch.Tensor) -> Any:
        """Return ``[..., rows, k]`` as an operand."""
        if self.format is None:
            return numbers
        return unpacked_rows(self.format.packed_rows(numbers), self.format, self.k)

    def exact(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers that :meth:`operand` has."""
        return numbers if self.format is None else self.operand(numbers).dequantize()

    def rows_to_move(self, operand: Any) -> torch.Tensor:
        """Return the input as baselines move it."""
        return operand if self.format is None else packed_rows(operand)

    def empty_rows(self, count: int) -> torch.Tensor:
        rows = torch.empty(count, self.row, dtype=self.row_dtype, device=self.device)
        return protocol.poison(rows)

    def product(self, input: Any, weight: Any) -> torch.Tensor:
        if self.format is None:
            return torch.mm(input, weight)
        rows = packed_rows(input) if isinstance(input, Scaled) else input
        return multiply_packed(rows, packed_rows(weight), self.format).to(self.dtype)

    def weight(self, rank: int, call: int) -> torch.Tensor:
        """Return the numbers ``[k, n]``, a transposed view."""
        return self.exact(self.matrix(WEIGHT, self.n, self.k, rank, call)).t()

    def weight_operand(self, rank: int, call: int) -> Any:
        return self.operand(self.matrix(WEIGHT, self.n, self.k, rank, call)).t()

    def ours(self, algorithm: str) -> Callable[..., Any]:
        """Return the op, called with input, weight, and torch's buffer of the communicated size."""
        op, options = getattr(interlace, self.op), self.options(algorithm)
        return lambda input, weight, buffer: op(input, weight, **options)

    def options(self, algorithm: str) -> dict[str, Any]:
        settings: dict[str, Any] = {"algorithm": algorithm}
        return settings if self.format is None else settings | {"out_dtype": self.dtype}

    def matmul_inputs(self, call: int) -> Tensors:
        input = self.operand(self.matrix(INPUT, self.m, self.k, self.rank, call))
        return input, self.weight_operand(self.rank, call)

    def raw_rows_of(self, rank: int, rows: torch.Tensor, call: int) -> torch.Tensor:
        """Return these rows of the input of ``rank``, before they are quantised."""
        return protocol.some_rows(rows, self.k, rank, 2 * call + INPUT, self.dtype)

    def rows_of(self, rank: int, rows: torch.Tensor, call: int) -> torch.Tensor:
        return self.exact(self.raw_rows_of(rank, rows, call))

    def rows_by_owner(self, rows: torch.Tensor, each: int, call: int) -> list[torch.Tensor]:
        """Return these rows of all ranks' inputs, stacked; each rank has ``each``."""
        owners, index = rows // each, rows % each
        ranks = range(self.world_size)
        return [self.rows_of(rank, index[owners == rank], call) for rank in ranks]

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        """Return right values and bounds of a sum over ranks."""
        rows = rows + self.result_rows[0]
        inputs = [self.rows_of(rank, rows, call) for rank in range(self.world_size)]
        weights = [self.weight(rank, call) for rank in range(self.world_size)]
        value, bound = reference.matmul_all_reduce(inputs, weights, self.dtype)
        products = [a.double() @ b.double() for a, b in zip(inputs, weights, strict=True)]
        return value, bound, bound + protocol.often_rounded(products, self.dtype)


class AllGatherMatmul(Fused):
    op = "all_gather_matmul"
    communication = AllGather
    communicated = "k"

    def inputs(self, call: int) -> Tensors:
        shard = self.operand(self.matrix(INPUT, self.rows, self.k, self.rank, call))
        return shard, self.weight_operand(self.rank, call), self.empty_rows(self.m)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        gathered = self.collectives.all_gather(buffer, self.rows_to_move(input))
        return self.product(gathered, weight)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        pieces, weight = self.rows_by_owner(rows, self.rows, call), self.weight(self.rank, call)
        value, bound = reference.all_gather_matmul(pieces, weight, self.dtype, roundings=2)
        return value, bound, bound


class MatmulReduceScatter(Fused):
    op = "matmul_reduce_scatter"
    communication = ReduceScatter
    scatters = True

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), self.empty(self.rows, self.n))

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        return self.collectives.reduce_scatter(buffer, self.product(input, weight))


class MatmulAllReduce(Fused):
    op = "matmul_all_reduce"
    shards = False
    communication = AllReduce

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), None)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        return self.collectives.all_reduce(self.product(input, weight))


class _HeadExchange(Fused):
    """An exchange of heads. ``communicated`` is the extent of which ranks have parts."""

    communication = AllToAll
    settings = ()
    varied = ({"group_m": 4}, {"group_m": 16})

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int, k: int) -> None:
        super().__init__(place, dtype, m, n, k)
        self.each = self.shape[self.parted] // self.world_size
        self.all_rows = m * self.world_size

    def common(self, call: int) -> torch.Tensor:
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

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), self.empty(self.all_rows, self.each))

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        product = torch.mm(input, weight).view(self.m, self.world_size, self.each)
        by_rank = product.transpose(0, 1).reshape(buffer.shape)
        return self.collectives.all_to_all(buffer, by_rank)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        pieces = self.rows_by_owner(rows, self.m, call)
        columns = self.common(call)[:, self.rank * self.each : (self.rank + 1) * self.each]
        value, bound = reference.all_gather_matmul(pieces, columns, self.dtype, roundings=2)
        return value, bound, bound


class AllToAllMatmul(_HeadExchange):
    op = "all_to_all_matmul"
    communicated = parted = "k"

    def inputs(self, call: int) -> Tensors:
        input = self.matrix(INPUT, self.all_rows, self.each, self.rank, call)
        return input, self.common(call), self.empty(self.all_rows, self.each)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        parts = self.collectives.all_to_all(buffer, input).view(self.world_size, self.m, self.each)
        return torch.mm(parts.transpose(0, 1).reshape(self.m, -1), weight)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        places, operand = self.rank * self.m + rows, 2 * call + INPUT
        parts = [
            protocol.some_rows(places, self.each, source, operand, self.dtype)
            for source in range(self.world_size)
        ]
        whole = torch.cat(parts, 1)
        value, bound = reference.matmul(whole, self.common(call), self.dtype, roundings=2)
        return value, bound, bound


# -- norms -----------------------------------------------------------------------------------------


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
