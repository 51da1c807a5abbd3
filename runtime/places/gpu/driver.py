"""The GPU of this process, and functions of the CUDA driver that torch does not offer.

They are called by ctypes from the driver's own library; every driver that torch's releases accept has them.
If a GPU has no such operations on words, the group's kernels write them (:func:`stream_words` is None).

A *stream memory operation* costs no SM and no launch. ``cuStreamWriteValue64`` with default flags fences as
``__threadfence_system`` does, scoped to the stream: a reader that sees the value, on any GPU, sees all
earlier work of the stream. The operation that waits is not used, because CUDA gives it no timeout.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.runtime.compat.launchers import local_rank


def gpu_problem() -> str:
    """Return why this process cannot run kernels on a GPU, or "" if it can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from interlace.runtime.compat.triton_launcher import knobs

    return "TRITON_INTERPRET is set, which compiles no kernels" if knobs.runtime.interpret else ""


def own_gpu() -> torch.device:
    """Return the GPU of this process, its current one; first choose ``torchrun``'s if none was chosen."""
    local = local_rank()
    if local is not None and not torch.cuda.is_initialized():
        torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


CAN_USE_WORDS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT
APART = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """The driver's ``library`` (AttributeError: too old). Words: 64 bits, on device; streams are ints."""

    def __init__(self, library: Any) -> None:
        word, handle, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
        self._write = library.cuStreamWriteValue64_v2
        self._write.argtypes = [handle, word, word, ctypes.c_uint]
        self._new_stream = library.cuStreamCreateWithPriority
        self._new_stream.argtypes = [ctypes.POINTER(handle), ctypes.c_uint, number]
        self._attribute = library.cuDeviceGetAttribute
        self._attribute.argtypes = [ctypes.POINTER(number), number, number]
        self._capture = library.cuStreamGetCaptureInfo_v2
        self._capture.argtypes = [
            handle, ctypes.POINTER(number), ctypes.POINTER(word), handle, handle, handle,
        ]  # fmt: skip
        self._mode = library.cuThreadExchangeStreamCaptureMode
        self._mode.argtypes = [ctypes.POINTER(number)]

    def write(self, stream: int, address: int, value: int) -> None:
        """Write ``value`` to ``address``, for all GPUs, after all earlier work of ``stream``."""
        _check(self._write(stream, address, value, FENCED), "cuStreamWriteValue64")

    def new_stream(self, priority: int) -> int:
        """Make a stream of the current context. It lives as long as the context."""
        stream = ctypes.c_void_p()
        error = self._new_stream(ctypes.byref(stream), APART, priority)
        _check(error, "cuStreamCreateWithPriority")
        return int(stream.value or 0)

    def has_words(self, device: int) -> bool:
        able = ctypes.c_int()
        return not self._attribute(ctypes.byref(able), CAN_USE_WORDS, device) and bool(able.value)

    def capture(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        error = self._capture(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
        _check(error, "cuStreamGetCaptureInfo")
        return number.value

    def leave_captures_alone(self) -> None:
        self._mode(ctypes.byref(ctypes.c_int(RELAXED)))


def _check(error: int, doing: str) -> None:
    if error:
        raise RuntimeError(f"{doing}: error {error}")


@functools.cache
def _load_driver() -> Driver:
    return Driver(ctypes.CDLL("libcuda.so.1"))


@functools.cache
def stream_words(device: int) -> Driver | None:
    """Return the driver that writes words on GPU number ``device``; None if it cannot."""
    driver = _load_driver()
    return driver if driver.has_words(device) else None


@functools.cache
def alarm_stream(device: int) -> torch.cuda.Stream:
    """Return a stream on GPU number ``device`` on which nothing ever waits; one for the whole process.

    It is not from torch's pool of 32, whose streams soon also become some group's copy stream. The first
    call may synchronize the device.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes sure that there is a context
        return torch.cuda.ExternalStream(_load_driver().new_stream(-1))


def current_stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


def capture_of(stream: int) -> int:
    """Return a number for the graph capture of the caller's current ``stream``, or 0."""
    return _load_driver().capture(stream) if torch.cuda.is_current_stream_capturing() else 0


def leave_captures_alone() -> None:
    """Let the calling thread use CUDA while another thread captures a graph. Once per thread."""
    _load_driver().leave_captures_alone()


def pinned_tensor(words: Sequence[int]) -> torch.Tensor:
    """Return an int64 tensor of the host that copy engines and streams can access."""
    return torch.tensor(words, dtype=torch.int64).pin_memory()
