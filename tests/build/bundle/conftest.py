"""Bundles are built once, for all tests that look at them, on whatever worker of pytest-xdist they run."""

import fcntl
import os
import pathlib

import pytest

from cases.bundles import ARCHES, ONE_OF_EACH, build_all
from interlace.tools.bundle import OPS

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def bundles(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, pathlib.Path]:
    """The directories of the bundles that tests of the run ask for, by op."""
    here = [item for item in request.session.items if item.path.parent == HERE]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    asked = {(each.get("op"), each.get("arch")) for each in params} | {*ONE_OF_EACH}
    arches = {op: [arch for arch in ARCHES[op] if (op, str(arch)) in asked] for op in OPS}
    ops = [op for op in OPS if arches[op]]
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "bundles"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = folder / "built"
        if not built.exists():
            build_all(folder, {op: arches[op] for op in ops})
            built.touch()
    return {op: folder / op for op in ops}
