"""Tiles of an attention: rows of queries and of keys that a program has at a time, by head size."""

from dataclasses import replace

import torch

from interlace.runtime.core.place import Place
from interlace.runtime.tuning import table
from interlace.runtime.tuning.configuration import Configuration, capability_of, with_overrides

METHODS = ("all_gather", "ring", "ulysses")
LARGEST_HEAD = 256


def gpu_attention(
    capability: int, dtype: torch.dtype, head_dim: int, *, backward: bool
) -> Configuration:
    """The first row of the table's ``ATTENTION`` that fits a GPU of compute ``capability``."""
    wide = dtype == torch.float32
    kind = "fp32" if wide else "16 bit"
    way = "backward" if backward else "forward"
    row = next(
        row
        for row in table.ATTENTION
        if row.arch in (capability // 10, table.ANY)
        and row.dtype == kind
        and row.way == way
        and head_dim <= row.head_dim
    )
    sending = table.SENDING_FP32 if wide else table.SENDING
    values = {
        name: getattr(row, name) for name in ("block_m", "block_n", "num_warps", "num_stages")
    }
    values["descriptors"] = capability >= 90 and not wide
    return Configuration(**{**sending, **values})


def interpreted_attention(rows: int, key_rows: int) -> Configuration:
    """Few, large tiles."""
    extents = {"block_m": rows, "block_n": key_rows, "copy_columns": 1024}
    blocks = {
        name: min(max(1 << (extents[name] - 1).bit_length(), smallest), largest)
        for name, (smallest, largest) in table.INTERPRETED.items()
        if name in extents
    }
    return Configuration(**blocks, **table.INTERPRETED_VALUES)  # type: ignore[arg-type]


def for_decoding(chosen: Configuration, dtype: torch.dtype) -> Configuration:
    """Rows are the few heads that share keys; of fp32, whose products registers hold, few keys, too."""
    keys = 16 if dtype == torch.float32 else chosen.block_n
    return replace(chosen, block_m=16, block_n=keys, num_warps=4)


def choose_attention(
    place: Place,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    *,
    keys: int | None = None,
    backward: bool = False,
    decode: bool = False,
) -> Configuration:
    """The default for shards of ``rows`` queries and ``keys``, by default as many, with overrides."""
    capability = capability_of(place)
    if capability is None:
        chosen = interpreted_attention(max(1, rows), max(1, rows if keys is None else keys))
    else:
        chosen = gpu_attention(capability, dtype, head_dim, backward=backward)
        if decode:
            chosen = for_decoding(chosen, dtype)
    return with_overrides(chosen)
