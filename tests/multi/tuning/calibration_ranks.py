"""Measurements for tests: a calibration, and a file of them that a rank reads."""

import pathlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from interlace.runtime.tuning import calibration, tuning
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh
from stand_ins.replaced import environment


def measurement(latency_us: float, mesh: tuple[int, ...] = (2,)) -> MeasuredMesh:
    """Every op takes about so long, whatever its size."""
    line = (LinkProtocol(0, latency_us, 1000.0),)
    links = [Link(dim, ranks, op, line) for dim, ranks in enumerate(mesh) for op in calibration.OPS]
    return MeasuredMesh(calibration.OWN, mesh, "2026-11-22", "2.13", "0.1.0", "shm", tuple(links))


@contextmanager
def reading(variable: str, file: pathlib.Path, about: str) -> Iterator[list[str]]:
    """This rank reads ``file`` anew; the warnings meanwhile that have ``about`` in them, at the end."""
    texts = list[str]()
    with environment(**{variable: str(file)}), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuning.forget()
        try:
            yield texts
        finally:
            tuning.forget()
            texts += [str(each.message) for each in said if about in str(each.message)]
