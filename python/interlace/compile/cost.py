"""Predicted times of a collective beside a matmul, and of the two fused.

::

    unfused = latency + bytes / bandwidth + flops / speed
    fused   = host + max(bytes / fused bandwidth, flops / speed) + what does not overlap

A prediction decides; it is no measurement. ``CPU`` is fitted to 2 and 4 ranks on 2 cores; ``GPU`` is
arithmetic with round numbers: nothing was measured on one. ``FusionPass`` takes another :class:`Machine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What the model knows of a machine. Seconds, bytes per second, floating-point operations per second.

    ``bandwidth``: of a collective, in bytes received by one rank. ``fused_bandwidth``: the same inside a
    fused op. ``latency``: of a collective without data. ``fused_host``: what a fused op costs beyond its
    parts. ``overlap``: of the shorter of its two parts, how much a fused op hides.
    """

    name: str
    latency: float
    bandwidth: float
    flops: float
    fused_host: float
    fused_bandwidth: float
    overlap: float


@dataclass(frozen=True)
class Problem:
    """One candidate. ``rows``, ``inner`` and ``columns`` are those of the whole matmul on one rank,
    ``nbytes`` what a rank receives; ``extra_nbytes`` what fusing copies beyond. ``calls`` of a fused op."""

    rows: int
    inner: int
    columns: int
    nbytes: int
    size: int
    extra_nbytes: int = 0
    extra_collectives: int = 0
    calls: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns


CPU = Machine(
    name="cpu",
    latency=100e-6,
    bandwidth=1.7e9,
    flops=3.7e10,
    fused_host=250e-6,
    fused_bandwidth=1.8e9,
    overlap=0.0,
)
GPU = Machine(
    name="gpu",
    latency=12e-6,
    bandwidth=3.0e11,
    flops=5e14,
    fused_host=10e-6,
    fused_bandwidth=3.0e11,
    overlap=0.8,
)


def machine_for(device: torch.device) -> Machine:
    return CPU if device.type == "cpu" else GPU


def predict(machine: Machine, problem: Problem) -> tuple[float, float]:
    """(unfused, fused), in seconds."""
    multiplying = problem.flops / machine.flops
    unfused = machine.latency + problem.nbytes / machine.bandwidth + multiplying
    moving = problem.nbytes / machine.fused_bandwidth
    hidden = machine.overlap * min(moving, multiplying)
    fused = machine.fused_host * problem.calls + moving + multiplying - hidden
    fused += problem.extra_nbytes / machine.bandwidth + problem.extra_collectives * machine.latency
    return unfused, fused
