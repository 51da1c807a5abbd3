"""``algorithm="kernel"`` and ``"copy"`` of a plain collective: what an engine would otherwise choose.

Both run on a rank's streams, in every place, also where the group's own engine uses none. A kernel sums and
averages the dtypes that Triton has; copies serve every op.
"""

from __future__ import annotations

import torch

from interlace import checks
from interlace.runtime.collective_algorithms import KERNEL_DTYPES
from interlace.runtime.communicator import Communicator
from interlace.runtime.engine import Engine
from interlace.runtime.stream_engine import StreamEngine

COLLECTIVE_ALGORITHMS = ("auto", "kernel", "copy")


def check(
    algorithm: str, dtype: torch.dtype, communicator: Communicator, op: str | None = None
) -> None:
    """Raise ValueError or TypeError unless ``algorithm`` can do ``op`` (None: only move) for ``dtype``."""
    rank = communicator.rank
    checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS, rank)
    if algorithm == "kernel" and dtype not in KERNEL_DTYPES:
        raise TypeError(
            f'algorithm="kernel" supports float32, float16 and bfloat16, got {dtype} on rank {rank}'
        )
    if algorithm == "kernel" and op is not None and op not in checks.REDUCE_OPS:
        raise ValueError(
            f'algorithm="kernel" reduces with op {" or ".join(checks.REDUCE_OPS)}, got {op!r} '
            f"on rank {rank}"
        )


def serving(engine: Engine, communicator: Communicator, algorithm: str) -> Engine:
    """What runs a call whose term "algorithm" is ``algorithm``."""
    if algorithm == "auto" or isinstance(engine, StreamEngine):
        return engine
    return StreamEngine(communicator)
