"""The Python of docs/tensor.md and docs/torchtitan.md runs as written, each block a file of its own."""

from __future__ import annotations

import os
import pathlib
import re
from unittest import mock

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (name, number, text)
    for name in ("tensor", "torchtitan")
    for number, text in enumerate(BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text()))
]


@pytest.mark.parametrize("name, number, text", BLOCKS, ids=[f"{n} {i}" for n, i, _ in BLOCKS])
def test_blocks(name: str, number: int, text: str) -> None:
    with mock.patch.dict(os.environ):
        try:
            exec(compile(text, f"docs/{name}.md, block {number}", "exec"), {"__name__": "__main__"})
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def test_there_are_blocks() -> None:
    assert [name for name, _, _ in BLOCKS] == ["tensor", "tensor", "torchtitan"]
