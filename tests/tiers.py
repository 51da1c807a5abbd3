"""Tests of `make test`, and what only `make test-all` runs: it has the marker ``thorough``.

It takes long for what it finds, as one more architecture or mutant does; each kind has tests without it. In
the code, :data:`thorough` marks a test, and :func:`few` marks parameters. The file ``tiers.txt`` says how
many cases of a function stay: ``repository/cost.py`` measures their cost, and mutants show what they find.
"""

import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

thorough = pytest.mark.thorough
TABLE = pathlib.Path(__file__).with_suffix(".txt")


def few(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return ``values`` as parameters of a test, thorough but for ``chosen``."""
    every = list(values)
    assert all(each in every for each in chosen)
    return [
        each
        if each in chosen
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=thorough)
        for each in every
    ]


def spread(count: int, kept: int) -> set[int]:
    """Return ``kept`` of the first ``count`` numbers, from the first to the last."""
    return {at * (count - 1) // max(1, kept - 1) for at in range(kept)}


def kept_cases() -> dict[str, int]:
    """Return the table: the number of cases of each function that `make test` runs."""
    lines = [line.split() for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {name: int(count) for name, count in lines}


def mark_cases(items: Sequence[pytest.Item]) -> None:
    """Mark the cases that the table leaves to `make test-all`."""
    kept, cases = kept_cases(), defaultdict(list)
    for item in items:
        if not item.get_closest_marker("thorough"):
            cases[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name in kept.keys() & cases.keys():
        chosen = spread(len(cases[name]), kept[name])
        for index, item in enumerate(cases[name]):
            if index not in chosen:
                item.add_marker(thorough)
