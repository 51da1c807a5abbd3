"""Rows and flags of the tuning table, and candidates of ``tune``, compiled for chips that are not here.

The shared memory that they need is bounded by the arithmetic that refuses candidates.
"""

import itertools
import pathlib
from dataclasses import replace

import pytest
import torch

import interlace
from cases.builds import compiled
from interlace.runtime.tuning import configuration, table
from interlace.runtime.tuning.configuration import (
    Configuration,
    shared_needed,
    tile_candidates,
    why_not,
    without_effect,
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
    operands = MatmulVariant(path="tma" if tma else "pointers", overrides=values)
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


OFF = {"flatten": False, "output_descriptors": False, "epilogue_subtile": 1}
OPERANDS = {
    "16 bit": MatmulVariant(),
    "16 bit few": MatmulVariant(rows=64),
    "fp8": MatmulVariant("fp8e4nv", "nk", scales="row", fast_accum=False),
    "fp8 fast": MatmulVariant("fp8e4nv", "nk", scales="row"),
    "fp8 few": MatmulVariant("fp8e4nv", "nk", scales="row", rows=64),
}
# a tile in one part does not fit beside four stages
FEWER = {"epilogue_subtile": {"num_stages": 2}}


def instructions(ptx: str) -> list[str]:
    return [line for line in ptx.splitlines() if "\t" in line and not line.lstrip().startswith(".")]


def with_and_without() -> dict[str, tuple[Entry, Entry]]:
    found = {}
    for arch, (name, operands) in itertools.product((80, 90, 100), OPERANDS.items()):
        chosen = operands.configuration(arch)
        for flag, off in OFF.items():
            if getattr(chosen, flag) != off and not (operands.scales and arch == 80):
                both = (
                    replace(operands, overrides={**FEWER.get(flag, {}), **value})
                    for value in ({}, {flag: off})
                )
                one, other = (catalogue.matmul_reduce_scatter(arch, each) for each in both)
                found[f"{name}, {flag}, sm_{arch}"] = one, other
    return found


@thorough
def test_every_flag_changes_the_code(tmp_path: pathlib.Path) -> None:
    pairs = with_and_without()
    assert len(pairs) > 12
    _, made = compiled(itertools.chain(*pairs.values()), tmp_path)
    texts = [instructions(ptx) for ptx in made]
    same = [name for name, a, b in zip(pairs, texts[::2], texts[1::2], strict=True) if a == b]
    assert not same


@pytest.mark.parametrize(
    ("capability", "warps", "refused"), [(90, 8, True), (90, 4, False), (100, 8, False)]
)
def test_it_is_refused_where_it_does_nothing(capability: int, warps: int, refused: bool) -> None:
    made = Configuration(warp_specialize=True, num_warps=warps)
    assert bool(without_effect(made, capability)) == refused


def test_who_asks_for_it_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "capability_of", lambda place: 90)

    def on_rank() -> None:
        with interlace.configured(warp_specialize=True):
            interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4), algorithm="fused")

    with pytest.raises(ValueError, match="warp_specialize does nothing on sm_90 with 8 warps"):
        interlace.run(on_rank, 2)
