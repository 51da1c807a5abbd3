"""Which algorithm ``algorithm="auto"`` means.

``sim`` exists to run the kernels, so there it is the kernel. On GPUs the fused kernel is taken as soon
as an output has enough rows to overlap anything; below, fusing loses to the plain sequence. The sizes are
rows of ``tuning_table.py``; a row for the shape of a call (``tuning.py``) comes before them.

On CPUs, measured by ``benchmarks/run.py`` with 2 and 4 ranks on 2 cores (2026-11-20, float32): pipelined
all-gather + matmul is 2-3 % faster than unfused from 8 MiB received per rank on and up to 23 % slower
below 4 MiB; matmul + reduce-scatter is unfused up to 21 % faster and at most 2 % slower at all sizes,
because one large torch.mm beats one per owner.
"""

from __future__ import annotations

import torch

from interlace.runtime.place import Place
from interlace.runtime.tuning_table import threshold

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_FUSED_ROWS = threshold("smallest_fused_rows")
SMALLEST_PIPELINED_BYTES = threshold("smallest_pipelined_bytes")


def choose_scaled_algorithm(place: Place, rows: int, *, empty: bool) -> str:
    """As :func:`choose_algorithm` for fp8 operands: "fused" or "unfused".

    Only chips from 8.9 on multiply fp8 numbers, and no kernel moves scales between nodes.
    """
    if empty or place.nodes is not None:
        return "unfused"
    if place.name == "sim":
        return "fused"
    if place.direct_access or torch.cuda.get_device_capability(place.device) < (8, 9):
        return "unfused"
    return "fused" if rows >= SMALLEST_FUSED_ROWS else "unfused"


def choose_algorithm(
    place: Place,
    dtype: torch.dtype,
    rows: int,
    bytes_gathered: int,
    *,
    empty: bool,
    tuned: str = "",
) -> str:
    """ "fused", "pipelined" or "unfused" for ``rows`` gathered or scattered rows.

    ``bytes_gathered`` is what a rank receives before its matmul, 0 if its collective comes after;
    ``empty`` marks an op without any arithmetic. ``tuned`` is what a row for the shape says.
    """
    if empty or dtype not in FUSED_DTYPES:
        return "unfused"
    if place.name == "sim":
        return "fused"
    if tuned:
        return tuned
    if place.direct_access:
        return "pipelined" if bytes_gathered >= SMALLEST_PIPELINED_BYTES else "unfused"
    return "fused" if rows >= SMALLEST_FUSED_ROWS else "unfused"
