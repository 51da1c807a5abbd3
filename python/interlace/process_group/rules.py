"""Rules of a process group written in Python: calls that it serves, and calls that torch must see first.

A Python ``ProcessGroup`` is called before torch's dispatcher: dispatch modes and tensor subclasses that
would have handled the op (FakeTensor, meta, make_fx, LocalTensor, ...) never learn of it. Then the method
has to hand the call to torch's own, which dispatches ``c10d::<op>``.

=======================================  =============================================================
dispatch mode is active                  torch: the mode decides
subclass without ``__torch_dispatch__``  this group, with the plain tensor of the same memory
subclass with ``__torch_dispatch__``     torch
meta tensor                              torch
=======================================  =============================================================
"""

from collections.abc import Sequence

import torch

from interlace.runtime.core.torch_modes import PLAIN_TYPES, modes_active


def underlying(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Plain tensors of the same memory; None where torch's dispatcher has to see the call."""
    if modes_active():
        return None
    plain = [_plain(tensor) for tensor in tensors]
    return None if any(tensor is None for tensor in plain) else plain  # type: ignore[return-value]


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor):
        return tensor  # misuse, which the op reports
    if tensor.is_meta:
        return None
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)
