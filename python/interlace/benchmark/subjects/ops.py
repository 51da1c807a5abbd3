"""The ops that ``bench`` knows, by name."""

from __future__ import annotations

from interlace.benchmark.subjects.fused import (
    AllGatherMatmul,
    Fused,
    MatmulAllReduce,
    MatmulReduceScatter,
)
from interlace.benchmark.subjects.plain import Plain
from interlace.benchmark.subjects.plain_all import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    ReduceScatter,
)
from interlace.benchmark.subjects.plain_rooted import Broadcast, Gather, Reduce, Scatter, SendRecv

_PLAIN: tuple[type[Plain], ...] = (
    AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Reduce, Gather, Scatter, SendRecv, Barrier,
)  # fmt: skip
_FUSED: tuple[type[Fused], ...] = (AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce)

PLAIN: dict[str, type[Plain]] = {kind.op: kind for kind in _PLAIN}
FUSED: dict[str, type[Fused]] = {kind.op: kind for kind in _FUSED}
NAMES = (*PLAIN, *FUSED)


def algorithms(op: str) -> tuple[str, ...]:
    """The values of ``algorithm=`` that the op takes, "auto" first."""
    return PLAIN[op].algorithms if op in PLAIN else FUSED[op].algorithms
