"""The cost model: times for waves, for chunks, and for who sends them."""

from dataclasses import replace

import pytest
import torch

from interlace.runtime.tuning import machine
from interlace.runtime.tuning.configuration import gpu_default, why_not
from interlace.runtime.tuning.machine import Problem
from interlace.runtime.tuning.table import CHIPS
from interlace.runtime.tuning.tuning import decide

GATHER = Problem("all_gather_matmul", torch.bfloat16, 1024, 3584, 8192, 8)


def test_the_cost_model_prefers_what_it_should() -> None:
    chip, base = CHIPS[90], gpu_default(90, torch.bfloat16, 1024)
    by_engine, by_programs = replace(base, copiers=0, chunks=1), replace(base, copiers=8)
    engine_us = machine.fused_us(chip, GATHER, by_engine)
    assert engine_us < machine.fused_us(chip, GATHER, by_programs)
    # calls of the copy engine are issued by the host, which a tiny op does not hide
    tiny = replace(GATHER, rows=8, columns=128, inner=128)
    assert machine.fused_us(chip, tiny, by_programs) < machine.fused_us(chip, tiny, by_engine)
    small = replace(base, block_m=64, block_n=64)
    assert machine.matmul_us(chip, GATHER, base) < machine.matmul_us(chip, GATHER, small)


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
    times = [machine.matmul_us(free, problem, each) for each in (base, small_tile)]
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
        return min(each, key=lambda one: machine.fused_us(known, problem, one)).chunks

    found = [chosen(chunk_us) for chunk_us in (0.0, 10.0, 100.0)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1] == 1


def test_chunks_of_copiers_come_at_once() -> None:
    """With a copier for every peer all whole shards come last; halves do not."""
    base = replace(gpu_default(90, torch.bfloat16, 1024), copiers=7)
    quick = replace(CHIPS[90], copy_gbs=100.0, chunk_us=0.0)
    whole, halves = (
        machine.fused_us(quick, GATHER, replace(base, chunks=chunks)) for chunks in (1, 2)
    )
    assert whole > halves
