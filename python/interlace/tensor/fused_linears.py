"""``nn.Linear`` whose parameters are DTensors and whose forward is a fused op, or torch's.

A parallel style (``styles.py``) makes one of an ``nn.Linear`` by setting its class, so that parameters,
hooks and state dict stay as they are. The rules of gradients are DTensor's: an output that is replicated
has the same gradient on every rank, which is not summed. So is the bias of RowwiseLinear, replicated: its
gradient is the sum over ranks where each has seen its part of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import style as torch_style
from torch.distributed.tensor.placement_types import Placement

from interlace import functional
from interlace.checks import FLOAT_DTYPES

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Style:
    """What a parallel style was made with, and the mesh that it was applied on."""

    name: str
    mesh: DeviceMesh
    input_layouts: Placements
    desired_input_layouts: Placements
    output_layouts: Placements
    use_local_output: bool

    @property
    def group(self) -> tuple[DeviceMesh, int]:
        return self.mesh, 0

    @property
    def ranks(self) -> int:
        return self.mesh.size(0)


class _Unfused(Exception):
    """Why torch's way is taken."""


class FusedLinear(nn.Linear):
    """The common part: which op, and torch's way where there is none."""

    _style: Style
    _said: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Linear under the style; ``input`` is a local tensor of ``input_layouts`` or a DTensor."""
        try:
            output, placement = self._fused(input)
        except _Unfused as why:
            self._say(f"torch's {self._style.name}: {why}")
            return self._as_torch(input)
        # rows of a product come sequence by sequence; who takes a view of [b, s, h] expects torch's order
        output, style = output.flatten().view(output.shape), self._style
        whole = DTensor.from_local(output, style.mesh, (placement,), run_check=False)
        wanted = tuple(_from_start(each, output.dim()) for each in style.output_layouts)
        if wanted == (placement,):
            return output if style.use_local_output else whole
        whole = whole.redistribute(placements=style.output_layouts, async_op=True)
        return whole.to_local() if style.use_local_output else whole

    def explain(self) -> str:
        """What the last forward ran, and why; before the first, what the layouts ask for."""
        return self._said

    def _say(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self._said = text

    def _as_torch(self, input: torch.Tensor) -> torch.Tensor:
        style = self._style
        torch_s = getattr(torch_style, style.name)
        given = torch_s._prepare_input_fn(
            style.input_layouts, style.desired_input_layouts, self, (input,), style.mesh
        )
        output = nn.Linear.forward(self, given)
        made: torch.Tensor = torch_s._prepare_output_fn(
            style.output_layouts, style.use_local_output, self, output, style.mesh
        )
        return made

    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, Placement]:
        """The local output and its placement. Raises _Unfused before anything has run."""
        raise NotImplementedError

    def _local(self, input: torch.Tensor) -> tuple[torch.Tensor, Placement]:
        """The local input, and where it lies, with dimensions from 0."""
        style = self._style
        if isinstance(input, DTensor):
            if input.device_mesh != style.mesh:
                raise _Unfused("the input is on another mesh")
            placement = input.placements[0]
        else:
            placement = style.input_layouts[0]
        if input.dim() < 2:
            raise _Unfused(
                f"the input has {input.dim()} dimension, which nothing is left to gather of"
            )
        if type(placement) not in (Shard, Replicate):
            raise _Unfused(f"the input is {placement}")
        placement = _from_start(placement, input.dim())
        if isinstance(placement, Shard) and isinstance(input, DTensor):
            _even("the input's", input.shape[placement.dim], placement.dim, style.ranks)
        local = input.to_local() if isinstance(input, DTensor) else input
        if local.dtype not in FLOAT_DTYPES:
            raise _Unfused(f"the input is {local.dtype}")
        return local, placement

    def _parameters_of(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Local input, weight (k, n) and bias, if there is one, in the dtype of autocast."""
        weight: Any = self.weight
        bias: Any = self.bias
        found = [input, weight.to_local()] + ([] if bias is None else [bias.to_local()])
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            found = [each.to(torch.get_autocast_dtype(kind)) for each in found]
        return found[0], found[1].t(), *found[2:]


class ColwiseLinear(FusedLinear):
    """Weight Shard(0), bias Shard(0): an input sharded by sequence is gathered by the matmul."""

    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, Placement]:
        style, last = self._style, input.dim() - 1
        local, placement = self._local(input)
        if not isinstance(placement, Shard) or placement.dim == last:
            raise _Unfused(f"the input is {placement}, not sharded by sequence: nothing to gather")
        _even("out_features", self.weight.shape[0], 0, style.ranks)
        local, weight, *bias = self._parameters_of(local)
        self._say(f"all_gather_matmul over dimension {placement.dim}")
        output = functional.all_gather_matmul(
            local, weight, placement.dim, bias=bias[0] if bias else None, group=style.group
        )
        return functional.wait(output), Shard(last)


class RowwiseLinear(FusedLinear):
    """Weight Shard(1), bias replicated: the sums over ranks are scattered, or added up, by the matmul."""

    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, Placement]:
        style, last = self._style, input.dim() - 1
        local, placement = self._local(input)
        wanted = _from_start(style.output_layouts[0], input.dim())
        if not isinstance(placement, Shard) or placement.dim != last:
            raise _Unfused(f"the input is {placement}, not sharded by features")
        _even("in_features", self.weight.shape[1], 1, style.ranks)
        if type(wanted) is Replicate:
            local, weight, *bias = self._parameters_of(local)
            self._say("matmul_all_reduce")
            made = _MatmulAllReduce.apply(local, weight, bias[0] if bias else None, style.group)  # type: ignore[no-untyped-call]
            return made, wanted
        if type(wanted) is not Shard or wanted.dim == last:
            raise _Unfused(
                f"the output is to be {wanted}, neither replicated nor sharded by sequence"
            )
        _even("the output's", local.shape[wanted.dim], wanted.dim, style.ranks)
        local, weight, *bias = self._parameters_of(local)
        self._say(f"matmul_reduce_scatter over dimension {wanted.dim}")
        output = functional.matmul_reduce_scatter(
            local,
            weight,
            "sum",
            wanted.dim,
            bias=_Replicated.apply(bias[0], style.group) if bias else None,  # type: ignore[no-untyped-call]
            group=style.group,
        )
        return functional.wait(output), wanted


class _Replicated(torch.autograd.Function):
    """A parameter that all ranks have: its gradient is the sum of what they say."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.wait(functional.all_reduce(grad.contiguous(), group=ctx.group)), None


class _MatmulAllReduce(torch.autograd.Function):
    """``matmul_all_reduce`` to an output that is replicated, whose gradient all ranks have already."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.biased = bias is not None
        return functional.wait(functional.matmul_all_reduce(input, weight, bias=bias, group=group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        of_input = grad @ weight.t() if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        of_weight = input.flatten(0, -2).t() @ rows if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None


def _from_start(placement: Placement, ndim: int) -> Placement:
    """``placement`` with its dimension counted from 0."""
    if type(placement) is Shard and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def _even(what: str, length: int, dim: int, ranks: int) -> None:
    if length % ranks:
        raise _Unfused(f"{what} length {length} of dimension {dim} is not divided by {ranks} ranks")


def placed_linear(module: nn.Module, kind: type[FusedLinear], style: Style) -> nn.Module:
    """``module``, an nn.Linear whose parameters are DTensors already, as a ``kind``."""
    if style.mesh.ndim != 1:
        raise ValueError(f"device_mesh must have 1 dimension, got {style.mesh.ndim}")
    module.__class__ = kind
    module._style = style  # type: ignore[assignment]
    module._said = f"not called yet; {style.name} of {style.input_layouts}"  # type: ignore[assignment]
    return module
