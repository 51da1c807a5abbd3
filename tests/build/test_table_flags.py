"""Flags of the table's tiles: each changes what is compiled, on every architecture where a tile has it."""

import itertools
import pathlib
from dataclasses import replace

import pytest
import torch

import interlace
from cases.builds import compiled
from interlace.runtime.tuning import configuration
from interlace.runtime.tuning.configuration import Configuration, without_effect
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.catalogue import Entry, MatmulVariant
from tiers import thorough

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
    """By architecture, operands and flag."""
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


@thorough
def test_warp_specialization_by_eight_warps_changes_nothing_on_sm_90(
    tmp_path: pathlib.Path,
) -> None:
    """So it is refused there. If Triton begins to use it, this test fails."""
    plain = MatmulVariant(layout="nk", overrides={"flatten": False})
    special = replace(plain, overrides={"flatten": False, "warp_specialize": True})
    entries = [catalogue.all_gather_matmul(90, each) for each in (plain, special)]
    _, (one, other) = compiled(entries, tmp_path)
    assert instructions(one) == instructions(other)


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
