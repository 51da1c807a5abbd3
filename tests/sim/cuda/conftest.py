"""A fixture: the number of the fake GPU's hardware queues, for tests that hold with any number."""

from collections.abc import Iterator

import pytest

from stand_ins import fake_queues
from stand_ins.replaced import replaced
from tiers import few


@pytest.fixture(params=few([0, 1, 8, 32], 0, 1))
def connections(request: pytest.FixtureRequest) -> Iterator[int]:
    """Return the number of hardware queues of each fake GPU that does not name one."""
    with replaced((fake_queues, "CONNECTIONS", request.param)):
        yield request.param
