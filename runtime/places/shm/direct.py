"""Large collectives on tensors that lie in shared memory: everyone reads everyone's where it is.

Taken when the tensors of all ranks lie in the same shared range (``one_host/shared_ranges.py``). Nothing is
staged, so a rank may leave the op only when its peers have read its tensor: ranks meet at the end
(MET), and in all_reduce once more between reducing and gathering.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.one_host.control import MET, SMALL_DATA, Control
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.shm.rounds import Part, Rounds, Target


def adjacent(parts: Sequence[Part]) -> bool:
    """Whether the parts are equal in size and one behind the other."""
    first, nbytes = parts[0]
    return all(part == (first + number * nbytes, nbytes) for number, part in enumerate(parts))


class Direct:
    """The direct ops of one rank of a group. ``control`` is told what ``sequence`` was about."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        self._group, self._rounds = group, rounds
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = [
            (group.rank + step) % group.world_size for step in range(1, group.world_size)
        ]
        self._meetings = 0

    def find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Where ``tensor`` is in shared memory: range and offset; range 0 if it is small or not there."""
        ranges = self._group.shared_ranges
        if not ranges or tensor.nbytes <= SMALL_DATA:
            return 0, 0
        return ranges.find(tensor.data_ptr(), tensor.nbytes)

    def find_adjacent(
        self, parts: Sequence[Part], targets: Sequence[Target], overwritten: Target = None
    ) -> tuple[int, int]:
        """Where ``parts`` are, if they are equal in size and one behind the other.

        And if no target lies where a peer reads: it would be written while the peer may still do so.
        ``overwritten`` is a part that only this rank reads.
        """
        if not parts or not self._group.shared_ranges:
            return 0, 0
        first, nbytes = parts[0]
        if nbytes * len(parts) <= SMALL_DATA:
            return 0, 0
        if not adjacent(parts):
            return 0, 0
        end = first + nbytes * len(parts)
        for target in targets:
            if target is not None and target != overwritten:
                start, size = target
                if start < end and first < start + size:
                    return 0, 0
        return self._group.shared_ranges.find(first, nbytes * len(parts))

    def everywhere(self, control: Control, sequence: int, number: int) -> bool:
        """Whether the tensors of all ranks are in range ``number``."""
        return number > 0 and all(
            control.where(peer, sequence)[0] == number for peer in control.peers
        )

    def _address(self, control: Control, sequence: int, peer: int) -> int:
        number, offset = control.where(peer, sequence)
        return self._group.shared_ranges.array(number, peer).ctypes.data + offset

    def _view(
        self, control: Control, sequence: int, peer: int, dtype: torch.dtype, first: int, size: int
    ) -> torch.Tensor:
        """``size`` elements from the ``first`` one of ``peer``'s tensor."""
        number, offset = control.where(peer, sequence)
        start = offset + first * dtype.itemsize
        memory = self._group.shared_ranges.array(number, peer)
        return torch.from_numpy(memory[start : start + size * dtype.itemsize]).view(dtype)

    def _meet(self, op: str) -> None:
        self._meetings += 1
        self._group.release(MET, self._meetings)
        self._group.await_word(self._peers, MET, self._meetings, op)

    def share(
        self,
        op: str,
        control: Control,
        sequence: int,
        targets: Sequence[Target],
        part: int,
    ) -> None:
        """``targets[r]`` = part ``part`` of rank r's tensor, in parts of the target's size."""
        copy = self._rounds.into(targets)
        for peer in self._peers:
            target = targets[peer]
            if target is not None:
                address = self._address(control, sequence, peer) + part * target[1]
                copy(target[0], address, target[1])
        self._meet(op)

    def reduce_scatter(
        self, op: str, control: Control, sequence: int, own: torch.Tensor, output: torch.Tensor,
        reduction: str,
    ) -> None:  # fmt: skip
        """``output`` = the reduction of everyone's part for this rank; ``own`` is this rank's."""
        size = own.numel()
        parts = [
            own.view(-1)
            if peer == self._rank
            else self._view(control, sequence, peer, own.dtype, self._rank * size, size)
            for peer in range(self._world_size)
        ]
        fold(reduction, parts, output.view(-1))
        self._meet(op)

    def reduce(
        self, op: str, control: Control, sequence: int, tensor: torch.Tensor, reduction: str
    ) -> None:
        """``tensor`` = the reduction of everyone's: each rank reduces a segment, all gather them."""
        flat, world_size = tensor.view(-1), self._world_size
        per = -(-flat.numel() // world_size // 16) * 16
        firsts = [min(flat.numel(), owner * per) for owner in range(world_size + 1)]
        first, size = firsts[self._rank], firsts[self._rank + 1] - firsts[self._rank]
        if size:
            own = flat.narrow(0, first, size)
            parts = [
                own
                if peer == self._rank
                else self._view(control, sequence, peer, flat.dtype, first, size)
                for peer in range(world_size)
            ]
            fold(reduction, parts, own)
        self._meet(op)
        itemsize = flat.dtype.itemsize
        copy = self._rounds.into([(flat.data_ptr(), flat.nbytes)])
        for peer in self._peers:
            start, length = firsts[peer] * itemsize, (firsts[peer + 1] - firsts[peer]) * itemsize
            if length:
                source = self._address(control, sequence, peer) + start
                copy(flat.data_ptr() + start, source, length)
        self._meet(op)
