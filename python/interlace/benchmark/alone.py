"""Collectives of torch's way: through torch.distributed, and on one rank alone.

"Alone" is the baseline ``torch``: the same copies and sums, from the rank's own memory, without a rank
waiting for another. What the others would send is computed before: all ranks are played as far as their
first collective, whose inputs are then known, with what it brings as far as the second one, and so on.
"""

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from interlace.benchmark.plain import AllGather, ReduceScatter, Tensors, torchs


class TorchCollectives:
    """Those of torch.distributed's default group; they return what they fill."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        torchs(AllGather)(output, input)
        return output

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        torchs(ReduceScatter)(output, input)
        return output

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(output, input)
        return output


TORCH = TorchCollectives()


class _NotArrivedError(Exception):
    """A collective of which nothing has arrived yet: its name and its input."""


class LoneCollectives(TorchCollectives):
    """One rank's; ``arrived`` has what each of them brings, in their order."""

    def __init__(self, rank: int, arrived: Sequence[Any]) -> None:
        self._rank, self._arrived = rank, iter(arrived)

    def _brought(self, name: str, input: torch.Tensor) -> Any:
        for each in self._arrived:
            return each
        raise _NotArrivedError(name, input)

    def _sum(self, parts: torch.Tensor, input: torch.Tensor, output: torch.Tensor) -> None:
        parts[self._rank] = input.reshape(parts.shape)[self._rank]
        torch.sum(parts, 0, dtype=parts.dtype, out=output)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return output.copy_(self._brought("all_gather", input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        self._sum(self._brought("reduce_scatter", input), input, output.view(-1))
        return output

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The own part is summed here, the other sums are copied."""
        parts, sums = self._brought("all_reduce", tensor)
        output = torch.empty_like(tensor).copy_(sums)
        self._sum(parts, tensor, output.view(parts.shape)[self._rank])
        return output

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return output.copy_(self._brought("all_to_all", input))


def _arriving(name: str, inputs: Sequence[torch.Tensor], rank: int) -> Any:
    """What a collective brings to ``rank``, of all ranks' inputs."""
    if name == "all_gather":
        return torch.cat(list(inputs))
    if name == "all_to_all":
        return torch.cat([each.chunk(len(inputs))[rank] for each in inputs])
    parts = torch.stack([each.reshape(len(inputs), -1)[rank] for each in inputs])
    return parts if name == "reduce_scatter" else (parts, sum(inputs))


class Alone:
    """``op``, with these ``sizes`` and ``settings``, on one rank."""

    def __init__(self, op: Any, sizes: Sequence[int], settings: Mapping[str, Any]) -> None:
        self._op, self._sizes, self._settings = copy.copy(op), sizes, settings

    def _of(self, rank: int) -> Any:
        """The op of another rank."""
        op = self._op
        place = SimpleNamespace(rank=rank, world_size=op.world_size, device=op.device)
        return type(op)(place, op.dtype, *self._sizes, **self._settings)

    def alone_inputs(self, call: int) -> Tensors:
        """Those of the op, and what its collectives bring."""
        ranks = [self._of(rank) for rank in range(self._op.world_size)]
        arrived: list[list[Any]] = [[] for _ in ranks]

        def stopped(rank: int) -> tuple[Any, ...]:
            """The collective for which something is missing, and its input; () if there is none."""
            op = ranks[rank]
            op.collectives = LoneCollectives(rank, arrived[rank])
            try:
                op.theirs(*op.inputs(call))
            except _NotArrivedError as collective:
                return collective.args
            return ()

        while first := stopped(self._op.rank):
            sent = [stopped(rank)[1] for rank in range(len(ranks))]
            for rank, known in enumerate(arrived):
                known.append(_arriving(first[0], sent, rank))
        return self._op.inputs(call), arrived[self._op.rank]

    def alone(self, tensors: Tensors, arrived: Sequence[Any]) -> Any:
        self._op.collectives = LoneCollectives(self._op.rank, arrived)
        return self._op.theirs(*tensors)
