"""From a caller's tensors to what an engine takes, detached and dense, and back.

Checks here run on every call, so what is right returns early, and words are found for what is wrong only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Event

COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def source(name: str, value: Any, communicator: Communicator) -> torch.Tensor:
    """``value``, detached, if an op can read it: a strided tensor on the group's device."""
    kind = communicator.device_type
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and (value.is_cpu if kind == "cpu" else value.device.type == kind)
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_nested
        and checks.has_memory(value)
    ):
        return value.detach() if value.requires_grad else value
    return _with_memory(name, checks.tensor(name, value, communicator), communicator.rank)


def _with_memory(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """``tensor``, unless it is one of those of torch that stand for elements they do not store."""
    if tensor.is_nested:
        raise TypeError(f"{name} must be a strided tensor, got a nested one on rank {rank}")
    return tensor


def target(name: str, value: Any, communicator: Communicator) -> torch.Tensor:
    """``value``, detached, if an op can also write it, each element once."""
    tensor = source(name, value, communicator)
    return tensor if tensor.is_contiguous() else checks.output(name, tensor, communicator)


Form = tuple[Any, ...]
"""Dtype and shapes: the end of the key under which a call of such tensors is remembered."""


def uncut(whole: Any, part: Any, communicator: Communicator) -> Form | None:
    """The form of two dense tensors of one dtype, on a CPU, that may go to an engine as they are.

    ``part`` may be this rank's part of ``whole``, or lie elsewhere. Says nothing of whether their shapes
    fit; and None is no error, the general way finds the words.
    """
    if communicator.device_type != "cpu" or not (ready(whole) and ready(part)):
        return None
    dtype = part.dtype
    if whole.dtype is not dtype:
        return None
    try:
        form = dtype, part.shape, whole.shape
        start, first = whole.data_ptr(), part.data_ptr()
    except RuntimeError:  # see checks.has_memory
        return None
    if not start or not first:
        return None
    if start <= first:
        if first < start + whole.nbytes and first != start + communicator.rank * part.nbytes:
            return None
    elif first + part.nbytes > start:
        return None
    return form


def uncut_list(parts: Any, own: Any, communicator: Communicator) -> Form | None:
    """The form of ``own`` and ``parts``, one dense tensor per rank, that may go to an engine as they are.

    None, unless they and ``own``, which may be this rank's part or lie elsewhere, are such tensors of one
    dtype and no two share memory; None is no error.
    """
    if (
        type(parts) is not list
        or len(parts) != communicator.world_size
        or communicator.device_type != "cpu"
        or not ready(own)
    ):
        return None
    dtype, rank = own.dtype, communicator.rank
    ends, number = 0, 0
    try:
        form = [dtype, own.shape]
        start = own.data_ptr()
        end = start + own.nbytes
        for part in parts:
            if not ready(part) or part.dtype is not dtype or part.requires_grad:
                return None
            first = part.data_ptr()
            if not start or first < ends or not first:  # out of order: the general way sorts them
                return None
            ends = first + part.nbytes
            if first < end and start < ends and not (first == start and number == rank):
                return None
            form.append(part.shape)
            number += 1
    except RuntimeError:  # see checks.has_memory
        return None
    return tuple(form)


def uncut_lists(outputs: Any, inputs: Any, communicator: Communicator) -> Form | None:
    """The form of two lists of one dense tensor per rank each that may go to an engine as they are.

    None, unless all are of one dtype, and no output shares memory with another tensor; None is no error.
    """
    count = communicator.world_size
    if (
        type(outputs) is not list
        or type(inputs) is not list
        or not len(outputs) == len(inputs) == count
        or communicator.device_type != "cpu"
    ):
        return None
    form: list[Any] = [None]
    dtype, low, ends = None, 0, 0
    try:
        for tensor in outputs:
            if not ready(tensor) or tensor.requires_grad:
                return None
            form.append(tensor.shape)
            first = tensor.data_ptr()
            if not first or first < ends:  # out of order: the general way sorts them
                return None
            if dtype is None:
                form[0], dtype, low = tensor.dtype, tensor.dtype, first
            elif tensor.dtype is not dtype:
                return None
            ends = first + tensor.nbytes
        for tensor in inputs:
            if not ready(tensor) or tensor.requires_grad or tensor.dtype is not dtype:
                return None
            form.append(tensor.shape)
            first = tensor.data_ptr()
            if not first or (first < ends and low < first + tensor.nbytes):
                return None
    except RuntimeError:  # see checks.has_memory
        return None
    return tuple(form)


def ready(value: Any) -> bool:
    """Whether ``value`` is a dense tensor on a CPU that stores its elements as they are.

    Or a nested one, whose shape raises RuntimeError when it is asked for.
    """
    kind = type(value)
    if (
        (kind is not torch.Tensor and kind is not torch.nn.Parameter)
        or not value.is_cpu
        or value.layout is not torch.strided
        or not value.is_contiguous()
    ):
        return False
    return not (value.is_neg() or (value.dtype in COMPLEX and value.is_conj()))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def all_dense(whole: Any, parts: Sequence[torch.Tensor]) -> bool:
    """Whether ``parts``, cut from ``whole`` along dim 0 if that is one tensor, are all dense."""
    if isinstance(whole, torch.Tensor):
        return whole.is_contiguous()
    return all(part.is_contiguous() for part in parts)


def filled(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    run: Callable[[list[torch.Tensor]], Event | None],
) -> Event | None:
    """Run with dense stand-ins for the ``outputs`` that are not dense; the result goes back to these."""
    dense = [
        each
        if each.is_contiguous()
        else torch.empty(each.shape, dtype=each.dtype, device=each.device)
        for each in outputs
    ]
    return copied_back(communicator, outputs, dense, run(dense))


def changed(
    communicator: Communicator, tensor: torch.Tensor, run: Callable[[torch.Tensor], Event | None]
) -> Event | None:
    """Run on a dense copy of ``tensor``, which is not dense, and copy the result back."""
    dense = tensor.contiguous()
    return copied_back(communicator, [tensor], [dense], run(dense))


def copied_back(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    dense: Sequence[torch.Tensor],
    event: Event | None,
) -> Event | None:
    """After ``event``: each of ``outputs`` that is not itself ``dense`` gets what its stand-in has."""
    pairs = [(out, made) for out, made in zip(outputs, dense, strict=True) if out is not made]
    if not pairs:
        return event
    compute = communicator.compute
    if event is not None:
        compute.wait_event(event)
    for out, made in pairs:
        compute.copy(out, made, "output")
    return compute.record()


def remember(communicator: Communicator, key: Any, call: Any) -> Any:
    """Keep ``call`` for the next time the same is asked for. TypeError if its tensors are quantized."""
    for term, value in call.terms:
        if isinstance(value, torch.dtype) and value in QUANTIZED:
            raise TypeError(
                f"{call.op}: {term} is {value} on rank {communicator.rank}; quantized tensors are not "
                f"taken, give their int_repr()"
            )
    return communicator.remember(key, call)
