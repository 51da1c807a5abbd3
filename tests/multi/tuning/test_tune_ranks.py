"""Ranks that are processes choose alike, whatever their tuning caches say; the command in shm."""

import io
import pathlib

import pytest
import torch
from rich.console import Console

import interlace
from interlace.cli.commands.tune import TuneOptions, tune
from interlace.runtime.tuning import cache
from multi.tuning import tune_ranks
from tiers import thorough

WORLD = tune_ranks.PROBLEM.world_size


def run(folder: pathlib.Path, agrees: bool = True) -> list[dict[str, object]]:
    return interlace.run(tune_ranks.choices, WORLD, str(folder), agrees, place="shm")


def test_equal_caches_need_no_words(tmp_path: pathlib.Path) -> None:
    for rank in range(WORLD):
        tune_ranks.write(str(tmp_path), rank, "pipelined", 2)
    for found in run(tmp_path):
        assert found["values"] == [("pipelined", tune_ranks.CHUNKS, 2)] * 2
        assert found["right"] == [True] * 3 and found["warnings"] == []


def test_where_caches_differ_rank_0_counts(tmp_path: pathlib.Path) -> None:
    """Rank 1 has other values, rank 2 has no file at all."""
    tune_ranks.write(str(tmp_path), 0, "pipelined", 2)
    tune_ranks.write(str(tmp_path), 1, "unfused", 4)
    found = run(tmp_path)
    for rank, each in enumerate(found):
        assert each["values"] == [("pipelined", tune_ranks.CHUNKS, 2)] * 2
        assert each["right"] == [True] * 3
        texts = each["warnings"]
        assert isinstance(texts, list) and len(texts) == (0 if rank == 0 else 1)
        for text in texts:
            assert f"rank {rank} has" in text and str(tune_ranks.cache(str(tmp_path), 0)) in text


def test_a_cache_of_another_rank_alone_does_not_count(tmp_path: pathlib.Path) -> None:
    tune_ranks.write(str(tmp_path), 2, "unfused", 4)
    found = run(tmp_path)
    assert all(each["values"] == found[0]["values"] for each in found)
    assert found[0]["values"] != [("unfused", tune_ranks.CHUNKS, 4)] * 2
    assert all(each["right"] == [True] * 3 for each in found)


def test_without_the_agreement_ranks_would_differ(tmp_path: pathlib.Path) -> None:
    """The negative control."""
    tune_ranks.write(str(tmp_path), 0, "pipelined", 2)
    tune_ranks.write(str(tmp_path), 1, "unfused", 4)
    values = [each["values"] for each in run(tmp_path, agrees=False)]
    assert values[0] != values[1] != values[2]


@thorough
def test_the_command_in_shm(tmp_path: pathlib.Path) -> None:
    file, out = tmp_path / "tune.json", io.StringIO()
    ops = ("all_gather_matmul", "matmul_all_reduce")
    options = TuneOptions(
        op=ops, place="shm", m="64", n="32", k="32", budget=20.0, cache=str(file), world_size=2,
        plot="-",
    )  # fmt: skip
    assert tune(Console(file=out, width=200), options) == 0
    machine = cache.machine("shm", torch.device("cpu"))
    found = {row.op: row for row in cache.rows_for(machine, file)}
    assert set(found) == set(ops)
    for row in found.values():
        assert row.algorithm in ("pipelined", "unfused")
        assert set(row.microseconds) == {"pipelined", "unfused"}
        assert row.microseconds[row.algorithm] > 0 and row.ranks == 2
    assert found["all_gather_matmul"].rows == 32 and found["matmul_all_reduce"].rows == 64
    assert "CPUs; they say nothing of a GPU" in out.getvalue()
    bars = [line for line in out.getvalue().splitlines() if "####" in line]
    assert len(bars) >= 4 and sum("(default)" in line for line in bars) == 2


@pytest.mark.parametrize("place", ["shm"])
def test_ranks_with_different_explicit_configurations_are_told(place: str) -> None:
    with pytest.raises(ValueError, match="configuration differs between ranks"):
        interlace.run(tune_ranks.different, 2, place=place)
