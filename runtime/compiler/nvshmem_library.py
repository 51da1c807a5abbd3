"""The path of NVSHMEM's device code, the bitcode with which kernels that put are linked.

Its version must equal the version of the host library that the process loads, which is torch's. Torch's
wheels for CUDA bring the package ``nvidia-nvshmem-cu12`` or ``-cu13``, so this file looks there first.
Releases up to 3.5 have one bitcode file for all architectures. Later ones have one for each of some
architectures, and the nearest older architecture's file is used.
"""

import importlib.metadata
import os
import pathlib
from collections.abc import Iterator

import torch

from interlace.kernels.node_puts import LIBRARY
from interlace.runtime.core.errors import PlaceUnavailableError

PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
FOLDER = "nvidia/nvshmem/lib"
NUMBERED = f"{LIBRARY}_sm_[0-9]*.bc"
VARIABLE = "NVSHMEM_LIB_DIR"  # torch also reads it
SYSTEM = ("/usr/local/lib", "/usr/lib", "/opt/nvidia/nvshmem/lib")


def device_library(arch: int, folder: str | None = None) -> str:
    """Return the path of the bitcode for ``arch``, 90 for 9.0. An error names where it looked."""
    looked = []
    for place in [pathlib.Path(folder)] if folder else _places():
        if (place / f"{LIBRARY}.bc").is_file():
            return str(place / f"{LIBRARY}.bc")
        by_arch = {int(path.stem.rpartition("_")[2]): path for path in place.glob(NUMBERED)}
        fitting = [number for number in by_arch if number <= arch]
        if fitting:
            return str(by_arch[max(fitting)])
        looked.append(str(place))
    raise PlaceUnavailableError(
        f"NVSHMEM's device library for sm_{arch} ({LIBRARY}.bc) is not in {', '.join(looked)}; "
        f"install {_package()}, or name its folder"
    )


def _places() -> Iterator[pathlib.Path]:
    if os.environ.get(VARIABLE):
        yield pathlib.Path(os.environ[VARIABLE])
        return
    for package in sorted(PACKAGES, key=lambda name: name != _package()):
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield pathlib.Path(str(found.locate_file(FOLDER)))
    yield from map(pathlib.Path, SYSTEM)


def _package() -> str:
    return PACKAGES[1] if str(torch.version.cuda or "13").startswith("12") else PACKAGES[0]
