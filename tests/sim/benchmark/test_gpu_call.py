"""The script for the first fifteen minutes on a GPU, on simulated ranks."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import time

from tiers import thorough

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu_call.sh"
COMMANDS = {  # as docs/gpu.md has them
    "1": "bash benchmarks/gpu_call.sh 1",
    "2": "bash benchmarks/gpu_call.sh 2",
    "3": "bash benchmarks/gpu_call.sh 3",
}


def run(call: str, out: pathlib.Path, **changed: str) -> subprocess.CompletedProcess[str]:
    here = {"WORK": str(out), "TRITON_CACHE_DIR": str(out / "kernels"), "CACHE": str(out / "none")}
    environment = {**os.environ, "PY": sys.executable, **here, **changed}
    command = [*COMMANDS[call].split(), "--dry-run"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def program(folder: pathlib.Path, text: str) -> str:
    """A program that stands for Python in every step."""
    file = folder / f"program-{len([*folder.glob('program-*')])}"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@thorough
def test_every_step_of_the_first_two_calls_runs_in_under_three_minutes(
    tmp_path: pathlib.Path,
) -> None:
    begin = time.monotonic()
    for call in "12":
        done = run(call, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = (tmp_path / call / "summary.txt").read_text()
        names = re.findall("^== (.*): status 0", summary, re.MULTILINE)
        assert len({*names}) == len(names) > 5  # each has a log of its own
        with tarfile.open(tmp_path / f"{call}.tgz") as packed:
            logs = {f"{call}/{name}.log" for name in names}
            assert logs | {f"{call}/summary.txt"} <= {*packed.getnames()}
    assert time.monotonic() - begin < 180


@thorough
def test_every_step_of_the_third_call_runs(tmp_path: pathlib.Path) -> None:
    done = run("3", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== check-odd: status 0" in done.stdout and "== small: status 0" in done.stdout


def test_limits_leave_time_for_the_starts_of_the_machine() -> None:
    """Two calls of at most 330 s and a shorter one; a step that is stopped takes 5 s more."""
    limits = [int(each) for each in re.findall(r"\bseconds=(\d+)", SCRIPT.read_text())]
    assert len(limits) == 2 and limits[0] + 8 <= 330 and limits[1] + 8 <= 180


def test_virtual_ranks_are_not_timed() -> None:
    text = SCRIPT.read_text()
    assert "--part matmul" in text and "--part ops" in text and "--part virtual" not in text


def test_a_step_that_fails_is_told_and_the_next_begins(tmp_path: pathlib.Path) -> None:
    done = run("2", tmp_path, PY="false")
    assert done.returncode == 1, done.stdout
    assert "== check-4: status 1" in done.stdout and "== host-cost: status 1" in done.stdout
    assert (tmp_path / "check-4.failed").exists()
    assert run("2", tmp_path, PY="true").returncode == 0
    assert not list(tmp_path.glob("*.failed"))


def test_what_explains_a_failure_comes_before_speed(tmp_path: pathlib.Path) -> None:
    for python, order in (("false", "probe matmul"), ("true", "variants probe")):
        done = run("1", tmp_path / python, PY=python)
        names = re.findall("^== (.*): status", done.stdout.partition("-- call")[0], re.MULTILINE)
        assert names[:3] == ["facts", "check-1", "check-2"] and names.count("probe") == 1
        assert order in " ".join(names)


def test_what_failed_decides_what_is_next_though_results_are_taken_away(
    tmp_path: pathlib.Path,
) -> None:
    late = program(tmp_path, "exit 3")  # nothing failed, but some cases had no time
    for python, next_one in (("true", "check-odd"), ("false", "one-queue"), (late, "check-odd")):
        out = tmp_path / f"after {pathlib.Path(python).name}"
        run("1", tmp_path, PY=python, OUT=str(out))
        assert [file.name for file in out.iterdir()] == ["1.tgz"]
        done = run("3", tmp_path, PY="true", OUT=str(out))
        assert f"== {next_one}: status 0" in done.stdout, done.stdout


def test_what_has_no_time_is_left_out(tmp_path: pathlib.Path) -> None:
    done = run("2", tmp_path, PY="true", LIMIT="5")
    assert "processes: left out, no time" in done.stdout and done.returncode == 1
    wrong = subprocess.run([*COMMANDS["1"].split()[:-1], "4"], cwd=ROOT, capture_output=True)
    assert wrong.returncode == 2 and COMMANDS["1"][:-1].encode() in wrong.stderr


def test_a_kernel_that_the_cache_has_not_is_seen(tmp_path: pathlib.Path) -> None:
    """And none where all that a step needs was packed."""
    whole = tmp_path / "packed" / "key"
    whole.mkdir(parents=True)
    (whole / "all_gather_kernel.cubin").touch()
    packed = tmp_path / "cache.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(whole, "key")
    build = "mkdir -p $TRITON_CACHE_DIR/$1; touch $TRITON_CACHE_DIR/$1/wait_kernel.cubin"
    for text, seen in ((build, True), ("exit 0", False)):
        folder = tmp_path / str(seen)
        folder.mkdir()
        done = run("2", folder, PY=program(folder, text), CACHE=str(packed))
        assert (folder / "kernels" / "key" / "all_gather_kernel.cubin").exists()
        assert ("not in the cache, compiled here: wait_kernel x 1" in done.stdout) == seen
        assert "every kernel is compiled here" not in done.stdout
    assert "every kernel is compiled here" in run("2", tmp_path, PY="true").stdout
