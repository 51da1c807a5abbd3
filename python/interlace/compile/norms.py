"""Norms that read what a collective has reduced: with the residual before them, they go into the op's tail.

After the reduction, and reshapes of it, comes an addition of the residual, or none, and then a norm of the
last dimension, in the ops of which torch's, and those that are written by hand, are made::

    x = h, or h in fp32
    rms     mul(x, rsqrt(add(mean(pow(x, 2) or mul(x, x)), eps)))
    layer   mul(sub(x, mean), rsqrt(add(var, eps))), of var_mean; or native_layer_norm
    then    mul by a weight and add a bias, in fp32 or in h's dtype, after or before it is rounded to h's

Statistics that somebody else reads, as a backward does, keep a norm where it is.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from interlace.compile.collectives import Collective
from interlace.compile.graph_nodes import (
    RESHAPES,
    ancestors,
    aten,
    is_call,
    keeps_columns,
    only_user,
    same,
    shape,
    value,
)
from interlace.compile.matmuls import Unfit

_convert: Any = torch.ops.prims.convert_element_type.default
CONVERTS = (_convert, aten._to_copy.default)
ADDS = (aten.add.Tensor, aten.add.Scalar, aten.add_.Scalar, aten.add_.Tensor)


@dataclass(frozen=True)
class GraphNorm:
    """``normed`` = norm of ``total``, which is the reduced + ``residual``; ``kind``: "rms" or "layer"."""

    kind: str
    eps: float
    total: fx.Node
    normed: fx.Node
    residual: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None


def find(collective: Collective) -> GraphNorm | None:
    """The norm of what ``collective`` has reduced; None if there is none, Unfit if it cannot go along."""
    reduced = collective.result
    while (user := only_user(reduced)) is not None and is_call(user, *RESHAPES):
        if not keeps_columns(user):
            return None
        reduced = user
    total, residual = _with_residual(reduced)
    for kind, build in (("rms", _rms), ("layer", _layer)):
        for ends in build(total):
            made = _finished(kind, total, residual, *ends)
            needed = [each for each in (made.residual, made.weight, made.bias) if each is not None]
            if ancestors(needed) & {collective.result}:
                raise Unfit("the residual or the norm's weight comes from what is reduced")
            return made
    return None


def _with_residual(reduced: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The node that is normed, and what was added for it."""
    user = only_user(reduced)
    if user is not None and is_call(user, aten.add.Tensor) and not user.kwargs:
        left, right = user.args
        other = right if left is reduced else left
        fits = isinstance(other, fx.Node) and other is not reduced and value(other) is not None
        if fits and same(shape(other), shape(reduced)) and value(other).dtype == value(user).dtype:  # type: ignore[arg-type]
            return user, other  # type: ignore[return-value]
    return reduced, None


Ends = tuple[float, fx.Node, set[fx.Node]]
"""eps, the normed numbers without weight and bias, and the nodes that are of no use without them."""


def _starts(total: fx.Node) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    yield total, set()
    for user in total.users:
        if is_call(user, *CONVERTS) and value(user).dtype == torch.float32:
            yield user, {user}


def _last(node: fx.Node, dims: Any) -> bool:
    last = value(node).dim() - 1
    return list(dims) in ([-1], [last])


def _rms(total: fx.Node) -> Iterator[Ends]:
    for x, inner in _starts(total):
        for square in x.users:
            by_power = is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
            by_product = is_call(square, aten.mul.Tensor) and list(square.args) == [x, x]
            mean = only_user(square) if by_power or by_product else None
            if not is_call(mean, aten.mean.dim) or mean is None or mean.kwargs:
                continue
            if list(mean.args)[2:] != [True] or not _last(x, mean.args[1]):
                continue
            yield from _scaled(x, mean, x, inner | {square, mean})


def _layer(total: fx.Node) -> Iterator[Ends]:
    for user in total.users:
        if is_call(user, aten.native_layer_norm.default):
            yield from _native(total, user)
    for x, inner in _starts(total):
        for found in x.users:
            if not is_call(found, aten.var_mean.correction) or not _last(x, found.args[1]):
                continue
            if found.kwargs.get("correction") != 0 or found.kwargs.get("keepdim") is not True:
                continue
            items = {int(each.args[1]): each for each in found.users}  # type: ignore[arg-type]
            centred = only_user(items[1]) if set(items) == {0, 1} else None
            if is_call(centred, aten.sub.Tensor) and list(centred.args) == [x, items[1]]:  # type: ignore[union-attr]
                assert centred is not None
                yield from _scaled(centred, items[0], x, inner | {found, *items.values(), centred})


def _native(total: fx.Node, node: fx.Node) -> Iterator[Ends]:
    _, lengths, _, _, eps = node.args
    outputs = {int(each.args[1]): each for each in node.users}  # type: ignore[arg-type]
    if list(lengths) != [shape(total)[-1]] or 0 not in outputs:  # type: ignore[arg-type]
        return
    if any(each.users for index, each in outputs.items() if index):
        raise Unfit("the norm's statistics are read by others too")
    yield float(eps), outputs[0], set()  # type: ignore[arg-type]


def _scaled(x: fx.Node, variance: fx.Node, source: fx.Node, inner: set[fx.Node]) -> Iterator[Ends]:
    """``x`` times the reciprocal square root of ``variance`` and an eps."""
    added = only_user(variance)
    if added is None or not is_call(added, *ADDS) or not isinstance(added.args[1], float):
        return
    root = only_user(added)
    if not is_call(root, aten.rsqrt.default) or root is None:
        return
    for made in root.users:
        if is_call(made, aten.mul.Tensor) and set(made.args) == {x, root}:
            inside = inner | {added, root, made}
            # what is inside is read by nobody outside, but for the sum itself
            if any(set(each.users) - inside for each in inside - {made}):
                raise Unfit("the norm's statistics are read by others too")
            yield float(added.args[1]), made, inside


def _finished(
    kind: str, total: fx.Node, residual: fx.Node | None, eps: float, made: fx.Node, inside: Any
) -> GraphNorm:
    """With the weight, the bias and the rounding behind it, in any order that changes no more than bits."""
    if is_call(made, operator.getitem):
        native: Any = made.args[0]
        return GraphNorm(kind, eps, total, made, residual, *_vectors(total, native.args[2:4]))
    found: dict[Any, fx.Node | None] = {aten.mul.Tensor: None, aten.add.Tensor: None}
    dtype = value(total).dtype
    while (user := only_user(made)) is not None:
        if is_call(user, *CONVERTS) and value(user).dtype == dtype and value(made).dtype != dtype:
            made = user
            continue
        operand = _vector_beside(user, made)
        free = user.target == aten.mul.Tensor or kind == "layer"
        if operand is None or found.get(user.target, made) is not None or not free:
            break
        if user.target == aten.mul.Tensor and found[aten.add.Tensor] is not None:
            break
        found[user.target], made = operand, user
    if value(made).dtype != dtype:
        raise Unfit("the norm stays in fp32")
    return GraphNorm(kind, eps, total, made, residual, *_vectors(total, list(found.values())))


def _vector_beside(node: fx.Node, made: fx.Node) -> fx.Node | None:
    """What ``node`` multiplies ``made`` with, or adds, if that is a number per column."""
    if not is_call(node, aten.mul.Tensor, aten.add.Tensor) or node.kwargs:
        return None
    left, right = node.args
    other: Any = right if left is made else left
    if isinstance(other, fx.Node) and value(other) is not None:
        return other if same(shape(other), shape(made)[-1:]) else None
    return None


def _vectors(total: fx.Node, given: Sequence[Any]) -> list[fx.Node | None]:
    """The weight and the bias, behind conversions to fp32, which the op does itself."""
    found: list[fx.Node | None] = []
    for each in given:
        node = each
        while is_call(node, *CONVERTS) and value(node).dtype == torch.float32:
            node = node.args[0]
        if node is not None and value(node).dtype not in (value(total).dtype, torch.float32):
            raise Unfit(f"a weight of the norm is {value(node).dtype}")
        found.append(node)
    return found
