"""The algorithm that ``algorithm="auto"`` stands for: by thresholds, not by the cost model.

The sizes are rows of ``table.py``; a row for the shape of a call (``tuning.py``) comes before them. ``sim``
exists to run the kernels, so there it is the kernel. On GPUs fusing loses to the plain sequence where an
output has too few rows to overlap anything.

On CPUs, measured by ``benchmarks/run.py`` with 2 and 4 ranks on 2 cores (2026-11-20, float32): pipelined
all-gather + matmul is 2-3 % faster than unfused from 8 MiB received per rank on and up to 23 % slower
below 4 MiB; matmul + reduce-scatter is unfused up to 21 % faster and at most 2 % slower at all sizes,
because one large torch.mm beats one per owner.

Plain collectives of few bytes go in words that carry their own flags: no signal and no credit is waited
for, but every byte is sent as two, and to all ranks at once. NCCL's protocol of that kind ("LL") ends near
the same size; here it was not measured.
"""

from collections.abc import Callable

import torch

from interlace.runtime.core.place import Place
from interlace.runtime.tuning.table import threshold

FUSED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_FUSED_ROWS = threshold("smallest_fused_rows")
SMALLEST_PIPELINED_BYTES = threshold("smallest_pipelined_bytes")
LARGEST_LOW_LATENCY_BYTES = threshold("largest_low_latency_bytes")
"""Of a rank's message: what all_reduce and broadcast take, and one shard of all_gather."""


def choose_scaled_algorithm(place: Place, rows: int, *, empty: bool) -> str:
    """For fp8, "fused" or "unfused": chips from 8.9 on have it, no kernel moves scales between nodes."""
    if empty or not place.all_mapped:
        return "unfused"
    if place.simulated:
        return "fused"
    on_chip = not place.direct_access and torch.cuda.get_device_capability(place.device) >= (8, 9)
    return "fused" if on_chip and rows >= SMALLEST_FUSED_ROWS else "unfused"


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
    if empty or dtype not in FUSED_DTYPES or not place.mapped:
        return "unfused"
    if place.simulated:
        return "fused"
    if tuned:
        return tuned
    if place.direct_access:
        return "pipelined" if bytes_gathered >= SMALLEST_PIPELINED_BYTES else "unfused"
    return "fused" if rows >= SMALLEST_FUSED_ROWS else "unfused"


def choose_collective(
    place: Place, small: int | None, *, kernel: bool, multicast: Callable[[], bool] = lambda: False
) -> str:
    """ "low_latency", "multimem", "kernel" or "copy" for a plain collective of at least one element.

    ``small``: bytes of the message, None if no low-latency kernel does the op. ``kernel``: whether one
    that pushes does. ``multicast()``: whether one store reaches all ranks, and bits stay the same with it.
    """
    if place.direct_access:
        return "copy"
    if small is not None and small <= LARGEST_LOW_LATENCY_BYTES:
        return "low_latency"
    if not kernel:
        return "copy"
    return "multimem" if not place.interpreted and multicast() else "kernel"
