"""Triton's driver of a GPU that need not be here, for code that asks ``triton.runtime.driver.active``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from interlace.runtime.compat.releases import needed

with needed("Triton", "Triton's driver"):
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    _ = driver.set_active, driver._active

PROGRAMS = 8
"""That may wait for each other, each on an SM of its own."""


class StandIn:
    """What host code, and the compiler of ``tl.target_info``, ask of a driver; its ``utils`` too."""

    def __init__(self, arch: int) -> None:
        self.arch, self.utils = arch, self

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> Any:
        import torch  # compiling processes have none

        on_gpu = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any = 0) -> dict[str, int]:
        return {
            "max_shared_mem": (227 if self.arch >= 90 else 163) << 10,
            "max_num_regs": 65536,
            "multiprocessor_count": PROGRAMS,
            "warpSize": 32,
        }


@contextmanager
def driver_of(arch: int) -> Iterator[None]:
    """Within the block the active driver is one of an ``arch``, 90 for sm_90."""
    before = driver._active
    driver.set_active(StandIn(arch))
    try:
        yield
    finally:
        driver._active = before
