"""Reductions whose rows are normed, on ranks that are processes."""

import copy
from typing import Any

import pytest
import torch

import interlace
from sim.norms.test_norms import OPS, Case, check
from tiers import few


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
@pytest.mark.parametrize("quantize", few([None, "fp8"], "fp8"))
def test_every_op(algorithm: str, quantize: str | None) -> None:
    """5 rows cannot be shared evenly by any two ranks. "fused" is the kernel."""
    how: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": quantize}
    for op in OPS:
        case = Case(op, algorithm, 2, (5,), 24, 8, gather="scatter" in op, **how)
        check(case, interlace.run(case.call, case.world, place="shm"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_what_torch_does_not_unpickle_goes_to_ranks_and_comes_back(dtype: torch.dtype) -> None:
    given = torch.arange(6).view(2, 3).t().to(dtype)
    for found in interlace.run(copy.deepcopy, 2, {"rows": [given]}, place="shm"):
        (back,) = found["rows"]
        assert back.dtype == dtype and back.tolist() == given.tolist()
