"""interlace.nn's regions on what their docstrings' examples leave out: a tensor without dims."""

import pytest
import torch

import interlace
from interlace import nn


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_scalar_is_summed_and_its_gradient_is_not(world_size: int) -> None:
    def loss() -> tuple[float, float]:
        weight = torch.tensor(2.0, requires_grad=True)
        total = nn.reduce_from_group(weight * (interlace.get_rank() + 1))
        total.backward()
        assert weight.grad is not None
        return total.item(), weight.grad.item()

    total = 2.0 * sum(range(1, world_size + 1))
    expected = [(total, rank + 1.0) for rank in range(world_size)]
    assert interlace.run(loss, world_size) == expected
