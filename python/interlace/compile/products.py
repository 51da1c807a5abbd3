"""Matmuls that read a gathered tensor, and those whose products are reduced.

A :class:`GraphProduct` is ``rows @ weight (+ bias)`` with rows of any number of dimensions. Its forms are::

    mm(reshape(x), w)            a Linear without a bias, or x of 2 dimensions
    addmm(bias, reshape(x), w)   a Linear
    bmm(x, expand(w))            matmul of a batch with one weight
    bmm(x, w)                    of a batch with a weight for every entry
    _scaled_mm(reshape(x), w)    of matrices with scales, also by the other ops of ``scales.py``
    add(product, product)        a reduced sum of several matmuls: q, k and v in a backward
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from interlace.compile.graph_nodes import (
    RESHAPES,
    SAME_BITS,
    Unfit,
    arguments,
    aten,
    chain_of_reshapes,
    is_call,
    same,
    shape,
    static,
    through_reshapes,
    value,
)
from interlace.compile.scales import Scales, result_of, scaled_call, scaled_operands


@dataclass(frozen=True)
class GraphProduct:
    """``left @ right + bias + added``, ``right`` ``(k, n)``; ``batch`` of them in an earlier dim, or 0."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    bias: fx.Node | None = None
    added: fx.Node | None = None
    scales: Scales | None = None
    batch: int = 0

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that products must share for one fused op."""
        if self.scales is None:
            return (self.batch,)
        return self.scales.left, self.scales.out_dtype, self.scales.fast, self.scales.format

    @property
    def blocks(self) -> str:
        return "" if self.scales is None else self.scales.format

    @property
    def may_be_normed(self) -> bool:
        return not self.batch and (self.scales is None or bool(self.blocks))

    @property
    def _weight_shape(self) -> list[Any]:
        inner, columns = shape(self.right)[-2:]
        if self.scales is not None and self.scales.weight_by_rows:
            inner, columns = columns, inner
        return [inner * self.scales.kind.packed if self.blocks else inner, columns]  # type: ignore[union-attr]

    @property
    def inner(self) -> int:
        return int(self._weight_shape[0])

    @property
    def columns(self) -> int:
        return int(self._weight_shape[1])


MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def is_matmul(node: fx.Node) -> bool:
    return is_call(node, *MATMULS) or scaled_call(node) is not None


def product_at(node: fx.Node) -> GraphProduct:
    bias: fx.Node | None = None
    added: fx.Node | None = None
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
    elif (call := scaled_call(node)) is not None:
        result = result_of(call)
        if result is None:
            raise Unfit("its product is never read")
        left, right, bias, scales = scaled_operands(call)
        return GraphProduct(result, left, right, bias, scales=scales)
    else:
        raise Unfit(f"{node.target} is not a matmul")
    if not static(*shape(right)):
        raise Unfit("the weight has a symbolic shape")
    dtypes = {value(each).dtype for each in (left, right, bias) if each is not None}
    if len(dtypes) != 1:
        raise Unfit("input, weight and bias differ in dtype")
    batch = shape(right)[0] if value(right).dim() == 3 else 0
    return GraphProduct(node, left, right, bias, added, batch=batch)


def _expanded_weight(node: fx.Node) -> fx.Node | None:
    """Return the (k, n) weight that ``node`` repeats for every entry of a batch, or None."""
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
    """Return the products with rows ``gathered``, and other matmuls that read it, with the reason."""
    products, refused = [], []
    summed = "the gathered dimension is summed over"
    for source in chain_of_reshapes(gathered, *SAME_BITS):
        for user in source.users:
            if is_call(user, aten.permute.default, aten.t.default, aten.transpose.int):
                refused += [(each, summed) for each in user.users if is_matmul(each)]
            if not is_matmul(user):
                continue
            try:
                product = product_at(user)
                if product.scales is not None and product.scales.left is source:
                    raise Unfit("the gathered tensor has the scales of a matmul")
                if product.left is not source:
                    raise Unfit("the gathered tensor is the weight")
                if not product.blocks and value(source).dtype != value(gathered).dtype:
                    raise Unfit("the gathered bytes are read as another dtype")
                if product.right is source:
                    raise Unfit("the gathered tensor is multiplied with itself")
                products.append(product)
            except Unfit as error:
                refused.append((user, str(error)))
    return products, refused


def terms(reduced: fx.Node) -> list[GraphProduct]:
    """Return the products whose sum is ``reduced``, without other readers; raise :class:`Unfit`."""
    inside, passed = through_reshapes(reduced)
    for each in (*passed, inside):
        if each is not reduced and len(each.users) != 1:
            raise Unfit("the product is also read elsewhere")
    if is_call(inside, aten.add.Tensor) and not inside.kwargs:
        found: list[GraphProduct] = []
        for side in arguments(inside):
            if not isinstance(side, fx.Node) or value(side) is None:
                raise Unfit("the reduced tensor is not from a matmul: add")
            if shape(side) != shape(inside):
                raise Unfit("a term of the sum is broadcast")
            if len(side.users) != 1:
                raise Unfit("a term of the sum is also read elsewhere")
            found += terms(side)
        if len({product.kind for product in found}) > 1 or found[0].kind != (0,):
            raise Unfit("a sum of scaled or batched matmuls")
        return found
    if is_call(inside, aten.mul.Tensor):
        return [_multiply_product(inside)]
    if not is_matmul(inside):
        name = getattr(inside.target, "__name__", inside.target)
        raise Unfit(f"the reduced tensor is not from a matmul: {name}")
    product = product_at(inside)
    if product.added is not None:
        raise Unfit("addmm with a two-dimensional bias")
    return [product]


def _multiply_product(node: fx.Node) -> GraphProduct:
    """Return a product times a number, as in torchao's NVFP4 (the tensors' whole scales); raise Unfit."""
    for one, number in (node.args, node.args[::-1]):
        if not isinstance(one, fx.Node) or not isinstance(number, fx.Node):
            continue
        if is_matmul(one) and len(one.users) == 1 and same([value(number).numel()], [1]):
            product = product_at(one)
            scales = product.scales
            if scales is not None and scales.format and product.bias is None:
                whole = (*scales.whole, number)
                return replace(product, scales=replace(scales, whole=whole))
    raise Unfit("the reduced tensor is not from a matmul: mul.Tensor")
