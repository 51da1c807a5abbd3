"""Checkpoints of torch.distributed.checkpoint, saved on one number of ranks and loaded on another."""

from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from multi.nn import nn_checkpoint_ranks as ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


@pytest.mark.parametrize("size, forms", [(4, ("mesh", "world")), (2, ("none", "ranks"))])
def test_saved_on_some_ranks_loads_on_others(
    tmp_path: Path, size: int, forms: tuple[str, str]
) -> None:
    folder = str(tmp_path / "checkpoint")
    on_ranks(ranks.save, size, str(tmp_path / "save"), folder, forms[0])
    for number in (1, 2, 4):
        on_ranks(ranks.load, number, str(tmp_path / f"load {number}"), folder, forms[1])
    on_ranks(ranks.load_alone, 1, folder)


def test_dtensors_that_lie_otherwise_are_gathered(tmp_path: Path) -> None:
    on_ranks(ranks.load_elsewhere, 2, str(tmp_path / "store"))


def test_dtensors_over_some_ranks_load_over_all(tmp_path: Path) -> None:
    on_ranks(ranks.load_from_rows, 4, str(tmp_path / "store"))


@pytest.mark.parametrize("wrap", ["DistributedDataParallel", "fully_shard"])
def test_beside_data_parallel(tmp_path: Path, wrap: str) -> None:
    arguments = str(tmp_path / "store"), str(tmp_path / "checkpoint"), wrap
    on_ranks(ranks.beside_data_parallel, 4, *arguments)


def test_dtensors_need_torch_distributed() -> None:
    for text in on_ranks(ranks.refused, 2):
        assert "a group of the ranks [0, 1] needs torch.distributed" in text


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("missing", "has no weight.exp_avg"),
        ("shape", "weight.exp_avg must have shape (4,), got (3,)"),
        ("type", "weight.exp_avg is a float"),
    ],
)
def test_state_that_is_not_the_optimizers(wrong: str, said: str) -> None:
    for text in interlace.run(ranks.refused_state, 2, wrong):
        assert said in text


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
    ids=["Adam", "SGD"],
)
def test_a_checkpoint_before_the_first_step_changes_none(make: Any) -> None:
    (expected,), (found,) = (interlace.run(ranks.steps_after, 1, make, x) for x in (False, True))
    assert torch.equal(found, expected)
