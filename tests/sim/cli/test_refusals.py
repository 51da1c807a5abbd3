"""Commands that cannot be: refused with words that say why, before a rank starts or anything is printed.

``refusals.txt`` has them: a command, and part of what it prints. KERNELS is a file of kernels, FOLDER its
folder.
"""

import contextlib
import pathlib
import shlex
from unittest import mock

import pytest
import torch

import interlace
from interlace.cli import main

TESTS = pathlib.Path(__file__).parents[2]
KERNELS = TESTS / "multi" / "cli" / "bench_kernels.py"
LINES = pathlib.Path(__file__).with_name("refusals.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_it_is_refused_before_anything_begins(
    line: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _, text = line.partition(" => ")
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    for name, path in (("KERNELS", KERNELS), ("FOLDER", KERNELS.parent)):
        command = command.replace(name, str(path))
    with (
        contextlib.chdir(tmp_path),
        mock.patch.object(interlace, "run", side_effect=AssertionError("a rank has started")),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.object(main, "need_interpreter"),
    ):
        try:
            assert main.run(shlex.split(command)) == 2
        except SystemExit as ended:
            assert ended.code == 2
    printed = capsys.readouterr()
    assert text and text in " ".join(printed.err.split()) and not printed.out
    assert not [*tmp_path.iterdir()]
