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

SCRIPT = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import stub_libcuda
stub = stub_libcuda.install(Path(sys.argv[2]))
import torch
from interlace.kernels.collectives import reduction
from interlace.kernels import slots
from interlace.kernels.arguments import Peers, Workspace
from interlace.runtime.compat import triton_launcher
from interlace.runtime.places.gpu import launch as cuda_launch
from interlace.runtime.core.launch import leaves
from interlace.runtime.core.launch import KernelLaunch
stub_libcuda.activate()
kept = (ctypes.c_ulonglong * 64).in_dll(stub, "stub_kept")
grid = (ctypes.c_uint * 3).in_dll(stub, "stub_grid")
count = ctypes.c_long.in_dll(stub, "stub_launches")

def launches(direct):
    cache = cuda_launch.LaunchCache(torch.device("cpu"), lambda compiled: None)
    found = []
    table, data = torch.zeros(4, dtype=torch.int64), torch.zeros(64)
    for launch in (
        KernelLaunch(slots.finish_kernel, 1,
            {"peers": Peers(table, 3, 4)}, "a", num_warps=1),
        KernelLaunch(reduction.all_reduce_kernel, (5, 1, 1),
            {"workspace": Workspace(table, 3, 4, 8192, 1 << 33),
             "input_ptr": data, "output_ptr": data, "elements": 61, "BLOCK": 16, "AVERAGE": False}, "b"),
    ):
        prepared = cache.prepare(launch, 7, 0)
        compiled = prepared._compiled
        assert (compiled._direct is not None) == direct, compiled._direct
        integers = leaves(compiled.kernel.src.signature).values()
        types = [kind for kind in integers if kind != "constexpr"]
        ctypes.c_int.in_dll(stub, "stub_parameters").value = len(types)
        for values in (prepared.values, [v + 16 if v > 1 << 40 else v for v in prepared.values]):
            before = count.value
            prepared.again(7, 0, values)
            assert count.value == before + 1
            seen = [kept[i] & 0xFFFFFFFF if kind == "i32" else kept[i] for i, kind in enumerate(types)]
            given = [v for v, kind in zip(values, integers) if kind != "constexpr"]
            assert seen == given and len(given) >= 1, (seen, given)
            found.append((list(grid), types))
    return found

one = launches(True)
triton_launcher._launcher_class = lambda: None
other = launches(False)
assert one == other and one[2][0] == [5, 1, 1], (one, other)
print("the same")
"""


@thorough
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_direct_way_hands_over_what_tritons_own_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(BENCHMARKS), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "the same" in done.stdout, done.stderr[-3000:]
