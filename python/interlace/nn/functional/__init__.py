"""Functions of layers that work on shards of a sequence; ``interlace.nn.functional``."""

from interlace.ops.attention.functional import (
    attention_of_heads,
    context_parallel_attention,
    positions_of_ranks,
    shard_sequence,
    unshard_sequence,
)

__all__ = [
    "attention_of_heads",
    "context_parallel_attention",
    "positions_of_ranks",
    "shard_sequence",
    "unshard_sequence",
]
