"""Dispatch modes of torch, the types that are plain tensors, and whether a profile is being taken."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import profiler

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes."""


def when_profiled(change: Callable[[bool], None]) -> None:
    """Call ``change(True)`` when torch starts to take a profile, ``change(False)`` when it ends."""

    def changed(torchs_own: Callable[[], None], starts: bool) -> None:
        torchs_own()
        change(starts)

    for name, starts in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        setattr(profiler, name, functools.partial(changed, getattr(profiler, name), starts))
