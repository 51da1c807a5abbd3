"""Reductions whose rows are normed, on ranks that are processes."""

import copy

import pytest
import torch

import interlace
from multi.norms import norm_ranks
from tiers import few


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
@pytest.mark.parametrize("quantize", few([False, True], True))
def test_every_op(algorithm: str, quantize: bool) -> None:
    """Uneven parts; "fused" is the kernel, interpreted."""
    found = interlace.run(norm_ranks.every_op, 2, algorithm, quantize, place="shm")
    assert found == [list(norm_ranks.OPS)] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_what_torch_does_not_unpickle_goes_to_ranks_and_comes_back(dtype: torch.dtype) -> None:
    given = torch.arange(6).view(2, 3).t().to(dtype)
    for found in interlace.run(copy.deepcopy, 2, {"rows": [given]}, place="shm"):
        (back,) = found["rows"]
        assert back.dtype == dtype and back.tolist() == given.tolist()
