"""Rules of a process group written in Python: which calls it serves, and which torch must see first.

A Python ``ProcessGroup`` is called before torch's dispatcher. So dispatch modes and tensor subclasses that
would have handled the op (FakeTensor, meta, make_fx, LocalTensor, ...) do not see it. In these cases the
method must pass the call to torch's method, which dispatches ``c10d::<op>``. A subclass without
``__torch_dispatch__`` is served with the plain tensor of the same memory.

Modes and subclasses see the op, change its tensors, or answer it. The remaining call would reach torch's
kernel, which asks the group for a C++ backend. So during the call there is one more mode, below the modes
of the user::

    Python          group.allreduce(tensors)      a mode is active, or a tensor is of a subclass
    torch's own     c10d::allreduce_
    user's modes    see it, pass it on
    Returning       tensors of subclasses: the subclasses see it; plain ones: group.allreduce(tensors) again

This keeps ranks that run under a mode (a profiler on rank 0) in step with those that do not. With a second,
C++ group for such calls, ranks with and without a mode would wait for each other in different groups. It is
still used in one case, see :func:`needs_backend`.

``all_gather_into_tensor_out`` and ``batch_p2p_ops`` of ``_c10d_functional`` ask the group for the C++
backend of a device, which a group in Python does not have (torch 2.13). The CPU kernels in this file ask
the group itself, whatever its backend. So other groups in the same process work as before.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload

from interlace.runtime.compat.torch_groups import (
    ProcessGroup,
    _create_work_from_future,
    _register_work,
    resolve,
)
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    DispatchMode,
    above_autograd,
    modes_active,
)

_C: Any = torch._C
_Library: Any = torch.library.Library
_library: Any = None


def underlying(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return plain tensors of the same memory, or None if torch's dispatcher must see the call."""
    if modes_active() or above_autograd():
        return None
    plain = [_plain(tensor) for tensor in tensors]
    return None if any(tensor is None for tensor in plain) else plain  # type: ignore[return-value]


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, torch.Tensor):
        return tensor  # a wrong argument, which the op reports
    if tensor.is_meta:
        return None
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def is_simulated(tensors: Sequence[object]) -> bool:
    """Return whether no data will move: fake and meta tensors, or a mode that makes them."""
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(
        isinstance(tensor, torch.Tensor) and (tensor.is_meta or hasattr(tensor, "fake_mode"))
        for tensor in tensors
    )


def needs_backend() -> bool:
    """Return whether torch's kernel runs in any case: ``make_fx`` and functionalization run it."""
    keys = _C._TorchDispatchModeKey
    return any(_C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL))


class _Returning(DispatchMode):
    def __init__(self, group: object, serve: Callable[..., Any]) -> None:
        super().__init__()
        self._group, self._serve = group, serve

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_ours(func, args):
            return func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(args)
        if underlying([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]) is None:
            return NotImplemented  # torch then asks the subclasses, with this mode still active
        work = self._serve(*args[:2])
        if work is None:
            return None
        boxed = _create_work_from_future(work.get_future()).boxed()
        return (args[0], boxed) if len(func._schema.returns) == 2 else boxed

    def _is_ours(self, func: OpOverload, args: Sequence[object]) -> bool:
        for each in args[1:3] if func.namespace == "c10d" else ():
            if isinstance(each, torch.ScriptObject):
                with contextlib.suppress(RuntimeError):  # it is the ReduceOp of an all_reduce
                    return dist.ProcessGroup.unbox(each) is self._group
        return False


@contextlib.contextmanager
def returning_to(group: object, serve: Callable[..., object]) -> Iterator[None]:
    """Serve calls of torch's method that come out of the dispatcher with ``serve(*tensors)``."""
    # the tensors are the op's first two arguments; serve returns a Work, or None as the op does
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


# -- short forms -------------------------------------------------------------------------------


def long_form(kind: type, short: Sequence[Any], args: Sequence[object]) -> tuple[Any, ...]:
    """Return lists for ``short`` (tensors or lists), and options of ``kind`` filled from ``args``.

    ``args``: a root, a ReduceOp, a timeout, or options, in any order, as torch's short forms have them. A
    list beside a tensor has one tensor per rank; the long forms put it into another list.
    """
    single = any(isinstance(each, torch.Tensor) for each in short)
    lists = [[each] if single else list(each) for each in short]
    passed = next((each for each in args if isinstance(each, kind)), None)
    options: Any = kind() if passed is None else passed
    for value in args:
        if isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            options.reduceOp = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None and not isinstance(value, kind):
            raise TypeError(f"expected {kind.__name__}, a root, ReduceOp or timeout, got {value!r}")
    return (*lists, options)


def flat(long: torch.Tensor, short: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flatten both tensors if torch lets one stand for the other; keep 0-dim and stacked tensors."""
    if long.dim() in (short.dim(), short.dim() + 1) or not long.is_contiguous():
        return long, short
    return long.view(-1), short.reshape(-1)


def all_flat(
    longs: list[torch.Tensor], shorts: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [flat(long, short) for long, short in zip(longs, shorts, strict=True)]
    return [long for long, _ in pairs], [short for _, short in pairs]


# -- kernels of functional ops -----------------------------------------------------------------


def register() -> None:
    """Register the kernels, once per process."""
    global _library
    if _library is None:
        _library = _Library("_c10d_functional", "IMPL")
        for name, kernel in (
            ("all_gather_into_tensor_out", _all_gather_into_tensor_out),
            ("batch_p2p_ops", _batch_p2p_ops),
        ):
            if hasattr(torch.ops._c10d_functional, name):
                _library.impl(name, kernel, "CPU")


def _group(name_or_group: object) -> Any:
    """Return the process group; ops may get its name, or the object that C++ made of it."""
    if isinstance(name_or_group, str):
        return resolve(name_or_group)
    if isinstance(name_or_group, torch._C.ScriptObject):
        return ProcessGroup.unbox(name_or_group)
    return name_or_group


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: object, *, out: torch.Tensor
) -> torch.Tensor:
    group = _group(group_name)
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    _register_work(out, gather(out, input))
    return out


def _batch_p2p_ops(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: list[torch.Tensor],
    group_name: object,
) -> list[torch.Tensor]:  # complete after wait_tensor; empty for sends
    group, results = _group(group_name), []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op == "isend":
            result, work = tensor.new_empty(0), group.send([tensor], peer, tag)
        else:
            result, work = tensor, group.recv([tensor], peer, tag)
        _register_work(result, work)
        results.append(result)
    return results
