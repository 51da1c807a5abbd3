"""``make gpu-cache``: packed kernels are found again, missing ones are named, and keys never vary."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cases.texts import texts_beside
from tiers import thorough

ROOT = Path(__file__).parents[3]
COMMAND = "make gpu-cache PYTHON=python3.12"  # as docs/how-to/gpu/first-run.md has it
WITH_PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT / "benchmarks")])}
SCRIPT = ROOT / "benchmarks" / "gpu_cache.py"
PROGRAMS = texts_beside(__file__)
CASE = "broadcast, low_latency, 2 ranks"


def output_of(*command: str | Path, code: int = 0, **variables: str) -> str:
    """Return what a program of Python prints; it must end with ``code``."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=WITH_PATHS | variables
    )
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    return done.stdout


def run(cache: Path, packed: Path) -> str:
    return output_of(SCRIPT, "--out", packed, "--only", CASE, TRITON_CACHE_DIR=str(cache))


@thorough
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_is_missing_is_seen_and_compiled_again(tmp_path: Path) -> None:
    cache, packed = tmp_path / "cache", tmp_path / "cache.tgz"
    assert "compiled low_latency_broadcast_kernel" in run(cache, packed)

    def unpacked(where: Path) -> None:
        shutil.rmtree(where, ignore_errors=True)
        with tarfile.open(packed) as archive:
            archive.extractall(where)

    unpacked(cache)
    assert " 0 kernels compiled" in run(cache, tmp_path / "again.tgz")

    (kernel,) = cache.glob("*/low_latency_broadcast_kernel.cubin")
    shutil.rmtree(kernel.parent)
    again = run(cache, tmp_path / "again.tgz")
    assert "compiled low_latency_broadcast_kernel" in again and " 1 kernels compiled" in again

    # groups name their files by absolute paths, which differ in each folder
    unpacked(tmp_path / "elsewhere")
    shutil.rmtree(cache)
    assert " 0 kernels compiled" not in run(tmp_path / "elsewhere", tmp_path / "again.tgz")


@thorough
def test_every_case_for_a_gpu_launches_the_kernels_that_it_names() -> None:
    printed = output_of(SCRIPT, "--dry-run")
    assert "!!" not in printed and " 0 kernels compiled" in printed


def test_every_step_has_cases() -> None:
    titles = output_of("-c", PROGRAMS["steps"])
    parts = re.findall(r"--part ([\w-]+)", (ROOT / "benchmarks" / "gpu_call.sh").read_text())
    assert len(parts) > 5
    for title in (*parts, "ops", "tests", "host-cost", "probe", "2 ranks", "7 ranks"):
        assert title in titles, title


@thorough
def test_a_case_that_launches_something_else_is_told() -> None:
    assert "has not launched all_reduce_kernel" in output_of("-c", PROGRAMS["wrong case"], code=1)


def test_the_makefile_runs_it_with_the_torch_of_that_machine() -> None:
    done = subprocess.run(
        [*COMMAND.split(), "-n", "-o", ".venv-2.11/demo"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert ".venv-2.11/bin/python benchmarks/gpu_cache.py" in done.stdout


def keys(whose: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return the keys of two processes; one of them asks for them in the other order."""
    found: list[tuple[dict[str, str], list[str]]] = json.loads(
        output_of("-c", PROGRAMS["cache keys"], whose)
    )
    return found


def test_keys_do_not_depend_on_what_was_asked_for_before() -> None:
    (forwards, several), (backwards, _) = keys("ours")
    assert len(forwards) > 100 and forwards == backwards
    assert several == [], "Triton sorts constants of one name by the addresses of their modules"


@thorough
def test_control_keys_of_triton_alone_depend_on_it() -> None:
    (forwards, _), (backwards, _) = keys("theirs")
    assert forwards != backwards
