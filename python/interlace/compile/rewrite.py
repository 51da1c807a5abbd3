"""Rewrites of the fusion pass: a function that runs the fused op is traced, and its nodes inserted."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.arguments.checks import RowNorm
from interlace.compile.graph_nodes import (
    RESHAPES,
    SAME_BITS,
    Collective,
    Unfit,
    aten,
    call,
    inline,
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
from interlace.compile.scales import block_operands
from interlace.groups.specs import GroupSpec
from interlace.ops.library import BY_NAME
from interlace.ops.matmul import functional
from interlace.ops.matmul.norms import list_results
from interlace.ops.op.async_tensor import wait

WITH_MATMULS = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}
Rewrite = Callable[[], None]


def fused_op(collective: Collective, products: list[GraphProduct], norm: GraphNorm | None) -> str:
    name = WITH_MATMULS[collective.kind] if products or norm is None else collective.kind
    if products and products[0].blocks:
        name = f"block_scaled_{name}"
    return name if norm is None else f"{name}_norm"


def _trace(
    function: Callable[..., Sequence[Any]], *operands: Any
) -> Callable[[fx.Node], Sequence[fx.Node]]:
    """Trace ``function`` of ``operands``, whose nodes become tensors; its errors become Unfit.

    The returned function inserts the traced nodes before a node, and returns the results' nodes.
    """
    leaves = dict.fromkeys(tree_leaves(operands))
    nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def run(*tensors: Any) -> list[Any]:
        known = dict(zip(nodes, tensors, strict=True))
        return [*function(*tree_map_only(fx.Node, known.__getitem__, operands))]

    functional_graph = torch.func.functionalize(run, remove="mutations")
    try:
        traced = trace(functional_graph, nodes, decomposition_table=select_decomp_table())
    except (ValueError, TypeError, RuntimeError) as error:
        raise Unfit(str(error)) from None
    traced.eliminate_dead_code()
    return lambda like: inline(traced, nodes, like)


def _start(name: str, collective: Collective, **options: object) -> list[Any]:
    """Start an op in place of the collective, with its arguments from ``options`` and defaults."""
    dim, record = collective.dim, BY_NAME[name]
    about = {"gather_dim": dim, "scatter_dim": dim, "reduce_op": collective.reduce_op}
    known = {**record.defaults, **about, **options}
    arguments = [known.get(argument) for argument in record.kinds]
    op = getattr(torch.ops.interlace, name).default
    outputs = op(*arguments, collective.size, collective.name)
    return outputs if isinstance(outputs, list) else [outputs]


def _run(name: str, collective: Collective, **options: object) -> list[Any]:
    return [wait_tensor(output) for output in _start(name, collective, **options)]


def _factors(product: GraphProduct) -> tuple[Any, ...]:
    """Return the nodes of the weight, its scales, the scales of the whole product, and the bias."""
    scales = product.scales
    of_weight = (None, ()) if scales is None else (scales.right, scales.whole)
    return product.right, *of_weight, product.bias


def _as_before(node: fx.Node, old: fx.Node) -> fx.Node:
    if not same(shape(node), shape(old)):
        node = call(aten.reshape.default, (node, _lengths(shape(old))), old)
    if value(node).dtype != value(old).dtype:
        node = call(torch.ops.prims.convert_element_type.default, (node, value(old).dtype), old)
    if same(value(node).stride(), value(old).stride()):
        return node
    clone = call(aten.clone.default, (node,), old, memory_format=torch.contiguous_format)
    if not same(clone.meta["val"].stride(), value(old).stride()):
        clone.meta["val"] = value(old)  # a permuted result: torch's passes need the traced value
    return clone


def _lengths(lengths: Sequence[Any]) -> list[int]:
    return [length if static(length) else -1 for length in lengths]


def _reshape(tensor: Any, lengths: Sequence[Any]) -> Any:
    if same(tensor.shape, lengths) or len(lengths) == tensor.dim() == 2:
        return tensor
    return tensor.reshape(_lengths(lengths))


def fuse_gather(collective: Collective, products: list[GraphProduct]) -> Rewrite:
    result, first, scales = collective.result, products[0], products[0].scales
    matmuls = _calls(products)
    kept = not _only_for(result, matmuls)
    of_rows = None if scales is None else scales.left
    if scales is not None and scales.gather is not None:
        of_rows = scales.gather.input

    def gathering(input: Any, of_input: Any, factors: Any) -> Sequence[Any]:
        weights, of_weights, wholes, biases = map(list, zip(*factors, strict=True))
        if scales is not None and first.blocks:
            rows: Any = input
            for index, whole in enumerate(wholes):
                tensors = input, of_input, weights[index], of_weights[index]
                of_product: Any = products[index].scales
                rows, weights[index] = block_operands(
                    of_product, tensors, whole, swizzled=scales.own_swizzled
                )
            group = GroupSpec(collective.name, collective.size)
            options: Any = {"return_gathered": kept, "out_dtype": scales.out_dtype, "group": group}
            replacement: Any = functional.all_gather_matmul(
                rows, weights, collective.dim, bias=biases, **options
            )
            outputs = [wait(output) for output in (replacement[1] if kept else replacement)]
            return [*outputs, replacement[0].values.view(value(result).dtype)] if kept else outputs
        arguments: dict[str, Any] = {"input": input, "weights": weights, "return_gathered": kept}
        arguments["biases"] = biases if any(bias is not None for bias in biases) else []
        if scales is not None:
            arguments |= {"input_scale": of_input, "weight_scales": of_weights}
            arguments |= {"out_dtype": scales.out_dtype, "use_fast_accum": scales.fast}
            return _run("all_gather_scaled_matmul", collective, **arguments)
        if not first.batch:
            return _run("all_gather_matmul", collective, **arguments)
        arguments |= {"biases": [], "gather_dim": collective.dim - 1}
        entries = []
        for entry in range(first.batch):
            arguments |= {"input": input[entry], "weights": [weight[entry] for weight in weights]}
            entries.append(_run("all_gather_matmul", collective, **arguments))
        return [torch.stack(outputs) for outputs in zip(*entries, strict=True)]

    insert = _trace(gathering, collective.input, of_rows, [*map(_factors, products)])

    def rewrite() -> None:
        outputs = insert(first.node)
        with result.graph.inserting_before(first.node):
            for product, output in zip(products, outputs, strict=False):
                replacement = _as_before(output, product.node)
                if product.added is not None:
                    replacement = call(aten.add.Tensor, (replacement, product.added), product.node)
                product.node.replace_all_uses_with(replacement)
            if kept:
                replacement = _as_before(outputs[-1], result)
                result.replace_all_uses_with(
                    replacement, delete_user_cb=lambda user: user not in matmuls
                )

    return rewrite


def _calls(products: Sequence[GraphProduct]) -> set[fx.Node]:
    nodes = {product.node for product in products}
    return nodes | {node.args[0] for node in nodes if is_call(node, operator.getitem)}  # type: ignore[misc]


def _only_for(node: fx.Node, matmuls: set[fx.Node]) -> bool:
    return all(
        user in matmuls
        or (is_call(user, *RESHAPES, *SAME_BITS) and user.users and _only_for(user, matmuls))
        for user in node.users
    )


def fuse_reduction(
    collective: Collective, products: list[GraphProduct], norm: GraphNorm | None
) -> Rewrite:
    """Return the rewrite for a reduction of products, or of rows alone, and its norm; raise Unfit.

    A bias that each rank adds before the reduction is reduced alone, and added after it.
    """
    result, lead = collective.result, shape(collective.input)[:-1]
    name, first = fused_op(collective, products, norm), products[0] if products else None
    scales = None if first is None else first.scales
    inputs = [product.left for product in products] or [collective.input]
    replaced: list[fx.Node | None] = [result]
    vectors: list[fx.Node | None] = []
    if norm is not None:
        replaced = [norm.normed, norm.total, norm.scale]
        vectors = [norm.added, norm.residual, norm.weight, norm.bias, norm.static]

    def reducing(inputs: Any, of_input: Any, factors: Any, vectors: Any) -> Sequence[Any]:
        op, rows, bias = name, inputs[0], _sum_of_biases(collective, [bias for *_, bias in factors])
        arguments: dict[str, Any] = {"bias": bias}
        if first is not None and first.batch:
            arguments["scatter_dim"] = collective.dim - 1
            entries = [(rows[entry], factors[0][0][entry]) for entry in range(first.batch)]
            parts = [_run(op, collective, input=x, weight=w, **arguments) for x, w in entries]
            return [torch.stack([*itertools.chain(*parts)])]
        if first is not None:
            right, of_right, whole, _ = factors[0]
            if len(products) > 1:
                rows = torch.cat([left.reshape(-1, left.shape[-1]) for left in inputs], 1)
                right = torch.cat([weight for weight, *_ in factors])
            rows = _reshape(rows, [*lead, rows.shape[-1]])
            arguments["weight"] = right
        if first is not None and scales is not None and first.blocks:
            tensors = rows, of_input, right, of_right
            both = block_operands(scales, tensors, whole, swizzled=scales.swizzled)
            options: Any = {"bias": bias, "out_dtype": scales.out_dtype}
            options["group"] = GroupSpec(collective.name, collective.size)
            if collective.kind == "reduce_scatter":
                options["scatter_dim"] = collective.dim
            form: Any = getattr(functional, WITH_MATMULS[collective.kind])
            if norm is not None:
                tail = _norm_arguments(norm, bias, vectors, value(result))
                row_norm = RowNorm(norm.kind, norm.eps, tail["norm_weight"], tail["norm_bias"])
                options |= {"norm": row_norm, "quantize": tail["quantize"] or None}
                options |= {"bias": tail["bias"], "residual": tail["residual"]}
            replacement = form(*both, collective.reduce_op, **options)
            outputs = [replacement] if norm is None else list_results(replacement)
            return [
                wait(each) for each, old in zip(outputs, replaced, strict=False) if old is not None
            ]
        if scales is not None:
            op = f"scaled_{name}"
            if of_input.numel() != 1:
                of_input = _reshape(of_input, [*rows.shape[:-1], 1])
            arguments |= {"input_scale": of_input, "weight_scale": of_right}
            arguments |= {"out_dtype": scales.out_dtype, "use_fast_accum": scales.fast}
        if norm is not None:
            arguments |= _norm_arguments(norm, bias, vectors, value(result))
        pairs = zip(_start(op, collective, input=rows, **arguments), replaced, strict=False)
        return [wait_tensor(output) for output, old in pairs if old is not None]

    of_input = None if scales is None else scales.left
    insert = _trace(reducing, inputs, of_input, [*map(_factors, products)], vectors)

    def rewrite() -> None:
        outputs = iter(insert(result))
        with result.graph.inserting_before(result):
            for old in replaced:
                if old is not None:
                    old.replace_all_uses_with(_as_before(next(outputs), old))

    return rewrite


def _sum_of_biases(collective: Collective, biases: Sequence[Any]) -> Any:
    """Return the sum over terms and ranks of the biases that ranks add before the reduction, or None."""
    biases = [bias for bias in biases if bias is not None]
    if not biases:
        return None
    (total,) = _run("all_reduce", collective, input=sum(biases[1:], biases[0]))
    return total


def _norm_arguments(
    norm: GraphNorm, bias: Any, vectors: Sequence[Any], result: torch.Tensor
) -> dict[str, Any]:
    added, residual, weight, offset, static = vectors
    if residual is not None and not same(residual.shape, result.shape):
        residual = residual.reshape(_lengths(result.shape))
    quantize = "" if norm.scale is None else "fp8"
    if static is not None:  # rows are divided by it: in fp32, with the weight and the bias
        quantize, scale = "fp8_static", static.reshape(1)
        if weight is None:
            weight = torch.ones(result.shape[-1:], dtype=torch.float32, device=result.device)
        weight = weight.float() / scale
        offset = None if offset is None else offset.float() / scale
    biases = [vector for vector in (bias, added) if vector is not None]
    return {
        "bias": sum(biases[1:], biases[0]) if biases else None, "residual": residual,
        "norm_weight": weight, "norm_bias": offset,
        "kind": norm.kind, "eps": norm.eps, "quantize": quantize,
    }  # fmt: skip
