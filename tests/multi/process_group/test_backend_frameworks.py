"""Torch's ways to train in parallel give the numbers of one process on the backend."""

import shutil
from pathlib import Path

import pytest

import interlace
from multi.process_group import backend_ranks, framework_ranks
from multi.process_group.test_backend import on_ranks, same
from tiers import thorough


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of all cases, run in one process group; by rank."""
    folder = tmp_path_factory.mktemp("frameworks")
    return interlace.run(
        framework_ranks.run_all, framework_ranks.WORLD_SIZE, str(folder), place="shm"
    )


@pytest.mark.parametrize("name", framework_ranks.CASES)
def test_framework(failures: list[dict[str, str]], name: str) -> None:
    for rank, failure in enumerate(failures):
        assert not failure[name], f"rank {rank}: {failure[name]}"


@thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(tmp_path: Path) -> None:
    results = on_ranks(backend_ranks.compiled, 2, tmp_path, "inductor", False)
    assert all(same(result, [7.0] * 4) for result in results)
