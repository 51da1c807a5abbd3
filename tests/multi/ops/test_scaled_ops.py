"""The fused ops on fp8 operands with scales, against float64."""

import pytest

import interlace
from multi.ops import scaled_ranks
from support import SCALES_BY_ROW

pytestmark = pytest.mark.skipif(
    not SCALES_BY_ROW, reason="before torch 2.12 a CPU multiplies no rows with scales"
)


@pytest.mark.parametrize("world_size", [2, 3])
def test_results(world_size: int) -> None:
    """A scale of a row comes with the row, a bias is added once, graphs know shapes and strides."""
    traced = world_size == 2
    for found in interlace.run(scaled_ranks.results, world_size, traced, place="shm"):
        assert len(found) == (10 + 7) * (1 + traced)
        assert {case: what for case, what in found.items() if what} == {}


def test_compiled() -> None:
    assert interlace.run(scaled_ranks.compiled, 2, place="shm") == [[True, True]] * 2


def test_misuse_is_known_to_all() -> None:
    words = (
        "float8_e4m3fn",
        "input_scale must have",
        "weight_scale must have",
        "contracted",
        "is by row",
        "must be float32",
        "sum, avg",
    )
    for said in interlace.run(scaled_ranks.refused, 2, place="shm"):
        assert all(word in each for word, each in zip(words, said, strict=True)), said
