"""Registration of ops with torch: schemas, kernels, fake kernels, gradients; and lowerings for Inductor.

They are like torch's own collectives. An op in flight reads its inputs and writes its outputs until its
wait. ``_CollectiveKernel`` tells Inductor so, for the first input. If the op were unknown to Inductor, it
might reuse the memory earlier.
"""

import operator
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from interlace.groups import specs
from interlace.ops.op.op import GROUP, Op, finish, register as register_work, wait as wait_tensor
from interlace.runtime.compat.torch_modes import disable
from interlace.runtime.core.call import UNTOLD
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current, needing
from interlace.runtime.core.errors import InterlaceError

Tensor = torch.Tensor
NAMESPACE = "interlace"

WITH_OUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")
DEVICES = ("CPU", "CUDA")
_ops: Any = torch.ops.interlace
_registered: set[str] = set()
_lowered: set[str] = set()
_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default

_complete_at_once: ContextVar[bool] = ContextVar("interlace_complete_at_once", default=False)


class completing:
    """A context in which ops of ``torch.ops.interlace`` are complete when they return.

    A recomputing checkpoint may stop after the op, and then its results are never waited for.
    """

    def __enter__(self) -> None:
        self._token = _complete_at_once.set(True)

    def __exit__(self, *_: object) -> None:
        _complete_at_once.reset(self._token)


_Library: Any = torch.library.Library
_library = _Library(NAMESPACE, "DEF")


def register(op: Op) -> None:
    """Define the op, its gradient, and its forms with ``out`` and in place. Idempotent."""
    if op.name in _registered:
        return
    _registered.add(op.name)
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    _library.define(op.schema, tags=tags)
    _implement(op.name, _kernel(op), _fake(op))
    if op.gradient is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{op.name}", op.backward, setup_context=op.setup_context, lib=_library
        )
    if op.name in WITH_OUT:
        name = f"{op.name}_out"
        schema = f"{name}({op.parameters}, {GROUP}, *, Tensor(a!) out) -> ()"
        _library.define(schema, tags=tags)
        _implement(name, _out_kernel(op), lambda *args, out: None)
    if op.name in IN_PLACE:
        name = f"{op.name}_"
        arguments = op.parameters.replace("Tensor input", "Tensor(a!) input")
        _library.define(f"{name}({arguments}, {GROUP}) -> Tensor(a!)", tags=tags)
        _implement(name, _in_place_kernel(op), _in_place_fake(op))
        getattr(_ops, name).default.py_functionalize_impl(_functional_form(op.name))


def register_group_size() -> None:
    """Define the op with which a graph gets the size of a group."""
    _library.define("group_size(str group_name) -> SymInt", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl("group_size", specs.size_of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::group_size", _unknown_size, lib=_library)


def _unknown_size(name: str) -> Any:
    """Return the size of a group that the tracer knows only by name: the graph is for any size."""
    return torch.library.get_ctx().new_dynamic_size(min=1)


def _implement(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    disable(kernel)  # after a graph break Dynamo would trace the frames of the op that runs
    for device in DEVICES:
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _bound(name: str, size: int) -> Communicator:
    """Return the group. Raise unless its ranks may wait while torch's dispatcher is on the stack.

    Simulated ranks share one stack of C++ frames, which must end in the reverse order of their start. If a
    rank waited here, its frames would stay below those from other ranks, and end the process.
    """
    communicator = specs.bind(name, size)
    if communicator.place.simulated and communicator.world_size > 1:
        raise InterlaceError(
            f"rank {communicator.rank}: ops of torch.ops.interlace and compiled graphs need a process per "
            'rank: interlace.run(..., place="shm"). In "sim", call interlace.functional'
        )
    return communicator


def _kernel(op: Op) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        *values, size, name = args
        needs = current().needs
        communicator = _bound(name, size)
        with needing(UNTOLD if needs is None else needs):
            started = op.begin(communicator, values)
        if _complete_at_once.get():
            finish(started)
        else:
            register_work(started, communicator)
        # new versions: later writes of the op must not count as changes of tensors that autograd saves
        results = [output.data for output in started.outputs]
        return results if op.several else results[0]

    return kernel


def _fake(op: Op) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        _register_lowering(op)
        *values, size, _ = args
        return op.outputs(op.record(values), size)

    return fake


def _out_kernel(op: Op) -> Callable[..., Any]:
    """Return a kernel that waits: compilers do not know that an op with ``out`` still reads its input."""

    def kernel(*args: Any, out: torch.Tensor) -> None:
        *values, size, name = args
        finish(op.begin(_bound(name, size), values, out=out))

    return kernel


def _in_place_kernel(op: Op) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, *args: Any) -> Any:
        *values, size, name = args
        communicator = _bound(name, size)
        register_work(op.begin(communicator, [input, *values], out=input), communicator)
        return input

    return kernel


def _in_place_fake(op: Op) -> Callable[..., Any]:
    def fake(input: torch.Tensor, *args: Any) -> Any:
        _register_lowering(op)
        return input

    return fake


def _functional_form(name: str) -> Callable[..., Any]:
    """Return the functional form of an in-place op, for graphs that must not change tensors."""

    def functional(ctx: Any, input: torch.Tensor, *args: Any) -> torch.Tensor:
        unwrapped = ctx.unwrap_tensors(input)
        with ctx.redispatch_to_next():
            result = wait_tensor(getattr(_ops, name).default(unwrapped, *args))
        ctx.replace(input, result)
        ctx.commit_update(input)
        ctx.sync(input)
        return input

    return functional


def _register_lowering(op: Op) -> None:
    """Register the op's lowering once Inductor is imported. An op is traced before it is lowered."""
    if op.name in _lowered or "torch._inductor.lowering" not in sys.modules:
        return
    lowering: Any = sys.modules["torch._inductor.lowering"]
    if not hasattr(lowering, "register_lowering"):
        return  # Inductor is being imported
    _lowered.add(op.name)
    function = getattr(_ops, op.name).default
    if op.name not in IN_PLACE:
        _register(lowering, function, _out_of_place(lowering, function))
        return
    itself = getattr(_ops, f"{op.name}_").default
    _register(lowering, function, _on_copy(lowering, _in_place(itself)))
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
            return unknown(*args)  # a dispatch without a bound is complete when it returns
        _wait_late(V.graph.current_node)
        nodes: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        kernel = nodes[0].inputs[0] if isinstance(nodes, list) else nodes
        kernel.inputs = _Inputs(kernel.inputs)
        for each in kernel.inputs:
            # the wait keeps only the first one alive, and may not be in this graph
            V.graph.never_reuse_buffers.add(each.get_name())
        return torch.utils._pytree.tree_map(ir.TensorBox.create, nodes)

    return lower


class _Inputs(list[Any]):
    """Inputs of a kernel. The wait for its n-th result asks for its n-th input; results may be more."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(min(at, len(self) - 1) if isinstance(at, int) else at)


def _in_place(op: Any) -> Any:
    from torch._inductor import ir

    def lower(input: Any, *args: Any) -> Any:
        input = ir.ExternKernel.require_contiguous(input)
        ir._CollectiveKernel.create_inplace(op, input, *args)
        return input

    return lower


def _on_copy(lowering: Any, in_place: Any) -> Any:
    """Return a lowering on a copy; Inductor drops the copy if the input is not needed any more."""
    from torch._inductor.virtualized import V

    def lower(input: Any, *args: Any) -> Any:
        _wait_late(V.graph.current_node)
        return in_place(lowering.clone(input), *args)

    return lower


def _wait_late(start: torch.fx.Node) -> None:
    """Move nodes that do not need the results of ``start`` before the waits for them.

    Inductor moves the computation of a value to its use (``reorder_for_locality``). Then the work between
    start and wait would follow the wait. No node passes a node that writes to memory, which might be an
    input of the op.
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
    V.graph.user_to_last_uses.clear()  # it was computed for the old order


def _writes(node: torch.fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator)
