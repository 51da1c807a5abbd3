"""The matmul loops of the fused kernels are pipelined, as their PTX and resources show.

A loop that the compiler refuses to pipeline still compiles, spills nothing and breaks no rule; it is only
several times slower. The evidence is shared memory: a pipelined loop has its stages there. Kernels that
move, sum or norm rows have enough bytes in flight, as their SASS shows.
"""

import pathlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, MatmulVariant, entries
from mutants.mutant_checks import built_beside
from mutants.mutations import Edit, Mutant, importable
from sim.benchmark.model_support import module
from tiers import thorough

KERNELS = {
    "gather": catalogue.all_gather_matmul,
    "scatter": catalogue.matmul_reduce_scatter,
    "reduce": catalogue.matmul_all_reduce,
}
PLAIN, TRANSPOSED = MatmulVariant(), MatmulVariant(weight="nk")
FP8 = MatmulVariant("fp8e4nv", "nk", scales="row", fast_accum=False)
SPECIALIZED = MatmulVariant(weight="nk", overrides={"warp_specialize": True, "flatten": False})

# A signal after every tile, as the kernel must not have it.
SIGNALS = Mutant(
    "a signal after every tile",
    "kernels/matmul/matmul_reduce_scatter.py",
    (
        Edit("current_epoch, wait_credit\n", "current_epoch, publish, wait_credit\n"),
        Edit(
            "N, TILES, PARTIAL)\n",
            "N, TILES, PARTIAL)\n"
            "        complete_descriptor_stores(TILES.OUT_DESCRIPTOR and TILES.COMPILED)\n"
            "        publish(to_ptr.to(tl.pointer_type(tl.int64)) + number, number)\n",
        ),
    ),
)


def pipelined_entries() -> dict[str, Entry]:
    made = {}
    for arch in (90, 100):
        for name, make in KERNELS.items():
            made[f"{name} {arch}"] = make(arch, TRANSPOSED)
        made[f"gather kn {arch}"] = catalogue.all_gather_matmul(
            arch, replace(PLAIN, overrides=catalogue.BY_ENGINE)
        )
        made[f"gather fp8 {arch}"] = catalogue.all_gather_matmul(arch, FP8)
        made[f"specialized {arch}"] = catalogue.all_gather_matmul(arch, SPECIALIZED)
        made[f"specialized scatter {arch}"] = catalogue.matmul_reduce_scatter(arch, SPECIALIZED)
    # in four parts, so that what a tile is stored through is not taken for stages
    parts = replace(TRANSPOSED, overrides={"epilogue_subtile": 4})
    mutant = catalogue.matmul_reduce_scatter(90, parts)
    module = mutant.module.replace("interlace.kernels", SIGNALS.package)
    made["mutant"] = replace(mutant, module=module)
    return made


ENTRIES = pipelined_entries()
Built = tuple[Entry, BuildReport, str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    folder = tmp_path_factory.mktemp("pipelining")
    SIGNALS.write(folder)
    stems = [str(folder / name.replace(" ", "_")) for name in ENTRIES]
    with importable(folder):
        reports = build(list(ENTRIES.values()), artifacts=stems)
    yield {
        name: (ENTRIES[name], report, pathlib.Path(f"{stem}.ptx").read_text())
        for name, report, stem in zip(ENTRIES, reports, stems, strict=True)
    }


def stage_bytes(entry: Entry) -> int:
    block_m, block_n, block_k = (int(entry.fixed[f"BLOCK_{axis}"]) for axis in "MNK")
    itemsize = 1 if "fp8" in entry.types["input.ptr"] else 2
    return (block_m + block_n) * block_k * itemsize


PIPELINED = [name for name in ENTRIES if name != "mutant"]


@thorough
@pytest.mark.parametrize("name", PIPELINED)
def test_loops_are_pipelined(name: str, built: dict[str, Built]) -> None:
    """All stages are there; loads, and stores if they are to be, are by descriptor.

    On Hopper a product begins while another is running; the kernel waits for all only at the end of a tile.
    On Blackwell products are of its tensor memory.
    """
    entry, report, ptx = built[name]
    assert report.problems() == []
    assert entry.num_stages >= 3
    assert report.shared >= entry.num_stages * stage_bytes(entry)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global", ptx)
    stores = bool(re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx))
    assert stores == bool(entry.fixed.get("OUT_DESCRIPTOR"))
    hopper = name.endswith("90")
    assert ("wgmma.mma_async" in ptx, "tcgen05.mma" in ptx) == (hopper, not hopper)
    if "fp8" in name and hopper:  # each step's sum is added up outside of the tensor core
        assert ".f32.e4m3.e4m3" in ptx
    elif hopper:
        assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1;", ptx)


@thorough
def test_a_loop_that_is_not_pipelined_is_seen(built: dict[str, Built]) -> None:
    entry, report, _ = built["mutant"]
    assert report.problems() == []
    assert report.shared < 2 * stage_bytes(entry)


def test_which_tiles_leave_by_descriptor() -> None:
    """Tiles of the one-shot all-reduce do not, and tiles that specialized warps would publish do not."""
    by = {name: entry.fixed.get("OUT_DESCRIPTOR", False) for name, entry in ENTRIES.items()}
    assert by["gather 90"] and by["scatter 90"] and by["specialized 100"]
    assert not by["reduce 90"] and not by["specialized scatter 100"]


@thorough
def test_warps_are_specialized_on_blackwell_only(built: dict[str, Built]) -> None:
    """On Hopper, Triton 3.7 rejects such kernels if they wait, and otherwise ignores the option."""
    for name in ("specialized", "specialized scatter"):
        assert "setmaxnreg" in built[f"{name} 100"][2]
        assert "setmaxnreg" not in built[f"{name} 90"][2]
    assert "setmaxnreg" not in built["gather 100"][2]


@pytest.mark.thorough
def test_each_loop_has_enough_on_its_way() -> None:
    """A multiprocessor needs 32 KiB in flight, or 16 KiB of data that comes from a cache."""
    benchmark = module("rows_in_flight")
    rows = benchmark.counted()
    assert {row["kernel"].split()[0] for row in rows} == set(benchmark.KERNELS)
    few: list[dict[str, Any]] = [
        row
        for row in rows
        if row["function"] in benchmark.MOVE
        and row["bytes"] < benchmark.FLOOR // (1 + (row["function"] in benchmark.AGAIN))
    ]
    assert not few, few


SLOT_BY_SLOT = Mutant(
    "rows of one slot after the other",
    "kernels/experts/combine.py",
    (Edit("loop_unroll_factor=4", "loop_unroll_factor=1"),),
)


@pytest.mark.thorough
def test_control_slots_one_after_the_other_are_seen(tmp_path: pathlib.Path) -> None:
    (shipped,) = [each for each in entries(90) if each.name == "combine bf16 weighted"]
    reports = [report for (report,) in built_beside(SLOT_BY_SLOT, [shipped], tmp_path)]
    assert not any(report.error for report in reports), reports
    threads = 32 * shipped.num_warps
    # By file: a mutant that was compiled earlier has a path without a file.
    bytes_ = [
        max(loop.bytes_in_flight for loop in report.loops if loop.where.startswith("combine.py"))
        for report in reports
    ]
    floor = module("rows_in_flight").FLOOR
    assert bytes_[0] * threads >= floor > bytes_[1] * threads, bytes_
