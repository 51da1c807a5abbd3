"""With torch, triton and numpy alone: what a GPU needs is there, and the rest says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiers import thorough

ROOT = Path(__file__).parents[3]

HIDING = """
import sys
for name in "rich matplotlib hypothesis cuda cupy greenlet llvmlite nvshmem".split():
    sys.modules[name] = None  # as if it were not installed, for find_spec too
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDING + script, str(ROOT)],
        capture_output=True,
        text=True,
    )


@thorough
def test_the_scripts_for_a_gpu_import() -> None:
    done = run(
        "sys.path[:0] = [sys.argv[1] + '/benchmarks', sys.argv[1] + '/tests']\n"
        "import interlace.cli.main, interlace.cli.commands.check, interlace.cli.commands.doctor\n"
        "import interlace.nn, interlace.tensor, interlace.integrations.megatron\n"
        "import gpu_host, gpu_overlap, gpu_shapes, host_cost, lone_rank, torch_pipelined\n"
        "import circumstances; print(circumstances.circumstances()['torch'])\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    done = run("sys.path.insert(0, sys.argv[1] + '/tests')\nfrom gpu import device_ranks\n")
    assert done.returncode == 0, done.stderr[-2000:]


@thorough
def test_the_commands_for_a_gpu_run() -> None:
    done = run(
        "from interlace.cli.main import run\n"
        "run(['doctor'])\n"
        "from interlace.cli.commands import check; from interlace.cli.output import consoles\n"
        "case = check.Case('all_reduce', 'copy', 1, 64, 0, 0, 'fp32', {'algorithm': 'copy'})\n"
        "verdict = check.Verdict(case, 0.5, 0.1)\n"
        "check.cases, check.run_case = lambda device: [case], lambda *rest: verdict\n"
        "print('code', check.check(consoles.new_console(), 'cpu'))\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "place cuda" in done.stdout and "code 0" in done.stdout
    assert "pass  all_reduce" in done.stdout


def test_what_needs_greenlet_says_so() -> None:
    done = run(
        "import torch, interlace\n"
        "try:\n"
        "    interlace.run(lambda: None, 2, place='sim')\n"
        "except interlace.PlaceUnavailableError as error:\n"
        "    print(error)\n"
    )
    assert "pip install greenlet" in done.stdout, (done.stdout, done.stderr[-2000:])
