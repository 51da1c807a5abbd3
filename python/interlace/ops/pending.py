"""What an op has started: tensors that are not complete yet, and the Work to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import _register_work

from interlace.runtime.work import Work


class Started(NamedTuple):
    """The ``outputs`` of an op, complete after ``work``; None for an op that was done at once."""

    outputs: Sequence[torch.Tensor]
    work: Work | None


def register(started: Started) -> None:
    """Let torch's ``wait_tensor`` find the Work by each of the outputs."""
    work: Any = started.work
    if work is None:
        return
    if work.is_success():
        work.wait()
        return
    for output in started.outputs:
        if output.numel():
            _register_work(output, work)


def finish(started: Started) -> None:
    """Wait here and now, where an op must be complete when it returns."""
    if started.work is not None:
        started.work.wait()
