"""Collectives of a process group of one rank: a copy, or nothing at all.

A program written for many ranks often runs on one. What follows then from the general way (agreement,
engine) is known beforehand, and the call need not cost it. Whatever is not a plain copy of dense tensors
of one shape takes the general way, which also finds the words for what is wrong.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from interlace.arguments import dense, reduce_ops
from interlace.runtime.numerics import reductions

_memmove = ctypes.memmove
# One that keeps the GIL is a tenth of a microsecond faster; others should not wait for it long.
_memmove_small = ctypes.PyDLL(None).memmove
_memmove_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_small.restype = None
SMALL = 64 << 10

_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_Tensor, _Parameter, _strided = torch.Tensor, torch.nn.Parameter, torch.strided
_DTYPES = frozenset(each for each in vars(torch).values() if isinstance(each, torch.dtype))
_PLAIN = _DTYPES - dense.COMPLEX - frozenset(dense.QUANTIZED)


def _conjugated(output: torch.Tensor, input: torch.Tensor) -> bool:
    return output.is_conj() or input.is_conj()


def copied(group: Any, output: Any, input: Any, opts: Any) -> bool:
    """Whether a synchronous call on ``group``, in a world of one, was such a copy, which is then done.

    ``output`` and ``input``: tensors, lists of one, or lists of such lists. ``opts``: torch's, of the call.

    This is :func:`interlace.arguments.dense.ready` of both and the copy, written out: a tenth of a
    microsecond per function call counts here.
    """
    while type(output) is list and len(output) == 1:
        output = output[0]
    while type(input) is list and len(input) == 1:
        input = input[0]
    kind, other = type(output), type(input)
    if (
        (kind is not _Tensor and kind is not _Parameter)
        or (other is not _Tensor and other is not _Parameter)
        or opts.asyncOp
        or _profiling()
        or not output.is_cpu
        or not input.is_cpu
        or output.layout is not _strided
        or input.layout is not _strided
    ):
        return False
    dtype = input.dtype
    if (
        output.dtype is not dtype
        or (dtype not in _PLAIN and (dtype not in dense.COMPLEX or _conjugated(output, input)))
        or not output.is_contiguous()
        or not input.is_contiguous()
        or output.is_neg()
        or input.is_neg()
    ):
        return False
    try:
        shape = input.shape
        if output.shape != shape or not shape:  # one tensor for all needs a dimension
            return False
        target, source, nbytes = output.data_ptr(), input.data_ptr(), input.nbytes
    except RuntimeError:  # see checks.has_memory
        return False
    if not target or not source:
        return False  # an address may be 0 where there is no memory at all, see checks.has_memory
    if target != source and -nbytes < target - source < nbytes:
        return False
    if not group.interlace_communicator.may_run_now():
        return False
    if target != source:
        (_memmove_small if nbytes <= SMALL else _memmove)(target, source, nbytes)
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
