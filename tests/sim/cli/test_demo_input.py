"""Inputs of the demo: texts, activations and weights from files, and clear errors for others."""

import io
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from interlace.cli.commands import demo as command
from interlace.cli.commands.demo import DemoOptions
from interlace.runtime.places.sim.scheduler import recording


def printed(options: DemoOptions) -> tuple[int, str]:
    out = io.StringIO()
    return command.demo(Console(file=out, width=80), options), out.getvalue()


def test_text_gives_distinct_rows_that_depend_on_the_seed() -> None:
    work = command.from_text(None, torch.float32, 0, None, None, None)
    assert work.sizes == (command.DEFAULT_M, command.DEFAULT_N, command.DEFAULT_K)
    assert len(torch.unique(work.activations, dim=0)) == command.DEFAULT_M
    again = command.from_text(None, torch.float32, 0, None, None, None)
    other = command.from_text(None, torch.float32, 1, None, None, None)
    assert torch.equal(work.activations, again.activations)
    assert not torch.equal(work.activations, other.activations)


def test_own_text(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("to be, or not to be")
    work = command.from_text(str(file), torch.float32, 0, 20, 4, 8)
    assert "repeated" in work.origin
    code, text = printed(DemoOptions(ranks=2, m=20, n=4, k=8, text=str(file)))
    assert code == 0 and "own.txt" in text.replace("\n", "")


def test_own_activations_and_weights(tmp_path: pathlib.Path) -> None:
    x, w1, w2 = torch.randn(10, 6), torch.randn(6, 8).double(), torch.randn(8, 6).half()
    np.save(tmp_path / "x.npy", x.numpy().astype(">f8"))
    work = command.from_file(str(tmp_path / "x.npy"), torch.float32, 0, None, 5, None)
    assert work.sizes == (10, 5, 6)
    assert torch.equal(work.activations, x)
    torch.save({"activations": x, "weight1": w1, "weight2": w2}, tmp_path / "all.pt")
    work = command.from_file(str(tmp_path / "all.pt"), torch.bfloat16, 0, 7, None, None)
    assert work.sizes == (7, 8, 6)
    assert torch.equal(work.weight1, w1.bfloat16()) and torch.equal(work.weight2, w2.bfloat16())
    torch.save(x, tmp_path / "x.pt")
    assert printed(DemoOptions(ranks=2, input=str(tmp_path / "x.pt"), n=4))[0] == 0


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        ({"activations": torch.ones(4)}, {}, r"activations: must be a non-empty matrix.*\(4,\)"),
        ({"activations": torch.ones(0, 3)}, {}, r"non-empty matrix"),
        ({"activations": torch.ones(4, 3).int()}, {}, r"floating point, got torch.int32"),
        ({"activations": torch.full((4, 3), float("nan"))}, {}, r"not finite"),
        ({"activations": torch.full((4, 3), 1e6)}, {}, r"1e\+06 is more than torch.float16"),
        ({"weight1": torch.ones(4, 3)}, {}, r'no "activations"'),
        ({"activations": torch.ones(4, 3), "w": torch.ones(1)}, {}, r"unknown key 'w'"),
        (
            {"activations": torch.ones(4, 3), "weight1": torch.ones(4, 5)},
            {},
            r"weight1 has shape \(4, 5\), must be \(k, n\) = \(3, 5\)",
        ),
        (
            {"activations": torch.ones(4, 3), "weight2": torch.ones(5, 4)},
            {},
            r"weight2 has shape \(5, 4\), must be \(n, k\) = \(5, 3\)",
        ),
        ([torch.ones(4, 3)], {}, r"a tensor or a dict, got list"),
        (torch.ones(4, 3), {"m": 5}, r"--m 5, but activations have 4 rows"),
        (torch.ones(4, 3), {"k": 4}, r"--k 4, but activations have 3 columns"),
        ({"activations": torch.ones(4, 3), "weight1": torch.ones(3, 5)}, {"n": 4}, r"--n 4, but"),
        (recording.Slot, {}, r"holds more than tensors"),
    ],
)
def test_bad_content(tmp_path: pathlib.Path, content: Any, sizes: Any, message: str) -> None:
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises((ValueError, TypeError), match=message):
        printed(DemoOptions(input=str(tmp_path / "bad.pt"), dtype="float16", **sizes))


def test_bad_files(tmp_path: pathlib.Path) -> None:
    for name, message in (
        ("x.csv", "must be a .npy or a .pt file"),
        ("x.npy", "not an array in .npy format"),
        ("x.pt", "not a file of torch.save"),
    ):
        (tmp_path / name).write_bytes(b"\xff nothing of the kind")
        with pytest.raises(ValueError, match=message):
            printed(DemoOptions(input=str(tmp_path / name)))
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        printed(DemoOptions(text=str(tmp_path / "x.csv")))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="no words"):
        printed(DemoOptions(text=str(tmp_path / "empty.txt")))
    for options in ({"input": "absent.npy"}, {"text": "absent.txt"}):
        with pytest.raises(
            ValueError, match=r"--(text|input) absent.*: cannot be read: No such file"
        ):
            printed(DemoOptions(**options))  # type: ignore[arg-type]
    np.save(tmp_path / "int.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(TypeError, match="floating point, got int64"):
        printed(DemoOptions(input=str(tmp_path / "int.npy")))
