"""The script for the first half hour on a GPU, on simulated ranks: every step runs, failures are told."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

from tiers import thorough

ROOT = pathlib.Path(__file__).parents[3]
COMMAND = "bash benchmarks/gpu_first_run.sh a"  # as docs/gpu.md has it


def run(part: str, out: pathlib.Path, **changed: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PY": sys.executable, "OUT": str(out), **changed}
    command = [*COMMAND.split()[:-1], part, "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@thorough
@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_every_step_of_a_part_runs(part: str, tmp_path: pathlib.Path) -> None:
    done = run(part, tmp_path, LIMIT="3000")
    steps = [line for line in done.stdout.splitlines() if line.startswith("==")]
    assert done.returncode == 0 and len(steps) > 3, done.stdout + done.stderr
    with tarfile.open(tmp_path / f"{part}.tgz") as packed:
        assert f"{part}/summary.txt" in packed.getnames()


def test_a_step_that_fails_is_told_and_the_next_begins(tmp_path: pathlib.Path) -> None:
    done = run("b", tmp_path, PY="false")
    assert done.returncode == 1, done.stdout
    assert "== check-4: status 1" in done.stdout and "== virtual: status 1" in done.stdout
    assert not list(tmp_path.glob("*.passed"))


def test_what_has_no_time_is_left_out(tmp_path: pathlib.Path) -> None:
    done = run("c", tmp_path, PY="true", LIMIT="5")
    assert "processes: left out, no time" in done.stdout and done.returncode == 1
    assert run("d", tmp_path).returncode == 2
