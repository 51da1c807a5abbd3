"""Collectives of an aten graph, found in every form in which they come.

torch's functional ops gather and scatter dim 0; what its layers want of other dims is around them::

    gather   all_gather_into_tensor -> wait [-> split or slices -> cat along dim]
    scatter  [split or slices along dim -> cat ->] reduce_scatter_tensor -> wait
    reduce   all_reduce -> wait

``torch.ops.interlace``'s own have the dim themselves. vLLM's have it, too, and no wait; their group is the
one that ``GroupSpec.bind`` or torch has given the name. Legacy calls, ``dist.all_gather_into_tensor(out,
x)`` and so on, are these once torch has traced them.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from interlace.compile.graph_nodes import (
    arguments,
    aten,
    is_call,
    named_arguments,
    named_call,
    only_user,
    same,
    shape,
    value,
    wait_tensor,
)
from interlace.groups import specs


@dataclass(frozen=True)
class Collective:
    """A collective of a graph, as a :class:`Pattern` gets it.

    ``kind``: "all_gather", "reduce_scatter" or "all_reduce". ``start`` is the node that starts it.
    ``input`` is what the user's code gave, ``result`` what it gets, both in the form in which ``dim`` is
    the dimension that is gathered or scattered. ``size`` and ``name`` are the group's.
    """

    kind: str
    start: fx.Node
    input: fx.Node
    result: fx.Node
    dim: int
    reduce_op: str
    size: int
    name: str


def find(graph: fx.Graph) -> list[Collective]:
    return [made for node in graph.nodes if (made := at(node)) is not None]


STARTS = {  # of an op: the kind of collective, and the names of its arguments
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input size name"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input reduce_op size name"),
    "_c10d_functional::all_reduce": ("all_reduce", "input reduce_op name"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input reduce_op name"),
    "interlace::all_gather": ("all_gather", "input dim size name"),
    "interlace::reduce_scatter": ("reduce_scatter", "input reduce_op dim size name"),
    "interlace::all_reduce": ("all_reduce", "input reduce_op size name"),
    "vllm::all_gather": ("all_gather", "input dim size name"),
    "vllm::reduce_scatter": ("reduce_scatter", "input dim size name"),
    "vllm::all_reduce": ("all_reduce", "input name"),
}
NAMESPACES = ("_c10d_functional", "interlace")
VLLM = tuple(name for name in STARTS if name.startswith("vllm"))  # which has ops of other kinds
NOT_COLLECTIVE = ("wait_tensor", "rank", "group_size")


def others(graph: fx.Graph) -> list[fx.Node]:
    """Collectives of the graph that :func:`find` does not find; ops that are fused already are none."""
    left = []
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        full = target._schema.name
        name = full.split("::")[1]
        if target.namespace not in NAMESPACES and full not in VLLM:
            continue
        if name in NOT_COLLECTIVE or "matmul" in name:
            continue
        if name.endswith("_norm"):
            continue
        if at(node) is None:
            left.append(node)
    return left


def at(node: fx.Node) -> Collective | None:
    """The collective that ``node`` starts, with its wait, and what torch does for other dims than 0."""
    called = named_call(node)
    if called is None or called.name not in STARTS:
        return None
    kind, names = STARTS[called.name]
    given = dict(zip(names.split(), called.given.values(), strict=True))
    input, name = given["input"], given["name"]
    size = given["size"] if "size" in given else _size_of(name)
    waited = node if called.name in VLLM else only_user(node)
    if waited is None or not (waited is node or is_call(waited, wait_tensor)):
        return None
    if value(input) is None or not isinstance(size, int) or not isinstance(name, str):
        return None
    result, dim = waited, given.get("dim", 0) % max(value(input).dim(), 1)
    if "dim" not in given and kind == "all_gather":
        result, dim = _joined(waited, size) or (result, dim)
    if "dim" not in given and kind == "reduce_scatter":
        input, dim = _cut(input, size) or (input, dim)
    reduce_op = str(given.get("reduce_op", "sum")).lower()
    return Collective(kind, node, input, result, dim, reduce_op, size, name)


def _size_of(name: Any) -> int | None:
    """An all_reduce does not carry the size of its group; None if there is no such group yet."""
    try:
        return specs.describe(name)[1]
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
    return cat, int(named_arguments(cat)["dim"]) % value(cat).dim()


def _cut(input: fx.Node, size: int) -> tuple[fx.Node, int] | None:
    """Of ``input`` = the cat, along dim 0, of all slices along another dim: what is sliced, and the dim."""
    if not is_call(input, aten.cat.default) or len(input.users) != 1:
        return None
    joined = named_arguments(input)
    parts = list(joined["tensors"])
    whole = len(parts) == size and joined["dim"] == 0
    if not whole or not all(isinstance(part, fx.Node) for part in parts):
        return None
    cut = arguments(parts[0])[0] if is_call(parts[0], operator.getitem) else parts[0]
    if not is_call(cut, aten.split.Tensor, aten.chunk.default, aten.slice.Tensor):
        return None
    source, along = arguments(cut)[0], named_arguments(cut)["dim"]
    if _slices(source, along, size) != parts:
        return None
    return source, int(along) % value(source).dim()


def _slices(source: fx.Node, dim: Any, size: int) -> list[fx.Node] | None:
    """The ``size`` equal parts of ``source`` along ``dim``, if it is used by nothing else."""
    length = shape(source)[dim]
    user = only_user(source)
    if user is not None and is_call(user, aten.split.Tensor):
        given = named_arguments(user)
        part, along = given["split_size"], given["dim"]
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
        given = named_arguments(each)
        start, end = given["start"] or 0, length if given["end"] is None else given["end"]
        if (given["dim"], given["step"]) != (dim, 1) or start % part:
            return None
        if min(end, length) != start + part:
            return None
        found[start // part] = each
    return [found[rank] for rank in range(size)] if len(found) == size else None
