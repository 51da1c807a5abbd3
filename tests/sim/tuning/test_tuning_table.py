"""The table's rows are what they claim to be, and what a chip can run."""

import pathlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from interlace.runtime.core.limits import shared_bytes
from interlace.runtime.places.gpu.virtual_place import VirtualRankPlace
from interlace.runtime.tuning import (
    calibration,
    configuration,
    table,
    tuning,
)
from interlace.runtime.tuning.configuration import Configuration, gpu_default, why_not
from interlace.runtime.tuning.machine import Problem
from interlace.runtime.tuning.table import SHAPES, THRESHOLDS, TILES, Tile
from stand_ins.replaced import environment

ROOT = pathlib.Path(__file__).parents[3]
ITEMSIZE = {
    "fp32": 4,
    "16 bit": 2,
    "fp8": 1,
    "fp8 exact": 1,
    "fp8 fast": 1,
    "": 4,
    "packed": 1,
    "packed exact": 1,
    "packed fast": 1,
}
CAPABILITIES = {8: (80, 86, 87, 89), 9: (90,), 10: (100, 103), 12: (120, 121), "": (75, 110, 999)}
DTYPES = {"fp32": torch.float32, "16 bit": torch.bfloat16, "fp8 fast": torch.float8_e4m3fn}


def unfounded(source: str) -> str:
    """Return the fault in the source of a row; "" if there is none."""
    kind, _, text = source.partition(": ")
    if kind not in ("measured", "model", "published", "assumed") or not text:
        return f"{source!r} is of no kind"
    if kind == "measured":
        files = re.findall(r"benchmarks/results/\S+\.json", text)
        if not files or not all((ROOT / file).is_file() for file in files):
            return f"{source!r} names no result file that is there"
    if kind == "model" and "docs/explanation/model.md" not in text and "cost model" not in text:
        return f"{source!r} does not say which model"
    return ""


def test_every_row_says_where_it_comes_from() -> None:
    rows = [*TILES, *SHAPES, *THRESHOLDS]
    assert [wrong for row in rows if (wrong := unfounded(row.source))] == []


@pytest.mark.parametrize(
    "source",
    [
        "",
        "measured",
        "measured: on my machine",
        "measured: benchmarks/results/none.json",
        "model: x",
    ],
)
def test_an_unfounded_source_is_seen(source: str) -> None:
    assert unfounded(source)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.arch} {t.dtype} {t.extents} {t.rows}")
def test_a_chip_can_run_its_tiles(tile: Tile) -> None:
    made = Configuration(**tile.values)
    for capability in CAPABILITIES[tile.arch]:
        assert why_not(made, capability, ITEMSIZE[tile.dtype]) == ""
    if tile.arch == table.ANY:
        assert not made.descriptors


def test_what_a_chip_cannot_run_is_seen() -> None:
    large = gpu_default(90, torch.bfloat16, 4096)
    assert why_not(large, 90, 2) == ""
    assert "shared memory" in why_not(large, 86, 2)
    assert "shared memory" in why_not(replace(large, num_stages=6), 90, 2)
    assert "accumulators" in why_not(replace(large, num_warps=4), 90, 2)
    assert "power of two" in why_not(replace(large, block_k=48), 90, 2)
    assert "chunks" in why_not(replace(large, chunks=0), 90, 2)


@pytest.mark.parametrize("row", SHAPES, ids=lambda r: f"{r.op} {r.rows} {r.columns} {r.inner}")
def test_rows_for_shapes(row: table.Shape) -> None:
    known = set(Configuration.__dataclass_fields__)
    assert set(row.values) <= known and row.algorithm in ("", "fused", "pipelined", "unfused")
    for extent in (row.world, row.rows, row.columns, row.inner):
        assert extent & (extent - 1) == 0
    base = gpu_default(row.arch, DTYPES[row.dtype], row.rows)
    assert why_not(replace(base, **row.values), row.arch, ITEMSIZE[row.dtype]) == ""


def test_no_two_rows_for_one_thing() -> None:
    for rows in ([t[:7] for t in TILES], [s[:7] for s in SHAPES], [t[:2] for t in THRESHOLDS]):
        assert len(set(rows)) == len(rows)


def test_every_matmul_has_a_tile() -> None:
    kinds = [k for k in ITEMSIZE if k not in ("", "fp8")]
    for capability in (0, 75, 80, 86, 89, 90, 100, 103, 110, 120, 999):
        for dtype in kinds:
            for extents in ("even", "odd N", "odd K"):
                fitting = table.tiles(capability, dtype, extents)
                for rows in ("few", "many"):
                    assert [t for t in fitting if t.rows in (rows, "")], (capability, dtype)


def test_defaults_are_what_they_were() -> None:
    """Most figures of docs/explanation/model.md are about this chip."""
    many = gpu_default(90, torch.bfloat16, 4096)
    assert many == Configuration(
        block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3, copiers=8, chunks=4,
        epilogue_subtile=1, descriptors=True, flatten=True, output_descriptors=True, multimem=True,
    )  # fmt: skip
    assert not gpu_default(80, torch.bfloat16, 4096).multimem  # no multicast addresses before 9.0
    assert not gpu_default(75, torch.bfloat16, 4096).multimem
    staged = {"num_stages": 4, "epilogue_subtile": 4}
    assert gpu_default(90, torch.bfloat16, 64) == replace(many, block_m=64, num_warps=4, **staged)
    assert gpu_default(100, torch.bfloat16, 4096) == replace(many, **staged)
    odd = gpu_default(90, torch.float16, 4096, 4095)
    assert (odd.block_n, odd.block_k, odd.flatten, odd.num_stages) == (64, 16, False, 3)
    assert gpu_default(100, torch.float32, 8).epilogue_subtile == 2
    assert gpu_default(90, torch.float32, 8).epilogue_subtile == 1
    assert gpu_default(90, torch.float8_e4m3fn, 4096, fast_accum=False).block_n == 128


def test_candidates_are_all_valid_and_contain_the_default() -> None:
    for capability, dtype in ((80, torch.bfloat16), (90, torch.bfloat16), (100, torch.float32)):
        base = gpu_default(capability, dtype, 4096)
        found = list(configuration.tile_candidates(base, capability, dtype.itemsize))
        assert base in found and len(found) > 5
        assert {why_not(each, capability, dtype.itemsize) for each in found} == {""}


def test_an_unknown_chip_gets_what_fits_any() -> None:
    for capability in (70, 75, 110, 999):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            made = gpu_default(capability, dtype, 4096)
            needed = configuration.shared_needed(made, dtype.itemsize)
            assert needed <= shared_bytes(0) and not made.descriptors


def test_the_interpreter_covers_the_extents() -> None:
    made = configuration.interpreted_default(20, 100, 1000)
    assert (made.block_m, made.block_n, made.block_k, made.programs) == (32, 128, 256, 3)


def _calibrated(gb_per_s: float) -> tuning.GatherTime:
    line = calibration.LinkProtocol(0, 10.0, gb_per_s)
    return tuning.GatherTime(calibration.Link(0, 4, "all_gather", (line,)), "2026-11-22")


def test_the_model_has_the_links_that_were_calibrated() -> None:
    """Published links are faster than 75 GB/s. Slower links hide smaller sends, and links of 4 GB/s hide
    none.
    """
    problem = Problem("all_gather_matmul", torch.bfloat16, 4096, 2048, 8192, 4)
    assert _calibrated(100.0).link.received_gbs == 75.0
    published, slower, slow = (
        tuning.decide(90, problem, None, gather=gather)
        for gather in (None, _calibrated(100.0), _calibrated(5.0))
    )
    assert published.source.startswith("cost model: predicted")
    assert slower.source.startswith("cost model with links of 75 GB/s, calibrated 2026-11-22")
    assert slower.configuration.chunks > published.configuration.chunks
    assert slow.source == "default: the table's tiles for sm_90"


def test_calibrations_of_gpus_count_for_processes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "calibration.json"
    line = (calibration.LinkProtocol(0, 10.0, 100.0),)
    links = tuple(calibration.Link(0, 4, op, line) for op in calibration.OPS)
    mesh = calibration.MeasuredMesh(
        calibration.OWN, (4,), "2026-11-22", "2.13.0", "0.1.0", "cuda", links
    )
    calibration.add(mesh, file)
    here = {"world_size": 4, "device": torch.device("cpu"), "virtual": False, "simulated": False}
    process, of_nodes = (SimpleNamespace(**here, nodes=nodes) for nodes in (None, object()))
    with environment(**{calibration.VARIABLE: str(file)}):
        assert tuning.own_gather(process) == _calibrated(100.0)  # type: ignore[arg-type]
        assert tuning.own_gather(object.__new__(VirtualRankPlace)) is None  # they have no links
        assert tuning.own_gather(of_nodes) is None  # type: ignore[arg-type]
