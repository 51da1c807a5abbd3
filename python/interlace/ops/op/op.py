"""One op, declared once: its arguments, results, start and gradient, and a reference for all ranks.

Its arguments are the fields of a dataclass. They give the schema for torch, and the order of the gradients
for autograd; everything else is by name. The group, as size and name, follows the arguments.

A call is checked, compared with the other ranks in one small host message, and passed to an algorithm. A
mismatch raises on every rank before any data moves.

A gradient is the gradient of the sum of all ranks' losses, as in torch's functional ops. The part of a
fused op's gradient that communicates is started first and waited for last.

Tests and tools make arguments by name, as examples. An example is a function of a :class:`Setting`, so each
rank can make the arguments of all ranks. Numbers are small integers, so sums are exact in every dtype and
order.
"""

import contextlib
import dataclasses
import functools
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import torch

from interlace.runtime.compat.torch_groups import Work as TorchWork, _register_work
from interlace.runtime.compat.torch_modes import (
    above_autograd,
    modes_active,
    only_watched,
    transforms_active,
)
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.work import ZERO, Work

Tensor = torch.Tensor


@dataclass(frozen=True)
class Setting:
    """A rank's setting for which example arguments are made. ``call`` makes the numbers differ.

    ``rows``: by rank, the number of its rows in the whole. ``width`` of all matrices, k and n alike; groups
    of 2 and of 3 ranks share 6 evenly.
    """

    rank: int
    size: int
    dtype: torch.dtype = torch.float32
    call: int = 0
    rows: tuple[int, ...] = ()
    width: int = 6
    argument: str = ""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def uneven(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def total(self) -> int:
        return sum(self.rows)

    def numbers(self, *shape: int, same: bool = False) -> Tensor:
        """Return random integers from -2 to 2; with ``same`` they are equal on all ranks."""
        seed = zlib.crc32(self.argument.encode()) + 1000 * self.call + (0 if same else self.rank)
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-2, 3, shape, generator=generator)
        if self.dtype.is_complex:
            return torch.complex(numbers.float(), numbers.flip(0).float()).to(self.dtype)
        return numbers.to(self.dtype)

    def of(self, rank: int) -> "Setting":
        return replace(self, rank=rank)

    def everyone(self) -> list["Setting"]:
        return [self.of(rank) for rank in range(self.size)]


Example = Callable[[Setting], Any]


def constant(value: Any) -> Example:
    return lambda setting: value


def own_rows(setting: Setting) -> Tensor:
    return setting.numbers(setting.own, setting.width)


def _square(setting: Setting) -> Tensor:
    return setting.numbers(setting.width, setting.width)


def _vector(setting: Setting) -> Tensor:
    return setting.numbers(setting.width, same=True)


def _wide_vector(setting: Setting) -> Tensor:
    wide = max(setting.dtype, torch.float32, key=lambda each: each.itemsize)
    return _vector(replace(setting, dtype=wide))


EXAMPLES: Mapping[str, Example] = {
    "input": lambda setting: setting.numbers(setting.total, setting.width),
    "weight": _square,
    "weights": lambda setting: [_square(setting), _square(setting).flip(0)],
    "bias": _vector,
    "biases": lambda setting: [_vector(setting), torch.zeros_like(_vector(setting))],
    "norm_weight": _wide_vector,
    "residual": lambda setting: setting.numbers(setting.total, setting.width, same=True),
    "reduce_op": constant("sum"),
    "gather_dim": constant(0),
    "scatter_dim": constant(0),
    "src": constant(1),
    "dst": constant(1),
    "src_dst": lambda setting: [(rank + 1) % setting.size for rank in range(setting.size)],
    "length": lambda setting: setting.own if setting.uneven else None,
    "algorithm": constant("auto"),
    "out_dtype": constant(None),
    "eps": constant(0.5),
    "return_gathered": constant(True),
    "return_received": constant(True),
    "return_rows": constant(True),
}
"""Examples by the name of the argument; a new op with these arguments needs no others."""


OPS: dict[str, Any] = {}
"""Every ``Op`` by name; the constructor adds it."""


class Started(NamedTuple):
    """The ``outputs`` of an op, complete after ``work``; None if the op is complete already."""

    outputs: Sequence[torch.Tensor]
    work: Work | None


class _Together(TorchWork):
    """The Work of an op with several outputs. A wait for one removes all from torch's registry.

    Otherwise the registry would keep unused outputs, as no code of a graph waits for these.
    """

    def __init__(self, work: Work, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._outputs = [output.detach() for output in outputs]

    def wait(self, timeout: timedelta = ZERO) -> Any:
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            with contextlib.suppress(Exception):  # the last line raises it
                _wait_tensor(output)
        return self._work.wait(timeout)


_wait_tensor: Any = torch.ops._c10d_functional.wait_tensor.default


def register(started: Started, communicator: Communicator) -> None:
    """Register the Work for each of the outputs, so that torch's ``wait_tensor`` finds it.

    A simulated rank waits now, because it cannot wait in C++: ``wait_tensor``, or another rank's backward.
    """
    work: Any = started.work
    if work is None:
        return
    if communicator.place.simulated or work.is_success():
        work.wait()
        return
    findable = [output for output in started.outputs if output.numel()]
    if not findable:
        work.wait()  # no later wait is possible, and this rank might leave before the others end
    if len(findable) > 1:
        work = _Together(work, findable)
    for output in findable:
        _register_work(output, work)


def finish(started: Started) -> Sequence[torch.Tensor]:
    """Wait now, for an op that must be complete when it returns, and return the outputs."""
    if started.work is not None:
        started.work.wait()
    return started.outputs


def wait(tensor: Tensor) -> Tensor:
    traced = torch.compiler.is_compiling() or above_autograd() or _has_tracer()
    if tensor.requires_grad and not (traced or transforms_active()):
        with torch.no_grad():  # torch's op returns its argument and has no gradient
            _wait_tensor(tensor)
        return tensor
    waited: Tensor = _wait_tensor(tensor)
    return waited


def _has_tracer() -> bool:
    """Return whether an active mode does more than look at calls."""
    return bool(modes_active() and not only_watched())


def kept(output: Tensor) -> Tensor:
    """Return an output to save for the op's backward, which reads it with :func:`complete`.

    A graph waits for it in its forward. Uses without a gradient are moved there, and if the wait stayed in
    the backward, the op would run again.
    """
    return wait(output) if _has_tracer() else output


def complete(saved: Tensor) -> Tensor:
    """Return the tensor that :func:`kept` has saved, complete."""
    return saved if _has_tracer() else wait(saved)


def rows(tensor: Tensor, dim: int) -> Tensor:
    """Return a matrix of the last dimension; its rows are in the order with ``dim`` first."""
    dim = dim % tensor.dim()
    if dim == tensor.dim() - 1:
        return tensor.flatten(0, -2)
    return tensor.movedim(dim, 0).flatten(0, -2)


def pad(tensor: Tensor, dim: int, length: Any) -> Tensor:
    """Return ``tensor`` with zeros at the end, up to ``length`` along ``dim``."""
    behind = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
    return torch.nn.functional.pad(tensor, behind)


def spread(tensor: Tensor, lengths: list[int] | None, dim: int) -> Tensor:
    """Pad each part of ``tensor`` along ``dim`` with zeros to the longest one; ``lengths`` None: equal."""
    if lengths is None:
        return tensor
    dim %= tensor.dim()
    parts = torch.split(tensor, lengths, dim)
    return torch.cat([pad(part, dim, max(lengths)) for part in parts], dim)


def longest(length: Any, size: int) -> Any:
    """Return the longest of the ``size`` parts of ``length``: only the last parts may be shorter."""
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
    """Return the type of an argument in torch's schemas: ``list[Tensor | None]`` is "Tensor?[]".

    ``Annotated[..., text]`` is that text: "" for arguments of eager calls only.
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
    """Return the schema types of a record's fields by name; "" for arguments of eager calls only."""
    hints = typing.get_type_hints(arguments, include_extras=True)
    return {field.name: kind(hints[field.name]) for field in dataclasses.fields(arguments)}


class OpGradient(NamedTuple):
    """The gradient of an op. In both functions the group is ``ctx.size`` and ``ctx.name``.

    ``save(ctx, given, output)`` saves values for the backward. ``backward(ctx, grad)`` returns gradients by
    arguments' names. For an op with several results, ``grad`` is a list.
    """

    save: Callable[[Any, Any, Any], None]
    backward: Callable[[Any, Any], Mapping[str, Any]]


def without_gradient(op: str) -> OpGradient:
    """Return a gradient that raises an error: without it, a loss would silently lack this op's part."""

    def backward(ctx: Any, grads: Any) -> typing.NoReturn:
        raise RuntimeError(f"interlace's {op} has no gradients")

    return OpGradient(lambda ctx, given, output: None, backward)


def fused_by(*kernels: str) -> Mapping[str, Sequence[str]]:
    """Return ``Op.algorithms`` of a fused op with these kernels."""
    return {"fused": kernels, "pipelined": (), "unfused": ()}


class OpVariant(NamedTuple):
    """A case of an op, an eager call with ``options``, that tools time, tune and check like an op."""

    name: str
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of ``torch.ops.interlace``, and of ``interlace.functional``.

    Attributes
    ----------
    arguments : a dataclass; its fields are the arguments, in the order of the schema.
    without : fields that this op does not have as arguments: they keep their defaults.
    start : called with a communicator and the arguments, and with ``out`` if the op has such a form.
    outputs : called with the arguments and the size of the group; makes the results, also as fake tensors.
    reference : called with all ranks' arguments and the size of the group; returns all ranks' results.
    communicates : the arguments whose gradients need communication in the backward: their names, by the
        words in error messages. Ranks must agree on them, except for plain collectives, whose engines
        accept only equal messages.
    several : whether it returns a list.
    algorithms : the algorithms that a caller can choose, except "auto", each with the kernels that it
        launches. An op with algorithms has a target in ``verify`` and cases in ``check``.
    examples : by argument, how tests and tools make it, if ``EXAMPLES`` and the default do not suffice.
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
    algorithms: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    examples: Mapping[str, Example] = dataclasses.field(default_factory=dict)

    def without_example(self) -> list[str]:
        known = {**self.defaults, **EXAMPLES, **self.examples}
        return [name for name in self.kinds if name not in known]

    def example(self, setting: Setting, **others: Any) -> dict[str, Any]:
        """Return the example arguments of a rank by name; ``others`` replace examples."""
        defaults = {name: constant(value) for name, value in self.defaults.items()}
        makers, found = {**defaults, **EXAMPLES, **self.examples}, {}
        for name in self.kinds:
            about = dataclasses.replace(setting, argument=name)
            found[name] = others[name] if name in others else makers[name](about)
        return found

    def example_records(self, setting: Setting, **others: Any) -> list[Any]:
        records = [self.example(each, **others) for each in setting.everyone()]
        return [self.record(list(each.values())) for each in records]

    def __post_init__(self) -> None:
        OPS[self.name] = self

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """The schema types of the arguments, by name and in order."""
        kinds = kinds_of(self.arguments).items()
        return {name: kind for name, kind in kinds if kind and name not in self.without}

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments that a caller may leave out, and their values, by name."""
        of_record = dataclasses.fields(self.arguments)
        return {e.name: e.default for e in of_record if e.default is not dataclasses.MISSING}

    @functools.cached_property
    def parameters(self) -> str:
        """The arguments as a schema lists them, without the group."""
        return ", ".join(f"{kind} {name}" for name, kind in self.kinds.items())

    @property
    def returns(self) -> str:
        return "Tensor[]" if self.several else "Tensor"

    @property
    def schema(self) -> str:
        return f"{self.name}({self.parameters}, {GROUP}) -> {self.returns}"

    def record(self, record: Sequence[Any]) -> Any:
        return self.arguments(**dict(zip(self.kinds, record, strict=True)))

    def begin(self, communicator: Communicator, record: Sequence[Any], **out: Tensor) -> Started:
        return self.start(communicator, self.record(record), **out)

    def tensors_of(self, record: Any) -> list[Tensor]:
        return tensors(map(vars(record).get, names_of_tensors(self.arguments)))

    def needs(self, record: Mapping[str, Any]) -> str:
        """Return the names in ``communicates`` whose arguments require a gradient, in words."""
        if not (self.gradient and torch.is_grad_enabled()):
            return ""
        return " and ".join(
            words
            for words, names in self.communicates.items()
            if any(tensor.requires_grad for tensor in tensors([record[name] for name in names]))
        )

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save values for autograd. ``inputs`` are the arguments and the group."""
        assert self.gradient is not None
        *record, ctx.size, ctx.name = inputs
        self.gradient.save(ctx, self.record(record), output)

    def backward(self, ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Return for autograd a gradient or None for each argument in order, and for the group."""
        assert self.gradient is not None
        found = self.gradient.backward(ctx, grad)
        assert found.keys() <= self.kinds.keys(), f"{self.name}: {sorted(found)}"
        return (*(found.get(name) for name in self.kinds), None, None)


@functools.cache
def names_of_tensors(arguments: Any) -> list[str]:
    return [name for name, kind in kinds_of(arguments).items() if kind.startswith("Tensor")]


class Output(NamedTuple):
    """One output of an op. The matmul writes ``matrix``; the caller gets ``view``."""

    matrix: Tensor
    view: Tensor


def start_form(
    form: Callable[..., Any], communicator: Communicator, record: Any, outputs: Sequence[Output]
) -> Started:
    """Start the form of a record. It fills the outputs ``outputs``, which the caller gets as views."""
    work = form(communicator, record, [output.matrix for output in outputs], True)
    return Started([output.view for output in outputs], work)


def without_tensors(record: Any) -> Any:
    """Return the record ``record`` with None for its tensors, so that autograd can keep it."""
    kind: Any = type(record)
    return kind(**{**vars(record), **dict.fromkeys(names_of_tensors(kind))})


def requiring(record: Any) -> set[str]:
    """Return the names of those fields of ``record`` that require a gradient."""
    named = vars(record).items()
    return {
        name for name, value in named if any(tensor.requires_grad for tensor in tensors([value]))
    }


def tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors(value)
    return found
