"""Texts of a bundle that are read from the sources: functions that formulas call, promises of kernels.

A *formula* is an expression over named whole numbers and lists of them, such as
``"persistent_grid(COPIERS, tiles, resident)"``. What it calls are functions of ``launch_formulas.py`` and
``kernels/tiling.py``: the very ones that the launch side calls. They travel as text, without annotations,
to be evaluated where this package is not. Of a kernel's docstring go the paragraphs that law 12 of
DESIGN.md asks for.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable

from interlace.kernels import launch_formulas, tiling
from interlace.tools.catalogue.catalogue import Entry

_LABELS = ("legend", "ordering", "example")
# What the evaluator in interlace/formulas.py offers by itself.
BUILTINS = ("len", "max", "min", "range", "sum")


def called(text: str) -> list[str]:
    """Names of the functions that a formula, or the text of a function, calls."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return list(dict.fromkeys(func.id for func in calls if isinstance(func, ast.Name)))


def names(formula: str) -> set[str]:
    """Names of the numbers and lists that a formula is over."""
    nodes = [node for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Name)]
    return {node.id for node in nodes} - set(called(formula))


def functions(formulas: Iterable[str]) -> dict[str, str]:
    """Text of every function that ``formulas`` need, and that those functions need."""
    found: dict[str, str] = {}
    missing = [name for text in formulas for name in called(text)]
    while missing:
        name = missing.pop()
        if name not in found and name not in BUILTINS:
            found[name] = _text(name)
            missing += called(found[name])
    return dict(sorted(found.items()))


def _text(name: str) -> str:
    function = vars(launch_formulas).get(name) or vars(tiling)[name]
    tree = ast.parse(inspect.getsource(function))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef) and not definition.decorator_list, name
    definition.returns = None
    for argument in definition.args.args:
        argument.annotation = None
    return ast.unparse(tree)


def contract(module: str, kernel: str) -> dict[str, str]:
    """The paragraphs of the docstring: "computes" is the first, the others are named in it."""
    function = getattr(importlib.import_module(module), kernel)
    paragraphs = inspect.cleandoc(function.fn.__doc__).split("\n\n")
    first, *others = (" ".join(paragraph.split()) for paragraph in paragraphs)
    found = {"computes": first}
    for paragraph in others:
        label, _, text = paragraph.partition(": ")
        if label.lower() in _LABELS:
            found[label.lower()] = text
    return found


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
