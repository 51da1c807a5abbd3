"""Tensors of several ranks: uneven parts, placeholders, sharded tensors."""

from __future__ import annotations

from interlace.tensor.indexed import indexed_all_to_all_v
from interlace.tensor.placeholder import Placeholder, PlaceholderError
from interlace.tensor.uneven import all_gather_v, gather_v, scatter_v

__all__ = [
    "Placeholder",
    "PlaceholderError",
    "all_gather_v",
    "gather_v",
    "indexed_all_to_all_v",
    "scatter_v",
]
