"""A world of one: the first call of a kind, those like it that follow, and asynchronous ones are alike."""

from pathlib import Path

import interlace
from multi.process_group import alone_ranks


def test_remembered_calls_are_as_the_first(tmp_path: Path) -> None:
    (different,) = interlace.run(alone_ranks.differing, 1, str(tmp_path / "store"), place="shm")
    assert different == []


def test_an_output_of_another_size_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (found,) = interlace.run(alone_ranks.written_behind, 1, str(tmp_path / "store"), place="shm")
    assert found == []


def test_a_call_counts_is_profiled_and_ends_with_its_group(tmp_path: Path) -> None:
    (answer,) = interlace.run(
        alone_ranks.counted_and_refused, 1, str(tmp_path / "store"), place="shm"
    )
    assert answer == (1, "interlace:all_gather on 0", "InterlaceError")
