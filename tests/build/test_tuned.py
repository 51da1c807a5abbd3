"""Rows of the tuning table and candidates of ``interlace tune``, compiled for chips that are not here.

The shared memory that they need is bounded by the arithmetic that refuses candidates.
"""

import pytest

from interlace.runtime.tuning import table
from interlace.runtime.tuning.configuration import (
    Configuration,
    shared_needed,
    tile_candidates,
    why_not,
)
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry, MatmulVariant
from tiers import thorough


def of_row(arch: int, dtype: str, extents: str, rows: str, number: int = 0) -> Configuration:
    """Return the configuration of a row of the table; ``number`` chooses one of several rows that fit."""
    fitting = [tile for tile in table.tiles(arch, dtype, extents) if tile.rows in (rows, "")]
    return Configuration(**fitting[number].values)


def entry(arch: int, configuration: Configuration, gather: bool) -> Entry:
    values = {**vars(configuration)}
    tma = bool(values["descriptors"])
    if gather:
        values |= catalogue.BY_ENGINE
    operands = MatmulVariant(tma=tma, overrides=values)
    if gather:
        return catalogue.all_gather_matmul(arch, operands)
    return catalogue.matmul_reduce_scatter(arch, operands)


FALLBACK = of_row(999, "16 bit", "even", "many")
FEW = of_row(90, "16 bit", "even", "few")
WIDE = Configuration(
    block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3, epilogue_subtile=2,
    flatten=True, output_descriptors=True,
)  # fmt: skip
SMALL = Configuration(block_m=64, block_n=64, block_k=64, num_warps=4, descriptors=False)
SMALL_90, SMALL_100 = (of_row(arch, "16 bit", "even", "many", 1) for arch in (90, 100))
CASES = {
    "tiles for a bad last wave on 9.0": (90, SMALL_90, True),
    "the same, scattered": (90, SMALL_90, False),
    "tiles for a bad last wave on 10.0": (100, SMALL_100, True),
    "the same on 10.0, scattered": (100, SMALL_100, False),
    "few rows on 9.0": (90, FEW, True),
    "any chip, on 8.0": (80, FALLBACK, True),
    "any chip, on 10.0": (100, FALLBACK, False),
    "a wide candidate on 9.0": (90, WIDE, False),
    "a small candidate on 8.0": (80, SMALL, True),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, BuildReport]:
    made = build([entry(*case) for case in CASES.values()])
    return dict(zip(CASES, made, strict=True))


@thorough
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_within_the_bounds(name: str, reports: dict[str, BuildReport]) -> None:
    arch, configuration, _ = CASES[name]
    report = reports[name]
    assert why_not(configuration, arch, 2) == ""
    assert report.problems() == []
    assert 0 < report.shared <= shared_needed(configuration, 2, arch)
    if name == "a wide candidate on 9.0":
        base = catalogue.MatmulVariant().configuration(90)
        found = tile_candidates(base, 90, 2)
        assert any(vars(each)["block_m"] == 256 and each.block_n == 128 for each in found)
