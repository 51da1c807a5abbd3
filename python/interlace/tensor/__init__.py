"""Tensors of several ranks: uneven parts, placeholders, sharded tensors."""

from __future__ import annotations

from interlace.tensor.indexed import indexed_all_to_all_v
from interlace.tensor.placeholder import Placeholder, PlaceholderError
from interlace.tensor.sharded import ShardedTensor, from_dtensor, from_local, scatter
from interlace.tensor.uneven import all_gather_v, gather_v, scatter_v

__all__ = [
    "Placeholder",
    "PlaceholderError",
    "ShardedTensor",
    "all_gather_v",
    "from_dtensor",
    "from_local",
    "gather_v",
    "indexed_all_to_all_v",
    "scatter",
    "scatter_v",
]
