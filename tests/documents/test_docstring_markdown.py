"""Every docstring of the library converts to the Markdown of the reference pages; griffe is not needed."""

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

import pages

PACKAGE = pages.ROOT / "python/interlace"
CONVERTER = pages.ROOT / "docs/reference/docstrings.py"


@pytest.fixture
def markdown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    spec = importlib.util.spec_from_file_location("docstrings", CONVERTER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    converter: Callable[[str], str] = module.markdown
    return converter


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{file}:{node.body[0].lineno}", text


def test_every_docstring_converts(markdown: Callable[[str], str]) -> None:
    faults = []
    for place, text in docstrings():
        try:
            markdown(text)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    assert not faults, "indent the block after '::': " + ", ".join(faults)


def test_a_table_that_is_not_indented_is_a_fault(markdown: Callable[[str], str]) -> None:
    assert "```text\na | b\n```" in markdown("As a table::\n\n    a | b\n")
    with pytest.raises(ValueError):
        markdown("As a table::\n\na | b\n")
