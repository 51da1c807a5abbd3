"""Load a bundle that ``python -m interlace build --op`` has written, and launch it, without Triton.

This file needs only the standard library, and CuPy (with its NumPy) from the first launch on. In every
bundle it is ``load.py``, together with the functions that it calls. So a launch needs neither interlace nor
Triton nor torch.

>>> from interlace import aot
>>> bundle = aot.load("all_gather_matmul_bundle")           # doctest: +SKIP
>>> bundle.run(values, arguments, stream=stream)            # doctest: +SKIP

docs/how-to/compile/aot.md has a whole program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import os
import pathlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from interlace.kernels.bundle_formulas import (
    CONDITIONS,
    MOST_CHUNKS,
    OPS,
    BundleError,
    LaunchValues,
    inputs,
    whole,
)

FORMAT = "interlace bundle"
VERSION = 2  # changes with the manifest, and with the functions that the loader calls
CUPY_MISSING = (
    "interlace.aot launches kernels through CuPy, which cannot be imported: install cupy-cuda12x or "
    "cupy-cuda13x, for the CUDA version that nvidia-smi shows"
)

_RANGES = {f"i{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
_RANGES |= {f"u{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)}
_ELEMENTS = {
    "bf16": ("bfloat16", "uint16"),  # CuPy has no bfloat16: uint16 holds its bits
    **{f"fp{bits}": (f"float{bits}",) for bits in (16, 32, 64)},
    **{name: (("u" if name[0] == "u" else "") + f"int{name[1:]}",) for name in _RANGES},
}
_FLOAT = "fp32"
_DEFAULT_SHARED_MEMORY = 48 << 10  # a kernel must request more
MOST_RANKS = 64

_ANY, _COUNT, _DIVISOR = "*", range(1 << 40), range(1, 1 << 40)
_TEXTS = {_ANY: str}
_TYPES = frozenset((*_RANGES, _FLOAT, *(f"*{name}" for name in _ELEMENTS)))
_KERNEL = {
    "symbol": str,
    "cubin": {"file": str, "sha256": str},
    "conditions": [frozenset(CONDITIONS)],
    "cooperative": bool,
    "threads": _DIVISOR,
    "arguments": [
        {"name": str, "type": _TYPES, "from": str, "used": bool, "divisible_by": _DIVISOR},
    ],
    "shared_memory": {"static": _COUNT, "dynamic": _COUNT},
    "scratch": {"bytes_per_program": _COUNT, "alignment": _DIVISOR},
}
_MANIFEST = {
    "op": frozenset(OPS),
    "sequence": [str],
    "values": _TEXTS,
    "tables": _TEXTS,
    "workspace": {"layout": [str]},
    "arches": {_ANY: {"constants": {_ANY: _COUNT}, "kernels": {_ANY: _KERNEL}}},
}
"""The parts of a manifest that the loader uses: types, or numbers, by field."""


def load(path: str | pathlib.Path, arch: int | str | None = None) -> Bundle:
    """Return the bundle in directory ``path``, for the current device or for ``arch`` (90 is 9.0).

    With ``arch`` nothing of CUDA is used before the first launch. Raises BundleError if the directory is
    not as it was built, ValueError if it has nothing for the architecture, ImportError without CuPy.
    """
    folder = pathlib.Path(path)
    try:
        manifest = json.loads(_contents(folder / "manifest.json"))
    except FileNotFoundError:
        raise BundleError(
            f"{folder} has no manifest.json: it is not a bundle or unfinished"
        ) from None
    except OSError as error:
        raise BundleError(f"{folder} is not a bundle: {error}") from None
    except BundleError:
        raise
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / 'manifest.json'} is damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{folder / 'manifest.json'} is not the manifest of a bundle")
    if manifest.get("version") != VERSION:
        raise BundleError(
            f"{folder} has format version {manifest.get('version')}, this loader reads {VERSION}: "
            "build it again with this version, or use the load.py that is in the bundle"
        )
    if arch is None:
        arch = _cupy().cuda.Device().compute_capability
    wanted = str(arch).removeprefix("sm_")
    try:
        if wanted not in manifest["arches"]:
            built = ", ".join(sorted(manifest["arches"], key=lambda arch: (len(arch), arch)))
            raise ValueError(f"arch is {wanted}; {folder} was built for {built}")
        return Bundle(folder, manifest, wanted)
    except (LookupError, TypeError, AttributeError, OSError) as error:
        raise BundleError(
            f"{folder / 'manifest.json'} is damaged: {type(error).__name__}: {error}"
        ) from error


class Bundle:
    """One op for one architecture: ``kernels`` by name, to be launched in the order of ``sequence``.

    ``manifest`` is the content of manifest.json; docs/reference/bundle-manifest.md explains its fields.
    """

    def __init__(self, path: pathlib.Path, manifest: dict[str, Any], arch: str) -> None:
        _require("manifest", manifest, _MANIFEST)
        self.path, self.manifest, self.arch = path, manifest, arch
        self.op: str = manifest["op"]
        self.sequence: tuple[str, ...] = tuple(manifest["sequence"])
        facts = manifest["arches"][arch]
        _require("CHUNKS", facts["constants"].get("CHUNKS", 1), range(1, MOST_CHUNKS + 1))
        self._values = functools.partial(LaunchValues, self.op, constants=facts["constants"])
        self.kernels = {
            name: Kernel(path, name, kernel, self._values)
            for name, kernel in facts["kernels"].items()
        }
        self._run = [self.kernels[name] for name in self.sequence]

    def evaluate(self, name: str, values: Mapping[str, object]) -> Any:
        """Return a quantity of the manifest ("slots", "sends"), or a kernel's grid, at launch ``values``.

        Tables are returned as lists of rows; a kernel needs them as int64 in device memory.
        """
        _check_ranks(values)
        return self._values(values).value(name)

    def workspace(self, values: Mapping[str, object]) -> dict[str, int]:
        """Return the offsets of signal slots and data in the symmetric buffer, and its size, in bytes.

        Pass the ``values`` of the largest launch, because all launches on one buffer use the same offsets.
        """
        _check_ranks(values)
        layout = self.manifest["workspace"]["layout"]
        known = self._values({name: values[name] for name in values if name not in layout})
        return {name: known.value(name) for name in layout}

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int] | Mapping[str, object],
        arguments: Mapping[str, object] | Sequence[object],
        *,
        stream: object = None,
    ) -> None:
        """Launch one kernel.

        Raises ValueError if ``kernel`` is unknown, and the errors of :meth:`Kernel.launch`.
        """
        if kernel not in self.kernels:
            raise ValueError(f"kernel is {kernel!r}; the bundle has {', '.join(self.kernels)}")
        self.kernels[kernel].launch(grid, arguments, stream=stream)

    def run(
        self, values: Mapping[str, object], arguments: Mapping[str, object], *, stream: Any = None
    ) -> None:
        """Launch all kernels of ``sequence`` on one stream; each takes the ``arguments`` that it has.

        Raises TypeError, before any launch, for an argument that no kernel has, and the errors of
        :meth:`Kernel.launch`.
        """
        for name in arguments:
            if not any(name in kernel.arguments for kernel in self._run):
                raise TypeError(f"no kernel of {self.op} has an argument {name!r}")
        numbers = {name: each for name, each in arguments.items() if self._counts(name)}
        for kernel in self._run:
            of_kernel = {name: arguments[name] for name in kernel.arguments if name in arguments}
            # a quantity may depend on an argument of another kernel
            of_launch = {name: each for name, each in numbers.items() if name not in of_kernel}
            kernel.launch({**of_launch, **values}, of_kernel, stream=stream)

    def _counts(self, name: str) -> bool:
        kinds = (p["type"] for each in self._run for p in each.parameters if p["name"] == name)
        return any(kind in _RANGES for kind in kinds)


class Kernel:
    """One kernel of a bundle. ``arguments`` are the names of a caller's arguments, in order."""

    def __init__(
        self, path: pathlib.Path, name: str, facts: dict[str, Any], values: Callable[..., Any]
    ) -> None:
        self.name, self.facts, self._values = name, facts, values
        self.parameters: list[dict[str, Any]] = facts["arguments"]
        self._integers = [p for p in self.parameters if p["type"] in _RANGES]
        self.arguments = tuple(p["name"] for p in self.parameters if p["from"] == "caller")
        self.cubin = _verify_file(path, facts["cubin"])
        self._functions: dict[int, Any] = {}  # by device
        self._scratch: dict[tuple[int, int], tuple[int, Any]] = {}  # by device and stream

    def check(self, values: Mapping[str, object]) -> None:
        """Raise ValueError if a condition of the kernel does not hold at ``values``."""
        self._check(self._values(values))

    def _check(self, known: LaunchValues) -> None:
        for condition in self.facts["conditions"]:
            if not known.of(condition, CONDITIONS[condition]):
                found = [f"{name} = {known.value(name)}" for name in inputs(condition)]
                raise ValueError(f"{self.name} needs {condition}; {', '.join(found)}")

    def launch(
        self,
        grid: int | Sequence[int] | Mapping[str, object],
        arguments: Mapping[str, object] | Sequence[object],
        *,
        stream: object = None,
    ) -> None:
        """Launch on ``stream``: a stream of CuPy or torch, or an address; by default CuPy's current stream.

        ``grid`` is a number of programs, or the launch values from which the grid is computed. These also
        set integer arguments that are not passed; "resident" is by default one program for each
        multiprocessor. ``arguments`` are passed by name, or all in order. They are integers, and for
        pointers arrays of CuPy or torch, or addresses. Their memory must stay allocated until the kernel
        has ended.

        Raises TypeError or ValueError naming the argument.
        """
        integers, cupy = self._numbers(arguments), _cupy()
        if isinstance(grid, Mapping):
            resident = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
            known = self._values({"resident": resident, **self._merge(grid, integers)})
            self._check(known)
            extents = _extents(known.value(self.name))
            integers = {**self._derive(known, integers), **integers}
        else:
            extents = _extents(grid)
        packed = self._pack(integers)
        with _on_stream(cupy, stream):
            scratch = self._scratch_pointer(cupy, extents)
            self._function(cupy)(
                extents,
                (self.facts["threads"], 1, 1),
                tuple(_scalars(packed, scratch)),
                shared_mem=self.facts["shared_memory"]["dynamic"],
            )

    # -- arguments -----------------------------------------------------------------------------

    def _numbers(self, arguments: Mapping[str, object] | Sequence[object]) -> dict[str, Any]:
        """Return the arguments by name, as numbers; pointers become addresses."""
        if not isinstance(arguments, Mapping):
            if len(arguments) != len(self.arguments):
                raise TypeError(
                    f"{self.name} takes {len(self.arguments)} arguments, got {len(arguments)}: "
                    f"{', '.join(self.arguments)}"
                )
            arguments = dict(zip(self.arguments, arguments, strict=True))
        for name in arguments:
            if name not in self.arguments:
                raise TypeError(
                    f"{self.name} has no argument {name!r}; it has {', '.join(self.arguments)}"
                )
        return {
            p["name"]: _number(p["name"], p["type"], value)
            for p in self.parameters
            if (value := arguments.get(p["name"])) is not None
        }

    def _merge(
        self, values: Mapping[str, object], integers_given: Mapping[str, int]
    ) -> dict[str, object]:
        """Return launch values and integer arguments: a quantity may depend on both."""
        integers = {
            p["name"]: integers_given[p["name"]]
            for p in self._integers
            if p["name"] in integers_given
        }
        for name, value in integers.items():
            if name in values and values[name] != value:
                raise ValueError(f"{name} is {value} as an argument, {values[name]} as a value")
        return {**values, **integers}

    def _derive(self, known: LaunchValues, integers: Mapping[str, int]) -> dict[str, int]:
        """Return the integer arguments that were not passed and that the launch values determine."""
        return {
            p["name"]: _number(p["name"], p["type"], known.value(p["name"]))
            for p in self._integers
            if p["name"] not in integers and p["name"] in known
        }

    def _pack(self, integers: Mapping[str, object]) -> list[tuple[str, object]]:
        """Return (type, value) of every parameter; value is None if the loader sets it."""
        packed: list[tuple[str, object]] = []
        for parameter in self.parameters:
            name, kind = parameter["name"], parameter["type"]
            if parameter["from"] == "loader":
                packed.append((kind, None))
                continue
            if name not in integers and parameter["used"]:
                raise TypeError(f"{self.name} lacks argument {name!r}, a {kind}")
            number = integers.get(name, 0)
            if kind != _FLOAT and number % parameter["divisible_by"]:
                value = f"at address {number:#x}" if kind[0] == "*" else str(number)
                raise ValueError(
                    f"{name} is {value}; {self.name} was compiled for multiples of "
                    f"{parameter['divisible_by']}"
                )
            packed.append((kind, number))
        return packed

    # -- the device ----------------------------------------------------------------------------

    def _function(self, cupy: Any) -> Any:
        """Return the kernel on the current device, loaded on first use."""
        device = cupy.cuda.runtime.getDevice()
        if device not in self._functions:
            module = cupy.RawModule(
                path=str(self.cubin), enable_cooperative_groups=self.facts["cooperative"]
            )
            function = module.get_function(self.facts["symbol"])
            shared = self.facts["shared_memory"]
            if shared["static"] + shared["dynamic"] > _DEFAULT_SHARED_MEMORY:
                function.max_dynamic_shared_size_bytes = shared["dynamic"]
            self._functions[device] = function
        return self._functions[device]

    def _scratch_pointer(self, cupy: Any, extents: tuple[int, int, int]) -> int:
        """Return memory for programs' descriptors, or 0. Launches on one stream share it in turn."""
        x, y, z = extents
        size = self.facts["scratch"]["bytes_per_program"] * x * y * z
        if not size:
            return 0
        key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
        held, memory = self._scratch.get(key, (0, None))
        if held < size:
            memory = cupy.cuda.alloc(size)
            self._scratch[key] = (size, memory)
        address = int(memory.ptr)
        assert address % self.facts["scratch"]["alignment"] == 0, hex(address)
        return address


def _require(name: str, value: Any, wanted: object) -> None:
    """Raise TypeError or KeyError unless ``value`` has everything in ``wanted``; it may have more."""
    if isinstance(wanted, (range, frozenset)):
        # the range would compare a str with each of its numbers
        kind = int if isinstance(wanted, range) else str
        fits = type(value) is kind and value in wanted
    else:
        fits = type(value) is (wanted if isinstance(wanted, type) else type(wanted))
    if not fits:
        raise TypeError(f"{name} is {str(value)[:80]!r}")
    if isinstance(wanted, list):
        for one in value:
            _require(name, one, wanted[0])
    elif isinstance(wanted, dict):
        for key, kind in wanted.items():
            for each in value if key == _ANY else (key,):
                _require(f"{name}.{each}", value[each], kind)


def _check_ranks(values: Mapping[str, object]) -> None:
    """Raise ValueError or TypeError if ``values`` name a rank or shards that no group has."""
    world_size = whole("world_size", values.get("world_size", 1))
    if isinstance(world_size, list) or not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"world_size is {values['world_size']!r}, not within 1..{MOST_RANKS}")
    rank = whole("rank", values.get("rank", 0))
    if isinstance(rank, list) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {values['rank']!r}, not within 0..{world_size - 1}")
    rows = whole("rows", values.get("rows", [0] * world_size))
    if not isinstance(rows, list) or len(rows) != world_size or min(rows) < 0:
        raise ValueError(f"rows is {values['rows']!r}, not a list of {world_size} lengths by rank")


def _number(name: str, kind: str, value: object) -> Any:
    """Return an argument's ``value`` as a number, whole unless ``kind`` is a float; a pointer's address."""
    if kind.startswith("*"):
        return _address(name, kind[1:], value)
    if kind == _FLOAT:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is {value!r}, not a number ({kind})")
        return float(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}, not a whole number ({kind})")
    low, high = _RANGES[kind]
    if not low <= (number := operator.index(value)) <= high:
        raise ValueError(f"{name} is {number}, which does not fit {kind}")
    return number


def _address(name: str, element: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if hasattr(value, "data_ptr") and getattr(value, "is_cuda", True):
        address = int(value.data_ptr())
    elif hasattr(value, "__cuda_array_interface__"):
        address = int(value.__cuda_array_interface__["data"][0])
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, not an array on the GPU or address")
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in _ELEMENTS[element]:
        raise TypeError(f"{name} has dtype {kind}; the kernel takes {_ELEMENTS[element][0]}")
    return address


def _extents(grid: int | Sequence[int]) -> tuple[int, int, int]:
    extents = (grid,) if isinstance(grid, int) else tuple(grid)
    if not 1 <= len(extents) <= 3 or any(operator.index(extent) < 1 for extent in extents):
        raise ValueError(f"grid is {grid}; it must be one to three positive numbers")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def _verify_file(path: pathlib.Path, file: Mapping[str, str]) -> pathlib.Path:
    """Return the path of a file of the bundle, after a check that the file is as it was built."""
    name = file["file"]
    if pathlib.PurePath(name).name != name:
        raise BundleError(f"the manifest names a file outside the bundle: {name}")
    try:
        found = hashlib.sha256(_contents(path / name)).hexdigest()
    except FileNotFoundError:
        raise BundleError(f"{path / name} is missing") from None
    if found != file["sha256"]:
        raise BundleError(f"{path / name} differs from the file that the manifest describes")
    return path / name


def _contents(file: pathlib.Path) -> bytes:
    """Return the contents of ``file``, which must not be a pipe: reading a pipe may never end."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BundleError(f"{file} is not a regular file")
        return opened.read()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"{CUPY_MISSING} ({error})") from error
    return cupy


def _on_stream(cupy: Any, stream: object) -> Any:
    if stream is None:
        return contextlib.nullcontext()
    if isinstance(stream, int):
        return cupy.cuda.ExternalStream(stream)
    if hasattr(stream, "cuda_stream"):  # a stream of torch
        return cupy.cuda.ExternalStream(stream.cuda_stream)
    return stream


def _scalars(packed: Iterable[tuple[str, Any]], scratch: int) -> Iterable[object]:
    """Yield NumPy scalars, which CuPy passes bit by bit. The first loader parameter is ``scratch``."""
    import numpy as np

    for kind, number in packed:
        if number is None:
            number, scratch = scratch, 0
        if kind.startswith("*"):
            yield np.uint64(number)
        else:
            yield getattr(np, _ELEMENTS[kind][0])(number)
