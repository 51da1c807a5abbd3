"""Fused ops on block-scaled operands: the plain ops, of rows that carry their scales.

A matrix in a block-scaled format is packed: in bytes, each row's values and then its scales, see
``formats.py``. So what moves rows moves their scales under the same signal, and an op has one argument
more, ``format``. Scales are not swizzled, so shards may be of any length. A row is padded to a multiple of
128 numbers, and to one of 16 bytes.

Operands that are floats are quantised by the op, in the format that it is told; then it has a gradient.
With an input x, a weight w and the gradient dy of their product, three matmuls have six operands, each in
blocks along the dimension that is summed::

    y = x @ w           x along k, w along k
    dx = dy @ w.T       dy along n, w along n
    dw = x.T @ dy       x along rows, dy along rows

So what autograd saves are the floats. Of rows that are gathered for ``dw`` each rank quantises its own, and
sends bytes: a block never has rows of two ranks. The other factor, which a rank has whole, is cut likewise.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from interlace.kernels.block_scales import INNER
from interlace.ops.matmul.formats import (
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    Scaled,
    format_named,
    multiply_packed,
    packed_rows,
    quantize,
    unpacked_rows,
)
from interlace.ops.op.op import (
    EXAMPLES,
    OPS,
    Example,
    Op,
    OpGradient,
    Setting,
    Started,
    constant,
    names_of_tensors,
    tensors,
)
from interlace.ops.op.recording import ContinuedWork, call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import comparing

FACTORS = ("input", "weight", "weights")
OF_EXPERTS = ("input_splits", "home_splits", "segments")
"""Arguments of ops that have a weight for each expert."""


def _refuse(*_: Any) -> Any:
    raise RuntimeError("interlace's ops on block-scaled operands have no gradients")


def with_format(op: Op) -> Op:
    """The op of block-scaled operands: the same with a ``format``."""
    if f"block_scaled_{op.name}" in OPS:
        return OPS[f"block_scaled_{op.name}"]  # type: ignore[no-any-return]
    without = [name for name in op.without if name != "format"]
    quantises = not set(op.kinds) & set(OF_EXPERTS)

    def packed_record(given: Any) -> Any:
        return quantized(given) if quantises else given

    def start(communicator: Communicator, given: Any, **out: torch.Tensor) -> Started:
        with communicator.accepting(op.name):
            format_named(given.format)
            made = packed_record(given)
        with contextlib.nullcontext() if made is given else comparing(("k", given.input.shape[-1])):
            return op.start(communicator, made, **out)

    def outputs(given: Any, size: Any) -> Any:
        return op.outputs(packed_record(given), size)

    def reference(ranks: Sequence[Any], size: int) -> list[list[torch.Tensor]]:
        return op.reference([*map(packed_record, ranks)], size)

    examples = {**EXAMPLES, **op.examples}
    of_factors = {each: _packed_example(examples[each], each != "input") for each in FACTORS}
    plain = {"format": constant("mxfp8"), "out_dtype": lambda setting: setting.dtype}
    return dataclasses.replace(
        op, name=f"block_scaled_{op.name}", start=start, outputs=outputs, reference=reference,
        without=without, variants=(),
        gradient=_of_floats(op.gradient) if quantises and op.gradient else None,
        examples={**op.examples, **of_factors, **plain},
    )  # fmt: skip


def op_of(name: str, format: str) -> Op:
    """The op of that name, or with a format the one of block-scaled operands."""
    op: Op = OPS[name]
    return with_format(op) if format else op


def call_in(format: str, name: str, *arguments: Any) -> Any:
    """Call an op, or with a format the one of block-scaled operands; the last arguments are the group."""
    *own, size, group = arguments
    of_format = [format] if format else []
    return call(op_of(name, format).name, *own, *of_format, size, group)


def _of_floats(gradient: OpGradient) -> OpGradient:
    """The gradient of operands that the op quantises; it has none itself."""

    def save(ctx: Any, given: Any, output: Any) -> None:
        _, _, operands = _factors(given)
        if any(each.dtype == torch.uint8 for each in operands):
            _refuse()
        gradient.save(ctx, given, output)

    def backward(ctx: Any, grad: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of products in a block-scaled format have no gradients")
        return gradient.backward(ctx, grad)

    return OpGradient(save, backward)


def _packed_example(make: Example, weight: bool) -> Example:
    """The packed rows of an example, whose small whole numbers mxfp8 has exactly."""

    def packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
        scaled = quantize(numbers.mT, "mxfp8").t() if weight else quantize(numbers, "mxfp8")
        return packed_rows(scaled)

    def example(setting: Setting) -> Any:
        made = make(dataclasses.replace(setting, dtype=torch.float32))
        return [*map(packed_numbers, made)] if isinstance(made, list) else packed_numbers(made)

    return example


def are_scaled(*operands: Any) -> bool:
    """Whether any of these, or of the lists among them, is a :class:`Scaled`."""
    for each in operands:  # without a generator, as every call of an op asks
        if isinstance(each, Scaled) or (isinstance(each, (list, tuple)) and are_scaled(*each)):
            return True
    return False


def from_tensors(values: Any, scales: Any, inner: int) -> Scaled | None:
    """The operand that tensors are which ``torch.nn.functional.scaled_mm`` takes; None without blocks.

    Of which format they are is said by the dtypes, and by the shape of scales in float32: one for all
    numbers, or for each row or column, is no block.
    """
    if not isinstance(values, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return None
    if scales.dtype == E8M0:
        return Scaled(
            values, scales, "mxfp8" if values.dtype in (E4M3, E5M2) else "mxfp4", None, inner
        )
    if scales.dtype == E4M3:
        return Scaled(values, scales, "nvfp4", None, inner)
    blocks = -(-values.shape[inner] // INNER) if values.dim() > 1 else 1
    if scales.dim() == values.dim() and blocks > 1 and scales.shape[inner] == blocks:
        return Scaled(values, scales, "fp8_block128", None, inner)
    return None


def operands(input: tuple[Any, Any], weights: Sequence[tuple[Any, Any]]) -> list[Scaled]:
    """The input and the weights that pairs of values and scales are; none if they have no blocks."""
    if are_scaled(input, *weights):
        raise TypeError(
            "input and weight must be tensors with scales beside them, got an interlace.Scaled, which the "
            "op of the same name without 'scaled' takes"
        )
    found = [from_tensors(*input, -1), *(from_tensors(*each, -2) for each in weights)]
    made = [each for each in found if each is not None]
    if made and len(made) != len(found):
        raise ValueError("the scales of input and weights must all be by block, or none of them")
    return made


def with_gathered(input: Any, made: Any, *, async_op: bool = False) -> Any:
    """``(gathered, *results)`` of an op on a block-scaled ``input``: what was gathered is one, too."""
    if not isinstance(input, Scaled):
        return made

    def finish(made: Sequence[Any]) -> tuple[Any, ...]:
        gathered, *results = made
        return unpacked_rows(gathered, input.kind, input.shape[-1]), *results

    return ContinuedWork(made, finish) if async_op else finish(made)


def taken(communicator: Communicator, op: str, given: Any) -> tuple[Any, Any]:
    """The record ``given``, with packed operands if they are block-scaled, and a block that compares k.

    Operands that are to be quantised, and whose gradients are recorded, stay as they are. ValueError or
    TypeError on all ranks if an operand is wrong.
    """
    if not are_formatted(given):
        return given, contextlib.nullcontext()
    with communicator.accepting(op):
        made = packed(given, check_scales=True)
        made = made if learns(made) else quantized(made)
    return made, comparing(("k", given.input.shape[-1]))


def are_formatted(given: Any) -> bool:
    """Whether the operands of a record are block-scaled, or are to be."""
    asked = getattr(given, "format", "")
    return bool(asked) or are_scaled(*[getattr(given, name, None) for name in FACTORS])


def learns(given: Any) -> bool:
    """Whether autograd is to know of a call with this record."""
    kind: Any = type(given)
    every = tensors([getattr(given, name) for name in names_of_tensors(kind)])
    return torch.is_grad_enabled() and any(each.requires_grad for each in every)


def _factors(given: Any) -> tuple[str, bool, list[Any]]:
    """The name of the weights of a record, whether they are several, and the input and each of them."""
    name = "weights" if hasattr(given, "weights") else "weight"
    weights = getattr(given, name)
    several = isinstance(weights, (list, tuple))
    return name, several, [given.input, *(weights if several else [weights])]


def packed(given: Any, *, check_scales: bool) -> Any:
    """A record of an op with the packed rows of its block-scaled operands, and their format.

    If a format is asked for, and all operands are floats, they stay as they are, for the op quantises them.
    """
    name, several, operands = _factors(given)
    by_expert = any(hasattr(given, each) for each in OF_EXPERTS)
    if given.format:
        operands = _formatted(given, operands)
        if not are_scaled(*operands):
            return given
        if isinstance(given.input, torch.Tensor):
            given = dataclasses.replace(given, out_dtype=given.out_dtype or given.input.dtype)
    for index, each in enumerate(operands):
        each_name = f"weight[{index - 1}]" if several else "weight"
        _check(operands[0], each, each_name, index, by_expert)
        if check_scales:
            _check_scales(each)
    biases = given.biases if name == "weights" else given.bias
    every = biases if isinstance(biases, (list, tuple)) else [biases]
    parts = [part for each in operands for part in (each.values, each.scales, each.whole)]
    if torch.is_grad_enabled() and any(
        getattr(each, "requires_grad", False) for each in (*every, *parts)
    ):
        _refuse()
    input, *rows = map(packed_rows, operands)
    values = {"input": input, name: rows if several else rows[0], "format": operands[0].format}
    return dataclasses.replace(given, **values)


def _formatted(given: Any, operands: list[Any]) -> list[Any]:
    """The operands of a call with ``format``: if some are block-scaled, the others are quantised."""
    kind = format_named(given.format)
    if getattr(given, "return_gathered", False):
        raise ValueError(
            "return_gathered gives what travels, which with format= is block-scaled: pass "
            f"interlace.quantize(input, {kind.name!r}) without format="
        )
    if not are_scaled(*operands):
        _check_numbers(given)
        return operands
    input, *weights = operands
    made = [input if isinstance(input, Scaled) else quantize(input, kind.name)]  # type: ignore[arg-type]
    for weight in weights:
        made.append(weight if isinstance(weight, Scaled) else _as_weight(weight, kind.name))
    if made[0].format != kind.name:
        raise ValueError(f"format is {kind.name!r}, input is in {made[0].format}")
    return made


def _check_numbers(given: Any, *, packed: bool = False) -> None:
    """Raise unless the input and the weights, which are floats, can be quantised and multiplied.

    ``packed``: weights may be packed columns already.
    """
    _, several, operands = _factors(given)
    input, kind = operands[0], format_named(given.format)
    for index, each in enumerate(operands):
        name = "input" if not index else f"weight[{index - 1}]" if several else "weight"
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(each).__name__}")
        if packed and index and each.dtype == torch.uint8:
            continue
        if not each.is_floating_point() or each.dtype.itemsize < 2:
            raise TypeError(f"{name} must be of floats that format= quantizes, got {each.dtype}")
        kind.check_shape(name, each.shape[::-1] if index else each.shape)
        if index and each.shape[-2] != input.shape[-1]:
            raise ValueError(
                f"{name} has {each.shape[-2]} rows, input has k = {input.shape[-1]} (shape "
                f"{tuple(input.shape)})"
            )
    gathers = hasattr(given, "gather_dim")
    name = "gather_dim" if gathers else "scatter_dim"
    dim = getattr(given, name)
    if dim in (-1, input.dim() - 1) and (gathers or learns(given)):
        raise ValueError(
            f"{name} must not be the last one, {dim}, with format={kind.name!r}: blocks would have numbers "
            "of several ranks"
        )


@torch.no_grad()
def quantized(given: Any) -> Any:
    """A record with packed rows in place of factors that are floats."""
    name, several, (input, *weights) = _factors(given)
    if all(each.dtype == torch.uint8 for each in (input, *weights)):
        return given
    _check_numbers(given, packed=True)
    columns = [packed_weight(each, given.format) for each in weights]
    rows = packed_rows(quantize(input, given.format))
    made = {"input": rows, name: columns if several else columns[0]}
    return dataclasses.replace(given, out_dtype=given.out_dtype or input.dtype, **made)


def _as_weight(weight: Any, format: str) -> Scaled:
    return quantize(weight.mT, format, weight=True).t()  # type: ignore[arg-type]


def packed_weight(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Packed columns of a weight ``(k, n)``, which it may be already."""
    return weight if weight.dtype == torch.uint8 else packed_rows(_as_weight(weight, format))


def packed_tokens(tokens: Scaled) -> tuple[torch.Tensor, Any]:
    """The packed rows of a dispatch, ``(tokens, row_bytes)``, and a block that compares format and k."""
    if tokens.inner != -1 or tokens.values.dim() != 2:
        raise ValueError(
            f"x must be (tokens, hidden), its blocks along hidden; got shape {tuple(tokens.shape)}, blocks "
            f"along dimension {tokens.inner}"
        )
    _check_scales(tokens)
    return packed_rows(tokens), comparing(("format", tokens.format), ("k", tokens.shape[-1]))


def _check_scales(operand: Scaled) -> None:
    if operand.values.device.type == "cpu":  # elsewhere it would wait for the device
        operand.check_scales()


def _check(input: Any, operand: Any, name: str, index: int, by_expert: bool) -> None:
    if not isinstance(operand, Scaled):
        name = name if index else "input"
        raise TypeError(
            f"{name} must be an interlace.Scaled as the other operands are, got {type(operand).__name__}"
        )
    if not index:
        if operand.inner != -1:
            raise ValueError("input must be [..., k], its blocks along k; this one is transposed")
        return
    dims, shape = (3, "(experts, k, n)") if by_expert else (2, "(k, n)")
    if operand.inner != -2 or operand.values.dim() != dims:
        raise ValueError(
            f"{name} must be {shape}, its blocks along k, as interlace.quantize(w, format).t() has for w "
            f"(n, k); got shape {tuple(operand.shape)}, blocks along dimension {operand.inner}"
        )
    if operand.format != input.format:
        raise ValueError(f"input is in {input.format}, {name} in {operand.format}")
    if operand.shape[-2] != input.shape[-1]:
        raise ValueError(
            f"{name} has {operand.shape[-2]} rows, input has k = {input.shape[-1]} (shape "
            f"{tuple(input.shape)})"
        )


# -- the products of a backward -----------------------------------------------------------------------


@torch.library.custom_op("interlace::multiply_parts", mutates_args=())
def multiply_parts(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    """The sum over p of ``left[p] @ right[p].T`` of packed rows ``(parts, m, row_bytes)`` and ``(parts, n,
    row_bytes)``, in float32, in the order of parts."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float32, device=left.device)
    for rows, columns in zip(left, right, strict=True):
        total += multiply_packed(rows, columns.mT, FORMATS[format])
    return total


@multiply_parts.register_fake
def _(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


@torch.no_grad()
def packed_parts(rows: torch.Tensor, parts: Any, format: str) -> torch.Tensor:
    """A matrix ``(m, k)`` in blocks along m, which begin anew in each of equal ``parts`` of its rows:
    ``(parts, k, row_bytes)``."""
    of_parts = rows.reshape(parts, rows.shape[0] // parts, rows.shape[1])
    return packed_rows(quantize(of_parts.mT, format))  # type: ignore[arg-type]


def product_of_rows(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    """``left.T @ right`` of matrices with as many rows; in a format in float32.

    Either may be :func:`packed_parts` already, and the other is cut into as many parts then.
    """
    if not format:
        return left.mT @ right
    parts = max([len(each) for each in (left, right) if each.dtype == torch.uint8], default=1)
    packed = [
        each if each.dtype == torch.uint8 else packed_parts(each, parts, format)
        for each in (left, right)
    ]
    made: torch.Tensor = multiply_parts(packed[0], packed[1], format)
    return made


def gathered_rows(rows: torch.Tensor, format: str) -> torch.Tensor:
    """What a rank sends of its ``rows`` for a :func:`product_of_rows`, to be gathered along dimension 0."""
    return packed_parts(rows, 1, format) if format else rows


@torch.no_grad()
def product(
    left: torch.Tensor, weight: torch.Tensor, format: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``left @ weight`` in a format, in the dtype of ``left`` or another; without a format torch's.

    ``weight`` may be packed columns.
    """
    if not format:
        return left @ weight
    rows = packed_rows(quantize(left.flatten(0, -2), format))  # type: ignore[arg-type]
    columns = packed_weight(weight, format).mT
    made: torch.Tensor = multiply_parts(rows[None], columns[None], format)
    return made.to(out_dtype or left.dtype).view(*left.shape[:-1], weight.shape[1])
