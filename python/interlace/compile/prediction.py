"""Predicted seconds of a collective beside a matmul, and of the two fused: the rule of policy "auto".

::

    unfused = latency + bytes / bandwidth + flops / speed
    fused   = host + max(bytes / fused bandwidth, flops / speed) + what does not overlap

Whole ops on any device; ``runtime/tuning/cost_model.py`` knows tiles and chips. ``CPU`` is fitted to 2 and
4 ranks on 2 cores; ``GPU`` has round numbers: nothing was measured on one. ``FusionPass`` takes another
:class:`Machine`, such as :func:`calibrated`. That is not taken by itself: ranks compile alone, and those of
another host have another file, or none.
"""

from dataclasses import dataclass, replace

import torch

from interlace.runtime.tuning import calibration


@dataclass(frozen=True)
class Machine:
    """A machine as the model knows it. Seconds, bytes per second, floating-point operations per second.

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


# fmt: off
#             name   latency  bandwidth  flops   fused_host  fused_bandwidth  overlap
CPU = Machine("cpu", 100e-6,  1.7e9,     3.7e10, 250e-6,     1.8e9,           0.0)
GPU = Machine("gpu", 12e-6,   3.0e11,    5e14,   10e-6,      3.0e11,          0.8)
# fmt: on


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
    link = found.link(0, "all_gather")
    bandwidth = link.received_gbs * 1e9
    return replace(
        base,
        name=f"{base.name}, calibrated {found.date}",
        latency=link.protocols[-1].latency_us * 1e-6,
        bandwidth=bandwidth,
        fused_bandwidth=bandwidth * base.fused_bandwidth / base.bandwidth,
    )


def predict(
    machine: Machine,
    flops: int,
    nbytes: int,
    *,
    extra_nbytes: int = 0,
    extra_collectives: int = 0,
    calls: int = 1,
) -> tuple[float, float]:
    """(unfused, fused) seconds of ``flops`` and received ``nbytes``; fused in ``calls``, with extras."""
    multiplying, moving = flops / machine.flops, nbytes / machine.fused_bandwidth
    unfused = machine.latency + nbytes / machine.bandwidth + multiplying
    hidden = machine.overlap * min(moving, multiplying)
    fused = machine.fused_host * calls + moving + multiplying - hidden
    return unfused, fused + extra_nbytes / machine.bandwidth + extra_collectives * machine.latency
