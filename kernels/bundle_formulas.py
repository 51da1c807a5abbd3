"""Sizes, grids and tables that launches of bundles compute, for each op, as functions of launch values.

They call the functions with which interlace itself launches (``kernels/launch_formulas.py``); tests compare
the results of both. A manifest has the numbers, and no code: both files are part of the loader in every
bundle, ``load.py``. If you change the result of a function here, raise ``VERSION`` in ``aot.py``.

Names in upper case are constants of one build, from its manifest: constexprs of the kernels, and

    CHUNKS     chunks per shard           ITEMSIZE   bytes of an element
    GATHERS    results of normed rows that all ranks get, 0 to 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from interlace.kernels.launch_formulas import (
    all_causal_spans,
    arrival_lines,
    causal_spans,
    ceil_div,
    chunk_elements,
    chunk_lines,
    chunk_rows,
    chunk_slots,
    contributed_bytes,
    expert_offsets,
    expert_segment_lines,
    expert_send_lines,
    gathered_bytes,
    head_send_lines,
    key_lines,
    key_part_lines,
    persistent_grid,
    piece_rows,
    pieces_of,
    reduce_slots,
    segment_lines,
    segments_of,
    send_lines,
    sends_of,
    shard_lines,
    slice_slots,
    tiles_of,
)

MOST_CHUNKS = 256  # chunks of a shard: tables have a line for each chunk and rank


class BundleError(ValueError):
    """A directory is not a bundle, or its files have changed since the build."""


class LackingValueError(ValueError):
    """A launch value is missing."""


class LaunchValues:
    """Numbers and lists by name: launch values, constants of a build, and an op's computed quantities.

    A function gets them as attributes. Each is computed at its first use.
    """

    def __init__(
        self, op: str, given: Mapping[str, Any], constants: Mapping[str, int] | None = None
    ) -> None:
        self._functions = {**SHARED, **OPS[op]}
        self._known = {**(constants or {}), **{name: whole(name, given[name]) for name in given}}
        self._asking: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._known or name in self._functions

    def __getattr__(self, name: str) -> Any:
        return self.value(name)

    def value(self, name: str) -> Any:
        """Return a value. Raises LackingValueError if it is missing, BundleError if it has no formula."""
        if name not in self._known:
            if name not in self._functions:
                needs = f", which {self._asking[-1]!r} needs" if self._asking else ""
                raise LackingValueError(f"values lack {name!r}{needs}")
            self._known[name] = self.of(name, self._functions[name])
        return self._known[name]

    def of(self, name: str, function: Callable[[LaunchValues], Any]) -> Any:
        """Return the result of ``function``, which errors call ``name``."""
        self._asking.append(name)
        try:
            return fitting(name, function(self))
        except (BundleError, LackingValueError):
            raise
        except Exception as error:
            raise BundleError(f"{name!r} comes to no number: {type(error).__name__}") from None
        finally:
            self._asking.pop()


def fitting(name: str, value: Any) -> Any:
    """Return ``value``. Raise BundleError for a number, also within a list, of more than 64 bits."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and not -(1 << 63) <= one < 1 << 63:
            raise BundleError(f"{name!r} comes to no number of 64 bits")
    return value


def whole(name: str, value: Any) -> Any:
    """Return a whole number or a list of them."""
    try:
        if isinstance(value, Iterable):
            return fitting(name, [one.__index__() for one in value])
        return fitting(name, value.__index__())
    except (AttributeError, TypeError):
        raise TypeError(f"{name} is {value!r}, not a whole number or a list of them") from None


CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "0 < world_size <= 64": lambda v: 0 < v.world_size <= 64,
    "0 <= rank < world_size": lambda v: 0 <= v.rank < v.world_size,
    "0 <= root < world_size": lambda v: 0 <= v.root < v.world_size,
    "len(rows) == world_size": lambda v: len(v.rows) == v.world_size,
    "min(rows) >= 0": lambda v: min(v.rows) >= 0,
    "min(rows) > 0": lambda v: min(v.rows) > 0,
    "min(rows) > 1": lambda v: min(v.rows) > 1,
    "max(rows) > 0": lambda v: max(v.rows) > 0,
    "N > 0": lambda v: v.N > 0,
    "K > 0": lambda v: v.K > 0,
    "N <= BLOCK_N": lambda v: v.N <= v.BLOCK_N,
    "N * ITEMSIZE % UNIT == 0": lambda v: v.N * v.ITEMSIZE % v.UNIT == 0,
    "input_stride >= K": lambda v: v.input_stride >= v.K,
    "weight_stride_k >= N": lambda v: v.weight_stride_k >= v.N,
    "weight_stride_n >= K": lambda v: v.weight_stride_n >= v.K,
    "resident > COPIERS": lambda v: v.resident > v.COPIERS,
    "0 < programs <= resident": lambda v: 0 < v.programs <= v.resident,
    "0 < blocks <= 64": lambda v: 0 < v.blocks <= 64,
    "senders > 0": lambda v: v.senders > 0,
    "most_tokens > 0": lambda v: v.most_tokens > 0,
    "home_rows > 0": lambda v: v.home_rows > 0,
    "experts <= EXPERTS": lambda v: v.experts <= v.EXPERTS,
    "num_experts <= EXPERTS": lambda v: v.num_experts <= v.EXPERTS,
    "num_experts > 0": lambda v: v.num_experts > 0,
    "min(splits) >= 0": lambda v: min(v.splits) >= 0,
    "max(splits) > 0": lambda v: max(v.splits) > 0,
    "len(splits) == world_size * num_experts": lambda v: (
        len(v.splits) == v.world_size * v.num_experts
    ),
    "len(splits) == world_size * world_size * num_experts": lambda v: (
        len(v.splits) == v.world_size * v.world_size * v.num_experts
    ),
    "heads % key_heads == 0": lambda v: v.heads % v.key_heads == 0,
    "keys_stride >= batches * key_heads * (HEAD_DIM + VALUE_DIM)": lambda v: (
        v.keys_stride >= v.batches * v.key_heads * (v.HEAD_DIM + v.VALUE_DIM)
    ),
}
"""Conditions of launches, by their text in manifests and errors, which equals the function's text."""


def inputs(condition: str) -> list[str]:
    """Return names of the numbers and lists in a condition."""
    words = condition.translate(str.maketrans("()", "  ")).split()
    return sorted({word for word in words if word.isidentifier()} - {"len", "max", "min"})


def _after(v: Any, byte: int) -> int:
    """Return the next multiple at which a region of data begins."""
    return ceil_div(byte, v.DATA_ALIGNMENT) * int(v.DATA_ALIGNMENT)


def _grid(v: Any) -> int:
    return persistent_grid(0, v.tiles, v.resident)


def _copying_grid(v: Any) -> int:
    return persistent_grid(v.COPIERS, v.tiles, v.resident)


def _sending_grid(v: Any) -> int:
    return persistent_grid(0, v.world_size * v.senders, v.resident)


def _merging_grid(v: Any) -> int:
    return ceil_div(v.partials_rows, max(16, v.MERGED // v.BLOCK_V)) * int(v.all_heads)


def _tiles_n(v: Any) -> int:
    return ceil_div(v.N, v.BLOCK_N)


def _tiles(v: Any) -> int:
    return tiles_of(v.rows, v.BLOCK_M, v.tiles_n)


def _query_tiles(v: Any) -> int:
    return ceil_div(v.partials_rows, v.BLOCK_M) * int(v.all_heads)


# One op at a time; of several on one buffer, the largest. Slots and data never change places.
SHARED: dict[str, Callable[[Any], Any]] = {
    "finish_kernel": lambda v: 1,
    "slot_offset": lambda v: v.HEADER_WORDS * v.WORD,
    "data_offset": lambda v: _after(v, v.slot_offset + v.slots * v.WORD),
    "buffer_bytes": lambda v: v.data_offset + v.data_bytes,
}
# A buffer for such ops alone: it holds words of older epochs.
_WORDS: dict[str, Callable[[Any], Any]] = {
    "buffer_bytes": lambda v: v.words_offset + v.blocks * 2 * v.world_size * v.BLOCK_WORDS * v.WORD,
}
# For rows that their owners sum.
_SUMMED: dict[str, Callable[[Any], Any]] = {
    "tiles_n": _tiles_n,
    "tiles": _tiles,
    "slots": lambda v: reduce_slots(v.world_size, v.rows, v.BLOCK_M, v.tiles_n),
    "data_bytes": lambda v: contributed_bytes(v.world_size, v.rows, v.N * v.ITEMSIZE),
    "segments": lambda v: segment_lines(
        v.rank, v.world_size, segments_of(v.rows), v.BLOCK_M, v.tiles_n
    ),
}
_SENDS: dict[str, Callable[[Any], Any]] = {
    "slots": lambda v: chunk_slots(v.rows, v.chunk_size),
    "sends": lambda v: send_lines(v.rank, v.world_size, v.rows, v.chunk_size),
    "num_sends": lambda v: sends_of(v.rank, v.world_size, v.rows, v.chunk_size),
}
_ALL_REDUCED: dict[str, Callable[[Any], Any]] = {
    "tiles_n": _tiles_n,
    "tiles": lambda v: tiles_of([v.M], v.BLOCK_M, v.tiles_n),
    "slots": lambda v: reduce_slots(v.world_size, [v.M], v.BLOCK_M, v.tiles_n),
    "data_bytes": lambda v: contributed_bytes(v.world_size, [v.M], v.N * v.ITEMSIZE),
}
# For a reduce-scatter of rows, and the gather of its results.
_SCATTERED: dict[str, Callable[[Any], Any]] = {
    **_SUMMED,
    "sum_slots": _SUMMED["slots"],
    "sum_bytes": _SUMMED["data_bytes"],
    "slices": lambda v: slice_slots(1, v.rows, v.ROWS),
    "slots_byte": lambda v: v.sum_slots * v.WORD,
    "normed_byte": lambda v: _after(v, v.sum_bytes),
    "sum_byte": lambda v: _after(v, v.normed_byte + sum(v.rows) * v.N * v.NORMED_ITEMSIZE),
    "scale_byte": lambda v: _after(
        v, v.sum_byte + (sum(v.rows) * v.N * v.ITEMSIZE if v.GATHERS == 2 else 0)
    ),
    "slots": lambda v: (
        v.sum_slots + (slice_slots(v.world_size, v.rows, v.ROWS) if v.GATHERS else 0)
    ),
    "data_bytes": lambda v: (
        v.scale_byte + (sum(v.rows) * 4 if v.QUANTIZE else 0) if v.GATHERS else v.sum_bytes
    ),
}
_GROUPED: dict[str, Callable[[Any], Any]] = {
    "grouped_matmul_kernel": _copying_grid,
    "segments": lambda v: expert_segment_lines(v.rank, v.world_size, v.splits, v.num_experts),
    "received": lambda v: [
        expert_offsets(rank, v.world_size, v.splits, v.num_experts)[-1]
        for rank in range(v.world_size)
    ],
    "chunk_rows": lambda v: v.chunk_size,
    "chunk_size": lambda v: chunk_rows(v.splits, v.BLOCK_M, v.CHUNKS),
    "tiles_n": _tiles_n,
    "tiles": lambda v: tiles_of([line[1] for line in v.segments], v.BLOCK_M, v.tiles_n),
    "slots": lambda v: v.num_experts * v.world_size + max(v.received) // v.chunk_size + 1,
    "data_bytes": lambda v: max(v.received) * v.K * v.ITEMSIZE,
    "sends": lambda v: expert_send_lines(
        v.rank, v.world_size, v.splits, v.num_experts, v.chunk_size
    ),
    "num_sends": lambda v: len(v.sends),
}
# Keys of all ranks are here: nothing is sent. ``first`` and ``num_parts`` may select some.
_HEADS: dict[str, Callable[[Any], Any]] = {
    "all_heads": lambda v: v.batches * v.heads,
    "partials_rows": lambda v: sum(v.rows),
    "tiles": _query_tiles,
    "parts": lambda v: key_lines(v.rows),
    "first": lambda v: v.world_size,
    "num_parts": lambda v: v.world_size,
    "spans": lambda v: all_causal_spans(v.rows),
    "per_key": lambda v: v.heads // v.key_heads,
}

OPS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "all_gather_matmul": {
        "all_gather_matmul_kernel": _copying_grid,
        "chunk_size": lambda v: chunk_rows(v.rows, v.BLOCK_M, v.CHUNKS),
        "tiles_n": _tiles_n,
        "tiles": _tiles,
        "data_bytes": lambda v: gathered_bytes(v.rows, v.K * v.ITEMSIZE),
        **_SENDS,
        "chunks": lambda v: chunk_lines(
            v.rank, v.world_size, v.rows, v.chunk_size, v.BLOCK_M, v.tiles_n
        ),
        "num_chunks": lambda v: len(v.chunks),
    },
    "matmul_reduce_scatter": {
        "matmul_reduce_scatter_kernel": _grid,
        **_SUMMED,
        "own_rows": lambda v: v.rows[v.rank],
    },
    "matmul_all_reduce": {"matmul_all_reduce_kernel": _grid, **_ALL_REDUCED},
    "matmul_reduce_scatter_norm": {"matmul_reduce_scatter_norm_kernel": _grid, **_SCATTERED},
    "matmul_all_reduce_norm": {"matmul_all_reduce_norm_kernel": _grid, **_ALL_REDUCED},
    "reduce_norm": {
        "reduce_norm_kernel": lambda v: persistent_grid(0, tiles_of(v.rows, v.ROWS, 1), v.resident),
        **_SCATTERED,
        "tiles_n": lambda v: 1,
    },
    "low_latency_norm": {
        "low_latency_norm_kernel": lambda v: v.tokens,
        "blocks": lambda v: v.tokens * ceil_div(v.N * v.ITEMSIZE, 4 * v.BLOCK_WORDS),
        **_WORDS,
    },
    "dispatch": {
        "dispatch_send_kernel": _sending_grid,
        "dispatch_receive_kernel": _sending_grid,
        "slots": lambda v: v.world_size * (1 + v.senders),
        "facts": lambda v: 3 * v.TOPK,
        "x_byte": lambda v: _after(v, v.world_size * (v.COUNT_NUMBERS + v.experts) * 8),
        "scales_byte": lambda v: _after(v, v.x_byte + v.world_size * v.most_tokens * v.x_words * 4),
        "facts_byte": lambda v: v.scales_byte,
        "scale_words": lambda v: v.facts,  # of none
        "data_bytes": lambda v: v.facts_byte + v.world_size * v.most_tokens * v.facts * 4,
    },
    "combine": {
        "combine_kernel": _sending_grid,
        "slots": lambda v: v.world_size * v.senders,
        "data_bytes": lambda v: v.most_tokens * v.TOPK * v.N * v.ITEMSIZE,
    },
    "grouped_matmul_combine": {
        "grouped_matmul_combine_kernel": lambda v: v.programs,
        "slots": lambda v: v.world_size * v.programs,
        "data_bytes": lambda v: v.home_rows * v.N * v.ITEMSIZE,
    },
    "all_gather_grouped_matmul": _GROUPED,
    "all_to_all_grouped_matmul": _GROUPED,
    "matmul_all_to_all": {
        "matmul_all_to_all_kernel": _grid,
        "tiles_n": _tiles_n,
        "own_tiles": lambda v: tiles_of([v.rows[v.rank]], v.BLOCK_M, v.tiles_n),
        "tiles": lambda v: max(
            v.own_tiles * v.world_size, tiles_of([max(v.rows)], v.BLOCK_M, v.tiles_n)
        ),
        "slots": _tiles,
        "data_bytes": lambda v: gathered_bytes(v.rows, v.N * v.ITEMSIZE),
        "shards": lambda v: shard_lines(v.rows, v.BLOCK_M, v.tiles_n),
    },
    "all_to_all_matmul": {
        "all_to_all_matmul_kernel": _copying_grid,
        "tiles_n": _tiles_n,
        "tiles": lambda v: tiles_of([v.rows[v.rank]], v.BLOCK_M, v.tiles_n),
        "own_rows": lambda v: v.rows[v.rank],
        "first_row": lambda v: sum(v.rows[: v.rank]),
        "chunk_size": lambda v: chunk_rows(v.rows, v.BLOCK_M, v.CHUNKS),
        "chunk_rows": lambda v: v.chunk_size,
        "chunks": lambda v: ceil_div(max(v.rows), v.chunk_size),
        "slots": lambda v: v.world_size * v.chunks,
        "data_bytes": lambda v: contributed_bytes(v.world_size, v.rows, v.K * v.ITEMSIZE),
        "sends": lambda v: head_send_lines(v.rank, v.world_size, v.rows, v.chunk_size, v.chunks),
        "num_sends": lambda v: len(v.sends),
    },
    "context_parallel_attention": {
        "all_gather_attention_kernel": _copying_grid,
        "merge_attention_kernel": _merging_grid,
        "all_heads": lambda v: v.batches * v.heads,
        "partials_rows": lambda v: v.rows[v.rank],
        "tiles": _query_tiles,
        "chunk_size": lambda v: max(1, ceil_div(max(v.rows), v.CHUNKS)),
        "data_bytes": lambda v: gathered_bytes(
            v.rows, v.batches * v.key_heads * (v.HEAD_DIM + v.VALUE_DIM) * v.ITEMSIZE
        ),
        **_SENDS,
        "parts": lambda v: key_part_lines(v.rank, v.world_size, v.rows, v.chunk_size),
        "num_parts": lambda v: v.world_size,
        "count": lambda v: v.world_size,
        "spans": lambda v: causal_spans(v.rank, v.rows),
        "per_key": lambda v: v.heads // v.key_heads,
    },
    "attention_of_heads": {
        "attention_kernel": lambda v: [v.tiles, v.num_parts],
        "merge_attention_kernel": _merging_grid,
        "count": lambda v: v.world_size,
        **_HEADS,
    },
    "attention_of_heads_backward": {
        "attention_queries_backward_kernel": lambda v: [v.tiles, v.num_parts],
        "attention_keys_backward_kernel": lambda v: [
            v.key_tiles,
            v.batches * v.key_heads,
            v.num_parts,
        ],
        "sums_rows": lambda v: sum(v.rows),
        "key_tiles": lambda v: ceil_div(max(v.rows), v.BLOCK_N),
        **_HEADS,
    },
    "distributed_decode": {
        "decode_attention_kernel": lambda v: [
            ceil_div(v.query_rows, v.BLOCK_M),
            v.batches * v.heads,
            v.count,
        ],
        "merge_attention_kernel": lambda v: ceil_div(v.query_rows, v.BLOCK_M) * v.batches * v.heads,
        "decode_exchange_kernel": lambda v: v.blocks,
        "partials_rows": lambda v: v.query_rows,
        "count": lambda v: pieces_of(v.most, v.BLOCK_N, v.MOST_PIECES),
        "piece": lambda v: piece_rows(v.most, v.BLOCK_N, v.MOST_PIECES),
        "key_heads": lambda v: v.heads,
        "rows": lambda v: v.batches * v.heads * v.query_rows,
        "blocks": lambda v: (
            ceil_div(v.rows, v.DECODE_LANES // v.WIDTH) * ceil_div(v.VALUE_DIM, v.WIDTH)
        ),
        **_WORDS,
    },
    "all_gather": {
        "all_gather_kernel": lambda v: persistent_grid(v.COPIERS, v.num_arrivals, v.resident),
        "chunk_size": lambda v: chunk_elements(v.rows, v.BLOCK, v.CHUNKS),
        "data_bytes": lambda v: gathered_bytes(v.rows, v.ITEMSIZE),
        **_SENDS,
        "arrivals": lambda v: arrival_lines(v.rank, v.world_size, v.rows, v.chunk_size, True),
        "num_arrivals": lambda v: v.slots,
    },
    "reduce_scatter": {
        "reduce_scatter_kernel": lambda v: persistent_grid(
            0, ceil_div(max(v.rows), v.BLOCK), v.resident
        ),
        "slots": lambda v: reduce_slots(v.world_size, v.rows, v.BLOCK, 1),
        "data_bytes": lambda v: contributed_bytes(v.world_size, v.rows, v.ITEMSIZE),
        "segments": lambda v: segment_lines(v.rank, v.world_size, segments_of(v.rows), v.BLOCK, 1),
        "own_elements": lambda v: v.rows[v.rank],
    },
    "all_reduce": {
        "all_reduce_kernel": lambda v: persistent_grid(
            0, ceil_div(v.elements, v.BLOCK), v.resident
        ),
        "slots": lambda v: reduce_slots(v.world_size, [v.elements], v.BLOCK, 1),
        "data_bytes": lambda v: contributed_bytes(v.world_size, [v.elements], v.ITEMSIZE),
    },
    "broadcast": {
        "low_latency_broadcast_kernel": lambda v: v.blocks,
        "blocks": lambda v: ceil_div(v.units * v.UNIT, 4 * v.BLOCK_WORDS),
        **_WORDS,
    },
}
"""By op: its grids, by kernel, and its quantities."""
