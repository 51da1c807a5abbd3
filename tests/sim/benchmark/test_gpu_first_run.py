"""The script for the first half hour on a GPU, on simulated ranks: every step runs, failures are told."""

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
    environment = {**os.environ, "PY": sys.executable, "WORK": str(out), **changed}
    command = [*COMMAND.split()[:-1], part, "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


@thorough
@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_every_step_of_a_part_runs(part: str, tmp_path: pathlib.Path) -> None:
    done = run(part, tmp_path, LIMIT="3000")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (tmp_path / part / "summary.txt").read_text().splitlines()
    names = [line.split()[1] for line in steps]
    assert len({*names}) == len(names) > 3  # each has a log of its own
    with tarfile.open(tmp_path / f"{part}.tgz") as packed:
        assert f"{part}/summary.txt" in packed.getnames()


def test_a_step_that_fails_is_told_and_the_next_begins(tmp_path: pathlib.Path) -> None:
    done = run("b", tmp_path, PY="false")
    assert done.returncode == 1, done.stdout
    assert "== check-4: status 1" in done.stdout and "== virtual: status 1" in done.stdout
    assert (tmp_path / "check-4.failed").exists()
    assert run("b", tmp_path, PY="true").returncode == 0
    assert not list(tmp_path.glob("*.failed"))


def test_what_failed_decides_what_is_next_though_results_are_taken_away(
    tmp_path: pathlib.Path,
) -> None:
    late = tmp_path / "late"  # nothing failed, but some cases had no time
    late.write_text("#!/bin/sh\nexit 3\n")
    late.chmod(0o755)
    for python, next_one in (
        ("true", "check-4"),
        ("false", "check-2-again"),
        (str(late), "check-4"),
    ):
        out = tmp_path / f"after {pathlib.Path(python).name}"
        run("a", tmp_path, PY=python, OUT=str(out))
        assert [file.name for file in out.iterdir()] == ["a.tgz"]
        done = run("b", tmp_path, PY="true", OUT=str(out))
        assert f"== {next_one}: status 0" in done.stdout, done.stdout


def test_what_has_no_time_is_left_out(tmp_path: pathlib.Path) -> None:
    done = run("c", tmp_path, PY="true", LIMIT="5")
    assert "processes: left out, no time" in done.stdout and done.returncode == 1
    assert run("d", tmp_path).returncode == 2
