"""A compilation and its result, as they travel to a worker process and back.

A :class:`Compilation` names its kernel by module and file, because a function cannot be sent: here it
may be an interpreted one. The checks of a user's arguments are here too, so that a mistake is said before
anything is compiled.
"""

import inspect
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from interlace.runtime.compiler.lint.faults import NOWHERE, Fault
from interlace.runtime.compiler.lint.sass import Loop
from interlace.runtime.core.errors import SourceText
from interlace.runtime.core.launch import leaves, outside

_TYPE = re.compile(
    r"(\*+k?)?([iu](1|8|16|32|64)|bf16|fp(16|32|64)|fp8[a-z0-9]+)|"
    r"tensordesc<(bf16|fp\d+|fp8[a-z0-9]+|[iu]\d+)\[\d+(, *\d+)*\]>"
)

STOOD_FOR: list[str] = []
"""Packages that modules of this process stand for, as the shims of ``verify`` do."""


@dataclass(frozen=True)
class Compilation:
    """One compilation, as a launch would specialise it.

    ``module`` and ``kernel`` name the function, ``path`` its file: the file is loaded where the module
    cannot be imported in a new process, or is another one there. ``types`` are Triton's names by
    argument ("*bf16", "i32"), of tuples by field in order ("input.stride", ``launch.py``);
    "constexpr" stands for what is fixed at compile time, with the values in ``constants``.
    ``divisible`` are the arguments that are multiples of 16 (pointers: 16-byte aligned).
    ``ignore`` names rules that do not apply. With ``artifacts``, the SASS and how to launch it are
    left in files of that name (``worker.py``). ``libraries`` are paths of bitcode by name; what
    is linked is not looked at for faults, because most of it is not the kernel's. ``max_registers`` per
    thread; 0 leaves it to ptxas. ``to_run``: only PTX is wanted, to be run on a CPU. ``stand_ins``:
    modules that stand for others when the file is imported (``compat/stand_ins.py``). ``absent`` are
    packages that it may import and that are not there: those for which something stands in this process.
    """

    module: str
    kernel: str
    path: str
    arch: int
    types: dict[str, str]
    constants: dict[str, object]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    ignore: tuple[str, ...] = ()
    artifacts: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    max_registers: int = 0
    to_run: bool = False
    stand_ins: dict[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = field(default_factory=lambda: tuple(STOOD_FOR), compare=False)


@dataclass(frozen=True)
class Entry(Compilation):
    """A variant for an architecture; not ``default``: by an override only, or where TMA cannot be."""

    variant: str = ""
    default: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel.removesuffix('_kernel')} {self.variant}".rstrip()

    @property
    def fixed(self) -> dict[str, object]:
        """``constants`` by the names that they have outside: ``BLOCK_M``."""
        return outside(self.constants)


@dataclass(frozen=True)
class Measurement:
    """Measured figures of a compiled request. ``tensor_cores`` is None if the kernel has no use for them.

    ``shared`` and ``stack`` are bytes, per program and per thread; ``spills`` and ``tensor_cores`` count
    instructions. ``error`` is set if it did not compile, and then only ``where`` and ``seconds`` with it.
    Of what is to be run there is only ``ptx``, with ``scratch`` bytes of global memory for each program,
    and, where ``descriptors`` are arguments, what Triton says of the tensor maps to be made of them.
    """

    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    tensor_cores: int | None = None
    faults: tuple[Fault, ...] = ()
    error: str | None = None
    where: SourceText = NOWHERE
    seconds: float = 0.0
    loops: tuple[Loop, ...] = ()
    ptx: str = ""
    scratch: int = 0
    descriptors: tuple[Mapping[str, object], ...] = ()


def definition(path: str, name: str) -> SourceText:
    """The line of a file in which a function of it is defined, its first one if that is not found."""
    text = pathlib.Path(path).read_text("utf-8")
    defined = re.search(rf"^(async )?def {name}\b", text, re.MULTILINE)
    line = text[: defined.start()].count("\n") + 1 if defined else 1
    return SourceText(f"{os.path.basename(path)}:{line}", ((path, line),))


def jitted_function(kernel: object) -> Any:
    """The Python function under ``@triton.jit``, and under what may be around that."""
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    if function is kernel or not inspect.isfunction(function):
        raise TypeError(f"kernel is {kernel!r}, not a function under @triton.jit")
    name, path = function.__qualname__, function.__code__.co_filename
    if name != function.__name__:
        raise ValueError(f"kernel {name} is not at the top level of a file, where it can be found")
    if not os.path.exists(path):
        raise ValueError(f"kernel {name} comes from {path}, which is no file; put it into one")
    return function


def specialised_arguments(
    function: FunctionType, signature: Mapping[str, object], constexprs: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, object]]:
    """Types and constants: every argument has a type, which is "constexpr" for constants."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    signature, constexprs = leaves(signature), leaves(constexprs)
    for argument in (*signature, *constexprs):
        if argument.partition(".")[0] not in parameters:
            raise ValueError(f"{name} has no argument {argument!r}; it has {', '.join(parameters)}")
    types: dict[str, str] = {}
    constants: dict[str, object] = {}
    for argument, parameter in _by_field(parameters, (*signature, *constexprs)):
        must = "constexpr" in str(parameter.annotation)
        kind = signature.get(argument)
        if argument in constexprs:
            if kind not in (None, "constexpr"):
                raise ValueError(f"{argument} of {name} has type {kind!r} and is in constexprs too")
            constants[argument] = _constant(name, argument, constexprs[argument])
            types[argument] = "constexpr"
        elif must and kind not in (None, "constexpr"):
            raise ValueError(f"{argument} of {name} is a tl.constexpr; give it in constexprs")
        elif must and parameter.default is not parameter.empty:
            constants[argument] = _constant(name, argument, parameter.default)
            types[argument] = "constexpr"
        elif must or kind == "constexpr":
            raise ValueError(f"constexprs has no value for {argument} of {name}")
        elif kind is None:
            raise ValueError(f"signature has no type for {argument} of {name}")
        else:
            types[argument] = _type(name, argument, kind)
    return types, constants


def _by_field(
    parameters: Mapping[str, inspect.Parameter], given: Iterable[str]
) -> Iterator[tuple[str, inspect.Parameter]]:
    """Every parameter in order; for one of which fields are given, its fields."""
    by_name: dict[str, list[str]] = {}
    for argument in given:
        by_name.setdefault(argument.partition(".")[0], []).append(argument)
    for name, parameter in parameters.items():
        yield from ((each, parameter) for each in dict.fromkeys(by_name.get(name, [name])))


def _type(name: str, argument: str, kind: object) -> str:
    if not isinstance(kind, str):
        raise TypeError(f"the type of {argument} of {name} is {kind!r}, not a name such as '*fp32'")
    if not _TYPE.fullmatch(kind):
        raise ValueError(f"the type of {argument} of {name} is {kind!r}; types are '*fp32', 'i32'")
    return kind


def _constant(name: str, argument: str, value: object) -> object:
    """``value`` as it can be sent to another process."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        value = value.value
    if value is None or isinstance(value, (bool, int, float, str, tl.dtype)):
        return value
    raise TypeError(
        f"{argument} of {name} is {value!r}; a constexpr is a number, a string, None or a tl.dtype"
    )
