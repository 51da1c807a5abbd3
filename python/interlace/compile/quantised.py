"""Normed rows of which only fp8 and a scale for every row are read: an op makes both in its tail.

As torch and vLLM's ``QuantFP8`` write it, in any order of the casts::

    scale   max |y| over a row / 448, at least some small number
    fp8     float8_e4m3fn of clamp(y / scale, -448, 448), or of y times the reciprocal of scale

or one of vLLM's ops; or by one scale for all rows that is there before them, an input of the graph: then an
op makes the fp8 with a norm whose weight has been divided by it. A scale that is the largest number of all
rows no op makes: that stays in the graph.
"""

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from interlace.compile.graph_nodes import (
    CONVERTS,
    RESHAPES,
    ancestors,
    arguments,
    aten,
    chain_of_reshapes,
    is_call,
    same,
    shape,
    value,
)
from interlace.compile.matmuls import Unfit
from interlace.compile.named_calls import named_call

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST = 1e-5  # a scale that is at least more than this is another one
CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
FLOORS = (aten.clamp.default, aten.clamp_min.default)
COLUMNS = (aten.unsqueeze.default, *RESHAPES)
BY_ROW, STATIC = "_C::dynamic_per_token_scaled_fp8_quant", "_C::static_scaled_fp8_quant"
OTHERWISE = "_C::dynamic_scaled_fp8_quant"
NO_SCALE = (
    "its scale is not that of the largest number of a row, nor is it there before the rows are"
)


class Quantisation(NamedTuple):
    """``made`` is the fp8, and ``scale`` the scales of rows, or ``static`` the one that is an input."""

    made: fx.Node | None
    scale: fx.Node | None
    static: fx.Node | None = None


def find(normed: fx.Node) -> Quantisation | None:
    """What stands for ``normed``; None if nobody asks for fp8."""
    found = None
    for y in chain_of_reshapes(normed):
        found = found or next(_written(y), None) or _called(y)
    if found is not None and not _only_for(normed, {found.made, found.scale}):
        raise Unfit("the normed rows are read by others, too")
    return found


def static(made: fx.Node | None, scale: Any, y: fx.Node) -> Quantisation:
    """fp8 by ``scale``; Unfit unless that is one number which was there before ``y``."""
    one = isinstance(scale, fx.Node) and same([value(scale).numel()], [1])
    if not one or y in ancestors([scale]):
        raise Unfit(NO_SCALE)
    return Quantisation(made, None, scale)


def _written(y: fx.Node) -> Iterator[Quantisation]:
    for made, scale, clamped in _quotients(y, None, False):
        if isinstance(scale, fx.Node) and _is_scale(scale, y):
            yield Quantisation(made, scale)
        elif not clamped:
            raise Unfit(NO_SCALE)
        else:
            yield static(made, scale, y)


def _quotients(node: fx.Node, scale: Any, clamped: bool) -> Iterator[tuple[fx.Node, Any, bool]]:
    """Every cast to fp8 of ``node``, which has been divided by ``scale``; with that, and if ``clamped``."""
    for user in node.users:
        dtype = value(user).dtype if is_call(user, *CONVERTS) else None
        clamps = is_call(user, *CLAMPS) and {abs(each) for each in _numbers(user)} == {LARGEST}
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
    """Whether ``node`` is the largest |y| of every row, divided by 448, in fp32."""
    if value(node).dtype != torch.float32 or shape(node) != [*shape(y)[:-1], 1]:
        return False
    factor, steps = 1.0, ["abs", "max"]  # what is still to come on the way to y
    while node is not y:
        source: Any
        before = len(steps) == 2  # behind the maximum, in the order of the graph
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


def _called(y: fx.Node) -> Quantisation | None:
    for user in y.users:
        call = named_call(user)
        if call is None or call.name not in (BY_ROW, STATIC, OTHERWISE):
            continue
        given, made = call.given, call.made["result"]
        if given["input"] is not y or made is None or value(made).dtype != FP8:
            continue
        if call.name == STATIC and given.get("group_shape") is None:
            return static(made, given["scale"], y)
        if call.name != BY_ROW or given["scale_ub"] is not None:
            raise Unfit(NO_SCALE)
        if call.made["scale"] is not None:
            return Quantisation(made, call.made["scale"])
    return None


def _only_for(node: fx.Node, targets: set[fx.Node | None]) -> bool:
    """Whether nothing is read of ``node`` but ``targets``."""
    return all(
        user in targets or (user.op != "output" and user.users and _only_for(user, targets))
        for user in node.users
    )
