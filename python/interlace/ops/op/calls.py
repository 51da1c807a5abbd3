"""The steps of a functional call: checks, then a start past torch's dispatcher, or a node in the graph.

This file starts calls that only the group needs to see; ``recording.py`` starts the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from interlace.arguments import checks, words
from interlace.arguments.words import FunctionalGroup
from interlace.groups.specs import GroupSpec, bound, describe, rank_in
from interlace.ops.op.async_tensor import AsyncTensor, wrap
from interlace.ops.op.op import Op, Started, tensors
from interlace.ops.op.recording import call, call_out, is_seen
from interlace.runtime.compat.torch_modes import above_autograd, allow_in_graph, modes_active

NONE = ("out", "bias", "topk_weights", "residual", "weight of norm", "bias of norm")
"""Arguments that may be None."""


def _traceable(name: str) -> Callable[..., Any]:
    """Return the op of that name with wrapped results. Dynamo leaves its call to the next tracer."""

    def start(*args: Any, out: torch.Tensor | None = None) -> Any:
        if out is not None:
            call_out(name, *args, out=out)
            return out
        result = call(name, *args)
        if isinstance(result, torch.Tensor):
            return wrap(result)
        return [wrap(each) for each in result]

    start.__name__ = start.__qualname__ = name
    return allow_in_graph(start)


class _FunctionalOp(NamedTuple):
    """An op for :func:`run`. ``operands``: positions of arguments that are tensors or lists of them."""

    op: Op
    traceable: Callable[..., Any]
    operands: dict[str, int]
    fields: tuple[str, ...]


_known: dict[str, _FunctionalOp] = {}


def define(op: Op) -> None:
    """Make the op known to :func:`run`; ``library.py`` calls this."""
    fields = tuple(op.kinds)
    operands = {name: fields.index(name) for name in fields if op.kinds[name].startswith("Tensor")}
    _known[op.name] = _FunctionalOp(op, _traceable(op.name), operands, fields)


def run(
    op: str, group: FunctionalGroup, tag: str, *args: Any, out: torch.Tensor | None = None
) -> Any:
    """Start ``op`` or add a node to the graph; return its result, or the list of its results."""
    known, output = _known[op], {} if out is None else {"out": out}
    if direct(tensors([out, *[args[at] for at in known.operands.values()]])):
        return _results(known.op, known.op.begin(bound(group, tag), args, **output))
    name, size = describe(group, tag)
    if out is not None and torch.is_grad_enabled() and (args[0].requires_grad or out.requires_grad):
        text = f"{op} with out= has no gradient, but a tensor requires one; pass no out"
        refuse(op, group, tag, RuntimeError(text))
    return known.traceable(*args, size, name, **output)


def run_record(op: str, group: FunctionalGroup, tag: str, record: Any) -> Any:
    known = _known[op]
    if direct(tensors([getattr(record, name) for name in known.operands])):
        return _results(known.op, known.op.start(bound(group, tag), record))
    name, size = describe(group, tag)
    return known.traceable(*[getattr(record, field) for field in known.fields], size, name)


def _results(op: Op, started: Started) -> Any:
    results = [AsyncTensor(output, started.work) for output in started.outputs]
    return results if op.several else results[0]


def keeps(asked: bool, weights: Sequence[Any]) -> bool:
    """Return whether an op returns its gathered input: if ``asked``, or for a backward (not in exports)."""
    wanted = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return asked or (wanted and not torch.compiler.is_exporting())


def _has_modes() -> bool:
    return bool(modes_active()) or above_autograd()


def direct(operands: Sequence[torch.Tensor]) -> bool:
    """Return whether only the group needs to see this call: no tracer, mode, subclass or gradient."""
    if is_seen(operands) or AsyncTensor in map(type, operands):
        return False
    return not (torch.is_grad_enabled() and any([operand.requires_grad for operand in operands]))


def own_length(
    group: FunctionalGroup, tag: str, input: torch.Tensor, weight: torch.Tensor, scatter_dim: Any
) -> Any:
    """Return the length of the caller's part of ``input @ weight``, or None if all parts are equal.

    Also return None if the caller's rank is not known yet. An export is for all ranks and has equal parts.
    """
    shape = (*input.shape[:-1], *weight.shape[-1:])
    if not -len(shape) <= scatter_dim < len(shape) or torch.compiler.is_exporting():
        return None  # an error, or equal parts
    length, (name, size) = shape[scatter_dim], describe(group, tag)
    if (isinstance(group, GroupSpec) and group.size is None) or not length % size:
        return None
    rank, longest = rank_in(name, size), (length + size - 1) // size
    if rank is None:
        return None
    least: Any = torch.sym_min  # the length may be symbolic
    return least(longest, length - least(length, rank * longest))


def name_of(reduce_op: Any) -> str:
    """Return the name of a reduction. The fused ops' kernels check whether they support it."""
    return reduce_op if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1].lower()


def refuse(op: str, group: FunctionalGroup, tag: str, error: Exception) -> NoReturn:
    """Raise ``error``; if the op would run now, on all ranks of the group."""
    if not torch.compiler.is_compiling() and not _has_modes():
        with bound(group, tag).accepting(op):
            raise error
    raise error


def flag(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(op, group, tag, TypeError(f"{name} must be a bool, got {value!r}"))


def number(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> None:
    """Raise TypeError for a bool, which a schema accepts as a number."""
    if isinstance(value, bool):
        refuse(op, group, tag, TypeError(f"{name} must be a number or None, got {value!r}"))


def check(
    op: str, group: FunctionalGroup, tag: str, ints: dict[str, Any] | None = None, **tensors: Any
) -> None:
    """Raise TypeError unless the ``tensors`` are tensors (some may be None), and ``ints`` are ints."""
    record = {name: each for name, each in tensors.items() if each is not None or name not in NONE}
    known = not torch.compiler.is_compiling() and not _has_modes()
    for name, value in record.items():
        if not isinstance(value, torch.Tensor):
            text = f"{name} must be a tensor, got {checks.describe(value)}"
            refuse(op, group, tag, TypeError(text))
        if known:  # in a backward, Dynamo cannot read the layout
            try:
                checks.check_layout(name, value)
            except TypeError as error:
                refuse(op, group, tag, error)
    if known:
        on_meta = [name for name, value in record.items() if value.is_meta]
        if on_meta and len(on_meta) < len(record):  # torch would run nothing
            text = f"{on_meta[0]} is on meta, but other tensors are not: use one device for all"
            refuse(op, group, tag, TypeError(text))
    for name, value in (ints or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            text = f"{name} must be an int, got {type(value).__name__}"
            refuse(op, group, tag, TypeError(text))


def ints(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, (int, torch.SymInt)) and not isinstance(each, bool) for each in value
    ):
        refuse(op, group, tag, TypeError(f"{name} must be a list of ints, got {value!r}"))
    return list(value)


def reduction(
    op: str, group: FunctionalGroup, tag: str, reduce_op: Any, input: torch.Tensor
) -> tuple[str, torch.Tensor]:
    """Return the reduction's name, and ``input`` multiplied by the factor of a PREMUL_SUM."""
    if isinstance(reduce_op, str) and reduce_op in words.OPS and reduce_op != "premul_sum":
        return reduce_op, input
    try:
        name, factor = checks.reduce_op(reduce_op)
    except (TypeError, ValueError):
        text = f"reduce_op must be one of {', '.join(words.OPS)}, got {reduce_op!r}"
        refuse(op, group, tag, ValueError(text))
    return (name, input) if factor is None else ("sum", input * factor)
