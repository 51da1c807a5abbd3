"""Norms that read a reduced tensor: with the residual before them, they become the tail of the op.

After the reduction and reshapes of it come additions of a bias and the residual, of one of them, or of
none, in their dtype or in fp32. Then comes a norm of the last dimension. The norm consists of these ops, in
torch's norms and in those written by hand::

    x = h, or h in fp32
    rms     mul(x, rsqrt(add(mean(pow(x, 2) or mul(x, x)), eps)))
    layer   mul(sub(x, mean), rsqrt(add(var, eps))), of var_mean; or native_layer_norm
    then    mul by a weight and add a bias, in fp32 or in h's dtype, after or before it is rounded to h's

Or the norm is one of vLLM's ops. Other values that are read from a norm's parts, such as the statistics
that a forward saves for its backward, stay in the graph. They are computed from the sum that the op
returns.

If only fp8 and a scale for every row are read from the normed rows, an op makes both in its tail. torch and
vLLM's ``QuantFP8`` write it so, in any order of the casts, or vLLM's ops compute it::

    scale   max |y| over a row / 448, at least some small number
    fp8     float8_e4m3fn of clamp(y / scale, -448, 448), or of y times the reciprocal of scale

A single scale for all rows may also exist before them, as an input of the graph. Then the norm's weight is
divided by the scale, and an op makes the fp8. If a scale comes from the largest number of all rows, no op
makes it, and it stays in the graph.
"""

import contextlib
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from interlace.compile.graph_nodes import (
    CONVERTS,
    RESHAPES,
    Collective,
    Unfit,
    ancestors,
    arguments,
    aten,
    chain_of_reshapes,
    find as collectives,
    is_call,
    keeps_columns,
    named_call,
    only_user,
    same,
    shape,
    value,
)

ADDS = (aten.add.Tensor, aten.add.Scalar, aten.add_.Scalar, aten.add_.Tensor)


@dataclass(frozen=True)
class GraphNorm:
    """A norm: ``normed`` is the norm of ``total``, the reduced tensor + ``residual``.

    ``kind``: "rms" or "layer". All tensors have ``dtype``, but ``total`` may be in fp32.

    ``added`` is a bias of the reduced tensor. With ``scale`` (by row) or ``static`` (one for all rows, an
    input), the result is fp8. Results without readers are None. ``notes``: what was left out.
    """

    kind: str
    dtype: torch.dtype
    eps: float
    total: fx.Node | None
    normed: fx.Node | None
    residual: fx.Node | None
    weight: fx.Node | None
    bias: fx.Node | None = None
    added: fx.Node | None = None
    scale: fx.Node | None = None
    static: fx.Node | None = None
    notes: tuple[str, ...] = ()


class Quantisation(NamedTuple):
    """``made`` is the fp8, and ``scale`` the scales of rows, or ``static`` a single one, an input."""

    made: fx.Node | None
    scale: fx.Node | None
    static: fx.Node | None = None


def find(collective: Collective) -> GraphNorm | None:
    """Return the norm of the reduced tensor, or None; raise Unfit if it cannot be fused."""
    reduced = collective.result
    while (user := only_user(reduced)) is not None and is_call(user, *RESHAPES):
        if not keeps_columns(user):
            return None
        reduced = user
    for source, added in _biased_nodes(reduced):
        norm = next(_norms(source), None)
        if norm is None:
            continue
        if norm.residual is not None and len(source.users) > 1:
            raise Unfit("the reduced tensor is also read elsewhere, without the residual")
        vectors = norm.residual, norm.weight, norm.bias, norm.static, added
        needed = [vector for vector in vectors if vector is not None]
        if ancestors(needed) & {collective.result}:
            raise Unfit("the residual or the norm's weight comes from the reduced tensor")
        return replace(norm, added=added)
    return None


def keep_sums(joint: fx.Graph) -> None:
    """Save sums that are normed for the backward, where it needs them, instead of the reduced tensors.

    A partitioner may save either, if it saves the residual anyway, and let the backward add again. Then the
    op would have to return the reduced tensor besides the sum.
    """
    for collective in collectives(joint):
        with contextlib.suppress(Unfit):
            norm = find(collective)
            if norm is not None and norm.total is not None:
                norm.total.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def know_eps(graph: fx.Graph) -> None:
    """Replace a number that is added within ``rsqrt`` by a constant, in a graph that Dynamo has traced.

    With ``dynamic=True`` floats of the code are inputs of the graph, but an op needs its eps as a constant.
    Reading the number guards it: another value compiles the code again.
    """
    for node in list(graph.nodes):
        number = node.meta.get("example_value")
        if isinstance(number, torch.SymFloat) and node.users and all(map(_in_root, node.users)):
            for user in list(node.users):
                user.args = tuple(float(number) if each is node else each for each in user.args)


def _in_root(node: fx.Node) -> bool:
    adds = node.target in (operator.add, operator.iadd, torch.add, "add", "add_")
    return adds and all(user.target in (torch.rsqrt, "rsqrt", "rsqrt_") for user in node.users)


def _biased_nodes(reduced: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Yield the nodes to which a residual may be added, each with the bias that it has."""
    yield reduced, None
    user = only_user(reduced)
    if is_call(user, aten.add.Tensor) and user is not None:
        bias = _vector_beside(user, reduced)
        if bias is not None and value(bias).dtype == value(reduced).dtype:
            yield user, bias


def _norms(reduced: fx.Node) -> Iterator[GraphNorm]:
    dtype = value(reduced).dtype
    for total, residual in _sums(reduced):
        kinds = ("rms", _rms), ("layer", _layer)
        for source, (kind, build) in itertools.product(chain_of_reshapes(total), kinds):
            for ends in build(source):
                yield _finish(kind, dtype, total, residual, *ends)
        for source in chain_of_reshapes(total) if value(total).dtype == dtype else ():
            yield from _called_norms(source, total, residual)


def _sums(reduced: fx.Node) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Yield the nodes that may be normed, each with the residual that was added."""
    dtype = value(reduced).dtype
    for start in _starts(reduced):
        for user in start.users:
            if not is_call(user, aten.add.Tensor) or user.kwargs:
                continue
            left, right = arguments(user)
            other = right if left is start else left
            if is_call(other, *CONVERTS) and value(other).dtype == value(start).dtype != dtype:
                other = other.args[0]
            fits = isinstance(other, fx.Node) and other is not start and value(other) is not None
            alike = fits and same(shape(other), shape(reduced))
            if alike and value(other).dtype == dtype and value(user).dtype == value(start).dtype:
                if len(start.users) > 1 and start is not reduced:
                    raise Unfit("the reduced tensor is also read elsewhere, without the residual")
                yield user, other
    yield reduced, None


Ends = tuple[float, fx.Node]
"""eps, and the node of the normed numbers without weight and bias."""


def _starts(total: fx.Node) -> Iterator[fx.Node]:
    yield total
    yield from (
        user
        for user in total.users
        if is_call(user, *CONVERTS) and value(user).dtype == torch.float32
    )


def _last(node: fx.Node, dims: Any) -> bool:
    last = value(node).dim() - 1
    return list(dims) in ([-1], [last])


def _rms(total: fx.Node) -> Iterator[Ends]:
    for x in _starts(total):
        for square in x.users:
            by_power = is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
            by_product = is_call(square, aten.mul.Tensor) and list(square.args) == [x, x]
            for mean in square.users if by_power or by_product else ():
                if not is_call(mean, aten.mean.dim) or mean.kwargs:
                    continue
                if list(mean.args)[2:] == [True] and _last(x, mean.args[1]):
                    yield from _scaled_ends(x, mean)


def _layer(total: fx.Node) -> Iterator[Ends]:
    for user in total.users:
        if is_call(user, aten.native_layer_norm.default):
            yield from _native(total, user)
    for x in _starts(total):
        for found in x.users:
            if not is_call(found, aten.var_mean.correction) or not _last(x, found.args[1]):
                continue
            if found.kwargs.get("correction") != 0 or found.kwargs.get("keepdim") is not True:
                continue
            items = {int(each.args[1]): each for each in found.users}  # type: ignore[arg-type]
            for centred in items[1].users if set(items) == {0, 1} else ():
                if is_call(centred, aten.sub.Tensor) and list(centred.args) == [x, items[1]]:
                    yield from _scaled_ends(centred, items[0])


def _native(total: fx.Node, node: fx.Node) -> Iterator[Ends]:
    _, lengths, _, _, eps = node.args
    outputs = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    if list(lengths) != [shape(total)[-1]] or 0 not in outputs:  # type: ignore[arg-type]
        return
    if any(each.users for index, each in outputs.items() if index):
        raise Unfit("the statistics of native_layer_norm are also read elsewhere")
    yield float(eps), outputs[0]  # type: ignore[arg-type]


def _scaled_ends(x: fx.Node, variance: fx.Node) -> Iterator[Ends]:
    """Yield ``x`` times the reciprocal square root of ``variance`` and an eps."""
    for added in variance.users:
        if not is_call(added, *ADDS) or not isinstance(added.args[1], float):
            continue
        for root in added.users:
            if is_call(root, aten.rsqrt.default):
                for node in root.users:
                    if is_call(node, aten.mul.Tensor) and set(node.args) == {x, root}:
                        yield float(added.args[1]), node


def _finish(
    kind: str,
    dtype: torch.dtype,
    total: fx.Node,
    residual: fx.Node | None,
    eps: float,
    node: fx.Node,
) -> GraphNorm:
    """Return the norm with the weight, bias and rounding after it, in any order that changes only bits."""
    found: dict[object, fx.Node | None] = {aten.mul.Tensor: None, aten.add.Tensor: None}
    if is_call(node, operator.getitem):
        native: Any = node.args[0]
        vectors = native.args[2:4]
    else:
        while len(steps := [u for u in node.users if _goes_on(kind, node, u, dtype, found)]) == 1:
            (user,) = steps
            if not is_call(user, *CONVERTS):
                found[user.target] = _vector_beside(user, node)
            node = user
        vectors = list(found.values())
    weight, bias = _vectors(dtype, vectors)
    return _with_quantisation(GraphNorm(kind, dtype, eps, total, node, residual, weight, bias))


def _with_quantisation(norm: GraphNorm) -> GraphNorm:
    if norm.normed is None:
        return norm
    try:
        found = quantisation_of(norm.normed)
    except Unfit as error:
        return replace(norm, notes=(f"left out a quantisation: {error}",))
    if found is not None:
        return _as_fp8(norm, found)
    if value(norm.normed).dtype != norm.dtype:
        raise Unfit("the norm stays in fp32")
    return norm


def _as_fp8(norm: GraphNorm, found: Quantisation) -> GraphNorm:
    by = "" if found.static is None else " by a scale that is an input"
    quantised, scale, static = found
    notes = (f"its rows leave as fp8{by}",)
    return replace(norm, normed=quantised, scale=scale, static=static, notes=notes)


def _goes_on(
    kind: str, node: fx.Node, user: fx.Node, dtype: torch.dtype, found: dict[object, fx.Node | None]
) -> bool:
    """Return whether ``user`` rounds ``node``, or applies a weight or bias that it did not have yet."""
    if is_call(user, *CONVERTS):
        return bool(value(user).dtype == dtype != value(node).dtype)
    if _vector_beside(user, node) is None or found[aten.add.Tensor] is not None:
        return False
    return found[user.target] is None and (user.target == aten.mul.Tensor or kind == "layer")


def _vector_beside(node: fx.Node, rows: fx.Node) -> fx.Node | None:
    """Return the node that ``node`` multiplies with or adds to ``rows``, if it is a number per column."""
    if not is_call(node, aten.mul.Tensor, aten.add.Tensor) or node.kwargs:
        return None
    left, right = node.args
    other = right if left is rows else left
    if isinstance(other, fx.Node) and value(other) is not None:
        return other if same(shape(other), shape(rows)[-1:]) else None
    return None


def _vectors(dtype: torch.dtype, nodes: Sequence[Any]) -> list[fx.Node | None]:
    """Return the weight and the bias without conversions to fp32, which the op does itself."""
    found: list[fx.Node | None] = []
    for each in nodes:
        node = each
        while is_call(node, *CONVERTS) and value(node).dtype == torch.float32:
            node = node.args[0]
        if node is not None and value(node).dtype not in (dtype, torch.float32):
            raise Unfit(f"a weight of the norm is {value(node).dtype}")
        found.append(node)
    return found


ALONE = {"_C::rms_norm": "result", "vllm_ir::rms_norm": 0}
ADDS_TOO = {"_C::fused_add_rms_norm": ("input", "residual"), "vllm_ir::fused_add_rms_norm": (0, 1)}
QUANTISES = "_C::rms_norm_dynamic_per_token_quant"
BY_INPUT = ("_C::rms_norm_static_fp8_quant", "_C::fused_add_rms_norm_static_fp8_quant")


def _called_norms(source: fx.Node, total: fx.Node, residual: fx.Node | None) -> Iterator[GraphNorm]:
    """Yield RMSNorms of ``source``, which is ``total`` or a reshape of it, by ops known by name."""
    for user in source.users:
        call = named_call(user)
        if call is None or source not in (call.given.get("input"), call.given.get("x")):
            continue
        named, results = call.given, call.made
        if named.get("variance_size") is not None or named.get("scale_ub") is not None:
            continue
        dtype = value(source).dtype
        about = "rms", dtype, float(named.get("epsilon", 0.0))
        weight, _ = _vectors(dtype, (named.get("weight"), None))
        added = named.get("residual", named.get("x_residual"))
        if residual is not None and added is not None:
            continue  # this op norms another tensor than the sum
        if call.name in ALONE:
            yield _with_quantisation(
                GraphNorm(*about, total, results.get(ALONE[call.name]), residual, weight)
            )
        elif call.name in ADDS_TOO:
            normed, after = (results.get(each) for each in ADDS_TOO[call.name])
            yield _with_quantisation(GraphNorm(*about, after, normed, added, weight))
        elif call.name == QUANTISES or call.name in BY_INPUT:
            after = total if added is None else results.get("residual")
            before, fp8 = residual if added is None else added, results.get("result")
            norm = GraphNorm(*about, after, None, before, weight)
            if call.name == QUANTISES:
                yield _as_fp8(norm, Quantisation(fp8, results.get("scale")))
            else:
                yield _as_fp8(norm, by_input(fp8, named["scale"], source))


FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST = 1e-5  # a larger lower bound would change a scale
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
FLOORS = (aten.clamp.default, aten.clamp_min.default)
COLUMNS = (aten.unsqueeze.default, *RESHAPES)
BY_ROW, STATIC = "_C::dynamic_per_token_scaled_fp8_quant", "_C::static_scaled_fp8_quant"
OTHERWISE = "_C::dynamic_scaled_fp8_quant"
NO_SCALE = "its scale is not from the largest number of a row, and does not exist before the rows"


def quantisation_of(normed: fx.Node) -> Quantisation | None:
    found = None
    for y in chain_of_reshapes(normed):
        found = found or next(_written_fp8(y), None) or _called_fp8(y)
    if found is not None and not _only_for(normed, {found.made, found.scale}):
        raise Unfit("the normed rows are also read elsewhere")
    return found


def by_input(quantised: fx.Node | None, scale: Any, y: fx.Node) -> Quantisation:
    """Return fp8 by ``scale``; raise Unfit unless this is one number that existed before ``y``."""
    one = isinstance(scale, fx.Node) and same([value(scale).numel()], [1])
    if not one or y in ancestors([scale]):
        raise Unfit(NO_SCALE)
    return Quantisation(quantised, None, scale)


def _written_fp8(y: fx.Node) -> Iterator[Quantisation]:
    for quantised, scale, clamped in _quotients(y, None, False):
        if isinstance(scale, fx.Node) and _is_scale(scale, y):
            yield Quantisation(quantised, scale)
        elif not clamped:
            raise Unfit(NO_SCALE)
        else:
            yield by_input(quantised, scale, y)


def _quotients(node: fx.Node, scale: Any, clamped: bool) -> Iterator[tuple[fx.Node, object, bool]]:
    """Yield every cast of ``node`` to fp8, the scale that divided it, and whether it was clamped."""
    for user in node.users:
        dtype = value(user).dtype if is_call(user, *CONVERTS) else None
        clamps = is_call(user, *CLAMPS) and {abs(number) for number in _numbers(user)} == {LARGEST}
        if dtype == FP8:
            yield user, scale, clamped
        elif clamps or (dtype is not None and dtype.is_floating_point and dtype.itemsize > 1):
            yield from _quotients(user, scale, clamped or clamps)
        elif scale is None and is_call(user, aten.div.Tensor) and user.args[0] is node:
            yield from _quotients(user, user.args[1], clamped)
        elif scale is None and is_call(user, aten.mul.Tensor):
            left, right = arguments(user)
            other = right if left is node else left
            inverse = is_call(other, aten.reciprocal.default)
            yield from _quotients(user, arguments(other)[0] if inverse else "a factor", clamped)


def _numbers(clamp: fx.Node) -> list[float]:
    return [each for each in clamp.args[1:] if isinstance(each, (int, float))]


def _is_scale(node: fx.Node, y: fx.Node) -> bool:
    """Return whether ``node`` is the largest |y| of every row, divided by 448, in fp32."""
    if value(node).dtype != torch.float32 or shape(node) != [*shape(y)[:-1], 1]:
        return False
    factor, steps = 1.0, ["abs", "max"]  # steps still to find on the way to y
    while node is not y:
        source: Any
        before = len(steps) == 2  # after the maximum, in the order of the graph
        source, *rest = arguments(node) or (None,)
        by = rest[0] if rest and isinstance(rest[0], (int, float)) else None
        if is_call(node, *CONVERTS) or (before and is_call(node, *COLUMNS)):
            pass
        elif before and is_call(node, *FLOORS) and len(rest) == 1 and by is not None:
            if by * factor > SMALLEST:
                return False
        elif before and is_call(node, aten.div.Tensor) and by:
            factor /= by
        elif before and is_call(node, aten.mul.Tensor) and by:
            factor *= by
        elif before and is_call(node, operator.getitem) and is_call(source, aten.max.dim):
            source, dim, *_ = arguments(source)
            if rest != [0] or dim % value(source).dim() != value(source).dim() - 1:
                return False
            steps.pop()
        elif before and is_call(node, aten.amax.default) and len(rest[0]) == 1:
            if rest[0][0] % value(source).dim() != value(source).dim() - 1:
                return False
            steps.pop()
        elif steps == ["abs"] and is_call(node, aten.abs.default):
            steps.pop()
        else:
            return False
        node = source
    return not steps and math.isclose(factor, 1 / LARGEST, rel_tol=1e-6)


def _called_fp8(y: fx.Node) -> Quantisation | None:
    for user in y.users:
        call = named_call(user)
        if call is None or call.name not in (BY_ROW, STATIC, OTHERWISE):
            continue
        named, quantised = call.given, call.made["result"]
        if named["input"] is not y or quantised is None or value(quantised).dtype != FP8:
            continue
        if call.name == STATIC and named.get("group_shape") is None:
            return by_input(quantised, named["scale"], y)
        if call.name != BY_ROW or named["scale_ub"] is not None:
            raise Unfit(NO_SCALE)
        if call.made["scale"] is not None:
            return Quantisation(quantised, call.made["scale"])
    return None


def _only_for(node: fx.Node, targets: set[fx.Node | None]) -> bool:
    return all(
        user in targets or (user.op != "output" and user.users and _only_for(user, targets))
        for user in node.users
    )
