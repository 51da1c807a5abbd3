"""Reductions in two steps: over the ranks of each host, then over the hosts.

What a host sends to another is a partial result, in the dtype in which :func:`reductions.fold` would go on
computing, so that there is one rounding, at the end::

    float16, bfloat16, float8   sum, avg, product: float32 (min and max pick, so they stay as they are)
    complex32                   complex64
    whole numbers, avg          the sum in int64 (uint64: itself, modulo 2**64); divided at the end

The order is ``(r0 + r1 + ...) + (r4 + r5 + ...) + ...``: ranks within a host, then hosts, both ascending.
It depends on nothing but who is on which host, and each element is finished by one rank only, or by ranks
that do the same with the same numbers: so all ranks get the same bits, and the same in every run. Rounding
may differ from that of the same ranks on one host, whose sum has no brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.runtime.numerics import reductions


@dataclass(frozen=True)
class Partial:
    """The two steps of ``op`` over tensors of one dtype: ``step`` in ``dtype``, then the rest."""

    op: str
    step: str
    dtype: torch.dtype

    @classmethod
    def of(cls, op: str, dtype: torch.dtype) -> Partial:
        if dtype == torch.bool:
            # the mean of bools, truncated, is whether all are true
            return cls("band", "band", dtype) if op == "avg" else cls(op, op, dtype)
        step = "sum" if op == "avg" else op
        if dtype in reductions.NARROW_FLOATS and op not in ("min", "max"):
            return cls(op, step, torch.float32)
        if dtype == torch.complex32:
            return cls(op, step, torch.complex64)
        whole = not dtype.is_floating_point and not dtype.is_complex
        if op == "avg" and whole and dtype != torch.uint64:
            return cls(op, step, torch.int64)
        return cls(op, step, dtype)

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in the dtype of partial results; itself if that is its own."""
        return tensor.to(self.dtype)

    def finish(self, parts: Sequence[torch.Tensor], output: torch.Tensor, count: int) -> None:
        """``output``, which may be a part, = ``parts`` of all hosts put together, for ``count`` ranks."""
        total = output
        if output.dtype != self.dtype:
            total = torch.empty(output.shape, dtype=self.dtype)
        reductions.fold(self.step, parts, total)
        if self.op == "avg":
            reductions.divide(total, count)
        if total is not output:
            output.copy_(total)
