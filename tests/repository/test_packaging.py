"""The package table matches the folders, imports go down the floors, and files keep their form."""

import pathlib
import re
import subprocess
import sys

import pytest

import order
import tiers
from tiers import thorough

ROOT = pathlib.Path(__file__).parents[2]
TOP = {
    "interlace": "python/interlace",
    "interlace.kernels": "kernels",
    "interlace.runtime": "runtime",
    "interlace_pytest": "python/interlace_pytest",
    "interlace_verify": "python/interlace_verify",
}
FOLDERS = ("python", "kernels", "runtime", "tests", "benchmarks")
MAX_LINES = 800
IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?= (?:import|as) |,|$)", re.MULTILINE)
ALLOWED = {  # beginnings of names
    "kernels": r"(__future__|collections\.abc|typing|triton|interlace\.kernels)\b",
    "runtime": r"(?!interlace\b(?!\.(runtime|kernels)\b))",
    "python": "",
}


def sources(*folders: str) -> list[pathlib.Path]:
    """Every Python file below ``folders``, once: the links inside python/ are not followed."""
    files = {f.resolve() for folder in folders for f in (ROOT / folder).rglob("*.py")}
    return sorted(f for f in files if "__pycache__" not in f.parts)


def upward_imports(source: str, floor: str) -> list[str]:
    """Imports that a file of ``floor`` (kernels, runtime, python) may not have.

    Relative imports hide the floor that they reach. A file under ``kernels`` or ``runtime`` without
    ``interlace`` before it is a second module object of ``python -m pytest`` at the root.
    """
    return [
        name
        for name in IMPORT.findall(source)
        if re.match(r"\.|(kernels|runtime)\b", name) or not re.match(ALLOWED[floor], name)
    ]


def form_faults(source: str) -> list[str]:
    """Return the faults in the outer form of one file."""
    faults = []
    if (lines := source.count("\n")) > MAX_LINES:
        faults.append(f"{lines} lines, more than {MAX_LINES}")
    said = re.match(r'r?"""(.+?)"""', source, re.DOTALL)
    if source.strip() and not said:
        faults.append("no module docstring")
    if said and said[1].startswith(("What ", "How ", "Whether ", "Which ")):
        faults.append("the first line is a question: it must say what the file is")
    if not source.isascii():
        faults.append("not ASCII")
    return faults


def folder_packages() -> dict[str, str]:
    """Package name -> folder, for every folder with an __init__.py, links not followed."""
    found = {}
    for package, folder in TOP.items():
        base = ROOT / folder
        for init in base.rglob("__init__.py"):
            below = init.parent.relative_to(base)
            if not any((base / p).is_symlink() for p in (below, *below.parents) if p.name):
                found[".".join((package, *below.parts))] = init.parent.relative_to(ROOT).as_posix()
    return found


def test_every_test_file_is_collected(request: pytest.FixtureRequest) -> None:
    """pytest skips folders with names like build and dist by default."""
    if request.config.args != ["tests"]:
        pytest.skip("only a part of the tests was asked for")
    collected = request.config.stash[order.FILES]
    files = set((ROOT / "tests").rglob("test_*.py"))
    assert files <= collected, sorted(map(str, files - collected))


def test_the_table_of_cases_names_functions_that_exist() -> None:
    for name, count in tiers.kept_cases().items():
        file, function = name.split("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(), name
        assert count >= 0


def test_every_folder_is_packaged() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(table["packages"]) == sorted(folder_packages())
    assert table["package-dir"] == {"": "python", **folder_packages()}
    assert sorted(table["py-modules"]) == sorted(
        each.stem for each in (ROOT / "python").glob("*.py")
    )


def test_links_point_home() -> None:
    for name in ("kernels", "runtime"):
        link = ROOT / "python/interlace" / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == ROOT / name


@pytest.mark.parametrize("floor", ["kernels", "runtime", "python"])
def test_floors_import_downwards(floor: str) -> None:
    found = {str(f.relative_to(ROOT)): upward_imports(f.read_text(), floor) for f in sources(floor)}
    assert not {f: bad for f, bad in found.items() if bad}


@pytest.mark.parametrize(
    ("floor", "bad"),
    [
        ("kernels", "import torch"),
        ("kernels", "def f():\n    from interlace.runtime import launch"),
        ("runtime", "from interlace import groups"),
        ("runtime", "import interlace"),
        ("runtime", "from . import memory"),
        ("python", "from kernels import signal"),
    ],
)
def test_upward_imports_are_seen(floor: str, bad: str) -> None:
    assert upward_imports(bad, floor)


@thorough
@pytest.mark.parametrize("control", ["", "gc.disable = lambda: None"])
def test_importing_looks_through_nothing_of_torch(control: str) -> None:
    """A full collection takes longer than the imports and finds nothing. With it ``import interlace`` took
    1.25 times the processor time of ``import torch``, without it 1.13.
    """
    code = f"""
import gc, sys, torch
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"] > 0))
{control}
import interlace
late = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "rich", "matplotlib", "llvmlite")
print(any(collections), gc.isenabled(), [name for name in late if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1] == f"{bool(control)} True []"


def test_form_of_every_file() -> None:
    found = {str(f.relative_to(ROOT)): form_faults(f.read_text()) for f in sources(*FOLDERS)}
    assert not {f: bad for f, bad in found.items() if bad}


@pytest.mark.parametrize(
    "bad",
    ["x = 1\n", '"""Long."""\n' + "\n" * MAX_LINES, '"""\u00e9"""\n', '"""What it does."""\n'],
)
def test_bad_form_is_seen(bad: str) -> None:
    assert form_faults(bad)
