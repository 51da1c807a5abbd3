"""Functions of layers that work on shards of a sequence; ``interlace.nn.functional``."""

from interlace.nn.functions.attention import (
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)

__all__ = ["context_parallel_attention", "shard_sequence", "unshard_sequence"]
