"""Megatron-core's tensor-parallel linear layers on interlace.

:func:`patch` makes the layers of a model run on fused ops. For layers of one's own there is
:func:`linear_with_grad_accumulation_and_async_allreduce`, Megatron's function of that name. Both need
neither APEX (``fused_weight_gradient_mlp_cuda``) nor ``CUDA_DEVICE_MAX_CONNECTIONS=1``. megatron-core is
imported when :func:`patch` is called, and by nothing else.
"""

import importlib
import types
from typing import Any

import torch
import torch.distributed as dist

from interlace.groups import groups
from interlace.integrations.megatron_linear import (
    drain_embedding_wgrad_compute,
    linear_with_grad_accumulation_and_async_allreduce,
)
from interlace.nn.functions.linear import row_parallel_linear

__all__ = [
    "Patched",
    "drain_embedding_wgrad_compute",
    "linear_with_grad_accumulation_and_async_allreduce",
    "patch",
    "unpatch",
]

Tensor = torch.Tensor
LAYERS = "megatron.core.tensor_parallel.layers"
FUSED = "fused"


class Patched(dict[str, str]):
    """The result of :func:`patch`: names of tensor-parallel linear layers, with "fused" or why not.

    The layers are Megatron-core's. A context manager, which undoes it at the end.
    """

    def __init__(self, model: torch.nn.Module, layers: dict[str, str]) -> None:
        super().__init__(layers)
        self._model = model

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *error: object) -> None:
        unpatch(self._model)

    def __str__(self) -> str:
        return "\n".join(f"{name or '(model)'}: {what}" for name, what in self.items())

    def __repr__(self) -> str:
        return f"Patched({super().__repr__()})"


def patch(model: torch.nn.Module) -> Patched:
    """Let Megatron-core's ``ColumnParallelLinear`` and ``RowParallelLinear`` in ``model`` run on interlace.

    Their subclasses too, the output layer of a language model among them. All else stays as it is:
    parameters, state dicts, hooks, what the layers return. Layers that cannot be served are left
    alone, and the result says why. Called twice, it does nothing the second time. All ranks of each layer's
    ``tp_group`` call it, which joins these groups. :func:`unpatch` undoes it, and so does the end of a
    ``with`` block.

    Raises TypeError if ``model`` is no module, ModuleNotFoundError if megatron-core is not installed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    megatron = importlib.import_module(LAYERS)
    found: dict[str, str] = {}
    for name, layer in model.named_modules():
        column = isinstance(layer, megatron.ColumnParallelLinear)
        if not column and not isinstance(layer, megatron.RowParallelLinear):
            if "ParallelLinear" in type(layer).__name__:
                found[name] = f"a {type(layer).__name__}, not one of Megatron-core's own layers"
            continue
        found[name] = _why_not(layer, megatron, column) or FUSED
        if found[name] == FUSED and not _is_patched(layer):
            if column:
                layer._forward_impl = linear_with_grad_accumulation_and_async_allreduce
            else:
                layer.forward = types.MethodType(_row_forward, layer)
    return Patched(model, found)


def unpatch(model: torch.nn.Module) -> list[str]:
    """Undo :func:`patch`; the names of the layers that were patched.

    All of Megatron-core's layers in ``model`` are as they were; other modules were never touched.

    >>> from interlace.integrations import megatron
    >>> megatron.unpatch(torch.nn.Linear(2, 2))
    []
    """
    names = []
    for name, layer in model.named_modules():
        if _is_patched(layer):
            del layer.__dict__["_forward_impl" if "_forward_impl" in layer.__dict__ else "forward"]
            names.append(name)
    return names


def _is_patched(layer: Any) -> bool:
    own = layer.__dict__
    return (
        own.get("_forward_impl") is linear_with_grad_accumulation_and_async_allreduce
        or getattr(own.get("forward"), "__func__", None) is _row_forward
    )


def _why_not(layer: Any, megatron: Any, column: bool) -> str:
    """Why ``layer`` cannot run on interlace; empty if it can. Joins its group."""
    base = megatron.ColumnParallelLinear if column else megatron.RowParallelLinear
    method = "_forward_impl" if column else "forward"
    if _is_patched(layer):
        return ""
    if getattr(type(layer), method) is not getattr(base, method):
        return f"its class {type(layer).__name__} has a {method} of its own"
    if method in layer.__dict__:
        return f"its {method} was replaced by something else"
    if getattr(layer, "is_expert", False) or getattr(layer, "explicit_expert_comm", False):
        return "an expert layer, whose tokens come by all-to-all"
    weight = layer.weight
    if weight is not None:
        if type(weight) not in (Tensor, torch.nn.Parameter):
            return f"its weight is a {type(weight).__name__}"
        if getattr(weight, "is_gtp_weight_remat", False):
            return "its weight is sharded once more, and gathered by Megatron (GTP)"
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            return f"its weight is of {weight.dtype}"
    group = getattr(layer, "tp_group", None)
    if group is None or (isinstance(group, dist.ProcessGroup) and group.size() == 1):
        return "its tp_group has one rank"
    return "" if groups.resolve(group).world_size > 1 else "its tp_group has one rank"


def _row_forward(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """The bias is outside the fused matmul: Megatron sums its gradient in sequence parallelism itself."""
    input = input_
    if not self.input_is_parallel:
        megatron = importlib.import_module(LAYERS)
        input = megatron.scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
    offloading = getattr(self.config, "_cpu_offloading_context", None)
    if offloading is not None and offloading.inside_context is True:
        input.activation_offloading = self.config.cpu_offloading_activations  # type: ignore[attr-defined]
    output = row_parallel_linear(
        input,
        self.weight,
        group=self.tp_group,
        sequence_parallel=self.sequence_parallel,
        gradient_accumulation_fusion=self.gradient_accumulation_fusion,
    )
    if self.skip_bias_add:
        return output, self.bias
    return (output if self.bias is None else output + self.bias), None
