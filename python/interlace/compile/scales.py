"""Scaled matmuls of a graph: torch's, torchao's and vLLM's ops, each one record of :data:`SCALED_MATMULS`.

The scales of block-scaled operands have one of two layouts, plain or SWIZZLE_32_4_4. A graph may convert
one to the other by a dozen of views and copies, before or after it gathers them. :func:`own_scales` does
not know these ops. It runs the nodes between the gather and the matmul on numbered scales, and finds the
layout that a rank's own scales need so that each scale arrives where the matmul reads it::

    torchao  scale --gather--> plain --view, permute, clone--> swizzled --> _scaled_mm       own: plain
    vLLM     scaled_fp4_quant --> swizzled --gather--> swizzled --> cutlass_scaled_fp4_mm    own: swizzled
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from interlace.compile.graph_nodes import (
    RESHAPES,
    Collective,
    NamedCall,
    Unfit,
    arguments,
    at,
    aten,
    is_call,
    named_call,
    shape,
    static,
    value,
)
from interlace.ops.matmul import block_scaled
from interlace.ops.matmul.formats import (
    E4M3,
    E8M0,
    FORMATS,
    OPERAND_FORMATS,
    BlockFormat,
    Scaled,
    operand_format,
    swizzled,
    unswizzle,
)


class ScaledMatmul(NamedTuple):
    """An op on scaled operands: ``words`` name its arguments in the order of its schema.

    ``format``: for operands whose dtypes do not give it. ``weight_by_rows``, ``scales_by_rows``,
    ``bytes_by_rows``: whether the weight, its scales, and its one-byte scales are ``(n, k)`` instead of
    ``(k, n)``.
    """

    words: str
    format: str = ""
    weight_by_rows: bool = False
    scales_by_rows: bool = False
    bytes_by_rows: bool = True


_BLOCKS_OF_VLLM = "left right left_scale right_scale block_size out_dtype"
SCALED_MATMULS = {
    "aten::_scaled_mm": ScaledMatmul(
        "left right left_scale right_scale bias scale_result out_dtype fast"
    ),
    "aten::_scaled_mm_v2": ScaledMatmul(
        "left right left_scale left_recipe left_swizzle right_scale right_recipe right_swizzle bias "
        "out_dtype contraction_dim fast"
    ),
    "torchao::blockwise_scaled_mm": ScaledMatmul(
        "left right left_scale left_recipe right_scale right_recipe out_dtype"
    ),
    "vllm::w8a8_triton_block_scaled_mm_func": ScaledMatmul(_BLOCKS_OF_VLLM, "", True, True),
    "vllm::padded_cutlass": ScaledMatmul(_BLOCKS_OF_VLLM, "", True, True),
    "vllm::fp8_gemm_nt_op": ScaledMatmul(
        "left left_scale right right_scale out e8m0", "", True, True
    ),
    "vllm::flashinfer_mm_fp4": ScaledMatmul(
        "left right left_scale right_scale whole out_dtype tiles_of_8x4 backend",
        "nvfp4",
        bytes_by_rows=False,
    ),
    "_C::cutlass_scaled_mm": ScaledMatmul("out left right left_scale right_scale bias"),
    "_C::cutlass_scaled_fp4_mm": ScaledMatmul(
        "out left right left_scale right_scale whole", "nvfp4", True, True
    ),
}
BY_COLUMN_BLOCKS = 4
"""The recipe of ``_scaled_mm_v2`` for scales of 1 x 128 numbers; for a weight they are ``(n, k)``."""


@dataclass(frozen=True)
class Scales:
    """The scales of a product's operands, and the options of its op.

    ``format``: of operands with blocks; "" if each has one scale, or one for each row or column. ``whole``:
    numbers that multiply the whole product. ``swizzled``: whether block scales have the layout
    SWIZZLE_32_4_4; ``own_swizzled``: the same for the input of the scales' gather. ``gather``: the gather
    of the scales. For other fields see :class:`ScaledMatmul`.
    """

    left: fx.Node
    right: fx.Node
    out_dtype: torch.dtype | None
    fast: bool
    format: str = ""
    whole: tuple[fx.Node, ...] = ()
    swizzled: bool = False
    weight_by_rows: bool = False
    scales_by_rows: bool = False
    gather: Collective | None = None
    own_swizzled: bool = False

    @property
    def kind(self) -> BlockFormat:
        return OPERAND_FORMATS[self.format]


def scaled_call(node: object) -> NamedCall | None:
    if is_call(node, operator.getitem):
        node = arguments(node)[0]  # type: ignore[arg-type]
    call = named_call(node) if isinstance(node, fx.Node) else None
    return call if call is not None and call.name in SCALED_MATMULS else None


def result_of(call: NamedCall) -> fx.Node | None:
    return next(iter(call.made.values()), None)


def scaled_operands(call: NamedCall) -> tuple[fx.Node, fx.Node, fx.Node | None, Scales]:
    """Return the left and the right operand, the bias and the scales of a scaled matmul; raise Unfit."""
    record, result = SCALED_MATMULS[call.name], result_of(call)
    named = dict(zip(record.words.split(), call.given.values(), strict=False))
    if named.get("scale_result") is not None:
        raise Unfit("_scaled_mm with a scale of its result")
    if named.get("tiles_of_8x4"):
        raise Unfit("its scales are in tiles of 8 x 4")
    left, right = named["left"], named["right"]
    (of_left, *more), (of_right, *more_right) = map(
        _as_list, (named["left_scale"], named["right_scale"])
    )
    whole = [each for each in (*more, *more_right, named.get("whole")) if each is not None]
    recipe = _number(named.get("right_recipe"))
    swizzle = [_number(named.get(each, [1])) for each in ("left_swizzle", "right_swizzle")]
    by_rows = record.scales_by_rows or recipe == BY_COLUMN_BLOCKS
    one_byte = value(of_left).dtype.itemsize == 1 or bool(record.format)
    scales = Scales(
        of_left,
        of_right,
        None if result is None else value(result).dtype,
        bool(named.get("fast")),
        format=record.format,
        whole=tuple(whole),
        swizzled=one_byte and swizzle == [1, 1],
        weight_by_rows=record.weight_by_rows,
        scales_by_rows=record.bytes_by_rows if one_byte else by_rows,
    )
    if not static(*shape(right)):
        raise Unfit("the weight has a symbolic shape")
    try:
        tensors: Any = map(value, (left, of_left, right, of_right))
        blocks = block_operands(scales, tensors, [*map(value, whole)], swizzled=scales.swizzled)
    except (ValueError, TypeError, RuntimeError) as error:
        raise Unfit(str(error)) from None
    if blocks:
        format = operand_format(blocks[0].format, blocks[1].format)
        return left, right, named.get("bias"), replace(scales, format=format)
    columns = [1, value(right).shape[1]]
    if (
        record.weight_by_rows
        or whole
        or (value(of_right).numel() != 1 and shape(of_right) != columns)
    ):
        raise Unfit("the kind of its scales is unknown")
    return left, right, named.get("bias"), scales


def _as_list(scales: Any) -> list[Any]:
    return list(scales) if isinstance(scales, (list, tuple)) else [scales]


def _number(recipe: Any) -> int:
    """Return the first number of a list of enums or ints, or a single one; 0 if there is no number."""
    first = next(iter(_as_list(recipe)), None) or 0
    return int(getattr(first, "value", first))


def block_operands(
    scales: Scales,
    tensors: Iterable[torch.Tensor],
    whole: Sequence[torch.Tensor],
    *,
    swizzled: bool,
) -> list[Scaled]:
    """Return both operands from ``tensors``: left, its scales, right, its scales. None without blocks.

    ``swizzled``: whether the left operand's scales are swizzled here.
    """
    left, of_left, right, of_right = tensors
    right = right.mT if scales.weight_by_rows else right
    if scales.format:
        kind = scales.kind
        left, of_left = _as(left, kind.values), _as(of_left, kind.scale)
        right, of_right = _as(right.mT, kind.of_weight.values).mT, _as(of_right, kind.scale)
    if of_left.dtype in (E4M3, E8M0):
        of_right = of_right if scales.scales_by_rows else of_right.mT
        if swizzled:
            of_left = block_scaled.plain_scales(left, of_left, -1)
        if scales.swizzled:
            of_right = block_scaled.plain_scales(right, of_right, -2)
    else:
        of_right = of_right.mT if scales.scales_by_rows else of_right
        blocks = -(-left.shape[-1] // FORMATS["fp8_block128"].block)
        if of_right.dim() == 2 and of_right.shape[0] == -(-blocks // 4) * 4:
            of_right = of_right[:blocks]  # torch pads the rows; the last ones are unused
    if of_left.numel() != 1:
        of_left = of_left.reshape(*left.shape[:-1], -1)
    matrices = block_scaled.operands((left, of_left), [(right, of_right)])
    for factor in whole if matrices else ():
        before = matrices[1].whole
        factor = factor.float()
        matrices[1] = replace(matrices[1], whole=factor if before is None else before * factor)
    return matrices


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


# -- a rank's own scales, from the gathered scales ----------------------------------------------------

_MOVING = {
    "view", "_unsafe_view", "reshape", "permute", "t", "transpose", "clone", "expand", "unsqueeze",
    "squeeze", "slice", "slice_scatter", "split", "cat", "constant_pad_nd", "copy", "alias", "detach",
    "full", "zeros", "empty", "new_zeros", "new_empty", "new_full", "select", "empty_strided",
    "as_strided", "flatten", "stack", "contiguous", "zeros_like", "full_like", "empty_like", "fill",
}  # fmt: skip
"""aten's ops that move numbers and do not compute."""


def own_scales(
    scales: Scales, collective: Collective, gathers: Mapping[fx.Node, Collective]
) -> Scales:
    """Return ``scales`` with the gather of the scales of ``collective``'s rows; raise Unfit without one."""
    not_alike = Unfit("its scales are not gathered as the rows are")
    chain, gather = _chain(scales.left, gathers)
    if gather is None or gather.name != collective.name:
        raise not_alike
    if not static(*shape(collective.result), *shape(gather.result), *shape(scales.left)):
        raise Unfit("scaled, of symbolic shape")
    for is_own in (False, True) if scales.kind.scale.itemsize == 1 else (False,):
        with _disable_current_modes():  # modes of the compiler: these numbers are real
            if all(_arrives(scales, collective, gather, chain, is_own)):
                return replace(scales, gather=gather, own_swizzled=is_own)
    raise not_alike


def _chain(
    node: fx.Node, gathers: Mapping[fx.Node, Collective]
) -> tuple[list[fx.Node], Collective | None]:
    """Return the nodes that only move numbers between a gather and ``node``, and the gather."""
    seen: set[fx.Node] = set()
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in gathers:
            found.add(one)
        elif not _moves(one):
            return [], None
        else:
            stack.extend(one.all_input_nodes)
    if len(found) != 1:
        return [], None
    (result,) = found
    ordered = [each for each in node.graph.nodes if each in seen and each is not result]
    return ordered, at(gathers[result].start)


def _moves(node: fx.Node) -> bool:
    if is_call(node, operator.getitem):
        return True
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "aten" and target._schema.name.split("::")[1] in _MOVING


def _arrives(
    scales: Scales,
    collective: Collective,
    gather: Collective,
    chain: Sequence[fx.Node],
    own_swizzled: bool,
) -> Iterator[bool]:
    """Return for each digit of the numbered scales whether all are where the matmul reads them."""
    kind = scales.kind
    *lead, length = shape(collective.result)
    rows, blocks = math.prod(lead), -(-length * kind.packed // kind.block)
    numbers = torch.arange(rows * blocks).view(*lead, blocks)
    base, dtype = (256, torch.uint8) if kind.scale.itemsize == 1 else (1 << 24, torch.float32)
    digits = 1 + int(math.log(max(numbers.numel(), 2), base))
    for digit in range(digits):
        wanted = (numbers // base**digit % base).to(dtype)
        shards = [each.contiguous() for each in wanted.chunk(collective.size, collective.dim)]
        if own_swizzled:
            shards = [swizzled(shard.flatten(0, -2)) for shard in shards]
        bits = _bytes_as_numbers(value(gather.input).dtype)
        if shards[0].nbytes != value(gather.input).nbytes:
            yield False
            return
        parts = [shard.view(bits).reshape(shape(gather.input)) for shard in shards]
        found = _run(chain, {gather.result: torch.cat(parts, gather.dim)}, scales.left)
        found = found.contiguous().view(-1).view(dtype)
        if scales.swizzled:
            found = unswizzle(found, rows, blocks)
        yield torch.equal(found.reshape(-1), wanted.reshape(-1))


def _bytes_as_numbers(dtype: torch.dtype) -> torch.dtype:
    """Return uint8 for a one-byte dtype, as some of these support little more than copies."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _run(chain: Sequence[fx.Node], known: dict[fx.Node, torch.Tensor], last: fx.Node) -> Any:
    def replace_node(each: object) -> object:
        if isinstance(each, fx.Node):
            return values[each]
        if isinstance(each, torch.dtype):
            return _bytes_as_numbers(each)
        return torch.device("cpu") if isinstance(each, torch.device) else each

    values: dict[fx.Node, Any] = dict(known)
    for node in chain:
        target: Any = node.target
        args, kwargs = tree_map(replace_node, (node.args, node.kwargs))
        if target in RESHAPES:
            target = aten.reshape.default
        values[node] = target(*args, **kwargs)
    return values[last]
