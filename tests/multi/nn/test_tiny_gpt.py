"""examples/train_tiny_gpt.py, shortened: what it prints and its exit status."""

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest

from multi.nn import gpt_ranks
from tiers import thorough

SMALL = "--steps 4 --hidden 16 --layers 1 --length 8 --batch 4"


def ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], train: Any, options: str
) -> tuple[Any, str]:
    """Exit status and output."""
    import train_tiny_gpt

    monkeypatch.setattr(train_tiny_gpt, "train", train)
    with pytest.raises(SystemExit) as ended:
        train_tiny_gpt.main(f"{SMALL} {options}".split())
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
def test_losses_are_those_of_one_process(
    tmp_path: Path, monkeypatch: Any, capsys: Any, options: str
) -> None:
    status, text = ran(monkeypatch, capsys, gpt_ranks.train, f"{options} --out {tmp_path}")
    assert (status, text.count("the same losses:")) == (0, 2), text
    assert "4 ranks and one process, 4 steps" in text
    assert "2 ranks resumed and one process, 2 steps" in text
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert (tmp_path / "loss.png").exists() == drawn
    assert ("no plot" in text) != drawn


@thorough
def test_other_losses_are_found(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    train = gpt_ranks.train_without_moments
    status, text = ran(monkeypatch, capsys, train, f"--dp 1 --out {tmp_path}")
    assert status == 1
    assert re.findall("^(.*): . ranks", text, re.M) == ["the same losses", "OTHER LOSSES"]


def test_what_is_no_number_is_no_loss() -> None:
    import train_tiny_gpt

    assert train_tiny_gpt.compare("these", {0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert not train_tiny_gpt.compare("these", {0: 1.0, 1: math.nan}, {0: 1.0, 1: 2.0})
