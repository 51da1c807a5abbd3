"""``cuda.bindings.driver``: stream memory operations, on streams of the simulated GPU.

Semantics: CUDA driver API, "Stream Memory Operations". A write comes after all earlier work of its stream.
An agent that acquires the written value sees that work. A wait blocks its stream, and acquires.
"""

import ctypes
import enum
from collections.abc import Callable
from typing import Any

import torch

from interlace.kernels import signal
from interlace.symmetric_memory.functions import SymmetricMemory
from interlace_verify.shims.torch_cuda import run_streams


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


class CUstreamWriteValue_flags(enum.IntFlag):  # the driver's name
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


def cuStreamWaitValue32(stream: Any, addr: object, value: object, flags: object) -> tuple[CUresult]:
    """Block the stream until the word compares with ``value`` as ``flags`` says."""
    return _wait(stream, _word(addr), value, flags)


def cuStreamWaitValue64(stream: Any, addr: object, value: object, flags: object) -> tuple[CUresult]:
    return _wait(stream, _long_word(addr), value, flags)


def _wait(stream: Any, word: torch.Tensor, value: Any, flags: Any) -> tuple[CUresult]:
    until, value = _UNTIL[int(flags) & 3], int(value)
    of_run(stream).wait_value(word, lambda seen: until(seen, value), value)
    return (CUresult.CUDA_SUCCESS,)


def cuStreamWriteValue32(stream: Any, addr: Any, value: Any, flags: object) -> tuple[CUresult]:
    """Write the word after all earlier work of the stream."""
    with of_run(stream).current():
        SymmetricMemory.stream_write_value32(_word(addr), 0, int(value))
    return (CUresult.CUDA_SUCCESS,)


def cuStreamWriteValue64(stream: Any, addr: Any, value: Any, flags: object) -> tuple[CUresult]:
    with of_run(stream).current():
        signal.write_value_kernel[(1,)](_long_word(addr), int(value))
    return (CUresult.CUDA_SUCCESS,)


def cuGetErrorName(error: Any) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, CUresult(error).name.encode()


def of_run(stream: Any) -> Any:
    """Return the run's stream that has the number ``stream``, or that is torch's ``stream``."""
    return run_streams().mine()[int(getattr(stream, "cuda_stream", stream))]


def _word(address: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint32 * 1).from_address(int(address)), dtype=torch.uint32)


def _long_word(address: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_int64 * 1).from_address(int(address)), dtype=torch.int64)
