"""The way of a functional call: checks, the way to the tracer, and the way past it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from interlace.arguments import checks, reduce_ops
from interlace.groups.specs import bound
from interlace.ops import undispatched
from interlace.ops.async_tensor import AsyncTensor, wrapped, wrapped_together
from interlace.ops.eager.pending import Started
from interlace.runtime.core.torch_modes import PLAIN_TYPES, modes_active

_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
allow_in_graph: Any = torch._dynamo.allow_in_graph


def traceable(name: str) -> Callable[..., Any]:
    """The op of that name with its result wrapped, as one call that Dynamo leaves to the next tracer."""

    def start(*args: Any) -> Any:
        result = undispatched.call(name, *args)
        if isinstance(result, torch.Tensor):
            return wrapped(result)
        return wrapped_together(result)

    start.__name__ = start.__qualname__ = name
    allow_in_graph(start)
    return start


def traceable_out(name: str) -> Callable[..., Any]:
    """The same for the op's form with ``out``, which comes last."""

    def start(*args: Any) -> Any:
        *own, out = args
        undispatched.call_out(name, *own, out=out)
        return out

    start.__name__ = start.__qualname__ = f"{name}_out"
    allow_in_graph(start)
    return start


def direct(*tensors: Any) -> bool:
    """Whether nobody but the group needs to see this call: no tracer, mode, subclass or gradient."""
    if torch.compiler.is_compiling() or modes_active() or _transforms_active():
        return False
    recording = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.is_meta
            or (recording and tensor.requires_grad)
        ):
            return False
    return True


def refuse(op: str, group: Any, tag: str, error: Exception) -> NoReturn:
    """Raise ``error``; where the op would run now, on all ranks of the group."""
    if not torch.compiler.is_compiling() and not modes_active():
        with bound(group, tag).accepting(op):
            raise error
    raise error


def check(
    op: str, group: Any, tag: str, ints: dict[str, Any] | None = None, **tensors: Any
) -> None:
    """Raise TypeError unless everything is what its name says; ``out`` and ``bias`` may be None."""
    for name, value in tensors.items():
        if value is None and name in ("out", "bias"):
            continue
        if not isinstance(value, torch.Tensor):
            text = f"{name} must be a tensor, got {type(value).__name__}"
            refuse(op, group, tag, TypeError(text))
    for name, value in (ints or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            text = f"{name} must be an int, got {type(value).__name__}"
            refuse(op, group, tag, TypeError(text))


def ints(op: str, group: Any, tag: str, name: str, value: Any) -> list[Any]:
    """A list of ints, whatever sequence it came as; else TypeError."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, (int, torch.SymInt)) and not isinstance(each, bool) for each in value
    ):
        refuse(op, group, tag, TypeError(f"{name} must be a list of ints, got {value!r}"))
    return list(value)


def without_gradient(op: str, *tensors: torch.Tensor) -> None:
    """Raise RuntimeError if one of ``tensors`` requires a gradient, which an op with ``out`` has not."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{op} with out= has no gradient, and one of the tensors requires it")


def started(op: Started) -> AsyncTensor:
    """The first output of ``op``, which waits by itself."""
    return AsyncTensor(op.outputs[0], op.work)


def reduction(
    op: str, group: Any, tag: str, reduce_op: Any, input: torch.Tensor
) -> tuple[str, torch.Tensor]:
    """The reduction's name, and ``input`` multiplied by the factor of a PREMUL_SUM."""
    if isinstance(reduce_op, str) and reduce_op in reduce_ops.OPS and reduce_op != "premul_sum":
        return reduce_op, input
    try:
        name, factor = checks.reduce_op(reduce_op, 0)
    except (TypeError, ValueError):
        text = f"reduce_op must be one of {', '.join(reduce_ops.OPS)}, got {reduce_op!r}"
        refuse(op, group, tag, ValueError(text))
    return (name, input) if factor is None else ("sum", input * factor)
