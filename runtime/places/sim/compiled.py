"""Programs of the place ``ptx``: each launch compiled for a GPU, its PTX run on this CPU.

Everything else of that place is ``sim``'s: ranks, streams, memory, scheduler, observers. What a launch
depends on is what Triton specialises on, so a kernel is compiled once for all launches that would share
code on a GPU, by a worker process (``compiler/pool.py``), whose cache outlives this process.
"""

import functools
import inspect
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from interlace.runtime.compat.triton_interpreter import builder
from interlace.runtime.compiler.pool import compile_all
from interlace.runtime.compiler.request import Compilation, jitted_function
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.kernel_arguments import leaves, specialised
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.ptx.machine.machine import PtxMachine
from interlace.runtime.ptx.machine.module import PtxKernel, PtxParameter, read
from interlace.runtime.ptx.types import Array
from interlace.runtime.scheduler.scheduler import Programs, interpreted

ARCHES = (80, 90)  # whose PTX can be run
Rewrite = Callable[[str, str], str]
"""(name of a kernel, its PTX) -> the PTX to run."""

_read = functools.lru_cache(maxsize=256)(read)


def as_compiled(_: str, ptx: str) -> str:
    return ptx


class PtxSource:
    """PTX of any origin, as a kernel of launches in the place ``ptx``.

    ``shared_bytes`` of shared memory are given at launch, beside what the text declares with a size.
    Values are tensors or numbers in the order of the parameters; the last ones may be left out, and are 0.
    """

    def __init__(self, ptx: str, *, shared_bytes: int = 0) -> None:
        self.kernel = _read(ptx)
        self.__name__ = self.kernel.name
        self.shared_bytes = shared_bytes


class CompiledPrograms:
    """Makes programs of launches, for ``arch``, 80 for sm_80. ``rewrite`` changes PTX before it is run."""

    def __init__(self, arch: int, rewrite: Rewrite = as_compiled) -> None:
        self.arch, self._rewrite = arch, rewrite
        self._known: dict[str, tuple[PtxKernel, dict[str, Any]]] = {}

    def __call__(self, launch: KernelLaunch, hooks: Any) -> tuple[Callable[[], None], int]:
        """One program of ``launch``, to be run in a session, and its threads."""
        if isinstance(launch.kernel, PtxSource):
            source, values = launch.kernel, list(launch.arguments.values())
            made = program(source.kernel, source.shared_bytes, values, hooks)
            return made, source.kernel.threads
        function = jitted_function(launch.kernel)
        parameters = inspect.signature(function).parameters
        arguments = {name: launch.arguments[name] for name in parameters}  # in the kernel's order
        types, fixed, divisible = specialised(launch.kernel, arguments)
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
        )
        key = repr(request)
        if key not in self._known:
            ptx, facts = compiled(request)
            self._known[key] = _read(self._rewrite(launch.name, ptx)), facts
        kernel, facts = self._known[key]
        given = leaves(arguments)
        values = [given[path] for path, kind in types.items() if kind != "constexpr"]
        nbytes = facts["scratch"]["bytes_per_program"] * math.prod(launch.extents)
        scratch = torch.zeros(nbytes, dtype=torch.uint8)
        if nbytes:
            hooks.memory.of_tensor(scratch, hooks.current.rank)
        values.append(scratch)
        dynamic = facts["shared_memory"]["dynamic"]
        return program(kernel, dynamic, values, hooks), kernel.threads


def programs(arch: int | None, rewrite: Rewrite = as_compiled) -> Programs:
    """Programs for ``arch``; interpreted ones for None. Raises ValueError for one that cannot be run."""
    if arch is None:
        if rewrite is not as_compiled:
            raise ValueError("rewrite changes PTX, which needs arch")
        return interpreted
    if arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}; PTX is run of {', '.join(map(str, ARCHES))}")
    return CompiledPrograms(arch, rewrite)


def compiled(request: Compilation) -> tuple[str, dict[str, Any]]:
    """The PTX of ``request``, and the facts of a launch as a bundle's manifest has them."""
    with tempfile.TemporaryDirectory(prefix="interlace-ptx-") as folder:
        stem = pathlib.Path(folder) / "kernel"
        (result,) = compile_all([replace(request, artifacts=str(stem))], workers=1)
        if result.error is not None:
            raise InterlaceError(f"{request.kernel} for sm_{request.arch}: {result.error}")
        facts = json.loads(stem.with_name("kernel.json").read_text())
        return stem.with_name("kernel.ptx").read_text(), facts


def program(
    kernel: PtxKernel, shared_bytes: int, values: Sequence[Any], hooks: Any
) -> Callable[[], None]:
    """One program of ``kernel`` on ``values``; parameters behind those are 0."""
    missing = len(kernel.parameters) - len(values)
    if missing < 0:
        raise TypeError(
            f"{kernel.name} has {len(kernel.parameters)} parameters, and was given {len(values)} values"
        )
    parameters = {
        parameter.name: _bits(value, parameter)
        for parameter, value in zip(kernel.parameters, [*values, *[0] * missing], strict=True)
    }

    def run() -> None:
        kept = values  # as long as the program runs
        PtxMachine(kernel, builder, hooks, parameters, shared_bytes).run()
        del kept

    return run


def _bits(value: Any, parameter: PtxParameter) -> Array | bytes:
    kind = parameter.kind
    if parameter.nbytes:
        if not isinstance(value, bytes) or len(value) != parameter.nbytes:
            raise TypeError(f"{parameter.name} is {parameter.nbytes} bytes, and not {value!r:.60}")
        return value
    number = value.data_ptr() if hasattr(value, "data_ptr") else value
    if isinstance(number, float):
        return kind.raw.type(kind.bits_of(number))
    return kind.raw.type(int(number) & kind.mask)
