"""interlace: collectives that run inside the matmuls they feed, on Triton and symmetric memory.

>>> import interlace
>>> interlace.run(lambda: interlace.get_rank(), 2)
[0, 1]
"""

from __future__ import annotations

import importlib as _importlib
import os as _os
from typing import Any as _Any

import torch as _torch

if "TRITON_INTERPRET" not in _os.environ and not _torch.cuda.is_available():
    # Decides how @triton.jit treats our kernels; has to be there before triton is imported.
    _os.environ["TRITON_INTERPRET"] = "1"

from interlace import symmetric_memory
from interlace.collectives import all_gather, all_reduce, reduce_scatter
from interlace.fused_gather import all_gather_matmul
from interlace.fused_reduce import matmul_all_reduce, matmul_reduce_scatter
from interlace.groups import (
    Group,
    barrier,
    device,
    get_rank,
    get_world_size,
    init,
    new_group,
    shutdown,
)
from interlace.launcher import run
from interlace.runtime.errors import (
    AbortedError,
    CollectiveTimeoutError,
    DeadlockError,
    InterlaceError,
    PeerDiedError,
    PlaceUnavailableError,
    RankError,
)
from interlace.runtime.work import Work

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    """``interlace.verify``, on first use."""
    if name == "verify":
        return _importlib.import_module("interlace.verify")
    raise AttributeError(f"module 'interlace' has no attribute {name!r}")


__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "Group",
    "InterlaceError",
    "PeerDiedError",
    "PlaceUnavailableError",
    "RankError",
    "Work",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "barrier",
    "device",
    "get_rank",
    "get_world_size",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "new_group",
    "reduce_scatter",
    "run",
    "shutdown",
    "symmetric_memory",
]
