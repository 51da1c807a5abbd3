"""Large collectives on tensors that lie in shared memory: everyone reads everyone's where it is.

Taken when the tensors of all ranks lie in the same shared range (``processes/segment.py``). Nothing is
staged, so a rank may leave the op only when its peers have read its tensor: ranks meet at the end
(MET), and in all_reduce once more between reducing and gathering.
"""

from collections.abc import Sequence

import torch

from interlace.runtime.core.context import name_algorithm
from interlace.runtime.places.shm.message_steps import HostSteps
from interlace.runtime.places.shm.rounds import around, cuts
from interlace.runtime.processes.control import MET, SMALL_DATA
from interlace.runtime.processes.group import HostGroup

Stretch = tuple[int, int]  # address and bytes


def adjacent(parts: Sequence[Stretch]) -> bool:
    first, nbytes = parts[0]
    return all(part == (first + number * nbytes, nbytes) for number, part in enumerate(parts))


class Direct:
    """The direct ops of one rank of a group. The messages of the op that runs say where tensors are."""

    def __init__(self, group: HostGroup, steps: HostSteps) -> None:
        self._group, self._steps = group, steps
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = around(group.rank, group.world_size)
        self._meetings = 0

    def find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Where ``tensor`` is in shared memory: range and offset; range 0 if it is small or not there."""
        if tensor.nbytes <= SMALL_DATA or not self._group.shared_ranges:
            return 0, 0
        return self._group.shared_ranges.find(tensor.data_ptr(), tensor.nbytes)

    def find_adjacent(
        self,
        parts: Sequence[Stretch],
        targets: Sequence[Stretch | None],
        overwritten: Stretch | None = None,
    ) -> tuple[int, int]:
        """Where ``parts`` are, if they are equal in size and one behind the other.

        And if no target lies where a peer reads: it would be written while the peer may still do so.
        ``overwritten`` is a part that only this rank reads.
        """
        if not parts or not self._group.shared_ranges:
            return 0, 0
        first, nbytes = parts[0]
        if nbytes * len(parts) <= SMALL_DATA or not adjacent(parts):
            return 0, 0
        end = first + nbytes * len(parts)
        for target in targets:
            if target is not None and target != overwritten:
                start, size = target
                if start < end and first < start + size:
                    return 0, 0
        return self._group.shared_ranges.find(first, nbytes * len(parts))

    def everywhere(self, number: int) -> bool:
        """Whether the tensors of all ranks are in range ``number``, and so are read where they are."""
        control, sequence = self._steps.control, self._steps.sequence
        direct = number > 0 and all(
            control.where(peer, sequence)[0] == number for peer in control.peers
        )
        if direct:
            name_algorithm("direct")
        return direct

    def _address(self, peer: int) -> int:
        number, offset = self._steps.control.where(peer, self._steps.sequence)
        address: int = self._group.shared_ranges.array(number, peer).ctypes.data + offset
        return address

    def _meet(self) -> None:
        self._meetings += 1
        self._group.release(MET, self._meetings)
        self._group.await_word(self._peers, MET, self._meetings, self._steps.call.op)

    def share(self, targets: Sequence[Stretch | None], part: int) -> None:
        """``targets[r]`` = part ``part`` of rank r's tensor, in parts of the target's size."""
        steps, outputs = self._steps.at_once(), self._steps.sizes.outputs
        past = sum(target[1] for target in targets if target) >= outputs
        for peer in self._peers:
            if (target := targets[peer]) is not None:
                address, nbytes = target
                steps.stream(address, self._address(peer) + part * nbytes, nbytes, past=past)
        self._meet()

    def _reduce(self, op: str, own: Stretch, target: int, offset: int, dtype: torch.dtype) -> None:
        """``target`` = the reduction of ``own`` and of what is at ``offset`` of the others' tensors."""
        address, nbytes = own
        sources = [
            address if rank == self._rank else self._address(rank) + offset
            for rank in range(self._world_size)
        ]
        self._steps.at_once().reduce(op, dtype, target, sources, nbytes // dtype.itemsize)

    def reduce_scatter(self, op: str, own: Stretch, target: int, dtype: torch.dtype) -> None:
        """``target`` = the reduction of everyone's part for this rank; ``own`` is this rank's."""
        self._reduce(op, own, target, self._rank * own[1], dtype)
        self._meet()

    def reduce(self, op: str, tensor: torch.Tensor) -> None:
        """``tensor`` = the reduction of everyone's: each rank reduces a segment, all gather them."""
        dtype, base = tensor.dtype, tensor.data_ptr()
        edges = [n * dtype.itemsize for n in cuts(tensor.numel(), self._world_size)]
        first, end = edges[self._rank : self._rank + 2]
        self._reduce(op, (base + first, end - first), base + first, first, dtype)
        self._meet()
        steps, past = self._steps.at_once(), tensor.nbytes >= self._steps.sizes.in_place
        for peer in self._peers:
            first, end = edges[peer : peer + 2]
            steps.stream(base + first, self._address(peer) + first, end - first, past=past)
        self._meet()
