"""Predicted seconds of a collective beside a matmul, and of the two fused: the rule of policy "auto".

::

    unfused = latency + bytes / bandwidth + flops / speed
    fused   = host + max(bytes / fused bandwidth, flops / speed) + what does not overlap

:func:`predict` is that rule, for other compilers too. The machine that it takes is that of
``runtime/tuning/machine.py``. ``CPU`` is fitted to 2 and 4 ranks on 2 cores; ``GPU`` has round numbers:
nothing was measured on one. ``FusionPass`` takes another :class:`Machine`, such as :func:`calibrated`. That
is not taken by itself: ranks compile alone, and those of another host have another file, or none.
"""

from typing import NamedTuple

import torch

from interlace.arguments import checks
from interlace.runtime.tuning.machine import (
    CPU as CPU,
    GPU as GPU,
    Machine as Machine,
    calibrated as calibrated,
    machine_for as machine_for,
)


class Prediction(NamedTuple):
    """Seconds of a collective and its matmul: one after the other, and in one fused op."""

    unfused: float
    fused: float


Times = tuple[float, float] | tuple[None, None]


def why_not(policy: str, times: Times) -> str:
    """Why the fusion pass leaves what it could fuse, of which ``times`` are predicted; "" if it fuses."""
    if policy == "never":
        return 'policy is "never"'
    slower = policy == "auto" and times[0] is not None and times[1] >= times[0]
    return "predicted to be slower fused" if slower else ""


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def predict(
    collective: str,
    rows: int,
    columns: int,
    inner: int,
    world_size: int,
    *,
    dtype: torch.dtype,
    machine: Machine,
    bias: bool = False,
    terms: int = 1,
    batch: int = 1,
) -> Prediction:
    """Predicted seconds of a collective beside a matmul, and of both in one op: for a compiler to compare.

    By this the fusion pass decides, with policy "auto": it fuses where ``fused`` is less. Nothing is
    measured or run, and equal arguments give equal bits on every rank.

    Parameters
    ----------
    collective : "all_gather", of the rows that are multiplied; "reduce_scatter" or "all_reduce", of the
        product.
    rows, columns, inner : of the matmul of one rank, ``(rows, inner) @ (inner, columns)``. The rows are
        those of all ranks for a gather, and those before they are scattered; several weights that read the
        same rows have their ``columns`` together.
    dtype : of what travels.
    machine : :data:`CPU`, :data:`GPU`, :func:`calibrated`, or a :class:`Machine` with figures of your own.
    bias : whether every rank adds one before a reduction, which is then reduced itself.
    terms : how many matmuls are added before a reduction; ``inner`` is their sum.
    batch : how many ops a batch of weights becomes; ``rows`` has those of all.

    Raises ValueError for another ``collective``, a negative length, and another number below 1; TypeError
    for what is no number, dtype or machine.

    >>> layer = predict("all_gather", 8192, 28672, 8192, 8, dtype=torch.bfloat16, machine=GPU)
    >>> round(1e6 * layer.unfused), round(1e6 * layer.fused), layer.fused < layer.unfused
    (8100, 7785, True)
    >>> small = predict("all_gather", 8, 64, 64, 2, dtype=torch.float32, machine=CPU)
    >>> small.fused < small.unfused
    False
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    lengths = {"rows": rows, "columns": columns, "inner": inner}
    counts = {"world_size": world_size, "terms": terms, "batch": batch}
    for name, number in {**lengths, **counts}.items():
        least = int(name in counts)
        if checks.integer(name, number) < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    for name, value, kind in (("dtype", dtype, torch.dtype), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    reduces = collective != "all_gather"
    whole = rows * (columns if reduces else inner) * dtype.itemsize
    passes = 2 if collective == "all_reduce" else 1
    nbytes = passes * whole * (world_size - 1) // world_size
    multiplying = 2 * rows * columns * inner / machine.flops
    unfused = machine.latency + nbytes / machine.bandwidth + multiplying
    moving = nbytes / machine.fused_bandwidth
    hidden = machine.overlap * min(moving, multiplying)
    fused = machine.fused_host * batch + moving + multiplying - hidden
    if reduces and terms > 1:  # the left operands are put side by side
        fused += rows * inner * dtype.itemsize / machine.bandwidth
    if reduces and bias:
        fused += machine.latency
    return Prediction(unfused, fused)
