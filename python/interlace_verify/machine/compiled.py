"""Programs of launches whose kernels are compiled for a GPU, or are PTX of any origin (:func:`launch_ptx`).

In the place ``ptx`` all programs are compiled; in ``sim`` only kernels whose threads differ
(``choice.py``). A kernel is compiled once for all launches of a process that would share code on a GPU. A
worker process compiles it (``compiler/pool.py``), and the code is kept for other processes
(``compiler/kept.py``).
"""

import functools
import inspect
import math
import numbers
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from interlace.groups.groups import default_group
from interlace.runtime.compat import stand_ins
from interlace.runtime.compat.triton_interpreter import builder
from interlace.runtime.compiler import kept
from interlace.runtime.compiler.pool import compile_one
from interlace.runtime.compiler.request import Compilation, Measurement, jitted_function
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.launch import KernelLaunch, leaves, specialise
from interlace.runtime.core.limits import shared_bytes
from interlace.runtime.core.memory import RED_ZONE, aligned_memory
from interlace.runtime.places.sim.place import SimPlace
from interlace.runtime.places.sim.scheduler.allocations import Allocations, Origin
from interlace.runtime.places.sim.scheduler.program_hooks import ProgramHooks
from interlace_verify.machine.bulk_copies import tensor_map
from interlace_verify.machine.machine import PtxMachine
from interlace_verify.machine.module import MOST_THREADS, PtxKernel, origins, read
from interlace_verify.ptx.parser import Variable
from interlace_verify.ptx.targets import number_of
from interlace_verify.ptx.types import Array

_read = functools.lru_cache(maxsize=256)(read)


class PtxSource:
    """PTX of any origin, as a kernel of launches in the place ``ptx``, see :func:`launch_ptx`."""

    def __init__(
        self,
        ptx: str,
        *,
        kernel: str | None = None,
        block: tuple[int, int, int] | None = None,
        shared_bytes: int = 0,
    ) -> None:
        self.kernel = _read(ptx, kernel, block)
        self.__name__ = self.kernel.name
        self.shared_bytes = shared_bytes
        self.variables: dict[str, torch.Tensor] = {}

    def load(
        self,
        kept: dict[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
        memory: Allocations,
        rank: int,
    ) -> None:
        """Set the module's variables: the ``given`` ones, others ``kept`` from earlier launches or new."""
        wanted, new = self.kernel.variables, []
        for name in given.keys() - wanted.keys():
            listed = ", ".join(wanted) or "none"
            raise ValueError(f"{self.__name__} does not use variable {name!r}; it uses {listed}")
        for name, variable in wanted.items():
            if name in given:
                memory.of_tensor(given[name], rank)
            elif name not in kept:
                if variable.extern or variable.nbytes is None:
                    raise ValueError(
                        f"variable {name!r} of {self.__name__} is not in the text: pass a tensor for it"
                    )
                whole = aligned_memory(variable.nbytes + 2 * RED_ZONE)
                kept[name] = torch.from_numpy(whole[RED_ZONE : RED_ZONE + variable.nbytes])
                made = memory.put(
                    kept[name].data_ptr(), variable.nbytes, f"variable {name} of rank {rank}"
                )
                if variable.space == "const":
                    made.read_only = "it is .const memory"
                new.append(name)
            self.variables[name] = found = given[name] if name in given else kept[name]
            if found.nbytes < (variable.nbytes or 0):
                raise ValueError(
                    f"variable {name!r} has {variable.nbytes} bytes, got a tensor of {found.nbytes}"
                )
        _begin(self.kernel, self.variables, new)


def _begin(kernel: PtxKernel, variables: Mapping[str, torch.Tensor], new: Iterable[str]) -> None:
    at = {name: tensor.data_ptr() for name, tensor in variables.items()} | {**kernel.pointers}
    for name in new:
        values = kernel.variables[name].filled(at.get)
        variables[name].numpy()[:] = np.frombuffer(values, np.uint8)


class CompiledPrograms:
    """Makes programs of launches for ``arch`` (80 is sm_80). ``rewrite`` changes the PTX before it runs."""

    def __init__(self, arch: int, rewrite: Callable[[str, str], str] | None) -> None:
        self.arch, self._rewrite = arch, rewrite

    def __call__(self, launch: KernelLaunch, hooks: ProgramHooks) -> tuple[Callable[[], None], int]:
        """Return one program of ``launch``, to run in a session, and its number of threads."""
        if isinstance(launch.kernel, PtxSource):
            source, values = launch.kernel, list(launch.arguments.values())
            _check(source, self.arch)
            kernel = source.kernel
            if self._rewrite:
                text = self._rewritten(kernel.name, kernel.text)
                kernel = _read(text, kernel.name, kernel.block)
            names = [parameter.name for parameter in kernel.parameters]
            running = program(kernel, source.shared_bytes, values, names, hooks, source.variables)
            return running, kernel.threads
        function = jitted_function(launch.kernel)
        parameters = inspect.signature(function).parameters
        arguments = {name: launch.arguments[name] for name in parameters}  # in the kernel's order
        types, fixed, divisible = specialise(launch.kernel, arguments)
        request = Compilation(
            function.__module__,
            launch.name,
            os.path.abspath(function.__code__.co_filename),
            self.arch,
            types,
            fixed,
            divisible,
            launch.num_warps,
            launch.num_stages,
            max_registers=launch.options.get("maxnreg", 0),
            to_run=True,
            stand_ins=dict(stand_ins.now),
            absent=(),
        )
        measured = compile_request(function, request)
        kernel = _read(self._rewritten(launch.name, measured.ptx))
        arguments_by_path = leaves(arguments)
        maps, values, names = iter(measured.descriptors), [], []
        for path in (path for path, kind in types.items() if kind != "constexpr"):
            descriptor = isinstance(arguments_by_path[path], TensorDescriptor)
            more = (
                _taken_apart(arguments_by_path[path], next(maps, None))
                if descriptor
                else [arguments_by_path[path]]
            )
            values += more
            names += [path] * len(more)
        nbytes = measured.scratch * math.prod(launch.extents)
        scratch = torch.zeros(nbytes, dtype=torch.uint8)
        tables = {  # from the compiler, for example for the sine of a large number
            name: torch.empty(each.nbytes or 0, dtype=torch.uint8)
            for name, each in kernel.variables.items()
        }
        for each in (scratch, *tables.values()):
            if each.nbytes:
                hooks.memory.of_tensor(each, hooks.current.rank)
        _begin(kernel, tables, tables)
        running = program(
            kernel, measured.shared, [*values, scratch], [*names, "scratch"], hooks, tables
        )
        return running, kernel.threads

    def _rewritten(self, name: str, ptx: str) -> str:
        if self._rewrite is None:
            return ptx
        changed = self._rewrite(name, ptx)
        if not isinstance(changed, str):
            raise TypeError(
                f"rewrite must return PTX, a str; for {name} it returned {changed!r:.60}"
            )
        return changed


def _check(source: PtxSource, arch: int) -> None:
    """Raise ValueError for PTX of a newer GPU, and for more shared memory than a program may have."""
    kernel, most = source.kernel, shared_bytes(arch)
    if kernel.static_bytes + source.shared_bytes > most:
        raise ValueError(
            f"{kernel.name} has {kernel.static_bytes} bytes of shared memory, launched with "
            f"shared_bytes={source.shared_bytes}; a program of sm_{arch} has at most {most}"
        )
    if number_of(kernel.target) > arch:
        raise ValueError(
            f"{kernel.name} is PTX for {kernel.target}, but arch={arch} is an older GPU"
        )


def _taken_apart(descriptor: TensorDescriptor, of_map: Mapping[str, Any] | None) -> list[object]:
    """Return the parameters that Triton makes of a host descriptor: with a TMA map, or with its pointer."""
    base, sizes = descriptor.base, [*descriptor.shape, *descriptor.strides]
    nan = int(descriptor.padding == "nan")
    if of_map is None:
        return [base, *sizes, nan, int(descriptor.round_f32_to_tf32), *sizes]
    strides = [stride * base.element_size() for stride in descriptor.strides[-2::-1]]
    box, kind = of_map["block_size"][::-1], of_map["elem_type"]
    options = {"swizzle": of_map["swizzle"], "fill": nan}
    return [
        tensor_map(base.data_ptr(), descriptor.shape[::-1], strides, box, kind, **options),
        *sizes,
    ]


_measured: weakref.WeakKeyDictionary[object, dict[str, Measurement]] = weakref.WeakKeyDictionary()


def compile_request(function: Any, request: Compilation) -> Measurement:
    """Return the PTX of ``request``, for the function under its kernel, or raise InterlaceError."""
    known = _measured.setdefault(function, {})
    if (key := repr(request)) not in known:
        file = kept.file_of(request, function)
        known[key] = (file and kept.read(file)) or compile_one(request)
    if (result := known[key]).error is not None:
        place = f" at {result.where}" if result.where else ""
        error = InterlaceError(f"{request.kernel} for sm_{request.arch}: {result.error}{place}")
        error.frames = result.where.frames
        raise error
    return result


def program(
    kernel: PtxKernel,
    shared_bytes: int,
    values: Sequence[object],
    names: Sequence[str],
    hooks: ProgramHooks,
    variables: Mapping[str, torch.Tensor],
) -> Callable[[], None]:
    """Return one program of ``kernel`` on ``values``; further parameters are 0. ``names``: the values'."""
    missing = len(kernel.parameters) - len(values)
    if missing < 0:
        raise TypeError(
            f"{kernel.name} has {len(kernel.parameters)} parameters, got {len(values)} values"
        )
    parameters = {
        parameter.name: _bits(value, parameter)
        for parameter, value in zip(kernel.parameters, [*values, *[0] * missing], strict=True)
    }

    at = {name: np.uint64(each.data_ptr()) for name, each in variables.items()}
    of, numbers = {}, {}
    for parameter, value, name in zip(kernel.parameters, values, names, strict=False):
        if isinstance(value, torch.Tensor):
            memory = hooks.memory.of_tensor(value, hooks.current.rank)
            of[parameter.name] = Origin(memory, value.data_ptr(), name)
        elif isinstance(value, int):
            numbers[parameter.name] = abs(value)
    found = origins(kernel.sources, of, numbers)

    def run() -> None:
        kept = values, variables  # alive while the program runs
        PtxMachine(kernel, builder, hooks, parameters, shared_bytes, at, found).run()
        del kept

    return run


def _bits(value: Any, parameter: Variable) -> Array | bytes:
    kind, nbytes = parameter.kind, parameter.nbytes or 0
    is_number = nbytes * 8 == kind.bits
    if isinstance(value, bytes) or not is_number:
        if not isinstance(value, bytes) or len(value) != nbytes:
            raise TypeError(f"{parameter.name} takes {nbytes} bytes, got {value!r:.60}")
        return kind.raw.type(int.from_bytes(value, "little")) if is_number else value
    name, took = parameter.name, f"{parameter.name}, a .{kind.name}, takes"
    if hasattr(value, "data_ptr"):
        if kind.is_float or kind.bits < 64:
            raise TypeError(f"{took} no tensor")
        return kind.raw.type(value.data_ptr())
    if kind.is_float:
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{took} a number, got {value!r:.60}")
        return kind.raw.type(kind.bits_of(float(value)))
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{took} a tensor, bytes or a whole number, got {value!r:.60}") from None
    if not -(1 << kind.bits - 1) <= number <= kind.mask:
        raise OverflowError(f"{number} does not fit in {name}, a .{kind.name}")
    return kind.raw.type(number & kind.mask)


def launch_ptx(
    ptx: str,
    grid: int | tuple[int, ...],
    *values: object,
    kernel: str | None = None,
    threads: int | tuple[int, ...] | None = None,
    shared_bytes: int = 0,
    variables: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Run a kernel of the text ``ptx`` over ``grid``, as a rank of ``interlace.run(place="ptx")``.

    ``values`` are tensors and numbers in the order of the parameters; a structure is passed as bytes.
    Missing last parameters are 0. ``kernel`` names one of several kernels. ``threads`` of a program, up to
    three extents, may be left out if the text says them. ``shared_bytes`` is the dynamic shared memory of a
    program. ``variables`` maps names of the module's variables to tensors of any shape, with at least as
    many bytes. Other variables begin with the values in the text, and stay from launch to launch of the
    same text on a rank. Returns when all programs have ended.

    Raises NotImplementedError naming an instruction that is not known. Raises TypeError for too many values
    and for a value that its parameter does not take, OverflowError for a number that does not fit. Raises
    ValueError for threads that the text does not allow, for more shared memory than the architecture has,
    and for variables that the kernel does not use.

    >>> import interlace, torch
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry double(.param .u64 double_param_0)
    ... .reqntid 32
    ... {
    ...     .reg .b32 %r<4>;
    ...     .reg .b64 %rd<4>;
    ...     ld.param.u64 %rd1, [double_param_0];
    ...     mov.u32 %r1, %tid.x;
    ...     mad.wide.u32 %rd2, %r1, 4, %rd1;
    ...     ld.global.u32 %r2, [%rd2];
    ...     shl.b32 %r3, %r2, 1;
    ...     st.global.u32 [%rd2], %r3;
    ...     ret;
    ... }
    ... '''
    >>> def step():
    ...     numbers = torch.arange(32, dtype=torch.int32)
    ...     interlace.verify.launch_ptx(ptx, 1, numbers)
    ...     return int(numbers.sum())
    >>> interlace.run(step, 1, place="ptx")
    [992]
    """
    place = default_group().place
    if not isinstance(place, SimPlace):
        raise ValueError(f'launch_ptx is for place="ptx"; this rank is in place={place.name!r}')
    if not isinstance(ptx, str):
        raise TypeError(f"ptx must be a str, got {ptx!r:.60}")
    extents = grid if isinstance(grid, Iterable) else (grid,)
    block = None if threads is None else _block(threads)
    if not isinstance(shared_bytes, int) or shared_bytes < 0:
        raise ValueError(f"shared_bytes must be a whole number >= 0, got {shared_bytes!r}")
    if not isinstance(variables or {}, Mapping):
        raise TypeError(f"variables must map names to tensors, got {variables!r:.60}")
    for name, tensor in (variables or {}).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"variable {name!r} must be a tensor, got {tensor!r:.60}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"variable {name!r} must be contiguous, got strides {tuple(tensor.stride())}"
            )
    source = PtxSource(ptx, kernel=kernel, block=block, shared_bytes=shared_bytes)
    place.launch_ptx(source, extents, values, variables or {})


def _block(threads: int | tuple[int, ...]) -> tuple[int, int, int]:
    extents = tuple(threads) if isinstance(threads, Iterable) else (threads,)
    whole = all(isinstance(each, int) and each >= 1 for each in extents)
    if not whole or not 1 <= len(extents) <= 3 or math.prod(extents) > MOST_THREADS:
        raise ValueError(
            f"threads must be 1 to 3 whole numbers >= 1, at most {MOST_THREADS} in all, got {threads}"
        )
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z
