"""Arguments that are tuples with names: taken apart, put together, and compiled once for all ranks."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import mangle_type

import interlace
from interlace.kernels import slots, transfer
from interlace.kernels.arguments import Peers, Rows, Table, Workspace
from interlace.kernels.matmul import matmul_reduce_scatter
from interlace.runtime.core.launch import compiled_with, joined, leaves, outside, specialised

TABLE = torch.zeros(4, dtype=torch.int64)
ARGUMENTS = {"input": Rows(TABLE, 8), "sends": Table(TABLE, 3), "peers": Peers(TABLE, 1, 4), "N": 5}


def test_taken_apart_and_put_together() -> None:
    apart = leaves(ARGUMENTS)
    assert list(apart)[:4] == ["input.ptr", "input.stride", "sends.ptr", "sends.count"]
    again = joined(apart)
    assert again == ARGUMENTS and again["peers"].world_size == 4
    assert joined({"table.1": None}) == {"table": (None,)}  # the constant part of (tensor, None)


def test_names_outside() -> None:
    names = ["input_ptr", "input_stride", "sends_ptr", "num_sends"]
    assert list(outside(ARGUMENTS)) == [*names, "peers_ptr", "rank", "world_size", "N"]


def _tritons(value: Any) -> Any:
    return mangle_type(value, specialize=True)


@pytest.mark.parametrize("rank", [0, 1, 16])
def test_ranks_share_a_compilation(rank: int) -> None:
    """The control: Triton by itself compiles the value 1 of a rank into the kernel."""
    launch = {"peers": Peers(TABLE, rank, 32)}
    compiled = compiled_with(slots.finish_kernel, launch)["peers"]
    assert _tritons(compiled) == ("*i64", "i32", "i32")
    assert compiled == compiled_with(slots.finish_kernel, {"peers": Peers(TABLE, 3, 5)})["peers"]
    assert (_tritons(launch["peers"]) == _tritons(compiled)) == (rank != 1)
    types, constants, divisible = specialised(slots.finish_kernel, launch)
    assert (list(types.values()), constants) == (["*i64", "i32", "i32"], {})
    assert divisible == ("peers.peers_ptr",)


def test_wide_numbers_stay_wide() -> None:
    workspace = Workspace(TABLE, 1, 4, 1 << 12, 1 << 33)
    compiled = compiled_with(transfer.all_gather_kernel, {"workspace": workspace})
    assert _tritons(compiled["workspace"]) == ("*i64", "i32", "i32", "i32", "i64")


def test_what_is_specialised_tells_ones_and_multiples() -> None:
    arguments = {"input": Rows(TABLE, 1), "K": 48, "N": 47, "M": 16}
    types, constants, divisible = specialised(
        matmul_reduce_scatter.matmul_all_reduce_kernel, arguments
    )
    assert types == {"input.ptr": "*i64", "input.stride": "constexpr", "K": "i32"} | dict.fromkeys(
        "NM", "i32"
    )
    assert constants == {"input.stride": 1} and divisible == ("input.ptr", "K")


@triton.jit
def keep(out_ptr, values):
    """The first of two if it is true."""
    tl.store(out_ptr, tl.where(values[0], 1.0, values[1]))


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_arguments_are_what_a_gpu_takes(place: str) -> None:
    def on_rank(value: Any) -> float:
        out = torch.zeros(1)
        keep[(1,)](out, value)
        return out.item()

    assert interlace.run(on_rank, 1, (True, 2.5), place=place) == [1.0]
    text = r"argument values\.0: failed to specialize argument of type: numpy.ndarray"
    with pytest.raises(TypeError, match=text):
        interlace.run(on_rank, 1, (torch.ones(1).numpy(), 2.5), place=place)


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_keywords_are_parameters_or_options_of_triton(place: str) -> None:
    """Options for other GPUs, such as AMD's, count too."""

    def step(**named: Any) -> float:
        out = torch.zeros(1)
        keep[(1,)](out, values=(False, 2.0), **named)
        return float(out)

    for options in ({"num_warps": 1}, {"num_stages": 2, "maxnreg": 64}, {"waves_per_eu": 2}):
        assert interlace.run(step, 1, place=place, **options) == [2.0]
    for name, meant in (("num_wraps", "'num_warps'"), ("value", "'values'")):
        problem = f"'{name}' is neither a parameter of keep nor an option .*; did you mean {meant}"
        with pytest.raises(KeyError, match=problem):
            interlace.run(lambda name=name: step(**{name: 4}), 1, place=place)
