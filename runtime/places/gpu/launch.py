"""Launches on a GPU that cost the host little: only the first call goes through Triton's own launch.

Triton's ``kernel[grid](...)`` takes tens of microseconds for the many arguments of a fused op, every time.
Its result depends on the kernel, the compile options, and every argument: the value (the width, if it is
not specialized), or of a tensor the dtype and whether its address is a multiple of 16. These are the key
under which this file finds a compiled kernel. A launch then passes plain addresses::

    prepare   key, compiled kernel (compiled and loaded if new), values in the order of the parameters;
              for an argument that is a tuple, the values of its fields
    run       pass the values to Triton's launcher, on a stream

A kernel with device-side descriptors needs scratch memory per launch. On one stream, where launches follow
one another, it always gets the same memory. In a graph capture it gets its own, because a graph may be
replayed on another stream while this memory is in use.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.compat import triton_launcher
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.launch import ALIGNMENT, SMALL, KernelLaunch, constants, general, leaves

MOST_KERNELS = 4096
GridExtents = tuple[int, int, int]


class LaunchCache:
    """The compiled kernels of one rank, by call. ``loaded`` is called with each new one."""

    def __init__(self, device: torch.device, loaded: Callable[[Any], None]) -> None:
        self._device = device
        self._loaded = loaded
        self._kernels: dict[object, _Compiled] = {}
        # by kernel: parameters that are not specialized, and constants
        self._known: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
        self._scratch: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def prepare(self, launch: KernelLaunch, stream: int, capture: int) -> "PreparedLaunch":
        """Prepare a launch for ``stream``. InterlaceError if it would be loaded in a graph capture."""
        values: list[Any] = []
        number = id(launch.kernel)
        known = self._known.get(number)
        if known is None:
            known = self._known[number] = general(launch.kernel), constants(launch.kernel)
        alike, fixed = known
        key: list[Any] = [number, launch.num_warps, launch.num_stages]
        for name, argument in launch.arguments.items():
            fields = argument if isinstance(argument, tuple) and name not in fixed else (argument,)
            for value in fields:
                if isinstance(value, torch.Tensor):
                    address = value.data_ptr()
                    key.append((value.dtype, address % ALIGNMENT == 0))
                    values.append(address)
                else:  # None is a constant of the compilation
                    any_number = name in alike and value is not None
                    key.append(-SMALL <= value < SMALL if any_number else value)
                    values.append(value)
        if launch.options:
            key.extend(launch.options.items())
        compiled = self._kernels.get(tuple(key))
        if compiled is None:
            if capture:
                raise InterlaceError(
                    f"{launch.op}: {launch.name} is not loaded for these arguments, and cannot be during "
                    "a graph capture; call the op once with tensors like these before the capture"
                )
            if len(self._kernels) >= MOST_KERNELS:
                self._kernels.clear()
            compiled = self._kernels[tuple(key)] = _Compiled(launch)
            self._loaded(compiled.kernel)
        extents = launch.extents
        scratch = self.scratch_for(compiled, extents, stream, capture)
        return PreparedLaunch(self, compiled, extents, compiled.ordered(values), scratch)

    def scratch_for(
        self, compiled: "_Compiled", extents: GridExtents, stream: int, capture: int
    ) -> torch.Tensor | None:
        """Return the scratch memory of a launch over a grid, or None if it needs none."""
        if not compiled.scratch_per_program:
            return None
        x, y, z = extents
        size = compiled.scratch_per_program * x * y * z
        if capture:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        scratch = self._scratch.get(stream)
        if scratch is None or scratch.numel() < size:
            if scratch is not None:
                self._outgrown.append(scratch)  # a launch may still use it
                size = max(size, 2 * scratch.numel())
            scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._scratch[stream] = scratch
        return scratch

    def clear(self) -> None:
        """Forget everything. No launch may be in flight."""
        self._kernels.clear()
        self._scratch.clear()
        self._outgrown.clear()


class _Compiled:
    """A loaded kernel, and the positions of its parameters among the arguments of a launch."""

    def __init__(self, launch: KernelLaunch) -> None:
        self.jit = launch.kernel  # keeps its id, a part of the key, unique
        self.kernel = launch.compiled()
        fixed, count = constants(launch.kernel), 0
        places: dict[str, range] = {}  # the positions of each argument's values
        for name, value in launch.arguments.items():
            fields = len(value) if isinstance(value, tuple) and name not in fixed else 1
            places[name] = range(count, count + fields)
            count += fields
        self._order: list[tuple[int, Any]] = []
        self._tuples: list[slice] = []  # tuples among the values, in the order of parameters
        for parameter in inspect.signature(launch.kernel.fn).parameters.values():
            begin = len(self._order)
            self._order += [
                (i, parameter.default) for i in places.get(parameter.name, range(-1, 0))
            ]
            if (
                isinstance(launch.arguments.get(parameter.name), tuple)
                and parameter.name not in fixed
            ):
                self._tuples.append(slice(begin, len(self._order)))
        if [index for index, _ in self._order] == list(range(count)):
            self._order = []  # the given order
        metadata = self.kernel.metadata
        self._direct = triton_launcher.direct(
            self.kernel, lambda signature: leaves(signature).values(), self._nest
        )
        self.scratch_per_program = metadata.global_scratch_size * getattr(metadata, "num_ctas", 1)

    def ordered(self, values: list[object]) -> list[object]:
        if not self._order:
            return values
        return [values[index] if index >= 0 else default for index, default in self._order]

    def _nest(self, values: Sequence[object]) -> list[object]:
        nested = list(values)
        for part in reversed(self._tuples):
            nested[part] = [tuple(nested[part])]
        return nested

    def launch(
        self, extents: GridExtents, stream: int, values: list[Any], scratch: torch.Tensor | None
    ) -> None:
        """Launch with ``values`` in the order of the parameters; ``scratch``: see ``scratch_for``."""
        kernel = self.kernel
        enter, leave = triton_launcher.hooks()
        metadata = None
        if enter is not None:
            metadata = kernel.launch_metadata(extents, stream, *self._nest(values))
        if self._direct is not None:
            address = None if scratch is None else scratch.data_ptr()
            self._direct(extents, stream, (metadata, enter, leave), address, values)
            return
        with triton_launcher.scratch_from(scratch):
            kernel.run(
                *extents, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave,
                *self._nest(values),
            )  # fmt: skip


class PreparedLaunch:
    """A launch whose host work is done. ``scratch`` must live until it has run."""

    __slots__ = ("__weakref__", "_cache", "_compiled", "_extents", "scratch", "values")

    def __init__(
        self,
        cache: LaunchCache,
        compiled: _Compiled,
        extents: GridExtents,
        values: list[object],
        scratch: torch.Tensor | None,
    ) -> None:
        self._cache, self._compiled, self._extents = cache, compiled, extents
        self.values, self.scratch = values, scratch

    def in_order(self, arguments: list[object]) -> list[Any]:
        """Return ``arguments``, in the order of the launch's arguments, in the order of ``values``."""
        return self._compiled.ordered(arguments)

    def again(self, stream: int, capture: int, values: list[object]) -> None:
        """Launch the kernel once more, on ``stream``, with other values."""
        compiled = self._compiled
        scratch = self._cache.scratch_for(compiled, self._extents, stream, capture)
        compiled.launch(self._extents, stream, values, scratch)

    def run(self, stream: int) -> None:
        self._compiled.launch(self._extents, stream, self.values, self.scratch)
