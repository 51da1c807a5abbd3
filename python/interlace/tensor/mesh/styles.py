"""Parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``, whose linears are fused.

Options, parameters and results are those of torch's styles of the same names, from which these inherit. The
forward of an ``nn.Linear`` (``fused_linears.py``) is one op of interlace where there is one:

=================  ======================  =======================  ===========================
style              input_layouts           output_layouts           forward
=================  ======================  =======================  ===========================
ColwiseParallel    Shard(sequence dim)     any                      all_gather_matmul
RowwiseParallel    Shard(-1)               Shard(sequence dim)      matmul_reduce_scatter
RowwiseParallel    Shard(-1)               Replicate()              matmul_all_reduce
=================  ======================  =======================  ===========================

and the gradient of its input is the other one. Linears that read the same input share one gather
(``shared_gathers.py``), also if a PrepareModuleInput has it replicated. What is not in this table, and
what does not fit (lengths that the ranks do not divide, subclasses of nn.Linear with a forward of their
own), runs as torch's style does. :func:`explain` says what ran, and why.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_style

from interlace.groups.specs import GroupSpec, describe
from interlace.tensor.mesh import fused_linears, shared_gathers

_EXPLANATION, _OF_OUTPUT = "_interlace_style", "_interlace_output_style"


class ColwiseParallel(torch_style.ColwiseParallel):
    """Shard an ``nn.Linear`` or ``nn.Embedding`` by its output features.

    Options as torch's: ``input_layouts`` (default Replicate()), ``output_layouts`` (Shard(-1)),
    ``use_local_output`` (True). With ``input_layouts=Shard(d)``, d the sequence dimension, a linear gathers
    its input while it multiplies (``interlace.functional.all_gather_matmul``). See the module.

    >>> from torch.distributed.tensor import Shard
    >>> ColwiseParallel(input_layouts=Shard(1))
    ColwiseParallel(input_layouts=(Shard(dim=1),), output_layouts=(Shard(dim=-1),), use_local_output=True)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            return _fused(self, fused_linears.ColwiseLinear, module, device_mesh)
        _torch_runs(module, self)
        return super()._apply(module, device_mesh)


class RowwiseParallel(torch_style.RowwiseParallel):
    """Shard an ``nn.Linear`` by its input features, an ``nn.Embedding`` by its rows.

    Options as torch's: ``input_layouts`` (default Shard(-1)), ``output_layouts`` (Replicate()),
    ``use_local_output`` (True). With ``output_layouts=Shard(d)``, d the sequence dimension, a linear
    scatters its sums while it multiplies (``interlace.functional.matmul_reduce_scatter``). See the
    module.

    >>> from torch.distributed.tensor import Shard
    >>> RowwiseParallel(output_layouts=Shard(1))
    RowwiseParallel(input_layouts=(Shard(dim=-1),), output_layouts=(Shard(dim=1),), use_local_output=True)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            self.desired_input_layouts = (Shard(-1),)
            return _fused(self, fused_linears.RowwiseLinear, module, device_mesh)
        _torch_runs(module, self)
        return super()._apply(module, device_mesh)


class SequenceParallel(torch_style.SequenceParallel):
    """Run a norm or a dropout on the own part of the sequence: torch's style.

    Options as torch's: ``sequence_dim`` (default 1), ``use_local_output`` (False).

    >>> SequenceParallel(sequence_dim=0)
    SequenceParallel(sequence_dim=0, use_local_output=False)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        why = "every rank works on its part of the sequence, nothing is sent"
        setattr(module, _EXPLANATION, f"torch's SequenceParallel: {why}")
        return super()._apply(module, device_mesh)


class PrepareModuleInput(torch_style.PrepareModuleInput):
    """Convert and redistribute the inputs of a module: torch's style, but linears inside fuse its gathers.

    Options as torch's: ``input_layouts``, ``desired_input_layouts``, ``input_kwarg_layouts``,
    ``desired_input_kwarg_layouts``, ``use_local_output`` (False). An input that is sharded by sequence and
    is to be replicated is not gathered at once. The first ColwiseParallel linear that reads it gathers it
    while it multiplies, for those behind it too. Any other op that reads it has it gathered before.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()).input_layouts
    (Shard(dim=1),)
    """

    _module: nn.Module
    _said: list[str]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, _EXPLANATION, f"not called yet; {self!r}")

        def prepare(called: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling():  # and what then gathers is the compiler's to fuse
                return self._prepare_input_kwarg_fn(inputs, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            call = copy.copy(self)  # of a style, which several modules may have
            call._module, call._said = called, []
            made = call._prepare_input_kwarg_fn(inputs, kwargs, device_mesh)  # type: ignore[no-untyped-call]
            call._explain()
            return made

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any
    ) -> Any:
        keeps = input_layout is None or desired_layout in (None, input_layout)
        if keeps or torch.compiler.is_compiling():
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        place = len(self._said)
        try:
            shard, dim = self._shard(input, mesh, input_layout, desired_layout)
        except fused_linears.Unfused as why:
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
        """The shard that linears gather, and along which dimension; raises Unfused if they do not."""
        if not shared_gathers.can_share():
            raise fused_linears.Unfused("the call is traced")
        if self.use_local_output:
            raise fused_linears.Unfused("use_local_output=True: the module gets no DTensor")
        if not any(
            isinstance(each, fused_linears.ColwiseLinear) for each in self._module.modules()
        ):
            raise fused_linears.Unfused("no linear inside has interlace's ColwiseParallel")
        shard = input
        if not isinstance(input, DTensor):
            shard = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        return shard, fused_linears.gathered_dim(shard, desired_layout, mesh)

    def _explain(self) -> None:
        text = "; ".join(self._said) or "torch's PrepareModuleInput: no layout changes"
        setattr(self._module, _EXPLANATION, text)


class PrepareModuleOutput(torch_style.PrepareModuleOutput):
    """Convert and redistribute the outputs of a module: torch's style.

    Options as torch's: ``output_layouts``, ``desired_output_layouts``, ``use_local_output`` (True).

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)).output_layouts
    (Replicate(),)
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(
            module, _OF_OUTPUT, "torch's PrepareModuleOutput: the linears inside do not know of it"
        )
        return super()._apply(module, device_mesh)


class PrepareModuleInputOutput(torch_style.PrepareModuleInputOutput):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` of one module; options as torch's.

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
    """By name, every part of ``module`` that a style of interlace was applied to: what its forward runs.

    Before its first call, what the layouts say; after, what the last call ran, and why if it was not fused.
    The own name of ``module`` is "".

    >>> explain(torch.nn.Linear(2, 2))  # no style was applied
    {}
    """
    found = {}
    for name, each in module.named_modules():
        if isinstance(each, fused_linears.FusedLinear):
            found[name] = each.explain()
        elif texts := [
            getattr(each, key) for key in (_EXPLANATION, _OF_OUTPUT) if hasattr(each, key)
        ]:
            found[name] = "; ".join(texts)
    return found


def _fused(
    style: Any, kind: type[fused_linears.FusedLinear], module: nn.Module, mesh: DeviceMesh
) -> nn.Module:
    """``module``, an nn.Linear, with its parameters split as torch's style does, as a ``kind``."""
    module = distribute_module(module, mesh, style._partition_linear_fn)
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh must have 1 dimension, got {mesh.ndim}")
    name, given, wanted = type(style).__name__, style.input_layouts, style.output_layouts
    group = GroupSpec(*describe((mesh, 0)))
    module.__class__ = kind
    module._style = fused_linears.Style(  # type: ignore[assignment]
        name, mesh, given, style.desired_input_layouts, wanted, style.use_local_output,
        group, fused_linears.layout_of(given[0]), fused_linears.layout_of(wanted[0]),
    )  # fmt: skip
    module._explanation = f"not called yet; {name} of {given}"  # type: ignore[assignment]
    return module


def _torch_runs(module: nn.Module, style: Any) -> None:
    why = "may differ" if isinstance(module, nn.Linear) else "is no nn.Linear"
    setattr(module, _EXPLANATION, f"torch's {type(style).__name__}: {type(module).__name__} {why}")
