"""What torch does not offer of CUDA: streams that write and wait for words, and captures told apart.

Through ``cuda-bindings``, which torch's CUDA wheels bring along, or where they do not through the driver's
library itself. Where neither can be had the group's kernels do the same (:func:`stream_words` is None), and
captures are told apart by hand (:func:`capture_of`).

A *stream memory operation* costs no SM and no launch. ``cuStreamWriteValue64`` with default flags fences
as ``__threadfence_system`` does, scoped to the stream: what precedes it on the stream is visible to who
sees the value, on any GPU. ``cuStreamWaitValue64`` holds the stream until the word is large enough; CUDA
does not bound that wait, so whoever enqueues it has it watched (``watchdog.py``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``, or what stands in for it; None where the driver is missing."""
    try:
        from cuda.bindings import driver

        driver.cuDriverGetVersion()
    except Exception:  # it finds the driver's library, or not, at the first call
        try:
            return Library(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError):
            return None
    return driver


class Library:
    """As much of ``cuda.bindings.driver`` as is used here, by ctypes; AttributeError if it is too old."""

    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0)
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=122)
    CUstreamCaptureMode = int

    def __init__(self, library: Any) -> None:
        word, handle, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
        self._write = library.cuStreamWriteValue64_v2
        self._wait = library.cuStreamWaitValue64_v2
        self._write.argtypes = self._wait.argtypes = [handle, word, word, ctypes.c_uint]
        self._attribute = library.cuDeviceGetAttribute
        self._attribute.argtypes = [ctypes.POINTER(number), number, number]
        self._capture = library.cuStreamGetCaptureInfo_v2
        self._capture.argtypes = [
            handle, ctypes.POINTER(number), ctypes.POINTER(word), handle, handle, handle,
        ]  # fmt: skip
        self._mode = library.cuThreadExchangeStreamCaptureMode
        self._mode.argtypes = [ctypes.POINTER(number)]

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        return (self._write(stream, address, value, flags),)

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: int) -> Any:
        return (self._wait(stream, address, value, flags),)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        value = ctypes.c_int()
        return self._attribute(ctypes.byref(value), attribute, device), value.value

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        error = self._capture(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
        return error, status.value, number.value

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:
        value = ctypes.c_int(mode)
        return self._mode(ctypes.byref(value)), value.value


def _checked(answer: tuple[Any, ...], doing: str) -> tuple[Any, ...]:
    if int(answer[0]):
        raise RuntimeError(f"{doing}: {answer[0]!r}")
    return answer[1:]


class StreamWords:
    """64-bit words of device memory that streams write and wait for. Streams and addresses are ints."""

    def __init__(self, driver: Any) -> None:
        self._write, self._wait = driver.cuStreamWriteValue64, driver.cuStreamWaitValue64
        self._fenced = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        self._at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)

    def write(self, stream: int, address: int, value: int) -> None:
        """After everything that precedes it on ``stream``: ``address`` = ``value``, for all GPUs."""
        _checked(self._write(stream, address, value, self._fenced), "cuStreamWriteValue64")

    def wait(self, stream: int, address: int, value: int) -> None:
        """Hold ``stream`` until the word at ``address`` is at least ``value``."""
        _checked(self._wait(stream, address, value, self._at_least), "cuStreamWaitValue64")


@functools.cache
def stream_words(device: int) -> StreamWords | None:
    """Those of GPU number ``device``; None if it or this installation has none."""
    driver = bindings()
    if driver is None:
        return None
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    error, able = driver.cuDeviceGetAttribute(attribute, device)
    return StreamWords(driver) if not int(error) and able else None


def current_stream(device: int) -> int:
    """The handle of the caller's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device))


_captures = 0
_was_capturing = False


def capture_of(stream: int) -> int:
    """A number for the graph capture that the caller's current stream, ``stream``, is in; 0 for none.

    Without the bindings two captures with no call in between are taken for one.
    """
    global _captures, _was_capturing
    if not torch.cuda.is_current_stream_capturing():
        _was_capturing = False
        return 0
    driver = bindings()
    if driver is not None:
        _, number = _checked(driver.cuStreamGetCaptureInfo(stream), "cuStreamGetCaptureInfo")[:2]
        return int(number)
    if not _was_capturing:
        _captures, _was_capturing = _captures + 1, True
    return _captures


def leave_captures_alone() -> None:
    """Let the calling thread use CUDA while another one captures a graph. Once per thread."""
    driver = bindings()
    if driver is not None:
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(RELAXED))


def pinned(words: Sequence[int]) -> torch.Tensor:
    """An int64 tensor of the host that copy engines and streams reach."""
    return torch.tensor(words, dtype=torch.int64).pin_memory()
