"""Collectives in which all ranks do the same, for ``bench``."""

from __future__ import annotations

from typing import Any

import torch

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

    def call(self, library: Any, x: Any, **how: Any) -> Any:
        library.all_reduce(x, **how)
        return x

    def alone_inputs(self, call: int) -> Tensors:
        """The own parts of all ranks, the sums that others would send, and where they go."""
        sums = self.of(0, call)
        for rank in range(1, self.world_size):
            sums += self.of(rank, call)
        return torch.stack(self._own_parts(call)), sums, self.empty(self.whole)

    def alone(self, parts: Any, sums: Any, output: Any) -> Any:  # type: ignore[override]
        first, end = self.own, self.own + self.part
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

    @property
    def message_bytes(self) -> int:
        return self.nbytes // self.world_size

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call, count=self.part)

    def call(self, library: Any, output: Any, x: Any, **how: Any) -> Any:
        library.all_gather(output, x, **how)
        return output

    def theirs(self, output: Any, x: Any) -> Any:
        torchs("all_gather_single", "all_gather_into_tensor")(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        parts = [self.of(r, call, count=self.part) for r in range(self.world_size)]
        return self.empty(self.whole), torch.cat(parts)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        parts = result.view(self.world_size, self.part)
        return max(payload.error_of_copy(part, 0, r, call) for r, part in enumerate(parts))


class ReduceScatter(Plain):
    op = "reduce_scatter"
    algorithms: tuple[str, ...] = ("auto", "kernel", "copy", "multimem")

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.part), self.of(self.rank, call)

    def call(self, library: Any, output: Any, x: Any, **how: Any) -> Any:
        library.reduce_scatter(output, x, **how)
        return output

    def theirs(self, output: Any, x: Any) -> Any:
        torchs("reduce_scatter_single", "reduce_scatter_tensor")(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.part), torch.stack(self._own_parts(call))

    def alone(self, output: Any, parts: Any) -> Any:
        return torch.sum(parts, 0, dtype=parts.dtype, out=output)

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        return self._sum(result, self.own, call, rounds_often)


class AllToAll(Plain):
    op = "all_to_all"

    def inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), self.of(self.rank, call)

    def call(self, library: Any, output: Any, x: Any) -> Any:
        library.all_to_all_single(output, x)
        return output

    def alone_inputs(self, call: int) -> Tensors:
        return self.empty(self.whole), torch.cat(self._own_parts(call))

    def check(self, result: torch.Tensor, call: int, rounds_often: bool = False) -> float:
        parts = result.view(self.world_size, self.part)
        return max(payload.error_of_copy(part, self.own, r, call) for r, part in enumerate(parts))


class Barrier(Plain):
    """Moves nothing, so there is no size, no bandwidth and nothing to check."""

    op = "barrier"
    has_size = False

    def __init__(self, setting: Setting, nbytes: int) -> None:
        self.setting = setting
        self.nbytes, self.bus_factor = 0, None

    def inputs(self, call: int) -> Tensors:
        return ()

    alone_inputs = inputs  # and baselines refuse it: a rank alone meets nobody

    def call(self, library: Any) -> None:
        library.barrier()

    def check(self, result: Any, call: int, rounds_often: bool = False) -> float:
        return 0.0
