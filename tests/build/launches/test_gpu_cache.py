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
CASE = "broadcast, low_latency, 2 ranks"


def run(cache: Path, packed: Path, case: str = CASE) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_cache.py", "--out", packed, "--only", case],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


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
    said = run(cache, tmp_path / "again.tgz")
    assert "compiled low_latency_broadcast_kernel" in said and " 1 kernels compiled" in said

    # groups name their files by absolute paths, which differ in each folder
    unpacked(tmp_path / "elsewhere")
    shutil.rmtree(cache)
    assert " 0 kernels compiled" not in run(tmp_path / "elsewhere", tmp_path / "again.tgz")


@thorough
def test_every_case_for_a_gpu_launches_the_kernels_that_it_names() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "gpu_cache.py", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "!!" not in done.stdout and " 0 kernels compiled" in done.stdout


def test_every_step_has_cases() -> None:
    script = (
        "import os; os.environ['TRITON_INTERPRET'] = '0'; import gpu_cache\n"
        "print(*(job.title for jobs in gpu_cache.STEPS for job in jobs()), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=WITH_PATHS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parts = re.findall(r"--part ([\w-]+)", (ROOT / "benchmarks" / "gpu_call.sh").read_text())
    assert len(parts) > 5
    for title in (*parts, "ops", "tests", "host-cost", "probe", "2 ranks", "7 ranks"):
        assert title in done.stdout, title


@thorough
def test_a_case_that_launches_something_else_is_told() -> None:
    script = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '0'; import gpu_cache\n"
        "from interlace.cli.commands import check as cases\n"
        "kernel = ('all_reduce_kernel',)\n"
        "case = cases.DenseCase('all_gather', 'copy', 2, (64,), 'fp32', kernel,\n"
        "    arguments={'algorithm': 'copy'})\n"
        "cases.cases = lambda device: [case]\n"
        "sys.argv = ['gpu_cache.py', '--dry-run', '--only', 'all_gather, copy']\n"
        "sys.exit(gpu_cache.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=WITH_PATHS
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "has not launched all_reduce_kernel" in done.stdout


def test_the_makefile_runs_it_with_the_torch_of_that_machine() -> None:
    done = subprocess.run(
        [*COMMAND.split(), "-n", "-o", ".venv-2.11/demo"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert ".venv-2.11/bin/python benchmarks/gpu_cache.py" in done.stdout


PROGRAM = texts_beside(__file__)["cache keys"]


def keys(whose: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return the keys of two processes; one of them asks for them in the other order."""
    command = [sys.executable, "-c", PROGRAM, whose]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[tuple[dict[str, str], list[str]]] = json.loads(done.stdout)
    return found


def test_keys_do_not_depend_on_what_was_asked_for_before() -> None:
    (forwards, several), (backwards, _) = keys("ours")
    assert len(forwards) > 100 and forwards == backwards
    assert several == [], "Triton sorts constants of one name by the addresses of their modules"


@thorough
def test_control_keys_of_triton_alone_depend_on_it() -> None:
    (forwards, _), (backwards, _) = keys("theirs")
    assert forwards != backwards
