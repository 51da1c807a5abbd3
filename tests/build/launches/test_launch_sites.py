"""Every launch site of the repository runs with a ``libcuda`` that does nothing, through Triton's launcher.

So an argument that a kernel lacks, an option that Triton does not know, or memory that nobody gives it is
found without a GPU. The list below is held against a search of the source: a new site fails until a part of
``launches.py`` runs it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import launches
from tiers import thorough

OPS, PLACES = "python/interlace/ops", "runtime/places/gpu"
COMPAT = "runtime/compat/triton_launcher.py"
SITES = {
    "algorithms": [
        f"{OPS}/attention/decode.py::_merge",
        f"{OPS}/attention/decode.py::own_part",
        f"{OPS}/attention/key_transport.py::all_gather_attention_fused.body",
        f"{OPS}/attention/blocks.py::KernelBlocks._launch",
        f"{OPS}/experts/combine.py::Combine.fused.body",
        f"{OPS}/experts/dispatch.py::Dispatch.fused.body",
        f"{OPS}/experts/counted.py::CountedMatmul.fused.body",
        f"{OPS}/experts/grouped_combine.py::GroupedMatmulCombine.fused.body",
        f"{OPS}/matmul/launch_gather.py::all_gather_matmul_fused.body",
        f"{OPS}/experts/grouped.py::GroupedMatmul.fused.body",
        f"{OPS}/attention/head_exchange.py::FromHeads.fused.body",
        f"{OPS}/collectives/low_latency.py::run_words",
        f"{OPS}/collectives/launch.py::BySwitch._run.body",
        f"{OPS}/matmul/node_reduce.py::matmul_reduce_scatter.body",
        f"{OPS}/collectives/node_moves.py::Partners._launch",
        f"{OPS}/collectives/node_moves.py::all_gather.body",
        f"{OPS}/collectives/node_moves.py::reduce_scatter.launch",
        f"{OPS}/collectives/launch.py::enqueue_kernel.body",
        "python/interlace/tools/catalogue/catalogue.py::signals",
        "runtime/core/memory.py::Workspace.kernel_launch",
        f"{COMPAT}::direct",
        f"{COMPAT}::warmed_up",
        f"{PLACES}/launch.py::_Compiled.launch",
    ],
    "streams": [
        f"{PLACES}/device_place.py::DevicePlace._load_signals",
        f"{PLACES}/stream.py::DeviceStream._signal",
    ],
    "benchmarks": [
        "benchmarks/gpu_facts.py::Facts.launch",
        "benchmarks/gpu_probe.py::poll",
        "benchmarks/gpu_parts/timing.py::launch_now",
        "benchmarks/gpu_parts/lone_rank.py::LoneRank.consumer",
        "benchmarks/gpu_parts/lone_rank.py::LoneRank.copiers",
        "benchmarks/gpu_parts/lone_rank.py::LoneRank.copy_engine",
        "benchmarks/gpu_parts/lone_rank.py::LoneRank.finish",
    ],
    "examples": [
        "docs/examples/bench_kernel.py::one_shot.run",
        "docs/examples/one_shot_all_reduce.py::three_rounds",
    ],
    "bundles": ["python/interlace/aot.py::Kernel.launch"],
    "driver": [f"{PLACES}/driver.py::Driver.__init__"],
}
ONE_OF_THEM = (f"{COMPAT}::direct",)  # one for each known version of Triton
INTERPRETED = [
    "benchmarks/cpu/schedules.py::exchange",
    "python/interlace/symmetric_memory/handle.py::SymmetricMemory._run",
    "python/interlace/symmetric_memory/handle.py::SymmetricMemory.stream_write_value32",
    "python/interlace/verify/shims/cuda_driver.py::cuStreamWriteValue64",
    "python/interlace/verify/shims/triton_dist/nvshmem_host.py::putmem_signal_on_stream",
    "python/interlace/verify/suite/targets.py::_signals",
    "runtime/places/shm/user_launches.py::_Launches.launch",
    "runtime/places/sim/place.py::SimPlace.run_kernel",
    "runtime/places/sim/scheduler/program_hooks.py::ProgramHooks.launch",
]
"""On a CPU only: nothing there reaches a driver."""

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
    """With what was compiled."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    return tmp_path_factory.mktemp("stub")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return run(folder)


@thorough
@pytest.mark.parametrize("part", SITES)
def test_a_part_is_launched(part: str, report: Report) -> None:
    launched, wanted, problem = report["parts"][part]
    assert not problem and launched >= wanted, (launched, wanted, problem)


@thorough
@pytest.mark.parametrize("site", [site for part in SITES.values() for site in part])
def test_a_site_is_run(site: str, report: Report) -> None:
    passed = {(file, line) for file, _, line in report["passed"]}
    lines = [
        (file, each.first_line) in passed
        for file, known in launches.found().items()
        for each in known
        if f"{file}::{each.name}" == site
    ]
    assert any(lines) if site in ONE_OF_THEM else all(lines), lines


@thorough
def test_a_launch_without_memory_for_descriptors_is_seen(folder: Path, report: Report) -> None:
    """The control: Triton's launcher needs it, and that of the benchmarks once did not get it."""
    problem = run(folder, "without allocator")["parts"]["benchmarks"][2]
    assert "no allocator was set" in problem, problem


@thorough
def test_the_list_is_what_the_source_has() -> None:
    found = {f"{file}::{site.name}" for file, known in launches.found().items() for site in known}
    assert found == {*INTERPRETED, *(site for part in SITES.values() for site in part)}


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
