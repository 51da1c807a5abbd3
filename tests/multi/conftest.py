"""One pool of processes for all tests here: a process costs seconds, a run in it milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from interlace.runtime.processes import ProcessPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with ProcessPool(4) as processes:
        yield processes
