"""Replaces collectives and the matmuls beside them by interlace's fused ops, in an aten graph.

The rewrite, for a gather of ``x`` that two matmuls read, and whose result is also kept for a backward::

    before   g = all_gather(x)   w = wait(g)   a = mm(w, A)   b = mm(w, B)   return w, a, b
    after    f = interlace.all_gather_matmul(x, [A, B], [], dim, True, ...)
             a = wait(f[0])   b = wait(f[1])   w = wait(f[2])

What the matmul's readers see has the shape and the strides that it had. Nothing is fused silently or left
silently: every collective is a :class:`Candidate` in the :class:`Report`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from interlace.compile.collectives import Collective, find
from interlace.compile.cost import Machine, Problem, machine_for, predict
from interlace.compile.matmuls import Product, Unfit, readers, terms
from interlace.compile.nodes import (
    ancestors,
    aten,
    call,
    in_order,
    shape,
    source_line,
    static,
    value,
    wait_tensor,
)
from interlace.compile.report import Candidate, Report
from interlace.runtime.cost import FUSED_DTYPES

_ops: Any = torch.ops.interlace
ALGORITHM = "auto"
POLICIES = ("auto", "always", "never")
OPS = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}


def fuse(
    graph: fx.Graph,
    *,
    policy: str = "auto",
    machine: Machine | None = None,
    name: str = "inference",
    rewrite: bool = True,
) -> Report:
    """Fuse what can be and, with policy "auto", is predicted to be faster so. In place; says what it did.

    ``rewrite=False`` only says it. Raises ValueError for another policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    report = Report(name)
    changed = False
    for collective in find(graph):
        candidate, apply = _consider(collective, policy, machine)
        report.candidates.append(candidate)
        if candidate.fused and rewrite:
            apply(graph)
            changed = True
    if changed:
        in_order(graph)
        _erase_dead(graph)
        graph.lint()
    return report


def _erase_dead(graph: fx.Graph) -> None:
    """Nodes that nobody reads any more; collectives too, which torch's own elimination may keep."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)


Apply = Callable[[fx.Graph], None]


def _consider(
    collective: Collective, policy: str, machine: Machine | None
) -> tuple[Candidate, Apply]:
    """Whether and why; and the function that does it."""
    notes: tuple[str, ...] = ()
    times: tuple[float, float] | None = None
    products: list[Product] = []

    def nothing(graph: fx.Graph) -> None:
        raise AssertionError("not fused")

    apply: Apply = nothing
    reason = ""
    try:
        if collective.kind == "all_gather":
            products, notes = _gather_products(collective)
        else:
            products = _reduced_products(collective)
        _check(collective, products)
        times = _times(collective, products, machine)
        if policy == "never":
            raise Unfit('policy is "never"')
        if policy == "auto" and times is not None and times[1] >= times[0]:
            raise Unfit("predicted to be slower fused")
        if collective.kind == "all_gather":
            apply = lambda graph: _fuse_gather(graph, collective, products)  # noqa: E731
        else:
            apply = lambda graph: _fuse_reduction(graph, collective, products)  # noqa: E731
    except Unfit as error:
        reason = str(error)
    made = Candidate(
        collective=collective.kind,
        where=source_line(collective.start),
        op=OPS[collective.kind],
        shape=_shown(collective, products),
        matmuls=len(products),
        fused=not reason,
        reason=reason,
        unfused_seconds=None if times is None else times[0],
        fused_seconds=None if times is None else times[1],
        notes=notes,
    )
    return made, apply


def _shown(collective: Collective, products: list[Product]) -> str:
    whole = collective.result if collective.kind == "all_gather" else collective.input
    text = "x".join(map(str, shape(whole)))
    if products:
        text += " @ " + " + ".join(f"{p.inner}x{p.columns}" for p in products)
    return text


# -- what can be fused ---------------------------------------------------------------------------------


def _gather_products(collective: Collective) -> tuple[list[Product], tuple[str, ...]]:
    products, others = readers(collective.result)
    later = {product.node for product in products}
    kept: list[Product] = []
    notes = [f"left out {node.name}: {why}" for node, why in others]
    for product in products:
        needed = [each for each in (product.right, product.bias) if each is not None]
        if ancestors(needed) & (later | {collective.result}):
            notes.append(f"left out {product.node.name}: its weight comes from the gathered tensor")
        else:
            kept.append(product)
    if not kept:
        if others:
            raise Unfit("; ".join(sorted({why for _, why in others})))
        raise Unfit("no matmul reads the gathered tensor")
    return kept, tuple(notes)


def _reduced_products(collective: Collective) -> list[Product]:
    if collective.start.args[0] is collective.input and len(collective.input.users) != 1:
        raise Unfit("the product is read by others too")
    if collective.reduce_op not in ("sum", "avg"):
        raise Unfit(f"reduce op {collective.reduce_op!r}")
    return terms(collective.input)


def _check(collective: Collective, products: list[Product]) -> None:
    whole = collective.input
    if value(whole).dim() < 2:
        raise Unfit("the tensor has fewer than 2 dimensions")
    for node in (whole, *(p.right for p in products)):
        if value(node).dtype not in (*FUSED_DTYPES, torch.float64):
            raise Unfit(f"dtype {value(node).dtype}")
    if sum(not static(length) for length in shape(whole)) > 1:
        raise Unfit("more than one symbolic dimension")
    if collective.kind != "all_gather" and not static(shape(whole)[-1]):
        raise Unfit("the columns are symbolic")
    length = shape(whole)[collective.dim]
    if collective.kind == "reduce_scatter" and static(length) and length % collective.size:
        raise Unfit(f"{length} rows, which {collective.size} ranks do not divide")


def _times(
    collective: Collective, products: list[Product], machine: Machine | None
) -> tuple[float, float] | None:
    """Predicted; None for shapes that are not known yet."""
    whole = collective.input
    lengths = shape(whole)
    if not static(*lengths):
        return None
    gathers = collective.kind == "all_gather"
    rows = math.prod(lengths[:-1])
    if gathers and collective.dim != len(lengths) - 1:
        rows *= collective.size
    itemsize, size = value(whole).element_size(), collective.size
    total = math.prod(lengths) * itemsize * (size if gathers else 1)
    passes = 2 if collective.kind == "all_reduce" else 1
    several = len(products) > 1 and not gathers
    biased = any(product.bias is not None for product in products)
    problem = Problem(
        rows=rows,
        inner=products[0].inner if gathers else sum(product.inner for product in products),
        columns=sum(product.columns for product in products) if gathers else products[0].columns,
        nbytes=passes * total * (size - 1) // size,
        size=size,
        extra_nbytes=rows * sum(product.inner for product in products) * itemsize if several else 0,
        extra_collectives=int(biased and not gathers),
    )
    return predict(machine or machine_for(value(whole).device), problem)


# -- how -----------------------------------------------------------------------------------------------


def _fuse_gather(graph: fx.Graph, collective: Collective, products: list[Product]) -> None:
    result = collective.result
    matmuls = {product.node for product in products}
    kept = _read_beside(result, matmuls)
    biases = [product.bias for product in products]
    with graph.inserting_before(products[0].node):
        started = call(
            graph,
            _ops.all_gather_matmul.default,
            (
                collective.input,
                [product.right for product in products],
                biases if any(bias is not None for bias in biases) else [],
                collective.dim,
                kept,
                ALGORITHM,
                None,
                collective.size,
                collective.name,
            ),
            products[0].node,
        )
        for index, product in enumerate(products):
            item = call(graph, operator.getitem, (started, index), product.node)
            waited = call(graph, wait_tensor, (item,), product.node)
            made = _as_before(graph, waited, product.node)
            if product.added is not None:
                made = call(graph, aten.add.Tensor, (made, product.added), product.node)
            product.node.replace_all_uses_with(made)
        if kept:
            item = call(graph, operator.getitem, (started, len(products)), result)
            waited = call(graph, wait_tensor, (item,), result)
            made = _as_before(graph, waited, result)
            result.replace_all_uses_with(made, delete_user_cb=lambda user: user not in matmuls)


def _read_beside(result: fx.Node, matmuls: set[fx.Node]) -> bool:
    """Whether anything but ``matmuls`` reads a gathered tensor, itself or reshaped."""
    for user in result.users:
        if user in matmuls:
            continue
        if user.op != "output" and user.users and _only_for(user, matmuls):
            continue
        return True
    return False


def _only_for(node: fx.Node, matmuls: set[fx.Node]) -> bool:
    from interlace.compile.nodes import RESHAPES, is_call

    if not is_call(node, *RESHAPES):
        return False
    return all(user in matmuls or _only_for(user, matmuls) for user in node.users)


def _as_before(graph: fx.Graph, made: fx.Node, old: fx.Node) -> fx.Node:
    """``made`` in the shape and strides of ``old``."""
    if shape(made) != shape(old):
        lengths = shape(old)
        symbolic = [index for index, length in enumerate(lengths) if not static(length)]
        for index in symbolic:
            lengths[index] = -1
        made = call(graph, aten.reshape.default, (made, lengths), old)
    if list(value(made).stride()) != list(value(old).stride()):
        made = _restrided(graph, made, old)
    return made


def _restrided(graph: fx.Graph, made: fx.Node, old: fx.Node) -> fx.Node:
    clone = graph.call_function(
        aten.clone.default, (made,), {"memory_format": torch.contiguous_format}
    )
    clone.meta.update({key: old.meta[key] for key in ("stack_trace",) if key in old.meta})
    clone.meta["val"] = torch.empty_like(value(old), memory_format=torch.contiguous_format)
    if list(clone.meta["val"].stride()) != list(value(old).stride()):
        clone.meta["val"] = value(old)  # a permuted result: torch's passes keep what the tracer saw
    return clone


def _fuse_reduction(graph: fx.Graph, collective: Collective, products: list[Product]) -> None:
    result, size, name = collective.result, collective.size, collective.name
    lengths = shape(collective.input)[:-1]
    with graph.inserting_before(result):
        left = _rows(graph, products, lengths)
        right = products[0].right
        if len(products) > 1:
            right = call(graph, aten.cat.default, ([p.right for p in products], 0), right)
        bias = _reduced_bias(graph, collective, products)
        arguments: tuple[Any, ...] = (left, right, bias, collective.reduce_op)
        op = _ops.matmul_all_reduce.default
        if collective.kind == "reduce_scatter":
            op = _ops.matmul_reduce_scatter.default
            arguments += (collective.dim,)
        started = call(graph, op, (*arguments, ALGORITHM, None, size, name), result)
        waited = call(graph, wait_tensor, (started,), result)
        made = _as_before(graph, waited, result)
    result.replace_all_uses_with(made)


def _rows(graph: fx.Graph, products: list[Product], lengths: list[Any]) -> fx.Node:
    """The left operands side by side, with the leading dimensions of the whole product."""
    left = products[0].left
    if len(products) > 1:
        flat = [_reshaped(graph, p.left, [-1, p.inner]) for p in products]
        left = call(graph, aten.cat.default, (flat, 1), left)
    wanted = [length if static(length) else -1 for length in lengths]
    return _reshaped(graph, left, [*wanted, sum(product.inner for product in products)])


def _reshaped(graph: fx.Graph, node: fx.Node, lengths: list[int]) -> fx.Node:
    if shape(node) == lengths or (len(lengths) == value(node).dim() == 2):
        return node
    return call(graph, aten.reshape.default, (node, lengths), node)


def _reduced_bias(
    graph: fx.Graph, collective: Collective, products: list[Product]
) -> fx.Node | None:
    """The bias to add once, after the reduction, for those that each rank adds before it."""
    biases = [product.bias for product in products if product.bias is not None]
    if not biases:
        return None
    total = biases[0]
    for bias in biases[1:]:
        total = call(graph, aten.add.Tensor, (total, bias), bias)
    arguments = (total, collective.reduce_op, collective.size, collective.name)
    started = call(graph, _ops.all_reduce.default, arguments, total)
    return call(graph, wait_tensor, (started,), total)
