"""Ranks of test_calibration.py: choose algorithms while their calibrations differ."""

import os
import warnings
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.tuning import calibration, tuning
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh

ROWS, INNER, COLUMNS = 64, 64, 8


def measurement(latency_us: float, mesh: tuple[int, ...] = (2,)) -> MeasuredMesh:
    """Every op takes about so long, whatever its size."""
    line = (LinkProtocol(0, latency_us, 1000.0),)
    links = [Link(dim, ranks, op, line) for dim, ranks in enumerate(mesh) for op in calibration.OPS]
    return MeasuredMesh(calibration.OWN, mesh, "2026-11-22", "2.13", "0.1.0", "shm", tuple(links))


def choices(files: list[str], agrees: bool = True) -> dict[str, Any]:
    """What "auto" is on this rank with its own file, and whether the op is right by it.

    ``agrees`` False is the mutant: each rank goes by its own file.
    """
    rank = interlace.get_rank()
    os.environ[calibration.VARIABLE] = files[rank]
    tuning.forget()
    group = default_group()
    if not agrees:
        own = tuning.own_gather(group.place)
        tuning._groups[group] = tuning._Agreed(None, (), asks=False, gather=own)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            problem = tuning.gather_problem(
                group.world_size, torch.float32, ROWS, (COLUMNS,), INNER
            )
            choice = tuning.choose(group, problem)
            right = True
            if agrees:
                x = torch.full((ROWS, INNER), rank + 1.0)
                out = interlace.all_gather_matmul(x, torch.ones(INNER, COLUMNS))
                whole = torch.arange(1.0, 3.0).repeat_interleave(ROWS)[:, None] * INNER
                right = torch.equal(out, whole.expand(-1, COLUMNS))
        texts = [str(each.message) for each in said if "calibration" in str(each.message)]
        return {
            "algorithm": choice.algorithm,
            "source": choice.source,
            "right": right,
            "said": texts,
        }
    finally:
        os.environ[calibration.VARIABLE] = "off"
        tuning.forget()
