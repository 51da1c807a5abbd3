"""One pool of processes for the whole run, ``interlace.run``'s own: a process costs seconds to start."""

import pytest

from interlace.runtime.places.pool import ProcessPool, default_pool


@pytest.fixture(scope="session")
def pool() -> ProcessPool:
    return default_pool
