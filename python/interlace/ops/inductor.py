"""Lowerings of the ops for Inductor: as torch's own collectives.

An op in flight reads its inputs and writes its outputs until its wait. ``_CollectiveKernel`` says so, of
the first input; as what Inductor makes of an op that it does not know, memory might be used again before.
"""

import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch

_registered = False
_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default


def register_lowerings(names: Iterable[str]) -> None:
    """Tell Inductor of the ops of these names, once, when it is there.

    Fake kernels call this: what is lowered was traced before.
    """
    global _registered
    if _registered or "torch._inductor.lowering" not in sys.modules:
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    if not hasattr(lowering, "register_lowering"):
        return  # it is being imported
    _registered = True
    ops: Any = torch.ops.interlace
    in_place = ("all_reduce", "broadcast")
    for name in names:
        if name not in in_place:
            op = getattr(ops, name).default
            _register(lowering, op, _out_of_place(lowering, op))
    for name in in_place:
        itself = getattr(ops, f"{name}_").default
        _register(lowering, getattr(ops, name).default, _cloned(lowering, _in_place(itself)))
        _register(lowering, itself, _in_place(itself))


def _register(lowering: Any, op: Any, lower: Any) -> None:
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _out_of_place(lowering: Any, op: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    unknown = lowering.fallback_handler(op, add_to_fallback_set=False)

    def lower(*args: Any) -> Any:
        if V.graph.current_node.meta.get("unbacked_bindings"):
            return unknown(*args)  # a dispatch without a bound, which has ended when it returns
        _wait_late(V.graph.current_node)
        made: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        kernel = made[0].inputs[0] if isinstance(made, list) else made
        kernel.inputs = _Inputs(kernel.inputs)
        for each in kernel.inputs:
            # the wait holds on to the first one only, and may not be in this graph
            V.graph.never_reuse_buffers.add(each.get_name())
        return torch.utils._pytree.tree_map(ir.TensorBox.create, made)

    return lower


class _Inputs(list[Any]):
    """Of a kernel. The wait for its n-th result asks for its n-th input; results may be more."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(min(at, len(self) - 1) if isinstance(at, int) else at)


def _in_place(op: Any) -> Any:
    from torch._inductor import ir

    def lower(input: Any, *args: Any) -> Any:
        input = ir.ExternKernel.require_contiguous(input)
        ir._CollectiveKernel.create_inplace(op, input, *args)
        return input

    return lower


def _cloned(lowering: Any, in_place: Any) -> Any:
    """On a copy, which Inductor leaves out where the input is not needed any more."""
    from torch._inductor.virtualized import V

    def lower(input: Any, *args: Any) -> Any:
        _wait_late(V.graph.current_node)
        return in_place(lowering.clone(input), *args)

    return lower


def _wait_late(start: torch.fx.Node) -> None:
    """Put what does not need the results of ``start`` before the waits for them.

    Inductor moves what makes a value to where it is used (``reorder_for_locality``): the work that was
    between start and wait goes behind the wait. What is moved here comes later in a graph that is being
    interpreted. Nothing passes a node that writes to memory, which might be an input of the op.
    """
    from torch._inductor.virtualized import V

    for each in (start, *[user for user in start.users if user.target is operator.getitem]):
        for wait in [user for user in each.users if user.target is _wait_tensor]:
            behind, before = {wait}, []
            node = wait.next
            while node.op == "call_function" and not _writes(node):
                if node.target is _wait_tensor or not behind.isdisjoint(node.all_input_nodes):
                    behind.add(node)
                else:
                    before.append(node)
                node = node.next
            for node in before:
                wait.prepend(node)
    V.graph.user_to_last_uses.clear()  # the interpreter's, of the order that was


def _writes(node: torch.fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator)
