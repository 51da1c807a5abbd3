"""A bundle runs in the place ``ptx`` by its manifest alone: the loader's launches, its PTX.

CuPy is stood for by ``cupy_stand_in.py``; here its launches are run.
"""

import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from interlace import aot
from interlace.cli.commands.build import write
from interlace.groups.groups import default_group
from interlace.runtime.compiler.bundle.bundle import BundleTarget
from interlace.runtime.compiler.bundle.ops import KernelOptions
from interlace.verify import launch_ptx
from stand_ins import cupy_stand_in

SMALL: dict[int, dict[str, Any]] = {  # by architecture; that for 9.0 loads and stores by TMA
    80: {"block_m": 16, "block_n": 16, "block_k": 16, "copiers": 1},
    90: {"block_m": 64, "block_n": 32, "block_k": 32, "copiers": 1, "output_descriptors": True},
}
ROWS, INNER, COLUMNS = 24, 32, 16


class Function:
    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(self, path: str) -> None:
        self.ptx = pathlib.Path(path).with_suffix(".ptx").read_text()

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        assert f".reqntid {block[0]}" in self.ptx
        launch_ptx(self.ptx, tuple(grid), *map(int, args), shared_bytes=shared_mem)


class Module(cupy_stand_in.RawModule):
    def get_function(self, name: str) -> Any:
        super().get_function(name)
        return Function(self._facts["path"])


@pytest.mark.thorough
@pytest.mark.parametrize("arch", SMALL)
def test_a_bundle_runs_by_its_manifest(
    arch: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = KernelOptions(rows=ROWS, columns=COLUMNS, inner=INNER, overrides=SMALL[arch])
    target = BundleTarget("all_gather_matmul", options, [arch], tmp_path / "bundle")
    assert not any(report.problems() for report in write([target]))
    monkeypatch.setitem(sys.modules, "cupy", cupy_stand_in)
    monkeypatch.setattr(cupy_stand_in, "RawModule", Module)
    monkeypatch.setattr(cupy_stand_in.cuda.Device, "compute_capability", str(arch))

    kept = []

    def alloc(nbytes: int) -> SimpleNamespace:
        """Scratch memory for tensor maps."""
        memory = torch.zeros(nbytes + 128, dtype=torch.uint8)
        default_group().place.announce(memory)
        kept.append(memory)
        return SimpleNamespace(ptr=memory.data_ptr() + -memory.data_ptr() % 128)

    monkeypatch.setattr(cupy_stand_in.cuda, "alloc", alloc)

    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        place, rank, world_size = default_group().place, interlace.get_rank(), 2
        bundle = aot.load(str(target.out))
        values = {
            **{"rank": rank, "world_size": world_size, "rows": [ROWS] * world_size},
            **{"N": COLUMNS, "K": INNER, "resident": 3},
        }
        space = bundle.workspace(values)
        buffer = place.allocate(space["buffer_bytes"])
        limit = bundle.manifest["workspace"]["header_words"]["spin_limit"]
        buffer.view(rank, 8 * limit, (1,), torch.int64).fill_(place.poll_limit())
        interlace.barrier()
        tables = {
            name: torch.tensor(bundle.evaluate(table, values), dtype=torch.int64)
            for name, table in bundle.manifest["tables"].items()
        }
        generator = torch.Generator().manual_seed(rank)
        shard, weight = (
            torch.randint(-4, 5, s, generator=generator).bfloat16()
            for s in ((ROWS, INNER), (INNER, COLUMNS))
        )
        output = torch.empty(world_size * ROWS, COLUMNS, dtype=torch.bfloat16)
        peers = torch.tensor(buffer.addresses, dtype=torch.int64)
        for tensor in (shard, weight, output, peers, *tables.values()):
            place.announce(tensor)  # the loader passes addresses, which say nothing of sizes
        for _ in range(2):
            output.fill_(7)
            arguments = {
                "peers_ptr": peers.data_ptr(),
                "slot_offset": space["slot_offset"],
                "data_offset": space["data_offset"],
                "input_ptr": shard.data_ptr(),
                "input_stride": INNER,
                "weight_ptr": weight.data_ptr(),
                "weight_stride_k": COLUMNS,
                "output_ptr": output.data_ptr(),
                **{name: table.data_ptr() for name, table in tables.items()},
            }
            bundle.run(values, arguments)
        return output, interlace.all_gather_matmul(shard, weight, algorithm="unfused")

    for output, expected in interlace.run(on_rank, 2, place="ptx"):
        assert torch.equal(output, expected)
