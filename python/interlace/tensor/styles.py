"""Parallel styles for ``torch.distributed.tensor.parallel.parallelize_module`` with fused linears.

Options, parameters and results are the ones of torch's styles of the same names, which are the base
classes. docs/how-to/train/torchtitan.md lists the layouts with which an ``nn.Linear`` is one op of
interlace. All other cases run as in torch's style.

A style makes a :class:`FusedLinear` of an ``nn.Linear`` by setting its class, so parameters, hooks and
state dict stay as they are. Gradients follow DTensor's rules: a replicated output has the same gradient on
every rank, which is not summed. The replicated bias of RowwiseLinear follows them as well: if each rank has
seen only its part of the sequence, the bias's gradient is the sum over ranks.
"""

import abc
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_style
from torch.distributed.tensor.placement_types import Placement

from interlace.arguments.checks import FLOAT_DTYPES
from interlace.groups.specs import GroupSpec, describe
from interlace.ops.collectives.functional import all_reduce
from interlace.ops.matmul.functional import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from interlace.ops.op.async_tensor import wait
from interlace.tensor import shared_gathers

_EXPLANATION, _OF_OUTPUT = "_interlace_style", "_interlace_output_style"
Placements = tuple[Placement, ...]
DimLayout = int | str  # see layout_of()
REPLICATED = "replicated"


@dataclass(frozen=True)
class Style:
    """The arguments of a parallel style, and the mesh that it was applied to."""

    name: str
    mesh: DeviceMesh
    input_layouts: Placements
    desired_input_layouts: Placements
    output_layouts: Placements
    use_local_output: bool
    group: GroupSpec  # this field and the following are constants in a compiled forward
    input_layout: DimLayout
    output_layout: DimLayout

    @property
    def ranks(self) -> int:
        return self.mesh.size(0)


class Unfused(Exception):
    """Raised with the reason why torch's style runs instead of a fused op."""


class FusedLinear(nn.Linear):
    """The base of fused linears: it runs a fused op, or torch's style if there is none."""

    _style: Style
    _explanation: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run nn.Linear under the style; ``input``: a local tensor of ``input_layouts``, or a DTensor."""
        try:
            output, found = self._fused(input)
        except Unfused as why:
            self._say(f"torch's {self._style.name}: {why}")
            return self._as_torch(input)
        # rows of a product are ordered by sequence; callers that view [b, s, h] expect torch's order
        output, style = output.flatten().view(output.shape), self._style
        as_wanted = found == from_start(style.output_layout, output.dim())
        if as_wanted and style.use_local_output:
            return output
        placement = Shard(found) if isinstance(found, int) else Replicate()
        whole = DTensor.from_local(output, style.mesh, (placement,), run_check=False)
        return _prepare_output(
            style.output_layouts, style.use_local_output, self, whole, style.mesh
        )

    def explain(self) -> str:
        """Return a text: what the last forward ran, and why; before the first, what the layouts require."""
        return self._explanation

    def _say(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self._explanation = text

    def _as_torch(self, input: torch.Tensor) -> torch.Tensor:
        style = self._style
        torch_s = getattr(torch_style, style.name)
        prepared = torch_s._prepare_input_fn(
            style.input_layouts, style.desired_input_layouts, self, (input,), style.mesh
        )
        output: Any = nn.Linear.forward(self, prepared)
        return _prepare_output(
            style.output_layouts, style.use_local_output, self, output, style.mesh
        )

    @abc.abstractmethod
    def _fused(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
        """Return the local output and its layout. Raise Unfused before anything has run."""

    def _local(self, input: torch.Tensor) -> tuple[torch.Tensor, DimLayout]:
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
        """Return local input, weight (k, n) and bias or None, in the dtype of autocast."""
        parameters: list[Any] = [self.weight, self.bias]
        found: list[Any] = [
            None if parameter is None else parameter.to_local() for parameter in parameters
        ]
        found = [input, *found]
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            found = [None if each is None else each.to(dtype) for each in found]
        local, weight, bias = found
        return local, weight.t(), bias


class ColwiseLinear(FusedLinear):
    """Weight Shard(0), bias Shard(0): the matmul gathers an input that is sharded by sequence."""

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
            output: Any = all_gather_matmul(local, weight, layout, bias=bias, group=style.group)
            return wait(output), last
        gathered, output = all_gather_matmul(
            local, weight, layout, bias=bias, group=style.group, return_gathered=True
        )
        gathered, output = wait(gathered), wait(output)
        shared_gathers.keep(input, self, gathered, output, layout, style.group)
        return output, last

    def _nothing_to_gather(self, input: torch.Tensor, layout: DimLayout) -> str:
        text = f"the input is {_text(layout)}, not sharded by sequence: nothing to gather"
        if layout == REPLICATED and isinstance(input, DTensor):
            text += "; to fuse the gather, use interlace.tensor's PrepareModuleInput, not torch's"
        return text


class RowwiseLinear(FusedLinear):
    """Weight Shard(1), bias replicated: the matmul scatters the sums over ranks, or adds them up."""

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
            text = f"the output must become {_text(wanted)}"
            raise Unfused(f"{text}, neither replicated nor sharded by sequence")
        _even("the output's", local.shape[wanted], wanted, style.ranks)
        local, weight, bias = self._operands(local)
        self._say(f"matmul_reduce_scatter over dimension {wanted}")
        if bias is not None:
            bias = _Replicated.apply(bias, style.group)  # type: ignore[no-untyped-call]
        output: Any = matmul_reduce_scatter(
            local, weight, "sum", wanted, bias=bias, group=style.group
        )
        return wait(output), wanted


class _Replicated(torch.autograd.Function):
    """A parameter that all ranks have: its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, group: object) -> torch.Tensor:
        ctx.group = group
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return wait(all_reduce(grad.contiguous(), group=ctx.group)), None


class _ReplicatedMatmul(torch.autograd.Function):
    """``matmul_all_reduce`` to a replicated output, whose gradient all ranks have already."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.biased = bias is not None
        product: Any = matmul_all_reduce(input, weight, bias=bias, group=group)
        return wait(product)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        input, weight = ctx.saved_tensors
        of_input = grad @ weight.t() if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)
        of_weight = input.flatten(0, -2).t() @ rows if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None


def layout_of(placement: Placement) -> DimLayout:
    """Return the dimension of a Shard, REPLICATED, or the name of another placement.

    >>> layout_of(Shard(1)), layout_of(Replicate())
    (1, 'replicated')
    """
    if placement.is_replicate():
        return REPLICATED
    if placement.is_shard():
        return int(placement.dim)  # type: ignore[attr-defined]
    return str(placement)


def from_start(layout: DimLayout, ndim: int) -> DimLayout:
    return layout + ndim if isinstance(layout, int) and layout < 0 else layout


def gathered_dim(shard: DTensor, wanted: Placement, mesh: DeviceMesh) -> int:
    """Return the dimension along which a linear gathers ``shard``; raise Unfused if it does not."""
    layout = from_start(layout_of(shard.placements[0]), shard.dim())
    if shard.device_mesh != mesh or mesh.ndim != 1:
        raise Unfused("the input is on another mesh")
    if not isinstance(layout, int) or layout == shard.dim() - 1 or not wanted.is_replicate():
        raise Unfused(
            f"from {_text(layout)} to {_text(layout_of(wanted))} is not a gather of a sequence"
        )
    _even("the input's", shard.shape[layout], layout, mesh.size(0))
    return layout


def _text(layout: DimLayout) -> str:
    return f"Shard({layout})" if isinstance(layout, int) else layout


def _even(name: str, length: int, dim: int, ranks: int) -> None:
    if length % ranks:
        raise Unfused(
            f"{name} length {length} of dimension {dim} is not divisible by {ranks} ranks"
        )


def _prepare_output(
    layouts: Placements, local: bool, _module: nn.Module, output: DTensor, _mesh: DeviceMesh
) -> torch.Tensor:
    """Return ``output`` in ``layouts``, as torch's styles do, but without an AsyncCollectiveTensor.

    Such a tensor loses its history when a compiled module receives it: torch 2.13 then fails in
    backward.
    """
    if output.placements != layouts:
        output = output.redistribute(placements=layouts)
    return output.to_local() if local else output


class ColwiseParallel(torch_style.ColwiseParallel):
    """Shard an ``nn.Linear`` or ``nn.Embedding`` by its output features.

    Options as in torch: ``input_layouts`` (default Replicate()), ``output_layouts`` (Shard(-1)),
    ``use_local_output`` (True). With ``input_layouts=Shard(d)``, d the sequence dimension, a linear gathers
    its input while it multiplies (``interlace.functional.all_gather_matmul``). See the module.

    >>> from torch.distributed.tensor import Shard
    >>> ColwiseParallel(input_layouts=Shard(1))
    ColwiseParallel(input_layouts=(Shard(dim=1),), output_layouts=(Shard(dim=-1),), use_local_output=True)
    """

    _prepare_output_fn = staticmethod(_prepare_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            return _fused_linear(self, ColwiseLinear, module, device_mesh)
        _torch_runs(module, self)
        return super()._apply(module, device_mesh)


class RowwiseParallel(torch_style.RowwiseParallel):
    """Shard an ``nn.Linear`` by its input features, an ``nn.Embedding`` by its rows.

    Options as in torch: ``input_layouts`` (default Shard(-1)), ``output_layouts`` (Replicate()),
    ``use_local_output`` (True). With ``output_layouts=Shard(d)``, d the sequence dimension, a linear
    scatters its sums while it multiplies (``interlace.functional.matmul_reduce_scatter``).

    >>> from torch.distributed.tensor import Shard
    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Shard(dim=1),), use_local_output=True)
    """

    _prepare_output_fn = staticmethod(_prepare_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            self.desired_input_layouts = (Shard(-1),)
            return _fused_linear(self, RowwiseLinear, module, device_mesh)
        _torch_runs(module, self)
        return super()._apply(module, device_mesh)


class SequenceParallel(torch_style.SequenceParallel):
    """Run a norm or a dropout on this rank's part of the sequence: torch's style.

    Options as in torch: ``sequence_dim`` (default 1), ``use_local_output`` (False).

    >>> SequenceParallel(sequence_dim=0)
    SequenceParallel(sequence_dim=0, use_local_output=False)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        why = "every rank works on its part of the sequence, so it communicates nothing"
        setattr(module, _EXPLANATION, f"torch's SequenceParallel: {why}")
        return super()._apply(module, device_mesh)


class PrepareModuleInput(torch_style.PrepareModuleInput):
    """Convert and redistribute the inputs of a module: torch's style, but linears inside fuse its gathers.

    Options as in torch: ``input_layouts``, ``desired_input_layouts``, ``input_kwarg_layouts``,
    ``desired_input_kwarg_layouts``, ``use_local_output`` (False). An input that is sharded by sequence and
    must become replicated is not gathered at once. The first ColwiseParallel linear that reads it gathers
    it while it multiplies, also for the linears after it. Any other op that reads it gathers it first.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).input_layouts
    (Shard(dim=1),)
    """

    _module: nn.Module
    _said: list[str]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, _EXPLANATION, f"not called yet; {self!r}")

        def prepare(called: nn.Module, inputs: object, kwargs: Mapping[str, object]) -> Any:
            if torch.compiler.is_compiling():  # the compiler then fuses gathers
                return self._prepare_input_kwarg_fn(inputs, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            call = copy.copy(self)  # because several modules may share one style
            call._module, call._said = called, []
            prepared = call._prepare_input_kwarg_fn(inputs, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            call._explain()
            return prepared

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _prepare_input_arg(
        self, input: object, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> Any:
        keeps = input_layout is None or desired_layout in (None, input_layout)
        if keeps or torch.compiler.is_compiling():
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        place = len(self._said)
        try:
            shard, dim = self._shard(input, mesh, input_layout, desired_layout)
        except Unfused as why:
            self._said.append(f"torch's PrepareModuleInput: {why}")
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        self._said.append(f"left to linears: the gather of the input over dimension {dim}")

        def gathered_for(reader: str) -> None:
            self._said[place] = f"all_gather of the input over dimension {dim}: {reader} reads it"
            self._explain()

        return shared_gathers.Ungathered.of(shard, gathered_for)

    def _shard(
        self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> tuple[DTensor, int]:
        """Return the shard that linears gather, and the dimension; raise Unfused if they do not gather."""
        if not shared_gathers.can_share():
            raise Unfused("the call is traced")
        if self.use_local_output:
            raise Unfused("use_local_output=True: the module gets no DTensor")
        if not any(isinstance(module, ColwiseLinear) for module in self._module.modules()):
            raise Unfused("no linear inside has interlace's ColwiseParallel")
        shard = input
        if not isinstance(input, DTensor):
            shard = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        return shard, gathered_dim(shard, desired_layout, mesh)

    def _explain(self) -> None:
        text = "; ".join(self._said) or "torch's PrepareModuleInput: no layout changes"
        setattr(self._module, _EXPLANATION, text)


class PrepareModuleOutput(torch_style.PrepareModuleOutput):
    """Convert and redistribute the outputs of a module: torch's style.

    Options as in torch: ``output_layouts``, ``desired_output_layouts``, ``use_local_output`` (True).

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)).output_layouts
    (Replicate(),)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, _OF_OUTPUT, "torch's PrepareModuleOutput: the linears inside do not use it")
        return super()._apply(module, device_mesh)


class PrepareModuleInputOutput(torch_style.PrepareModuleInputOutput):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` of one module; options as in torch.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> layouts = {"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}
    >>> PrepareModuleInputOutput(**layouts).prepare_module_output.use_local_output
    True
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prepare_module_input.__class__ = PrepareModuleInput
        self.prepare_module_output.__class__ = PrepareModuleOutput


def explain(module: nn.Module) -> dict[str, str]:
    """Return, by name, what the forward runs for every part of ``module`` with a style of interlace.

    Before a part's first call that follows from the layouts. After a call it is what the last call ran, and
    the reason if that was not fused. The name of ``module`` itself is "".

    >>> explain(torch.nn.Linear(2, 2))  # no style was applied
    {}
    """
    found = {}
    for name, each in module.named_modules():
        if isinstance(each, FusedLinear):
            found[name] = each.explain()
        elif texts := [
            getattr(each, key) for key in (_EXPLANATION, _OF_OUTPUT) if hasattr(each, key)
        ]:
            found[name] = "; ".join(texts)
    return found


def _fused_linear(
    style: Any, kind: type[FusedLinear], module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """Return ``module``, an nn.Linear, as a ``kind``, with its parameters split as in torch's style."""
    module = distribute_module(module, mesh, style._partition_linear_fn)
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh must have 1 dimension, got {mesh.ndim}")
    name, layouts, wanted = type(style).__name__, style.input_layouts, style.output_layouts
    group = GroupSpec(*describe((mesh, 0)))
    module.__class__ = kind
    module._style = Style(  # type: ignore[assignment]
        name, mesh, layouts, style.desired_input_layouts, wanted, style.use_local_output,
        group, layout_of(layouts[0]), layout_of(wanted[0]),
    )  # fmt: skip
    module._explanation = f"not called yet; {name} of {layouts}"  # type: ignore[assignment]
    return module


def _torch_runs(module: nn.Module, style: object) -> None:
    why = "may differ" if isinstance(module, nn.Linear) else "is not an nn.Linear"
    setattr(module, _EXPLANATION, f"torch's {type(style).__name__}: {type(module).__name__} {why}")
