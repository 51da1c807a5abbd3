"""A world of one: calls that are a copy take a short way, and nobody can tell but by the time."""

from __future__ import annotations

from pathlib import Path

import interlace
from multi import alone_ranks


def test_the_short_way_is_the_general_one(tmp_path: Path) -> None:
    (answer,) = interlace.run(alone_ranks.both_ways, 1, str(tmp_path / "store"), place="shm")
    different, shortened = answer
    assert different == []
    assert shortened >= 2 * 9 * 5  # of 10 ops, those that are plain copies


def test_an_output_of_another_size_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (found,) = interlace.run(alone_ranks.written_behind, 1, str(tmp_path / "store"), place="shm")
    assert found == []


def test_the_short_way_counts_is_profiled_and_ends_with_its_group(tmp_path: Path) -> None:
    (answer,) = interlace.run(
        alone_ranks.counted_and_refused, 1, str(tmp_path / "store"), place="shm"
    )
    assert answer == (1, "interlace:all_gather", "InterlaceError")
