"""Fused ops on block-scaled operands: the plain ops, on rows that contain their scales.

A matrix is packed as bytes: each row's values, then its scales (docs/reference/formats.md). So rows and
their scales move together under one signal, and an op has only one more argument, ``format``.

Float operands are quantised by the op, in the requested format; then the op has a gradient. With an input
x, a weight w and the gradient dy of their product, three matmuls have six operands, each in blocks along
the dimension that is summed::

    y = x @ w           x along k, w along k
    dx = dy @ w.T       dy along n, w along n
    dw = x.T @ dy       x along rows, dy along rows

So autograd saves the floats. If rows are gathered for ``dw``, each rank quantises its own rows and sends
bytes: a block never has rows from two ranks. The other factor, which a rank has whole, is split likewise.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.arguments.checks import check_layout, has_memory, inner_length
from interlace.arguments.words import FunctionalGroup
from interlace.kernels.block_scales import INNER
from interlace.ops.matmul.formats import (
    E4M3,
    E8M0,
    FORMATS,
    FP4,
    OPERAND_FORMATS,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    Scaled,
    format_named,
    format_term,
    multiply_packed,
    operand_format,
    packed_rows,
    quantize,
    unpacked_rows,
    unswizzle,
)
from interlace.ops.op.calls import refuse
from interlace.ops.op.op import (
    EXAMPLES,
    OPS,
    Example,
    Op,
    OpGradient,
    Setting,
    Started,
    constant,
    requiring,
)
from interlace.ops.op.recording import ContinuedWork
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator, requires_gradients
from interlace.runtime.core.context import comparing
from interlace.runtime.core.stream import Outcome

FACTORS = ("input", "weight", "weights")
OF_EXPERTS = ("input_splits", "home_splits", "segments")
"""Names of arguments that only ops with a weight for each expert have."""
ONE_BYTE = (E8M0, torch.uint8, E4M3)
"""The dtypes of scales for blocks of 32 or 16 numbers; uint8 are the bits of float8_e8m0fnu."""


def _refuse(*_: Any) -> Any:
    raise RuntimeError("interlace's ops on block-scaled operands have no gradients")


def refuse_second_gradient() -> None:
    """Raise an error in a backward that autograd records."""
    if torch.is_grad_enabled():
        raise RuntimeError("gradients of products in a block-scaled format have no gradients")


def with_format(op: Op) -> Op:
    """Return the op for block-scaled operands: the same op with a ``format``."""
    if f"block_scaled_{op.name}" in OPS:
        return OPS[f"block_scaled_{op.name}"]  # type: ignore[no-any-return]
    without = [name for name in op.without if name != "format"]

    def start(communicator: Communicator, record: Any, **out: torch.Tensor) -> Started:
        with communicator.accepting(op.name):
            format_named(record.format, OPERAND_FORMATS)
            packed_call = quantize_record(record)
        with (
            contextlib.nullcontext()
            if packed_call is record
            else comparing(("k", record.input.shape[-1]))
        ):
            return op.start(communicator, packed_call, **out)

    def reference(ranks: Sequence[Any], size: int) -> list[list[torch.Tensor]]:
        return op.reference([*map(quantize_record, ranks)], size)

    examples = {**EXAMPLES, **op.examples}
    of_factors = {each: _packed_example(examples[each], each != "input") for each in FACTORS}
    plain = {"format": constant("mxfp8"), "out_dtype": lambda setting: setting.dtype}
    return dataclasses.replace(
        op, name=f"block_scaled_{op.name}", start=start, reference=reference, without=without,
        variants=(), gradient=_of_floats(op.gradient) if op.gradient else None,
        examples={**op.examples, **of_factors, **plain},
    )  # fmt: skip


def op_of(name: str, format: str) -> Op:
    op: Op = OPS[name]
    return with_format(op) if format else op


def call_in(start: Callable[..., Any], format: str, name: str, *arguments: Any) -> Any:
    """Start an op; with a format, the op for block-scaled operands. The last arguments are the group."""
    *values, size, group = arguments
    of_format = [format] if format else []
    return start(op_of(name, format).name, *values, *of_format, size, group)


def _of_floats(gradient: OpGradient) -> OpGradient:
    """Return the gradient for operands that the op quantises. It has no gradient itself."""

    def save(ctx: Any, record: Any, output: Any) -> None:
        _, _, operands = _factors(record)
        packed = any(each.dtype == torch.uint8 for each in operands)
        if packed and requiring(record) - {"topk_weights"}:
            _refuse()
        gradient.save(ctx, record, output)

    def backward(ctx: Any, grad: Any) -> Any:
        refuse_second_gradient()
        return gradient.backward(ctx, grad)

    return OpGradient(save, backward)


def _packed_example(make: Example, weight: bool) -> Example:
    """Return packed rows of an example, whose small integers are exact in mxfp8."""

    def packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
        scaled = quantize(numbers.mT, "mxfp8").t() if weight else quantize(numbers, "mxfp8")
        return packed_rows(scaled)

    def example(setting: Setting) -> Any:
        numbers = make(dataclasses.replace(setting, dtype=torch.float32))
        return (
            [*map(packed_numbers, numbers)]
            if isinstance(numbers, list)
            else packed_numbers(numbers)
        )

    return example


def are_scaled(*operands: object) -> bool:
    return any(isinstance(operand, Scaled) for operand in operands)


def format_of(values: Any, scales: Any, inner: int) -> str:
    """Return the format of tensors for ``torch.nn.functional.scaled_mm``, or "" without blocks.

    One float32 scale for all numbers, or for each row or column, is not a block scale. With k <= 128 it is
    also a block's scale, with the same meaning.
    """
    if not isinstance(values, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return ""
    if scales.dtype in (E8M0, torch.uint8):
        return "mxfp4" if values.dtype in (FP4, torch.uint8) else "mxfp8"
    if scales.dtype == E4M3:
        return "nvfp4"
    if values.dim() < 2 or scales.dim() != values.dim() or not values.shape[inner]:
        return ""
    across = -3 - inner
    blocks, of_many = (-(-values.shape[each] // INNER) for each in (inner, across))
    by_block = scales.shape[inner] == blocks
    if blocks == 1:  # one scale serves a row and a block, so the other dimension decides
        by_block = by_block and scales.shape[across] == of_many not in (1, values.shape[across])
    return "fp8_block128" if by_block else ""


def _swizzled_sizes(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    kind = FORMATS["nvfp4"] if dtype == E4M3 else FORMATS["mxfp8"]
    packed = 2 if matrix.dtype in (FP4, torch.uint8) else 1
    *leading, length = matrix.shape
    rows, blocks = math.prod(leading), -(-length * packed // kind.block)
    of_rows, of_blocks = -(-rows // SWIZZLE_ROWS), -(-blocks // SWIZZLE_COLUMNS)
    return rows, blocks, of_rows * SWIZZLE_ROWS * of_blocks * SWIZZLE_COLUMNS


def are_swizzled_scales_of(values: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether ``scales`` have one byte each, and the number of swizzled scales of ``values``."""
    return scales.dtype in ONE_BYTE and scales.numel() == _swizzled_sizes(values, scales.dtype)[2]


def plain_scales(values: torch.Tensor, scales: torch.Tensor, inner: int) -> torch.Tensor:
    """Return scales for ``torch._scaled_mm`` by row and block; one-byte scales arrive swizzled.

    Their shape does not matter, as torch ignores it. Raises ValueError for another number of scales.
    """
    if scales.dtype not in ONE_BYTE:
        return scales
    matrix = values if inner == -1 else values.mT
    *leading, _ = matrix.shape
    rows, blocks, wanted = _swizzled_sizes(matrix, scales.dtype)
    if scales.numel() != wanted:
        raise ValueError(
            f"scales of {scales.dtype} must be in the layout SWIZZLE_32_4_4, as torch._scaled_mm takes "
            f"them: {wanted} for {values.dtype} values of shape {tuple(values.shape)}; got shape "
            f"{tuple(scales.shape)}"
        )
    plain = unswizzle(scales.reshape(-1), rows, blocks).view(*leading, blocks)
    return plain if inner == -1 else plain.mT


def operands(input: tuple[Any, Any], weights: Sequence[tuple[Any, Any]]) -> list[Scaled]:
    """Return the input and the weights, made from values and scales; [] if they have no blocks."""
    if any(isinstance(part, Scaled) for pair in (input, *weights) for part in pair):
        raise TypeError(
            "input and weight must be tensors with separate scales, got an interlace.Scaled; pass that to "
            "the op of the same name without 'scaled'"
        )
    pairs = [input, *weights]
    formats = [format_of(*each, -2 if index else -1) for index, each in enumerate(pairs)]
    if not any(formats):
        for index, (_, scales) in enumerate(pairs):
            if isinstance(scales, torch.Tensor) and scales.dtype != torch.float32:
                raise TypeError(
                    f"{name_of(index, len(weights) > 1)}: scales must be float32, or for blocks also "
                    f"float8_e8m0fnu (or its bits, uint8) or float8_e4m3fn; got {scales.dtype}"
                )
        return []
    # Operands without blocks should have the others' format.
    likely = next(filter(None, formats))
    matrices = []
    for index, (pair, format) in enumerate(zip(pairs, formats, strict=True)):
        with naming(name_of(index, len(weights) > 1)):
            matrices.append(Scaled(*pair, format or likely, None, -2 if index else -1))
    return matrices


def agree_on_scales(communicator: Communicator, op: str, operands: Sequence[Scaled]) -> None:
    """Raise ValueError on all ranks if only some have block scales: ranks would call different ops."""
    kind = "by block" if operands else "one, or by row"
    call = Call(op, (("the kind of scales", kind),))

    def agree() -> Outcome:
        communicator.told(call)
        return Outcome(None, None)

    communicator.run(op, agree, async_op=False)


def name_of(index: int, several: bool) -> str:
    if not index:
        return "input"
    return f"weight[{index - 1}]" if several else "weight"


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def with_gathered(input: Any, result: Any, *, async_op: bool = False) -> Any:
    """Return ``(gathered, *results)`` of an op; ``gathered`` is block-scaled if ``input`` is."""
    if not isinstance(input, Scaled):
        return result

    def finish(result: Sequence[Any]) -> tuple[Any, ...]:
        gathered, *results = result
        return unpacked_rows(gathered, input.kind, input.shape[-1]), *results

    return ContinuedWork(result, finish) if async_op else finish(result)


def run_packed(
    run: Callable[..., Any],
    communicator: Communicator,
    op: str,
    record: Any,
    async_op: bool,
    *,
    gathers: bool = False,
) -> Any:
    """Call ``run(communicator, given, async_op)`` with packed operands. Ranks also compare k.

    ``record``: of a call of ``op`` on block-scaled operands, or on floats with a format. Floats stay as
    they are if gradients are recorded. ``gathers``: the result of ``run`` begins with the gathered input.
    """
    with communicator.accepting(op):
        packed_call = pack(record, check_scales=True)
        packed_call = packed_call if learns(packed_call) else quantize_record(packed_call)
    with comparing(("k", record.input.shape[-1])):
        result = run(communicator.on(packed_call.input), packed_call, async_op=async_op)
    return with_gathered(record.input, result, async_op=async_op) if gathers else result


def are_formatted(record: Any) -> bool:
    """Return whether the operands of a record are block-scaled, or will be."""
    asked = getattr(record, "format", "")
    return bool(asked) or are_scaled(*[getattr(record, name, None) for name in FACTORS])


def learns(record: Any) -> bool:
    return requires_gradients(*vars(record).values())


def _factors(record: Any) -> tuple[str, bool, list[Any]]:
    """Return the name of a record's weights, whether there are several, and the input and each weight."""
    name = "weights" if hasattr(record, "weights") else "weight"
    weights = getattr(record, name)
    several = isinstance(weights, (list, tuple))
    return name, several, [record.input, *(weights if several else [weights])]


def pack(record: Any, *, check_scales: bool) -> Any:
    """Return a record of an op with the packed rows of its block-scaled operands, and their format.

    If a format is requested and all operands are floats, they stay, as the op quantises them.
    """
    name, several, passed = _factors(record)
    operands, dim = passed, getattr(record, "gather_dim", 0)
    if isinstance(record.input, Scaled) and dim in (-1, record.input.values.dim() - 1):
        raise ValueError(
            f"gather_dim={dim} is k, the last dimension of input and the dimension of its blocks: gather "
            f"block-scaled operands along another one; shape of input is {tuple(record.input.shape)}"
        )
    if record.format:
        operands = _operands_in(record, operands)
        if not are_scaled(*operands):
            return record
        if isinstance(record.input, torch.Tensor):
            record = dataclasses.replace(record, out_dtype=record.out_dtype or record.input.dtype)
    if len(operands) == 1:
        raise TypeError(
            "weight must be an interlace.Scaled or a non-empty sequence of them, got []"
        )
    for index, each in enumerate(operands):
        operand_name = name_of(index, several)
        _check(operands[: index + 1], operand_name, record)
        if check_scales and passed[index] is each:
            check_scales_of(operand_name, each)
    biases = record.biases if name == "weights" else record.bias
    all_biases = biases if isinstance(biases, (list, tuple)) else [biases]
    parts = [part for each in operands for part in (each.values, each.scales, each.whole)]
    if torch.is_grad_enabled() and any(
        getattr(each, "requires_grad", False) for each in (*all_biases, *parts)
    ):
        _refuse()
    input, *rows = map(packed_rows, operands)
    format = operand_format(operands[0].format, operands[1].format)
    values = {"input": input, name: rows if several else rows[0], "format": format}
    return dataclasses.replace(record, **values)


def _operands_in(record: Any, operands: list[Any]) -> list[Any]:
    """Return the operands of a call with ``format``: if some are block-scaled, quantise the others."""
    kind = format_named(record.format)
    for name in ("return_gathered", "return_received"):
        if getattr(record, name, False):
            raise ValueError(
                f"{name} returns the sent data, which with format= is block-scaled: pass "
                f"interlace.quantize(input, {kind.name!r}) without format="
            )
    if not are_scaled(*operands):
        _check_record(record)
        return operands
    (input, *weights), by_row = operands, _is_of_experts(record)
    matrices = [
        input if isinstance(input, Scaled) else _quantize_rows(input, kind.name, False, by_row)
    ]
    for each in weights:
        scaled = isinstance(each, Scaled)
        matrices.append(each if scaled else _quantize_rows(each.mT, kind.name, True, by_row).t())
    if matrices[0].format != kind.name:
        raise ValueError(f"format is {kind.name!r}, input is in {matrices[0].format}")
    return matrices


def _check_record(record: Any, *, packed: bool = False) -> None:
    """Raise unless the factors are floats to quantise and multiply; weights may be ``packed`` columns."""
    _, several, operands = _factors(record)
    input, kind = operands[0], format_named(record.format)
    for index, each in enumerate(operands):
        name = name_of(index, several)
        if packed and index and getattr(each, "dtype", None) == torch.uint8:
            continue
        check_numbers(name, each)
        if not index:
            kind.check_shape(name, each.shape)
            _check_dim(record, each.dim() - 1)
            continue
        dims, shape = _dimensions_of_weight(record)
        if each.dim() != dims:
            raise ValueError(f"{name} must be {shape}, got shape {tuple(each.shape)}")
        kind.check_shape(name, each.mT.shape)
        if requires_gradients(input):  # its gradient has blocks along n
            kind.check_shape(name, each.shape)
        inner_length(name, each.shape[-2], input)


def check_numbers(name: str, tensor: object) -> None:
    """Raise TypeError unless ``tensor`` has floats to quantise."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_layout(name, tensor)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise TypeError(f"{name} must be a float tensor that format= quantizes, got {tensor.dtype}")


def _check_dim(record: Any, last: int) -> None:
    """Raise ValueError if the record gathers along the ``last`` dimension, or a gradient would."""
    gathers = hasattr(record, "gather_dim")
    name = "gather_dim" if gathers else "scatter_dim"
    dim = getattr(record, name, None)
    if dim in (-1, last) and (gathers or learns(record)):
        raise ValueError(
            f"{name} must not be the last one, {dim}, with format={record.format!r}: blocks would have "
            "numbers from several ranks"
        )


@torch.no_grad()
def quantize_record(record: Any) -> Any:
    """Return a record with packed rows instead of float factors, if it has a format."""
    if not getattr(record, "format", ""):
        return record
    name, several, (input, *weights) = _factors(record)
    if all(each.dtype == torch.uint8 for each in (input, *weights)):
        return record
    _check_record(record, packed=True)
    by_row = _is_of_experts(record)
    columns = [packed_weight(each, record.format, by_row=by_row) for each in weights]
    rows = quantized_rows(input, record.format, False, by_row)
    fields = {"input": rows, name: columns if several else columns[0]}
    return dataclasses.replace(record, out_dtype=record.out_dtype or input.dtype, **fields)


def _quantize_rows(rows: torch.Tensor, format: str, weight: bool, by_row: bool) -> Scaled:
    """Quantise floats; ``by_row``: with nvfp4, every row has its own ``whole``.

    The ops of experts need that, as rows without a token may have any values.
    """
    kind, whole = format_named(format), None
    if by_row and kind.whole:
        with_zero = torch.nn.functional.pad(rows.float().abs(), (0, 1))  # k may be 0
        whole = kind.whole_of(with_zero.amax(-1, keepdim=True))
    return quantize(rows, kind.name, weight=weight, whole=whole)  # type: ignore[arg-type]


def packed_weight(weight: torch.Tensor, format: str, *, by_row: bool) -> torch.Tensor:
    """Return packed columns of a weight ``(k, n)``, which may be packed already."""
    if weight.dtype == torch.uint8:
        return weight
    columns: torch.Tensor = quantized_rows(weight.mT, format, True, by_row)
    return columns.mT


# One node of a graph: inductor has no code for float8_e8m0fnu on a CPU.
@torch.library.custom_op("interlace::quantize_rows", mutates_args=())
def quantized_rows(rows: torch.Tensor, format: str, weight: bool, by_row: bool) -> torch.Tensor:
    """Return the packed rows of :func:`_quantize_rows`."""
    return packed_rows(_quantize_rows(rows, format, weight, by_row))


@quantized_rows.register_fake
def _(rows: torch.Tensor, format: str, weight: bool, by_row: bool) -> torch.Tensor:
    *leading, numbers = rows.shape
    row_bytes = format_named(format).row_bytes(numbers)
    return rows.new_empty((*leading, row_bytes), dtype=torch.uint8)


def packed_by_functional(
    op: str, record: Any, group: FunctionalGroup, tag: str
) -> tuple[str, Any, contextlib.AbstractContextManager[None]]:
    """Return the name of an op, its record with packed operands, and a context in which ranks compare k.

    In a graph, k is not compared.
    """
    if not are_formatted(record):
        return op, record, contextlib.nullcontext()
    known = not is_traced()
    try:
        packed_call = pack(record, check_scales=known)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse(op, group, tag, error)
    terms = comparing(("k", record.input.shape[-1])) if known else contextlib.nullcontext()
    return f"block_scaled_{op}", packed_call, terms


def is_traced() -> bool:
    """Return whether the call is part of a graph, or under a mode."""
    return torch.compiler.is_compiling() or bool(modes_active())


def packed_tokens(tokens: Scaled) -> tuple[torch.Tensor, contextlib.AbstractContextManager[None]]:
    """Return the packed rows of a dispatch, ``(tokens, row_bytes)``, and a context that compares k."""
    if tokens.inner != -1 or tokens.values.dim() != 2:
        raise ValueError(
            f"x must be (tokens, hidden), its blocks along hidden; got shape {tuple(tokens.shape)}, blocks "
            f"along dimension {tokens.inner}"
        )
    if is_traced():
        return packed_rows(tokens), contextlib.nullcontext()
    check_scales_of("x", tokens)
    return packed_rows(tokens), comparing(format_term(tokens.format), ("k", tokens.shape[-1]))


def check_scales_of(name: str, operand: Scaled) -> None:
    """Check scales, unless the host would wait for a device, or tensors have no real values."""
    like = operand.values.new_empty(1, dtype=torch.uint8)
    if like.is_cpu and has_memory(like):
        with naming(name):
            operand.check_scales()


def _is_of_experts(record: Any) -> bool:
    return any(hasattr(record, name) for name in OF_EXPERTS)


def _dimensions_of_weight(record: Any) -> tuple[int, str]:
    """Return the number of dimensions of a record's weights, and their names."""
    return (3, "(experts, k, n)") if _is_of_experts(record) else (2, "(k, n)")


def _check(operands: Sequence[Any], name: str, record: Any) -> None:
    """Check the last of some operands of a record, which begin with the input."""
    input, operand = operands[0], operands[-1]
    if not isinstance(operand, Scaled):
        raise TypeError(
            f"{name} must be an interlace.Scaled as the other operands are, got {type(operand).__name__}"
        )
    if len(operands) == 1:
        if operand.inner != -1:
            raise ValueError("input must be [..., k], its blocks along k, got a transposed one")
        return
    dims, shape = _dimensions_of_weight(record)
    if operand.inner != -2 or operand.values.dim() != dims:
        raise ValueError(
            f"{name} must be {shape}, its blocks along k, as interlace.quantize(w, format).t() has for w "
            f"(n, k); got shape {tuple(operand.shape)}, blocks along dimension {operand.inner}"
        )
    if operand_format(input.format, operand.format) not in OPERAND_FORMATS:
        raise ValueError(
            f"input is in {input.format}, {name} in {operand.format}; all operands must be in one format, "
            "or in mxfp8 and mxfp8_e5m2"
        )
    if operand.format != operands[1].format:
        raise ValueError(
            f"weight[0] is in {operands[1].format}, {name} in {operand.format}; all weights must be in one "
            "format"
        )
    inner_length(name, operand.shape[-2], input)


# -- the products of a backward -----------------------------------------------------------------------


@torch.library.custom_op("interlace::multiply_parts", mutates_args=())
def multiply_parts(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    """Return the sum over p of ``left[p] @ right[p].T`` in float32, in the order of parts.

    Operands are packed rows ``(parts, m, row_bytes)`` and ``(parts, n, row_bytes)``."""
    total = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float32, device=left.device)
    for rows, columns in zip(left, right, strict=True):
        total += multiply_packed(rows, columns.mT, FORMATS[format])
    return total


@multiply_parts.register_fake
def _(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


@torch.no_grad()
def packed_parts(rows: torch.Tensor, parts: Any, format: str) -> torch.Tensor:
    """Pack a matrix ``(m, k)`` in blocks along m, in equal ``parts`` of rows: ``(parts, k, row_bytes)``."""
    of_parts = rows.reshape(parts, rows.shape[0] // parts, rows.shape[1])
    if of_parts.shape[1] % FORMATS[format].packed:  # two numbers share a byte: add a row of zeros
        of_parts = torch.nn.functional.pad(of_parts, (0, 0, 0, 1))
    packed: torch.Tensor = quantized_rows(of_parts.mT, format, False, False)
    return packed


def product_of_rows(left: torch.Tensor, right: torch.Tensor, format: str) -> torch.Tensor:
    """Return ``left.T @ right`` of matrices with as many rows; with a format in float32.

    Either may be :func:`packed_parts` already; then the other is split into as many parts.
    """
    if not format:
        return left.mT @ right
    parts = max([len(each) for each in (left, right) if each.dtype == torch.uint8], default=1)
    packed = [
        each if each.dtype == torch.uint8 else packed_parts(each, parts, format)
        for each in (left, right)
    ]
    result: torch.Tensor = multiply_parts(packed[0], packed[1], format)
    return result


def gathered_rows(rows: torch.Tensor, format: str) -> torch.Tensor:
    """Return the form of a rank's ``rows`` to gather along dimension 0 for :func:`product_of_rows`."""
    return packed_parts(rows, 1, format) if format else rows


def product(
    left: torch.Tensor,
    weight: torch.Tensor,
    format: str,
    out_dtype: torch.dtype | None = None,
    *,
    by_row: bool = False,
) -> torch.Tensor:
    """Return ``left @ weight`` in a format, in the dtype of ``left`` or another.

    ``weight`` may be packed columns. ``by_row``: see :func:`quantized_rows`. Without a format it is torch's
    product, which has gradients.
    """
    if not format:
        return left @ weight
    left = left.detach()
    rows = quantized_rows(left.flatten(0, -2), format, False, by_row)
    columns = packed_weight(weight.detach(), format, by_row=by_row).mT
    result: torch.Tensor = multiply_parts(rows[None], columns[None], format)
    return result.to(out_dtype or left.dtype).view(*left.shape[:-1], weight.shape[1])
