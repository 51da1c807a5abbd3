"""Fused ops on block-scaled operands: the plain ops, of rows that carry their scales.

A matrix in a block-scaled format is packed: bytes, each row's values and behind them its scales (``formats.py``).
So what moves rows moves their scales under the same signal, and an op has one argument more, ``format``.
Uneven shards need no padding, as scales are not swizzled; a row is at most 127 numbers and 15 bytes longer.
"""

import dataclasses
from typing import Any

import torch

from interlace.ops.matmul import gather, reduce
from interlace.ops.matmul.formats import Scaled, packed_rows
from interlace.ops.op.op import Op, OpGradient
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import comparing


def _refuse(*_: Any) -> Any:
    raise RuntimeError("interlace's ops on block-scaled operands have no gradients")


def _block_scaled(op: Op) -> Op:
    """The same op with a ``format``."""
    without = [name for name in op.without if name != "format"]
    name, nothing = f"block_scaled_{op.name}", OpGradient(lambda ctx, given, output: None, _refuse)
    return dataclasses.replace(
        op, name=name, without=without, gradient=nothing, communicates={}, variants=()
    )


OPS = tuple(map(_block_scaled, (gather.ALL_GATHER_MATMUL, *reduce.OPS)))


def are_scaled(*operands: Any) -> bool:
    """Whether any of these, or of the lists among them, is a :class:`Scaled`."""
    return any(
        isinstance(each, Scaled) or (isinstance(each, (list, tuple)) and are_scaled(*each))
        for each in operands
    )


def take(communicator: Communicator, op: str, given: Any) -> Any:
    """The record ``given`` with packed operands, and a block in which ranks compare k, too.

    ValueError or TypeError on all ranks if operands do not fit to each other.
    """
    with communicator.accepting(op):
        name = "weights" if op == gather.OP else "weight"
        weights = getattr(given, name)
        several = isinstance(weights, (list, tuple))
        found = [given.input, *(weights if several else [weights])]
        for index, each in enumerate(found):
            _check(found[0], each, f"weight[{index - 1}]" if several else "weight", index)
            if not communicator.place.compiled:  # elsewhere that would wait for the device
                each.check_scales()
        packed = [packed_rows(each) for each in found]
        biases = getattr(given, "biases", None) if several else [getattr(given, "bias", None)]
        if torch.is_grad_enabled() and any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in biases or []
        ):
            _refuse()
    made = packed[1:] if several else packed[1]
    values = {"input": packed[0], name: made, "format": found[0].format}
    return dataclasses.replace(given, **values), comparing(("k", found[0].shape[-1]))


def _check(input: Any, operand: Any, name: str, index: int) -> None:
    if not isinstance(operand, Scaled):
        name = name if index else "input"
        raise TypeError(
            f"{name} must be an interlace.Scaled as the other operands are, got {type(operand).__name__}"
        )
    if not index:
        if operand.inner != -1:
            raise ValueError("input must be [..., k], its blocks along k; this one is transposed")
        return
    if operand.inner != -2 or operand.values.dim() != 2:
        raise ValueError(
            f"{name} must be (k, n), its blocks along k: interlace.quantize(w, format).t() of w (n, k); got "
            f"shape {tuple(operand.shape)}, blocks along dimension {operand.inner}"
        )
    if operand.format != input.format:
        raise ValueError(f"input is in {input.format}, {name} in {operand.format}")
    if operand.shape[0] != input.shape[-1]:
        raise ValueError(
            f"{name} has {operand.shape[0]} rows, input has k = {input.shape[-1]} (shape "
            f"{tuple(input.shape)})"
        )
