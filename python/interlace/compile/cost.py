"""Predicted times of a collective beside a matmul, and of the two fused.

::

    unfused = latency + bytes / bandwidth + flops / speed
    fused   = host + max(bytes / fused bandwidth, flops / speed) + what does not overlap

A prediction decides; it is no measurement. ``CPU`` is fitted to 2 and 4 ranks on 2 cores; ``GPU`` is
arithmetic with round numbers: nothing was measured on one. ``FusionPass`` takes another :class:`Machine`,
such as what ``python -m interlace calibrate`` has measured here, :func:`calibrated`. That is not taken by
itself: ranks compile alone, and those of another host have another file, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from interlace.runtime.tuning import calibration


@dataclass(frozen=True)
class Machine:
    """What the model knows of a machine. Seconds, bytes per second, floating-point operations per second.

    ``bandwidth``: of a collective, in bytes received by one rank. ``fused_bandwidth``: the same inside a
    fused op. ``latency``: of a collective without data. ``fused_host``: what a fused op costs beyond its
    parts. ``overlap``: of the shorter of its two parts, how much a fused op hides.

    >>> import dataclasses
    >>> dataclasses.replace(CPU, name="mine", bandwidth=4e9).bandwidth
    4000000000.0
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


def calibrated(size: int, device_type: str = "cpu") -> Machine:
    """The machine with links as ``interlace calibrate`` has measured them among ``size`` ranks.

    The same line of all_gather by which ``algorithm="auto"`` goes. Pass it on all ranks or on none. Raises
    LookupError if there is no measurement of a mesh of ``size`` ranks here.

    >>> calibrated(1000)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    LookupError: no calibration of 1000 ranks for cpu in ...: run python -m interlace calibrate --mesh 1000
    """
    base = machine_for(torch.device(device_type))
    found = calibration.find(calibration.read(device_type), calibration.OWN, (size,))
    if found is None:
        raise LookupError(
            f"no calibration of {size} ranks for {device_type} in {calibration.path(device_type)}: run "
            f"python -m interlace calibrate --mesh {size}"
        )
    link = found.link(0, "all_gather").protocols[-1]
    bandwidth = (
        link.gb_per_s * 1e9 * (size - 1) / size
    )  # all of the whole but the own part is received
    return replace(
        base,
        name=f"{base.name}, calibrated {found.date}",
        latency=link.latency_us * 1e-6,
        bandwidth=bandwidth,
        fused_bandwidth=bandwidth * base.fused_bandwidth / base.bandwidth,
    )


def predict(machine: Machine, problem: Problem) -> tuple[float, float]:
    """(unfused, fused), in seconds."""
    multiplying = problem.flops / machine.flops
    unfused = machine.latency + problem.nbytes / machine.bandwidth + multiplying
    moving = problem.nbytes / machine.fused_bandwidth
    hidden = machine.overlap * min(moving, multiplying)
    fused = machine.fused_host * problem.calls + moving + multiplying - hidden
    fused += problem.extra_nbytes / machine.bandwidth + problem.extra_collectives * machine.latency
    return unfused, fused
