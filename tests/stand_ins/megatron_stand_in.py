"""A part of Megatron-core's tensor parallel layers as ``interlace.integrations.megatron`` meets.

For machines without megatron-core: the names, attributes and calls of ``ColumnParallelLinear`` and
``RowParallelLinear`` of 0.16, with communication by torch.distributed beside the matmuls.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

import torch_names
from interlace.runtime.compat import stand_ins

LAYERS = "megatron.core.tensor_parallel.layers"
Tensor = torch.Tensor


def gathered(tensor: Tensor, group: Any) -> Tensor:
    whole = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    torch_names.all_gather_single(whole, tensor.contiguous(), group=group)
    return whole


def scattered(tensor: Tensor, group: Any) -> Tensor:
    part = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    torch_names.reduce_scatter_single(part, tensor.contiguous(), group=group)
    return part


def summed(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def last_part(tensor: Tensor, group: Any) -> Tensor:
    return tensor.chunk(group.size(), -1)[group.rank()].contiguous()


def last_gathered(tensor: Tensor, group: Any) -> Tensor:
    return torch.cat(gathered(tensor, group).chunk(group.size(), 0), -1)


def unchanged(tensor: Tensor, group: Any) -> Tensor:
    return tensor.clone()


class Region(torch.autograd.Function):
    """One function of tensor and group in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        result: Tensor = there(tensor, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group), None, None, None


def region(there: Any, back: Any) -> Any:
    return lambda tensor, group: Region.apply(tensor, group, there, back)


gather_from_sequence = region(gathered, scattered)
reduce_scatter_to_sequence = region(scattered, gathered)
copy_to = region(unchanged, summed)
reduce_from = region(summed, unchanged)
scatter_to_tensor_model_parallel_region = region(last_part, last_gathered)
gather_from = region(last_gathered, last_part)


class Linear(torch.nn.Module):
    """What both layers share."""

    def __init__(
        self, shape: tuple[int, int], length: int, config: Any, group: Any, **how: Any
    ) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.is_expert = how.get("is_expert", False)
        self.explicit_expert_comm = self.is_expert
        self.skip_bias_add = how.get("skip_bias_add", False)
        self.sequence_parallel = config.sequence_parallel
        self.gradient_accumulation_fusion = False
        self.weight = torch.nn.Parameter(torch.empty(shape))
        how["init_method"](self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(length)) if how["bias"] else None


class ColumnParallelLinear(Linear):
    def __init__(self, input_size: int, output_size: int, **how: Any) -> None:
        config, group = how.pop("config"), how.pop("tp_group")
        own = output_size // group.size()
        super().__init__((own, input_size), own, config, group, **how)
        self.gather_output = how.get("gather_output", False)
        self.disable_grad_reduce = False
        self.allreduce_dgrad = not self.sequence_parallel
        self.embedding_activation_buffer: list[Tensor] = []
        self.grad_output_buffer: list[Tensor] = []

    def _forward_impl(self, input: Tensor, weight: Tensor, **how: Any) -> Tensor:
        if how["sequence_parallel"]:
            input = gather_from_sequence(input, how["tp_group"])
        elif how["allreduce_dgrad"]:
            input = copy_to(input, how["tp_group"])
        return torch.nn.functional.linear(input, weight, how["bias"])

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> Any:
        deferring = self.config.defer_embedding_wgrad_compute
        if deferring:
            self.embedding_activation_buffer.append(input_)
        output = self._forward_impl(
            input=input_,
            weight=self.weight if weight is None else weight,
            bias=None if self.skip_bias_add else self.bias,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=self.allreduce_dgrad,
            sequence_parallel=self.sequence_parallel,
            grad_output_buffer=self.grad_output_buffer if deferring else None,
            wgrad_deferral_limit=self.config.wgrad_deferral_limit if deferring else None,
            tp_group=self.tp_group,
        )
        if self.gather_output:
            output = gather_from(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(Linear):
    def __init__(self, input_size: int, output_size: int, **how: Any) -> None:
        config, group = how.pop("config"), how.pop("tp_group")
        super().__init__(
            (output_size, input_size // group.size()), output_size, config, group, **how
        )
        self.input_is_parallel = how["input_is_parallel"]

    def forward(self, input_: Tensor) -> Any:
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        output = torch.nn.functional.linear(input_, self.weight)
        reduce = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from
        output = reduce(output, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None


class ModelParallelConfig(types.SimpleNamespace):
    """The fields that the layers read."""

    def __init__(self, **fields: Any) -> None:
        defaults = {"defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0}
        super().__init__(**{**defaults, "_cpu_offloading_context": None, **fields})


@contextmanager
def installed() -> Iterator[Any]:
    """The stand-in, imported by Megatron's names."""
    layers = types.ModuleType(LAYERS)
    names = ("ColumnParallelLinear", "RowParallelLinear", "ModelParallelConfig")
    for name in (*names, "scatter_to_tensor_model_parallel_region"):
        setattr(layers, name, globals()[name])
    parents = [LAYERS.rsplit(".", n)[0] for n in (1, 2, 3)]
    modules = {name: types.ModuleType(name) for name in parents}
    hidden = {name: None for name in sys.modules if name.startswith("megatron")}
    with ExitStack() as leaving:
        # one by one: mock.patch.dict would also forget what is imported within, and it would be made twice
        for name, module in {**hidden, **modules, LAYERS: layers}.items():
            stand_ins.put(leaving, sys.modules, name, module)
        yield layers
