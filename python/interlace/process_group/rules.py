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

That must be called from a function that is called as the method is: pybind11 knows a call of the base
class by the name of the calling function, and otherwise calls the override again, without end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from interlace.runtime.core.torch_modes import PLAIN_TYPES, modes_active

ProcessGroup: Any = dist.ProcessGroup  # torch calls it otherwise than its overloads say


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


def keep_outside_compilation(group_class: type) -> None:
    """Keep Dynamo out of a class's methods and all they call, as ``torch.compiler.disable`` does.

    Dynamo would trace into the method of an opaque object and fail. ``torch.compiler.disable`` wraps,
    which costs every call 0.5 us (torch 2.13, Xeon, November 2026); a mark on the function itself
    (not inlined) and on its code (nor compiled when called, nor what it calls) costs nothing.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(group_class).values():
        if isinstance(method, FunctionType):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
            method._torchdynamo_disable_msg = "interlace's process group"  # type: ignore[attr-defined]
            set_code_exec_strategy(method.__code__, skip)


OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


@functools.cache
def torchs_own(name: str) -> Any:
    """torch's method, called from a function of its name: see the head of this file."""
    known = name if hasattr(ProcessGroup, name) else OLD_NAMES[name]
    method = getattr(ProcessGroup, known)

    def own(self: Any, *args: Any) -> Any:
        return method(self, *args)

    own.__code__ = own.__code__.replace(co_name=known)
    return own


def renamed(new: str) -> property:
    """A method under its old name; but torch's own while the group calls that (``_above``).

    torch looks for an override under the old name last, and would take ours for the end of its search
    when it runs its own method. Before 2.13 it knows the old name only, and must go on to find ours there.
    """
    old = getattr(ProcessGroup, OLD_NAMES[new])
    has_both = hasattr(ProcessGroup, new)

    def method(self: Any) -> Any:
        return old.__get__(self) if has_both and self._above else getattr(self, new)

    return property(method)
