"""Commands of the GitHub Action, of the pre-commit hook, and of rarely used targets of the Makefile."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

from tiers import thorough

ROOT = pathlib.Path(__file__).parents[2]
ACTION = (ROOT / ".github/actions/verify/action.yml").read_text()
FILE = """
import interlace

def quiet():
    interlace.barrier()

def wrong():
    raise ValueError("wrong on purpose")
"""
LITTLE = "--ranks 2 --seeds 1 --schedules 1"


def run(script: str, folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner's bash does, with this Python."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    if not (programs / "python").exists():
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
    here = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **here, **variables},
        capture_output=True,
        text=True,
    )


@thorough
def test_the_action_writes_findings_and_a_page(tmp_path: pathlib.Path) -> None:
    (script,) = re.findall(r"      run: \|\n((?:        .*\n)+)", ACTION)
    assert "${{" not in script, "what is pasted into a script is run by it"
    (tmp_path / "my kernel.py").write_text(FILE)
    (tmp_path / ".git").mkdir()
    outputs = tmp_path / "outputs"
    done = run(
        textwrap.dedent(script),
        tmp_path,
        TARGET="my kernel.py::wrong",
        ARGUMENTS=LITTLE,
        RUNNER_TEMP=str(tmp_path),
        GITHUB_OUTPUT=str(outputs),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    folder = pathlib.Path(outputs.read_text().strip().removeprefix("folder="))
    assert sorted(file.name for file in folder.iterdir()) == ["verify.html", "verify.sarif"]
    results = json.loads((folder / "verify.sarif").read_text())["runs"][0]["results"]
    for result in results:
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "my%20kernel.py"
        assert place["region"]["startLine"] == FILE[: FILE.index("raise")].count("\n") + 1
    assert results
    for name in ("TARGET", "ARGUMENTS"):
        assert f"{name}: ${{{{ inputs.{name.lower()} }}}}" in ACTION


@thorough
def test_the_hook_is_a_command(tmp_path: pathlib.Path) -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    (entry,) = re.findall(r"^  entry: (.*)$", hooks, re.MULTILINE)
    assert re.search(r"^- id: interlace-verify$", hooks, re.MULTILINE)
    assert re.search(r"^  pass_filenames: false$", hooks, re.MULTILINE)
    (tmp_path / "kernel.py").write_text(FILE)
    done = run(f"{entry} kernel.py::quiet {LITTLE}", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_format_mends_what_lint_refuses(tmp_path: pathlib.Path) -> None:
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "code.py").write_text("import sys\nimport os\nprint( os.name,sys.path )\n")
    here = ("-o", ".venv/test", f"PY={sys.executable}")  # and no .venv
    done = subprocess.run(
        [*shlex.split("make format"), *here], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    mended = "import os\nimport sys\n\nprint(os.name, sys.path)\n"
    assert (tmp_path / "code.py").read_text() == mended
