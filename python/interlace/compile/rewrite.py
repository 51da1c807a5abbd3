"""Rewrites of the fusion pass: fused ops in the place of collectives and their matmuls."""

import operator
from typing import Any

import torch
from torch import fx

from interlace.compile.collectives import Collective
from interlace.compile.graph_nodes import (
    RESHAPES,
    aten,
    call,
    is_call,
    same,
    shape,
    static,
    value,
    wait_tensor,
)
from interlace.compile.matmuls import GraphProduct
from interlace.compile.norms import GraphNorm

_ops: Any = torch.ops.interlace
ALGORITHM = "auto"


def fuse_gather(collective: Collective, products: list[GraphProduct]) -> None:
    result = collective.result
    matmuls = {product.node for product in products}
    kept = not _only_for(result, matmuls)
    with result.graph.inserting_before(products[0].node):
        if products[0].batch:
            outputs = _in_batch(collective, products, kept)
        else:
            weights = [product.right for product in products]
            outputs = _gathering(
                collective, products, collective.input, weights, collective.dim, kept
            )
        for product, waited in zip(products, outputs, strict=False):
            made = _as_before(waited, product.node)
            if product.added is not None:
                made = call(aten.add.Tensor, (made, product.added), product.node)
            product.node.replace_all_uses_with(made)
        if kept:
            made = _as_before(outputs[-1], result)
            result.replace_all_uses_with(made, delete_user_cb=lambda user: user not in matmuls)


def _gathering(
    collective: Collective,
    products: list[GraphProduct],
    input: fx.Node,
    weights: list[fx.Node],
    dim: int,
    kept: bool,
) -> list[fx.Node]:
    """The fused op, and its outputs: one per weight, then the gathered input if it is ``kept``."""
    group, like, scales = (collective.size, collective.name), products[0].node, products[0].scales
    biases: list[fx.Node | None] = [product.bias for product in products]
    if products[0].batch or not any(bias is not None for bias in biases):
        biases = []
    if scales is None:
        op = _ops.all_gather_matmul.default
        arguments: tuple[Any, ...] = (input, weights, biases, dim, kept, ALGORITHM, None)
    else:
        op = _ops.all_gather_scaled_matmul.default
        theirs = [product.scales.right for product in products if product.scales is not None]
        how = (scales.out_dtype, scales.fast, ALGORITHM)
        arguments = (input, weights, scales.left, theirs, biases, dim, kept, *how)
    started = call(op, (*arguments, *group), like)
    return [
        call(wait_tensor, (call(operator.getitem, (started, index), like),), like)
        for index in range(len(weights) + kept)
    ]


def _in_batch(collective: Collective, products: list[GraphProduct], kept: bool) -> list[fx.Node]:
    """The outputs of a batched product: an op per entry of the batch, whose results are put together."""
    rows: list[list[fx.Node]] = []
    for entry in range(products[0].batch):
        one = call(aten.select.int, (collective.input, 0, entry), products[0].node)
        weights = [call(aten.select.int, (p.right, 0, entry), p.node) for p in products]
        dim = collective.dim - 1
        rows.append(_gathering(collective, products, one, weights, dim, kept))
    likes = [product.node for product in products] + [collective.result] * kept
    columns = zip(likes, *rows, strict=True)
    return [_stacked(list(column), like) for like, *column in columns]


def _only_for(node: fx.Node, matmuls: set[fx.Node]) -> bool:
    """Whether nothing but ``matmuls`` reads ``node``, itself or reshaped."""
    return all(
        user in matmuls or (is_call(user, *RESHAPES) and user.users and _only_for(user, matmuls))
        for user in node.users
    )


def _as_before(made: fx.Node, old: fx.Node) -> fx.Node:
    """``made`` in the shape, dtype and strides of ``old``."""
    if not same(shape(made), shape(old)):
        made = call(aten.reshape.default, (made, _lengths(shape(old))), old)
    if value(made).dtype != value(old).dtype:
        made = call(torch.ops.prims.convert_element_type.default, (made, value(old).dtype), old)
    if same(value(made).stride(), value(old).stride()):
        return made
    clone = call(aten.clone.default, (made,), old, memory_format=torch.contiguous_format)
    if not same(clone.meta["val"].stride(), value(old).stride()):
        clone.meta["val"] = value(old)  # a permuted result: torch's passes keep what the tracer saw
    return clone


def fuse_rows(collective: Collective, norm: GraphNorm) -> None:
    """A reduction and its norm, of rows that come from no matmul."""
    dims = () if collective.kind == "all_reduce" else (collective.dim, None)
    with collective.result.graph.inserting_before(collective.result):
        op = getattr(_ops, f"{collective.kind}_norm").default
        options = collective.reduce_op, *dims, ALGORITHM
        arguments = (collective.input, norm.added, *_normed(collective, norm), *options)
        _norm_outputs(op, arguments, collective, norm)


def _normed(collective: Collective, norm: GraphNorm) -> tuple[fx.Node | None, ...]:
    """The residual, in the shape of what is reduced, weight and bias of the norm."""
    residual = norm.residual
    if residual is not None and not same(shape(residual), shape(collective.result)):
        lengths = _lengths(shape(collective.result))
        residual = call(aten.reshape.default, (residual, lengths), residual)
    if norm.static is None:
        return residual, norm.weight, norm.bias
    return residual, *_divided(norm, norm.static, value(collective.result))


def _divided(norm: GraphNorm, scale: fx.Node, reduced: Any) -> list[fx.Node | None]:
    """Weight and bias of the norm, which then gives its rows divided by ``scale``, in fp32."""
    divisor = call(aten.reshape.default, (scale, [1]), scale)
    weight, vectors = norm.weight, []
    if weight is None:
        how = {"dtype": torch.float32, "device": reduced.device}
        weight = call(aten.full.default, ([reduced.shape[-1]], 1.0), scale, **how)
    for each in (weight, norm.bias):
        if each is not None:
            each = call(torch.ops.prims.convert_element_type.default, (each, torch.float32), each)
            each = call(aten.div.Tensor, (each, divisor), each)
        vectors.append(each)
    return vectors


def _norm_outputs(
    op: Any, arguments: tuple[Any, ...], collective: Collective, norm: GraphNorm
) -> None:
    """Start ``op``; what it gives takes the place of the norm and of the sum."""
    like = collective.result
    gather = () if collective.kind == "all_reduce" else (False,)
    quantize = "fp8" if norm.scale is not None else "" if norm.static is None else "fp8_static"
    how = (norm.kind, norm.eps, quantize, *gather, collective.size, collective.name)
    started = call(op, (*arguments, *how), like)
    for index, old in enumerate((norm.normed, norm.total, norm.scale)):
        if old is not None:
            waited = call(wait_tensor, (call(operator.getitem, (started, index), like),), like)
            old.replace_all_uses_with(_as_before(waited, old))


def fuse_reduction(
    collective: Collective, products: list[GraphProduct], norm: GraphNorm | None = None
) -> None:
    result, size, name = collective.result, collective.size, collective.name
    lengths = shape(collective.input)[:-1]
    with result.graph.inserting_before(result):
        if products[0].batch:
            made = _as_before(_scattering_batch(collective, products[0]), result)
            result.replace_all_uses_with(made)
            return
        left = _rows(products, lengths)
        right = products[0].right
        if len(products) > 1:
            right = call(aten.cat.default, ([p.right for p in products], 0), right)
        bias = _reduced_bias(collective, products)
        if norm is not None and norm.added is not None:
            both = (bias, norm.added)
            bias = norm.added if bias is None else call(aten.add.Tensor, both, norm.added)
        reduce_op, dim, scales = collective.reduce_op, collective.dim, products[0].scales
        options: tuple[Any, ...] = (ALGORITHM, None, size, name)
        if scales is not None:
            op = _ops.scaled_matmul_reduce_scatter.default
            scale = scales.left
            if value(scale).numel() != 1:
                scale = _reshaped(scale, [*shape(left)[:-1], 1])
            arguments: tuple[Any, ...] = (left, right, scale, scales.right, bias, reduce_op, dim)
            options = (scales.out_dtype, scales.fast, ALGORITHM, size, name)
        elif collective.kind == "reduce_scatter":
            op = _ops.matmul_reduce_scatter.default
            arguments = (left, right, bias, reduce_op, dim, None)
        else:
            op = _ops.matmul_all_reduce.default
            arguments = (left, right, bias, reduce_op)
        if norm is not None and scales is None:
            op = getattr(_ops, f"{op._schema.name.split('::')[1]}_norm").default
            arguments = (*arguments[:3], *_normed(collective, norm), *arguments[3:])
            _norm_outputs(op, (*arguments, ALGORITHM, None), collective, norm)
            return
        started = call(op, (*arguments, *options), result)
        waited = call(wait_tensor, (started,), result)
        made = _as_before(waited, result)
    result.replace_all_uses_with(made)


def _scattering_batch(collective: Collective, product: GraphProduct) -> fx.Node:
    """An op for every entry of the batch, and their outputs together."""
    like, parts = collective.result, []
    for entry in range(product.batch):
        left = call(aten.select.int, (product.left, 0, entry), like)
        right = call(aten.select.int, (product.right, 0, entry), like)
        arguments = (left, right, None, collective.reduce_op, collective.dim - 1, None)
        options = (ALGORITHM, None, collective.size, collective.name)
        parts.append(call(_ops.matmul_reduce_scatter.default, (*arguments, *options), like))
    waited = [call(wait_tensor, (part,), like) for part in parts]
    return _stacked(waited, like)


def _stacked(entries: list[fx.Node], like: fx.Node) -> fx.Node:
    """``aten.stack`` in the ops that Inductor has after its decompositions."""
    rows = [call(aten.unsqueeze.default, (entry, 0), like) for entry in entries]
    return call(aten.cat.default, (rows, 0), like)


def _rows(products: list[GraphProduct], lengths: list[Any]) -> fx.Node:
    """The left operands side by side, with the leading dimensions of the whole product."""
    left = products[0].left
    if len(products) > 1:
        flat = [_reshaped(p.left, [-1, p.inner]) for p in products]
        left = call(aten.cat.default, (flat, 1), left)
    inner = sum(product.inner for product in products)
    return _reshaped(left, [*_lengths(lengths), inner])


def _lengths(lengths: list[Any]) -> list[int]:
    """For ``reshape``: -1 for a symbolic length."""
    return [length if static(length) else -1 for length in lengths]


def _reshaped(node: fx.Node, lengths: list[int]) -> fx.Node:
    if same(shape(node), lengths) or (len(lengths) == value(node).dim() == 2):
        return node
    return call(aten.reshape.default, (node, lengths), node)


def _reduced_bias(collective: Collective, products: list[GraphProduct]) -> fx.Node | None:
    """The bias to add once, after the reduction, for those that each rank adds before it."""
    biases = [product.bias for product in products if product.bias is not None]
    if not biases:
        return None
    total = biases[0]
    for bias in biases[1:]:
        total = call(aten.add.Tensor, (total, bias), bias)
    arguments = (total, collective.reduce_op, collective.size, collective.name)
    started = call(_ops.all_reduce.default, arguments, total)
    return call(wait_tensor, (started,), total)
