"""A compilation and its result, in the form in which they are sent to a worker process and back.

A :class:`Compilation` names its kernel by module and file: a function cannot be sent, and in this process
it may be an interpreted one. This file also checks a user's arguments, so that errors are
raised before anything is compiled.
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
"""Packages for which this process has stand-in modules, such as the shims of ``verify``."""


@dataclass(frozen=True)
class Compilation:
    """One compilation, specialised as a launch would specialise it.

    ``module`` and ``kernel`` name the function, and ``path`` its file. The file itself is loaded if the
    module cannot be imported in a new process or is a different one there. ``types`` are Triton's names
    ("*bf16", "i32") by argument, and by field for tuples ("input.stride", ``launch.py``), in order;
    "constexpr" marks compile-time constants, whose values are in ``constants``. ``divisible`` are the
    arguments that are multiples of 16 (pointers: 16-byte aligned). ``ignore`` names lint rules that do not
    apply. With ``artifacts``, the SASS and the launch facts are written to files of that name
    (``worker.py``). ``libraries`` are paths of bitcode by name. Linked code is not searched for faults,
    because most of it is not the kernel's. ``max_registers`` is per thread; 0 leaves it to ptxas.
    ``to_run``: only PTX is needed, to be run on a CPU. ``stand_ins``: modules that replace others when the
    file is imported (``compat/stand_ins.py``). ``absent`` are packages that are not installed and that the
    file may import all the same, because this process has stand-ins for them.
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
    """A variant for an architecture. Not ``default``: chosen by an override, or where TMA is impossible."""

    variant: str = ""
    default: bool = True

    @property
    def name(self) -> str:
        return f"{self.kernel.removesuffix('_kernel')} {self.variant}".rstrip()

    @property
    def fixed(self) -> dict[str, object]:
        """Return ``constants`` by their public names, such as ``BLOCK_M``."""
        return outside(self.constants)


@dataclass(frozen=True)
class Measurement:
    """The measured figures of a compiled request. ``tensor_cores`` is None if the kernel cannot use them.

    ``shared`` (per program) and ``stack`` (per thread) are bytes. ``spills`` and ``tensor_cores`` count
    instructions. If the kernel did not compile, only ``error``, ``where`` and ``seconds`` are set. A
    request ``to_run`` has only ``ptx``, the ``scratch`` bytes of global memory for each program, and, if
    there are ``descriptors`` among its arguments, Triton's description of the tensor maps to make for them.
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
    """Return the line of a file that defines a function, or the file's first line if it is not found."""
    text = pathlib.Path(path).read_text("utf-8")
    defined = re.search(rf"^(async )?def {name}\b", text, re.MULTILINE)
    line = text[: defined.start()].count("\n") + 1 if defined else 1
    return SourceText(f"{os.path.basename(path)}:{line}", ((path, line),))


def jitted_function(kernel: object) -> Any:
    """Return the Python function inside ``@triton.jit`` and inside any wrapper of that."""
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
    if function is kernel or not inspect.isfunction(function):
        raise TypeError(f"kernel is {kernel!r}, not a function under @triton.jit")
    name, path = function.__qualname__, function.__code__.co_filename
    if name != function.__name__:
        raise ValueError(f"kernel {name} is not at the top level of a file, where it can be found")
    if not os.path.exists(path):
        raise ValueError(
            f"kernel {name} comes from {path}, which is not a file; put the kernel into a file"
        )
    return function


def specialised_arguments(
    function: FunctionType, signature: Mapping[str, object], constexprs: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, object]]:
    """Return types and constants: every argument has a type, which is "constexpr" for constants."""
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
    parameters: Mapping[str, inspect.Parameter], arguments: Iterable[str]
) -> Iterator[tuple[str, inspect.Parameter]]:
    by_name: dict[str, list[str]] = {}
    for argument in arguments:
        by_name.setdefault(argument.partition(".")[0], []).append(argument)
    for name, parameter in parameters.items():
        yield from ((fromkey, parameter) for fromkey in dict.fromkeys(by_name.get(name, [name])))


def _type(name: str, argument: str, kind: object) -> str:
    if not isinstance(kind, str):
        raise TypeError(f"the type of {argument} of {name} is {kind!r}, not a name such as '*fp32'")
    if not _TYPE.fullmatch(kind):
        raise ValueError(f"the type of {argument} of {name} is {kind!r}; types are '*fp32', 'i32'")
    return kind


def _constant(name: str, argument: str, value: object) -> object:
    """Return ``value`` in a form that can be sent to another process."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        value = value.value
    if value is None or isinstance(value, (bool, int, float, str, tl.dtype)):
        return value
    raise TypeError(
        f"{argument} of {name} is {value!r}; a constexpr is a number, a string, None or a tl.dtype"
    )
