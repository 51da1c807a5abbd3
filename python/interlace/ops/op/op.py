"""One op, declared once: its arguments, what it gives, how it starts, its gradient, and all ranks at once.

Its arguments are the fields of a dataclass. They make the schema that torch knows, and the order in which
autograd wants the gradients; all else goes by name. The group, as size and name, follows the arguments.

All ops by name, for callers that know no more of them.

A started op: tensors that are not complete yet, and the Work to wait for.

Gradients of the ops. A gradient is that of the sum of all ranks' losses, as in torch's functional ops.

Those of an op stand beside it. Of those of a fused op the one that communicates is started first, and
waited for last.
"""

import contextlib
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from interlace.runtime.compat.torch_groups import Work as TorchWork, _register_work
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.work import ZERO, Work

OPS: dict[str, Any] = {}
"""Every ``Op`` by name; it puts itself here."""


class Started(NamedTuple):
    """The ``outputs`` of an op, complete after ``work``; None for an op that was done at once."""

    outputs: Sequence[torch.Tensor]
    work: Work | None


class _Together(TorchWork):
    """The Work of an op with several outputs: who waits for one takes all out of torch's registry, which
    would keep those that nobody uses, and in a graph nobody waits for."""

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._outputs = [output.detach() for output in outputs]

    def wait(self, timeout: timedelta = ZERO) -> Any:
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            with contextlib.suppress(Exception):  # it is raised below, too
                _wait_tensor(output)
        return self._work.wait(timeout)


_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default


def register(started: Started) -> None:
    """Let torch's ``wait_tensor`` find the Work by each of the outputs."""
    work: Any = started.work
    if work is None:
        return
    if work.is_success():
        work.wait()
        return
    findable = [output for output in started.outputs if output.numel()]
    if not findable:
        work.wait()  # nobody could, and this rank might leave before the others are through
    if len(findable) > 1:
        work = _Together(work, findable)
    for output in findable:
        _register_work(output, work)


def finish(started: Started) -> Sequence[torch.Tensor]:
    """Wait here and now, where an op must be complete when it returns; the outputs."""
    if started.work is not None:
        started.work.wait()
    return started.outputs


Tensor = torch.Tensor


def wait(tensor: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor.default(tensor)
    return waited


def kept(output: Tensor) -> Tensor:
    """An output of an op, to be saved for its backward, which takes it as :func:`complete`.

    A graph waits for it in its forward: what it is used for without a gradient is moved there, and a wait
    that were left in the backward would have the op done again.
    """
    return wait(output) if modes_active() else output


def complete(saved: Tensor) -> Tensor:
    """What :func:`kept` has saved."""
    return saved if modes_active() else wait(saved)


def rows(tensor: Tensor, dim: int) -> Tensor:
    """A matrix of the last dimension, its rows in the order in which ``dim`` comes first."""
    dim = dim % tensor.dim()
    if dim == tensor.dim() - 1:
        return tensor.flatten(0, -2)
    return tensor.movedim(dim, 0).flatten(0, -2)


def padded(tensor: Tensor, dim: int, length: Any) -> Tensor:
    """``tensor`` with zeros behind it, up to ``length`` along ``dim``."""
    behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
    return torch.nn.functional.pad(tensor, behind)


def spread(tensor: Tensor, lengths: list[int] | None, dim: int) -> Tensor:
    """``tensor`` with zeros behind each of its parts along ``dim``, which are of these ``lengths``, up to
    the longest. None: they are equal."""
    if lengths is None:
        return tensor
    dim %= tensor.dim()
    parts = torch.split(tensor, lengths, dim)
    return torch.cat([padded(part, dim, max(lengths)) for part in parts], dim)


def longest(length: Any, size: int) -> Any:
    """The longest of the ``size`` parts of ``length``: all but the last ones are as long."""
    return (length + size - 1) // size


GROUP = "SymInt group_size, str group_name"
_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    int: "int",
    bool: "bool",
    str: "str",
    float: "float",
    torch.dtype: "ScalarType",
    torch.SymInt: "SymInt",
}


def kind(annotation: Any) -> str:
    """The type of an argument as torch's schemas write it: ``list[Tensor | None]`` is "Tensor?[]".

    ``Annotated[..., text]`` is that text: "" of what only eager calls have.
    """
    if typing.get_origin(annotation) is Annotated:
        return str(annotation.__metadata__[0])
    if annotation in _KINDS:
        return _KINDS[annotation]
    inner = [each for each in typing.get_args(annotation) if each is not types.NoneType]
    if typing.get_origin(annotation) is list:
        return f"{kind(inner[0])}[]"
    return f"{kind(inner[0])}?"


@functools.cache
def kinds_of(arguments: Any) -> dict[str, str]:
    """The types of a record's fields in schemas, by name; "" of what only eager calls have."""
    hints = typing.get_type_hints(arguments, include_extras=True)
    return {each.name: kind(hints[each.name]) for each in dataclasses.fields(arguments)}


class OpGradient(NamedTuple):
    """How an op is differentiated; in both functions the group is ``ctx.size`` and ``ctx.name``.

    ``save(ctx, given, output)`` keeps what the other needs. ``backward(ctx, grad)`` returns gradients by
    arguments' names; of an op with several results it gets a list.
    """

    save: Callable[[Any, Any, Any], None]
    backward: Callable[[Any, Any], Mapping[str, Any]]


class OpVariant(NamedTuple):
    """A case of an op that tools time, tune and check like an op of its own.

    ``options``: keyword arguments of the eager call of the op which make it this case.
    """

    name: str
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of ``torch.ops.interlace``, and of ``interlace.functional``.

    Attributes
    ----------
    arguments : a dataclass; its fields are the arguments, in the order of the schema.
    without : fields which this op does not take: they keep their defaults.
    start : called with a communicator and the arguments; with ``out`` where the op has such a form.
    outputs : called with the arguments and the size of the group; makes the results, on fake tensors too.
    reference : called with all ranks' arguments and the size of the group; all ranks' results, of one
        process that plays all of them.
    communicates : for which arguments' gradients the backward communicates: their names, by the words of
        error messages. Ranks agree on them, but for plain collectives, whose engines take equal messages
        alone.
    several : whether it returns a list.
    variants : its cases that tools list beside it.
    """

    name: str
    arguments: type
    start: Callable[..., Started]
    outputs: Callable[[Any, Any], Any]
    reference: Callable[[Sequence[Any], int], list[list[Tensor]]] = dataclasses.field(kw_only=True)
    gradient: OpGradient | None = None
    communicates: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"input": ("input",)}
    )
    several: bool = False
    variants: Sequence[OpVariant] = ()
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        OPS[self.name] = self

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """The types of the arguments, as schemas write them, by name and in order."""
        every = kinds_of(self.arguments).items()
        return {name: kind for name, kind in every if kind and name not in self.without}

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments that a caller may leave out, by name."""
        every = dataclasses.fields(self.arguments)
        return {e.name: e.default for e in every if e.default is not dataclasses.MISSING}

    @functools.cached_property
    def parameters(self) -> str:
        """The arguments as a schema lists them, without the group."""
        return ", ".join(f"{kind} {name}" for name, kind in self.kinds.items())

    @property
    def returns(self) -> str:
        """The type of the result in the schema."""
        return "Tensor[]" if self.several else "Tensor"

    @property
    def schema(self) -> str:
        return f"{self.name}({self.parameters}, {GROUP}) -> {self.returns}"

    def record(self, given: Sequence[Any]) -> Any:
        """The record of arguments that are in the order of the schema."""
        return self.arguments(**dict(zip(self.kinds, given, strict=True)))

    def begin(self, communicator: Communicator, given: Sequence[Any], **out: Tensor) -> Started:
        """Start the op with arguments in the order of the schema."""
        return self.start(communicator, self.record(given), **out)

    def tensors_of(self, given: Any) -> list[Tensor]:
        """The tensors of a record, in the order of the schema."""
        return tensors([getattr(given, name) for name in names_of_tensors(self.arguments)])

    def needs(self, given: Mapping[str, Any]) -> str:
        """Those of ``communicates`` that require a gradient among arguments by name, in words."""
        if not (self.gradient and torch.is_grad_enabled()):
            return ""
        return " and ".join(
            words
            for words, names in self.communicates.items()
            if any(each.requires_grad for each in tensors([given[name] for name in names]))
        )

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """For autograd: ``inputs`` are the arguments, and the group."""
        assert self.gradient is not None
        *given, ctx.size, ctx.name = inputs
        self.gradient.save(ctx, self.record(given), output)

    def backward(self, ctx: Any, grad: Any) -> tuple[Any, ...]:
        """For autograd: a gradient, or None, for each argument in order, and for the group."""
        assert self.gradient is not None
        found = self.gradient.backward(ctx, grad)
        assert found.keys() <= self.kinds.keys(), f"{self.name}: {sorted(found)}"
        return (*(found.get(name) for name in self.kinds), None, None)


@functools.cache
def names_of_tensors(arguments: Any) -> list[str]:
    """The fields of a record that are tensors, or lists of some."""
    return [name for name, kind in kinds_of(arguments).items() if kind.startswith("Tensor")]


class Output(NamedTuple):
    """One output of an op. ``matrix`` is what the matmul writes, ``view`` its form for the caller."""

    matrix: Tensor
    view: Tensor


def start_form(
    form: Callable[..., Any], communicator: Communicator, given: Any, made: Sequence[Output]
) -> Started:
    """Start the form of a record; what it fills is ``made``, in views for the caller."""
    work = form(communicator, given, [each.matrix for each in made], True)
    return Started([each.view for each in made], work)


def without_tensors(given: Any) -> Any:
    """A record as ``given``, with None for its tensors, for autograd to keep."""
    kind: Any = type(given)
    return kind(**{**vars(given), **dict.fromkeys(names_of_tensors(kind))})


def requiring(given: Any) -> set[str]:
    """The names of those arguments, fields of ``given``, that require a gradient."""
    named = vars(given).items()
    return {name for name, value in named if any(each.requires_grad for each in tensors(value))}


def tensors(values: Any) -> list[Tensor]:
    """The tensors among ``values`` and the lists in it, in their order."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
