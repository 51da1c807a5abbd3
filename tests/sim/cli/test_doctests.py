"""The examples in docstrings are run, wherever they are."""

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil

import pytest
import torch

import interlace
import interlace_verify

# Every example may use these; the package's docstring says so.
KNOWN = {
    "interlace": interlace,
    "torch": torch,
    "functional": interlace.functional,
    "nn": interlace.nn,
}
# It compiles kernels: tests/build/lint/test_lint.py runs its example.
ELSEWHERE = {"interlace_verify.lint_check.check"}


def _has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return ">>> " in pathlib.Path(spec.origin).read_text()


MODULES = [
    name
    for package in (interlace, interlace_verify)
    for name in [
        package.__name__,
        *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    ]
    if name not in ELSEWHERE and not name.endswith("__main__") and _has_examples(name)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), extraglobs=KNOWN)
    assert tried and not failed


def test_there_are_examples_on_every_floor() -> None:
    for place in ("interlace.nn.", "interlace.tensor.", "interlace_verify.", "interlace.runtime."):
        assert any(name.startswith(place) for name in MODULES), place
