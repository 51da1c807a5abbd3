"""Megatron-core's layers on interlace, where megatron-core is installed: the tests' extras have it."""

import contextlib
import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
from cases.linear_cases import close
from interlace.groups.groups import default_group
from interlace.integrations import megatron
from ranks import ranks
from support import noise

INSTALLED = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="megatron-core is not installed")
linear = megatron.linear_with_grad_accumulation_and_async_allreduce

SEQUENCE, BATCH, HIDDEN, WIDE = 4, 2, 6, 8
Tensor = torch.Tensor


@contextmanager
def layers_of_megatron() -> Iterator[Any]:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    # where Megatron makes its buffers, whatever device the layers are on
    here = mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with here, mock.patch.object(layers, "ModelParallelConfig", ModelParallelConfig):
        try:
            yield layers
        finally:
            parallel_state.destroy_model_parallel()


def config(module: Any, sharded: bool) -> Any:
    return module.ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        sequence_parallel=sharded,
    )


def init(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(noise(0, 7, weight.shape))


class ParallelBlock(torch.nn.Module):
    """A column-parallel layer with the options ``first``, and a row-parallel one with ``second``."""

    def __init__(self, module: Any, sharded: bool, first: Any = (), second: Any = ()) -> None:
        super().__init__()
        common = {"config": config(module, sharded), "init_method": init, "bias": True}
        common |= {"skip_bias_add": False, "tp_group": dist.group.WORLD}
        self.column = module.ColumnParallelLinear(HIDDEN, WIDE, **{**common, **dict(first)})
        how = {"input_is_parallel": True, **common, **dict(second)}
        self.row = module.RowParallelLinear(WIDE, HIDDEN, **how)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.column(x)
        z, other = self.row(torch.tanh(y if bias is None else y + bias))
        return z if other is None else z + other


def duplicate(layer: Any) -> Any:
    """Copy a layer in the same group: torch's groups cannot be copied."""
    group = dist.group.WORLD
    return copy.deepcopy(layer, {id(group): group})


def step(block: ParallelBlock, sharded: bool) -> dict[str, Tensor]:
    """Output and gradients of one forward and backward."""
    length = SEQUENCE // dist.get_world_size() if sharded else SEQUENCE
    x = noise(dist.get_rank() if sharded else 0, 1, (length, BATCH, HIDDEN)).requires_grad_()
    block.zero_grad()
    y = block(x)
    (y * noise(0, 2, y.shape)).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    return {**found, **{name: p.grad for name, p in block.named_parameters()}}


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            close(actual[name], value, SEQUENCE * BATCH * WIDE)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"skip_bias_add": True}, {"skip_bias_add": True}),
    ({"bias": False}, {"bias": False}),
]


@needs_megatron
@ranks(backend="interlace")
def test_patched_layers_give_the_same_numbers() -> None:
    with layers_of_megatron() as module:
        for sharded in (True, False):
            for first, second in OPTIONS:
                block = ParallelBlock(module, sharded, first, second)
                expected = step(block, sharded)
                with megatron.patch(block) as report:
                    assert dict(report) == {"column": "fused", "row": "fused"}
                    actual = step(block, sharded)
                    twin = duplicate(block)
                    again = step(twin, sharded)
                compare(actual, expected)
                compare(again, expected)
                assert megatron.unpatch(block) == [] and len(megatron.unpatch(twin)) == 2
                compare(step(block, sharded), expected)
        whole = ParallelBlock(module, False, {"gather_output": True}, {"input_is_parallel": False})
        for frozen in whole.column.parameters():  # with a frozen weight Megatron forgets the bias
            frozen.requires_grad_(False)
        expected = step(whole, False)
        with megatron.patch(whole):
            compare(step(whole, False), expected)


@needs_megatron
@ranks(backend="interlace")
def test_accumulation_needs_no_apex() -> None:
    with layers_of_megatron() as module:
        block = ParallelBlock(module, True)
        expected = step(block, True)
        megatron.patch(block)
        weights: list[Any] = [block.column.weight, block.row.weight]
        for layer, weight in zip((block.column, block.row), weights, strict=True):
            layer.gradient_accumulation_fusion = True
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        for _ in range(2):
            step(block, True)
        for name, weight in zip(("column.weight", "row.weight"), weights, strict=True):
            assert weight.grad_added_to_main_grad
            close(weight.main_grad, 2 * expected[name], SEQUENCE * BATCH)
        settings, column = block.column.config, block.column
        settings.defer_embedding_wgrad_compute, settings.wgrad_deferral_limit = True, 2
        column.embedding_activation_buffer, column.grad_output_buffer = [], []
        weights[0].main_grad.zero_()
        for count in (1, 2):
            step(block, True)
            assert len(column.grad_output_buffer) == count
            assert column.grad_output_buffer[0].shape == (SEQUENCE, BATCH, WIDE // 2)
        assert not weights[0].main_grad.any()
        megatron.drain_embedding_wgrad_compute(
            settings,
            column.embedding_activation_buffer,
            column.grad_output_buffer,
            weights[0],
            column.tp_group,
        )
        assert not column.grad_output_buffer and not column.embedding_activation_buffer
        close(weights[0].main_grad, 2 * expected["column.weight"], SEQUENCE * BATCH)


@needs_megatron
@ranks(backend="interlace")
def test_what_cannot_be_served_is_left_alone() -> None:
    with layers_of_megatron() as module:

        class OwnForward(module.RowParallelLinear):  # type: ignore[misc, name-defined]
            def forward(self, input_: Tensor) -> Any:
                return super().forward(input_)

        class TEColumnParallelLinear(torch.nn.Module):
            pass

        class Sharded(torch.nn.Parameter):
            pass

        block = ParallelBlock(module, False)
        model = torch.nn.ModuleDict({"block": block, "other": TEColumnParallelLinear()})
        model["own"] = duplicate(block.row)
        model["own"].__class__ = OwnForward
        model["expert"] = duplicate(block.column)
        model["expert"].is_expert = True
        model["weight"] = duplicate(block.column)
        model["weight"].weight = Sharded(block.column.weight.detach())
        model["whole"] = duplicate(block.column)
        model["whole"].weight = torch.nn.Parameter(block.column.weight.detach().to(torch.complex64))
        model["replaced"] = duplicate(block.row)
        model["replaced"].forward = block.row.forward
        with megatron.patch(model) as report:
            assert "other: a TEColumnParallelLinear" in str(report)
            assert dict(megatron.patch(model)) == dict(report)
            for name, what in report.items():
                if what != "fused":
                    own = model.get_submodule(name).__dict__
                    assert "_forward_impl" not in own, name
        assert megatron.unpatch(model) == []
    assert dict(report) == {
        "block.column": "fused",
        "block.row": "fused",
        "other": "a TEColumnParallelLinear, not one of Megatron-core's own layers",
        "own": "its class OwnForward overrides forward",
        "expert": "an expert layer, whose tokens arrive by all-to-all",
        "weight": "its weight is a Sharded",
        "whole": "its weight has dtype torch.complex64",
        "replaced": "its forward was replaced on the object",
    }


@needs_megatron
@ranks(backend="interlace")
def test_a_group_of_one_rank_does_not_communicate() -> None:
    with layers_of_megatron() as module:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        group = groups[dist.get_rank()]
        own = {"tp_group": group}
        with contextlib.suppress(UserWarning):
            block = ParallelBlock(module, False, own, own)
        assert set(megatron.patch(block).values()) == {"its tp_group has one rank"}
        x, w = noise(0, 1, (2, 3)).requires_grad_(), noise(0, 2, (4, 3)).requires_grad_()
        y = linear(x, w, None, False, True, False, tp_group=group)
        y.sum().backward()
        expected = torch.autograd.grad((x @ w.t()).sum(), [x, w])
        close(x.grad, expected[0], 4)
        close(w.grad, expected[1], 4)


def arguments(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"input": torch.ones(2, 3), "weight": torch.ones(4, 3), "bias": None}
    flags = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
    return {**given, **dict.fromkeys(flags, False), **more}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"allreduce_dgrad": True, "sequence_parallel": True}, "set only one of them"),
        ({"grad_output_buffer": []}, "needs gradient_accumulation_fusion"),
        ({"gtp_remat_size": 2}, "gtp_remat_size must be None or 1, got 2"),
    ],
)
def test_what_excludes_each_other_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        linear(**arguments(**wrong))


def test_names_of_older_and_later_versions() -> None:
    """Older versions pass the group as the tenth positional argument, later ones as the ninth."""
    x, w = torch.ones(2, 3), torch.ones(4, 3)

    def shapes() -> list[tuple[int, ...]]:
        group, common = default_group(), (x, w, None, False, False, True, None, 0)
        with pytest.warns(DeprecationWarning, match="allreduce_dgrad"):
            old = linear(*common, True, group)
        later = linear(*common, group, 1, output_dtype=torch.float64)
        assert later.dtype == torch.float64
        return [tuple(old.shape), tuple(later.shape)]

    assert interlace.run(shapes, 2) == [[(4, 4), (4, 4)]] * 2


def test_lists_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="has 1 entries, but grad_output_buffer has 0"):
        megatron.drain_embedding_wgrad_compute(None, [torch.ones(1)], [], torch.ones(1))


def test_patch_wants_a_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        megatron.patch(3)  # type: ignore[arg-type]
