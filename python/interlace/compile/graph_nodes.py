"""Nodes of an aten graph: properties, dependencies, new nodes that know their shapes, and collectives.

Ops that change their arguments appear functionalised: ``auto_functionalized(op, input=x, ...)`` returns the
op's results, and then its changed arguments, in the order of the schema or of ``_all_bases``.

torch's functional ops gather and scatter dim 0. For other dims torch adds nodes around them::

    gather   all_gather_into_tensor -> wait [-> split or slices -> cat along dim]
    scatter  [split or slices along dim -> cat ->] reduce_scatter_tensor -> wait
    reduce   all_reduce -> wait

The ops of ``torch.ops.interlace`` have the dim themselves. So do vLLM's ops, which have no wait. Their
group is the group to which ``GroupSpec.bind`` or torch has given the name. Legacy calls, such as
``dist.all_gather_into_tensor(out, x)``, become torch's functional ops when torch traces them.
"""

import contextlib
import operator
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.groups import specs

aten: Any = torch.ops.aten
c10d: Any = torch.ops._c10d_functional
wait_tensor: Any = c10d.wait_tensor.default

_LIBRARIES = tuple(  # the folders of torch and of interlace
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (str(torch.__file__), os.path.dirname(__file__))
)
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
CONVERTS: Any = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
SAME_BITS = (aten.view.dtype, aten.alias.default, aten.detach.default)


AnyGraph = fx.Graph | fx.GraphModule | torch.export.ExportedProgram


def graph_of(program: AnyGraph) -> fx.Graph:
    """Return the graph of a module or of an exported program. Raise TypeError for another type."""
    if isinstance(program, fx.Graph):
        return program
    if isinstance(program, fx.GraphModule | torch.export.ExportedProgram):
        return program.graph
    raise TypeError(
        "graph must be a torch.fx.Graph, a torch.fx.GraphModule or a torch.export.ExportedProgram, got "
        f"{type(program).__name__}"
    )


def is_call(node: object, *targets: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def arguments(node: fx.Node) -> Any:
    """Return the arguments of the node's call, whose types only its target knows."""
    return node.args


def value(node: fx.Node) -> Any:
    """Return the fake tensor from the node's trace, or None if it is not a tensor."""
    example = node.meta.get("val")
    return example if isinstance(example, torch.Tensor) else None


def shape(node: fx.Node) -> list[Any]:
    return list(value(node).shape)


def static(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)


def same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two lists of lengths are known to be equal. This adds no guards."""
    if len(one) != len(other):
        return False
    return all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def hinted(length: int | torch.SymInt) -> int | None:
    """Return a length, or the traced value of a symbolic one, or None if that is not known."""
    if isinstance(length, int):
        return length
    hint = length.node.hint
    return None if hint is None else int(hint)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def call(target: Any, args: tuple[Any, ...], like: fx.Node, **options: Any) -> fx.Node:
    """Insert a new node that calls an op, with its value and the origin of ``like``.

    ``args`` may contain nodes; the op gets their ``meta["val"]``. ``options`` are its keyword arguments.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph = make_fx(torch.relu, tracing_mode="fake")(torch.ones(4, 8)).graph
    >>> relu = next(node for node in graph.nodes if node.op == "call_function")
    >>> with graph.inserting_after(relu):
    ...     total = call(torch.ops.aten.sum.dim_IntList, (relu, [0]), relu)
    >>> total.meta["val"].shape
    torch.Size([8])
    """
    name = target._schema.name.split("::")[1] if hasattr(target, "_schema") else None
    node = like.graph.create_node("call_function", target, args, options, name=name)
    node.meta.update(origin_of(like))
    values = torch.utils._pytree.tree_map_only(fx.Node, lambda each: each.meta["val"], args)
    mode = detect_fake_mode([leaf for leaf in torch.utils._pytree.tree_leaves(values)])
    with contextlib.nullcontext() if mode is None else mode:
        node.meta["val"] = target(*values, **options)
    return node


def origin_of(node: fx.Node) -> dict[str, object]:
    """Return the part of the ``meta`` of ``node`` about its origin, for nodes that replace it."""
    keys = "stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "from_node"
    return {key: node.meta[key] for key in keys if key in node.meta}


def output_names(graph: fx.Graph) -> list[str]:
    """Return the names of the graph's results in order; "" for a result that is not a node."""
    leaves = torch.utils._pytree.tree_leaves(graph.output_node().args)
    return [leaf.name if isinstance(leaf, fx.Node) else "" for leaf in leaves]


def restore_output_names(graph: fx.Graph, names: Sequence[str]) -> None:
    """Give the graph's results the ``names`` that :func:`output_names` returned before a rewrite.

    An exported program finds its results by these names. A name that another node still has stays there.
    """
    taken = {node.name for node in graph.nodes}
    leaves = torch.utils._pytree.tree_leaves(graph.output_node().args)
    for node, name in zip(leaves, names, strict=True):
        if name and name not in taken:
            node.name = name


def chain_of_reshapes(node: fx.Node, *more: Any) -> Iterable[fx.Node]:
    """Return ``node`` and all reshapes of it, or ops ``more``, that keep the last dimension, in chains."""
    yield node
    for user in node.users:
        if is_call(user, *RESHAPES, *more) and user.args[0] is node and keeps_columns(user):
            yield from chain_of_reshapes(user, *more)


def keeps_columns(reshaped: fx.Node) -> bool:
    """Return whether a reshape keeps the last dimension, so that rows stay rows."""
    source, target = shape(reshaped.args[0]), shape(reshaped)  # type: ignore[arg-type]
    return bool(source and target and static(source[-1], target[-1]) and source[-1] == target[-1])


def through_reshapes(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the source of ``node`` before reshapes that keep the last dimension, and these reshapes."""
    passed = []
    while is_call(node, *RESHAPES) and keeps_columns(node):
        passed.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, passed


def without_copies(graph: fx.Graph) -> None:
    """Replace ``copy(empty, w)``, ``detach(w)`` and ``alias(w)`` by w, the result of a wait.

    torch traces an in-place collective into the first, and ``wait()`` of a tensor that needs a gradient
    into the others. They stay if the graph returns them together with w: their equality would be unknown.
    Other copies stay, as they may copy a tensor of the caller that changes later.
    """
    for node in list(graph.nodes):
        if not is_call(node, aten.copy.default, aten.detach.default, aten.alias.default):
            continue
        source = arguments(node)[is_call(node, aten.copy.default)]
        if not is_call(source, wait_tensor):
            continue
        if len(source.users) > 1 and any(user.op == "output" for user in node.users):
            continue
        new, old = value(node), value(source)
        alike = same(new.shape, old.shape) and same(new.stride(), old.stride())
        if alike and (new.dtype, new.device) == (old.dtype, old.device):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def in_order(graph: fx.Graph) -> None:
    """Move every node after its inputs, and keep the order otherwise."""
    order: list[fx.Node] = []
    placed: set[fx.Node] = set()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [each for each in top.all_input_nodes if each not in placed]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if top not in placed:
                placed.add(top)
                order.append(top)
    for before, node in pairwise(order):
        before.append(node)


def source_line(node: fx.Node) -> str:
    """Return where the user's code made ``node``, and in which module: "model.py:12 (layers.0.w1)".

    Frames of libraries are left out. If there are no others, as in an nn.Sequential with hooks, return the
    line that causes the compilation now. For a node without frames and module, return the node's name.
    """
    frames = []
    for line in str(node.meta.get("stack_trace") or "").splitlines():
        text = line.strip()
        if text.startswith("File "):
            path, _, rest = text.removeprefix("File ").partition(", line ")
            frames.append((path.strip('"'), rest.split(",")[0]))
    module = _module_name(node)
    known = [frame for frame in frames if not _of_library(frame[0])]
    if not known and (frames or module):
        stack = [(frame.filename, str(frame.lineno)) for frame in traceback.extract_stack()]
        known = [frame for frame in stack if not _of_library(frame[0])] or frames
    place = node.name
    if known:
        path, number = known[-1]
        place = f"{os.path.basename(path)}:{number}"
    return f"{place} ({module})" if module else place


def _of_library(path: str) -> bool:
    """Return whether code is from torch, interlace or Python, or generated by torch, without a file."""
    if path.startswith(_LIBRARIES) or path.startswith(("<frozen", "<eval_with_key>")):
        return True
    return path.startswith(_PYTHON) and "-packages" + os.sep not in path


def _module_name(node: fx.Node) -> str:
    """Return the name of the module of ``node`` in the model; "" for the model itself or without one.

    Dynamo writes ``L['self'].layers.0``, which begins with a variable; torch.export writes ``layers.0``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    if not paths:
        return ""
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", paths[-1])
    return re.sub(r"^[LG]\['[^']*'\](\.|$)", "", path)


_higher: Any = torch.ops.higher_order
FUNCTIONALISED = (_higher.auto_functionalized, _higher.auto_functionalized_v2)


class NamedCall(NamedTuple):
    """A call of an op that is known by its name, such as vLLM's ops, which exist only with vLLM.

    ``given``: all arguments, by name. ``made``: for changed arguments, the nodes with their new values; for
    an op that changes no arguments, its results by number. Results without readers are None, or missing.
    """

    name: str
    given: dict[str, Any]
    made: dict[object, fx.Node | None]


def named_call(node: fx.Node) -> NamedCall | None:
    """Return the call that ``node`` is; None if it is not an op, or changes a part of a tensor."""
    if node.op != "call_function":
        return None
    if node.target not in FUNCTIONALISED:
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        schema = node.target._schema
        single: dict[object, fx.Node | None] = {0: node}
        results = _results(node) if len(schema.returns) > 1 else single
        return NamedCall(schema.name, named_arguments(node), results)
    op: OpOverload = arguments(node)[0]
    named, items = dict(node.kwargs), _results(node)
    kinds = {argument.name: argument.alias_info for argument in op._schema.arguments}
    changed = [name for name, kind in kinds.items() if kind is not None and kind.is_write]
    first = max(1, len(op._schema.returns))
    places: dict[str, Any] = {name: index for index, name in enumerate(changed)}
    if node.target is FUNCTIONALISED[1]:
        bases: Any = named.pop("_all_bases")
        for name in changed:
            places[name] = index = named.pop(f"_{name}_base_index", None)
            named[name] = None if index is None else bases[index]
        if any(name.startswith("_") for name in named):  # strides of a view
            return None
    results = {name: items.get(first + at) for name, at in places.items() if at is not None}
    return NamedCall(op._schema.name, given_to(op, (), named), results)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of the node's call as :func:`given_to` does."""
    return given_to(node.target, node.args, node.kwargs)


def given_to(op: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a call of ``op``, by name, in the order of its schema, with defaults."""
    found = {}
    for index, each in enumerate(op._schema.arguments):
        default = each.default_value if each.has_default_value() else None
        found[each.name] = args[index] if index < len(args) else kwargs.get(each.name, default)
    return found


def _results(node: fx.Node) -> dict[object, fx.Node | None]:
    return {arguments(user)[1]: user for user in node.users if user.target is operator.getitem}


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decompose(graph: fx.Graph) -> None:
    """Replace each composite op, in place, by the ops with which torch computes it, as the patterns expect.

    An exported program has composite ops: ``linear``, ``matmul``, ``layer_norm``.
    """
    for node in list(graph.nodes):
        if _is_composite(node):
            _replace_composite(node)


def _is_composite(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" or target._schema.is_mutable or target in RESHAPES:
        return False  # Inductor needs views as reshapes, as strides may still change
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False  # dropout: tools that switch training to evaluation look for it
    if node.meta.get("unbacked_bindings"):
        return False  # a new trace would have new symbols for lengths that depend on data
    examples = tree_leaves(node.meta.get("val"))
    if not all(isinstance(example, torch.Tensor) for example in examples):
        return False
    return bool(target.has_kernel_for_dispatch_key(_COMPOSITE))


def _replace_composite(node: fx.Node) -> None:
    target: Any = node.target
    inputs = list(node.all_input_nodes)
    if detect_fake_mode(tree_leaves([each.meta["val"] for each in inputs])) is None:
        return

    def call(*given: object) -> object:
        known = dict(zip(inputs, given, strict=True))
        args, kwargs = tree_map_only(fx.Node, known.__getitem__, (node.args, node.kwargs))
        return target(*args, **kwargs)

    traced = trace(call, inputs)
    if traced.find_nodes(op="get_attr"):
        return  # constants, which the graph cannot hold
    results = inline(traced, inputs, node)
    if isinstance(results, fx.Node):
        pairs = [(node, results)]
    else:  # a list, whose entries the graph reads
        pairs = [(item, results[arguments(item)[1]]) for item in list(node.users)]
    for old, new in pairs:
        # a "to" without effect returns its input, which has another name among a program's outputs
        for user in list(old.users):
            if new not in inputs or user.op != "output":
                user.replace_input_with(old, new)
    for old in dict.fromkeys([*(old for old, _ in pairs), node]):
        if not old.users:
            node.graph.erase_node(old)


def trace(function: Callable[..., object], inputs: Sequence[fx.Node], **options: Any) -> fx.Graph:
    """Trace ``function`` with these nodes' values; ``options`` are those for ``make_fx``."""
    values = [each.meta["val"] for each in inputs]
    mode = detect_fake_mode(tree_leaves(values))
    with contextlib.nullcontext() if mode is None else mode, torch.no_grad():
        return make_fx(function, tracing_mode="real", **options)(*values).graph


def inline(traced: fx.Graph, inputs: Sequence[fx.Node], like: fx.Node) -> Any:
    """Copy a graph of :func:`trace` before ``like``, with its origin, and return the results' nodes."""
    copies = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    with like.graph.inserting_before(like):
        for node in traced.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = like.graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {**origin_of(like), "val": node.meta["val"]}
    (results,) = arguments(traced.output_node())
    return tree_map_only(fx.Node, copies.__getitem__, results)


@dataclass(frozen=True)
class Collective:
    """A collective of a graph, as a :class:`Pattern` gets it.

    ``kind``: "all_gather", "reduce_scatter" or "all_reduce". ``start`` is the node that starts it.
    ``input`` is the tensor from the user's code, ``result`` the tensor that it gets. In both, ``dim`` is
    the dimension that is gathered or scattered. ``size`` and ``name`` describe the group.
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
    return [found for node in graph.nodes if (found := at(node)) is not None]


STARTS = {  # by op: the kind of collective, and the names of its arguments
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
VLLM = tuple(name for name in STARTS if name.startswith("vllm"))  # it has ops of other kinds
NOT_COLLECTIVE = ("wait_tensor", "rank", "group_size")


def other_collectives(graph: fx.Graph) -> list[fx.Node]:
    """Return collectives of the graph that :func:`find` does not find, without ops already fused."""
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
    """Return the collective that ``node`` starts, with its wait, and torch's nodes for other dims."""
    called = named_call(node)
    if called is None or called.name not in STARTS:
        return None
    kind, names = STARTS[called.name]
    named = dict(zip(names.split(), called.given.values(), strict=True))
    input, name = named["input"], named["name"]
    size = named["size"] if "size" in named else _size_of(name)
    waited = only_user(node)
    if called.name in VLLM or (waited is not None and waited.op == "output"):
        waited = node  # the caller of the graph waits
    if waited is None or not (waited is node or is_call(waited, wait_tensor)):
        return None
    if value(input) is None or not isinstance(size, int) or not isinstance(name, str):
        return None
    result, dim = waited, named.get("dim", 0) % max(value(input).dim(), 1)
    if "dim" not in named and kind == "all_gather":
        result, dim = _cat_of(waited, size) or (result, dim)
    if "dim" not in named and kind == "reduce_scatter":
        input, dim = _cut(input, size) or (input, dim)
    reduce_op = str(named.get("reduce_op", "sum")).lower()
    return Collective(kind, node, input, result, dim, reduce_op, size, name)


def _size_of(name: object) -> int | None:
    """Return the size of an all_reduce's group, which its node lacks; None if there is no group yet."""
    try:
        return specs.describe(name)[1]
    except (RuntimeError, LookupError, ValueError, TypeError):
        return None


def _cat_of(waited: fx.Node, size: int) -> tuple[fx.Node, int] | None:
    """Return the cat, along another dim, of all slices along dim 0 of a gathered tensor."""
    parts = _slices(waited, 0, size)
    if parts is None:
        return None
    users = {user for part in parts for user in part.users}
    cat = users.pop() if len(users) == 1 else None
    if not is_call(cat, aten.cat.default) or cat is None or list(arguments(cat)[0]) != parts:
        return None
    return cat, int(named_arguments(cat)["dim"]) % value(cat).dim()


def _cut(input: fx.Node, size: int) -> tuple[fx.Node, int] | None:
    """Return the tensor and the dim whose slices ``input`` concatenates along dim 0."""
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


def _slices(source: fx.Node, dim: int, size: int) -> list[fx.Node] | None:
    """Return the ``size`` equal parts of ``source`` along ``dim``, if it has no other readers."""
    length = shape(source)[dim]
    user = only_user(source)
    if user is not None and is_call(user, aten.split.Tensor):
        named = named_arguments(user)
        part, along = named["split_size"], named["dim"]
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
        named = named_arguments(each)
        start, end = named["start"] or 0, length if named["end"] is None else named["end"]
        if (named["dim"], named["step"]) != (dim, 1) or start % part:
            return None
        if min(end, length) != start + part:
            return None
        found[start // part] = each
    return [found[rank] for rank in range(size)] if len(found) == size else None


class Unfit(Exception):
    """An exception whose message says why a matmul cannot be fused."""
