"""The sdist makes a whole wheel, and installs and works in a new environment, away from the repository."""

import ast
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import interlace
from tiers import thorough

ROOT = pathlib.Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")
HOMES = {"interlace/kernels": "kernels", "interlace/runtime": "runtime", "": "python"}

SMOKE = """
import torch.distributed as dist
known = "interlace" in dist.Backend.backend_list  # by the entry point: nobody has imported interlace
import interlace, sys, torch
layer = lambda: interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)).sum().item()
print(known, interlace.__file__.startswith(sys.prefix), interlace.run(layer, 2))
"""


def call(*command: object, cwd: pathlib.Path) -> str:
    """Return the output of a command, which finds only an installed interlace."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def backend(step: str, *, source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Build with the backend of pyproject.toml without an index, as pip and build do."""
    code = f"from setuptools import build_meta; print(build_meta.{step}({str(out)!r}))"
    return out / call(sys.executable, "-c", code, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make an sdist of the repository, and unpack it."""
    folder = tmp_path_factory.mktemp("distributions")
    shutil.copytree(ROOT, folder / "repository", symlinks=True, ignore=LEFT_OUT)
    for hidden in (".ci", ".github"):
        shutil.copytree(ROOT / hidden, folder / "repository" / hidden)
    sdist = backend("build_sdist", source=folder / "repository", out=folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    for file in (
        "Makefile",
        ".ci/run",
        "setup.py",
        "docs/how-to/train/layers.md",
        "examples/tiny_gpt.py",
        "tests/support.py",
    ):
        assert (source / file).is_file(), f"the sdist has no {file}"
    return source


def test_the_wheel_has_every_file_and_no_other(
    source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    wheel = backend("build_wheel", source=source, out=tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    head, _, description = metadata.partition("\n\n")
    sources = set()
    for inside, home in HOMES.items():
        for file in (ROOT / home).rglob("*.py"):
            parts = file.relative_to(ROOT / home).parts
            if "__pycache__" not in parts and parts[:2] not in (
                ("interlace", "kernels"),
                ("interlace", "runtime"),
            ):
                sources.add("/".join(filter(None, (inside, *parts))))
    assert {name for name in names if name.endswith(".py")} == sources
    data = {f"interlace/data/{each.name}" for each in (ROOT / "python/interlace/data").iterdir()}
    stubs = {str(each.relative_to(ROOT / "python")) for each in (ROOT / "python").rglob("*.pyi")}
    assert {name for name in names if name.endswith(".pyi")} == stubs
    typed = {f"{each.split('/')[0]}/py.typed" for each in sources if "/" in each}
    assert {*typed, "interlace/data/report.html", *data} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "Requires-Python: >=3.10\n" in metadata
    for line in (
        "torch>=2.11",
        "triton>=3.6",
    ):  # and no upper bound: pip would replace a newer torch
        assert f"Requires-Dist: {line}\n" in metadata
    home = re.search(r"^Project-URL: Homepage, (.*)$", head, re.MULTILINE)
    assert home is not None
    links = re.findall(r"\]\((.*?)\)", description)
    assert f"{home[1]}/blob/main/docs/tutorials/start.md" in links
    assert all(link.startswith("https://") for link in links)


def test_the_version_and_the_pythons_are_the_same_everywhere() -> None:
    project, workflow = (
        (ROOT / file).read_text() for file in ("pyproject.toml", ".github/workflows/tests.yml")
    )
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert version is not None and version[1] == interlace.__version__
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    matrix = re.search(r"^ +python: (\[.*\])$", workflow, re.MULTILINE)
    assert matrix is not None and ast.literal_eval(matrix[1]) == pythons
    assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / "Makefile").read_text()
    home = "https://github.com/interlace-project/interlace"
    for file in ("pyproject.toml", "setup.py", "CITATION.cff", "SECURITY.md"):
        assert home in (ROOT / file).read_text(), file


@thorough
def test_an_index_would_take_it(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    here = ("-o", ".venv/dist", f"PY={sys.executable}", f"DIST={tmp_path}/dist")  # and no .venv
    said = call(*shlex.split("make dist"), *here, cwd=source)
    assert said.count("PASSED") == len(list((tmp_path / "dist").iterdir())) == 2


def new_environment(folder: pathlib.Path, project: pathlib.Path, command: str) -> pathlib.Path:
    """Make an environment with the same torch but no interlace, run ``command``, return its Python."""
    venv.create(folder / "new", symlinks=True)
    python = folder / "new/bin/python"
    inside = call(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # A line of a .pth file adds a folder, but not what that folder's own .pth files add.
    pathlib.Path(inside.strip(), "lent.pth").write_text("\n".join(lent) + "\n")
    pip, *install = shlex.split(command)
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    call(sys.executable, "-m", pip, "--python", python, *install, *offline, cwd=project)
    return python


@thorough
def test_type_checkers_follow_an_editable_installation(tmp_path: pathlib.Path) -> None:
    """The Makefile installs this way; type checkers cannot see modules behind an import hook."""
    pytest.importorskip("mypy")
    shutil.copytree(ROOT, tmp_path / "repository", symlinks=True, ignore=LEFT_OUT)
    python = new_environment(tmp_path, tmp_path / "repository", "pip install -e .")
    script = "import interlace, interlace.kernels.signal\nreveal_type(interlace.get_rank())\n"
    (tmp_path / "script.py").write_text(script)
    said = call(python, "-m", "mypy", "--cache-dir", tmp_path / "cache", "script.py", cwd=tmp_path)
    assert 'script.py:2: note: Revealed type is "int"' in said


@thorough
def test_it_installs_and_works_in_a_new_environment(
    source: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    python = new_environment(tmp_path, source, "pip install .")
    assert call(python, "-c", SMOKE, cwd=tmp_path).split() == ["True", "True", "[128.0,", "128.0]"]
    assert "place" in call(python, "-m", "interlace", "doctor", cwd=tmp_path).lower()
    assert "doctor" in call(tmp_path / "new/bin/interlace", "--help", cwd=tmp_path)
    call(sys.executable, "-m", "pip", "--python", python, "check", cwd=tmp_path)
