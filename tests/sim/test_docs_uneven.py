"""Every block of docs/uneven.md runs as written and prints what follows it."""

from __future__ import annotations

import io
import pathlib
import re
from contextlib import redirect_stdout

import pytest

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "uneven.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = BLOCK.findall(DOCUMENT.read_text())


def test_every_block_is_found() -> None:
    assert len(BLOCKS) == DOCUMENT.read_text().count("```python") > 0


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number: int) -> None:
    code, output = BLOCKS[number]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, f"{DOCUMENT.name}, block {number}", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == output
