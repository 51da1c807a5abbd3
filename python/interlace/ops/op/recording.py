"""Calls of ops that autograd records: the op is started or run first, then one node records it.

The node is Python (:class:`_RecordedOp`), with the op's gradient by name. Nothing of the call is below
torch's dispatcher. So simulated ranks, which share one stack of C++ frames, may wait for each other here.

Under a tracer, a mode, a transform or a subclass of tensors, calls of ops must be visible to it, and go
through the dispatcher. Then the op runs in a kernel of ``torch.ops.interlace``, and
``torch.library.register_autograd`` records it with the same two functions. Both backwards call ops by
:class:`Ops`, so they have gradients themselves.

All ranks' tensors must require the same gradients. Ranks compare this when the op runs.
"""

import contextlib
import functools
import itertools
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.groups import groups, specs
from interlace.ops.op.async_tensor import AsyncTensor, wait
from interlace.ops.op.op import (
    OPS,
    Op,
    Started,
    finish,
    names_of_tensors,
    register,
    tensors,
    wait as wait_tensor,
)
from interlace.ops.op.torch_library import completing, register as register_with_torch
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    above_autograd,
    disable,
    foreign_modes,
    modes_active,
    only_watched,
    transforms_active,
    without_modes,
)
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing
from interlace.runtime.core.work import Work

_dispatched: Any = torch.ops.interlace


class Ops:
    """The ops as attributes, as in ``torch.ops.interlace``, for code that uses ops by name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(call, name)


def call(name: str, *args: Any) -> Any:
    """Call ``torch.ops.interlace.<name>(*args)``. Last are a group's size and its name, or the group."""
    *values, size, group = args
    op: Op = OPS[name]
    _check_types(op, values, size, group)
    given = op.record(values)
    with needing(op.needs(vars(given))):
        if is_seen(op.tensors_of(given)):
            return _through(name, name, args)
        if foreign_modes():
            with without_modes():
                return call(name, *args)
        communicator = _bound(group, size)
        given = _prepare(op, communicator, given)
        with torch.no_grad():
            started = op.start(communicator, given)
        try:
            outputs = record(op, communicator, given, started.outputs)
        except BaseException:  # a recomputing checkpoint stops when it has all it needs
            finish(started)
            raise
        register(started, communicator)
    return outputs if op.several else outputs[0]


def start_unrecorded(name: str, *args: Any) -> Started:
    """Start an op on a communicator, in a backward that has no gradient; :func:`finish` waits for it."""
    *own, _, communicator = args
    return OPS[name].begin(communicator, own)  # type: ignore[no-any-return]


def call_out(name: str, *args: Any, out: torch.Tensor) -> None:
    """Call ``torch.ops.interlace.<name>_out(*args, out=out)``, without recording a gradient."""
    *values, size, group = args
    _check_types(OPS[name], values, size, group)
    if is_seen(tensors([*values, out])):
        _through(name, f"{name}_out", args, out=out)
        return
    plain = tree_map_only(torch.Tensor, wait, values)
    finish(OPS[name].begin(specs.bind(group, size), plain, out=wait(out)))


_TYPES: dict[str, tuple[str, Any]] = {
    "Tensor": ("a tensor", torch.Tensor),
    "str": ("a str", str),
    "bool": ("a bool", bool),
    "float": ("a number", (numbers.Real, torch.SymFloat)),
    "int": ("an int", (numbers.Integral, torch.SymInt)),
    "SymInt": ("an int", (numbers.Integral, torch.SymInt)),
    "ScalarType": ("a torch.dtype", torch.dtype),
}


def _through(name: str, overload: str, args: tuple[Any, ...], **out: torch.Tensor) -> Any:
    *values, size, group = args
    if isinstance(group, Communicator):
        group, size = specs.describe(group)
    register_with_torch(OPS[name])
    with completing() if only_watched() else contextlib.nullcontext():
        return getattr(_dispatched, overload).default(*values, size, group, **out)


def _bound(group: Communicator | str, size: int) -> Communicator:
    return group if isinstance(group, Communicator) else specs.bind(group, size)


def _check_types(op: Op, values: Sequence[Any], size: Any, group: Any) -> None:
    """Raise on all ranks, before anything runs, for an argument that does not fit the schema."""
    for (name, kind), value in zip(op.kinds.items(), values, strict=True):
        words, fits = _ACCEPTED[kind]
        if not fits(value):
            error = TypeError(f"{name} must be {words}, got {type(value).__name__}")
            if not (torch.compiler.is_compiling() or modes_active()):
                _bound(group, size).refuse(op.name, error)
            raise error


def _accepted_values(kind: str) -> tuple[str, Callable[[Any], bool]]:
    """Return the values of a schema type in words, and a test for such values."""
    if kind.endswith("?"):
        words, fits = _accepted_values(kind[:-1])
        return f"{words} or None", lambda value: value is None or fits(value)
    if kind.endswith("[]"):
        words, fits = _accepted_values(kind[:-2])
        return (
            f"a list, each {words}",
            lambda value: isinstance(value, (list, tuple)) and all(map(fits, value)),
        )
    words, types = _TYPES[kind]
    return words, lambda value: isinstance(value, types)


# A table, because Dynamo warns of a cached function in a backward that it traces.
_ACCEPTED = {
    f"{kind}{suffix}": _accepted_values(f"{kind}{suffix}")
    for kind, suffix in itertools.product(_TYPES, ("", "?", "[]", "?[]", "[]?"))
}


def is_seen(operands: Sequence[torch.Tensor]) -> bool:
    """Return whether a tracer, a mode, a transform or a subclass looks at a call with these tensors."""
    if torch.compiler.is_compiling() or above_autograd():
        return True
    if modes_active() and not (only_watched() and _simulated_rank()):
        return True
    if transforms_active():
        if rank := _simulated_rank():
            raise NotImplementedError(
                f"rank {rank.rank}: interlace.functional in a transform of torch.func (vmap, grad, jvp) is "
                f"not supported; use autograd, outside of the transform"
            )
        return True
    for operand in operands:
        kind = type(operand)
        if kind not in PLAIN_TYPES and kind is not AsyncTensor and not _is_parameter(kind):
            return True
    return bool(operands) and all([operand.is_meta for operand in operands])


def _simulated_rank() -> Communicator | None:
    """Return the rank that runs here if this thread simulates several: they cannot wait in C++ frames."""
    rank = groups.joined_group()
    return rank if rank and rank.place.simulated and rank.world_size > 1 else None


@functools.cache
def _is_parameter(kind: type) -> bool:
    """Return whether ``kind`` is a class of parameters that does not intercept calls."""
    plain: Any = torch.nn.Parameter
    return issubclass(kind, plain) and all(
        getattr(kind, name) == getattr(plain, name)
        for name in ("__torch_function__", "__torch_dispatch__")
    )


def _prepare(op: Op, communicator: Communicator, record: Any) -> Any:
    """Return a record with complete plain tensors, before its op runs."""
    operands = op.tensors_of(record)
    communicator.check_recordable(operands)
    if not any([type(operand) is AsyncTensor for operand in operands]):
        return record
    named = {name: getattr(record, name) for name in names_of_tensors(op.arguments)}
    return replace(record, **tree_map_only(torch.Tensor, wait, named))


def record(
    op: Op, communicator: Communicator, record: Any, outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    # new versions: later writes of the op must not count as changes of tensors that autograd saves
    outputs = [output.data for output in outputs]
    if torch.is_grad_enabled() and op.gradient is not None:
        operands = op.tensors_of(record)
        if any([operand.requires_grad for operand in operands]):
            return list(_RecordedOp.apply(op, communicator, record, outputs, *operands))  # type: ignore[no-untyped-call]
    return outputs


class _RecordedOp(torch.autograd.Function):
    """An autograd function of an op, its group, the record, the op's results and the record's tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        op: Op,
        communicator: Communicator,
        record: Any,
        outputs: Sequence[torch.Tensor],
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        assert op.gradient is not None
        ctx.op, ctx.size, ctx.name = op, communicator.world_size, communicator
        op.gradient.save(ctx, record, outputs if op.several else outputs[0])
        ctx.changed = False
        ctx.places = [*_places(record)]  # keeps no tensor alive
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if ctx.changed:
            with ctx.name.accepting(ctx.op.name):
                raise RuntimeError(
                    "a tensor needed for gradient computation has been modified by an inplace operation "
                    "between the call and wait()"
                )
        found = ctx.op.gradient.backward(ctx, grads if ctx.op.several else grads[0])
        of_tensors = []
        for name, index in ctx.places:
            grad = found.get(name)
            if index is not None and grad is not None:
                grad = grad[index]
            of_tensors.append(grad)
        return None, None, None, None, *of_tensors


def _places(record: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the places of a record's tensors, in order: the field, and the index in a list."""
    for name in names_of_tensors(record.__class__):
        value = getattr(record, name)
        if isinstance(value, torch.Tensor):
            yield name, None
        elif value is not None:
            for index, each in enumerate(value):
                if each is not None:
                    yield name, index


def _as_they_are(record: Any, results: Any) -> tuple[Any, Any]:
    return record, results


@disable
def run_recorded(
    op: Op,
    communicator: Communicator,
    given: Any,
    run: Callable[..., Any],
    finish: Callable[[list[torch.Tensor], Any], Any],
    async_op: bool,
    *,
    results: Callable[[Any, Any], tuple[Any, Any]] = _as_they_are,
    look: Callable[[Sequence[torch.Tensor]], bool] | None = is_seen,
    differs: bool = False,
) -> Any:
    """Make an eager call, record it, and return ``finish`` of its results, or a Work for that.

    ``run(given, async_op)`` makes the call. ``results`` converts the arguments and the call's results to
    those in torch's op. If ``look`` says that the call must be visible, it goes through the dispatcher, and
    ``results`` gets None. Without ``look`` no call must be visible.

    Ranks agree on the tensors that require a gradient: another rank's backward would wait for this one.
    Tensors whose gradients need no communication, such as a bias, are not compared. But if the call
    ``differs`` from a call without any gradient, ranks compare whether there is one.
    """
    if look is not None and look(op.tensors_of(given)):
        given, _ = results(given, None)
        values = [getattr(given, name) for name in op.kinds]
        result = call(op.name, *values, communicator.world_size, communicator)
        outputs = [wait_tensor(each) for each in (result if op.several else [result])]
        done = Work(op.name, communicator.place, None)
        work = ContinuedWork(done, lambda _: finish(outputs, None))
        return work if async_op else work.wait()
    if modes_active() and only_watched():
        with without_modes():
            return run_recorded(
                op, communicator, given, run, finish, async_op,
                results=results, look=look, differs=differs,
            )  # fmt: skip
    given = _prepare(op, communicator, given)

    def then(result: Any) -> Any:
        return finish(record(op, communicator, *results(given, result)), result)

    started = _sequence_number() if async_op else 0
    versions = [each._version for each in op.tensors_of(given)] if async_op else []

    def later(result: Any) -> Any:
        before = _sequence_number()
        changed = versions != [each._version for each in op.tensors_of(given)]
        found = then(result)
        _number_as_started(found, before, started, changed=changed)
        return found

    with needing(op.needs(vars(given)) or ("another tensor" if differs else "")):
        result = run(given, async_op=async_op)
    return ContinuedWork(result, later) if async_op else then(result)


def _sequence_number() -> int:
    """Return the number that autograd gives a node now. Backward runs nodes with higher numbers first."""
    node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return node._sequence_nr()  # type: ignore[no-any-return]


def _number_as_started(found: Any, before: int, started: int, *, changed: bool) -> None:
    """Give the nodes of an asynchronous call the number of its start, and the flag ``changed``.

    ``wait()`` makes the nodes, and ranks call it in any order, but their backwards must run in one order.
    ``before`` is a number from before they were made.
    """
    nodes = [leaf.grad_fn for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    while nodes:
        node: Any = nodes.pop()
        is_new = node is not None and before < node._sequence_nr()
        if not is_new or type(node).__name__ == "AccumulateGrad":
            continue
        node._set_sequence_nr(started)
        if isinstance(node, _RecordedOp._backward_cls):
            vars(node)["changed"] = changed
        else:
            nodes += [each for each, _ in node.next_functions]


class ContinuedWork(Work):
    """The handle of an eager call whose result is computed from an op's result: ``then`` is called once."""

    def __init__(self, work: Work, then: Callable[[Any], Any]) -> None:
        super().__init__(work._op, work._place, work._outcome)
        self._number = work._number
        self._work, self._then, self._recording = work, then, torch.is_grad_enabled()
        self._results: list[Any] = []

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """Return the complete result. Raise the op's error."""
        return self._results[0] if self._results else self._finish(self._work.wait(timeout))

    def _finish(self, result: Any) -> Any:
        if not self._results:
            with torch.set_grad_enabled(self._recording):
                self._results.append(self._then(result))
        return self._results[0]

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future().then(lambda done: self._finish(done.value()))
