"""Every kernel compiles well for GPUs that this machine does not have, and a bad one is refused.

The entries compile once per session, in worker processes; Triton's cache keeps them between sessions.
"""

import functools
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from house import module_name
from interlace.cli.commands import build as command
from interlace.runtime.compiler.lint.faults import Fault
from interlace.runtime.compiler.lint.sass import Loop
from interlace.runtime.core.launch import join_leaves
from interlace.runtime.tuning.table import BUILDABLE
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import ARCHES, Entry
from support import mended
from tiers import few, thorough

HERE = pathlib.Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


entries = functools.cache(catalogue.entries)
SHIPPED = {
    (module_name("kernels" / file.relative_to(KERNELS)), name)
    for file in KERNELS.rglob("*.py")
    for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.MULTILINE)
}
"""The modules and names of the kernels."""


def shipped(arch: int) -> set[tuple[str, str]]:
    """Those that the catalogue has for ``arch``: old chips have no multimem instructions."""
    absent = [".multimem"] if arch < 90 else []
    absent += ["_roles_|sum_tiles"] if arch != 90 else []
    return {each for each in SHIPPED if not any(re.search(one, ".".join(each)) for one in absent)}


def representative(kernel: str, arch: int) -> Entry:
    return next(entry for entry in entries(arch) if entry.kernel == kernel)


CHOSEN = [(name, arch) for arch in (90, 100) for _, name in sorted(shipped(arch))]
CHOSEN.append(("all_gather_matmul_kernel", 80))
QUICK = [
    (name, 90)
    for name in ("all_gather_matmul_kernel", "matmul_reduce_scatter_kernel", "all_gather_kernel")
]


def mutant(kernel: str, types: dict[str, str], **constants: int) -> Entry:
    fixed = dict.fromkeys(constants, "constexpr")
    return Entry("mutant_kernels", kernel, "", 90, types | fixed, dict(constants))


MUTANTS = {
    "release without barrier": mutant(
        "publish_kernel", {"data_ptr": "*i32", "slot_ptr": "*i64", "epoch": "i64"}, BLOCK=1024
    ),
    "does not compile: TypeError": mutant("publish_kernel", {"data_ptr": "*i32"}),
    "does not compile: the compiler ended with code 7": replace(
        mutant("publish_kernel", {}), module="compiler_that_exits"
    ),
}


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], BuildReport]:
    """By name (of a mutant: what it must be accused of) and architecture; of the tests that run."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [(each.get("kernel"), each.get("arch")) for each in asked]
    names = [name for name in names if name in CHOSEN]
    folder = tmp_path_factory.mktemp("modules")
    (folder / "compiler_that_exits.py").write_text("import os\nos._exit(7)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.syspath_prepend(folder)
        made = build([*(representative(*name) for name in names), *MUTANTS.values()])
    names += [(name, 90) for name in MUTANTS]
    return dict(zip(names, made, strict=True))


@pytest.mark.parametrize(("kernel", "arch"), few(CHOSEN, *QUICK))
def test_kernel(kernel: str, arch: int, reports: dict[tuple[str, int], BuildReport]) -> None:
    report = reports[kernel, arch]
    assert report.problems() == []
    assert (report.stack, report.spills) == (0, 0)
    assert 0 < report.registers <= 255
    assert report.loops[0].depth == 0 < report.loops[0].instructions
    attends = "attention" in kernel and kernel != "merge_attention_kernel"
    if "K" in representative(kernel, arch).types or attends:
        assert report.tensor_cores
    else:
        assert report.tensor_cores is None


@pytest.mark.parametrize("accusation", MUTANTS)
def test_mutant_is_caught(accusation: str, reports: dict[tuple[str, int], BuildReport]) -> None:
    problems = reports[accusation, 90].problems()
    found = any(accusation in problem for problem in problems)
    assert found != mended(accusation), problems


@pytest.mark.skipif(mended("release without barrier"), reason="this Triton mends the mutant")
def test_mutant_is_caught_at_its_line(reports: dict[tuple[str, int], BuildReport]) -> None:
    lines = (HERE / "mutant_kernels.py").read_text().splitlines()
    line = next(
        i + 1 for i, text in enumerate(lines) if text.endswith("# faulty: release without barrier")
    )
    (problem,) = reports["release without barrier", 90].problems()
    assert problem.startswith(f"mutant_kernels.py:{line}: release without barrier: ")


@thorough
def test_what_another_copy_compiled_is_not_taken(tmp_path: pathlib.Path) -> None:
    """Its lines are in files that may no longer exist, so its functions would have no names."""
    code = (
        "from interlace.tools.catalogue import build, catalogue\n"
        "entries = [each for each in catalogue.entries(80) if each.name == 'handle_barrier']\n"
        "print(*(loop.where for loop in build.build(entries)[0].loops), sep='\\n')"
    )
    package = KERNELS.parent / "python/interlace"
    copy = tmp_path / "copy/interlace"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    found = []
    for place in (copy, package):
        settings = {"PYTHONPATH": str(place.parent), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.splitlines())
        shutil.rmtree(copy, ignore_errors=True)
    assert found[0] == found[1] and found[0][1].endswith(" in handle_barrier_kernel")


@pytest.mark.parametrize("arch", ARCHES)
def test_catalogue_covers_every_kernel(arch: int) -> None:
    listed = entries(arch)
    assert {(entry.module, entry.kernel) for entry in listed} == shipped(arch)
    assert len({entry.name for entry in listed}) == len(listed)


@pytest.mark.parametrize("arch", ARCHES)
def test_catalogue_names_all_arguments(arch: int) -> None:
    for entry in entries(arch):
        kernel = getattr(importlib.import_module(entry.module), entry.kernel)
        assert set(join_leaves(entry.types)) == set(kernel.arg_names), entry.name
        assert set(entry.divisible) <= set(entry.types), entry.name


def test_old_chips_have_no_descriptors() -> None:
    assert not any(entry.fixed.get("DESCRIPTORS") for entry in entries(80))
    assert any(entry.fixed.get("DESCRIPTORS") for entry in entries(90))


# -- the command -------------------------------------------------------------------------------

LOOPS = (Loop("k.py:3", 1, 20, barriers=2),)
GOOD = BuildReport(
    name="some kernel", arch=90, default=True, registers=80, tensor_cores=4, loops=LOOPS
)


class NothingBuilt:
    """Replaces the build of the command: keeps the kernels that it builds, and returns given reports."""

    def __init__(self) -> None:
        self.seen: list[Entry] = []
        self.reports: list[BuildReport] = []

    def build(self, wanted: list[Entry], on_report: object) -> list[BuildReport]:
        self.seen = wanted
        return self.reports


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> NothingBuilt:
    made = NothingBuilt()
    monkeypatch.setattr(command, "build_entries", made.build)
    monkeypatch.setattr(command, "linked_entries", lambda arch, folder: [])
    return made


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (GOOD, 0),
        (replace(GOOD, error="RuntimeError: no"), 1),
        (replace(GOOD, spills=2), 1),
        (replace(GOOD, stack=8), 1),
        (replace(GOOD, stack=8, default=False), 0),
        (replace(GOOD, stack=8, arch=80), 0),
        (replace(GOOD, tensor_cores=None), 0),
        (replace(GOOD, faults=(Fault("early load", "ld comes before the wait", "k.py:3"),)), 1),
    ],
)
def test_exit_code(report: BuildReport, code: int, built: NothingBuilt) -> None:
    built.reports.append(report)
    out = io.StringIO()
    assert command.build(Console(file=out, width=200), command.BuildOptions((90,))) == code
    name, variant = GOOD.name.split()
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert [name] in lines and any(line[:2] == [variant, str(report.arch)] for line in lines)
    out = io.StringIO()
    assert (
        command.build(Console(file=out, width=20), command.BuildOptions((90,), json=True)) == code
    )
    (facts,) = json.loads(out.getvalue())
    assert facts["name"] == "some kernel" and bool(facts["problems"]) == bool(code)
    assert facts["loops"] == [vars(LOOPS[0])]


@thorough
def test_every_architecture_that_may_be_named_is_built() -> None:
    wanted = [next(catalogue.signals(arch)) for arch in BUILDABLE]
    reports = build(wanted)
    assert {89, 120} < {report.arch for report in reports}
    assert not [report.problems() for report in reports if report.problems()]


def test_command_builds_the_catalogue(built: NothingBuilt) -> None:
    whole = command.BuildOptions((80, 90), full=True)
    assert command.build(Console(file=io.StringIO()), whole) == 0
    assert built.seen == [*catalogue.entries(80), *catalogue.entries(90)]
    every = {(each.kernel, each.arch) for each in built.seen if each.arch == 90}
    assert command.build(Console(file=io.StringIO()), command.BuildOptions()) == 0
    chosen = [(each.kernel, each.arch) for each in built.seen]
    assert len(chosen) == len(every) and set(chosen) == every
