"""With torch, triton and numpy alone: what a GPU needs is there, and the rest says what to install."""

import subprocess
import sys
from pathlib import Path

from tiers import thorough

ROOT = Path(__file__).parents[3]

HIDING = """
import sys
sys.path[:0] = [f"{sys.argv[1]}/{folder}" for folder in ("tests", "benchmarks", "python")]
from stand_ins import bare
bare.refuse()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDING + script, str(ROOT)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@thorough
def test_the_scripts_for_a_gpu_import() -> None:
    done = run(
        "import interlace.cli.main, interlace.cli.commands.check, interlace.cli.commands.doctor\n"
        "import interlace.nn, interlace.tensor, interlace.integrations.megatron\n"
        "import gpu_facts, gpu_probe, host_cost\n"
        "from gpu_parts import host, lone_rank, overlap, shapes, timing\n"
        "import circumstances; print(circumstances.circumstances()['torch'])\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]


@thorough
def test_the_tests_for_a_gpu_are_found() -> None:
    done = run(
        "import pytest\n"
        "sys.path.remove(sys.argv[1] + '/benchmarks')  # which has a gpu.py\n"
        "sys.exit(pytest.main(['-q', '--collect-only', 'tests/gpu']))\n"
    )
    assert done.returncode == 0 and "tests collected" in done.stdout, done.stdout[-2000:]


def test_what_is_not_there_is_refused() -> None:
    """Only imports of the project are refused, also of modules that other code has imported."""
    done = run(
        "import filelock\n"
        "for file in ('runtime/a.py', '.venv/lib/python3/site-packages/a.py'):\n"
        "    try:\n"
        "        exec('import filelock', {'__file__': f'{sys.argv[1]}/{file}'})\n"
        "        print('taken')\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
    )
    assert done.stdout.splitlines() == ["No module named 'filelock'", "taken"], done.stderr[-2000:]


@thorough
def test_the_commands_for_a_gpu_run() -> None:
    done = run(
        "from interlace.cli.main import run\n"
        "run(['doctor'])\n"
        "from interlace.cli.commands import check; from interlace.output import consoles\n"
        "verdict = check.Verdict(check.cases('cpu')[0], 0.5, 0.1)\n"
        "check.cases = lambda device, has_roles: [verdict.case]\n"
        "check.run_case = lambda *rest: verdict\n"
        "print('code', check.check(consoles.new_console(), check.CheckOptions('cpu')))\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "place cuda" in done.stdout and "code 0" in done.stdout
    assert "pass  all_gather_matmul" in done.stdout


def test_what_needs_greenlet_says_so() -> None:
    done = run(
        "import torch, interlace\n"
        "try:\n"
        "    interlace.run(lambda: None, 2, place='sim')\n"
        "except interlace.PlaceUnavailableError as error:\n"
        "    print(error)\n"
    )
    assert "pip install greenlet" in done.stdout, (done.stdout, done.stderr[-2000:])
