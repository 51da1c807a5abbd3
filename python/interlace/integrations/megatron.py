"""Megatron-core's tensor-parallel linear layers on interlace.

:func:`patch` makes the layers of a model run on fused ops. For other layers there is
:func:`linear_with_grad_accumulation_and_async_allreduce`, Megatron's function of that name. Both need
neither APEX (``fused_weight_gradient_mlp_cuda``) nor ``CUDA_DEVICE_MAX_CONNECTIONS=1``. Only :func:`patch`
imports megatron-core.

Semantics: ``megatron.core.tensor_parallel.layers`` of megatron-core 0.16, and the arguments of later
versions.
"""

import importlib
import sys
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist

from interlace.groups import groups
from interlace.nn.linear_functions import (
    ColumnParallelLinearFunction,
    DeferredWeightGradients,
    Layer,
    column_parallel_linear,
    row_parallel_linear,
)
from interlace.runtime.core.communicator import Communicator

__all__ = [
    "Patched",
    "drain_embedding_wgrad_compute",
    "linear_with_grad_accumulation_and_async_allreduce",
    "patch",
    "unpatch",
]

Tensor = torch.Tensor
LAYERS = "megatron.core.tensor_parallel.layers"
PARALLEL_STATE = "megatron.core.parallel_state"
FUSED = "fused"


class Patched(dict[str, str]):
    """The result of :func:`patch`: names of tensor-parallel linear layers, with "fused" or a reason.

    The layers are Megatron-core's. As a context manager it undoes the patch at the end of the block.
    """

    def __init__(self, model: torch.nn.Module, layers: dict[str, str]) -> None:
        super().__init__(layers)
        self._model = model

    def __enter__(self) -> "Patched":
        return self

    def __exit__(self, *error: object) -> None:
        unpatch(self._model)

    def __str__(self) -> str:
        return "\n".join(f"{name or '(model)'}: {patch}" for name, patch in self.items())

    def __repr__(self) -> str:
        return f"Patched({super().__repr__()})"


def patch(model: torch.nn.Module) -> Patched:
    """Make Megatron-core's ``ColumnParallelLinear`` and ``RowParallelLinear`` in ``model`` run on
    interlace.

    Their subclasses are included, such as the output layer of a language model. Parameters, state dicts,
    hooks and return values of the layers do not change. Layers that interlace cannot run are not changed,
    and the result gives the reason. A second call does nothing. All ranks of each layer's ``tp_group`` must
    call it, because it joins these groups. :func:`unpatch` undoes it, and so does the end of a ``with``
    block.

    Raises TypeError if ``model`` is not a module, ModuleNotFoundError if megatron-core is not installed.
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
    """Undo :func:`patch`; return the names of the layers that were patched.

    All of Megatron-core's layers in ``model`` are as before; other modules were never changed.

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


def _is_patched(layer: object) -> bool:
    attributes = layer.__dict__
    return (
        attributes.get("_forward_impl") is linear_with_grad_accumulation_and_async_allreduce
        or getattr(attributes.get("forward"), "__func__", None) is _row_forward
    )


def _why_not(layer: torch.nn.Module, megatron: Any, column: bool) -> str:
    """Return why ``layer`` cannot run on interlace, or "" if it can. Join its group."""
    base = megatron.ColumnParallelLinear if column else megatron.RowParallelLinear
    method = "_forward_impl" if column else "forward"
    if _is_patched(layer):
        return ""
    if getattr(type(layer), method) is not getattr(base, method):
        return f"its class {type(layer).__name__} overrides {method}"
    if method in layer.__dict__:
        return f"its {method} was replaced on the object"
    if getattr(layer, "is_expert", False) or getattr(layer, "explicit_expert_comm", False):
        return "an expert layer, whose tokens arrive by all-to-all"
    weight = layer.weight
    if weight is not None:
        if type(weight) not in (Tensor, torch.nn.Parameter):
            return f"its weight is a {type(weight).__name__}"
        if getattr(weight, "is_gtp_weight_remat", False):
            return "its weight has one more sharding, which Megatron gathers (GTP)"
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            return f"its weight has dtype {weight.dtype}"
    group = getattr(layer, "tp_group", None)
    if group is None or (isinstance(group, dist.ProcessGroup) and group.size() == 1):
        return "its tp_group has one rank"
    return "" if groups.resolve(group).world_size > 1 else "its tp_group has one rank"


def _row_forward(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """Add the bias outside the fused matmul: Megatron sums its gradient in sequence parallelism itself."""
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


class _OutputGradients(DeferredWeightGradients):
    """Megatron's ``grad_output_buffer``: backward leaves the outputs' gradients there, up to a limit."""

    def __init__(self, buffer: list[Tensor], limit: int, lengths: list[int]) -> None:
        super().__init__()
        self._buffer, self._limit, self._lengths = buffer, limit, lengths

    def accepts(self) -> bool:
        return not self._limit or len(self._buffer) < self._limit

    def add(self, weights: object, grads: Any, input: Tensor, **how: object) -> None:
        self._buffer.append(grads[0].view(*self._lengths, grads[0].shape[-1]))


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: object = None,
    tp_group: object = None,
    gtp_remat_size: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``input @ weight.t() + bias``, overlapped in both directions, as Megatron-core's function.

    Parameters
    ----------
    input : ``[s, b, h]`` or any ``[..., h]``; with ``sequence_parallel`` this rank's shard along dim 0.
    weight : this rank's ``[out_local, h]``; it may be frozen (``requires_grad=False``).
    bias : ``[out_local]`` or None.
    gradient_accumulation_fusion : add the weight's gradient to ``weight.main_grad``, in fp32.
    allreduce_dgrad : sum the input's gradient over the group; not together with ``sequence_parallel``.
    sequence_parallel : gather the input, and reduce-scatter its gradient.
    grad_output_buffer, wgrad_deferral_limit : backward appends the output's gradient to this list and
        leaves the weight's gradient to :func:`drain_embedding_wgrad_compute`, until the list is as long as
        the limit; 0 means no limit. Needs ``gradient_accumulation_fusion``.
    async_grad_allreduce : deprecated by Megatron, and ignored. Later versions have ``tp_group`` in its
        place, so a group passed by position here is used as ``tp_group``.
    tp_group : a torch ``ProcessGroup``, or any form that :func:`interlace.groups.resolve` takes. None is
        Megatron's tensor-parallel group if it has one, otherwise all ranks. A group of one rank, or a call
        without communication, needs no group of interlace.
    gtp_remat_size : for weights with one more sharding; must be None or 1, other sizes are not supported.
    output_dtype : dtype of the output, default the input's.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    >>> from interlace.integrations import megatron
    >>> def step():
    ...     x, w = torch.ones(2, 1, 4, requires_grad=True), torch.ones(3, 4)
    ...     y = megatron.linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, False, True)
    ...     y.sum().backward()
    ...     return tuple(y.shape), x.grad[0, 0, 0].item()
    >>> interlace.run(step, 2)
    [((4, 1, 3), 6.0), ((4, 1, 3), 6.0)]
    """
    if async_grad_allreduce is not None and not isinstance(async_grad_allreduce, bool):
        if isinstance(tp_group, int):
            gtp_remat_size, tp_group = tp_group, None
        if tp_group is not None:
            raise TypeError(f"async_grad_allreduce must be a bool, got {async_grad_allreduce!r}")
        async_grad_allreduce, tp_group = None, async_grad_allreduce
    if async_grad_allreduce is not None:
        warnings.warn(
            "async_grad_allreduce is not used any more; pass allreduce_dgrad instead",
            DeprecationWarning,
            stacklevel=2,
        )
    if gtp_remat_size not in (None, 1):
        raise ValueError(
            f"gtp_remat_size must be None or 1, got {gtp_remat_size}: weights with one more sharding are "
            "not supported"
        )
    if sequence_parallel and allreduce_dgrad:
        raise ValueError(
            "allreduce_dgrad and sequence_parallel are both True; set only one of them"
        )
    if grad_output_buffer is not None and not gradient_accumulation_fusion:
        raise ValueError(
            "grad_output_buffer needs gradient_accumulation_fusion, which is False: the gradient is added "
            "to main_grad later"
        )
    communicator = _communicator(tp_group, input) if sequence_parallel or allreduce_dgrad else None
    deferred = None
    if grad_output_buffer is not None:
        size = communicator.world_size if communicator is not None and sequence_parallel else 1
        lengths = [size * input.shape[0], *input.shape[1:-1]]
        deferred = _OutputGradients(grad_output_buffer, wgrad_deferral_limit or 0, lengths)
    if communicator is None:
        fusion = bool(gradient_accumulation_fusion)
        layer = Layer(None, 0, False, fusion, False, deferred, output_dtype)  # does not communicate
        return ColumnParallelLinearFunction.apply(layer, 1, input, weight, bias)[0]  # type: ignore[no-any-return,no-untyped-call]
    (output,) = column_parallel_linear(
        input,
        [weight],
        [bias],
        group=communicator,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        deferred=deferred,
        out_dtype=output_dtype,
    )
    return output


def drain_embedding_wgrad_compute(
    config: Any,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Tensor,
    tp_group: object = None,
) -> None:
    """Add to ``weight.main_grad`` the gradients that backward has deferred, as Megatron-core's function.

    ``embedding_activation_buffer`` has inputs ``[s, b, h]``, ``grad_output_buffer`` the gradients ``[s, b,
    n]`` of their outputs, ``weight`` is ``(n, h)``. ``config.sequence_parallel`` says whether the
    activations are shards. Then each is gathered while the gradient of the one before is computed. Both
    lists are empty afterwards. All ranks of the group call this. Raises ValueError if the lists differ in
    length.

    >>> import types, torch
    >>> from interlace.integrations import megatron
    >>> weight, config = torch.zeros(2, 3), types.SimpleNamespace(sequence_parallel=False)
    >>> weight.main_grad = torch.zeros(2, 3)
    >>> inputs, grads = [torch.ones(4, 1, 3)], [torch.ones(4, 1, 2)]
    >>> megatron.drain_embedding_wgrad_compute(config, inputs, grads, weight)
    >>> weight.main_grad.tolist(), inputs
    ([[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]], [])
    """
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ValueError(
            f"embedding_activation_buffer has {len(embedding_activation_buffer)} entries, "
            f"but grad_output_buffer has {len(grad_output_buffer)}"
        )
    deferred = DeferredWeightGradients()
    while embedding_activation_buffer:
        input, grad = embedding_activation_buffer.pop(0), grad_output_buffer.pop(0)
        over = _communicator(tp_group, input) if config.sequence_parallel else None
        rows, columns = (each.detach().flatten(0, -2) for each in (input, grad))
        deferred.add([weight], [columns], rows, communicator=over, fused=True)
    deferred.run()


def _communicator(tp_group: object, input: Tensor) -> Communicator | None:
    """Return the group, or None if it has one rank."""
    if tp_group is None:
        state = sys.modules.get(PARALLEL_STATE)
        if state is not None and state.model_parallel_is_initialized():
            tp_group = state.get_tensor_model_parallel_group()
        elif groups.joined_group() is None and not dist.is_initialized():
            return None
    if isinstance(tp_group, dist.ProcessGroup) and tp_group.size() == 1:
        return None
    communicator = groups.resolve(tp_group).on(input)
    return None if communicator.world_size == 1 else communicator
