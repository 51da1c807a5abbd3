"""CUDA's runtime in Python, as ``triton_dist.utils.cudart``: copies on streams of the simulated GPU."""

import ctypes
import enum
from typing import Any

import torch

from interlace_verify.shims.cuda_driver import of_run
from interlace_verify.shims.triton_dist import missing


class cudaError_t(enum.IntEnum):  # the runtime's names
    cudaSuccess = 0


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


def cudaMemcpyAsync(dst: Any, src: Any, count: int, kind: Any, stream: Any) -> tuple[cudaError_t]:
    """Copy ``count`` bytes after all earlier work of the stream: by the copy engine, in pieces."""
    with of_run(stream).current():
        to, source = (_at(address, count) for address in (dst, src))
        to.copy_(source)
    return (cudaError_t.cudaSuccess,)


def _at(address: Any, count: int) -> torch.Tensor:
    """Return 32-bit words if possible, because a race names words more clearly."""
    words = not (int(address) | count) % 4
    kind, dtype = (ctypes.c_int32, torch.int32) if words else (ctypes.c_uint8, torch.uint8)
    memory = (kind * (count // ctypes.sizeof(kind))).from_address(int(address))
    return torch.frombuffer(memory, dtype=dtype)


def cudaGetErrorString(error: Any) -> tuple[cudaError_t, bytes]:
    return cudaError_t.cudaSuccess, cudaError_t(error).name.encode()


__getattr__ = missing.of("cuda.bindings.runtime")
