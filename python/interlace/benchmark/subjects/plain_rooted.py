"""Collectives from or to rank 0, and messages around a ring, for ``bench``."""

from __future__ import annotations

from typing import Any

import torch

from interlace.benchmark.subjects.plain import Plain, Tensors
from interlace.benchmark.subjects.plain_all import AllGather, AllReduce
from interlace.benchmark.timing import payload


class Broadcast(Plain):
    op = "broadcast"
    algorithms: tuple[str, ...] = ("auto", "copy", "low_latency")
    reduces = False

    def inputs(self, call: int) -> Tensors:
        return (self.empty(self.whole) if self.rank else self.of(0, call),)

    def call(self, library: Any, x: Any, **how: Any) -> Any:
        library.broadcast(x, 0, **how)
        return x

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(0, call)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return payload.error_of_copy(result, 0, 0, call)


class Reduce(AllReduce):
    op = "reduce"
    algorithms: tuple[str, ...] = ("auto",)

    def call(self, library: Any, x: Any) -> Any:  # type: ignore[override]
        library.reduce(x, 0)
        return x

    def alone_inputs(self, call: int) -> Tensors:
        if self.rank:
            return (None, None)
        stacked = torch.stack([self.of(rank, call) for rank in range(self.world_size)])
        return stacked, self.empty(self.whole)

    def alone(self, stacked: Any, output: Any) -> Any:  # type: ignore[override]
        if self.rank:
            return None
        return torch.sum(stacked, 0, dtype=stacked.dtype, out=output)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return 0.0 if self.rank else self._sum(result, 0, call, rounds_often)


class Gather(AllGather):
    op = "gather"
    algorithms: tuple[str, ...] = ("auto",)

    def inputs(self, call: int) -> Tensors:
        mine = self.of(self.rank, call, count=self.part)
        if self.rank:
            return mine, None, None
        output = self.empty(self.whole)
        return mine, list(output.chunk(self.world_size)), output

    def call(self, library: Any, x: Any, parts: Any, output: Any) -> Any:  # type: ignore[override]
        library.gather(x, parts, 0)
        return output

    theirs = Plain.theirs  # type: ignore[assignment]

    def alone_inputs(self, call: int) -> Tensors:
        return (None, None) if self.rank else super().alone_inputs(call)

    def alone(self, output: Any, source: Any) -> Any:
        return None if self.rank else output.copy_(source)

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        return 0.0 if self.rank else super().check(result, call)


class Scatter(Plain):
    op = "scatter"

    def inputs(self, call: int) -> Tensors:
        parts = None if self.rank else list(self.of(0, call).chunk(self.world_size))
        return self.empty(self.part), parts

    def call(self, library: Any, output: Any, parts: Any) -> Any:
        library.scatter(output, parts, 0)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.part), self.of(0, call, self.own, self.part)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return payload.error_of_copy(result, self.own, 0, call)


class SendRecv(Plain):
    """To the next rank, from the one before."""

    op = "send_recv"
    least_ranks = 2

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.world_size

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call)

    def call(self, library: Any, output: Any, x: Any) -> Any:
        ops = [
            library.P2POp(library.isend, x, (self.rank + 1) % self.world_size),
            library.P2POp(library.irecv, output, self.before),
        ]
        for work in library.batch_isend_irecv(ops):
            work.wait()
        return output

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.before, call)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return payload.error_of_copy(result, 0, self.before, call)
