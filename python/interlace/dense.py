"""From a caller's tensors to what an engine takes, detached and dense, and back.

Checks here run on every call, so what is right returns early, and words are found for what is wrong only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace import checks
from interlace.runtime.communicator import Communicator
from interlace.runtime.stream import Event

MOST_CALLS = 1024


def source(name: str, value: Any, communicator: Communicator) -> torch.Tensor:
    """``value``, detached, if an op can read it: a strided tensor on the group's device."""
    kind = communicator.device_type
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and (value.is_cpu if kind == "cpu" else value.device.type == kind)
        and not value.is_conj()
        and not value.is_neg()
    ):
        return value.detach() if value.requires_grad else value
    return checks.tensor(name, value, communicator)


def target(name: str, value: Any, communicator: Communicator) -> torch.Tensor:
    """``value``, detached, if an op can also write it, each element once."""
    tensor = source(name, value, communicator)
    return tensor if tensor.is_contiguous() else checks.output(name, tensor, communicator)


def uncut(whole: Any, part: Any, communicator: Communicator) -> bool:
    """Whether both are dense tensors of one dtype, on a CPU, that may go to an engine as they are.

    ``part`` may be this rank's part of ``whole``, or lie elsewhere. Says nothing of shapes; and False is
    no error, the general way finds the words.
    """
    if not (
        isinstance(part, torch.Tensor)
        and whole.layout is part.layout is torch.strided
        and whole.dtype is part.dtype
        and whole.is_contiguous()
        and part.is_contiguous()
    ):
        return False
    if communicator.device_type != "cpu" or not (whole.is_cpu and part.is_cpu):
        return False
    if whole.is_conj() or part.is_conj() or whole.is_neg() or part.is_neg():
        return False
    start, first = whole.data_ptr(), part.data_ptr()
    if start <= first:
        return bool(
            first == start + communicator.rank * part.nbytes or first >= start + whole.nbytes
        )
    return bool(first + part.nbytes <= start)


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
    """Keep ``call`` for the next time the same is asked for."""
    if len(communicator.calls) >= MOST_CALLS:
        communicator.calls.clear()
    communicator.calls[key] = call
    return call
