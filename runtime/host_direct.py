"""Large collectives on tensors that lie in shared memory: everyone reads everyone's where it is.

Taken when the tensors of all ranks lie in the same shared range (``shared_ranges.py``). Nothing is
staged, so a rank may leave the op only when its peers have read its tensor: ranks meet at the end
(MET), and in all_reduce once more between reducing and gathering.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from interlace.runtime.control import MET, Control
from interlace.runtime.host_group import HostGroup
from interlace.runtime.reductions import fold

_memmove = ctypes.memmove


class Direct:
    """The direct ops of one rank of a group. ``control`` is told what ``sequence`` was about."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = [
            (group.rank + step) % group.world_size for step in range(1, group.world_size)
        ]
        self._meetings = 0

    def find(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """Where ``tensor`` is in shared memory: range and offset; range 0 if it is not."""
        ranges = self._group.shared_ranges
        if not ranges or tensor is None:
            return 0, 0
        return ranges.find(tensor.data_ptr(), tensor.nbytes)

    def find_adjacent(
        self, parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]
    ) -> tuple[int, int]:
        """Where ``parts`` are, if they are equal in size and one behind the other.

        And if no output lies where a peer reads: it would be written while the peer may still do so.
        """
        if not self._group.shared_ranges:
            return 0, 0
        first, nbytes = parts[0].data_ptr(), parts[0].nbytes
        for number, part in enumerate(parts):
            if part.nbytes != nbytes or part.data_ptr() != first + number * nbytes:
                return 0, 0
        end, own = first + nbytes * len(parts), parts[self._rank].data_ptr()
        for output in outputs:
            if output is not None and output.data_ptr() != own:
                start = output.data_ptr()
                if start < end and first < start + output.nbytes:
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
        outputs: Sequence[torch.Tensor | None],
        part: int,
    ) -> None:
        """``outputs[r]`` = bytes of rank r's tensor: the whole, or this rank's part if ``part``."""
        for peer in self._peers:
            output = outputs[peer]
            if output is not None and output.nbytes:
                address = self._address(control, sequence, peer) + part * output.nbytes
                _memmove(output.data_ptr(), address, output.nbytes)
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
        for peer in self._peers:
            start, length = firsts[peer] * itemsize, (firsts[peer + 1] - firsts[peer]) * itemsize
            if length:
                source = self._address(control, sequence, peer) + start
                _memmove(flat.data_ptr() + start, source, length)
        self._meet(op)
