"""Targets of the Makefile that nothing else in continuous integration runs, with the tests' Python."""

import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


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
