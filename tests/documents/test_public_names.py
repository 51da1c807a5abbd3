"""Names that users import, as ``public_names.txt`` lists them: none goes, and a new one is a decision."""

import ast
import importlib
import inspect
import pathlib
from collections.abc import Iterable

import pytest
import torch

from cases.op_tools import (
    NAMES,
    NO_OPS,
    SAME,
    TOOLS,
    WHY_NOT,
    names_of,
    public_ops,
    stood_for,
    table,
)
from documents.test_docstrings import names as shown
from documents.test_site import PUBLIC
from interlace.ops.library import OPS

OPS_PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/ops.md"
LIST = pathlib.Path(__file__).with_name("public_names.txt")
# Whole files that users import from; others are found by a module's __all__ or in the reference.
FILES = (
    "interlace.kernels.arguments",
    "interlace.kernels.launch_formulas",
    "interlace.kernels.matmul",
    "interlace.kernels.signal",
    "interlace.kernels.slots",
    "interlace.kernels.tiling",
    "interlace.kernels.transfer",
    "interlace.reference",
)


def defined(module: str) -> list[str]:
    """The functions and classes that the file of ``module`` defines, or hands on, under public names."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    kinds = ast.FunctionDef, ast.ClassDef
    found = [node.name for node in tree.body if isinstance(node, kinds)]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    found += [each.name for node in imports for each in node.names if each.asname == each.name]
    return [name for name in found if not name.startswith("_")]


def public() -> set[str]:
    """Dotted names that there are; ops of torch by their names, with ``_out`` and in-place forms."""
    listed = {f"{m}.{name}" for m in PUBLIC for name in importlib.import_module(m).__all__}
    listed |= {f"{module}.{name}" for module in FILES for name in defined(module)}
    ops = [f"{op.name}{form}" for op in OPS for form in ("", "_out", "_")]
    there = {f"torch.ops.interlace.{op}" for op in ops if hasattr(torch.ops.interlace, op)}
    return {*shown(), *listed, *there}


def missing(listed: Iterable[str], there: set[str]) -> list[str]:
    return sorted({*listed} - there)


def test_public_names_are_those_of_the_list() -> None:
    listed, there = LIST.read_text().splitlines(), public()
    assert missing(listed, there) == [], "a name that users import is gone"
    assert missing(there, {*listed}) == [], f"python {__file__} writes a new name"
    assert listed == sorted(listed)
    assert missing(["interlace.nothing"], there) == ["interlace.nothing"]


@pytest.mark.parametrize("name", ["figures", "protocol"])
def test_a_path_that_pages_named_is_the_same_file(name: str) -> None:
    now = importlib.import_module(f"interlace.benchmark.{name}")
    assert importlib.import_module(f"interlace.benchmark.timing.{name}") is now


def test_the_page_of_ops_has_every_op_with_its_tools() -> None:
    """A tool that lacks an op has a reason; nothing is said of ops and names that are not there."""
    assert table() in OPS_PAGE.read_text()
    assert not [key for key in WHY_NOT if names_of(*key)], "a reason for what is there"
    ops, public = set(stood_for()), set(public_ops())
    assert {op for op, _ in (*NAMES, *WHY_NOT)} <= ops
    assert set(SAME) <= public and set(NO_OPS) <= public
    for (op, tool), names in NAMES.items():
        assert set(names) <= set(TOOLS[tool]), (op, tool)
    for tool in ("bench", "tune", "bundle"):
        assert set(TOOLS[tool]) == {name for op in ops for name in names_of(op, tool)}


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(public())) + "\n")
