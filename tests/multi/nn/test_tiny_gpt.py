"""examples/train_tiny_gpt.py, shortened: what it prints and its exit status."""

import importlib
import importlib.util
import math
import pathlib
import re
import sys
from typing import Any
from unittest import mock

import pytest

from tiers import thorough

EXAMPLES = str(pathlib.Path(__file__).parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)
example: Any = importlib.import_module("train_tiny_gpt")
train_example = example.train
SMALL = "--steps 4 --hidden 16 --layers 1 --length 8 --batch 4"


def train(*arguments: Any) -> dict[int, float]:
    """Call the example's function; ranks can find only this file."""
    return train_example(*arguments)  # type: ignore[no-any-return]


def train_without_moments(*arguments: Any) -> dict[int, float]:
    """Make a new optimizer when the training resumes."""
    nothing = {"sharded_optimizer_state_dict": mock.Mock(return_value={})}
    with mock.patch.multiple(example.nn, **nothing, load_optimizer_state_dict=mock.DEFAULT):
        return train(*arguments)


def ran(capsys: pytest.CaptureFixture[str], train: Any, options: str) -> tuple[Any, str]:
    with mock.patch.object(example, "train", train), pytest.raises(SystemExit) as ended:
        example.main(f"{SMALL} {options}".split())
    return ended.value.code, capsys.readouterr().out


@thorough
@pytest.mark.parametrize(
    "options",
    [
        "--data-parallel ddp",
        "--data-parallel fsdp --resume-tp 1 --resume-dp 2",
        "--experts 4 --resume-tp 1 --resume-dp 2",
        "--dp 1 --context-parallel 2 --experts 4",
        "--context-parallel 2 --dp 1",
    ],
)
def test_losses_are_those_of_one_process(tmp_path: Any, capsys: Any, options: str) -> None:
    status, text = ran(capsys, train, f"{options} --out {tmp_path}")
    assert (status, text.count("the same losses:")) == (0, 2), text
    assert "4 ranks and one process, 4 steps" in text
    assert "2 ranks resumed and one process, 2 steps" in text
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "loss.png").exists() == drawn
    assert ("no plot" in text) != drawn


@thorough
def test_other_losses_are_found(tmp_path: Any, capsys: Any) -> None:
    status, text = ran(capsys, train_without_moments, f"--dp 1 --out {tmp_path}")
    assert status == 1
    assert re.findall("^(.*): . ranks", text, re.M) == ["the same losses", "OTHER LOSSES"]


def test_what_is_no_number_is_no_loss() -> None:
    assert example.compare("these", {0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert not example.compare("these", {0: 1.0, 1: math.nan}, {0: 1.0, 1: 2.0})
