"""The tuning table's rows, the cost model, and values of a configuration's fields."""

import pathlib
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import interlace
from interlace.runtime.core.context import current
from interlace.runtime.places.gpu.virtual_place import VirtualRankPlace
from interlace.runtime.tuning import calibration, configuration, table, tuning
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default, why_not
from interlace.runtime.tuning.table import CHIPS, GROUPED, INTERPRETED, SHAPES, THRESHOLDS, TILES
from interlace.runtime.tuning.tuning import Problem, decide
from ranks import ranks
from stand_ins.replaced import environment

ROOT = pathlib.Path(__file__).parents[3]
SMALL = [f"{kind}{how}" for kind in ("fp8", "packed") for how in ("", " exact", " fast")]
ITEMSIZE = {"fp32": 4, "16 bit": 2, "": 4, **dict.fromkeys(SMALL, 1)}
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
    if kind == "model" and "docs/reference/predictions.md" not in text and "cost model" not in text:
        return f"{source!r} does not say which model"
    return ""


def test_every_row_says_where_it_comes_from() -> None:
    rows = [*TILES, *SHAPES, *THRESHOLDS]
    assert [wrong for row in rows if (wrong := unfounded(row.source))] == []


@pytest.mark.parametrize(
    "source",
    ["", "measured", "measured: here", "measured: benchmarks/results/none.json", "model: x"],
)
def test_an_unfounded_source_is_seen(source: str) -> None:
    assert unfounded(source)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.arch} {t.dtype} {t.extents} {t.rows}")
def test_a_chip_can_run_its_tiles(tile: table.Tile) -> None:
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


def test_multicast_is_for_chips_that_have_its_addresses() -> None:
    assert gpu_default(90, torch.bfloat16, 4096).multimem
    for capability in (75, 80):
        assert not gpu_default(capability, torch.bfloat16, 4096).multimem


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


GATHER = Problem("all_gather_matmul", torch.bfloat16, 1024, 3584, 8192, 8)


def test_the_cost_model_prefers_what_it_should() -> None:
    chip, base = CHIPS[90], gpu_default(90, torch.bfloat16, 1024)
    by_engine, by_programs = replace(base, copiers=0, chunks=1), replace(base, copiers=8)
    engine_us = tuning.fused_us(chip, GATHER, by_engine)
    assert engine_us < tuning.fused_us(chip, GATHER, by_programs)
    # calls of the copy engine are issued by the host, which a tiny op does not hide
    tiny = replace(GATHER, rows=8, columns=128, inner=128)
    assert tuning.fused_us(chip, tiny, by_programs) < tuning.fused_us(chip, tiny, by_engine)
    small = replace(base, block_m=64, block_n=64)
    assert tuning.matmul_us(chip, GATHER, base) < tuning.matmul_us(chip, GATHER, small)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize(
    ("rows", "large", "small"), [(128, 1, 1), (256, 1, 2), (512, 2, 3), (1024, 3, 5), (2048, 5, 10)]
)
def test_tiles_are_chosen_by_waves(op: str, rows: int, large: int, small: int) -> None:
    """1280 columns on 8 ranks need waves of 128 x 256 and of 128 x 128 tiles on 132 SMs."""
    chip, problem = CHIPS[90], Problem(op, torch.bfloat16, rows, 1280, 8192, 8)
    base = replace(gpu_default(90, torch.bfloat16, rows), copiers=0, chunks=1)
    small_tile = replace(base, block_n=128)
    free = replace(chip, tile_us=0.0, chunk_us=0.0)
    times = [tuning.matmul_us(free, problem, each) for each in (base, small_tile)]
    assert times[0] / times[1] == pytest.approx(large / small * 2 * chip.small_tile_rate)
    chosen = decide(90, problem, None).configuration
    narrower = large > small * 1.05 / (2 * chip.small_tile_rate)
    assert chosen.block_n == (128 if narrower else 256)
    assert why_not(chosen, 90, 2) == ""


def test_what_a_chunk_costs_decides_how_many() -> None:
    chip = CHIPS[90]
    base = replace(gpu_default(90, torch.bfloat16, 2048), copiers=0)
    problem = replace(GATHER, rows=2048, columns=2048, world_size=4)
    each = [replace(base, chunks=chunks) for chunks in (1, 2, 4, 8)]

    def chosen(chunk_us: float) -> int:
        known = replace(chip, chunk_us=chunk_us, copy_us=0.0, link_gbs=300.0)
        return min(each, key=lambda one: tuning.fused_us(known, problem, one)).chunks

    found = [chosen(chunk_us) for chunk_us in (0.0, 10.0, 100.0)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1] == 1


def test_chunks_of_copiers_come_at_once() -> None:
    """With a copier for every peer all whole shards come last; halves do not."""
    base = replace(gpu_default(90, torch.bfloat16, 1024), copiers=7)
    quick = replace(CHIPS[90], copy_gbs=100.0, chunk_us=0.0)
    whole, halves = (
        tuning.fused_us(quick, GATHER, replace(base, chunks=chunks)) for chunks in (1, 2)
    )
    assert whole > halves


FIELDS = asdict(Configuration())
NUMBERS = [name for name, value in FIELDS.items() if type(value) is int]
BOOLS = [name for name, value in FIELDS.items() if type(value) is bool]
POWERS = [name for name in NUMBERS if name.startswith(("block_", "copy_"))]
SMALLEST = {
    "block_m": 16, "block_n": 16, "block_k": 16, "group_m": 1, "num_warps": 1, "num_stages": 1,
    "copiers": 0, "copy_rows": 1, "copy_columns": 16, "chunks": 1, "programs": 0, "block_elements": 1,
    "epilogue_subtile": 1,
}  # fmt: skip

WRONG: list[tuple[str, Any, type[Exception]]] = [
    *[(name, value, TypeError) for name in NUMBERS for value in ("64", 64.0, None, [1], True)],
    *[(name, numpy.int64(16), TypeError) for name in NUMBERS],
    *[(name, value, TypeError) for name in BOOLS for value in (1, 0, "yes", None)],
    *[(name, SMALLEST[name] - 1, ValueError) for name in NUMBERS],
    *[(name, value, ValueError) for name in NUMBERS for value in (-512, 1 << 40)],
    *[(name, 48, ValueError) for name in POWERS],
    *[("num_warps", value, ValueError) for value in (3, 32)],
    *[("epilogue_subtile", value, ValueError) for value in (3, 8)],
]


def test_all_fields_are_here() -> None:
    assert set(NUMBERS) == set(SMALLEST) and set(NUMBERS) | set(BOOLS) == set(FIELDS)


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_a_value_that_cannot_be_is_named(name: str, value: Any, error: type[Exception]) -> None:
    entered = False
    with pytest.raises(error) as said:  # noqa: SIM117 - of entering, not of what is in it
        with interlace.configured(**{name: value}):
            entered = True
    assert not entered and current().overrides == ()
    text = str(said.value)
    assert text.startswith(f"{name} is {value!r}") and "must be" in text


def test_a_generator_s_block_may_end_within_another() -> None:
    def configured() -> Iterator[None]:
        with interlace.configured(block_m=64):
            yield

    generator = configured()
    next(generator)
    with interlace.timeout(5):
        assert current().overrides == (("block_m", 64),)
        assert next(generator, None) is None
        assert (current().overrides, current().bound_seconds) == ((), 5)
    assert (current().overrides, current().bound_seconds) == ((), None)


def test_a_name_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"'block_q' is not a field .* block_m, block_n"):
        check_values({"block_q": 16})


@pytest.mark.parametrize("name", NUMBERS)
@ranks(2, place="sim")
def test_the_smallest_value_is_right(name: str) -> None:
    x, w = torch.ones(5, 19) * (interlace.get_rank() + 1), torch.ones(19, 33)
    summed = torch.ones(50)
    with interlace.configured(**{name: SMALLEST[name]}):
        gathered = interlace.all_gather_matmul(x, w, algorithm="fused")
        scattered = interlace.matmul_reduce_scatter(torch.ones(4, 19), w, algorithm="fused")
        interlace.all_reduce(summed, algorithm="kernel")
    expected = torch.tensor([19.0, 38.0]).repeat_interleave(5)[:, None].expand(10, 33)
    assert gathered.eq(expected).all() and scattered.eq(38).all() and summed.eq(2).all()


def test_the_table_has_only_values_that_can_be() -> None:
    for row in (*TILES, *SHAPES):
        check_values(row.values)
    for values in (*GROUPED.values(), table.SENDING, table.SENDING_FP32):
        check_values(values)
    check_values(table.INTERPRETED_VALUES)
    for name, bounds in INTERPRETED.items():
        for value in bounds:
            check_values({name: value})
    check_values(FIELDS)


def test_a_part_of_a_tile_has_columns_enough() -> None:
    """An override of one field may not make another field impossible."""
    made = replace(gpu_default(100, torch.bfloat16, 4096), block_n=16)
    assert made.epilogue_subtile == 4 and made.stored_parts == 1
    assert replace(made, block_n=32).stored_parts == 2
    assert replace(made, block_n=256).stored_parts == 4


def test_an_activation_has_few_numbers_alive() -> None:
    made = gpu_default(90, torch.bfloat16, 4096)
    assert (made.stored_parts, made.activated_parts) == (1, 4)
    assert replace(made, block_n=128).activated_parts == 2
    assert replace(made, block_n=128, num_warps=4).activated_parts == 4
    assert replace(made, block_m=16, block_n=16).activated_parts == 1
    assert gpu_default(90, torch.float32, 4096).activated_parts == 1
