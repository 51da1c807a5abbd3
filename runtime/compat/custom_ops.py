"""Ops whose code is Python, called without C++. Tried with torch 2.13.

A call of an op goes through pybind11, which keeps the calls of a thread on a stack. Simulated ranks share
a thread: one that waits within its op leaves the stack to the others, who do not come back from theirs in
the order in which they went in, and pybind11 ends the process.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from interlace.runtime.compat.stand_ins import replaced

_C: Any = torch._C
_ops: Any = torch._ops
_DEVICES = ("cuda", "cpu", None)  # of torch.library.custom_op; None: of all
_KEYS = ("CUDA", "CPU", "CompositeExplicitAutograd")  # of torch.library.Library

_of_libraries: defaultdict[str, dict[str, Any]] = defaultdict(dict)


@contextmanager
def of_libraries() -> Iterator[None]:
    """Within, functions that a ``torch.library.Library`` is given for its ops are remembered."""
    stock: Any = torch.library.Library.impl

    @functools.wraps(stock)
    def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> None:
        stock(library, op_name, fn, dispatch_key, **how)
        name = op_name if isinstance(op_name, str) else op_name.name()
        name = name if "::" in name else f"{library.ns}::{name}"
        _of_libraries[name][dispatch_key or library.dispatch_key] = fn

    with replaced((torch.library.Library, "impl", impl)):
        yield


@contextmanager
def called_directly(when: Callable[[], bool]) -> Iterator[None]:
    """Within, a call of such an op is a call of its function, with its autograd, if ``when()``."""
    from torch._library.custom_ops import OPDEFS  # few need it

    @functools.cache
    def direct_of(op: Any, name: str) -> Callable[..., Any] | None:
        if name.startswith("prims::"):  # of torch: their code on meta tensors calls them again
            return None
        known = OPDEFS.get(name) or _of_libraries.get(name)
        return _direct(getattr(op, "default", op), known) if known else None

    def calling(stock: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
        def call(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            direct = direct_of(op, name(op)) if when() else None
            schema = getattr(op, "default", op)._schema
            if direct is None or (given := _given(schema, args, named := dict(kwargs))) is None:
                return stock(op, *args, **kwargs)
            return direct(*given, **named)

        return call

    names = (
        (_ops.OpOverload, lambda op: op._name),
        (_ops.OpOverloadPacket, lambda op: op._qualified_op_name),
    )
    with replaced(*((kind, "__call__", calling(kind.__call__, name)) for kind, name in names)):
        yield


def _given(schema: Any, args: Any, named: dict[str, Any]) -> list[Any] | None:
    """All arguments by position, in ``named`` left those by keyword only; None if one is missing."""
    found = list(args)
    for argument in [each for each in schema.arguments if not each.kwarg_only][len(args) :]:
        if argument.name not in named and not argument.has_default_value():
            return None
        found.append(named.pop(argument.name, argument.default_value))
    return found


def _direct(op: Any, known: Any) -> Callable[..., Any] | None:
    """As torch calls it behind its dispatcher: with the autograd that was registered, or with none."""
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
    return functools.partial(
        make_autograd_impl(stand_in, info), _C.DispatchKeySet(_C.DispatchKey.CPU)
    )
