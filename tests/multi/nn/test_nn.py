"""Layers of interlace.nn give the numbers of torch's, on any number of ranks."""

import functools
from typing import Any

import pytest

import interlace
from multi.nn import nn_ranks as ranks
from tiers import few


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


@functools.cache
def found_wrong(world_size: int) -> list[dict[str, str]]:
    """Of all cases, by rank; in one run, for each is short."""
    return on_ranks(ranks.run_all, world_size)


@pytest.mark.parametrize("world_size", few([1, 2, 3, 4], 3))
@pytest.mark.parametrize("name", ranks.CASES)
def test_layer(name: str, world_size: int) -> None:
    for wrong in found_wrong(world_size):
        assert not wrong[name], wrong[name]


@pytest.mark.parametrize("seed", range(2))
def test_gradients_in_a_simulation(seed: int) -> None:
    names = ["layer norm", "qkv", "mlp, gated, batch first", "embedding"]
    for wrong in interlace.run(ranks.run_all, 2, names, seed=seed):
        assert wrong == dict.fromkeys(names, "")


@pytest.mark.parametrize("kv, world_size", [(1, 2), (1, 3), (2, 4), (1, 4)])
def test_key_value_heads_that_ranks_share(kv: int, world_size: int) -> None:
    on_ranks(ranks.run_replicated_heads, world_size, kv, world_size != 3)


@pytest.mark.parametrize("name", ranks.DROPPED)
def test_the_comparison_finds_a_sum_that_is_left_out(name: str) -> None:
    for found in on_ranks(ranks.without_a_sum, 2, name):
        assert ranks.DROPPED[name][2] in found


def test_the_comparison_finds_that_replicas_were_not_summed() -> None:
    for found in on_ranks(ranks.without_the_replicas_sum, 2):
        assert "gradient of k.weight" in found


@pytest.mark.parametrize("world_size", [1, 2])
def test_deferred_and_accumulated_gradients_are_the_same(world_size: int) -> None:
    on_ranks(ranks.later_or_elsewhere, world_size)


def test_shared_heads_refuse_what_would_leave_their_sum_out() -> None:
    for first, second in on_ranks(ranks.shared_heads_refuse, 2):
        assert first.startswith("gradient_accumulation_fusion needs a key-value head per rank")
        assert second.startswith("deferred needs a key-value head per rank")


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_have_the_same_gradients() -> None:
    on_ranks(ranks.compiled, 2)


def test_without_gradients() -> None:
    on_ranks(ranks.without_gradients, 2)


@pytest.mark.parametrize("world_size", [2, 4])
def test_weight_that_is_embedding_and_head(world_size: int) -> None:
    on_ranks(ranks.tied, world_size)
