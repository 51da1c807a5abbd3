"""Fused ops on block-scaled operands: the plain ops, of rows that carry their scales.

A matrix in a block-scaled format is packed: in bytes, each row's values and then its scales, see
``formats.py``. So what moves rows moves their scales under the same signal, and an op has one argument
more, ``format``. Scales are not swizzled, so shards may be of any length. A row is padded to a multiple of
128 numbers, and to one of 16 bytes.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.arguments.checks import has_memory
from interlace.arguments.words import FunctionalGroup
from interlace.kernels.block_scales import INNER
from interlace.ops.matmul.formats import (
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP4,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    Scaled,
    format_named,
    packed_rows,
    quantize,
    unpacked_rows,
    unswizzled,
)
from interlace.ops.op.calls import refuse
from interlace.ops.op.op import EXAMPLES, Example, Op, Setting, Started, constant
from interlace.ops.op.recording import ContinuedWork
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import comparing
from interlace.runtime.core.stream import Outcome

FACTORS = ("input", "weight", "weights")


def _refuse(*_: Any) -> Any:
    raise RuntimeError("interlace's ops on block-scaled operands have no gradients")


def with_format(op: Op) -> Op:
    """The op of block-scaled operands: the same with a ``format``."""
    without = [name for name in op.without if name != "format"]

    def start(communicator: Communicator, given: Any, **out: torch.Tensor) -> Started:
        with communicator.accepting(op.name):
            format_named(given.format)
        return op.start(communicator, given, **out)

    examples = {**EXAMPLES, **op.examples}
    of_factors = {each: _packed_example(examples[each], each != "input") for each in FACTORS}
    plain = {"format": constant("mxfp8"), "out_dtype": lambda setting: setting.dtype}
    return dataclasses.replace(
        op, name=f"block_scaled_{op.name}", start=start, without=without, gradient=None, variants=(),
        examples={**op.examples, **of_factors, **plain},
    )  # fmt: skip


def _packed_example(make: Example, weight: bool) -> Example:
    """The packed rows of an example, whose small whole numbers mxfp8 has exactly."""

    def packed_numbers(numbers: torch.Tensor) -> torch.Tensor:
        scaled = quantize(numbers.mT, "mxfp8").t() if weight else quantize(numbers, "mxfp8")
        return packed_rows(scaled)

    def example(setting: Setting) -> Any:
        made = make(dataclasses.replace(setting, dtype=torch.float32))
        return [*map(packed_numbers, made)] if isinstance(made, list) else packed_numbers(made)

    return example


def are_scaled(input: object, weight: object) -> bool:
    """Whether operands are block-scaled; several weights are if the input is."""
    return isinstance(input, Scaled) or isinstance(weight, Scaled)


def format_of(values: Any, scales: Any, inner: int) -> str:
    """The format of tensors that ``torch.nn.functional.scaled_mm`` takes; "" without blocks.

    The dtypes say it, and the shape of scales in float32: one for all numbers, or for each row or column,
    is no block. With k <= 128 such a scale is also that of a block, and means the same.
    """
    if not isinstance(values, torch.Tensor) or not isinstance(scales, torch.Tensor):
        return ""
    if scales.dtype == E8M0:
        return "mxfp4" if values.dtype in (FP4, torch.uint8) else "mxfp8"
    if scales.dtype == E4M3:
        return "nvfp4"
    if values.dim() < 2 or scales.dim() != values.dim() or not values.shape[inner]:
        return ""
    blocks = -(-values.shape[inner] // INNER)
    across = -3 - inner
    by_row = blocks == 1 and scales.shape[across] in (1, values.shape[across])
    return "" if scales.shape[inner] != blocks or by_row else "fp8_block128"


def plain_scales(values: torch.Tensor, scales: torch.Tensor, inner: int) -> torch.Tensor:
    """Scales that ``torch._scaled_mm`` takes, by row and block: it has those of one byte swizzled.

    Whatever their shape, as that is not what it goes by. Raises ValueError for another number of them.
    """
    if scales.dtype not in (E8M0, E4M3):
        return scales
    matrix = values if inner == -1 else values.mT
    kind = FORMATS["nvfp4"] if scales.dtype == E4M3 else FORMATS["mxfp8"]
    packed = 1 if values.dtype in (E4M3, E5M2) else 2
    *others, length = matrix.shape
    rows, blocks = math.prod(others), -(-length * packed // kind.block)
    wanted = (
        -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS * -(-blocks // SWIZZLE_COLUMNS) * SWIZZLE_COLUMNS
    )
    if scales.numel() != wanted:
        raise ValueError(
            f"scales of {scales.dtype} must be in the layout SWIZZLE_32_4_4, as torch._scaled_mm takes "
            f"them: {wanted} for values of shape {tuple(values.shape)}; got shape {tuple(scales.shape)}"
        )
    plain = unswizzled(scales.reshape(-1), rows, blocks).view(*others, blocks)
    return plain if inner == -1 else plain.mT


def operands(input: tuple[Any, Any], weights: Sequence[tuple[Any, Any]]) -> list[Scaled]:
    """The input and the weights that pairs of values and scales are; none if they have no blocks."""
    if any(isinstance(part, Scaled) for pair in (input, *weights) for part in pair):
        raise TypeError(
            "input and weight must be tensors with scales beside them, got an interlace.Scaled, which the "
            "op of the same name without 'scaled' takes"
        )
    pairs = [input, *weights]
    formats = [format_of(*each, -2 if index else -1) for index, each in enumerate(pairs)]
    if not any(formats):
        return []
    # What has no blocks should have those of the others.
    likely = next(filter(None, formats))
    made = []
    for index, (pair, format) in enumerate(zip(pairs, formats, strict=True)):
        with naming(name_of(index, len(weights) > 1)):
            made.append(Scaled(*pair, format or likely, None, -2 if index else -1))
    return made


def agree_on_scales(communicator: Communicator, op: str, operands: Sequence[Scaled]) -> None:
    """Raise ValueError on all ranks if scales are by block on some only: then ranks would call two ops."""
    kind = "by block" if operands else "one, or by row"
    call = Call(op, (("the kind of scales", kind),))

    def agree() -> Outcome:
        communicator.told(call)
        return Outcome(None, None)

    communicator.run(op, agree, async_op=False)


def name_of(index: int, several: bool) -> str:
    """The name of an operand: the input is the first."""
    if not index:
        return "input"
    return f"weight[{index - 1}]" if several else "weight"


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Within, errors say to which operand they belong."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def with_gathered(input: Any, made: Any, *, async_op: bool = False) -> Any:
    """``(gathered, *results)`` of an op on a block-scaled ``input``: what was gathered is one, too."""
    if not isinstance(input, Scaled):
        return made

    def finish(made: Sequence[Any]) -> tuple[Any, ...]:
        gathered, *results = made
        return unpacked_rows(gathered, input.kind, input.shape[-1]), *results

    return ContinuedWork(made, finish) if async_op else finish(made)


def run_packed(
    run: Callable[..., Any],
    communicator: Communicator,
    op: str,
    given: Any,
    async_op: bool,
    *,
    gathers: bool = False,
) -> Any:
    """Call ``run(communicator, given, async_op)`` with packed operands; ranks compare k, too.

    ``given``: the record of a call of ``op`` on block-scaled operands. ``gathers``: what ``run`` returns
    begins with the gathered input. ValueError or TypeError on all ranks if an operand is wrong.
    """
    with communicator.accepting(op):
        packed_record = packed(given, check_scales=True)
    with comparing(("k", given.input.shape[-1])):
        made = run(communicator.on(packed_record.input), packed_record, async_op=async_op)
    return with_gathered(given.input, made, async_op=async_op) if gathers else made


def packed(given: Any, *, check_scales: bool) -> Any:
    """A record of an op with the packed rows of its block-scaled operands, and their format."""
    name = "weights" if hasattr(given, "weights") else "weight"
    weights = getattr(given, name)
    several = isinstance(weights, (list, tuple))
    by_expert = any(hasattr(given, each) for each in ("input_splits", "home_splits"))
    dim = getattr(given, "gather_dim", 0)
    if isinstance(given.input, Scaled) and dim in (-1, given.input.values.dim() - 1):
        raise ValueError(
            f"gather_dim={dim} is k, the last dimension of input, along which its blocks lie: block-scaled "
            f"operands are gathered along another one; shape of input is {tuple(given.input.shape)}"
        )
    operands = [given.input, *(weights if several else [weights])]
    for index, each in enumerate(operands):
        operand_name = name_of(index, several)
        _check(operands[0], each, operand_name, index, by_expert)
        if check_scales:
            _check_scales(operand_name, each)
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


def packed_by_functional(
    op: str, given: Any, group: FunctionalGroup, tag: str
) -> tuple[str, Any, contextlib.AbstractContextManager[None]]:
    """The name of an op, its record with packed operands, and a block in which ranks compare k.

    A graph compares no k, and looks at no scales.
    """
    if not any(isinstance(getattr(given, name, None), Scaled) for name in FACTORS):
        return op, given, contextlib.nullcontext()
    known = not traced()
    learning = getattr(given, "topk_weights", None)
    try:
        if torch.is_grad_enabled() and learning is not None and learning.requires_grad:
            raise RuntimeError(
                f"functional.{op} of block-scaled operands has no gradient of topk_weights; interlace.{op} "
                "has one"
            )
        made = packed(given, check_scales=known)
    except (TypeError, ValueError, RuntimeError) as error:
        refuse(op, group, tag, error)
    terms = comparing(("k", given.input.shape[-1])) if known else contextlib.nullcontext()
    return f"block_scaled_{op}", made, terms


def traced() -> bool:
    """Whether the call is one of a graph, or of a mode."""
    return torch.compiler.is_compiling() or bool(modes_active())


def packed_tokens(
    tokens: Scaled,
) -> tuple[torch.Tensor, contextlib.AbstractContextManager[None]]:
    """The packed rows of a dispatch, ``(tokens, row_bytes)``, and a block that compares format and k."""
    if tokens.inner != -1 or tokens.values.dim() != 2:
        raise ValueError(
            f"x must be (tokens, hidden), its blocks along hidden; got shape {tuple(tokens.shape)}, blocks "
            f"along dimension {tokens.inner}"
        )
    if traced():
        return packed_rows(tokens), contextlib.nullcontext()
    _check_scales("x", tokens)
    return packed_rows(tokens), comparing(("format", tokens.format), ("k", tokens.shape[-1]))


def _check_scales(name: str, operand: Scaled) -> None:
    """Look at scales, unless the host would wait for a device, or tensors stand for others."""
    like = operand.values.new_empty(1)
    if like.is_cpu and has_memory(like):
        with naming(name):
            operand.check_scales()


def _check(input: Any, operand: Any, name: str, index: int, by_expert: bool) -> None:
    if not isinstance(operand, Scaled):
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
        raise ValueError(
            f"input is in {input.format}, {name} in {operand.format}; all operands must be in one format"
        )
    if operand.shape[-2] != input.shape[-1]:
        raise ValueError(
            f"{name} has {operand.shape[-2]} rows, input has k = {input.shape[-1]} (shape "
            f"{tuple(input.shape)})"
        )
