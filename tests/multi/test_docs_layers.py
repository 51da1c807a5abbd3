"""Every Python block of docs/layers.md runs, and prints what stands below it."""

from __future__ import annotations

import pathlib
import re
import socket

import pytest

import interlace
from multi import docs_ranks

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "layers.md"
BLOCK = re.compile(r"^```python\n# (\w+\.py)(.*?)^```$(?:\n\n```\n(.*?)```)?", re.M | re.S)
BLOCKS = {name: ("#" + code, output) for name, code, output in BLOCK.findall(DOCUMENT.read_text())}


def test_all_blocks_are_run() -> None:
    assert DOCUMENT.read_text().count("```python") == len(BLOCKS)
    others = {name for name, (_, output) in BLOCKS.items() if not output}
    assert others == {"train_block.py", "reshard.py"}


@pytest.mark.parametrize("name", [name for name, (_, output) in BLOCKS.items() if output])
def test_block_in_a_simulation(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = BLOCKS[name]
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == output


def test_training() -> None:
    code, _ = BLOCKS["train_block.py"]
    expected = docs_ranks.called(code, "unsharded")
    assert expected[0] != expected[-1]
    for found in interlace.run(docs_ranks.called, 2, code, "sharded", place="shm", timeout=100):
        assert found == pytest.approx(expected, rel=1e-5)


def test_checkpoint(tmp_path: pathlib.Path) -> None:
    code, _ = BLOCKS["reshard.py"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = str(tmp_path / "checkpoint")
    found = interlace.run(docs_ranks.printed, 2, code, port, folder, place="shm", timeout=100)
    assert found == ["True\n", ""]
