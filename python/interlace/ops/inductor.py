"""How Inductor is to lower the ops: as torch's own collectives.

An op in flight reads its inputs and writes its outputs until its wait. ``_CollectiveKernel`` says so; as
what Inductor makes of an op that it does not know, their memory might be used again before.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_registered = False


def register_lowerings() -> None:
    """Tell Inductor, once, when it is there. Fake kernels call this: what is lowered was traced before."""
    global _registered
    if _registered or "torch._inductor.lowering" not in sys.modules:
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    if not hasattr(lowering, "register_lowering"):
        return  # it is being imported
    _registered = True
    ops: Any = torch.ops.interlace
    for name in (
        "all_gather", "reduce_scatter", "all_to_all", "reduce", "permute", "gather", "scatter",
        "matmul_reduce_scatter", "matmul_all_reduce", "all_gather_matmul",
    ):  # fmt: skip
        _register(lowering, getattr(ops, name).default, _out_of_place)
    for name in ("all_reduce", "broadcast"):
        in_place = getattr(ops, f"{name}_").default
        _register(lowering, getattr(ops, name).default, _cloned(lowering, in_place))
        _register(lowering, in_place, _in_place)


def _register(lowering: Any, op: Any, make: Any) -> None:
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(make(op) if make in _MAKERS else make)


def _out_of_place(op: Any) -> Any:
    from torch._inductor import ir

    def lower(*args: Any) -> Any:
        made = ir._CollectiveKernel.create_out_of_place(op, *args)
        return torch.utils._pytree.tree_map(ir.TensorBox.create, made)

    return lower


def _in_place(op: Any) -> Any:
    from torch._inductor import ir

    def lower(input: Any, *args: Any) -> Any:
        input = ir.ExternKernel.require_contiguous(input)
        ir._CollectiveKernel.create_inplace(op, input, *args)
        return input

    return lower


def _cloned(lowering: Any, in_place: Any) -> Any:
    """On a copy, which Inductor leaves out where the input is not needed any more."""
    from torch._inductor import ir

    def lower(input: Any, *args: Any) -> Any:
        copy = ir.ExternKernel.require_contiguous(lowering.clone(input))
        ir._CollectiveKernel.create_inplace(in_place, copy, *args)
        return copy

    return lower


_MAKERS = (_out_of_place, _in_place)
