"""Plain functions on a group that serves CPUs and GPUs: the tensor's device says who does it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace.groups.groups import default_group
from interlace.process_group import group as process_group
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.tuning import tuning as auto
from stand_ins.fake_host import gpu_ranks


class Asked(Exception):
    """An exception that shows a request for the group's GPU communicator."""


class Refusing:
    """A stand-in for a process group."""

    @property
    def device_communicator(self) -> Communicator:
        raise Asked


CALLS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda x, g: interlace.all_reduce(x, group=g),
    "all_gather": lambda x, g: interlace.all_gather([x], x, group=g),
    "all_gather by torch's names": lambda x, g: interlace.all_gather(
        output_tensor=x, input_tensor=x, group=g
    ),
    "reduce_scatter": lambda x, g: interlace.reduce_scatter(x, [x], group=g),
    "broadcast": lambda x, g: interlace.broadcast(x, 0, group=g),
    "reduce": lambda x, g: interlace.reduce(x, 0, group=g),
    "gather": lambda x, g: interlace.gather(x, None, 0, group=g),
    "scatter": lambda x, g: interlace.scatter(x, None, 0, group=g),
    "all_to_all": lambda x, g: interlace.all_to_all([x], [x], group=g),
    "all_to_all_single": lambda x, g: interlace.all_to_all_single(x, x, group=g),
    "all_reduce_coalesced": lambda x, g: interlace.all_reduce_coalesced([x], group=g),
    "all_gather_v": lambda x, g: interlace.all_gather_v(x, x, [4], group=g),
    "reduce_scatter_v": lambda x, g: interlace.reduce_scatter_v(x, x, [4], group=g),
    "gather_v": lambda x, g: interlace.gather_v(x, None, None, 0, group=g),
    "scatter_v": lambda x, g: interlace.scatter_v(x, None, None, 0, group=g),
    "all_to_all_v": lambda x, g: interlace.all_to_all_v(x, x, group=g),
    "isend": lambda x, g: interlace.isend(x, 0, group=g),
    "irecv": lambda x, g: interlace.irecv(x, 0, group=g),
    "batch_isend_irecv": lambda x, g: interlace.batch_isend_irecv(
        [interlace.P2POp(interlace.isend, x, 0, group=g)]
    ),
    "all_gather_matmul": lambda x, g: interlace.all_gather_matmul(x, x, group=g),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_on_a_gpu_goes_to_the_communicator_for_gpus(name: str) -> None:
    def on_rank() -> None:
        whole = default_group()
        group = process_group.OnTwoDevices(whole.place, whole.ranks, Refusing())
        with FakeTensorMode():
            on_gpu = torch.empty(4, device="cuda")
        with pytest.raises(Asked):
            CALLS[name](on_gpu, group)
        x = torch.ones(4)
        interlace.all_reduce(x, group=group)  # a tensor on a CPU does not
        assert x.tolist() == [1.0] * 4

    interlace.run(on_rank, 1)


class OnGpu:
    """An array of another library, on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError


def test_where_a_value_lies() -> None:
    x = torch.ones(2)
    kinds = [
        process_group.kind_of(value) for value in (x, [[], [x]], OnGpu(), [OnGpu()], "x", None, [])
    ]
    assert kinds == ["cpu", "cpu", "cuda", "cuda", "", "", ""]


def _by_length(values: Any) -> str:
    return "cuda" if values[0].numel() == 8 else "cpu"


@gpu_ranks(
    2,
    (auto, "LARGEST_LOW_LATENCY_BYTES", 0),  # only ops in workspaces are counted
    (process_group, "kind_of", _by_length),
    seed=3,
)
def test_they_compute_there() -> None:
    """On the fake GPU each tensor of 8 elements counts as a tensor of the device."""
    whole, rank = default_group(), interlace.get_rank()
    second = Communicator(whole.place.subgroup((0, 1), 1), whole.ranks)
    both = SimpleNamespace(device_communicator=second)
    group = process_group.OnTwoDevices(whole.place, whole.ranks, both)
    for length in (4, 8, 8, 8):
        x = torch.full((length,), rank + 1.0)
        interlace.all_reduce(x, group=group)
        interlace.barrier(group)
        assert x.tolist() == [3.0] * length  # the barrier has waited for what was enqueued
    assert (group.arena.turn, second.arena.turn) == (1, 3)
