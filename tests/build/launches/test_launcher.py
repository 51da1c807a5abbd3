"""Launches use Triton's launcher; those that avoid its Python half pass the same arguments.

They run in a separate process with a ``libcuda`` that does nothing: see ``benchmarks/stub_libcuda.py``.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiers import thorough

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
