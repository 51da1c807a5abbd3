"""``nn.Linear`` whose parameters are DTensors and whose forward is a fused op, or torch's.

A parallel style (``styles.py``) makes one of an ``nn.Linear`` by setting its class, so that parameters,
hooks and state dict stay as they are. The rules of gradients are DTensor's: an output that is replicated
has the same gradient on every rank, which is not summed. So is the bias of RowwiseLinear, replicated: its
gradient is the sum over ranks where each has seen its part of the sequence.
"""

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import style as torch_style
from torch.distributed.tensor.placement_types import Placement

from interlace import functional
from interlace.arguments.checks import FLOAT_DTYPES
from interlace.groups.specs import GroupSpec
from interlace.tensor.mesh import shared_gathers

Placements = tuple[Placement, ...]
DimLayout = int | str  # see layout_of()
REPLICATED = "replicated"


@dataclass(frozen=True)
class Style:
    """A parallel style's arguments, and the mesh that it was applied on."""

    name: str
    mesh: DeviceMesh
    input_layouts: Placements
    desired_input_layouts: Placements
    output_layouts: Placements
    use_local_output: bool
    group: GroupSpec  # this and what follows are constants where the forward is compiled
    input_layout: DimLayout
    output_layout: DimLayout

    @property
    def ranks(self) -> int:
        return self.mesh.size(0)


class Unfused(Exception):
    """Why torch's way is taken."""


class FusedLinear(nn.Linear):
    """The common part: which op, and torch's way where there is none."""

    _style: Style
    _explanation: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """nn.Linear under the style; ``input``: a local tensor of ``input_layouts``, or a DTensor."""
        try:
            output, found = self._fused(input)
        except Unfused as why:
            self._say(f"torch's {self._style.name}: {why}")
            return self._as_torch(input)
        # rows of a product come sequence by sequence; who takes a view of [b, s, h] expects torch's order
        output, style = output.flatten().view(output.shape), self._style
        as_wanted = found == from_start(style.output_layout, output.dim())
        if as_wanted and style.use_local_output:
            return output
        placement = Shard(found) if isinstance(found, int) else Replicate()
        whole = DTensor.from_local(output, style.mesh, (placement,), run_check=False)
        if not as_wanted:
            whole = whole.redistribute(placements=style.output_layouts, async_op=True)
        return whole.to_local() if style.use_local_output else whole

    def explain(self) -> str:
        """A text: what the last forward ran, and why; before the first, what the layouts ask for."""
        return self._explanation

    def _say(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self._explanation = text

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

    @abc.abstractmethod
    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
        """The local output and its layout. Raises Unfused before anything has run."""

    def _local(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
        """The local input, and its layout."""
        style = self._style
        if input.dim() < 2:
            raise Unfused("the input has less than 2 dimensions")
        layout = style.input_layout
        local = input
        if isinstance(input, DTensor):
            if input.device_mesh != style.mesh:
                raise Unfused("the input is on another mesh")
            layout = from_start(layout_of(input.placements[0]), input.dim())
            if isinstance(layout, int):
                _even("the input's", input.shape[layout], layout, style.ranks)
            local = input.to_local()
        if local.dtype not in FLOAT_DTYPES:
            raise Unfused(f"the input is {local.dtype}")
        return local, from_start(layout, input.dim())

    def _operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Local input, weight (k, n) and bias or None, in the dtype of autocast."""
        parameters: list[Any] = [self.weight, self.bias]
        found: list[Any] = [None if each is None else each.to_local() for each in parameters]
        found = [input, *found]
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            found = [None if each is None else each.to(dtype) for each in found]
        local, weight, bias = found
        return local, weight.t(), bias


class ColwiseLinear(FusedLinear):
    """Weight Shard(0), bias Shard(0): an input sharded by sequence is gathered by the matmul.

    By the first one of those that read it; the others multiply what that has gathered.
    """

    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
        style, last = self._style, input.dim() - 1
        if isinstance(input, shared_gathers.Ungathered):
            input = input.for_linear(self)
        local, layout = self._local(input)
        if not isinstance(layout, int) or layout == last:
            raise Unfused(self._nothing_to_gather(input, layout))
        _even("out_features", self.weight.shape[0], 0, style.ranks)
        gathered = shared_gathers.find(input, self, layout, style.group)
        if gathered is not None:
            self._say(f"matmul; another linear has gathered the input over dimension {layout}")
            gathered, weight, bias = self._operands(gathered)
            return nn.functional.linear(gathered, weight.t(), bias), last
        local, weight, bias = self._operands(local)
        self._say(f"all_gather_matmul over dimension {layout}")
        if not shared_gathers.can_share():
            output = functional.all_gather_matmul(
                local, weight, layout, bias=bias, group=style.group
            )
            return functional.wait(output), last
        gathered, output = functional.all_gather_matmul(
            local, weight, layout, bias=bias, group=style.group, return_gathered=True
        )
        gathered, output = functional.wait(gathered), functional.wait(output)
        shared_gathers.keep(input, self, gathered, output, layout, style.group)
        return output, last

    def _nothing_to_gather(self, input: torch.Tensor, layout: DimLayout) -> str:
        text = f"the input is {_text(layout)}, not sharded by sequence: nothing to gather"
        if layout == REPLICATED and isinstance(input, DTensor):
            text += "; what torch's PrepareModuleInput gathers, that of interlace.tensor leaves to linears"
        return text


class RowwiseLinear(FusedLinear):
    """Weight Shard(1), bias replicated: the sums over ranks are scattered, or added up, by the matmul."""

    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
        style, last = self._style, input.dim() - 1
        local, layout = self._local(input)
        wanted = from_start(style.output_layout, input.dim())
        if layout != last:
            raise Unfused(f"the input is {_text(layout)}, not sharded by features")
        _even("in_features", self.weight.shape[1], 1, style.ranks)
        if wanted == REPLICATED:
            self._say("matmul_all_reduce")
            made = _ReplicatedMatmul.apply(*self._operands(local), style.group)  # type: ignore[no-untyped-call]
            return made, wanted
        if not isinstance(wanted, int) or wanted == last:
            text = f"the output is to be {_text(wanted)}"
            raise Unfused(f"{text}, neither replicated nor sharded by sequence")
        _even("the output's", local.shape[wanted], wanted, style.ranks)
        local, weight, bias = self._operands(local)
        self._say(f"matmul_reduce_scatter over dimension {wanted}")
        if bias is not None:
            bias = _Replicated.apply(bias, style.group)  # type: ignore[no-untyped-call]
        output = functional.matmul_reduce_scatter(
            local, weight, "sum", wanted, bias=bias, group=style.group
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


class _ReplicatedMatmul(torch.autograd.Function):
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


def layout_of(placement: Placement) -> DimLayout:
    """The dimension of a Shard, REPLICATED, or what else it is.

    >>> layout_of(Shard(1)), layout_of(Replicate())
    (1, 'replicated')
    """
    if placement.is_replicate():
        return REPLICATED
    if placement.is_shard():
        return int(placement.dim)  # type: ignore[attr-defined]
    return str(placement)


def from_start(layout: DimLayout, ndim: int) -> DimLayout:
    """``layout`` with a dimension counted from 0."""
    return layout + ndim if isinstance(layout, int) and layout < 0 else layout


def gathered_dim(shard: DTensor, wanted: Placement, mesh: DeviceMesh) -> int:
    """The dimension along which a linear gathers ``shard``; Unfused if it is not to be gathered so."""
    layout = from_start(layout_of(shard.placements[0]), shard.dim())
    if shard.device_mesh != mesh or mesh.ndim != 1:
        raise Unfused("the input is on another mesh")
    if not isinstance(layout, int) or layout == shard.dim() - 1 or not wanted.is_replicate():
        raise Unfused(
            f"from {_text(layout)} to {_text(layout_of(wanted))}, no gather of a sequence"
        )
    _even("the input's", shard.shape[layout], layout, mesh.size(0))
    return layout


def _text(layout: DimLayout) -> str:
    return f"Shard({layout})" if isinstance(layout, int) else layout


def _even(what: str, length: int, dim: int, ranks: int) -> None:
    if length % ranks:
        raise Unfused(f"{what} length {length} of dimension {dim} is not divided by {ranks} ranks")
