"""The way of a functional call: checks, then past torch's dispatcher, through it, or on simulated ranks.

Simulated ranks share one stack of C++ frames, which must end in the order in which they began. One that
waited for others below the dispatcher would leave its frames under theirs. So there an op runs first, to
its end, and one node of autograd, in Python, records it: its backward is what the dispatcher would have
been given, and ``sim_backward.py`` lets it wait.

=========  =========================================  =================================================
           through the dispatcher                     on simulated ranks
=========  =========================================  =================================================
runs       in a kernel of ``torch.ops.interlace``     here, before it is recorded
recorded   by ``torch.library.register_autograd``     by :class:`_RecordedOp`, with the same two functions
backward   calls ops of this module                   the same, so it has a gradient itself
seen by    compilers and modes                        nobody; under one of them the dispatcher is taken
=========  =========================================  =================================================

Eager calls whose gradients are recorded: they start as in ``interlace.functional``, which records them.

All ranks' tensors must require gradients alike: it is in what ranks agree on before they start.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from interlace.arguments import checks, words
from interlace.arguments.words import FunctionalGroup
from interlace.groups import groups, specs
from interlace.groups.specs import GroupSpec, bound, describe, rank_in
from interlace.ops.op import op as registry
from interlace.ops.op.async_tensor import AsyncTensor, wait, wrapped
from interlace.ops.op.op import FACES, OPS, Op, finish, tensors, watched
from interlace.ops.op.sim_backward import prepare
from interlace.runtime.compat.torch_groups import Work as TorchWork
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    above_autograd,
    allow_in_graph,
    modes_active,
    transforms_active,
)
from interlace.runtime.core.call import Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing
from interlace.runtime.core.stream import Outcome

NONE = ("out", "bias", "topk_weights", "residual", "weight of norm", "bias of norm")
"""Arguments that may be None."""


def _traceable(name: str) -> Callable[..., Any]:
    """The op of that name with its result wrapped, as one call that Dynamo leaves to the next tracer."""

    def start(*args: Any, out: torch.Tensor | None = None) -> Any:
        if out is not None:
            call_out(name, *args, out=out)
            return out
        result = call(name, *args)
        if isinstance(result, torch.Tensor):
            return wrapped(result)
        return [wrapped(each) for each in result]

    start.__name__ = start.__qualname__ = name
    return allow_in_graph(start)


_traced: dict[str, Callable[..., Any]] = {}
_fields: dict[str, tuple[str, ...]] = {}  # those of its record that an op takes, in their order


def define(ops: Mapping[str, Op]) -> None:
    """Let :func:`run` know of these ops; ``library.py`` does."""
    _traced.update({name: _traceable(name) for name in ops})
    _fields.update({name: tuple(op.kinds) for name, op in ops.items()})


def run(
    op: str,
    group: FunctionalGroup,
    tag: str,
    *args: Any,
    tensors: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Start ``op``, or leave a node in the graph. The first ``tensors`` of its arguments are such."""
    made: torch.Tensor
    how = {} if out is None else {"out": out}
    if direct(*args[:tensors], out):
        started = OPS[op].begin(bound(group, tag), args, **how)
        return AsyncTensor(started.outputs[0], started.work)
    name, size = describe(group, tag)
    if out is not None and torch.is_grad_enabled() and (args[0].requires_grad or out.requires_grad):
        raise RuntimeError(f"{op} with out= has no gradient, and one of the tensors requires it")
    made = _traced[op](*args, size, name, **how)
    return made


def run_to_list(
    op: str, group: FunctionalGroup, tag: str, tensors: Sequence[Any], *args: Any
) -> list[Any]:
    """Run an op that returns a list, as :func:`run` does; ``tensors`` are all those in its arguments."""
    if direct(*tensors):
        started = OPS[op].begin(bound(group, tag), args)
        return [AsyncTensor(each, started.work) for each in started.outputs]
    name, size = describe(group, tag)
    return list(_traced[op](*args, size, name))


def run_record(
    op: str, group: FunctionalGroup, tag: str, tensors: Sequence[Any], given: Any
) -> list[Any]:
    """Run an op on the record of its arguments, as :func:`run` does; all its results."""
    if direct(*tensors):
        started = OPS[op].start(bound(group, tag), given)
        return [AsyncTensor(each, started.work) for each in started.outputs]
    name, size = describe(group, tag)
    made = _traced[op](*[getattr(given, field) for field in _fields[op]], size, name)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def keeps(asked: bool, weights: Sequence[Any]) -> bool:
    """Whether an op returns what it gathers: ``asked``, or for a backward, which an export has not."""
    wanted = torch.is_grad_enabled() and any(each.requires_grad for each in weights)
    return asked or (wanted and not torch.compiler.is_exporting())


def _has_modes() -> bool:
    return bool(modes_active()) or above_autograd()


def direct(*tensors: Any) -> bool:
    """Whether nobody but the group needs to see this call: no tracer, mode, subclass or gradient."""
    if torch.compiler.is_compiling() or _has_modes() or transforms_active():
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


def own_length(
    group: FunctionalGroup, tag: str, input: torch.Tensor, weight: torch.Tensor, scatter_dim: Any
) -> Any:
    """How long the caller's part of ``input @ weight`` is; None if all are equally long.

    And where nobody knows yet who the caller is; what is exported is for all ranks, and has equal parts.
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
    least: Any = torch.sym_min  # of a length that may be symbolic
    return least(longest, length - least(length, rank * longest))


def name_of(reduce_op: Any) -> str:
    """For the fused ops, whose kernels refuse what they cannot do."""
    return reduce_op if isinstance(reduce_op, str) else str(reduce_op).rsplit(".", 1)[-1].lower()


def refuse(op: str, group: FunctionalGroup, tag: str, error: Exception) -> NoReturn:
    """Raise ``error``; where the op would run now, on all ranks of the group."""
    if not torch.compiler.is_compiling() and not _has_modes():
        with bound(group, tag).accepting(op):
            raise error
    raise error


def flag(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        refuse(op, group, tag, TypeError(f"{name} must be a bool, got {value!r}"))


def number(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> None:
    """Raise TypeError for a bool, which a schema takes for a number."""
    if isinstance(value, bool):
        refuse(op, group, tag, TypeError(f"{name} must be a number or None, got {value!r}"))


def check(
    op: str, group: FunctionalGroup, tag: str, ints: dict[str, Any] | None = None, **tensors: Any
) -> None:
    """Raise TypeError unless everything is what its name says, or None where it may."""
    given = {name: each for name, each in tensors.items() if each is not None or name not in NONE}
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            text = f"{name} must be a tensor, got {type(value).__name__}"
            refuse(op, group, tag, TypeError(text))
    if not torch.compiler.is_compiling() and not _has_modes():
        for name, value in given.items():  # in a backward, Dynamo would not have the layout read
            if value.layout is not torch.strided:
                text = f"{name} must be a strided tensor, got {value.layout}"
                refuse(op, group, tag, TypeError(text))
        on_meta = [name for name, value in given.items() if value.is_meta]
        if on_meta and len(on_meta) < len(given):  # torch would run nothing
            text = f"{on_meta[0]} is on meta, and others are not"
            refuse(op, group, tag, TypeError(text))
    for name, value in (ints or {}).items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            text = f"{name} must be an int, got {type(value).__name__}"
            refuse(op, group, tag, TypeError(text))


def ints(op: str, group: FunctionalGroup, tag: str, name: str, value: Any) -> list[Any]:
    """A list of ints, whatever sequence it came as; else TypeError."""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, (int, torch.SymInt)) and not isinstance(each, bool) for each in value
    ):
        refuse(op, group, tag, TypeError(f"{name} must be a list of ints, got {value!r}"))
    return list(value)


def reduction(
    op: str, group: FunctionalGroup, tag: str, reduce_op: Any, input: torch.Tensor
) -> tuple[str, torch.Tensor]:
    """The reduction's name, and ``input`` multiplied by the factor of a PREMUL_SUM."""
    if isinstance(reduce_op, str) and reduce_op in words.OPS and reduce_op != "premul_sum":
        return reduce_op, input
    try:
        name, factor = checks.reduce_op(reduce_op)
    except (TypeError, ValueError):
        text = f"reduce_op must be one of {', '.join(words.OPS)}, got {reduce_op!r}"
        refuse(op, group, tag, ValueError(text))
    return (name, input) if factor is None else ("sum", input * factor)


# -- through the dispatcher, and on simulated ranks without it -------------------------------------

_dispatched: Any = torch.ops.interlace

_TENSOR = object()  # in place of one, where only its position matters


def call(name: str, *args: Any) -> Any:
    """``torch.ops.interlace.<name>(*args)``, the last two being the size and the name of a group."""
    *own, size, group = args
    op = OPS[name]
    with needing(op.needs(dict(zip(op.kinds, own, strict=True)))):
        if not _simulated(own):
            return _through(name, name, args)
        return _run_simulated(op, specs.bind(group, size), own, size, group)


FACES["call"] = call


def call_out(name: str, *args: Any, out: torch.Tensor) -> None:
    """``torch.ops.interlace.<name>_out(*args, out=out)``, which records nothing."""
    *own, size, group = args
    if not _simulated([*own, out]):
        _through(name, f"{name}_out", args, out=out)
        return
    plain = tree_map_only(torch.Tensor, wait, own)
    finish(OPS[name].begin(specs.bind(group, size), plain, out=wait(out)))


_WRONG_TYPE = re.compile(r"interlace::\w+\(\) Expected .* for argument '(\w+)' .* type '(.*?)'")
_WORDS = {
    "Tensor": "a tensor", "str": "a str", "bool": "a bool", "float": "a number", "int": "an int",
    "SymInt": "an int", "ScalarType": "a torch.dtype",
}  # fmt: skip


def _through(name: str, overload: str, args: tuple[Any, ...], **out: torch.Tensor) -> Any:
    """Through the dispatcher. What a schema does not take, before anything runs, all ranks refuse."""
    try:
        return getattr(_dispatched, overload).default(*args, **out)
    except RuntimeError as error:
        wrong = _WRONG_TYPE.match(str(error))
        kinds = OPS[name].kinds
        if wrong is None or wrong[1] not in kinds:
            raise
        text = f"{wrong[1]} must be {_in_words(kinds[wrong[1]])}, got {wrong[2]}"
    if torch.compiler.is_compiling() or modes_active():
        raise TypeError(text)
    *_, size, group = args
    with specs.bind(group, size).accepting(name):
        raise TypeError(text)


def _in_words(kind: str) -> str:
    """What a type of a schema is."""
    if kind.endswith("?"):
        return f"{_in_words(kind[:-1])} or None"
    return f"a list, each {_in_words(kind[:-2])}" if kind.endswith("[]") else _WORDS[kind]


def _simulated(own: Sequence[Any]) -> bool:
    """Whether the caller is a simulated rank that has others beside it, and nobody else sees the call."""
    if torch.compiler.is_compiling() or modes_active() or above_autograd():
        return False
    rank = groups.joined()
    if rank is None or not rank.place.simulated or rank.world_size == 1:
        return False
    if transforms_active():  # torch's own way would leave its frames among those of other ranks
        raise NotImplementedError(
            f"rank {rank.rank}: interlace.functional in a transform of torch.func (vmap, grad, jvp) is not "
            f"supported; use autograd, outside of the transform"
        )
    return all(
        (type(each) in PLAIN_TYPES or type(each) is AsyncTensor) and not each.is_meta
        for each in tensors(own)
    )


def _run_simulated(op: Op, group: Communicator, own: list[Any], size: int, name: str) -> Any:
    own = tree_map_only(torch.Tensor, wait, own)
    with torch.no_grad():
        outputs = [each.detach() for each in finish(op.begin(group, own))]
    given = tensors(own)
    if torch.is_grad_enabled() and op.gradient and any(each.requires_grad for each in given):
        prepare(group, *given)
        outputs = _RecordedOp.apply(op, outputs, [*own, size, name], *given)  # type: ignore[no-untyped-call]
    return list(outputs) if op.several else outputs[0]


class _RecordedOp(torch.autograd.Function):
    """Arguments: the op, what it has returned, what it was given, and the tensors among that."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, outputs: list[torch.Tensor], given: list[Any], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        op.setup_context(ctx, tuple(given), outputs if op.several else outputs[0])
        # which keeps no tensor alive
        ctx.given = tree_map_only(torch.Tensor, lambda tensor: _TENSOR, given)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.op.backward(ctx, grads if ctx.op.several else grads[0])
        of_tensors: list[Any] = []
        for given, grad in zip(ctx.given, found, strict=False):
            if given is _TENSOR:
                of_tensors.append(grad)
            elif isinstance(given, list):
                among = grad if isinstance(grad, (list, tuple)) else [None] * len(given)
                of_tensors += [g for each, g in zip(given, among, strict=True) if each is _TENSOR]
        return None, None, None, *of_tensors


FIRST: Terms = (("whether ranks agree before they record", True),)
"""In what they agree on then, if it has the op's own terms: who does not record goes on to the op."""


def agreed(
    communicator: Communicator, op: str, operands: Sequence[Any], agree: Callable[[], Any]
) -> Any:
    """What ``agree`` gives, which all ranks call before they record ``op``: who needs no gradient is told.

    ``operands``: the first arguments of the op, by its schema.
    """
    record = registry.op(op)
    needs = record.needs(dict(zip(record.kinds, operands, strict=False))) or "another tensor"

    def start() -> Outcome:
        with needing(needs):
            return Outcome(agree(), None)

    return communicator.run(op, start)


def matrices(*tensors: Any) -> bool:
    """Whether a call with these is one that autograd can know of."""
    return not modes_active() and all(
        isinstance(each, torch.Tensor) and each.dim() > 1 for each in tensors
    )


def started(
    op: str,
    async_op: bool,
    operands: tuple[Any, ...],
    then: Callable[[Any], Any] = lambda result: result,
    **how: Any,
) -> Any:
    """What ``then`` makes of the result of ``op`` of ``interlace.functional``, as :func:`record`."""
    call = functools.partial(registry.functional(op), *operands, **how)
    return record(op, async_op, call, then)


def record(op: str, async_op: bool, call: Callable[[], Any], then: Callable[[Any], Any]) -> Any:
    """What ``then`` makes of ``call()``, which starts ``op`` and records it; a Work if ``async_op``."""
    with watched() as works:
        result = call()
    work = RecordedWork(op, result, works, then)
    return work if async_op else work.wait()


class RecordedWork(TorchWork):
    """The handle of an op whose result has a history."""

    def __init__(self, op: str, result: Any, works: list[Any], then: Callable[[Any], Any]) -> None:
        super().__init__()
        self._op, self._result, self._works, self._then = op, result, works, then
        self._waited = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """The result, complete. Raises what the op failed with."""
        from interlace.ops.op.async_tensor import wait

        if not self._waited:
            for work in self._works:
                work.wait(timeout)
            self._result = self._then(tree_map_only(torch.Tensor, wait, self._result))
            self._waited = True
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        found = [work.exception() for work in self._works]
        return next((error for error in found if error is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if not self._works:
            future.set_result(self._result)
            return future
        return self._works[-1].get_future().then(lambda _: self.wait())  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Work {self._op}: {'completed' if self.is_completed() else 'in progress'}>"
