"""Bundles are built once, for all tests that look at them."""

import pathlib

import pytest

from cases.bundles import build_all


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The directory of every bundle, by op."""
    return build_all(tmp_path_factory.mktemp("bundles"))
