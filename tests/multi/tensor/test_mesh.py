"""interlace.tensor's collectives on ranks that are processes: as torch's, and differentiable."""

import pathlib

import pytest

import interlace
from multi.tensor import mesh_ranks


@pytest.mark.parametrize("columns", [4, 5])
def test_gradients(columns: int) -> None:
    """Of even and of uneven chunks."""
    found = interlace.run(mesh_ranks.gradients, 2, columns, place="shm")
    assert found == [[True, True]] * 2


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
def test_beside_torchs_functions(tmp_path: pathlib.Path, backend: str) -> None:
    store = str(tmp_path / "store")
    found = interlace.run(mesh_ranks.beside_torch, 4, backend, store, place="shm")
    assert found == [[]] * 4
