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

and the gradient of its input is the other one. What is not in this table, and what does not fit (lengths
that the ranks do not divide, subclasses of nn.Linear with a forward of their own), runs as torch's style
does. :func:`explain` says what ran, and why.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import style as torch_style

from interlace.groups.specs import GroupSpec, describe
from interlace.tensor.mesh import fused_linears

_EXPLANATION = "_interlace_style"


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
        elif hasattr(each, _EXPLANATION):
            found[name] = getattr(each, _EXPLANATION)
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
