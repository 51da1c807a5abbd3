"""The ops' schemas, and their registration with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from interlace.groups import specs
from interlace.ops import gradients, grouped, inductor, undispatched
from interlace.ops.eager import fused, plain, scaled, shapes
from interlace.ops.eager.pending import Started, finish
from interlace.ops.eager.pending import register as register_work
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError

NAMESPACE = "interlace"
GROUP = "SymInt group_size, str group_name"


class Op(NamedTuple):
    """``start`` runs it on a communicator; ``fake`` makes its outputs; both without the group arguments.

    ``fake`` is given the group's size last. ``gradient``: (setup_context, backward).
    """

    name: str
    arguments: str
    start: Callable[..., Started]
    fake: Callable[..., Any]
    gradient: tuple[Callable[..., Any], Callable[..., Any]] | None
    returns: str = "Tensor"

    @property
    def schema(self) -> str:
        return f"{self.name}({self.arguments}, {GROUP}) -> {self.returns}"


def _views(products: Sequence[shapes.Product]) -> list[torch.Tensor]:
    return [product.view for product in products]


REDUCED = gradients.setup_reduction
MOVED = gradients.setup_moved
MATMUL = "str algorithm, ScalarType? out_dtype"

OPS = (
    Op(
        "all_reduce",
        "Tensor input, str reduce_op",
        plain.all_reduce,
        lambda input, reduce_op, size: shapes.like(input),
        (REDUCED, gradients.all_reduce),
    ),
    Op(
        "all_gather",
        "Tensor input, int gather_dim",
        plain.all_gather,
        shapes.gathered,
        (MOVED, gradients.all_gather),
    ),
    Op(
        "reduce_scatter",
        "Tensor input, str reduce_op, int scatter_dim",
        plain.reduce_scatter,
        lambda input, reduce_op, dim, size: shapes.scattered(input, dim, size),
        (REDUCED, gradients.reduce_scatter),
    ),
    Op(
        "all_to_all",
        "Tensor input, SymInt[]? output_split_sizes, SymInt[]? input_split_sizes",
        plain.all_to_all,
        shapes.exchanged,
        (MOVED, gradients.all_to_all),
    ),
    Op(
        "broadcast",
        "Tensor input, int src",
        plain.broadcast,
        lambda input, src, size: shapes.like(input),
        (MOVED, gradients.broadcast),
    ),
    Op(
        "reduce",
        "Tensor input, str reduce_op, int dst",
        plain.reduce,
        lambda input, reduce_op, dst, size: shapes.like(input),
        (MOVED, gradients.reduce),
    ),
    Op(
        "permute",
        "Tensor input, int[] src_dst",
        plain.permute,
        lambda input, src_dst, size: shapes.permuted(input, src_dst, size),
        (MOVED, gradients.permute),
    ),
    Op(
        "gather",
        "Tensor input, int dst, int gather_dim",
        plain.gather,
        lambda input, dst, dim, size: shapes.gathered(input, dim, size),
        (MOVED, gradients.gather),
    ),
    Op(
        "scatter",
        "Tensor input, int src, int scatter_dim",
        plain.scatter,
        lambda input, src, dim, size: shapes.scattered(input, dim, size),
        (MOVED, gradients.scatter),
    ),
    Op(
        "rank",
        "Tensor input",
        plain.rank,
        lambda input, size: torch.empty((), dtype=torch.int64, device=input.device),
        None,
    ),
    Op(
        "all_gather_matmul",
        "Tensor input, Tensor[] weights, Tensor?[] biases, int gather_dim, bool return_gathered, "
        + MATMUL,
        fused.all_gather_matmul,
        lambda input, weights, biases, dim, return_gathered, algorithm, out_dtype, size: _views(
            fused.gather_products(input, weights, dim, return_gathered, out_dtype, size)
        ),
        (gradients.setup_gather, gradients.all_gather_matmul),
        "Tensor[]",
    ),
    Op(
        "matmul_reduce_scatter",
        "Tensor input, Tensor weight, Tensor? bias, str reduce_op, int scatter_dim, " + MATMUL,
        fused.matmul_reduce_scatter,
        lambda input, weight, bias, reduce_op, dim, algorithm, out_dtype, size: (
            fused.reduce_product(input, weight, dim, out_dtype, size).view
        ),
        (gradients.setup_reduced, gradients.matmul_reduce_scatter),
    ),
    Op(
        "matmul_all_reduce",
        "Tensor input, Tensor weight, Tensor? bias, str reduce_op, " + MATMUL,
        fused.matmul_all_reduce,
        lambda input, weight, bias, reduce_op, algorithm, out_dtype, size: (
            fused.reduce_product(input, weight, None, out_dtype, size).view
        ),
        (gradients.setup_reduced, gradients.matmul_all_reduce),
    ),
    Op(
        "all_gather_grouped_matmul",
        grouped.ARGUMENTS,
        grouped.all_gather_grouped_matmul,
        grouped.fake,
        (grouped.setup, grouped.gathered_backward),
        "Tensor[]",
    ),
    Op(
        "all_to_all_grouped_matmul",
        grouped.ARGUMENTS,
        grouped.all_to_all_grouped_matmul,
        grouped.fake,
        (grouped.setup, grouped.exchanged_backward),
        "Tensor[]",
    ),
    Op(
        "all_gather_scaled_matmul",
        "Tensor input, Tensor[] weights, Tensor input_scale, Tensor[] weight_scales, Tensor?[] biases, "
        "int gather_dim, bool return_gathered, ScalarType? out_dtype, bool use_fast_accum, "
        "str algorithm",
        scaled.all_gather_scaled_matmul,
        lambda input, weights, s, ws, biases, dim, kept, out_dtype, fast, algorithm, size: _views(
            scaled.gathered_products(input, weights, s, ws, biases, dim, out_dtype, size)
        )[: None if kept else -1],
        (scaled.setup_no_gradient, scaled.no_gradient),
        "Tensor[]",
    ),
    Op(
        "scaled_matmul_reduce_scatter",
        "Tensor input, Tensor weight, Tensor input_scale, Tensor weight_scale, Tensor? bias, "
        "str reduce_op, int scatter_dim, ScalarType? out_dtype, bool use_fast_accum, str algorithm",
        scaled.scaled_matmul_reduce_scatter,
        lambda input, weight, *args: scaled.scattered(input, weight, args[4], args[5], args[8]),
        (scaled.setup_no_gradient, scaled.no_gradient),
    ),
)

WITH_OUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
IN_PLACE = ("all_reduce", "broadcast")
BY_NAME = {op.name: op for op in OPS}
DEVICES = ("CPU", "CUDA")
_ops: Any = torch.ops.interlace

_Library: Any = torch.library.Library
_library: Any = None


def register() -> None:
    """Define all ops, once per process."""
    global _library
    if _library is not None:
        return
    _library = _Library(NAMESPACE, "DEF")
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    _library.define("group_size(str group_name) -> SymInt", tags=tags[1:])
    _library.impl("group_size", specs.size_of, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::group_size", _unknown_size, lib=_library)
    for op in OPS:
        undispatched.offer(op)
        _library.define(op.schema, tags=tags)
        _implement(op.name, _kernel(op), _fake(op))
        if op.gradient is not None:
            setup, backward = op.gradient
            torch.library.register_autograd(
                f"{NAMESPACE}::{op.name}", backward, setup_context=setup, lib=_library
            )
    for name in WITH_OUT:
        op = BY_NAME[name]
        schema = f"{name}_out({op.arguments}, {GROUP}, *, Tensor(a!) out) -> ()"
        _library.define(schema, tags=tags)
        _implement(f"{name}_out", _out_kernel(op), lambda *args, out: None)
    for name in IN_PLACE:
        op = BY_NAME[name]
        arguments = op.arguments.replace("Tensor input", "Tensor(a!) input")
        _library.define(f"{name}_({arguments}, {GROUP}) -> Tensor(a!)", tags=tags)
        _implement(f"{name}_", _in_place_kernel(op), lambda input, *args: input)
        getattr(_ops, f"{name}_").default.py_functionalize_impl(_functional_form(name))


def _unknown_size(name: str) -> Any:
    """Of a group that the tracer knows by name only: the graph is for any size."""
    return torch.library.get_ctx().new_dynamic_size(min=1)


def _implement(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    for device in DEVICES:
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def _bound(name: str, size: int) -> Communicator:
    """The group, in whose place a rank may wait while torch's dispatcher is on its stack.

    Simulated ranks share one stack of C++ frames, which must end in the order in which they began: one that
    gave way in here would leave its own below the others', and end the process.
    """
    communicator = specs.bind(name, size)
    if communicator.place.name == "sim" and communicator.world_size > 1:
        raise InterlaceError(
            f"rank {communicator.rank}: ops of torch.ops.interlace and compiled graphs need ranks of their "
            'own: interlace.run(..., place="shm"). In "sim", call interlace.functional'
        )
    return communicator


def _kernel(op: Op) -> Callable[..., Any]:
    start, single = op.start, op.returns == "Tensor"

    def kernel(*args: Any) -> Any:
        *own, size, name = args
        started = start(_bound(name, size), *own)
        register_work(started)
        # what the op still writes must not count as a change of what autograd saves: own versions
        return started.outputs[0].data if single else [each.data for each in started.outputs]

    return kernel


def _fake(op: Op) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        inductor.register_lowerings()
        return op.fake(*args[:-1])

    return fake


def _out_kernel(op: Op) -> Callable[..., Any]:
    """Complete when it returns: compilers do not know that an op with ``out`` may still read its input."""

    def kernel(*args: Any, out: torch.Tensor) -> None:
        *own, size, name = args
        finish(op.start(_bound(name, size), *own, out=out))

    return kernel


def _in_place_kernel(op: Op) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, *args: Any) -> Any:
        *own, size, name = args
        register_work(op.start(_bound(name, size), input, *own, out=input))
        return input

    return kernel


def _functional_form(name: str) -> Callable[..., Any]:
    """Of an op in place, for graphs that must not change tensors."""

    def functional(ctx: Any, input: torch.Tensor, *args: Any) -> torch.Tensor:
        unwrapped = ctx.unwrap_tensors(input)
        with ctx.redispatch_to_next():
            result = gradients.wait(getattr(_ops, name).default(unwrapped, *args))
        ctx.replace(input, result)
        ctx.commit_update(input)
        ctx.sync(input)
        return input

    return functional
