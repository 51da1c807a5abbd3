"""Ranks that are processes choose alike, whatever their tuning caches say; the command in shm."""

import io
import pathlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from rich.console import Console

import interlace
from interlace.cli.commands.tune import TuneOptions, tune
from interlace.groups.groups import default_group
from interlace.runtime.tuning import files, tuning
from interlace.runtime.tuning.tuning import Problem
from multi.tuning.test_calibration import reading
from ranks import ranks
from tiers import thorough

PROBLEM = Problem("all_gather_matmul", torch.float32, 64, 32, 64, 3)
CHUNKS = 7  # that no default has
WORLD = PROBLEM.world_size
Found = tuple[str, int] | None


def cache_of(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank-{rank}.json"


def reading_cache(folder: pathlib.Path, found: Found) -> AbstractContextManager[list[str]]:
    """Read a tuning cache of this rank, with an algorithm and its programs."""
    file = cache_of(folder, interlace.get_rank())
    if found:
        algorithm, programs = found
        values = {"block_m": 16, "chunks": CHUNKS, "programs": programs}
        about = PROBLEM.op, "float32", "even", *tuning.bucket_of(PROBLEM)
        row = files.CacheRow(*about, algorithm, {algorithm: values})
        files.add(files.machine("shm", torch.device("cpu")), [row], file)
    return reading(files.VARIABLE, file, "tuning cache")


def chosen() -> tuple[str, int, int]:
    """Return the choices of this rank at the first call and later."""
    first, again = [tuning.choose(default_group(), PROBLEM) for _ in range(2)]
    assert first == again
    return first.algorithm, first.configuration.chunks, first.configuration.programs


@pytest.mark.parametrize(
    "caches",
    [
        [("pipelined", 2)] * WORLD,
        [("pipelined", 2), ("unfused", 4), None],
        [None, None, ("unfused", 4)],
    ],
    ids=["equal", "different", "of another rank alone"],
)
@ranks(WORLD)
def test_rank_0_counts_and_the_op_is_right(tmp_path: pathlib.Path, caches: list[Found]) -> None:
    rank = interlace.get_rank()
    with reading_cache(tmp_path, caches[rank]) as said:
        choice = chosen()
        x, rows = torch.full((64, 64), rank + 1.0), torch.arange(1.0, WORLD + 1)
        for algorithm in ("auto", "pipelined", "fused"):
            out = interlace.all_gather_matmul(x, torch.ones(64, 32), algorithm=algorithm)
            whole = (64 * rows.repeat_interleave(64))[:, None].expand(-1, 32)
            assert torch.equal(out, whole), algorithm
    choices: list[Any] = [None] * WORLD
    interlace.all_gather_object(choices, choice)
    assert choices == [choice] * WORLD
    if caches[0]:
        assert choice == ("pipelined", CHUNKS, 2)
        assert len(said) == (caches[rank] != caches[0])
        for text in said:
            assert f"rank {rank} has" in text and str(cache_of(tmp_path, 0)) in text
    else:
        assert choice != ("unfused", CHUNKS, 4)


@ranks(WORLD)
def test_without_the_agreement_ranks_would_differ(tmp_path: pathlib.Path) -> None:
    """This is the negative control: ranks do not exchange their tables."""
    rank, group = interlace.get_rank(), default_group()
    with reading_cache(tmp_path, [("pipelined", 2), ("unfused", 4), None][rank]):
        tuning._groups[group] = tuning._Agreed(None, tuning.own_rows(group.place), asks=False)
        choice = chosen()
    choices: list[Any] = [None] * WORLD
    interlace.all_gather_object(choices, choice)
    assert choices[0] != choices[1] != choices[2]


@thorough
def test_the_command_in_shm(tmp_path: pathlib.Path) -> None:
    file, out = tmp_path / "tune.json", io.StringIO()
    ops = ("all_gather_matmul", "matmul_all_reduce")
    options = TuneOptions(
        op=ops, place="shm", m="64", n="32", k="32", budget=20.0, cache=str(file), world_size=2,
        plot="-",
    )  # fmt: skip
    assert tune(Console(file=out, width=200), options) == 0
    machine = files.machine("shm", torch.device("cpu"))
    found = {row.op: row for row in files.rows_for(machine, file)}
    assert set(found) == set(ops)
    for row in found.values():
        assert row.algorithm in ("pipelined", "unfused")
        assert set(row.microseconds) == {"pipelined", "unfused"}
        assert row.microseconds[row.algorithm] > 0 and row.ranks == 2
    assert found["all_gather_matmul"].rows == 32 and found["matmul_all_reduce"].rows == 64
    assert "CPUs; they say nothing about a GPU" in out.getvalue()
    bars = [line for line in out.getvalue().splitlines() if "####" in line]
    assert len(bars) >= 4 and sum("(default)" in line for line in bars) == 2
