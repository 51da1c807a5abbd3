"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import interlace

MODULES = ["interlace"] + [
    f"interlace.{module.name}"
    for module in pkgutil.iter_modules(interlace.__path__)
    if not module.ispkg and module.name != "__main__"
]
PUBLIC = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "run", "all_gather")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example(name: str) -> None:
    assert ">>> " in (getattr(interlace, name).__doc__ or "")
