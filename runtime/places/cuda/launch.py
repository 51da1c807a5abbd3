"""Launches on a GPU that cost the host little: Triton binds, checks and looks up on the first call only.

``kernel[grid](...)`` of Triton takes tens of microseconds for the many arguments of a fused op, every
time. What it finds out depends on the kernel, the compile options, and of every argument its value (its
width, if it is not specialized), or for a tensor its dtype and whether its address is a multiple of 16. So
that is the key under which a compiled kernel is found here, and a launch hands it plain addresses::

    prepare   key, compiled kernel (made and loaded if new), values in the order of the parameters
    run       the values to Triton's launcher, on a stream

A kernel with device-side descriptors wants scratch memory per launch. It gets the same every time on one
stream, where one launch follows another; in a graph capture its own, for a graph may be replayed on
another stream while this one is in use.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import _allocation

from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.launch import KernelLaunch

MOST_KERNELS = 4096
ALIGNMENT = 16
SMALL = 1 << 31  # numbers below are 32 bits wide


class LaunchCache:
    """The compiled kernels of one rank, by what they are called with.

    ``loaded(compiled)`` is called once for every kernel that was loaded.
    """

    def __init__(self, device: torch.device, loaded: Callable[[Any], None]) -> None:
        self._device = device
        self._loaded = loaded
        self._kernels: dict[Any, _Compiled] = {}
        # by kernel: the parameters that are not specialized
        self._general: dict[int, frozenset[str]] = {}
        self._scratch: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def prepare(self, launch: KernelLaunch, stream: int, capture: int) -> PreparedLaunch:
        """What is needed to run ``launch`` on ``stream``; nothing synchronizes the GPU afterwards.

        Raises InterlaceError in a graph capture if the kernel was not loaded before it.
        """
        values: list[Any] = []
        number = id(launch.kernel)
        general = self._general.get(number)
        if general is None:
            general = self._general[number] = _unspecialized(launch.kernel)
        key: list[Any] = [number, launch.num_warps, launch.num_stages]
        for name, value in launch.arguments.items():
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                key.append((value.dtype, address % ALIGNMENT == 0))
                values.append(address)
            else:
                key.append(-SMALL <= value < SMALL if name in general else value)
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
        self, compiled: _Compiled, extents: tuple[int, int, int], stream: int, capture: int
    ) -> torch.Tensor | None:
        """The scratch memory of a launch over a grid, if it wants any."""
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
        """Forget everything; no launch may be under way."""
        self._kernels.clear()
        self._scratch.clear()
        self._outgrown.clear()


class _Compiled:
    """A loaded kernel, and where its parameters are among the arguments of a launch."""

    def __init__(self, launch: KernelLaunch) -> None:
        self.jit = launch.kernel  # its id is part of the key
        self.kernel = launch.compiled()
        given = {name: index for index, name in enumerate(launch.arguments)}
        parameters = inspect.signature(launch.kernel.fn).parameters.values()
        self._order = [(given.get(each.name, -1), each.default) for each in parameters]
        if [index for index, _ in self._order] == list(range(len(given))):
            self._order = []  # as they are given
        metadata = self.kernel.metadata
        self._direct = _direct(self.kernel)
        self.scratch_per_program = metadata.global_scratch_size * getattr(metadata, "num_ctas", 1)

    def ordered(self, values: list[Any]) -> list[Any]:
        if not self._order:
            return values
        return [values[index] if index >= 0 else default for index, default in self._order]

    def launch(
        self,
        extents: tuple[int, int, int],
        stream: int,
        values: list[Any],
        scratch: torch.Tensor | None,
    ) -> None:
        """``values`` in the order of the parameters; ``scratch`` as :meth:`LaunchCache.scratch_for`."""
        kernel = self.kernel
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        metadata = None
        if not getattr(enter, "calls", True):
            enter = None  # Triton's chain of hooks is empty: a launch costs less without
        if enter is not None:
            metadata = kernel.launch_metadata(extents, stream, *values)
        if not getattr(leave, "calls", True):
            leave = None
        if self._direct is not None:
            address = None if scratch is None else scratch.data_ptr()
            self._direct(extents, stream, (metadata, enter, leave), address, values)
            return
        token = None
        if scratch is not None:
            token = _allocation._allocator.set(lambda size, alignment, stream: scratch)
        try:
            kernel.run(
                *extents, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave,
                *values,
            )  # fmt: skip
        finally:
            if token is not None:
                _allocation._allocator.reset(token)


def _direct(kernel: Any) -> Callable[..., None] | None:
    """A way around the Python half of Triton's launcher of ``kernel``, which only finds scratch memory.

    None for a launcher of another kind than those of Triton 3.6 and 3.7, which takes the way through.
    """
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    launch = getattr(run, "launch", None)
    if type(run) is not _launcher_class() or launch is None or run.profile_scratch_size:
        return None
    fixed = function, run.launch_cooperative_grid, run.launch_pdl
    if hasattr(run, "kernel_signature"):
        parameters = run.arg_annotations, run.kernel_signature
        return lambda grid, stream, hooks, scratch, values: launch(
            *grid, stream, *fixed, packed, *hooks, scratch, None, *parameters, values
        )
    return lambda grid, stream, hooks, scratch, values: launch(
        *grid, stream, *fixed, scratch, None, packed, *hooks, *values
    )


def _launcher_class() -> Any:
    """Triton's launcher for CUDA; None if this Triton is not a known version."""
    if tuple(triton.__version__.split(".")[:2]) not in (("3", "6"), ("3", "7")):
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    return CudaLauncher


class PreparedLaunch:
    """A launch of which the host's work is done. ``scratch`` must live until it has run."""

    __slots__ = ("__weakref__", "_cache", "_compiled", "_extents", "scratch", "values")

    def __init__(
        self,
        cache: LaunchCache,
        compiled: _Compiled,
        extents: tuple[int, int, int],
        values: list[Any],
        scratch: torch.Tensor | None,
    ) -> None:
        self._cache, self._compiled, self._extents = cache, compiled, extents
        self.values, self.scratch = values, scratch

    def in_order(self, arguments: list[Any]) -> list[Any]:
        """``arguments``, given as those of the launch were, in the order of ``values``."""
        return self._compiled.ordered(arguments)

    @property
    def repeatable(self) -> bool:
        """Whether :meth:`run` may be called again: nothing that it uses belongs to one launch."""
        return self.scratch is None

    def again(self, stream: int, capture: int, values: list[Any]) -> None:
        """The same launch once more, on ``stream``, with other values."""
        compiled = self._compiled
        scratch = self._cache.scratch_for(compiled, self._extents, stream, capture)
        compiled.launch(self._extents, stream, values, scratch)

    def run(self, stream: int) -> None:
        self._compiled.launch(self._extents, stream, self.values, self.scratch)


def _unspecialized(kernel: Any) -> frozenset[str]:
    """The parameters of whose values a compiled kernel does not depend."""
    listed = getattr(kernel, "do_not_specialize", None)
    if listed is None:  # an interpreted function keeps what it was decorated with
        listed = getattr(kernel, "kwargs", {}).get("do_not_specialize")
    names = list(inspect.signature(kernel.fn).parameters)
    return frozenset(names[each] if isinstance(each, int) else each for each in listed or ())
