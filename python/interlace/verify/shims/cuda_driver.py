"""``cuda.bindings.driver``: stream memory operations, on streams of the simulated GPU.

Semantics: CUDA driver API, "Stream Memory Operations". A write comes after all that its stream has been
given before, and is seen by whoever acquires its value; a wait holds its stream, and acquires.
"""

import ctypes
import enum
from collections.abc import Callable
from typing import Any

import torch

from interlace.symmetric_memory.handle import SymmetricMemory
from interlace.verify.shims.torch_cuda import run_streams


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0


class CUstreamWaitValue_flags(enum.IntFlag):  # the driver's name
    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1
    CU_STREAM_WAIT_VALUE_AND = 2
    CU_STREAM_WAIT_VALUE_NOR = 3


_UNTIL: tuple[Callable[[int, int], bool], ...] = (
    lambda seen, value: seen - value >= 0,
    lambda seen, value: seen == value,
    lambda seen, value: bool(seen & value),
    lambda seen, value: bool(~(seen | value) & 0xFFFFFFFF),
)


def cuStreamWaitValue32(stream: Any, addr: Any, value: Any, flags: Any) -> tuple[CUresult]:
    """Hold the stream until the word is as ``flags`` says."""
    until, value = _UNTIL[int(flags) & 3], int(value)
    _of(stream).wait_value(_word(addr), lambda seen: until(seen, value), value)
    return (CUresult.CUDA_SUCCESS,)


def cuStreamWriteValue32(stream: Any, addr: Any, value: Any, flags: Any) -> tuple[CUresult]:
    """Write the word after what the stream has been given before."""
    with _of(stream).current():
        SymmetricMemory.stream_write_value32(_word(addr), 0, int(value))
    return (CUresult.CUDA_SUCCESS,)


def _of(stream: Any) -> Any:
    return run_streams().mine()[int(stream)]


def _word(address: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint32 * 1).from_address(int(address)), dtype=torch.uint32)
