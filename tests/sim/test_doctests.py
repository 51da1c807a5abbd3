"""The examples in docstrings are run, wherever they are."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import interlace

# It compiles kernels: tests/build/test_lint.py runs its example.
ELSEWHERE = {"interlace.verify.lint_check"}
MODULES = ["interlace"] + [
    module.name
    for module in pkgutil.walk_packages(interlace.__path__, "interlace.")
    if not module.name.endswith("__main__") and module.name not in ELSEWHERE
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0
