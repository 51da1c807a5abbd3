"""The three cases of the demo: what every rank does, and what must come out of it.

    all_gather_matmul       x W1        rows of x are sharded, and gathered inside the matmul
    matmul_reduce_scatter   x W1        k is sharded; partial sums leave tile by tile
    MLP                     gelu(x W1) W2   both in a row: how a sequence-parallel layer uses them

The expected results are in float64, each with the bound within which a correct result lies.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

import interlace
from interlace import reference
from interlace.cli.demo.workload import Workload
from interlace.groups import groups
from interlace.runtime.tuning import configuration

GELU_SLOPE = 1.13  # the largest slope of gelu is 1.1289
GELU_ROUNDINGS = 8  # of fp32, relative to its argument, in torch's gelu


@dataclass(frozen=True)
class DemoCase:
    """``on_rank`` gives a rank's part, along ``part_dim``; ``expected`` the whole in float64 and bounds."""

    title: str
    formula: str
    story: str
    part_dim: int
    on_rank: Callable[[Workload], torch.Tensor]
    expected: Callable[[Workload, int], tuple[torch.Tensor, torch.Tensor]]


def _own(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's shard, on its device."""
    parts = reference.split(whole, interlace.get_world_size(), dim)
    return parts[interlace.get_rank()].to(interlace.device())


def _gather(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All rows of ``whole``, of which this rank has some, times ``weight``."""
    input = _own(whole, 0)
    with _visible_tiles(whole.shape[0], weight):
        output: torch.Tensor = interlace.all_gather_matmul(input, weight, algorithm="fused")
    return output


def _scatter(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The own rows of the sum over ranks of ``input @ weight``."""
    with _visible_tiles(input.shape[0], weight):
        output: torch.Tensor = interlace.matmul_reduce_scatter(input, weight, algorithm="fused")
    return output


def _visible_tiles(rows: int, weight: torch.Tensor) -> AbstractContextManager[None]:
    """Tiles small enough that a shard has several, of all ranks' ``rows``; compiled kernels keep theirs."""
    if not groups.default_group().place.interpreted:
        return nullcontext()
    inner, columns = weight.shape
    block_m = _power_of_two(rows / interlace.get_world_size() / 2, 16, 128)
    return configuration.override(
        block_m=block_m,
        block_n=_power_of_two(columns / 2, 16, 256),
        block_k=_power_of_two(inner / 8, 32, 128),
        copy_rows=max(16, block_m // 4),
        chunks=2,
        programs=3,
    )


def _power_of_two(least: float, smallest: int, largest: int) -> int:
    """The first that is at least ``least``, within bounds."""
    size = smallest
    while size < least and size < largest:
        size *= 2
    return size


def _mlp_on_rank(work: Workload) -> torch.Tensor:
    hidden = _gather(work.activations, _own(work.weight1, 1))
    return _scatter(torch.nn.functional.gelu(hidden), _own(work.weight2, 0))


def _gather_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shards = reference.split(work.activations, ranks)
    return reference.all_gather_matmul(shards, work.weight1, work.activations.dtype)


def _scatter_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = reference.split(work.activations, ranks, 1)
    weights = reference.split(work.weight1, ranks)
    return reference.matmul_all_reduce(inputs, weights, work.activations.dtype)


def _mlp_expected(work: Workload, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bound of the second matmul, and what the first and gelu may be off, carried through it."""
    dtype = work.activations.dtype
    unit, unit32 = reference.unit_roundoff(dtype), reference.unit_roundoff(torch.float32)
    before, before_error = _gather_expected(work, ranks)
    hidden = torch.nn.functional.gelu(before)
    off = GELU_SLOPE * before_error + GELU_ROUNDINGS * unit32 * (before.abs() + before_error)
    off = off + unit * (hidden.abs() + off) + reference.half_denormal(dtype)
    inputs = reference.split(hidden, ranks, 1)
    weights = reference.split(work.weight2, ranks)
    value, bound = reference.matmul_all_reduce(inputs, weights, dtype)
    # The second matmul rounds what is off, too: twice to dtype, and while it accumulates.
    growth = 1 + 4 * unit + 2 * reference.gamma(hidden.shape[1] + ranks + 8, unit32)
    return value, bound + growth * (off @ work.weight2.double().abs())


CASES = (
    DemoCase(
        "all_gather_matmul",
        "x @ weight1",
        "Every rank has some rows of x and some columns of weight1. It multiplies its own rows at "
        "once, and the others' as chunks of them arrive.",
        1,
        lambda work: _gather(work.activations, _own(work.weight1, 1)),
        _gather_expected,
    ),
    DemoCase(
        "matmul_reduce_scatter",
        "x @ weight1",
        "Every rank has some of the k columns of x and rows of weight1, so its product is one part "
        "of a sum. Tiles leave for the rank that adds them up as they are done; own rows last.",
        0,
        lambda work: _scatter(_own(work.activations, 1), _own(work.weight1, 0)),
        _scatter_expected,
    ),
    DemoCase(
        "MLP",
        "gelu(x @ weight1) @ weight2",
        "Both in a row, as a sequence-parallel layer of a transformer uses them. A bar in the tiles "
        "shows where gelu is done and the second matmul begins.",
        0,
        _mlp_on_rank,
        _mlp_expected,
    ),
)
