"""Megatron-core's layers on interlace, with megatron-core where it is installed, and with a stand-in."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.integrations import megatron
from multi.nn import megatron_ranks as ranks
from multi.process_group.test_backend import on_ranks

INSTALLED = importlib.util.find_spec("megatron") is not None
REAL = [
    pytest.param(False, id="stand-in"),
    pytest.param(
        True,
        id="megatron-core",
        marks=pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed"),
    ),
]
linear = megatron.linear_with_grad_accumulation_and_async_allreduce


@pytest.mark.parametrize("real", REAL)
def test_patched_layers_give_the_same_numbers(tmp_path: Path, real: bool) -> None:
    on_ranks(ranks.same_numbers, 2, tmp_path, real)


@pytest.mark.parametrize("real", REAL)
def test_accumulation_needs_no_apex(tmp_path: Path, real: bool) -> None:
    on_ranks(ranks.fused_accumulation, 2, tmp_path, real)


@pytest.mark.parametrize("real", REAL)
def test_what_cannot_be_served_is_left_alone(tmp_path: Path, real: bool) -> None:
    reports = on_ranks(ranks.left_alone, 2, tmp_path, real)
    assert (
        reports[0]
        == reports[1]
        == {
            "block.column": "fused",
            "block.row": "fused",
            "other": "a TEColumnParallelLinear, not one of Megatron-core's own layers",
            "own": "its class OwnForward has a forward of its own",
            "expert": "an expert layer, whose tokens come by all-to-all",
            "weight": "its weight is a Sharded",
            "whole": "its weight is of torch.complex64",
            "replaced": "its forward was replaced by something else",
        }
    )


@pytest.mark.parametrize("real", REAL)
def test_a_group_of_one_rank_does_not_communicate(tmp_path: Path, real: bool) -> None:
    on_ranks(ranks.alone, 2, tmp_path, real)


@pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed")
def test_a_gpt_of_megatron_gives_the_same_loss_and_gradients(tmp_path: Path) -> None:
    reports = on_ranks(ranks.whole_model, 2, tmp_path)
    layer = "decoder.layers.0"
    names = {f"{layer}.self_attention.linear_{n}" for n in ("proj", "qkv")}
    names |= {f"{layer}.mlp.linear_{n}" for n in ("fc1", "fc2")} | {"output_layer"}
    assert reports == [dict.fromkeys(names, "fused")] * 2


def arguments(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"input": torch.ones(2, 3), "weight": torch.ones(4, 3), "bias": None}
    flags = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
    return {**given, **dict.fromkeys(flags, False), **more}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"allreduce_dgrad": True, "sequence_parallel": True}, "one excludes the other"),
        ({"grad_output_buffer": []}, "needs gradient_accumulation_fusion"),
        ({"gtp_remat_size": 2}, "gtp_remat_size must be None or 1, got 2"),
    ],
)
def test_what_excludes_each_other_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        linear(**arguments(**wrong))


def test_names_of_older_and_later_versions() -> None:
    """The group by position: the tenth argument once, the ninth later."""
    x, w = torch.ones(2, 3), torch.ones(4, 3)

    def shapes() -> list[tuple[int, ...]]:
        group, common = (
            interlace.groups.groups.default_group(),
            (x, w, None, False, False, True, None, 0),
        )
        with pytest.warns(DeprecationWarning, match="allreduce_dgrad"):
            old = linear(*common, True, group)
        later = linear(*common, group, 1, output_dtype=torch.float64)
        assert later.dtype == torch.float64
        return [tuple(old.shape), tuple(later.shape)]

    assert interlace.run(shapes, 2) == [[(4, 4), (4, 4)]] * 2


def test_lists_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="has 1 entries, grad_output_buffer 0"):
        megatron.drain_embedding_wgrad_compute(None, [torch.ones(1)], [], torch.ones(1))


def test_patch_wants_a_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        megatron.patch(3)  # type: ignore[arg-type]
