"""``interlace`` does without the package ``interlace_verify``, and says so where it cannot."""

import os
import pathlib
import subprocess
import sys

import pytest

from tiers import thorough

ROOT = pathlib.Path(__file__).parents[2]
SAID = "need the package interlace_verify, which comes with interlace and is not installed"
PROGRAM = """
import importlib, pkgutil, sys
import interlace, torch, triton, triton.language as tl
from interlace.cli import main

@triton.jit
def inline_kernel(out):
    lane = tl.arange(0, 4)
    value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [lane], tl.int32, True, 1)
    tl.store(out + lane, value)

def step():
    x, w = torch.ones(4, 8), torch.ones(8, 3)
    interlace.all_reduce(x)
    return interlace.all_gather_matmul(x, w)[0, 0].item()

assert interlace.run(step, 2) == [16.0, 16.0]
for module in pkgutil.walk_packages(interlace.__path__, "interlace."):
    if module.name not in ("interlace.verify", "interlace.__main__"):
        importlib.import_module(module.name)
assert not [name for name in sys.modules if name.startswith("interlace_verify")]
# a jitted function that exists twice, also as one of `kernels`, is compiled and cached twice
assert not {"kernels", "runtime"} & {name.partition(".")[0] for name in sys.modules}
for name, needs in {
    "module": lambda: interlace.verify,
    "place": lambda: interlace.run(step, 2, place="ptx"),
    "kernel": lambda: interlace.run(lambda: inline_kernel[(1,)](torch.zeros(4, dtype=torch.int32)), 1),
}.items():
    try:
        needs()
    except interlace.InterlaceError as error:
        print(name, error)
assert main.run(["verify", "all"]) == 2
"""


@pytest.fixture
def hidden(tmp_path: pathlib.Path) -> dict[str, str]:
    """Return the environment of processes that cannot import the package."""
    there = tmp_path / "interlace_verify/__init__.py"
    there.parent.mkdir()
    there.write_text("raise ModuleNotFoundError('not installed', name=__name__)\n")
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "python", ROOT / "tests", ROOT)))
    return {**os.environ, "PYTHONPATH": path}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def test_it_is_missed_only_by_what_needs_it(hidden: dict[str, str], tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(hidden, str(program))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if SAID in line]
    assert [line.split()[0] for line in said] == ["module", "place", "kernel"], done.stdout
    assert SAID in " ".join(done.stderr.split()) and "Traceback" not in done.stderr


@thorough
@pytest.mark.parametrize("folder", ["ops"])
def test_what_needs_it_not_passes_without(hidden: dict[str, str], folder: str) -> None:
    done = run(hidden, "-m", "pytest", "-q", "--tb=short", f"tests/{folder}")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
