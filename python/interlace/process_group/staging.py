"""Tensors on a device where a group has no place: through copies in the memory of the host.

Right for every collective, and not fast: a copy off the device, the collective between processes, a copy
back. Nothing overlaps, the call returns when the copies back are enqueued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopies:
    """The host's copies of the tensors of one call."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of ``tensors``, which are complete; waits for the device."""
        copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        self._pairs += zip(tensors, copies, strict=True)
        return copies

    def back(self, outputs: Sequence[torch.Tensor]) -> None:
        """Bring those of ``outputs`` back that are copies, or were copied."""
        filled = {output.data_ptr() for output in outputs}
        for original, copy in self._pairs:
            if original.data_ptr() in filled or copy.data_ptr() in filled:
                original.detach().copy_(copy)
