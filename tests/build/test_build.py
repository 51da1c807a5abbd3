"""Every kernel compiles well for GPUs that this machine does not have.

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
from unittest import mock

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
from tiers import few, thorough

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"


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


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> dict[tuple[str, int], BuildReport]:
    """By name and architecture; of the tests that run."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [(each.get("kernel"), each.get("arch")) for each in asked]
    names = [name for name in names if name in CHOSEN]
    return dict(zip(names, build([representative(*name) for name in names]), strict=True))


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


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands for the build of the command, and builds nothing."""
    builder = mock.Mock(return_value=[])
    monkeypatch.setattr(command, "build_entries", builder)
    monkeypatch.setattr(command, "linked_entries", lambda arch, folder: [])
    return builder


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
def test_exit_code(report: BuildReport, code: int, builder: mock.Mock) -> None:
    builder.return_value = [report]
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


def test_command_builds_the_catalogue(builder: mock.Mock) -> None:
    whole = command.BuildOptions((80, 90), full=True)
    assert command.build(Console(file=io.StringIO()), whole) == 0
    built = builder.call_args.args[0]
    assert built == [*catalogue.entries(80), *catalogue.entries(90)]
    every = {(each.kernel, each.arch) for each in built if each.arch == 90}
    assert command.build(Console(file=io.StringIO()), command.BuildOptions()) == 0
    chosen = [(each.kernel, each.arch) for each in builder.call_args.args[0]]
    assert len(chosen) == len(every) and set(chosen) == every
