"""The examples in docstrings are run, wherever they are."""

import doctest
import importlib
import pathlib
import pkgutil
from types import ModuleType

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


def _modules(package: ModuleType) -> dict[str, str]:
    """Return the files of a package's modules by name; in ``sys.modules`` some have been replaced."""
    assert package.__file__ is not None
    files = {package.__name__: package.__file__}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        spec = module.module_finder.find_spec(module.name, None)
        assert spec is not None and spec.origin is not None
        files[module.name] = spec.origin
    return files


MODULES = [
    name
    for package in (interlace, interlace_verify)
    for name, file in _modules(package).items()
    if name not in ELSEWHERE
    and not name.endswith("__main__")
    and ">>> " in pathlib.Path(file).read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name), extraglobs=KNOWN)
    assert tried and not failed


def test_there_are_examples_on_every_floor() -> None:
    for place in ("interlace.nn.", "interlace.tensor.", "interlace_verify.", "interlace.runtime."):
        assert any(name.startswith(place) for name in MODULES), place
