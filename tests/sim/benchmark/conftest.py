"""benchmarks/ is not a package: its modules are imported from that folder, and import each other there."""

import sys
from collections.abc import Iterator

import pytest

from sim.benchmark.model_support import ROOT


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.pop(0)
