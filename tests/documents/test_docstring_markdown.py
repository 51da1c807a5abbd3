"""Docstrings of the library convert to the Markdown of the reference pages; griffe is not needed."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import pages
from documents.test_site import loaded

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def markdown(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    return loaded("docs/reference/docstrings.py").markdown


def test_every_docstring_converts(markdown: Any) -> None:
    faults = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted((pages.ROOT / "python/interlace").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                try:
                    markdown(text)
                except ValueError as error:
                    faults.append(f"{file}:{node.body[0].lineno}: {error}")
    assert not faults, "indent the block after '::': " + ", ".join(faults)
    with pytest.raises(ValueError):
        markdown("As a table::\n\na | b\n")


def test_docstrings_are_put_into_a_form_that_renders(markdown: Any) -> None:
    source, result = (HERE / f"docstring.{end}" for end in ("txt", "md"))
    assert markdown(source.read_text()) == result.read_text()


def test_every_parameter_has_a_row(markdown: Any) -> None:
    page = (pages.ROOT / "docs/reference/api/collectives.md").read_text()
    names = re.findall(r"^::: (interlace\.[a-z_]+)$", page, re.MULTILINE)
    assert len(names) > 20
    for name in [*names, "interlace.functional.all_reduce", "interlace.all_gather_matmul"]:
        module, _, function = name.rpartition(".")
        called = getattr(importlib.import_module(module), function)
        parameters = list(inspect.signature(called).parameters)
        text = markdown(inspect.getdoc(called), parameters)
        rows = re.findall(r"^    (\w+): \S", text.partition("\nArgs:\n")[2], re.MULTILINE)
        assert set(parameters) <= set(rows) and "---\n" not in text, name
