"""A stand-in for CuPy, as far as a loader needs it: for machines without a GPU. Installed as ``cupy``.

Arrays are NumPy's with an address; ``launches`` has every launch, ``allocations`` every ``cuda.alloc``.
"""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import numpy
from numpy import int64 as int64, uint8 as uint8, uint16 as uint16, uint64 as uint64

MULTIPROCESSORS = 132
DEFAULT_STREAM = 0

modules: list[dict[str, Any]] = []
launches: list[dict[str, Any]] = []
allocations: list[int] = []
_streams = [DEFAULT_STREAM]


class ndarray(numpy.ndarray):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ctypes.data, False), "shape": self.shape, "version": 3}


def zeros(shape: Any, dtype: Any) -> Any:
    return numpy.zeros(shape, dtype).view(ndarray)


empty = zeros


def array(values: Any, dtype: Any) -> Any:
    return numpy.array(values, dtype).view(ndarray)


class _Function:
    def __init__(self, module: dict[str, Any], name: str) -> None:
        self._module, self._name = module, name
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: too much dynamic shared memory")
        record = {"name": self._name, "grid": grid, "block": block, "shared_mem": shared_mem}
        launches.append({**self._module, **record, "args": args, "stream": _streams[-1]})


class RawModule:
    def __init__(
        self, *, path: str = "", code: str = "", enable_cooperative_groups: bool = False
    ) -> None:
        self._cubin = code.encode() or pathlib.Path(path).read_bytes()
        self._facts = {"path": path, "cooperative": enable_cooperative_groups}
        modules.append(self._facts)

    def get_function(self, name: str) -> _Function:
        if name.encode() not in self._cubin:
            raise RuntimeError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        return _Function(self._facts, name)


class _Stream:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __enter__(self) -> _Stream:
        _streams.append(self.ptr)
        return self

    def __exit__(self, *exception: object) -> None:
        _streams.pop()


class _Device:
    compute_capability = "90"

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": MULTIPROCESSORS}

    def synchronize(self) -> None:
        pass


def _alloc(size: int) -> Any:
    allocations.append(size)
    return SimpleNamespace(ptr=4096 * len(allocations))


cuda = SimpleNamespace(
    Device=_Device,
    ExternalStream=_Stream,
    alloc=_alloc,
    get_current_stream=lambda: _Stream(_streams[-1]),
    runtime=SimpleNamespace(getDevice=lambda: 0),
)
