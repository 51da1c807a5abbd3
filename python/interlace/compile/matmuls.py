"""Matmuls that read a gathered tensor, and those whose products are reduced.

A :class:`GraphProduct` is ``rows @ weight (+ bias)`` with rows of any number of dimensions. It comes as::

    mm(reshape(x), w)            a Linear without a bias, or x of 2 dimensions
    addmm(bias, reshape(x), w)   a Linear
    bmm(x, expand(w))            matmul of a batch with one weight
    bmm(x, w)                    of a batch with a weight for every entry
    _scaled_mm(reshape(x), w)    of fp8 matrices with scales
    add(product, product)        of several matmuls what is reduced: q, k and v in a backward
"""

from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace.compile.graph_nodes import (
    RESHAPES,
    arguments,
    aten,
    chain_of_reshapes,
    is_call,
    named_arguments,
    shape,
    static,
    through_reshapes,
    value,
)


class Unfit(Exception):
    """Why a matmul cannot be fused."""


@dataclass(frozen=True)
class Scales:
    """The scales of the operands of ``aten._scaled_mm``, and its options."""

    left: fx.Node
    right: fx.Node
    out_dtype: Any
    fast: bool


@dataclass(frozen=True)
class GraphProduct:
    """``left @ right + bias + added``, ``right`` ``(k, n)``; a ``batch`` of them in a dim before, or 0."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None
    added: fx.Node | None = None
    scales: Scales | None = None
    batch: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """A key that products must share to share a fused op."""
        if self.scales is None:
            return (self.batch,)
        return self.scales.left, self.scales.out_dtype, self.scales.fast

    @property
    def inner(self) -> int:
        return int(shape(self.right)[-2])

    @property
    def columns(self) -> int:
        return int(shape(self.right)[-1])


MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default)


def product_at(node: fx.Node) -> GraphProduct:
    """The product that ``node`` is; raises :class:`Unfit`."""
    bias: Any = None
    added: Any = None
    if is_call(node, aten.mm.default):
        left, right = arguments(node)
    elif is_call(node, aten.addmm.default):
        bias, left, right = arguments(node)
        if node.kwargs:
            raise Unfit("addmm with a scaled bias")
        if shape(bias) != shape(right)[1:]:
            bias, added = None, bias
    elif is_call(node, aten.bmm.default):
        left, right = arguments(node)
        right = _expanded_weight(right) or right
    elif is_call(node, aten._scaled_mm.default):
        return _scaled(node)
    else:
        raise Unfit(f"{node.target} is no matmul")
    if not static(*shape(right)):
        raise Unfit("the weight has a symbolic shape")
    dtypes = {value(each).dtype for each in (left, right, bias) if each is not None}
    if len(dtypes) != 1:
        raise Unfit("input, weight and bias differ in dtype")
    batch = shape(right)[0] if value(right).dim() == 3 else 0
    return GraphProduct(node, left, right, bias, added, batch=batch)


def _scaled(node: fx.Node) -> GraphProduct:
    left, right = arguments(node)[:2]
    given = named_arguments(node)
    if given["scale_result"] is not None:
        raise Unfit("_scaled_mm with a scale of its result")
    if not static(*shape(right)):
        raise Unfit("the weight has a symbolic shape")
    dtype = given["out_dtype"] or value(node).dtype
    scales = Scales(given["scale_a"], given["scale_b"], dtype, bool(given["use_fast_accum"]))
    return GraphProduct(node, left, right, given["bias"], scales=scales)


def _expanded_weight(node: Any) -> Any:
    """The (k, n) weight that ``node`` repeats for every entry of a batch; None if it does not."""
    wanted = shape(node)
    while is_call(node, *RESHAPES) and shape(arguments(node)[0]) == wanted:
        node = arguments(node)[0]
    if not is_call(node, aten.expand.default):
        return None
    source = arguments(node)[0]
    if is_call(source, aten.unsqueeze.default, *RESHAPES) and shape(source)[:-2] == [1]:
        source = arguments(source)[0]
    return source if shape(source) == wanted[1:] else None


def readers(gathered: fx.Node) -> tuple[list[GraphProduct], list[tuple[fx.Node, str]]]:
    """The products whose rows ``gathered`` are; and matmuls that read it otherwise, with why."""
    products, others = [], []
    summed = "the gathered dimension is summed over"
    for source in chain_of_reshapes(gathered):
        for user in source.users:
            if is_call(user, aten.permute.default, aten.t.default, aten.transpose.int):
                others += [(each, summed) for each in user.users if is_call(each, *MATMULS)]
            if not is_call(user, *MATMULS):
                continue
            try:
                product = product_at(user)
                if product.left is not source:
                    raise Unfit("the gathered tensor is the weight")
                if product.right is source:
                    raise Unfit("the gathered tensor is multiplied with itself")
                products.append(product)
            except Unfit as error:
                others.append((user, str(error)))
    return products, others


def terms(reduced: fx.Node) -> list[GraphProduct]:
    """The products whose sum ``reduced`` is, and which nothing else reads; raises :class:`Unfit`."""
    inside, passed = through_reshapes(reduced)
    for each in (*passed, inside):
        if each is not reduced and len(each.users) != 1:
            raise Unfit("the product is read by others too")
    if is_call(inside, aten.add.Tensor) and not inside.kwargs:
        found: list[GraphProduct] = []
        for side in arguments(inside):
            if not isinstance(side, fx.Node) or value(side) is None:
                raise Unfit("what is reduced is no matmul: add")
            if shape(side) != shape(inside):
                raise Unfit("a term of the sum is broadcast")
            if len(side.users) != 1:
                raise Unfit("a term of the sum is read by others too")
            found += terms(side)
        if len({product.kind for product in found}) > 1 or found[0].kind != (0,):
            raise Unfit("a sum of scaled or batched matmuls")
        return found
    if not is_call(inside, *MATMULS):
        name = getattr(inside.target, "__name__", inside.target)
        raise Unfit(f"what is reduced is no matmul: {name}")
    product = product_at(inside)
    if product.added is not None:
        raise Unfit("addmm with a two-dimensional bias")
    return [product]
