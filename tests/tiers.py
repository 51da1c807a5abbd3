"""Tests of `make test`, and what only `make test-all` runs: it has the marker ``thorough``.

It takes long for what it finds, as one more architecture or mutant does; each kind has tests without it.
"""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def few(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """``values`` as parameters of a test, thorough but for ``chosen``."""
    every = list(values)
    assert all(each in every for each in chosen)
    return [
        each
        if each in chosen
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=thorough)
        for each in every
    ]
