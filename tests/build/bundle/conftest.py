"""Bundles are built once, for all tests that look at them, on whatever worker of pytest-xdist they run."""

import fcntl
import os
import pathlib

import pytest

from cases.bundles import build_all
from interlace.runtime.compiler.bundle.ops import OPS


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The directory of every bundle, by op."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "bundles"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "built"
        if not built.exists():
            build_all(folder)
            built.touch()
    return {op: folder / op for op in OPS}
