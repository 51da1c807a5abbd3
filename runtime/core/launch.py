"""One launch of a kernel: the kernel, its grid, its arguments and its compile options.

Kernels take ``NamedTuple``s (``kernels/arguments.py``), but compilations and launches need single values.
This file takes tuples with names apart, and puts them together again. Here a value has a *path*,
``input.stride`` or ``TILES.BLOCK_M``, in the order of the parameters.

A compiled kernel depends on the dtypes of tensors and the width of numbers. Arguments that are not listed
in the kernel's ``do_not_specialize`` specialise it further. It depends on whether a number is 1, and on
whether a number or a tensor's address is a multiple of 16. Triton decides this by itself, but it ignores
``do_not_specialize`` inside tuples: for these, :func:`compiled_with` passes numbers that do not specialise.
"""

import collections
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from interlace.runtime.compat.triton_launcher import mangle_type, warmed_up

ALIGNMENT = 16
SMALL = 1 << 31  # numbers below have 32 bits


class KernelFunction(Hashable, Protocol):
    """A function of Triton: compiled for a GPU, interpreted on a CPU."""

    fn: Callable[..., object]
    __name__: str

    def __getitem__(self, grid: object) -> Callable[..., object]: ...


def leaves(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the values by path: ``{"input": Rows(x, 8)}`` is ``{"input.ptr": x, "input.stride": 8}``."""
    return dict(_leaves("", arguments.items()))


def _leaves(prefix: str, named: Any) -> Iterator[tuple[str, object]]:
    for name, value in named:
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            yield from _leaves(f"{prefix}{name}.", zip(fields, value, strict=True))
        else:
            yield prefix + str(name), value


def join_leaves(by_path: Mapping[str, object]) -> dict[str, object]:
    """Undo :func:`leaves`: return tuples with these names again, of classes that are made here."""
    found: dict[str, Any] = {}
    for path, value in by_path.items():
        name, _, rest = path.partition(".")
        if rest:
            found.setdefault(name, {})[rest] = value
        else:
            found[name] = value
    return {
        name: _tuple(name, join_leaves(value)) if isinstance(value, dict) else value
        for name, value in found.items()
    }


def _tuple(name: str, fields: dict[str, Any]) -> Any:
    if all(map(str.isdecimal, fields)):
        return tuple(fields.values())
    return collections.namedtuple(name, list(fields))(*fields.values())


def outside_name(path: str) -> str:
    """Return a field's name in a bundle: ``input_stride``, ``num_sends``; of most tuples just the field."""
    of, _, name = path.rpartition(".")
    return _OF_ONE_THING.get(name, name).format(of) if of else name


def outside(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return single values by their names in a bundle."""
    inside = leaves(arguments)
    named = {outside_name(path): value for path, value in inside.items()}
    assert len(named) == len(inside), f"two fields have the same name in a bundle: {[*inside]}"
    return named


# Fields that need the tuple's name in a bundle: they describe one object, such as a matrix.
_OF_ONE_THING = {
    "ptr": "{}_ptr",
    "count": "num_{}",
    "stride": "{}_stride",
    "lse_ptr": "{}_lse_ptr",
    "rows": "{}_rows",
    "stride_b": "{}_stride_b",
    "stride_h": "{}_stride_h",
    "stride_e": "{}_stride_e",
    "stride_k": "{}_stride_k",
    **{name: f"{{}}_{name}" for name in ("VALUES", "SCALE", "BLOCK", "NATIVE")},
    "stride_n": "{}_stride_n",
}


@functools.lru_cache(maxsize=256)
def general(kernel: KernelFunction) -> frozenset[str]:
    """Return the parameters whose values do not specialise a compiled kernel; all fields of a tuple."""
    listed = getattr(kernel, "do_not_specialize", None)
    if listed is None:  # an interpreted function keeps its decorator's arguments
        listed = getattr(kernel, "kwargs", {}).get("do_not_specialize")
    names = list(inspect.signature(kernel.fn).parameters)
    return frozenset(names[each] if isinstance(each, int) else each for each in listed or ())


@functools.lru_cache(maxsize=256)
def constants(kernel: KernelFunction) -> frozenset[str]:
    annotations = kernel.fn.__annotations__.items()
    return frozenset(name for name, kind in annotations if "constexpr" in str(kind))


@functools.lru_cache(maxsize=256)
def read_only(kernel: KernelFunction) -> frozenset[str]:
    """Return the pointers with a const annotation: ``tl.const``, ``"const"``, ``"*kfp32"``."""
    annotations = {name: str(kind) for name, kind in kernel.fn.__annotations__.items()}
    declared = (name for name, kind in annotations.items() if "const" in kind or kind[:2] == "*k")
    return frozenset(declared) - constants(kernel)


def compiled_with(kernel: KernelFunction, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return ``arguments`` to compile ``kernel``, not to run it: ``general`` tuples specialise nothing."""
    return {
        name: type(value)(*map(_any_number, value))
        if name in general(kernel) and isinstance(value, tuple)
        else value
        for name, value in arguments.items()
    }


def _any_number(value: object) -> Any:
    """Return an integer of ``value``'s width, neither 1 nor a multiple of 16; other values unchanged."""
    if type(value) is not int:
        return value
    return 3 if -SMALL <= value < SMALL else SMALL + 3


def kind_of(path: str, value: object) -> str:
    """Return the type that Triton gives ``value``. TypeError if Triton does not accept it."""
    try:
        return str(mangle_type(value))
    except TypeError as error:
        raise TypeError(f"a kernel's argument {path}: {error}") from error


def specialise(
    kernel: KernelFunction, arguments: Mapping[str, object]
) -> tuple[dict[str, str], dict[str, object], tuple[str, ...]]:
    """Return (types, constants, multiples of 16) by path; a constant's type is "constexpr"."""
    types: dict[str, str] = {}
    fixed: dict[str, object] = {}
    divisible = []
    for path, value in leaves(arguments).items():
        name = path.partition(".")[0]
        special = name not in general(kernel)
        one = type(value) is int and value == 1 and special  # Triton compiles a 1 as a constant
        if name in constants(kernel) or value is None or one:
            types[path], fixed[path] = "constexpr", value
            continue
        kind = kind_of(path, value)
        const = kind[:1] == "*" and name in read_only(kernel)
        types[path] = f"*k{kind[1:]}" if const else kind
        is_tensor = hasattr(value, "data_ptr")
        size = value.data_ptr() if is_tensor else value
        if type(size) is int and size % ALIGNMENT == 0 and (special or is_tensor):
            divisible.append(path)
    return types, fixed, tuple(divisible)


def checked_grid(grid: object) -> tuple[int, ...]:
    if not isinstance(grid, Iterable):
        raise TypeError(f"grid must be a tuple of 1 to 3 whole numbers, got {grid!r}")
    extents = tuple(grid)
    whole = all(isinstance(extent, (int, np.integer)) and extent >= 0 for extent in extents)
    if not whole or not 1 <= len(extents) <= 3:
        raise ValueError(f"grid must be 1 to 3 whole numbers from 0 on, got {extents}")
    return extents


@dataclass
class KernelLaunch:
    """``kernel[grid](**arguments)`` with compile options; ``op`` names the user's call.

    ``grid``: a number of programs, or up to three extents. ``options``: a dict with more options of Triton,
    for a GPU only, such as ``launch_cooperative_grid``. Arguments may be flat tuples with names.
    """

    kernel: Any
    grid: int | tuple[int, ...]
    arguments: dict[str, Any]
    op: str
    num_warps: int = 4
    num_stages: int = 3
    options: Any = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def values(self) -> list[Any]:
        """The arguments one by one: the fields of a tuple, but whole constants."""
        fixed = constants(self.kernel)
        return [
            value
            for name, argument in self.arguments.items()
            for value in (
                argument if isinstance(argument, tuple) and name not in fixed else (argument,)
            )
        ]

    @property
    def extents(self) -> tuple[int, int, int]:
        extents = (self.grid,) if isinstance(self.grid, int) else tuple(self.grid)
        x, y, z = (*extents, 1, 1)[:3]
        return int(x), int(y), int(z)

    def compiled(self) -> Any:
        """Return the kernel, compiled for a GPU and loaded, not run: Triton's ``CompiledKernel``."""
        return warmed_up(
            self.kernel,
            compiled_with(self.kernel, self.arguments),
            grid=self.extents,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            **self.options,
        )
