"""The ops that ``bench`` knows, by name."""

from __future__ import annotations

from interlace.benchmark.subjects import fused, plain
from interlace.benchmark.subjects.fused import Fused
from interlace.benchmark.subjects.plain import Plain

_PLAIN: tuple[type[Plain], ...] = (
    plain.AllReduce, plain.AllGather, plain.ReduceScatter, plain.AllToAll, plain.Broadcast,
    plain.Reduce, plain.Gather, plain.Scatter, plain.SendRecv, plain.Barrier,
)  # fmt: skip
_FUSED: tuple[type[Fused], ...] = (
    fused.AllGatherMatmul, fused.MatmulReduceScatter, fused.MatmulAllReduce,
)  # fmt: skip

FUSED: dict[str, type[Fused]] = {kind.op: kind for kind in _FUSED}
OPS: dict[str, type[Plain | Fused]] = {**{kind.op: kind for kind in _PLAIN}, **FUSED}
