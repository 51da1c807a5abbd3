"""Partial results over the keys of one source by Triton kernels, merged; and their gradients."""

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import Heads, Partials, Rows, RowSums, Spans, TablePart
from interlace.kernels.attention import backward, forward
from interlace.ops.attention.problem import (
    LOG2E,
    AttentionProblem,
    AttentionResult,
    attention_tiles,
    rows_argument,
    unit_rows,
)
from interlace.ops.matmul.operands import launch_options
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning.configuration import Configuration

MERGED = 4096  # elements of a tile that a program merges: what its registers hold


class KernelBlocks:
    """The queries of one call, and what was made of them so far; launches go to the compute stream.

    ``sources``: those whose keys are needed, in the order of the ranks. ``shape`` is that of the query,
    which may be of more tokens than this rank's, and of a part of the heads; ``begin`` says where it is.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        shape: Sequence[int],
        spans: torch.Tensor,
        sources: Sequence[int],
        configuration: Configuration,
    ) -> None:
        self._problem, self._sources, self._configuration = problem, list(sources), configuration
        self._rows, batches, heads, size = shape
        self._all_heads = batches * heads
        value_size, dtype = problem.value.shape[3], problem.query.dtype
        self.tiles = attention_tiles(problem.communicator, configuration, size, value_size, dtype)
        key_heads = problem.key.shape[2]
        self.heads = Heads(batches, heads, key_heads, problem.per_key, problem.first_head)
        self.spans, self.scale = Spans(spans, 0), problem.scale * LOG2E
        shards, begins = problem.shards, [0, *accumulate(problem.shards.lengths)]
        # of each source alone, then of all where one's keys follow another's
        self._parts = problem.communicator.table(
            ("attention parts", shards, tuple(self._sources)),
            lambda: [
                shards.part_line(s, i, among * begins[s])
                for among in (0, 1)
                for i, s in enumerate(self._sources)
            ],
            passing=True,
        )

    def begin(self, query: torch.Tensor) -> None:
        self.query = unit_rows(query)

    def _partials(self, size: int) -> Partials:
        shape = max(1, len(self._sources)), self.heads.batches, self.heads.heads, self._rows
        new = functools.partial(self._problem.query.new_empty, dtype=torch.float32)
        return Partials(new(*shape, size), new(shape), self._rows)

    @functools.cached_property
    def partials(self) -> Partials:
        """Of the output."""
        return self._partials(self.tiles.VALUE_DIM)

    @property
    def query_tiles(self) -> int:
        return formulas.ceil_div(self._rows, self.tiles.BLOCK_M) * self._all_heads

    def _launch(self, kernel: object, grid: tuple[int, ...], arguments: dict[str, object]) -> None:
        options = launch_options(self._configuration)
        launch = KernelLaunch(kernel, grid, arguments, self._problem.op, **options)
        self._problem.communicator.compute.launch(launch)

    def _keys(self, packed: torch.Tensor, source: int | None) -> tuple[dict[str, object], int]:
        """Arguments, and how many parts there are."""
        every = len(self._sources)
        part = (every, every) if source is None else (self._sources.index(source), 1)
        parts = TablePart(self._parts, *part)
        return {"keys": Rows(packed, packed.stride(0)), "parts": parts}, parts.count

    def attend(self, source: int | None, packed: torch.Tensor) -> None:
        """The partial result over the keys of ``source``, or those of all, each apart."""
        keys, count = self._keys(packed, source)
        if not self.query_tiles * count:
            return
        arguments = {
            **keys,
            "queries": rows_argument(self.query),
            "spans": self.spans,
            "partials": self.partials,
            "heads": self.heads,
            "scale": self.scale,
            "TILES": self.tiles,
        }
        self._launch(forward.attention_kernel, (self.query_tiles, count), arguments)

    def merge(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """``output``, ``[tokens, b, h, v]``, and the logarithm of the sums, ``[b, h, tokens]``."""
        if not self.query_tiles:
            return
        tiles = self.tiles._replace(BLOCK_M=max(16, MERGED // self.tiles.BLOCK_V))
        arguments = {
            "partials": self.partials,
            "output": rows_argument(output),
            "lse_ptr": lse,
            "heads": self.heads,
            "count": len(self._sources),
            "TILES": tiles,
        }
        grid = (formulas.ceil_div(self._rows, tiles.BLOCK_M) * self._all_heads,)
        self._launch(forward.merge_attention_kernel, grid, arguments)

    # -- gradients -----------------------------------------------------------------------------

    def begin_backward(self, result: AttentionResult) -> None:
        self._grad, lse = result.grad, result.lse
        reach, delta = (lse.new_empty(lse.shape, dtype=torch.float32) for _ in range(2))

        def prepare() -> None:
            # what sees no key has weights of 0, not of 2 ** inf
            reach.copy_(torch.where(lse == float("-inf"), float("inf"), lse * LOG2E))
            delta.copy_(result.delta())

        self._problem.communicator.compute.call(prepare, "sums of rows")
        self._sums = RowSums(reach, delta, lse.shape[2])
        self._of_query = self._partials(self.tiles.HEAD_DIM)

    def differentiate(
        self, source: int | None, packed: torch.Tensor, contribution: torch.Tensor
    ) -> None:
        """A partial gradient of the query; ``contribution``, fp32, to that of the keys of ``source``."""
        keys, count = self._keys(packed, source)
        arguments = {
            **keys,
            "queries": rows_argument(self.query),
            "grads": rows_argument(self._grad),
            "spans": self.spans,
            "sums": self._sums,
            "heads": self.heads,
            "scale": self.scale,
            "TILES": self.tiles,
        }
        if self.query_tiles * count:
            own = {**arguments, "partials": self._of_query}
            kernel = backward.attention_queries_backward_kernel
            self._launch(kernel, (self.query_tiles, count), own)
        longest = packed.shape[0] if source is not None else max(self._problem.shards.lengths)
        # as many keys stay as queries do there, and as many queries come by as keys
        turned = self.tiles._replace(BLOCK_M=self.tiles.BLOCK_N, BLOCK_N=self.tiles.BLOCK_M)
        tiles = formulas.ceil_div(longest, turned.BLOCK_N)
        of_heads = self.heads.batches * self.heads.key_heads
        if tiles * of_heads * count:
            more = {"output_ptr": contribution, "factor": self._problem.scale, "TILES": turned}
            kernel = backward.attention_keys_backward_kernel
            self._launch(kernel, (tiles, of_heads, count), {**arguments, **more})

    def query_gradient(self, output: torch.Tensor) -> None:
        """``output`` = the sum of the partial gradients, in the order of the ranks."""
        parts, scale = self._of_query.ptr[: len(self._sources)], self._problem.scale

        def add_up() -> None:
            total = torch.zeros_like(self._of_query.ptr[0])
            for part in parts:
                total += part
            output.copy_((total * scale).permute(2, 0, 1, 3))

        self._problem.communicator.compute.call(add_up, "gradient of the query")
