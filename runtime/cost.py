"""Which algorithm ``algorithm="auto"`` means.

``sim`` exists to run the kernels, so there it is the kernel. On GPUs the fused kernel is taken as soon
as an output has enough rows to overlap anything; below, fusing loses to the plain sequence (peers'
measurements: break-even near 512 rows per group). On CPUs the pipelined algorithm is taken once the
transfer is worth its extra matmul calls.
"""

from __future__ import annotations

import torch

from interlace.runtime.place import Place

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_FUSED_ROWS = 512
SMALLEST_PIPELINED_BYTES = 1 << 16


def choose_algorithm(
    place: Place, dtype: torch.dtype, rows: int, bytes_moved: int, *, empty: bool
) -> str:
    """ "fused", "pipelined" or "unfused" for ``rows`` gathered or scattered rows.

    ``bytes_moved`` is what a rank receives; ``empty`` marks an op without any arithmetic.
    """
    if empty or dtype not in FUSED_DTYPES:
        return "unfused"
    if place.name == "sim":
        return "fused"
    if place.direct_access:
        return "pipelined" if bytes_moved >= SMALLEST_PIPELINED_BYTES else "unfused"
    return "fused" if rows >= SMALLEST_FUSED_ROWS else "unfused"
