"""Calls of ops that are known by name: those of vLLM, which are there where vLLM is.

Ops that change their arguments come functionalised: ``auto_functionalized(op, input=x, ...)`` gives what op
returns, and then its changed arguments, in the order of the schema or in that of ``_all_bases``.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from interlace.compile.graph_nodes import arguments

_higher: Any = torch.ops.higher_order
FUNCTIONALISED = (_higher.auto_functionalized, _higher.auto_functionalized_v2)


class NamedCall(NamedTuple):
    """``given``: all arguments, by name. ``made``: of changed arguments the nodes that have them after; of
    an op that changes none its results, by number. What nobody reads is None, or missing."""

    name: str
    given: dict[str, Any]
    made: dict[Any, fx.Node | None]


def named_call(node: fx.Node) -> NamedCall | None:
    """The call that ``node`` is; None if it is no op, or changes a part of a tensor."""
    if node.op != "call_function":
        return None
    if node.target not in FUNCTIONALISED:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        schema = node.target._schema
        single: dict[Any, fx.Node | None] = {0: node}
        made = _items(node) if len(schema.returns) > 1 else single
        return NamedCall(schema.name, given_to(node.target, node.args, node.kwargs), made)
    op: Any = arguments(node)[0]
    given, items = dict(node.kwargs), _items(node)
    kinds = {each.name: each.alias_info for each in op._schema.arguments}
    changed = [name for name, kind in kinds.items() if kind is not None and kind.is_write]
    first = max(1, len(op._schema.returns))
    places: dict[str, Any] = {name: index for index, name in enumerate(changed)}
    if node.target is FUNCTIONALISED[1]:
        bases: Any = given.pop("_all_bases")
        for name in changed:
            places[name] = index = given.pop(f"_{name}_base_index", None)
            given[name] = None if index is None else bases[index]
        if any(name.startswith("_") for name in given):  # strides of a view
            return None
    made = {name: items.get(first + at) for name, at in places.items() if at is not None}
    return NamedCall(op._schema.name, given_to(op, (), given), made)


def given_to(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``op``, by name, in the order of its schema, with defaults."""
    found = {}
    for index, each in enumerate(op._schema.arguments):
        default = each.default_value if each.has_default_value() else None
        found[each.name] = args[index] if index < len(args) else kwargs.get(each.name, default)
    return found


def _items(node: fx.Node) -> dict[Any, fx.Node | None]:
    return {arguments(user)[1]: user for user in node.users if user.target is operator.getitem}
