"""A calibration as it may have been measured, for tests of what is made of it."""

from interlace.runtime.tuning import calibration
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh


def measurement(latency_us: float, mesh: tuple[int, ...] = (2,)) -> MeasuredMesh:
    """Every op takes about so long, whatever its size."""
    line = (LinkProtocol(0, latency_us, 1000.0),)
    links = [Link(dim, ranks, op, line) for dim, ranks in enumerate(mesh) for op in calibration.OPS]
    return MeasuredMesh(calibration.OWN, mesh, "2026-11-22", "2.13", "0.1.0", "shm", tuple(links))
