"""Dispatch, combine, and the grouped matmuls, at one size.

Every rank has one expert and as many tokens as the others. A token goes to ``TOPK`` ranks, to all equally
often. So a rank gets as many rows as it sends, by expert and by source alike. The baseline in torch is an
all-to-all of equal parts, with an index before or after it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

import interlace
from interlace import reference
from interlace.benchmark import protocol
from interlace.benchmark.figures import bus_factor
from interlace.benchmark.fused import WEIGHT, AllGatherMatmul, ByRows, Expected, Fused
from interlace.benchmark.plain import AllToAll, Tensors
from interlace.ops.experts.routing import Assignment
from interlace.ops.matmul.formats import FORMATS, multiply_packed, packed_rows, unpacked_rows
from interlace.runtime.core.place import Place

TOPK = 2


def evenly(tokens: int, world_size: int, device: torch.device) -> Assignment:
    """Return the experts of ``tokens``, which ``world_size`` divides: token t goes to t, t + 1, ..."""
    token = torch.arange(tokens, device=device).unsqueeze(1)
    slot = torch.arange(min(TOPK, world_size), device=device)
    return Assignment((token + slot) % world_size, world_size, world_size)


class _RowsOfTokens(ByRows):
    """Rows of tokens. M is the number of rows that a rank sends: a row per token and expert."""

    def __init__(
        self, place: Place, dtype: torch.dtype, m: int, *sizes: int, **settings: Any
    ) -> None:
        super().__init__(place, dtype, m, *sizes, **settings)
        self.topk = min(TOPK, self.world_size)
        self.chosen = evenly(m // self.topk, self.world_size, self.device)

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        super().refuse(world_size, sizes, dtype, **settings)
        topk = min(TOPK, world_size)
        parts = world_size * topk
        if sizes[0] % parts:
            raise ValueError(
                f"--m {sizes[0]}: {cls.op} shares rows out evenly, {parts} must divide them: "
                f"{world_size} ranks, {topk} experts for each token"
            )

    def sums(self, home: torch.Tensor) -> torch.Tensor:
        return home[self.chosen.inverse].sum(1)


class _MovedRows(_RowsOfTokens):
    """Rows of tokens between ranks. N are their elements."""

    sizes = ("m", "n")
    without = "has rows and columns; it takes --m and --n"
    varied = tuple(
        {"copy_rows": rows, "copy_columns": columns, "num_warps": warps}
        for rows, columns in ((4, 1024), (8, 512), (16, 256), (32, 256))
        for warps in (4, 8)
    )

    def __init__(self, place: Place, dtype: torch.dtype, m: int, n: int) -> None:
        super().__init__(place, dtype, m, n)
        self.slots = self.chosen.slots(m)  # by home row
        self.nbytes = m * n * dtype.itemsize
        self.bus_factor = bus_factor(self.op, self.world_size)

    def tokens(self, call: int, rows: int) -> torch.Tensor:
        flat = protocol.vector(0, rows * self.n, self.rank, call, self.dtype, self.device)
        return flat.view(rows, self.n)

    def exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        return self.collectives.all_to_all(torch.empty_like(rows), rows)

    @abstractmethod
    def right(self, call: int) -> torch.Tensor:
        """Return the right result; sums of so few payloads are exact in every dtype."""

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        value = self.right(call)[rows]
        return value, torch.zeros_like(value), torch.zeros_like(value)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        return 0.0 if torch.equal(result, self.right(call).to(result.dtype)) else float("inf")


class DispatchRows(_MovedRows):
    op = "dispatch"
    packed = "n"
    settings = ("format",)

    def __init__(
        self,
        place: Place,
        dtype: torch.dtype,
        m: int,
        n: int,
        *,
        use_fp8: bool = False,
        format: str = "",
    ) -> None:
        """``use_fp8``: rows travel in fp8 with interlace alone. ``format``: tokens are block-scaled."""
        super().__init__(place, dtype, m, n)
        self._use_fp8, self._format = use_fp8, FORMATS.get(format)
        if self._format is not None:
            self.nbytes = m * self._format.row_bytes(n)

    @classmethod
    def memory(cls, dtype: torch.dtype, *sizes: int, format: str = "", **settings: Any) -> int:
        if not format:
            return super().memory(dtype, *sizes)
        return sizes[0] * FORMATS[format].row_bytes(sizes[1])

    def inputs(self, call: int) -> Tensors:
        tokens = self.tokens(call, len(self.chosen.topk_idx))
        if self._format is None:
            return (tokens,)
        return (unpacked_rows(self._format.packed_rows(tokens), self._format, self.n),)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        idx, experts = self.chosen.topk_idx, self.world_size
        dispatch: Any = interlace.experts.dispatch
        taken = slice(2) if self._use_fp8 else 0  # rows with their scales, or rows
        options = {"use_fp8": self._use_fp8, "algorithm": algorithm}
        return lambda x: dispatch(x, idx, None, experts, **options)[0][taken]

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        if self._format is not None:
            rows = self._format.packed_rows(self.right(call))
            found = result if isinstance(result, torch.Tensor) else packed_rows(result)
            return 0.0 if torch.equal(found, rows) else float("inf")
        if not self._use_fp8:
            return super().check(result, call, rounds_often)
        wanted = interlace.experts.quantize(self.right(call))
        right = [torch.equal(a.float(), b.float()) for a, b in zip(result, wanted, strict=True)]
        return 0.0 if all(right) else float("inf")

    def theirs(self, *arguments: Any) -> Any:
        rows = arguments[0] if self._format is None else packed_rows(arguments[0])
        return self.exchanged(rows[self.slots // self.topk])

    def right(self, call: int) -> torch.Tensor:
        tokens = (self.slots // self.topk).view(self.world_size, -1)[self.rank]
        parts = [
            protocol.some_rows(tokens, self.n, source, call, self.dtype)
            for source in range(self.world_size)
        ]
        return torch.cat(parts)


class CombineRows(_MovedRows):
    op = "combine"

    def inputs(self, call: int) -> Tensors:
        return (self.tokens(call, self.m),)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        nothing = torch.zeros(len(self.chosen.topk_idx), 1, device=self.device)
        idx, experts = self.chosen.topk_idx, self.world_size
        _, handle = interlace.experts.dispatch(nothing, idx, None, experts)
        combine: Any = interlace.experts.combine
        return lambda y: combine(y, handle, algorithm=algorithm)

    def theirs(self, *arguments: Any) -> Any:
        return self.sums(self.exchanged(arguments[0]))

    def _home(self, call: int) -> torch.Tensor:
        """Return this rank's rows as they come back; a token's rows are contiguous on every rank."""
        each = len(self.slots) // self.world_size
        rows = self.rank * each + torch.arange(each, device=self.device)
        parts = [
            protocol.some_rows(rows, self.n, expert, call, self.dtype)
            for expert in range(self.world_size)
        ]
        return torch.cat(parts)

    def right(self, call: int) -> torch.Tensor:
        return self.sums(self._home(call).double())


class _Exchanged(Fused):
    """Rows that a rank's expert multiplies. M is their number, as many as the rank sends."""

    shards = False
    communication = AllToAll

    def _arrived(self, call: int) -> torch.Tensor:
        """Return the rows of this rank's expert, source by source, before they are quantised."""
        rows = self.own + torch.arange(self.rows, device=self.device)
        return torch.cat([self.raw_rows_of(rank, rows, call) for rank in range(self.world_size)])

    def of_expert(self, weight: Any) -> Any:
        """Return ``(1, k, n)``: the weight of one expert as the op takes it."""
        if self.format is None:
            return weight.unsqueeze(0)
        return unpacked_rows(packed_rows(weight).mT.unsqueeze(0), self.format, self.k).t()


class AllToAllGroupedRows(_Exchanged):
    op = "all_to_all_grouped_matmul"
    communicated = "k"

    def inputs(self, call: int) -> Tensors:
        return (*self.matmul_inputs(call), self.empty_rows(self.m))

    def ours(self, algorithm: str) -> Callable[..., Any]:
        splits, options = [self.rows] * self.world_size, self.options(algorithm)
        op = getattr(interlace, self.op)
        return lambda input, weight, buffer: op(input, self.of_expert(weight), splits, **options)[0]

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        arrived = self.collectives.all_to_all(buffer, self.rows_to_move(input))
        return self.product(arrived, weight)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        weight = self.weight(self.rank, call)
        arrived = self.exact(self._arrived(call)[rows])
        value, bound = reference.matmul(arrived, weight, self.dtype, roundings=2)
        return value, bound, bound


class AllGatherGroupedRows(AllGatherMatmul):
    """Every rank has a slice of ``TOPK`` experts, and equally many rows for each."""

    op = "all_gather_grouped_matmul"
    shards = False

    @classmethod
    def refuse(cls, world_size: int, sizes: Sequence[int], dtype: str, **settings: Any) -> None:
        super().refuse(world_size, sizes, dtype, **settings)
        if sizes[0] % (world_size * TOPK):
            raise ValueError(
                f"--m {sizes[0]}: {cls.op} has {TOPK} experts, {world_size * TOPK} must divide the rows"
            )

    def _stack(self, call: int) -> torch.Tensor:
        """Return ``(experts, n, k)``, before they are quantised."""
        ranks = [self.rank * TOPK + expert for expert in range(TOPK)]
        return torch.stack([self.matrix(WEIGHT, self.n, self.k, rank, call) for rank in ranks])

    def inputs(self, call: int) -> Tensors:
        input, _, buffer = super().inputs(call)
        stacked = self.operand(self._stack(call))
        return input, stacked.mT if self.format is None else stacked.t(), buffer

    def ours(self, algorithm: str) -> Callable[..., Any]:
        splits, options = [self.rows // TOPK] * TOPK, self.options(algorithm)
        op = getattr(interlace, self.op)
        return lambda input, weight, buffer: op(input, weight, splits, **options)[0]

    def _products(self, input: Any, weight: Any) -> torch.Tensor:
        if self.format is None:
            return torch.bmm(input, weight)
        by_expert = zip(input, packed_rows(weight), strict=True)
        products = [multiply_packed(*each, self.format) for each in by_expert]
        return torch.stack(products).to(self.dtype)

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        gathered = self.collectives.all_gather(buffer, self.rows_to_move(input))
        rows = gathered.view(self.world_size, TOPK, -1, self.row).transpose(0, 1)
        return self._products(rows.reshape(TOPK, -1, self.row), weight).view(self.m, self.n)

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        each = self.rows // TOPK  # rows of one source for one expert
        expert, source = rows // (self.m // TOPK), rows // each % self.world_size
        index, parts = expert * each + rows % each, []
        weights = self.exact(self._stack(call)).mT
        for number, weight in enumerate(weights):  # rows come by expert, then by source
            pieces = [
                self.rows_of(rank, index[(expert == number) & (source == rank)], call)
                for rank in range(self.world_size)
            ]
            parts.append(reference.all_gather_matmul(pieces, weight, self.dtype, roundings=2))
        value, bound = (torch.cat(each) for each in zip(*parts, strict=True))
        return value, bound, bound


class GroupedMatmulCombineRows(_RowsOfTokens, _Exchanged):
    op = "grouped_matmul_combine"

    def __init__(
        self, place: Place, dtype: torch.dtype, m: int, n: int, k: int, **settings: Any
    ) -> None:
        super().__init__(place, dtype, m, n, k, **settings)
        self.result_rows = (0, m // self.topk)

    def inputs(self, call: int) -> Tensors:
        buffer = self.empty(self.m, self.n)
        return self.operand(self._arrived(call)), self.weight_operand(self.rank, call), buffer

    def ours(self, algorithm: str) -> Callable[..., Any]:
        splits, idx = [self.rows] * self.world_size, self.chosen.topk_idx
        op, options = interlace.grouped_matmul_combine, self.options(algorithm)
        return lambda input, weight, buffer: op(
            input, self.of_expert(weight), splits, idx, **options
        )

    def theirs(self, input: Any, weight: Any, buffer: Any) -> torch.Tensor:
        return self.sums(self.collectives.all_to_all(buffer, self.product(input, weight)))

    def expected(self, rows: torch.Tensor, call: int) -> Expected:
        inverse, idx = self.chosen.inverse[rows], self.chosen.topk_idx[rows]
        values, bounds = [], []
        for slot in range(self.topk):
            value = torch.empty(len(rows), self.n, dtype=torch.float64, device=self.device)
            bound = torch.empty_like(value)
            for expert in range(self.world_size):
                here = idx[:, slot] == expert
                input = self.rows_of(self.rank, inverse[here, slot], call)
                value[here], bound[here] = reference.matmul(
                    input, self.weight(expert, call), self.dtype, roundings=2
                )
            values.append(value)
            bounds.append(bound)
        per_slot = torch.stack(values, 1), torch.stack(bounds, 1)
        value, bound = reference.combine(per_slot, None, self.dtype)
        looser = bound + protocol.often_rounded(values, self.dtype)
        return value, bound, looser
