"""torch's pipelined algorithms of symmetric memory, restated for virtual ranks: threads of one process.

The sequences are those in ``torch.distributed._symmetric_memory`` (torch 2.13). Two streams take turns,
step by step. A step copies one peer's shard and multiplies it, or multiplies the part of one peer, which
copies it. Ranks wait for each other with events instead of signal pads; every event is recorded before a
peer may wait for it, for which the threads meet.
"""

from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group

_board: dict[tuple[Any, ...], Any] = {}  # values that virtual ranks show each other


class TorchPipelined:
    """One virtual rank's two streams."""

    def __init__(self) -> None:
        self._second = torch.cuda.Stream()
        self._rank, self._world_size = interlace.get_rank(), interlace.get_world_size()
        self._turn = 0

    def _show(self, kind: str, value: Any) -> None:
        _board[kind, self._turn % 2, self._rank] = value

    def _of(self, kind: str, peer: int) -> Any:
        return _board[kind, self._turn % 2, peer]

    def _meet(self) -> None:
        """Hosts only: a barrier of ops would wait for the device, and be timed."""
        default_group().agree("a step", None)

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def all_gather_matmul(self, shard: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``shard`` ``[m / W, k]``, ``weight`` ``[k, n]``: ``[m, n]``."""
        rank, world_size = self._rank, self._world_size
        rows = shard.shape[0]
        self._turn += 1
        first = torch.cuda.current_stream()
        gathered = shard.new_empty(rows * world_size, shard.shape[1])
        output = shard.new_empty(rows * world_size, weight.shape[1])
        self._show("shard", shard)
        self._show("ready", self._recorded(first))
        self._meet()
        self._second.wait_stream(first)
        streams = (first, self._second)
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            part = slice(peer * rows, (peer + 1) * rows)
            with torch.cuda.stream(streams[step % 2]):
                streams[step % 2].wait_event(self._of("ready", peer))
                gathered[part].copy_(self._of("shard", peer))
                torch.mm(gathered[part], weight, out=output[part])
        own = slice(rank * rows, (rank + 1) * rows)
        torch.mm(shard, weight, out=output[own])
        first.wait_stream(self._second)
        return output

    def matmul_reduce_scatter(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``input`` ``[m, k]``, ``weight`` ``[k, n]``: this rank's ``[m / W, n]`` of the sum."""
        rank, world_size = self._rank, self._world_size
        rows = input.shape[0] // world_size
        self._turn += 1
        first = torch.cuda.current_stream()
        stack = input.new_empty(world_size, rows, weight.shape[1])
        self._second.wait_stream(first)
        streams = (first, self._second)
        for step in range(1, world_size):
            stream, target = streams[step % 2], (rank - step) % world_size
            with torch.cuda.stream(stream):
                partial = torch.mm(input[target * rows : (target + 1) * rows], weight)
            self._show(f"part {step}", partial)
            self._show(f"made {step}", self._recorded(stream))
            self._meet()
            source = (rank + step) % world_size
            with torch.cuda.stream(stream):
                stream.wait_event(self._of(f"made {step}", source))
                stack[source].copy_(self._of(f"part {step}", source))
        torch.mm(input[rank * rows : (rank + 1) * rows], weight, out=stack[rank])
        first.wait_stream(self._second)
        for each in (stack, *(self._of(f"part {step}", rank) for step in range(1, world_size))):
            each.record_stream(self._second)
        return stack.sum(dim=0)
