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

Modes and subclasses see the op, change its tensors, or answer it. What is left would reach torch's kernel,
which asks the group for a C++ backend. So for the time of the call there is one more mode below those of
the user::

    Python          group.allreduce(tensors)      a mode is active, or a tensor is of a subclass
    torch's own     c10d::allreduce_
    user's modes    see it, hand it on
    Returning       tensors of subclasses: lets these see it; plain ones: group.allreduce(tensors) again

This keeps ranks that run under a mode (a profiler on rank 0) in step with those that do not.

Rejected: a second, C++ group for such calls. The ranks with and without a mode would wait for each other
in different groups. It remains for one case, see :func:`needs_backend`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.runtime.compat.torch_groups import _create_work_from_future
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    DispatchMode,
    above_autograd,
    modes_active,
)

_C: Any = torch._C


def underlying(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Plain tensors of the same memory; None where torch's dispatcher has to see the call."""
    if modes_active() or above_autograd():
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


def is_simulated(tensors: Sequence[Any]) -> bool:
    """Whether no data will move: fake and meta tensors, or a mode that makes them."""
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(
        isinstance(each, torch.Tensor) and (each.is_meta or hasattr(each, "fake_mode"))
        for each in tensors
    )


def needs_backend() -> bool:
    """Whether torch's kernel runs anyway: ``make_fx`` and functionalization, below all modes, run it."""
    keys = _C._TorchDispatchModeKey
    return any(_C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


class _Returning(DispatchMode):
    def __init__(self, group: Any, serve: Callable[..., Any]) -> None:
        super().__init__()
        self._group, self._serve = group, serve

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_ours(func, args):
            return func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(args)
        if underlying([each for each in leaves if isinstance(each, torch.Tensor)]) is None:
            return NotImplemented  # then the subclasses are asked, with this mode still active
        work = self._serve(*args[:2])
        if work is None:
            return None
        boxed = _create_work_from_future(work.get_future()).boxed()
        return (args[0], boxed) if len(func._schema.returns) == 2 else boxed

    def _is_ours(self, func: Any, args: Any) -> bool:
        for each in args[1:3] if func.namespace == "c10d" else ():
            if isinstance(each, torch.ScriptObject):
                with contextlib.suppress(RuntimeError):  # it is the ReduceOp of an all_reduce
                    return dist.ProcessGroup.unbox(each) is self._group
        return False


@contextlib.contextmanager
def returning_to(group: Any, serve: Callable[..., Any]) -> Iterator[None]:
    """What the dispatcher leaves of a call of torch's method comes back as ``serve(*tensors)``."""
    # these are the op's first two arguments; serve returns a Work, or None as the op does
    above = [_C._pop_torch_dispatch_stack(None) for _ in range(modes_active())]
    _C._push_on_torch_dispatch_stack(_Returning(group, serve))
    for mode in reversed(above):
        _C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        above = [_C._pop_torch_dispatch_stack(None) for _ in above]
        _C._pop_torch_dispatch_stack(None)
        for mode in reversed(above):
            _C._push_on_torch_dispatch_stack(mode)
