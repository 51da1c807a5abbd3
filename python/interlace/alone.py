"""Collectives of a process group of one rank: a copy, or nothing at all.

A program written for many ranks often runs on one. What follows then from the general way (agreement,
engine) is known beforehand, and the call need not cost it. Whatever is not a plain copy of dense tensors
of one shape takes the general way, which also finds the words for what is wrong.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from interlace import dense, reduce_ops
from interlace.runtime import reductions

_memmove = ctypes.memmove
_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def copied(group: Any, output: Any, input: Any, opts: Any) -> bool:
    """Whether a synchronous call on ``group``, in a world of one, was such a copy, which is then done.

    ``output`` and ``input``: tensors, lists of one, or lists of such lists. ``opts``: torch's, of the call.
    """
    while type(output) is list and len(output) == 1:
        output = output[0]
    while type(input) is list and len(input) == 1:
        input = input[0]
    if opts.asyncOp or _profiling() or not (dense.ready(output) and dense.ready(input)):
        return False
    communicator, dtype = group.interlace_communicator, input.dtype
    if output.dtype is not dtype or dtype in dense.QUANTIZED:
        return False
    try:
        shape = input.shape
        if output.shape != shape or not shape:  # one tensor for all needs a dimension
            return False
        target, source, nbytes = output.data_ptr(), input.data_ptr(), input.nbytes
    except RuntimeError:  # see checks.has_memory
        return False
    if not target or not source or 0 < abs(target - source) < nbytes:
        return False  # an address may be 0 where there is no memory at all, see checks.has_memory
    if not communicator.may_run_now():
        return False
    if target != source:
        _memmove(target, source, nbytes)
    group._sequence += 1
    return True


def reduced(group: Any, outputs: Any, inputs: Any, opts: Any) -> bool:
    """:func:`copied` for a reduction, of which one rank's tensor is its own."""
    output = outputs[0] if type(outputs) is list and outputs else outputs
    name, factor = reduce_ops.parse(opts.reduceOp, 0)
    dtype: Any = getattr(output, "dtype", None)
    if factor is not None or not reductions.defined(name, dtype):
        return False
    return copied(group, outputs, inputs, opts)
