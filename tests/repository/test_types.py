"""Type checkers on a user's script: mypy, and pyright where it is installed."""

import pathlib
import re
import shutil
import subprocess
import sys
import typing

import pytest

import stubs
from interlace.arguments import checks, words
from interlace.arguments.words import OPS
from interlace.kernels import epilogue
from interlace.launcher import PLACES
from interlace.ops.collectives import rooted, stream_engine
from interlace.ops.matmul import scaled

SCRIPT = pathlib.Path(__file__).with_name("user_script.py")


def complaints(folder: pathlib.Path, *command: str) -> set[int]:
    """Return the lines of the script that a checker, run in ``folder``, rejects."""
    shutil.copy(SCRIPT, folder / "script.py")
    done = subprocess.run(
        [sys.executable, "-m", *command, "script.py"], cwd=folder, capture_output=True, text=True
    )
    found = re.findall(r"script\.py:(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    assert found, done.stdout + done.stderr
    return set(map(int, found))


def wrong() -> set[int]:
    lines = SCRIPT.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_the_stubs_are_those_of_today() -> None:
    """``python tests/stubs.py`` writes the stubs."""
    for path, text in stubs.stubs().items():
        assert path.read_text() == text, f"{path}: run python tests/stubs.py"


@pytest.mark.thorough
def test_mypy_finds_what_is_wrong_and_nothing_else(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    assert len(wrong()) > 15
    assert complaints(tmp_path, "mypy", "--cache-dir", str(tmp_path)) == wrong()


@pytest.mark.thorough
def test_pyright_does(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pyright")
    assert complaints(tmp_path, "pyright", "--pythonpath", sys.executable) == wrong()


def test_what_is_checked_at_run_time_are_the_words_of_the_types() -> None:
    for checked, word in (
        (checks.ALGORITHMS, words.FusedAlgorithm),
        (checks.REDUCE_OPS, words.FusedReduceName),
        (OPS[:-1], words.ReduceName),
        (scaled.ALGORITHMS, words.ScaledAlgorithm),
        (stream_engine.COLLECTIVE_ALGORITHMS, words.CollectiveAlgorithm),
        (rooted.BROADCAST_ALGORITHMS, words.BroadcastAlgorithm),
        (epilogue.ACTIVATIONS, words.Activation),
        (PLACES, words.RunPlace),
    ):
        assert checked == typing.get_args(word)
