"""``algorithm`` of a plain collective: what an engine would otherwise choose.

===============  ======================================================================================
"kernel"         one Triton kernel that pushes; sums and averages of the dtypes that Triton has
"copy"           the copy engine and torch operators; every op and dtype
"multimem"       one Triton kernel that lets the switch send to all ranks, and sum; "sum" of the same
                 dtypes, in an order of the switch's own. Needs memory with a multicast address
"low_latency"    one Triton kernel whose words carry their own flags, for up to 64 KiB a rank. Moves any
                 dtype, sums and averages those that Triton has; equal shards
===============  ======================================================================================

All run on a rank's streams, in every place, also where the group's own engine uses none; the last two need
all ranks on one node.
"""

from typing import get_args

import torch

from interlace.arguments import checks
from interlace.arguments.words import CollectiveAlgorithm
from interlace.ops.collectives.launch import KERNEL_DTYPES
from interlace.ops.collectives.node_engine import HierarchicalEngine as HierarchicalEngine
from interlace.ops.collectives.stream_engine import StreamEngine
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine

COLLECTIVE_ALGORITHMS: tuple[str, ...] = get_args(CollectiveAlgorithm)
ONE_NODE_ALGORITHMS = ("multimem", "low_latency")


def check(
    algorithm: str, dtype: torch.dtype, communicator: Communicator, op: str | None = None
) -> None:
    """Raise ValueError or TypeError unless ``algorithm`` can do ``op`` (None: only move) for ``dtype``."""
    checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS)
    check_nodes(algorithm, communicator)
    typed = algorithm in ("kernel", "multimem") or (algorithm == "low_latency" and op is not None)
    if typed and dtype not in KERNEL_DTYPES:
        raise TypeError(
            f'algorithm="{algorithm}" supports float32, float16 and bfloat16, got {dtype}'
        )
    reductions = ("sum",) if algorithm == "multimem" else checks.REDUCE_OPS
    if typed and op is not None and op not in reductions:
        raise ValueError(
            f'algorithm="{algorithm}" reduces with op {" or ".join(reductions)}, got {op!r}'
        )


def check_nodes(algorithm: str, communicator: Communicator) -> None:
    """Raise ValueError if ``algorithm`` cannot reach all ranks."""
    nodes = communicator.place.nodes
    if nodes is not None and algorithm in ONE_NODE_ALGORITHMS:
        raise ValueError(
            f'algorithm="{algorithm}" needs all ranks on one node, and this group is on '
            f"{len(nodes.names())} in place {communicator.place.name!r}"
        )


def serving(communicator: Communicator, algorithm: str) -> Engine:
    """The engine that runs a call whose term "algorithm" is ``algorithm``."""
    engine = communicator.engine
    if algorithm == "auto" or isinstance(engine, StreamEngine):
        return engine
    return StreamEngine(communicator)
