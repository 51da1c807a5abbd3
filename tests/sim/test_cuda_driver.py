"""The driver's functions by ctypes, where cuda-bindings is missing: on a library that does the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from interlace.runtime.places.cuda.driver import RELAXED, Library, StreamWords

SOURCE = """
typedef unsigned long long word;
int cuStreamWriteValue64_v2(void *stream, word address, word value, unsigned flags) {
  if (stream != (void *)(1ull << 40) || flags) return 1;
  *(word *)address = value; return 0;
}
int cuStreamWaitValue64_v2(void *stream, word address, word value, unsigned flags) {
  return *(word *)address >= value && !flags ? 0 : 2;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 122 && device == 3; return 0;
}
int cuStreamGetCaptureInfo_v2(void *stream, int *status, word *id, void **g, void **d, word *n) {
  if (g || d || n) return 1;
  *status = 1; *id = 1ull << 33; return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  if (*mode != 2) return 1;
  *mode = 0; return 0;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_library_does_what_the_bindings_do(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(SOURCE)
    made = tmp_path / "driver.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "driver.c")], check=True
    )
    driver = Library(ctypes.CDLL(str(made)))
    words, cell = StreamWords(driver), ctypes.c_uint64(5)
    address, stream = ctypes.addressof(cell), 1 << 40
    words.write(stream, address, 1 << 50)
    assert cell.value == 1 << 50
    words.wait(stream, address, 1 << 50)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue64: 2"):
        words.wait(stream, address, (1 << 50) + 1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue64: 1"):
        words.write(7, address, 1)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    assert driver.cuDeviceGetAttribute(attribute, 3) == (0, 1)
    assert driver.cuStreamGetCaptureInfo(stream) == (0, 1, 1 << 33)
    assert driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(RELAXED)) == (0, 0)


def test_numbers_are_those_of_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT) == 0
    assert int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == 0
    name = "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS"
    assert int(getattr(driver.CUdevice_attribute, name)) == getattr(
        Library.CUdevice_attribute, name
    )
    assert int(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) == RELAXED
