"""An ``out`` that cannot be written is refused on all ranks, and the group can be used afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from ranks import ranks


def with_a_gradient_on_one_rank() -> Any:
    x = torch.ones(4, requires_grad=interlace.get_rank() == 1)
    return functional.all_reduce(x, out=torch.empty(4))


def expanded_on_one_rank() -> Any:
    one = interlace.get_rank() == 1
    return functional.all_reduce(
        torch.ones(4), out=torch.empty(1).expand(4) if one else torch.empty(4)
    )


def overlapping() -> Any:
    memory = torch.zeros(8)
    return functional.broadcast(memory[:6], 1, out=memory[2:])


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (with_a_gradient_on_one_rank, "has no gradient"),
        (expanded_on_one_rank, "single memory location"),
        (overlapping, "single memory location"),
    ],
)
@ranks(2)
def test_all_ranks_refuse(place: str, call: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        functional.wait(call())
    assert functional.wait(functional.all_reduce(torch.ones(1))).item() == 2
