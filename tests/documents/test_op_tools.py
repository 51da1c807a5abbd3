"""Every public op has its tools, or one table says why not."""

import pathlib

import pytest

from cases import op_tools
from cases.op_tools import NAMES, NO_OPS, SAME, TOOLS, WHY_NOT, names_of, public_ops, stood_for

PAGE = pathlib.Path(__file__).parents[2] / "docs/reference/ops.md"


@pytest.mark.parametrize("tool", TOOLS)
def test_every_op_has_its_tool_or_a_reason(tool: str) -> None:
    missing = [op for op in stood_for() if not names_of(op, tool) and (op, tool) not in WHY_NOT]
    assert not missing, f"{tool} knows none of these, and tests/cases/op_tools.py gives no reason"
    both = [op for op in stood_for() if names_of(op, tool) and (op, tool) in WHY_NOT]
    assert not both, "a reason for what is there"


@pytest.mark.parametrize("tool", ["bench", "tune", "bundle"])
def test_every_name_of_a_tool_is_of_an_op(tool: str) -> None:
    known = {name for op in stood_for() for name in names_of(op, tool)}
    assert set(TOOLS[tool]) == known


def test_nothing_is_said_of_ops_that_are_not_there() -> None:
    ops, public = set(stood_for()), set(public_ops())
    assert {op for op, _ in (*NAMES, *WHY_NOT)} <= ops
    assert set(SAME) <= public and set(NO_OPS) <= public
    for (op, tool), names in NAMES.items():
        assert set(names) <= set(TOOLS[tool]), (op, tool)


def test_control_a_new_op_without_tools_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather_sort(input: object, *, group: object = None) -> None: ...

    found = {**public_ops(), "all_gather_sort": all_gather_sort}
    monkeypatch.setattr(op_tools, "public_ops", lambda: found)
    with pytest.raises(AssertionError, match="all_gather_sort"):
        test_every_op_has_its_tool_or_a_reason("bench")


def test_the_page_has_the_table() -> None:
    assert op_tools.table() in PAGE.read_text()
