"""A fixture: the number of the fake GPU's hardware queues, for tests that hold with any number."""

import pytest

from stand_ins import fake_queues
from tiers import few


@pytest.fixture(params=few([0, 1, 8, 32], 0, 1))
def connections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of queues of every fake GPU which the test makes without saying one."""
    monkeypatch.setattr(fake_queues, "CONNECTIONS", request.param)
    return int(request.param)
