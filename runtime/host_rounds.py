"""Large tensors between the processes of one host: through rings of shared memory, in rounds.

Every rank owns a ring of SLOTS slots. In round c it puts the next piece of its data into slot c mod
SLOTS and says so (STAGED); the others take it from there and say so too (DONE). A slot is written again
when everyone is done with the round that used it last. Slots are small enough to stay in a cache, so a
tensor crosses memory once on its way in and once on its way out.

In ops where each rank gets a part of its own, a slot has one section per rank. In reductions the owner
of a part sums it from everyone's sections, in rank order; where others want the sum, it goes into the
owner's own section, which nobody stages into (REDUCED).

Rounds are counted over the life of the group, alike on all ranks. An op begins when everybody has called
it, and nobody calls an op before it is done with the last, so the first SLOTS rounds find their slots
free.

Behind the slots are places for data of middle size, which goes with its message like small data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from interlace.runtime.control import DONE, REDUCED, STAGED
from interlace.runtime.host_group import HostGroup
from interlace.runtime.reductions import fold

SLOTS = 4
SLOT_BYTES = 1 << 20
MEDIUM_PLACES = 8
MEDIUM_DATA = 256 << 10

_memmove = ctypes.memmove
T = TypeVar("T")
Part = tuple[int, int]  # address and bytes
Target = Part | None


class Rounds:
    """The rings of a group, as one rank sees them. The ring is made by the first large op."""

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self._section = SLOT_BYTES // group.world_size & ~63
        self._count = 0
        self.opened = False
        self._rings: list[torch.Tensor] = []
        self._bases: list[int] = []
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}

    def _open(self, op: str) -> None:
        if not self._rings:
            nbytes = SLOTS * SLOT_BYTES + MEDIUM_PLACES * MEDIUM_DATA
            mappings = self._group.allocate(nbytes, op)
            self._rings = [torch.from_numpy(mapping.array()) for mapping in mappings]
            self._bases = [mapping.data_address for mapping in mappings]
            self.opened = True

    def data(self, peer: int, sequence: int) -> int:
        """The address of the data of middle size of ``peer`` that goes with message ``sequence``."""
        place = sequence % MEDIUM_PLACES
        return self._bases[peer] + SLOTS * SLOT_BYTES + place * MEDIUM_DATA

    def tensor(self, peer: int, place: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """What is at ``offset`` of a place for such data, in the shape and dtype of ``like``."""
        first = SLOTS * SLOT_BYTES + place * MEDIUM_DATA + offset
        flat = self._rings[peer][first : first + like.nbytes]
        return flat.view(like.dtype).view(like.shape)

    def _run(
        self,
        op: str,
        count: int,
        stage: Callable[[int, int], None] | None,
        collect: Callable[[int, int], None] | None,
        reduce: Callable[[int, int], None] | None = None,
        *,
        sources: Sequence[int],
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Rounds 0..count - 1: each function is given the round and the offset of its slot.

        Staging runs ahead of reducing and collecting, so that peers rarely wait. ``meet`` is called
        when round 0 is staged, if the ranks have not met in this op. It may raise, and returns the
        peers that have not staged when it does.
        """
        group, before = self._group, self._count
        peers: Sequence[int] = self._peers
        lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
        offsets = [slot * SLOT_BYTES for slot in range(SLOTS)]
        late = peers
        if meet is not None:
            assert stage is not None
            group.await_word(peers, DONE, before, op)
            stage(0, 0)
            late = meet()
            group.release(STAGED, before + 1)
        for step in range(count + lag):
            if stage is not None and (0 if meet is None else 1) <= step < count:
                if step >= SLOTS:
                    group.await_word(peers, DONE, before + step - SLOTS + 1, op)
                stage(step, offsets[step % SLOTS])
                group.release(STAGED, before + step + 1)
            c = step - 1
            if reduce is not None and 0 <= c < count:
                group.await_word(peers if c else late, STAGED, before + c + 1, op)
                reduce(c, offsets[c % SLOTS])
                group.release(REDUCED, before + c + 1)
            c = step - lag
            if c >= 0:
                if collect is not None:
                    group.await_word(sources, wanted, before + c + 1, op)
                    collect(c, offsets[c % SLOTS])
                group.release(DONE, before + c + 1)
        self._count = before + count

    # -- moving --------------------------------------------------------------------------------

    def share(
        self, op: str, address: int, nbytes: int, targets: Sequence[Target], large: Sequence[int]
    ) -> None:
        """Rank r's data to ``targets[r]``, for every r with ``large[r]`` bytes of it.

        ``targets[own rank]`` may be the data itself.
        """
        self._open(op)
        rank, bases = self._rank, self._bases
        ring = bases[rank]
        own_target = targets[rank]
        own = address if own_target is None else own_target[0]

        def stage(c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            if size > 0:
                _memmove(ring + slot, address + start, size)
                if own != address:
                    _memmove(own + start, ring + slot, size)

        self._move(op, stage if large[rank] else None, targets, large, SLOT_BYTES, 0)

    def trade(
        self,
        op: str,
        parts: Sequence[Part],
        targets: Sequence[Target],
        large: Sequence[int],
    ) -> None:
        """Part [own rank] of rank r's to ``targets[r]``, for every r whose largest part is large."""
        self._open(op)
        rank, section = self._rank, self._section
        stage = self._staging(parts) if large[rank] else None
        self._move(op, stage, targets, large, section, rank * section)

    def _move(
        self,
        op: str,
        stage: Callable[[int, int], None] | None,
        targets: Sequence[Target],
        large: Sequence[int],
        piece: int,
        offset: int,
    ) -> None:
        """Pieces of each rank's slots, at ``offset``, to its target, where there are both."""
        bases = self._bases
        sources = [
            (peer, *target)
            for peer, target in _around(self._rank, targets)
            if target is not None and large[peer]
        ]

        def collect(c: int, slot: int) -> None:
            start = c * piece
            for peer, target, total in sources:
                size = min(piece, total - start)
                if size > 0:
                    _memmove(target + start, bases[peer] + slot + offset, size)

        self._run(
            op,
            -(-max(large) // piece),
            stage,
            collect if sources else None,
            sources=[peer for peer, _, _ in sources],
        )

    def _staging(self, parts: Sequence[Part]) -> Callable[[int, int], None]:
        """Put a piece of each peer's part into its section."""
        ring, section = self._bases[self._rank], self._section
        others = [(peer, address, size) for peer, (address, size) in _around(self._rank, parts)]

        def stage(c: int, slot: int) -> None:
            start = c * section
            for peer, address, total in others:
                size = min(section, total - start)
                if size > 0:
                    _memmove(ring + slot + peer * section, address + start, size)

        return stage

    # -- reducing ------------------------------------------------------------------------------

    def _sections(self, dtype: torch.dtype, owner: int) -> list[list[torch.Tensor]]:
        """``[slot][rank]``: the section of ``owner`` in every rank's slot, of its largest length."""
        views = self._views.get(dtype)
        if views is None:
            size = self._section // dtype.itemsize * dtype.itemsize
            views = self._views[dtype] = [
                [
                    ring[slot * SLOT_BYTES + owner * self._section :][:size].view(dtype)
                    for ring in self._rings
                ]
                for slot in range(SLOTS)
            ]
        return views

    def _summing(
        self,
        own: torch.Tensor,
        output: torch.Tensor,
        op: str,
    ) -> Callable[[int, int], None]:
        """Reduce a piece of this rank's part: ``own`` and what the others have staged of it."""
        rank = self._rank
        sections = self._sections(own.dtype, rank)
        elements = self._section // own.dtype.itemsize
        total = own.numel()

        def reduce(c: int, slot: int) -> None:
            start = c * elements
            size = min(elements, total - start)
            if size <= 0:
                return
            views = sections[slot // SLOT_BYTES]
            parts = views[:] if size == elements else [view[:size] for view in views]
            parts[rank] = own.narrow(0, start, size)
            fold(op, parts, output.narrow(0, start, size))

        return reduce

    def reduce_scatter(
        self,
        op: str,
        parts: Sequence[Part],
        own: torch.Tensor,
        output: torch.Tensor,
        reduction: str,
    ) -> None:
        """``output`` = the reduction of everyone's ``own``, which is what ``parts[own rank]`` is."""
        self._open(op)
        self._run(
            op,
            -(-max(nbytes for _, nbytes in parts) // self._section),
            self._staging(parts),
            self._summing(own, output.view(-1), reduction),
            sources=self._peers,
        )

    def reduce(
        self,
        op: str,
        tensor: torch.Tensor,
        reduction: str,
        root: int | None,
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """``tensor`` = the reduction of everyone's; on ``root`` only, unless that is None.

        ``meet`` as for :meth:`_run`; only once the ring is there.
        """
        self._open(op)
        rank, world_size, section, bases = self._rank, self._world_size, self._section, self._bases
        flat = tensor.view(-1)
        total, itemsize, address = flat.numel(), flat.dtype.itemsize, flat.data_ptr()
        elements = section // itemsize
        per = -(-total // world_size // 16) * 16
        firsts = [min(total, owner * per) for owner in range(world_size + 1)]
        lengths = [firsts[owner + 1] - firsts[owner] for owner in range(world_size)]
        spans = [
            (address + firsts[owner] * itemsize, lengths[owner] * itemsize)
            for owner in range(world_size)
        ]
        own = flat[firsts[rank] : firsts[rank + 1]]
        here = root is None or root == rank
        ring = bases[rank] + rank * section
        start = spans[rank][0]
        sections = self._sections(flat.dtype, rank)
        whole, count = elements * itemsize, own.numel()

        def reduce(c: int, slot: int) -> None:
            first = c * elements
            size = min(elements, count - first)
            if size <= 0:
                return
            views = sections[slot // SLOT_BYTES]
            parts = views[:] if size == elements else [view[:size] for view in views]
            sums = parts[rank]
            parts[rank] = own.narrow(0, first, size)
            fold(reduction, parts, sums)
            if here:
                _memmove(start + c * whole, ring + slot, size * itemsize)

        others = [(peer, address, size) for peer, (address, size) in _around(rank, spans)]

        def collect(c: int, slot: int) -> None:
            begin = c * whole
            for peer, target, length in others:
                size = min(whole, length - begin)
                if size > 0:
                    _memmove(target + begin, bases[peer] + slot + peer * section, size)

        self._run(
            op,
            -(-max(lengths) // elements),
            self._staging(spans),
            collect if here else None,
            reduce,
            sources=self._peers,
            meet=meet,
        )


def _around(rank: int, items: Sequence[T]) -> list[tuple[int, T]]:
    """The others' items, beginning with the next rank's: no two ranks read the same one at once."""
    size = len(items)
    return [((rank + step) % size, items[(rank + step) % size]) for step in range(1, size)]
