"""Ops whose code is Python, in simulated ranks of code for a GPU."""

from typing import Any

import torch

import interlace
from interlace.runtime.places.sim import user_code
from interlace_verify import shims
from stand_ins.replaced import replaced


def test_the_host_does_not_wait_for_an_op_of_torch() -> None:
    """Meta tensors give the shape, so the op runs on a stream."""
    found, stock = [], user_code._allocated

    def allocated(func: Any, args: Any, kwargs: Any) -> Any:
        found.append((func.name(), stock(func, args, kwargs)))
        return found[-1][1]

    def on_rank() -> list[float]:
        return (torch.ones(2, device="cuda") * 3 + 1.0).tolist()

    with shims.installed("torch"), replaced((user_code, "_allocated", allocated)):
        assert interlace.run(on_rank, 1) == [[4.0, 4.0]]
    results = dict(found)
    assert results["aten::mul.Tensor"] is not None and results["aten::add.Tensor"] is not None
