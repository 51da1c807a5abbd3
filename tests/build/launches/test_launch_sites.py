"""Every launch site of the repository runs with a ``libcuda`` that does nothing, by Triton's launcher.

So an argument that a kernel lacks, an option that Triton does not know, or memory that nobody gives it is
found without a GPU. The lists in ``sites.txt`` are held against a search of the source: a new site fails
until a part of ``launches.py`` runs it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import launches
from cases.texts import texts_beside
from tiers import thorough

LISTS = {name: text.splitlines() for name, text in texts_beside(__file__, "sites.txt").items()}
ONE_OF_THEM = {site for sites in LISTS.values() for site in sites if site.endswith(" *")}
INTERPRETED = LISTS.pop("interpreted")

Report = dict[str, Any]


def run(folder: Path, *part: str) -> Report:
    done = subprocess.run(
        [sys.executable, launches.__file__, str(folder), *part], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile all kernels of the launch sites into a folder."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    return tmp_path_factory.mktemp("stub")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return run(folder)


@thorough
@pytest.mark.parametrize("part", LISTS)
def test_a_part_is_launched(part: str, report: Report) -> None:
    launched, wanted, problem = report["parts"][part]
    assert not problem and launched >= wanted, (launched, wanted, problem)


@thorough
@pytest.mark.parametrize("site", [site for sites in LISTS.values() for site in sites])
def test_a_site_is_run(site: str, report: Report) -> None:
    passed = {(file, line) for file, _, line in report["passed"]}
    lines = [
        (file, each.first_line) in passed
        for file, known in launches.found().items()
        for each in known
        if f"{file}::{each.name}" == site.removesuffix(" *")
    ]
    assert any(lines) if site in ONE_OF_THEM else all(lines), lines


@thorough
def test_a_launch_without_memory_for_descriptors_is_seen(folder: Path, report: Report) -> None:
    """Triton's launcher needs this memory; the launcher of the benchmarks once had none."""
    problem = run(folder, "without allocator")["parts"]["benchmarks"][2]
    assert "no allocator was set" in problem, problem


@thorough
def test_the_list_is_what_the_source_has() -> None:
    found = {f"{file}::{site.name}" for file, known in launches.found().items() for site in known}
    listed = {site.removesuffix(" *") for sites in LISTS.values() for site in sites}
    assert found == {*INTERPRETED, *listed}


@pytest.mark.parametrize(
    "line",
    [
        "kernel[(4,)](x)",
        "self.kernel[launch.extents](**launch.arguments)",
        "add[grid](x, y)",
        "def f(): launch = KernelLaunch(kernel, 1, {}, 'an op')",
        "kernel.warmup(x, grid=(1,))",
        "run(*grid, stream, function, x)",
        "function((4, 1, 1), (128, 1, 1), (x,), shared_mem=0)",
        "library.cuLaunchKernelEx(config)",
        "@triton.jit\ndef add(x):\n    pass\nadd[n](x)",
    ],
)
def test_a_new_site_would_be_found(line: str) -> None:
    assert len(list(launches.sites(line))) == 1


@pytest.mark.parametrize(
    "line", ["table[name](x)", "FOLDS[op, dtype](x)", "place.run(fn)", "view(*shape)", "a.custom()"]
)
def test_what_launches_nothing_is_left_alone(line: str) -> None:
    assert not list(launches.sites(line))


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@thorough
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_direct_way_hands_over_what_tritons_own_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", texts_beside(__file__)["launcher"], str(BENCHMARKS), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "the same" in done.stdout, done.stderr[-3000:]
