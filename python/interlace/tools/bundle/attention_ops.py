"""Bundles of attention over keys that other ranks have; see ``ops.py``."""

import functools
from collections.abc import Callable, Iterable

from interlace.kernels.attention.decode import DECODE_LANES
from interlace.ops.attention.blocks import MERGED
from interlace.ops.attention.decode import MOST_PIECES
from interlace.ops.collectives.low_latency import MOST_PROGRAMS
from interlace.tools.bundle.options import RANKS, ROWS, WORDS, BundleOp, Make
from interlace.tools.catalogue import catalogue_attention as catalogue
from interlace.tools.catalogue.catalogue import Entry


def _attention(made: Callable[..., Iterable[Entry]]) -> Make:
    return lambda arch, options: list(
        made(
            arch,
            options.dtype,
            options.head_dim,
            value_size=options.value_dim or None,
            **options.overrides,
        )
    )


def _of_heads(grids: dict[str, str], *, backward: bool = False, **more: str) -> BundleOp:
    """Keys of all ranks are there: nothing is sent. ``first`` and ``num_parts`` may say which are taken."""
    return BundleOp(
        _attention(functools.partial(catalogue.heads_kernels, backward=backward)),
        ("head_dim", "value_dim"),
        grids,
        {
            "all_heads": "batches * heads",
            "partials_rows": "sum(rows)",
            "tiles": "ceil_div(partials_rows, BLOCK_M) * all_heads",
            "parts": "key_lines(rows)",
            "first": "world_size",
            "num_parts": "world_size",
            "spans": "all_causal_spans(rows)",
            "span_stride": "0",
            "per_key": "heads // key_heads",
            "first_head": "0",
            **more,
        },
        {"parts_ptr": "parts", "spans_ptr": "spans"},
        (*RANKS, *ROWS, "min(rows) > 1", "heads % key_heads == 0"),
        apart=tuple(grids),
    )


ATTENTION = {
    "context_parallel_attention": BundleOp(
        _attention(catalogue.gathered_attention),
        ("head_dim", "value_dim"),
        {
            "all_gather_attention_kernel": "persistent_grid(COPIERS, tiles, resident)",
            "merge_attention_kernel": f"ceil_div(partials_rows, max(16, {MERGED} // BLOCK_V)) * all_heads",
        },
        {
            "all_heads": "batches * heads",
            "partials_rows": "rows[rank]",
            "tiles": "ceil_div(partials_rows, BLOCK_M) * all_heads",
            "chunk_size": "max(1, ceil_div(max(rows), CHUNKS))",
            "slots": "chunk_slots(rows, chunk_size)",
            "data_bytes": "gathered_bytes(rows, batches * key_heads * (HEAD_DIM + VALUE_DIM) * ITEMSIZE)",
            "sends": "send_lines(rank, world_size, rows, chunk_size)",
            "num_sends": "sends_of(rank, world_size, rows, chunk_size)",
            "parts": "key_part_lines(rank, world_size, rows, chunk_size)",
            "num_parts": "world_size",
            "count": "world_size",
            "spans": "causal_spans(rank, rows)",
            "span_stride": "0",
            "per_key": "heads // key_heads",
            "first_head": "0",
        },
        {"sends_ptr": "sends", "parts_ptr": "parts", "spans_ptr": "spans"},
        (*RANKS, *ROWS, "min(rows) > 1", "resident > COPIERS", "heads % key_heads == 0"),
        apart=("merge_attention_kernel",),
    ),
    "attention_of_heads": _of_heads(
        {
            "attention_kernel": "[tiles, num_parts]",
            "merge_attention_kernel": f"ceil_div(partials_rows, max(16, {MERGED} // BLOCK_V)) * all_heads",
        },
        count="world_size",
    ),
    "attention_of_heads_backward": _of_heads(
        {
            "attention_queries_backward_kernel": "[tiles, num_parts]",
            "attention_keys_backward_kernel": "[key_tiles, batches * key_heads, num_parts]",
        },
        backward=True,
        sums_rows="sum(rows)",
        key_tiles="ceil_div(max(rows), BLOCK_N)",
    ),
    "distributed_decode": BundleOp(
        _attention(catalogue.decode_kernels),
        ("head_dim", "value_dim"),
        {
            "decode_attention_kernel": "[ceil_div(query_rows, BLOCK_M), batches * heads, count]",
            "merge_attention_kernel": "ceil_div(query_rows, BLOCK_M) * batches * heads",
            "decode_exchange_kernel": "blocks",
        },
        {
            "partials_rows": "query_rows",
            "count": f"pieces_of(most, BLOCK_N, {MOST_PIECES})",
            "piece": f"piece_rows(most, BLOCK_N, {MOST_PIECES})",
            "key_heads": "heads",
            "per_key": "1",
            "first_head": "0",
            "pages_stride": "0",
            "pages_size": "0",
            "rows": "batches * heads * query_rows",
            "blocks": f"ceil_div(rows, {DECODE_LANES} // WIDTH) * ceil_div(VALUE_DIM, WIDTH)",
            **WORDS,
        },
        conditions=(*RANKS, f"0 < blocks <= {MOST_PROGRAMS}"),
        apart=("decode_attention_kernel", "merge_attention_kernel"),
        words=True,
        # between the last two: what is merged is exchanged
        names={
            "merge_attention_kernel": {"output_ptr": "input_ptr"},
            # a cache in one piece has none
            "decode_attention_kernel": {"pages_ptr": "lengths_ptr"},
        },
    ),
}
