"""Dense stand-ins for tensors that are not dense, for what an engine takes; calls that are remembered."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import movable
from interlace.runtime.core.stream import Event

QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def check_not_quantized(name: str, dtype: torch.dtype) -> None:
    """TypeError if it is: torch copies such elements by their scale, or not at all."""
    if dtype in QUANTIZED:
        raise TypeError(f"{name} is {dtype}; give a quantized tensor's int_repr()")


def filled(
    communicator: Communicator,
    outputs: Sequence[torch.Tensor],
    run: Callable[[Sequence[torch.Tensor]], Event | None],
) -> Event | None:
    """Run with dense stand-ins for the ``outputs`` that are not dense; the result goes back to these."""
    if all([each.is_contiguous() for each in outputs]):  # a generator takes longer
        return run(outputs)
    dense = [each if each.is_contiguous() else each.new_empty(each.shape) for each in outputs]
    return copied_back(communicator, outputs, dense, run(dense))


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
        compute.copy(movable(out), movable(made), "output")
    return compute.record()


def remember(communicator: Communicator, key: Any, call: Call) -> Call:
    """Keep ``call`` for the next time the same is asked for. TypeError if its tensors are quantized."""
    for term, value in call.terms:
        if isinstance(value, torch.dtype):
            check_not_quantized(f"{call.op}: {term}", value)
    return communicator.remember(key, call)
