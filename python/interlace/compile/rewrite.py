"""Rewrites of the fusion pass: fused ops that replace collectives and their matmuls."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table

from interlace.compile.graph_nodes import (
    RESHAPES,
    SAME_BITS,
    Collective,
    Unfit,
    aten,
    call,
    inlined,
    is_call,
    same,
    shape,
    static,
    trace,
    value,
    wait_tensor,
)
from interlace.compile.norms import GraphNorm
from interlace.compile.products import GraphProduct
from interlace.compile.scales import Scales, block_operands
from interlace.groups.specs import GroupSpec
from interlace.ops.library import BY_NAME
from interlace.ops.matmul import functional
from interlace.ops.op.async_tensor import wait
from interlace.runtime.numerics.norms import RowNorm

WITH_MATMULS = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}


def fused_op(collective: Collective, products: list[GraphProduct], norm: GraphNorm | None) -> str:
    """Return the name of the op that replaces all three."""
    name = WITH_MATMULS[collective.kind] if products or norm is None else collective.kind
    if products and products[0].blocks:
        name = f"block_scaled_{name}"
    return name if norm is None else f"{name}_norm"


def _start(name: str, collective: Collective, like: fx.Node, **given: object) -> fx.Node:
    """Start an op in place of the collective, with its arguments from ``given`` and defaults."""
    dim, record = collective.dim, BY_NAME[name]
    about = {"gather_dim": dim, "scatter_dim": dim, "reduce_op": collective.reduce_op}
    arguments = [{**record.defaults, **about, **given}.get(each) for each in record.kinds]
    op = getattr(torch.ops.interlace, name).default
    return call(op, (*arguments, collective.size, collective.name), like)


def _result(started: fx.Node, like: fx.Node, index: int | None = None) -> fx.Node:
    """Return the complete result of an op; ``index`` if it has several."""
    one = started if index is None else call(operator.getitem, (started, index), like)
    return call(wait_tensor, (one,), like)


def fuse_gather(collective: Collective, products: list[GraphProduct]) -> None:
    result = collective.result
    matmuls = _calls(products)
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


def _calls(products: Sequence[GraphProduct]) -> set[fx.Node]:
    """Return the calls of the products; if a call changes an argument, the graph has an item of it."""
    nodes = {product.node for product in products}
    return nodes | {each.args[0] for each in nodes if is_call(each, operator.getitem)}  # type: ignore[misc]


def _gathering(
    collective: Collective,
    products: list[GraphProduct],
    input: fx.Node,
    weights: list[fx.Node],
    dim: int,
    kept: bool,
) -> list[fx.Node]:
    """Return the fused op and its outputs: one per weight, then the gathered input if it is ``kept``."""
    like, scales = products[0].node, products[0].scales
    biases: list[fx.Node | None] = [product.bias for product in products]
    if products[0].batch or not any(bias is not None for bias in biases):
        biases = []
    given: dict[str, object] = {
        "input": input,
        "weights": weights,
        "biases": biases,
        **_scaled(scales),
    }
    given |= {"gather_dim": dim, "return_gathered": kept}
    given["weight_scales"] = [p.scales.right for p in products if p.scales is not None]
    name = "all_gather_matmul" if scales is None else "all_gather_scaled_matmul"
    started = _start(name, collective, like, **given)
    return [_result(started, like, index) for index in range(len(weights) + kept)]


def _scaled(scales: Scales | None) -> dict[str, object]:
    """Return an op's arguments for the scales of its operands."""
    if scales is None:
        return {}
    of_operands = {"input_scale": scales.left, "weight_scale": scales.right}
    return {**of_operands, "out_dtype": scales.out_dtype, "use_fast_accum": scales.fast}


def _in_batch(collective: Collective, products: list[GraphProduct], kept: bool) -> list[fx.Node]:
    """Return the outputs of a batched product: an op per entry of the batch, with stacked results."""
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
    """Return whether only ``matmuls`` read ``node``, directly or reshaped."""
    return all(
        user in matmuls
        or (is_call(user, *RESHAPES, *SAME_BITS) and user.users and _only_for(user, matmuls))
        for user in node.users
    )


def _as_before(made: fx.Node, old: fx.Node) -> fx.Node:
    """Return ``made`` in the shape, dtype and strides of ``old``."""
    if not same(shape(made), shape(old)):
        made = call(aten.reshape.default, (made, _lengths(shape(old))), old)
    if value(made).dtype != value(old).dtype:
        made = call(torch.ops.prims.convert_element_type.default, (made, value(old).dtype), old)
    if same(value(made).stride(), value(old).stride()):
        return made
    clone = call(aten.clone.default, (made,), old, memory_format=torch.contiguous_format)
    if not same(clone.meta["val"].stride(), value(old).stride()):
        clone.meta["val"] = value(old)  # a permuted result: torch's passes need the traced value
    return clone


def _vectors(collective: Collective, norm: GraphNorm) -> dict[str, fx.Node | None]:
    """Return the residual in the reduced tensor's shape, and weight and bias of the norm."""
    residual = norm.residual
    if residual is not None and not same(shape(residual), shape(collective.result)):
        lengths = _lengths(shape(collective.result))
        residual = call(aten.reshape.default, (residual, lengths), residual)
    weight, bias = norm.weight, norm.bias
    if norm.static is not None:
        weight, bias = _divided(norm, norm.static, value(collective.result))
    return {"residual": residual, "norm_weight": weight, "norm_bias": bias}


def _divided(norm: GraphNorm, scale: fx.Node, reduced: Any) -> list[fx.Node | None]:
    """Return weight and bias for a norm whose rows are divided by ``scale``, in fp32."""
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


def _start_normed(
    collective: Collective, products: list[GraphProduct], norm: GraphNorm, **given: object
) -> None:
    """Start the op with a norm in its tail; its results replace the norm and the sum."""
    like = collective.result
    given |= {**_vectors(collective, norm), "kind": norm.kind, "eps": norm.eps}
    quantize = "fp8" if norm.scale is not None else "" if norm.static is None else "fp8_static"
    name = fused_op(collective, products, norm)
    started = _start(name, collective, like, quantize=quantize, **given)
    for index, old in enumerate((norm.normed, norm.total, norm.scale)):
        if old is not None:
            old.replace_all_uses_with(_as_before(_result(started, like, index), old))


def fuse_reduction(
    collective: Collective, products: list[GraphProduct], norm: GraphNorm | None
) -> None:
    """Fuse a reduction of products, or of rows without a matmul, and its norm, if it has one."""
    result = collective.result
    lengths = shape(collective.input)[:-1]
    with result.graph.inserting_before(result):
        if norm is not None and not products:
            _start_normed(collective, [], norm, input=collective.input, bias=norm.added)
            return
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
        scales = products[0].scales
        given: dict[str, object] = {"input": left, "weight": right, "bias": bias, **_scaled(scales)}
        if norm is not None and scales is None:
            _start_normed(collective, products, norm, **given)
            return
        op = WITH_MATMULS[collective.kind]
        if scales is not None:
            op = f"scaled_{op}"
            if value(scales.left).numel() != 1:
                given["input_scale"] = _reshaped(scales.left, [*shape(left)[:-1], 1])
        made = _as_before(_result(_start(op, collective, result, **given), result), result)
    result.replace_all_uses_with(made)


def _scattering_batch(collective: Collective, product: GraphProduct) -> fx.Node:
    """Start an op for every entry of the batch, and stack their outputs."""
    like, parts = collective.result, []
    for entry in range(product.batch):
        left = call(aten.select.int, (product.left, 0, entry), like)
        right = call(aten.select.int, (product.right, 0, entry), like)
        given = {"input": left, "weight": right, "scatter_dim": collective.dim - 1}
        parts.append(_start("matmul_reduce_scatter", collective, like, **given))
    return _stacked([_result(part, like) for part in parts], like)


def _stacked(entries: list[fx.Node], like: fx.Node) -> fx.Node:
    """Return ``aten.stack`` in the ops that Inductor has after its decompositions."""
    rows = [call(aten.unsqueeze.default, (entry, 0), like) for entry in entries]
    return call(aten.cat.default, (rows, 0), like)


def _rows(products: list[GraphProduct], lengths: list[object]) -> fx.Node:
    """Return the concatenated left operands, with the leading dimensions of the whole product."""
    left = products[0].left
    if len(products) > 1:
        flat = [_reshaped(p.left, [-1, p.inner]) for p in products]
        left = call(aten.cat.default, (flat, 1), left)
    inner = sum(product.inner for product in products)
    return _reshaped(left, [*_lengths(lengths), inner])


def _lengths(lengths: list[Any]) -> list[int]:
    """Return lengths for ``reshape``: -1 for a symbolic length."""
    return [length if static(length) else -1 for length in lengths]


def _reshaped(node: fx.Node, lengths: list[int]) -> fx.Node:
    if same(shape(node), lengths) or (len(lengths) == value(node).dim() == 2):
        return node
    return call(aten.reshape.default, (node, lengths), node)


def _reduced_bias(collective: Collective, products: list[GraphProduct]) -> fx.Node | None:
    """Return the bias to add once, after the reduction, for those that each rank adds before it."""
    biases = [product.bias for product in products if product.bias is not None]
    if not biases:
        return None
    total = biases[0]
    for bias in biases[1:]:
        total = call(aten.add.Tensor, (total, bias), bias)
    return _result(_start("all_reduce", collective, total, input=total), total)


# -- block-scaled operands ----------------------------------------------------------------------------


def _traced(function: Callable[..., Any], inputs: Sequence[fx.Node]) -> fx.Graph:
    """Trace a functional form; its errors become Unfit."""
    functional_graph = torch.func.functionalize(function, remove="mutations")
    try:
        traced = trace(functional_graph, inputs, decomposition_table=select_decomp_table())
    except (ValueError, TypeError, RuntimeError) as error:
        raise Unfit(str(error)) from None
    traced.eliminate_dead_code()
    return traced


def _factors(product: GraphProduct) -> list[fx.Node]:
    """Return the nodes of the weight, its scales and its bias."""
    assert product.scales is not None
    bias = [] if product.bias is None else [product.bias]
    return [product.right, product.scales.right, *product.scales.whole, *bias]


def _operands(product: GraphProduct, tensors: Sequence[Any], swizzled: bool) -> tuple[Any, ...]:
    """Return both operands and the bias from the left operand, its scales and :func:`_factors`."""
    assert product.scales is not None
    left, of_left, right, of_right, *rest = tensors
    count = len(product.scales.whole)
    factors = left, of_left, right, of_right
    both = block_operands(product.scales, factors, rest[:count], swizzled=swizzled)
    return *both, *(rest[count:] or [None])


def gather_of_blocks(collective: Collective, products: list[GraphProduct]) -> Callable[[], None]:
    """Return the rewrite for a gather of block-scaled rows and of their scales; raise Unfit."""
    result, matmuls, scales = collective.result, _calls(products), products[0].scales
    assert scales is not None
    assert scales.gather is not None
    kept = not _only_for(result, matmuls)
    inputs = [collective.input, scales.gather.input, *itertools.chain(*map(_factors, products))]
    how: dict[str, Any] = {"return_gathered": kept, "out_dtype": scales.out_dtype}
    how["group"] = GroupSpec(collective.name, collective.size)

    def gathering(left: Any, of_left: Any, *factors: Any) -> list[Any]:
        rest, weights, biases = iter(factors), [], []
        for product in products:
            own = itertools.islice(rest, len(_factors(product)))
            input, weight, bias = _operands(product, (left, of_left, *own), scales.own_swizzled)
            weights.append(weight)
            biases.append(bias)
        about: Any = input, weights, collective.dim
        made: Any = functional.all_gather_matmul(*about, bias=biases, **how)
        outputs = made[1] if kept else made
        waited = [wait(each) for each in outputs]
        return [*waited, made[0].values.view(value(result).dtype)] if kept else waited

    traced = _traced(gathering, inputs)

    def rewrite() -> None:
        outputs = inlined(traced, inputs, products[0].node)
        with result.graph.inserting_before(products[0].node):
            for product, output in zip(products, outputs, strict=False):
                product.node.replace_all_uses_with(_as_before(output, product.node))
            if kept:
                made = _as_before(outputs[-1], result)
                result.replace_all_uses_with(made, delete_user_cb=lambda user: user not in matmuls)

    return rewrite


def reduction_of_blocks(
    collective: Collective, product: GraphProduct, norm: GraphNorm | None
) -> Callable[[], None]:
    """Return the rewrite for the reduction of a product of block-scaled operands; raise Unfit.

    If it has a norm, the rewrite is for both.
    """
    scales, result = product.scales, collective.result
    assert scales is not None
    lead, group = shape(collective.input)[:-1], GroupSpec(collective.name, collective.size)
    operands = [product.left, scales.left, product.right, scales.right, *scales.whole]
    how: dict[str, Any] = {"group": group, "out_dtype": scales.out_dtype}
    if collective.kind == "reduce_scatter":
        how["scatter_dim"] = collective.dim
    bias, of_norm = product.bias, {}
    if norm is not None:
        bias = norm.added if bias is None else bias
        of_norm = {"residual": norm.residual, "weight": norm.weight, "bias": norm.bias}
        of_norm["static"] = norm.static
        static = None if norm.static is None else "fp8_static"
        how["quantize"] = static if norm.scale is None else "fp8"
    vectors = {name: node for name, node in of_norm.items() if node is not None}
    inputs = [*operands, *vectors.values(), *([] if bias is None else [bias])]
    form = getattr(functional, WITH_MATMULS[collective.kind])

    def reducing(left: Any, *others: Any) -> list[Any]:
        rows, count = left.reshape(*lead, left.shape[-1]), len(operands) - 1
        input, weight, _ = _operands(product, (rows, *others[:count]), scales.swizzled)
        rest = [*others[count:]]
        tensors = dict(zip(vectors, rest, strict=False))
        factors = input, weight, collective.reduce_op
        added = None if bias is None else rest[-1]
        if norm is None:
            return [wait(form(*factors, bias=added, **how))]
        residual, row_norm = tensors.get("residual"), _row_norm(norm, tensors, weight.shape[1])
        if residual is not None:
            residual = residual.reshape(shape(result))
        normed, total = form(*factors, bias=added, residual=residual, norm=row_norm, **how)
        values, *of_rows = normed if isinstance(normed, tuple) else (normed,)
        return [*map(wait, (values, total, *of_rows))]

    traced = _traced(reducing, inputs)

    def rewrite() -> None:
        with result.graph.inserting_before(result):
            total = _reduced_bias(collective, [product])
            if total is not None and norm is not None and norm.added is not None:
                total = call(aten.add.Tensor, (total, norm.added), norm.added)
            nodes = inputs if total is None else [*inputs[:-1], total]
            outputs = inlined(traced, nodes, result)
            olds = [result] if norm is None else [norm.normed, norm.total, norm.scale]
            for old, output in zip(olds, outputs, strict=False):
                if old is not None:
                    old.replace_all_uses_with(_as_before(output, old))

    return rewrite


def _row_norm(norm: GraphNorm, tensors: dict[str, Any], columns: int) -> RowNorm:
    """Return the norm for a functional form; a scale for all rows divides its vectors."""
    weight, bias, static = (tensors.get(name) for name in ("weight", "bias", "static"))
    if static is not None:
        weight = static.new_ones(columns) if weight is None else weight
        weight = weight.float() / static.reshape(1)
        bias = None if bias is None else bias.float() / static.reshape(1)
    return RowNorm(norm.kind, norm.eps, weight, bias)
