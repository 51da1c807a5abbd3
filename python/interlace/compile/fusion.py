"""The fusion pass: in an aten graph, it replaces collectives and adjacent matmuls by interlace's fused ops.

This is the rewrite for a gather of ``x`` that two matmuls read, with a result that is kept for a backward::

    before   g = all_gather(x)   w = wait(g)   a = mm(w, A)   b = mm(w, B)   return w, a, b
    after    f = interlace.all_gather_matmul(x, [A, B], [], dim, True, ...)
             a = wait(f[0])   b = wait(f[1])   w = wait(f[2])

The readers of the matmul see the same shape and strides as before. Every collective is a
:class:`Candidate` in the :class:`Report`, so nothing is fused or left silently.

Policy "auto" compares predicted seconds (docs/how-to/compile/passes.md). ``runtime/tuning/tuning.py`` has
the machines: ``CPU`` is fitted to 2 and 4 ranks on 2 cores; ``GPU`` has round numbers, without
measurements. A :func:`calibrated` machine is never used by default: ranks compile alone, and ranks on
another host have another file, or none.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from interlace.arguments import checks
from interlace.compile import graph_nodes as nodes, norms
from interlace.compile.graph_nodes import Collective, Unfit, at, find, other_collectives
from interlace.compile.products import GraphProduct, readers, terms
from interlace.compile.rewrite import (
    WITH_MATMULS,
    fuse_gather,
    fuse_reduction,
    fused_op,
)
from interlace.compile.scales import own_scales
from interlace.runtime.tuning.tuning import (
    CPU as CPU,
    FUSED_DTYPES,
    GPU as GPU,
    Machine as Machine,
    calibrated as calibrated,
    machine_for as machine_for,
)


class Prediction(NamedTuple):
    """Seconds of a collective and its matmul: one after the other, and in one fused op."""

    unfused: float
    fused: float


Times = tuple[float, float] | tuple[None, None]


def why_not(policy: str, times: Times) -> str:
    """Return why the fusion pass leaves a possible fusion with predicted ``times``; "" if it fuses."""
    if policy == "never":
        return 'policy is "never"'
    slower = policy == "auto" and times[0] is not None and times[1] >= times[0]
    return "predicted to be slower fused" if slower else ""


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def predict(
    collective: str,
    rows: int,
    columns: int,
    inner: int,
    world_size: int,
    *,
    dtype: torch.dtype,
    machine: Machine,
    bias: bool = False,
    terms: int = 1,
    batch: int = 1,
) -> Prediction:
    """Predict the seconds of a collective and a matmul, and of both in one op, for a compiler to compare.

    With policy "auto", the fusion pass fuses if ``fused`` is less. Nothing is measured or run, and equal
    arguments give equal bits on every rank.

    Parameters
    ----------
    collective : "all_gather" for the rows that are multiplied; "reduce_scatter" or "all_reduce" for the
        product.
    rows, columns, inner : lengths in one rank's matmul, ``(rows, inner) @ (inner, columns)``. For a gather,
        the rows are all ranks' rows. For a scatter, they are the rows before it. If several weights read
        the same rows, ``columns`` is their sum.
    dtype : the dtype that is sent.
    machine : :data:`CPU`, :data:`GPU`, :func:`calibrated`, or a :class:`Machine` with your own figures.
    bias : whether every rank adds a bias before a reduction; the bias is then reduced separately.
    terms : the number of matmuls that are added before a reduction; ``inner`` is their sum.
    batch : the number of ops for a batch of weights; ``rows`` is the sum over all.

    Raises ValueError for another ``collective``, a negative length, or another number below 1. Raises
    TypeError for a value that is not a number, dtype or machine.

    >>> layer = predict("all_gather", 8192, 28672, 8192, 8, dtype=torch.bfloat16, machine=GPU)
    >>> round(1e6 * layer.unfused), round(1e6 * layer.fused), layer.fused < layer.unfused
    (8100, 7785, True)
    >>> small = predict("all_gather", 8, 64, 64, 2, dtype=torch.float32, machine=CPU)
    >>> small.fused < small.unfused
    False
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective must be one of {', '.join(COLLECTIVES)}, got {collective!r}")
    lengths = {"rows": rows, "columns": columns, "inner": inner}
    counts = {"world_size": world_size, "terms": terms, "batch": batch}
    for name, number in {**lengths, **counts}.items():
        least = int(name in counts)
        if checks.integer(name, number) < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    for name, value, kind in (("dtype", dtype, torch.dtype), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    reduces = collective != "all_gather"
    whole = rows * (columns if reduces else inner) * dtype.itemsize
    whole //= 2 if dtype == torch.float4_e2m1fn_x2 else 1  # it has two numbers in a byte
    passes = 2 if collective == "all_reduce" else 1
    nbytes = passes * whole * (world_size - 1) // world_size
    multiplying = 2 * rows * columns * inner / machine.flops
    unfused = machine.latency + nbytes / machine.bandwidth + multiplying
    moving = nbytes / machine.fused_bandwidth
    hidden = machine.overlap * min(moving, multiplying)
    fused = machine.fused_host * batch + moving + multiplying - hidden
    if reduces and terms > 1:  # the left operands are concatenated
        fused += rows * inner * dtype.itemsize / machine.bandwidth
    if reduces and bias:
        fused += machine.latency
    return Prediction(unfused, fused)


@dataclass(frozen=True)
class Candidate:
    """A collective of a graph and its matmuls.

    ``where`` is the line of the user's code and the module, as "model.py:12 (layers.0.w1)".
    ``op`` is the op that replaces it or would replace it, and ``matmuls`` the number of fused matmuls.
    ``reason`` says why it was left, "" if it was fused. Times are predictions in seconds, None without a
    prediction. ``notes`` name matmuls that were left out of a fused op, and why.
    """

    collective: str
    where: str
    op: str
    shape: str
    matmuls: int
    fused: bool
    reason: str = ""
    unfused_seconds: float | None = None
    fused_seconds: float | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = f"{self.collective} {self.shape} at {self.where}"
        times = ""
        if self.unfused_seconds is not None and self.fused_seconds is not None:
            unfused, fused = 1e6 * self.unfused_seconds, 1e6 * self.fused_seconds
            times = f" (predicted {unfused:.0f} us unfused, {fused:.0f} us fused)"
        outcome = f"fused into {self.op}" if self.fused else f"not fused: {self.reason}"
        if self.fused and self.matmuls:
            outcome += f" with {self.matmuls} matmul{'s' if self.matmuls > 1 else ''}"
        return "; ".join([f"{subject}: {outcome}{times}", *self.notes])


@dataclass
class Report:
    """The candidates of one graph, in its order. ``graph``: "forward", "backward" or "inference".

    ``before`` and ``after`` are the graph's code, only with ``on_report``.
    """

    graph: str
    candidates: list[Candidate] = field(default_factory=list)
    before: str = ""
    after: str = ""

    @property
    def fused(self) -> list[Candidate]:
        """The candidates that were fused."""
        return [candidate for candidate in self.candidates if candidate.fused]

    def summary(self) -> str:
        """Return the report in one line."""
        line = f"{self.graph} graph: fused {len(self.fused)} of {len(self.candidates)} collectives"
        counts = sorted(Counter(candidate.op for candidate in self.fused).items())
        if counts:
            line += f" ({', '.join(f'{op} {count}' for op, count in counts)})"
        if left := sorted(
            {candidate.reason for candidate in self.candidates if not candidate.fused}
        ):
            line += "; left: " + ", ".join(left)
        return line

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"  {candidate}" for candidate in self.candidates)])


POLICIES = ("auto", "always", "never")


@dataclass(frozen=True)
class Pattern:
    """Your own rewrite for the fusion pass, which decides about it and reports it like its own rewrites.

    The pass finds the collectives in all their forms. It asks ``find`` about each collective before it
    tries interlace's rewrites. The first pattern that finds something decides.

    Attributes
    ----------
    name : the name of the replacement, in reports.
    find : called with a :class:`Collective`; returns the values that you need for the rewrite, or None if
        the collective does not match.
    rewrite : called with the collective and the result of ``find``; changes the graph in place. Let readers
        of ``collective.result`` read new nodes instead. Unread nodes are then removed, and nodes are
        sorted. :func:`call` makes a node that knows its shape, which Inductor needs.
    predict : called with the collective, the result of ``find`` and a :class:`Machine`; returns a
        :class:`Prediction`, by which policy "auto" decides. Without it, "auto" rewrites every match.

    >>> aten = torch.ops.aten
    >>> def find(collective):
    ...     readers = list(collective.result.users)
    ...     alone = collective.kind == "all_gather" and len(readers) == 1
    ...     return readers[0] if alone and readers[0].target is aten.relu.default else None
    >>> def rewrite(collective, relu):
    ...     with relu.graph.inserting_before(collective.start):
    ...         shard = interlace.compile.call(aten.relu.default, (collective.input,), relu)
    ...     collective.start.replace_input_with(collective.input, shard)
    ...     relu.replace_all_uses_with(collective.result)
    >>> before = Pattern("relu_then_all_gather", find, rewrite)

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def layer(x):
    ...     return torch.relu(functional.all_gather(x, group=interlace.GroupSpec("tp", 4)))
    >>> graph = make_fx(layer, tracing_mode="fake")(torch.ones(4, 8)).graph
    >>> fuse(graph, patterns=[before]).summary()
    'inference graph: fused 1 of 1 collectives (relu_then_all_gather 1)'
    >>> [str(node.target).split(".")[-2] for node in graph.nodes if node.op == "call_function"]
    ['relu', 'all_gather', 'wait_tensor']
    """

    name: str
    find: Callable[[Collective], object]
    rewrite: Callable[[Collective, Any], None]
    predict: Callable[[Collective, Any, Machine], Prediction] | None = None


def check_options(policy: str, machine: object, patterns: Sequence[object]) -> None:
    """Raise for options that the fusion pass does not accept."""
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not isinstance(machine, Machine | None):
        raise TypeError(f"machine must be a Machine or None, got {machine!r}")
    if not isinstance(patterns, Sequence):
        raise TypeError(f"patterns must be a sequence of Patterns, got {patterns!r}")
    for index, each in enumerate(patterns):
        if not isinstance(each, Pattern):
            raise TypeError(f"patterns[{index}] must be a Pattern, got {each!r}")


def fuse(
    graph: nodes.AnyGraph,
    *,
    policy: str = "auto",
    machine: Machine | None = None,
    name: str = "inference",
    patterns: Sequence[Pattern] = (),
) -> Report:
    """Fuse what can be fused and, with policy "auto", is predicted to be faster. In place; return a report.

    ``graph``: a torch.fx.Graph, a GraphModule, which is compiled again, or the result of
    ``torch.export.export``, decomposed or not. In a graph with collectives, composite ops (``linear``,
    ``matmul``) become the ops by which torch computes them. The graph's results keep their names, so a
    program can be saved. ``patterns``: your own :class:`Pattern` objects, tried before interlace's.

    Raises ValueError for another policy, and TypeError for a wrong type of graph, machine or pattern.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def layer(x, weight):
    ...     return interlace.functional.all_gather(x, group=interlace.GroupSpec("tp", 4)) @ weight
    >>> graph = make_fx(layer, tracing_mode="fake")(torch.ones(4, 8), torch.ones(8, 2)).graph
    >>> fuse(graph, policy="always").summary()
    'inference graph: fused 1 of 1 collectives (all_gather_matmul 1)'
    """
    check_options(policy, machine, patterns)
    module, graph = getattr(graph, "graph_module", graph), nodes.graph_of(graph)
    report = Report(name)
    replaced: set[fx.Node] = set()
    carried: dict[fx.Node, str] = {}  # gathers of scales, and the op that also gathers them
    names = nodes.output_names(graph)
    if policy != "never":
        if find(graph):
            nodes.decompose(graph)
        nodes.without_copies(graph)
    collectives = find(graph)
    gathers = {each.result: each for each in collectives if each.kind == "all_gather"}
    for found in collectives:
        # an earlier rewrite may have replaced its input, such as a norm before a gather
        collective = at(found.start) or found
        decision = _by_pattern(patterns, collective, policy, machine)
        candidate, rewrite, along = decision or _consider(collective, gathers, policy, machine)
        report.candidates.append(candidate)
        if candidate.fused:
            replaced |= _with_waits(collective)
            rewrite()
            if along is not None:
                replaced |= _with_waits(along)
                carried[along.start] = candidate.op
    remaining = [node for node in other_collectives(graph) if node not in replaced]
    report.candidates += map(_other, remaining)
    if replaced:
        nodes.in_order(graph)
        # torch treats waits as impure; the waits of replaced collectives are not
        graph.eliminate_dead_code(lambda node: node not in replaced and node.is_impure())
    left = set(graph.nodes)
    for number, found in enumerate(collectives):
        if found.start in carried and found.start not in left:
            report.candidates[number] = replace(
                report.candidates[number], op=carried[found.start], fused=True, reason="",
                notes=("scales, which travel with the rows",),
            )  # fmt: skip
    nodes.restore_output_names(graph, names)
    if isinstance(module, fx.GraphModule):
        module.recompile()
    return report


def _with_waits(collective: Collective) -> set[fx.Node]:
    users = {user for user in collective.start.users if user.op != "output"}
    return {collective.start, *users}


Decision = tuple[Candidate, Callable[[], None], Collective | None]
"""The report about a collective, its rewrite, and the gather of scales that is fused with it."""


def _by_pattern(
    patterns: Sequence[Pattern], collective: Collective, policy: str, machine: Machine | None
) -> Decision | None:
    """Decide by the first pattern that finds something; return None without one."""
    for pattern in patterns:
        found = pattern.find(collective)
        if found is None:
            continue
        times: Times = (None, None)
        if pattern.predict is not None:
            device = nodes.value(collective.input).device
            times = pattern.predict(collective, found, machine or machine_for(device))
        shape, reason = "x".join(map(str, nodes.shape(collective.input))), why_not(policy, times)
        candidate = _candidate(collective, pattern.name, shape, 0, reason, times)
        return candidate, functools.partial(pattern.rewrite, collective, found), None
    return None


def _candidate(
    collective: Collective,
    op: str,
    shape: str,
    matmuls: int,
    reason: str,
    times: Times,
    notes: tuple[str, ...] = (),
) -> Candidate:
    kind, where = collective.kind, nodes.source_line(collective.start)
    return Candidate(kind, where, op, shape, matmuls, not reason, reason, times[0], times[1], notes)


def _other(node: fx.Node) -> Candidate:
    op = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    reason = "a collective of another kind"
    if op.startswith(tuple(WITH_MATMULS)):
        reason = "it has several waits or is coalesced, or its group is not known"
    example = nodes.value(node)
    text = "" if example is None else "x".join(map(str, example.shape))
    return Candidate(op, nodes.source_line(node), "none", text, 0, False, reason)


def _consider(
    collective: Collective, gathers: dict[fx.Node, Collective], policy: str, machine: Machine | None
) -> Decision:
    """Decide by the adjacent matmuls, and by the norm of the reduced tensor."""
    norm, notes = _norm_of(collective)
    times: Times = (None, None)
    products: list[GraphProduct] = []
    reason = ""
    rewrite: Callable[[], None] = _nothing
    try:
        if collective.kind == "all_gather":
            products, notes = _gather_products(collective, gathers)
        else:
            products = _reduced_products(collective, norm)
        _check(collective, products)
        if products and not products[0].may_be_normed:
            norm = None
        times = _times(collective, products, machine)
        if left := why_not(policy, times):
            raise Unfit(left)
        if collective.kind == "all_gather":
            rewrite = fuse_gather(collective, products)
        else:
            rewrite = fuse_reduction(collective, products, norm)
    except Unfit as error:
        reason = str(error)
    if products and products[0].blocks:
        notes = (*notes, f"its operands are {products[0].blocks}")
    op, shape = fused_op(collective, products, norm), _in_words(collective, products)
    candidate = _candidate(collective, op, shape, len(products), reason, times, notes)
    scales = products[0].scales if products else None
    return candidate, rewrite, None if scales is None else scales.gather


def _nothing() -> None:
    pass


def _norm_of(collective: Collective) -> tuple[norms.GraphNorm | None, tuple[str, ...]]:
    """Return the norm that reads the reduced tensor, or why it is left out."""
    if collective.kind == "all_gather" or collective.reduce_op not in ("sum", "avg"):
        return None, ()
    try:
        found = norms.find(collective)
        last = nodes.value(collective.result).dim() - 1
        if found is not None and collective.kind == "reduce_scatter" and collective.dim == last:
            raise Unfit("its rows are scattered in parts")
        return found, () if found is None else found.notes
    except Unfit as error:
        return None, (f"left out a norm: {error}",)


def _in_words(collective: Collective, products: list[GraphProduct]) -> str:
    whole = collective.result if collective.kind == "all_gather" else collective.input
    text = "x".join(map(str, nodes.shape(whole)))
    if products:
        text += " @ " + " + ".join(f"{p.inner}x{p.columns}" for p in products)
    return text


def _gather_products(
    collective: Collective, gathers: dict[fx.Node, Collective]
) -> tuple[list[GraphProduct], tuple[str, ...]]:
    products, refused = readers(collective.result)
    later = {product.node for product in products}
    kept: list[GraphProduct] = []
    notes = [f"left out {_place_of(node)}: {why}" for node, why in refused]
    for product in products:
        needed = [each for each in (product.right, product.bias) if each is not None]
        if product.scales is not None:
            needed += [product.scales.right, *product.scales.whole]
        if nodes.ancestors(needed) & (later | {collective.result}):
            place = _place_of(product.node)
            notes.append(f"left out {place}: its weight comes from the gathered tensor")
        else:
            kept.append(product)
    if not kept:
        reasons = sorted({why for _, why in refused}) or ["no matmul reads the gathered tensor"]
        raise Unfit("; ".join(reasons))
    for product in kept[:]:
        if product.kind != kept[0].kind:
            kept.remove(product)
            place, first = _place_of(product.node), kept[0].node.name
            notes.append(f"left out {place}: of another kind than {first}")
    return [_with_own_scales(product, collective, gathers) for product in kept], tuple(notes)


def _place_of(node: fx.Node) -> str:
    return f"{node.name} at {nodes.source_line(node)}"


def _with_own_scales(
    product: GraphProduct, collective: Collective, gathers: dict[fx.Node, Collective]
) -> GraphProduct:
    """Return the product with the scales of this rank's rows, if its matmul has scales by row or block."""
    scales = product.scales
    if scales is None or nodes.value(scales.left).numel() == 1:
        return product
    if scales.format:
        return replace(product, scales=own_scales(scales, collective, gathers))
    known = gathers.get(nodes.through_reshapes(scales.left)[0])
    gather = None if known is None else at(known.start)
    rows = [*nodes.shape(collective.input)[:-1], 1]
    alike = gather is not None and (gather.dim, gather.name) == (collective.dim, collective.name)
    if gather is None or not alike or nodes.shape(gather.input) != rows:
        raise Unfit("its scale by row is not gathered as the rows are")
    return replace(product, scales=replace(scales, left=gather.input, gather=gather))


def _reduced_products(collective: Collective, norm: norms.GraphNorm | None) -> list[GraphProduct]:
    """Return the matmuls whose sum is reduced; [] if a norm is fused without a matmul."""
    try:
        if collective.start.args[0] is collective.input and len(collective.input.users) != 1:
            raise Unfit("the product is also read elsewhere")
        if collective.reduce_op not in ("sum", "avg"):
            raise Unfit(f"reduce op {collective.reduce_op!r}")
        return terms(collective.input)
    except Unfit:
        if norm is None:
            raise
        return []


def _check(collective: Collective, products: list[GraphProduct]) -> None:
    whole, kind = collective.input, collective.kind
    ndim = nodes.value(whole).dim()
    if ndim < 2:
        raise Unfit("the tensor has fewer than 2 dimensions")
    for product in products:
        if product.scales is None:
            for node in (whole, product.right):
                if nodes.value(node).dtype not in (*FUSED_DTYPES, torch.float64):
                    raise Unfit(f"dtype {nodes.value(node).dtype}")
        elif kind == "all_gather" and collective.dim == ndim - 1:
            raise Unfit("its matmul is scaled, and the contracted dimension is gathered")
        elif kind == "all_reduce" and not product.blocks:
            raise Unfit("scaled")
        if product.batch:
            _check_batch(collective, product)
    if not products and nodes.value(whole).dtype not in (*FUSED_DTYPES, torch.float64):
        raise Unfit(f"dtype {nodes.value(whole).dtype}")
    if sum(not nodes.static(length) for length in nodes.shape(whole)) > 1:
        raise Unfit("more than one symbolic dimension")
    if products and products[0].scales is not None and not nodes.static(*nodes.shape(whole)):
        raise Unfit("scaled, of symbolic shape")
    if kind != "all_gather" and not nodes.static(nodes.shape(whole)[-1]):
        raise Unfit("the columns are symbolic")
    length = nodes.shape(whole)[collective.dim]
    if kind == "reduce_scatter" and nodes.static(length) and length % collective.size:
        raise Unfit(f"{length} rows, which {collective.size} ranks do not divide")


def _check_batch(collective: Collective, product: GraphProduct) -> None:
    whole, inside = collective.input, product.node
    if nodes.value(whole).dim() != 3 or collective.dim == 0:
        raise Unfit("a batch of weights, and its batch dimension is gathered or scattered")
    if collective.kind == "all_reduce":
        raise Unfit("a batch of weights")
    if collective.kind == "all_gather":
        whole, inside = collective.result, product.left
    if not nodes.same(nodes.shape(inside), nodes.shape(whole)):
        raise Unfit("a batch of weights, beside a reshape")


def _times(collective: Collective, products: list[GraphProduct], machine: Machine | None) -> Times:
    """Return predicted times for the traced shapes; None if these are unknown, or without a matmul."""
    if not products:
        return None, None
    whole = collective.input
    hints = [nodes.hinted(length) for length in nodes.shape(whole)]
    lengths = [hint for hint in hints if hint is not None]
    if len(lengths) != len(hints):
        return None, None
    gathers = collective.kind == "all_gather"
    rows = math.prod(lengths[:-1])
    if gathers and collective.dim != len(lengths) - 1:
        rows *= collective.size
    dtype = nodes.value(whole).dtype
    if gathers and products[0].scales is not None and products[0].blocks:
        dtype = products[0].scales.kind.values
    return predict(
        collective.kind,
        rows,
        sum(product.columns for product in products) if gathers else products[0].columns,
        products[0].inner if gathers else sum(product.inner for product in products),
        collective.size,
        dtype=dtype,
        machine=machine or machine_for(nodes.value(whole).device),
        bias=any(product.bias is not None for product in products),
        terms=len(products),
        batch=max(1, products[0].batch),
    )
