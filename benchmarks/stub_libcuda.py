"""A ``libcuda.so.1`` that does nothing, so that Triton's own launcher runs where there is no GPU.

Triton's launcher is C that it compiles on the machine: it parses the arguments of a launch, packs them, and
calls ``cuLaunchKernelEx``. With this library in the place of the driver it does all of that, and the call
returns at once. Kernels are really compiled, for sm_90, and "loaded" from a cubin that nobody runs.

The stub does not cover the driver itself (a launch takes it a few microseconds) and the CUDA runtime under
``torch.cuda``. The runtime asks the driver for undocumented tables, so it cannot be replaced in this way.

``install`` must come before triton is imported by anybody, and ``LD_LIBRARY_PATH`` is not needed: a library
of that name which is loaded already is the one that ``dlopen`` finds.
"""

import ctypes
import os
import subprocess
from pathlib import Path

_ZERO = (
    "cuInit", "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleUnload", "cuFuncSetCacheConfig",
    "cuFuncSetAttribute", "cuCtxSetLimit", "cuCtxGetLimit", "cuTensorMapEncodeTiled",
    "cuOccupancyMaxActiveClusters", "cuStreamWriteValue64_v2", "cuStreamCreateWithPriority",
    "cuStreamGetCaptureInfo_v2", "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip

_SOURCE = """
#include <stddef.h>
long stub_launches = 0;
int stub_parameters = 0;                /* how many of a launch to keep, of eight bytes or four */
unsigned long long stub_kept[64];
unsigned stub_grid[3];
int cuGetErrorString(int code, const char **text) { *text = "the stub has refused"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; break;       /* warp size */
    case 12: *value = 65536; break;    /* registers per block */
    case 16: *value = 132; break;      /* multiprocessors */
    case 81: *value = 233472; break;   /* shared memory per multiprocessor */
    case 97: *value = 232448; break;   /* shared memory per block, opt-in */
    default: *value = 1000;
  }
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)8; return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0;  /* threads per block */
  return 0;
}
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
  *(unsigned long long *)data = pointer; return 0;
}
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra) {
  stub_launches++;
  for (int i = 0; i < stub_parameters; i++) stub_kept[i] = *(unsigned long long *)parameters[i];
  for (int i = 0; i < 3; i++) stub_grid[i] = ((const unsigned *)config)[i];
  return 0;
}
"""


def install(folder: Path) -> ctypes.CDLL:
    """Build it in ``folder``, which also gets Triton's cache, and load it. Needs gcc."""
    source, library = folder / "stub_libcuda.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE + "".join(f"int {name}() {{ return 0; }}\n" for name in _ZERO))
    command = ["gcc", "-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    os.environ["TRITON_INTERPRET"] = "0"
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def activate() -> None:
    """Make Triton take the stub for its GPU, one of sm_90."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    made = CudaDriver()
    made.get_current_stream = lambda device: 1
    made.get_current_device = lambda: 0
    made.set_current_device = lambda device: None
    made.get_device_capability = lambda device: (9, 0)
    driver.set_active(made)
