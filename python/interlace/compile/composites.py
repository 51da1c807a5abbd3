"""Composite ops of a graph that is not decomposed, as of ``torch.export``, by the ops they are made of.

The patterns of this package are those of graphs that are decomposed: a Linear is ``mm`` or ``addmm``. An
exported program has ``linear``, ``matmul``, ``layer_norm``, which torch itself computes by other ops.
"""

from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.compile.graph_nodes import RESHAPES, arguments, origin_of

_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(graph: fx.Graph) -> None:
    """Replace each composite op, in place, by the ops that torch computes it by."""
    for node in list(graph.nodes):
        if _is_composite(node):
            _replace(node)


def _is_composite(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" or target._schema.is_mutable or target in RESHAPES:
        return False  # Inductor has its views as reshapes on purpose: strides may change yet
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False  # dropout, which tools that go from training to evaluation look for
    if node.meta.get("unbacked_bindings"):
        return False  # a new trace would have new symbols for lengths that only the data has
    made = tree_leaves(node.meta.get("val"))
    if not all(isinstance(each, torch.Tensor) for each in made):
        return False
    return bool(target.has_kernel_for_dispatch_key(_KEY))


def _replace(node: fx.Node) -> None:
    target: Any = node.target
    inputs = list(node.all_input_nodes)
    values = [each.meta["val"] for each in inputs]
    mode = detect_fake_mode(tree_leaves(values))
    if mode is None:
        return

    def call(*given: Any) -> Any:
        known = dict(zip(inputs, given, strict=True))
        args, kwargs = tree_map_only(fx.Node, known.__getitem__, (node.args, node.kwargs))
        return target(*args, **kwargs)

    with mode, torch.no_grad():
        traced = make_fx(call, tracing_mode="real")(*values).graph
    if traced.find_nodes(op="get_attr"):
        return  # constants, for which the graph has no place
    made = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with node.graph.inserting_before(node):
        for each in traced.nodes:
            if each.op not in ("placeholder", "output"):
                made[each] = node.graph.node_copy(each, made.__getitem__)
                made[each].meta = {**origin_of(node), "val": each.meta["val"]}
    (results,) = arguments(traced.output_node())
    if isinstance(results, fx.Node):
        pairs = [(node, made[results])]
    else:  # a list, of which the graph reads entries
        pairs = [(item, made[results[arguments(item)[1]]]) for item in list(node.users)]
    for old, new in pairs:
        # a "to" that changes nothing gives its input, which a program's outputs know by another name
        for user in list(old.users):
            if new not in inputs or user.op != "output":
                user.replace_input_with(old, new)
    for old in dict.fromkeys([*(old for old, _ in pairs), node]):
        if not old.users:
            node.graph.erase_node(old)
