"""Collectives in which all ranks do the same, for ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark.subjects.plain import Plain, Tensors, torchs
from interlace.benchmark.timing import payload
from interlace.benchmark.timing.subject import Setting


class AllReduce(Plain):
    op = "all_reduce"
    algorithms: tuple[str, ...] = ("auto", "kernel", "copy", "multimem", "low_latency")

    def inputs(self, call: int) -> Tensors:
        return (self.of(self.rank, call),)

    def timed_inputs(self, call: int) -> Tensors:
        return (self.empty(self.whole).zero_(),)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            interlace.all_reduce(x, algorithm=algorithm)
            return x

        return run

    def theirs(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def alone_inputs(self, call: int) -> Tensors:
        """The own parts of all ranks, the sums that others would send, and where they go."""
        own = self.rank * self.part
        parts = [self.of(rank, call, own, self.part) for rank in range(self.world_size)]
        sums = self.of(0, call)
        for rank in range(1, self.world_size):
            sums += self.of(rank, call)
        return torch.stack(parts), sums, self.empty(self.whole)

    def alone(self, parts: torch.Tensor, sums: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        first, end = self.rank * self.part, (self.rank + 1) * self.part
        torch.sum(parts, 0, dtype=parts.dtype, out=output[first:end])
        output[:first].copy_(sums[:first])
        output[end:].copy_(sums[end:])
        return output

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return self._sum(result, 0, call, rounds_often)


class AllGather(Plain):
    op = "all_gather"
    reduces = False
    algorithms: tuple[str, ...] = ("auto", "kernel", "copy", "multimem", "low_latency")

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call, count=self.part)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        def run(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            interlace.all_gather(output, x, algorithm=algorithm)
            return output

        return run

    def theirs(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torchs("all_gather_single", "all_gather_into_tensor")(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self._gathered(call)

    @property
    def message_bytes(self) -> int:
        return self.nbytes // self.world_size

    def _gathered(self, call: int) -> torch.Tensor:
        return torch.cat([self.of(r, call, count=self.part) for r in range(self.world_size)])

    alone = Plain._copied

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        parts = result.view(self.world_size, self.part)
        return max(payload.error_of_copy(part, 0, r, call) for r, part in enumerate(parts))


class ReduceScatter(Plain):
    op = "reduce_scatter"
    algorithms: tuple[str, ...] = ("auto", "kernel", "copy", "multimem")

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.part), self.of(self.rank, call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        def run(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            interlace.reduce_scatter(output, x, algorithm=algorithm)
            return output

        return run

    def theirs(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torchs("reduce_scatter_single", "reduce_scatter_tensor")(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        own = self.rank * self.part
        parts = [self.of(rank, call, own, self.part) for rank in range(self.world_size)]
        return self.empty(self.part), torch.stack(parts)

    def alone(self, output: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        return torch.sum(parts, 0, dtype=parts.dtype, out=output)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return self._sum(result, self.rank * self.part, call, rounds_often)


class AllToAll(Plain):
    op = "all_to_all"

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call)

    def ours(self, algorithm: str) -> Callable[..., Any]:
        def run(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            interlace.all_to_all_single(output, x)
            return output

        return run

    def theirs(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        own = self.rank * self.part
        parts = [self.of(rank, call, own, self.part) for rank in range(self.world_size)]
        return self.empty(self.whole), torch.cat(parts)

    alone = Plain._copied

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        own, parts = self.rank * self.part, result.view(self.world_size, self.part)
        return max(payload.error_of_copy(part, own, r, call) for r, part in enumerate(parts))


class Barrier(Plain):
    """Moves nothing, so there is no size, no bandwidth and nothing to check."""

    op = "barrier"
    has_size = False

    def __init__(self, setting: Setting, nbytes: int) -> None:
        self.setting = setting
        self.nbytes, self.bus_factor = 0, None

    def inputs(self, call: int) -> Tensors:
        return ()

    def ours(self, algorithm: str) -> Callable[..., Any]:
        return interlace.barrier

    def theirs(self, *tensors: Any) -> None:
        dist.barrier()

    def alone_inputs(self, call: int) -> Tensors:
        return ()

    def alone(self, *tensors: Any) -> None:
        """A rank alone meets nobody."""

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        return 0.0
