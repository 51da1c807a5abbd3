"""Reductions whose rows are normed, on ranks that are processes."""

import pytest

import interlace
from multi.norms import norm_ranks
from tiers import few


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
@pytest.mark.parametrize("quantize", few([False, True], True))
def test_every_op(algorithm: str, quantize: bool) -> None:
    """Uneven parts; "fused" is the kernel, interpreted."""
    found = interlace.run(norm_ranks.every_op, 2, algorithm, quantize, place="shm")
    assert found == [list(norm_ranks.OPS)] * 2
