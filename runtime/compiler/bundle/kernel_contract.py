"""Promises of a kernel's docstring, by paragraph: DESIGN.md's law 12 says what has to be there."""

from __future__ import annotations

import importlib
import inspect
import re

from interlace.runtime.compiler.catalogue import Entry

_LABELS = ("legend", "ordering", "example")


def contract(module: str, kernel: str) -> dict[str, str]:
    """The paragraphs of the docstring: "computes" is the first, the others are named in it."""
    function = getattr(importlib.import_module(module), kernel)
    paragraphs = inspect.cleandoc(function.fn.__doc__).split("\n\n")
    found = {"computes": _joined(paragraphs[0])}
    for paragraph in paragraphs[1:]:
        label, _, text = paragraph.partition(":")
        if label.lower() in _LABELS:
            found[label.lower()] = _joined(text)
    return found


def _joined(paragraph: str) -> str:
    return " ".join(paragraph.split())


def contracts(entries: list[Entry], known: list[Entry]) -> dict[str, dict[str, str]]:
    """Of ``entries``, and of those among ``known`` that their texts refer to, by kernel."""
    modules = {entry.kernel: entry.module for entry in known}
    found: dict[str, dict[str, str]] = {}
    missing = [entry.kernel for entry in entries]
    while missing:
        kernel = missing.pop(0)
        if kernel not in found:
            found[kernel] = contract(modules[kernel], kernel)
            named = re.findall(r"\b\w+_kernel\b", " ".join(found[kernel].values()))
            missing += [name for name in named if name in modules]
    return found
