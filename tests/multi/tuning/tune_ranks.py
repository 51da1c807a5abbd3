"""Ranks of test_tune_ranks.py: run ops while their tuning caches differ."""

import os
import pathlib
import warnings
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.tuning import cache as tune_cache, tuning
from interlace.runtime.tuning.machine import Problem

PROBLEM = Problem("all_gather_matmul", torch.float32, 64, 32, 64, 3)
CHUNKS = 7  # that no default has


def cache(folder: str, rank: int) -> pathlib.Path:
    return pathlib.Path(folder) / f"rank-{rank}.json"


def write(folder: str, rank: int, algorithm: str, programs: int) -> None:
    """A file of its own for ``rank``."""
    world, rows, columns, inner = tuning.bucket_of(PROBLEM)
    values = {"block_m": 16, "chunks": CHUNKS, "programs": programs}
    row = tune_cache.CacheRow(
        PROBLEM.op, "float32", "even", world, rows, columns, inner, algorithm, {algorithm: values}
    )
    machine = tune_cache.machine("shm", torch.device("cpu"))
    tune_cache.add(machine, [row], cache(folder, rank))


def choices(folder: str, agrees: bool = True) -> dict[str, Any]:
    """What this rank chooses, twice, with its own file; and whether the op is right by every algorithm.

    ``agrees`` False is the mutant: ranks do not exchange what they have.
    """
    rank = interlace.get_rank()
    os.environ[tune_cache.VARIABLE] = str(cache(folder, rank))
    tuning.forget()
    if not agrees:
        group = default_group()
        tuning._groups[group] = tuning._Agreed(None, tuning.own_rows(group.place), asks=False)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [tuning.choose(default_group(), PROBLEM) for _ in range(2)]
            x = torch.full((64, 64), float(rank + 1))
            right = []
            for algorithm in ("auto", "pipelined", "fused") if agrees else ():
                out = interlace.all_gather_matmul(x, torch.ones(64, 32), algorithm=algorithm)
                rows = torch.arange(1.0, interlace.get_world_size() + 1).repeat_interleave(64)
                right.append(bool(torch.equal(out, (64 * rows)[:, None].expand(-1, 32))))
        values = [(c.algorithm, c.configuration.chunks, c.configuration.programs) for c in found]
        texts = [str(each.message) for each in said if "tuning cache" in str(each.message)]
        return {"values": values, "right": right, "warnings": texts}
    finally:
        os.environ[tune_cache.VARIABLE] = "off"
        tuning.forget()


def different() -> None:
    """Explicit values on one rank only."""
    values = {"block_m": 64} if interlace.get_rank() else {}
    with interlace.configured(**values):
        interlace.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 4))
