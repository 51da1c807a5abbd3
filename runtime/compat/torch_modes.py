"""Dispatch modes of torch, plain tensors, profiles, functions as Dynamo takes them, pickles of every dtype.

Tried with torch 2.13.
"""

import functools
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes, without those above autograd."""
above_autograd: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
"""Whether a mode sees ops before autograd does, as in ``make_fx(..., pre_dispatch=True)``."""
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether the caller is in a transform of ``torch.func``."""


def is_traced() -> bool:
    """Whether ``make_fx`` or ``torch.export`` records the present ops."""
    tracer: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def when_profiled(change: Callable[[bool], None]) -> None:
    """Call ``change(True)`` when torch starts to take a profile, ``change(False)`` when it ends."""

    def changed(torchs_own: Callable[[], None], starts: bool) -> None:
        torchs_own()
        change(starts)

    for name, starts in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        setattr(profiler, name, functools.partial(changed, getattr(profiler, name), starts))


def returned_by_traces(kind: type[torch.Tensor], plain: Callable[[Any], torch.Tensor]) -> None:
    """Let the graph of ``make_fx`` and ``torch.export`` return ``plain(tensor)`` for a ``kind``.

    torch's tracer takes a subclass that it knows no node of for a constant: every run of the graph would
    return what tracing computed.
    """
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_slot

    # PythonKeyTracer's own is looked up before the first trace runs what it traces
    stock = torch.fx.Tracer.create_arg

    def create_arg(self: torch.fx.Tracer, value: Any) -> Any:
        if isinstance(value, kind) and isinstance(self, PythonKeyTracer):
            value = plain(value)
            value = get_proxy_slot(value, self, value, lambda slot: slot.proxy)
        return stock(self, value)

    torch.fx.Tracer.create_arg = create_arg  # type: ignore[assignment, method-assign]


# -- what Dynamo does with a function -----------------------------------------------------------------
#
# As torch.compiler's functions of these names say. Those import Dynamo, and with it sympy, Inductor and
# FSDP, which takes longer than all that a process of interlace imports otherwise.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def assume_constant_result(function: _Function) -> _Function:
    """Mark a function that Dynamo calls once, while it traces."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_in_graph(function: _Function) -> _Function:
    """``function``, whose calls Dynamo leaves to the next tracer.

    Dynamo has a list of such functions, and no mark: ``function`` is put there when a call is traced.
    """

    @assume_constant_result
    def allow() -> None:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            allow()
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def disable(function: _Function) -> _Function:
    """Keep Dynamo out of a function in Python and all that it calls.

    ``torch.compiler.disable`` wraps, which costs every call 0.5 us (torch 2.13, Xeon, November 2026); a
    mark on the function itself (not inlined) and on its code (nor compiled when called, nor what it calls)
    costs nothing.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a function of interlace"  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


_TorchDispatchMode: Any = TorchDispatchMode


class DispatchMode(_TorchDispatchMode):  # type: ignore[misc]
    """A mode of which Dynamo keeps out, as of torch's own class, whose first dispatch imports Dynamo."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        disable(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # in torch's words: it wraps nothing


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
