"""The driver's functions by ctypes, on a library that stands for the driver."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from interlace.runtime.places.gpu import driver as cuda_driver
from interlace.runtime.places.gpu.driver import APART, CAN_USE_WORDS, FENCED, RELAXED, Driver
from stand_ins.replaced import replaced

SOURCE = """
typedef unsigned long long word;
int cuStreamWriteValue64_v2(void *stream, word address, word value, unsigned flags) {
  if (stream != (void *)(1ull << 40) || flags) return 1;
  *(word *)address = value; return 0;
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  if (flags != 1 || priority != -1) return 2;
  *stream = (void *)(1ull << 41); return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 122 && device == 3; return 0;
}
int cuStreamGetCaptureInfo_v2(void *stream, int *status, word *id, void **g, void **d, word *n) {
  if (g || d || n) return 1;
  *status = 1; *id = 1ull << 33; return 0;
}
static int relaxed;
int cuThreadExchangeStreamCaptureMode(int *mode) { relaxed = *mode == 2; *mode = 0; return 0; }
int exchanged(void) { return relaxed; }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_what_the_driver_is_asked(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(SOURCE)
    made = tmp_path / "driver.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "driver.c")], check=True
    )
    driver = Driver(ctypes.CDLL(str(made)))
    cell = ctypes.c_uint64(5)
    address, stream = ctypes.addressof(cell), 1 << 40
    driver.write(stream, address, 1 << 50)
    assert cell.value == 1 << 50
    assert driver.new_stream(-1) == 1 << 41
    with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority: error 2"):
        driver.new_stream(5)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue64: error 1"):
        driver.write(7, address, 1)
    assert driver.has_words(3) and not driver.has_words(0)
    assert driver.capture(stream) == 1 << 33
    driver.leave_captures_alone()
    assert ctypes.CDLL(str(made)).exchanged() == 1


def test_the_alarm_has_a_stream_of_its_own() -> None:
    """All groups share it, and it is not from torch's pool, whose streams groups use for copies."""
    made: list[int] = []
    library = SimpleNamespace(new_stream=lambda priority: made.append(priority) or 77)
    context = SimpleNamespace(synchronize=lambda: None)
    cuda_driver.alarm_stream.cache_clear()
    with replaced(
        (cuda_driver, "_loaded", lambda: library),
        (torch.cuda, "device", contextlib.nullcontext),
        (torch.cuda, "current_stream", lambda: context),
        (torch.cuda, "ExternalStream", lambda handle: ("external", handle)),
        (torch.cuda, "Stream", lambda **how: ("of the pool", how)),
    ):
        assert [cuda_driver.alarm_stream(0) for _ in range(2)] == [("external", 77)] * 2
    cuda_driver.alarm_stream.cache_clear()
    assert made == [-1]


def test_an_old_driver_is_none() -> None:
    with pytest.raises(AttributeError):
        Driver(ctypes.CDLL(None))


def test_numbers_are_those_of_nvidias_bindings() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    assert int(bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT) == FENCED
    assert int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING) == APART
    name = "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"
    assert int(getattr(bindings.CUdevice_attribute, name)) == CAN_USE_WORDS
    assert int(bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) == RELAXED
