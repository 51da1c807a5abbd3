"""The layout that ``house.py`` plans, and the independence of ``interlace`` from ``interlace_verify``."""

import ast
import os
import pathlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest

import house
import pages
from tiers import thorough

FILES = house.sources()
TEXTS = {module: (house.ROOT / file).read_text() for module, file in FILES.items()}
REGISTERS = ("interlace.compile",)  # faces that tell torch of what they hand on

# both public, of a bundle and to measure; a lease, and the same as an argument of kernels
NAMED_TWICE = ["Kernel", "Workspace"]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    return house.edges(TEXTS)


def forbidden(graph: dict[str, set[str]], plan: dict[str, str]) -> list[str]:
    """Imports between folders that are not on the list of the importing folder."""
    found = []
    for folder, targets in graph.items():
        allowed = plan.get(folder, "").split()
        free = not folder.startswith("kernels")
        for target in targets:
            if target not in allowed and not (free and target.startswith("kernels")):
                found.append(f"{folder} -> {target}")
    return sorted(found)


def unused(graph: dict[str, set[str]], plan: dict[str, str]) -> list[str]:
    """Return the permitted imports of a folder of the plan that it does not have."""
    return [
        f"{folder} -> {name}"
        for folder, allowed in plan.items()
        for name in allowed.split()
        if name not in graph.get(folder, ())
    ]


def upward(plan: dict[str, str]) -> list[str]:
    """Return the permitted imports of a folder that are later in the plan, or not in it."""
    above: set[str] = set()
    found = []
    for folder, allowed in plan.items():
        found += [f"{folder} -> {name}" for name in allowed.split() if name not in above]
        above.add(folder)
    return found


def named_twice(texts: Iterable[str]) -> list[str]:
    """Return names of several classes, or of a class and another type, in all files."""
    classes, others = Counter[str](), Counter[str]()
    for text in texts:
        for node in ast.walk(house.parsed(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")] += 1
            elif isinstance(node, ast.Assign):
                others.update(to.id.lstrip("_") for to in node.targets if isinstance(to, ast.Name))
    return sorted(name for name, count in classes.items() if count + others[name] > 1)


def more_than_words(text: str, *, may_hand_on: bool) -> list[str]:
    """Return statements of an ``__init__.py`` beside its docstring, imports and ``__all__``."""
    first, *rest = house.parsed(text).body
    assert isinstance(first, ast.Expr), "no docstring"
    if may_hand_on:
        handing = (ast.Import, ast.ImportFrom, ast.Assign)
        rest = [node for node in rest if not isinstance(node, handing)]
    return [ast.unparse(node) for node in rest]


def test_imports_are_on_the_list(graph: dict[str, set[str]]) -> None:
    folders = house.folder_edges(FILES, graph)
    assert forbidden(folders, house.FOLDERS) == []
    assert sorted(folders) == sorted(house.FOLDERS), "a folder without a line, or a line too many"
    assert unused(folders, house.FOLDERS) == []
    assert forbidden({"a": {"b"}}, {"a": "", "b": ""}) == ["a -> b"]
    assert unused({"a": {"b"}}, {"a": "b c"}) == ["a -> c"]
    assert not forbidden({"a": {"b", "kernels/matmul"}}, {"a": "b", "b": ""})
    assert forbidden({"kernels": {"kernels/matmul"}}, {"kernels": ""})


def test_the_list_goes_down_only() -> None:
    assert upward(house.FOLDERS) == []
    assert upward({"a": "", "b": "a", "c": "d", "d": ""}) == ["c -> d"]


def test_no_circles(graph: dict[str, set[str]]) -> None:
    assert house.circles(graph) == []
    assert house.circles(house.folder_edges(FILES, graph)) == []


def test_no_circle_of_benchmarks() -> None:
    folder = house.ROOT / "benchmarks"
    paths = {file.relative_to(folder).with_suffix(""): file for file in folder.rglob("*.py")}
    texts = {".".join(name.parts): file.read_text() for name, file in paths.items()}
    graph = house.edges(texts)
    assert graph["predict"] >= {"model.tables", "model.simulation.machines"}
    assert house.circles(graph) == []


def test_circles_are_seen() -> None:
    chain = {"p.a": "import p.b", "p.b": "from p import c", "p.c": "from p.a import f", "p.d": ""}
    assert house.circles(house.edges(chain)) == [["p.a", "p.b", "p.c"]]
    inside = {"p.a": "import p.b", "p.b": "def f():\n    import p.a"}
    assert house.circles(house.edges(inside)) == [["p.a", "p.b"]]
    typing = {"p.a": "import p.b", "p.b": "if TYPE_CHECKING:\n    from p.a import T"}
    assert house.circles(house.edges(typing)) == [["p.a", "p.b"]]
    by_name = {"p.a": "import p.b", "p.b": "def f():\n    importlib.import_module('p.a')"}
    assert house.circles(house.edges(by_name)) == [["p.a", "p.b"]]
    through_package = {"p": "from p.a import f", "p.a": "from p import g"}
    assert house.circles(house.edges(through_package)) == [["p", "p.a"]]
    files = {"p.a": "x/a", "p.b": "y/b", "p.c": "x/c", "p.d": "y/d"}
    paths = {module: pathlib.PurePath(file + ".py") for module, file in files.items()}
    between = house.edges({"p.a": "import p.b", "p.b": "", "p.c": "", "p.d": "import p.c"})
    assert house.circles(between) == []
    assert house.circles(house.folder_edges(paths, between)) == [["x", "y"]]


def test_faces_only_hand_on() -> None:
    for module, file in FILES.items():
        if file.name == "__init__.py" and module not in ("interlace", *REGISTERS):
            # but for the one path by which kernel authors know the product of a tile
            low = file.parts[0] in ("kernels", "runtime") and module != "interlace.kernels.matmul"
            assert more_than_words(TEXTS[module], may_hand_on=not low) == [], file
    assert more_than_words('"""Words."""\nimport torch', may_hand_on=False)
    assert more_than_words('"""Words."""\nprint()', may_hand_on=True)
    assert not more_than_words('"""Words."""\nfrom a import b\n__all__ = ["b"]', may_hand_on=True)


def test_a_name_is_of_one_class() -> None:
    assert named_twice(TEXTS.values()) == NAMED_TWICE
    assert named_twice(["class Part: ...", "def f():\n    class _Part: ..."]) == ["Part"]
    assert named_twice(["class Segment: ...\nSegment = tuple[int, int]"]) == ["Segment"]
    assert not named_twice(["class Part: ...", "class RingPart: ...\npart = Part()"])


def test_folders_are_not_crowded() -> None:
    counts = house.files_in([*FILES.values(), *house.beside()])
    assert counts["tests/sim/cuda"] and counts["benchmarks/cpu"]
    assert not {folder: n for folder, n in counts.items() if n > house.MOST_FILES}
    many = [pathlib.PurePath(f"x/{n}.py") for n in range(house.MOST_FILES + 1)]
    assert house.files_in([*many, pathlib.PurePath("x/__init__.py")]) == {"x": len(many)}


def test_graph_and_picture_are_of_this_list() -> None:
    assert f"```\n{house.graph_text()}```" in (house.ROOT / "docs/explanation/house.md").read_text()
    picture = (house.ROOT / "docs/images/house.svg").read_text()
    assert picture == house.drawing(), "python tests/house.py --draw"


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
def hidden(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder from which programs cannot import the package."""
    there = tmp_path / "interlace_verify/__init__.py"
    there.parent.mkdir()
    there.write_text("raise ModuleNotFoundError('not installed', name=__name__)\n")
    return tmp_path


def test_it_is_missed_only_by_what_needs_it(hidden: pathlib.Path) -> None:
    (hidden / "program.py").write_text(PROGRAM)
    printed = pages.run_python(["program.py"], hidden)
    said = [line for line in printed.splitlines() if SAID in line]
    assert [line.split()[0] for line in said] == ["module", "place", "kernel"], printed
    errors = (hidden / ".errors").read_text()
    assert SAID in " ".join(errors.split()) and "Traceback" not in errors


@thorough
@pytest.mark.parametrize("folder", ["ops"])
def test_what_needs_it_not_passes_without(hidden: pathlib.Path, folder: str) -> None:
    path = os.pathsep.join(map(str, (hidden, ROOT / "python", ROOT / "tests", ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"tests/{folder}"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
