"""Finds the collectives of an aten graph, in every form in which they come.

torch's functional ops gather and scatter dim 0; what its layers want of other dims is around them::

    gather   all_gather_into_tensor -> wait [-> split or slices -> cat along dim]
    scatter  [split or slices along dim -> cat ->] reduce_scatter_tensor -> wait
    reduce   all_reduce -> wait

``torch.ops.interlace``'s own have the dim themselves. Legacy calls, ``dist.all_gather_into_tensor(out, x)``
and so on, are these once torch has traced them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from interlace.compile.nodes import (
    arguments,
    aten,
    c10d,
    is_call,
    only_user,
    same,
    shape,
    value,
    wait_tensor,
)

_ops: Any = torch.ops.interlace


@dataclass(frozen=True)
class Collective:
    """``kind``: "all_gather", "reduce_scatter" or "all_reduce". ``input`` is what the user's code gave,
    ``result`` what it gets, both in the form in which ``dim`` is the one that is gathered or scattered."""

    kind: str
    start: fx.Node
    input: fx.Node
    result: fx.Node
    dim: int
    reduce_op: str
    size: int
    name: str


def find(graph: fx.Graph) -> list[Collective]:
    """All collectives in the graph, in its order."""
    found = []
    for node in graph.nodes:
        made = _at(node)
        if made is not None:
            found.append(made)
    return found


NAMESPACES = ("_c10d_functional", "interlace")
NOT_COLLECTIVE = ("wait_tensor", "rank", "group_size")


def others(graph: fx.Graph) -> list[fx.Node]:
    """Collectives of the graph that :func:`find` does not find; ops that are fused already are none."""
    left = []
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        name = target._schema.name.split("::")[1]
        if target.namespace not in NAMESPACES or name in NOT_COLLECTIVE or "matmul" in name:
            continue
        if _at(node) is None:
            left.append(node)
    return left


def _at(node: fx.Node) -> Collective | None:
    if is_call(node, c10d.all_gather_into_tensor.default):
        input, size, name = arguments(node)
        return _complete("all_gather", node, input, 0, "", size, name)
    if is_call(node, c10d.reduce_scatter_tensor.default):
        input, reduce_op, size, name = arguments(node)
        return _complete("reduce_scatter", node, input, 0, reduce_op, size, name)
    if is_call(node, c10d.all_reduce.default, c10d.all_reduce_.default):
        input, reduce_op, name = arguments(node)
        return _complete("all_reduce", node, input, 0, reduce_op, _size_of(name), name)
    if is_call(node, _ops.all_gather.default):
        input, dim, size, name = arguments(node)
        return _complete("all_gather", node, input, dim, "", size, name)
    if is_call(node, _ops.reduce_scatter.default):
        input, reduce_op, dim, size, name = arguments(node)
        return _complete("reduce_scatter", node, input, dim, reduce_op, size, name)
    if is_call(node, _ops.all_reduce.default):
        input, reduce_op, size, name = arguments(node)
        return _complete("all_reduce", node, input, 0, reduce_op, size, name)
    return None


def _complete(
    kind: str, start: fx.Node, input: Any, dim: Any, reduce_op: Any, size: Any, name: Any
) -> Collective | None:
    """With the wait, and with what torch does for other dims than 0."""
    waited = only_user(start)
    if not is_call(waited, wait_tensor) or waited is None:
        return None
    if value(input) is None or not isinstance(size, int) or not isinstance(name, str):
        return None
    result, ndim = waited, value(input).dim()
    dim = dim % max(ndim, 1)
    own = start.target in (_ops.all_gather.default, _ops.reduce_scatter.default)
    if not own and kind == "all_gather":
        joined = _joined(waited, size)
        if joined is not None:
            result, dim = joined
    if not own and kind == "reduce_scatter":
        cut = _cut(input, size)
        if cut is not None:
            input, dim = cut
    return Collective(kind, start, input, result, dim, str(reduce_op).lower(), size, name)


def _size_of(name: Any) -> int | None:
    """torch's all_reduce does not carry the size of its group; None if there is no such group yet."""
    try:
        return int(torch._C._distributed_c10d._resolve_process_group(name).size())
    except (RuntimeError, LookupError, ValueError, TypeError):
        return None


def _joined(waited: fx.Node, size: int) -> tuple[fx.Node, int] | None:
    """The cat, along another dim, of all slices along dim 0 of a gathered tensor."""
    parts = _slices(waited, 0, size)
    if parts is None:
        return None
    users = {user for part in parts for user in part.users}
    cat = users.pop() if len(users) == 1 else None
    if not is_call(cat, aten.cat.default) or cat is None or list(arguments(cat)[0]) != parts:
        return None
    dim = arguments(cat)[1] if len(arguments(cat)) > 1 else 0
    return cat, int(dim) % value(cat).dim()


def _cut(input: fx.Node, size: int) -> tuple[fx.Node, int] | None:
    """Of ``input`` = the cat, along dim 0, of all slices along another dim: what is sliced, and the dim."""
    if not is_call(input, aten.cat.default) or len(input.users) != 1:
        return None
    parts = list(arguments(input)[0])
    dim = arguments(input)[1] if len(arguments(input)) > 1 else 0
    if len(parts) != size or dim != 0 or not all(isinstance(part, fx.Node) for part in parts):
        return None
    source = arguments(parts[0])[0]
    if is_call(parts[0], operator.getitem):
        if not is_call(source, aten.split.Tensor, aten.chunk.default):
            return None
        along = arguments(source)[2] if len(arguments(source)) > 2 else 0
        source = arguments(source)[0]
    elif is_call(parts[0], aten.slice.Tensor):
        along = arguments(parts[0])[1] if len(arguments(parts[0])) > 1 else 0
    else:
        return None
    if _slices(source, along, size) != parts:
        return None
    return source, int(along) % value(source).dim()


def _slices(source: fx.Node, dim: Any, size: int) -> list[fx.Node] | None:
    """The ``size`` equal parts of ``source`` along ``dim``, if it is used by nothing else."""
    length = shape(source)[dim]
    user = only_user(source)
    if user is not None and is_call(user, aten.split.Tensor):
        _, part, along = (*arguments(user), 0)[:3]
        part = part.meta["val"] if isinstance(part, fx.Node) else part
        items = sorted(user.users, key=lambda item: int(arguments(item)[1]))
        equal = same([part * size], [length])
        if equal and along == dim and [arguments(each)[1] for each in items] == list(range(size)):
            return items
        return None
    if not isinstance(length, int) or length % size:
        return None
    part = length // size
    slices = list(source.users)
    if len(slices) != size or not all(is_call(each, aten.slice.Tensor) for each in slices):
        return None
    found = {}
    for each in slices:
        given: list[Any] = list(arguments(each)[1:])
        defaults: list[Any] = [0, 0, length, 1]
        along, start, end, step = given + defaults[len(given) :]
        if along != dim or step != 1 or start % part or min(end, length) != start + part:
            return None
        found[start // part] = each
    return [found[rank] for rank in range(size)] if len(found) == size else None
