"""Dispatch modes of torch, plain tensors, profiles, marks for Dynamo, pickles, and direct calls of ops.

Tried with torch 2.13. Direct calls are for ops whose code is Python; they do not go through C++.

A normal call of an op goes through pybind11, which keeps the calls of a thread on a stack. Simulated ranks
share a thread. A rank that waits within its op leaves the stack to other ranks, which do not return from
their ops in the order in which they entered them. pybind11 then aborts the process.
"""

import functools
import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.runtime.compat.stand_ins import replacing

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

modes_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes, without those above autograd."""
above_autograd: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
)
"""Return whether a mode sees ops before autograd, as in ``make_fx(..., pre_dispatch=True)``."""
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether the caller is in a transform of ``torch.func``."""


def only_watched() -> bool:
    """Whether dispatch modes are active, and all of them only look at calls, as ``FlopCounterMode`` does.

    Those of torch with a key make other tensors, or a graph.
    """
    if not foreign_modes() or above_autograd():
        return False
    keys = torch._C._TorchDispatchModeKey.__members__.values()
    return all(torch._C._get_dispatch_mode(key) is None for key in keys)


def foreign_modes() -> bool:
    """Return whether a mode is active that is not of interlace's own checks."""
    stack = map(torch._C._get_dispatch_stack_at, range(modes_active()))
    return any(not isinstance(mode, DispatchMode) for mode in stack)


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, no dispatch mode is active, of those that only look at calls."""
    modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(modes_active())]
    of_checks = [mode for mode in reversed(modes) if isinstance(mode, DispatchMode)]
    for mode in of_checks:  # a race check has to see the operators of an op's launch
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in of_checks:
            torch._C._pop_torch_dispatch_stack(None)
        for mode in reversed(modes):
            torch._C._push_on_torch_dispatch_stack(mode)


def is_traced() -> bool:
    """Return whether ``make_fx`` or ``torch.export`` records the present ops."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracer is not None and tracer.get_proxy_mode() is not None


def when_profiled(change: Callable[[bool], None]) -> None:
    """Call ``change(True)`` when torch starts a profile, ``change(False)`` when the profile ends."""

    def changed(torchs_own: Callable[[], None], starts: bool) -> None:
        torchs_own()
        change(starts)

    for name, starts in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        setattr(profiler, name, functools.partial(changed, getattr(profiler, name), starts))


def returned_by_traces(kind: type[torch.Tensor], plain: Callable[[Any], torch.Tensor]) -> None:
    """Make graphs of ``make_fx`` and ``torch.export`` return ``plain(tensor)`` for a ``kind``.

    torch's tracer treats an unknown subclass as a constant: every run of the graph would return the value
    that tracing computed.
    """
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_slot

    # PythonKeyTracer looks up its own method before the first trace runs
    stock = torch.fx.Tracer.create_arg

    def create_arg(self: torch.fx.Tracer, value: object) -> Any:
        if isinstance(value, kind) and isinstance(self, PythonKeyTracer):
            value = plain(value)
            value = get_proxy_slot(value, self, value, lambda slot: slot.proxy)
        return stock(self, value)

    torch.fx.Tracer.create_arg = create_arg  # type: ignore[assignment, method-assign]


# -- marks for Dynamo ----------------------------------------------------------------------------------
#
# They do what torch.compiler's functions of these names do. Those import Dynamo, and with it sympy,
# Inductor and FSDP, which takes longer than all other imports of a process of interlace.

_Function = TypeVar("_Function", bound=Callable[..., Any])


def assume_constant_result(function: _Function) -> _Function:
    """Mark a function that Dynamo calls once, while it traces."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def allow_in_graph(function: _Function) -> _Function:
    """Return ``function``; Dynamo leaves its calls to the next tracer.

    Dynamo has a list of such functions instead of a mark. ``function`` is added when a call is traced.
    """

    @assume_constant_result
    def allow() -> None:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        if torch.compiler.is_dynamo_compiling():
            allow()
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def disable(function: _Function) -> _Function:
    """Keep Dynamo out of a Python function and all functions that it calls.

    ``torch.compiler.disable`` wraps the function, which costs every call 0.5 us (torch 2.13, Xeon, November
    2026). A mark on the function itself (not inlined) and on its code (neither compiled when called, nor
    what it calls) costs nothing.
    """
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a function of interlace"  # type: ignore[attr-defined]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


_TorchDispatchMode: Any = TorchDispatchMode


class DispatchMode(_TorchDispatchMode):  # type: ignore[misc]
    """A mode that Dynamo ignores. The first dispatch of torch's own class imports Dynamo."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        disable(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's term: the mode wraps nothing


_known: Any = torch.storage._dtype_to_storage_type_map
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if type(value) is torch.Tensor and value.dtype not in _known():
            bits = _BITS.get(value.dtype.itemsize)
            if bits is not None and value.layout is torch.strided:
                return torch.Tensor.view, (value.detach().view(bits), value.dtype)
        return NotImplemented


def pickle_tensors(value: object) -> bytes:
    """Return ``pickle.dumps(value)`` in a form from which torch can also load fp8 and uint16."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


_C: Any = torch._C
_ops: Any = torch._ops
_DEVICES = ("cuda", "cpu", None)  # torch.library.custom_op; None: all devices
_KEYS = ("CUDA", "CPU", "CompositeExplicitAutograd")  # torch.library.Library

_of_libraries: defaultdict[str, dict[str, object]] = defaultdict(dict)


@contextmanager
def of_libraries() -> Iterator[None]:
    """Within the block, remember the functions that are registered with a ``torch.library.Library``."""
    stock: Any = torch.library.Library.impl

    @functools.wraps(stock)
    def impl(library: Any, op_name: Any, fn: object, dispatch_key: str = "", **how: object) -> None:
        stock(library, op_name, fn, dispatch_key, **how)
        name = op_name if isinstance(op_name, str) else op_name.name()
        name = name if "::" in name else f"{library.ns}::{name}"
        _of_libraries[name][dispatch_key or library.dispatch_key] = fn

    with replacing((torch.library.Library, "impl", impl)):
        yield


@contextmanager
def called_directly(when: Callable[[], bool]) -> Iterator[None]:
    """Within the block, call the op's Python function directly, with its autograd, if ``when()``."""
    from torch._library.custom_ops import OPDEFS  # rarely needed

    @functools.cache
    def direct_of(op: object, name: str) -> Callable[..., object] | None:
        if name.startswith("prims::"):  # torch's own: their code on meta tensors calls them again
            return None
        known = OPDEFS.get(name) or _of_libraries.get(name)
        return _direct(getattr(op, "default", op), known) if known else None

    def calling(stock: Callable[..., Any], name: Callable[[object], str]) -> Callable[..., object]:
        def call(op: Any, /, *args: object, **kwargs: object) -> Any:
            direct = direct_of(op, name(op)) if when() else None
            schema = getattr(op, "default", op)._schema
            if (
                direct is None
                or (arguments := _by_position(schema, args, named := dict(kwargs))) is None
            ):
                return stock(op, *args, **kwargs)
            return direct(*arguments, **named)

        return call

    names = (
        (_ops.OpOverload, lambda op: op._name),
        (_ops.OpOverloadPacket, lambda op: op._qualified_op_name),
    )
    with replacing(*((kind, "__call__", calling(kind.__call__, name)) for kind, name in names)):
        yield


def _by_position(schema: Any, args: Any, named: dict[str, object]) -> list[Any] | None:
    """Return all arguments by position; leave keyword-only ones in ``named``. None if one is missing."""
    found = list(args)
    for argument in [each for each in schema.arguments if not each.kwarg_only][len(args) :]:
        if argument.name not in named and not argument.has_default_value():
            return None
        found.append(named.pop(argument.name, argument.default_value))
    return found


def _direct(op: object, known: Any) -> Callable[..., object] | None:
    """Return the function as torch calls it after dispatch: with the registered autograd, if any."""
    from torch._library.autograd import Info, make_autograd_impl

    if isinstance(known, dict):
        if any("Autograd" in key and "Composite" not in key for key in known):
            return None
        codes, info = [known.get(key) for key in _KEYS], Info(None, None)
    else:
        codes, info = [known._backend_fns.get(each) for each in _DEVICES], known
    code = next(filter(None, codes), None)
    if code is None:
        return None
    names = ("_namespace", "_opname", "_overloadname", "_schema", "tags")
    stand_in: Any = SimpleNamespace(**{name: getattr(op, name) for name in names})
    stand_in.redispatch = lambda keys, *args, **kwargs: code(*args, **kwargs)
    keys = _C.DispatchKeySet(_C.DispatchKey.CPU)
    return functools.partial(make_autograd_impl(stand_in, info), keys)
