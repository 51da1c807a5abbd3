"""Dispatch modes of torch, plain tensors, whether a profile is being taken, and pickles of every dtype."""

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

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


# -- pickles ---------------------------------------------------------------------------------------

_known: Any = torch.storage._dtype_to_storage_type_map
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and value.dtype not in _known():
            bits = _BITS.get(value.dtype.itemsize)
            if bits is not None and value.layout is torch.strided:
                return torch.Tensor.view, (value.detach().view(bits), value.dtype)
        return NotImplemented


def pickled(value: Any) -> bytes:
    """``pickle.dumps(value)``, of which torch would not load fp8 or uint16 again."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
