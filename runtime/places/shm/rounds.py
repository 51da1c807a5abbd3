"""Large tensors between the processes of one host: through rings of shared memory, in rounds.

Every rank owns a ring of SLOTS slots. In round c of an op it puts the next piece of its data into slot
c mod SLOTS and says so (STAGED); the others take it from there and say so too (DONE). A slot is written
again when everyone is done with the round that used it last. Whether rings are written through the caches
or past them is measured, see ``ring_writes.py``; what is copied into an output of STREAMED bytes or more
is written past them, because it would not stay there.

In ops where each rank gets a part of its own, a slot has one section per rank. In reductions the owner
of a part sums it from everyone's sections, in rank order; where others want the sum, it goes into the
owner's own section, which nobody stages into (REDUCED).

Rounds are counted over the life of the group, alike on all ranks. An op begins when everybody has called
it, and nobody calls an op before it is done with the last, so its first rounds find their slots free.

Behind the slots are places for data of middle size, which goes with its message like small data. What
goes with messages is written past the caches from PAST_FROM bytes on: that was never slower (2 ranks,
all_reduce of 64 KiB: 24 and 24 us under one shared cache, 50 and 27 us without; November 2026).

Without machine code everything is a ``memmove``.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.one_host.control import DONE, REDUCED, STAGED
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.shm.machine_code.steps import Copier
from interlace.runtime.places.shm.ring_writes import Ways

SLOT_BYTES = 1 << 20
SLOTS = 4
MEDIUM_PLACES = 8
MEDIUM_DATA = 256 << 10
STREAMED = 8 << 20
PAST_FROM = 4 << 10
LOOK = 16  # rounds after which the ranks look again whether they share cores evenly

_memmove = ctypes.memmove
Copy = Callable[[int, int, int], object]  # target, source, bytes
T = TypeVar("T")
Part = tuple[int, int]  # address and bytes
Target = Part | None


class Rounds:
    """The rings of a group, as one rank sees them. The ring is made by the first large op."""

    def __init__(self, group: HostGroup, machine_code: bool) -> None:
        self._group = group
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self.section = SLOT_BYTES // group.world_size & ~63
        self.count = 0
        self.opened = False
        self._rings: list[torch.Tensor] = []
        self._bases: list[int] = []
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._copies: tuple[Copy, Copy] = _memmove, _memmove  # through the caches, and past them
        if machine_code:
            self._copies = Copier(past=False), Copier(past=True)
        self._chooses = machine_code
        self._ways: Ways | None = None
        self._write: Copy = _memmove  # into the ring, in the op that runs

    def open(self, op: str) -> None:
        if not self._rings:
            nbytes = SLOTS * SLOT_BYTES + MEDIUM_PLACES * MEDIUM_DATA
            mappings = self._group.allocate(nbytes, op)
            self._rings = [torch.from_numpy(mapping.array()) for mapping in mappings]
            self._bases = [mapping.data_address for mapping in mappings]
            self.opened = True

    @property
    def ways(self) -> Ways:
        """How the ranks write into their rings; once they have joined."""
        if self._ways is None:
            assert self._group.control is not None
            last = self._rank == self._world_size - 1
            self._ways = Ways(self._group.control.ways, decides=last)
        return self._ways

    def data(self, peer: int, sequence: int) -> int:
        """The address of the data of middle size of ``peer`` that goes with message ``sequence``."""
        place = sequence % MEDIUM_PLACES
        return self._bases[peer] + SLOTS * SLOT_BYTES + place * MEDIUM_DATA

    def stage(self, target: int, source: int, nbytes: int) -> None:
        """Put data beside a message."""
        copy = self._copies[True] if nbytes >= PAST_FROM else _memmove
        copy(target, source, nbytes)

    def tensor(self, peer: int, place: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """What is at ``offset`` of a place for such data, in the shape and dtype of ``like``."""
        first = SLOTS * SLOT_BYTES + place * MEDIUM_DATA + offset
        flat = self._rings[peer][first : first + like.nbytes]
        return flat.view(like.dtype).view(like.shape)

    def slot(self, rank: int, c: int) -> int:
        """The address of ``rank``'s slot in round ``c`` of an op."""
        return self._bases[rank] + c % SLOTS * SLOT_BYTES

    def _run(
        self,
        op: str,
        count: int,
        stage: Callable[[int, int], None] | None,
        collect: Callable[[int], None] | None,
        reduce: Callable[[int], None] | None = None,
        *,
        sources: Sequence[int],
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Rounds 0..count - 1: staging is given the round and the address of its slot.

        Staging runs ahead of reducing and collecting, so that peers rarely wait. ``meet`` is called when
        round 0 is staged, if the ranks have not met in this op. It may raise, and returns the peers that
        have not staged when it does.
        """
        group, rank, before = self._group, self._rank, self.count
        peers: Sequence[int] = self._peers
        lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
        late = peers
        how = f"{op} by Python"
        past = self._chooses and self.ways.past(how, count)
        self._write = self._copies[past]
        if meet is not None:
            assert stage is not None
            group.await_word(peers, DONE, before, op)
            stage(0, self.slot(rank, 0))
            late = meet()
            group.release(STAGED, before + 1)
        started, spread = time.perf_counter(), group.spread
        with whole(op):
            for step in range(count + lag):
                if not step % LOOK:
                    spread.say()
                if stage is not None and (0 if meet is None else 1) <= step < count:
                    if step >= SLOTS:
                        group.await_word(peers, DONE, before + step - SLOTS + 1, op)
                    stage(step, self.slot(rank, step))
                    group.release(STAGED, before + step + 1)
                c = step - 1
                if reduce is not None and 0 <= c < count:
                    group.await_word(peers if c else late, STAGED, before + c + 1, op)
                    reduce(c)
                    group.release(REDUCED, before + c + 1)
                c = step - lag
                if c >= 0:
                    if collect is not None:
                        group.await_word(sources, wanted, before + c + 1, op)
                        collect(c)
                    group.release(DONE, before + c + 1)
                    if not c % LOOK:
                        spread.look()
        self.count = before + count  # not before: ranks may not agree on an op
        if self._chooses:
            self.ways.took(how, count, past, time.perf_counter() - started)

    # -- moving --------------------------------------------------------------------------------

    def share(
        self,
        op: str,
        address: int,
        nbytes: int,
        targets: Sequence[Target],
        large: Sequence[int],
    ) -> None:
        """Rank r's data to ``targets[r]``, for every r with ``large[r]`` bytes of it.

        ``targets[own rank]`` may be the data itself.
        """
        self.open(op)
        rank = self._rank
        own_target = targets[rank]
        own = address if own_target is None else own_target[0]
        output = self.into(targets)

        def stage(c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            if size > 0:
                self._write(slot, address + start, size)
                if own != address:
                    output(own + start, address + start, size)

        staging = stage if large[rank] else None
        self._move(op, staging, targets, large, SLOT_BYTES, 0)

    def trade(
        self,
        op: str,
        parts: Sequence[Part],
        targets: Sequence[Target],
        large: Sequence[int],
    ) -> None:
        """Part [own rank] of rank r's to ``targets[r]``, for every r whose largest part is large."""
        self.open(op)
        rank, section = self._rank, self.section
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
        sources = [
            (peer, *target)
            for peer, target in _others(self._rank, targets)
            if target is not None and large[peer]
        ]
        output = self.into(targets)

        def collect(c: int) -> None:
            start = c * piece
            for peer, target, total in sources:
                size = min(piece, total - start)
                if size > 0:
                    output(target + start, self.slot(peer, c) + offset, size)

        self._run(
            op,
            -(-max(large) // piece),
            stage,
            collect if sources else None,
            sources=[peer for peer, *_ in sources],
        )

    def into(self, targets: Sequence[Target]) -> Copy:
        """How to write into these."""
        return self._copies[sum(target[1] for target in targets if target) >= STREAMED]

    def _staging(self, parts: Sequence[Part]) -> Callable[[int, int], None]:
        """Put a piece of each peer's part into its section."""
        section = self.section
        others = [(peer, address, size) for peer, (address, size) in _others(self._rank, parts)]

        def stage(c: int, slot: int) -> None:
            start = c * section
            for peer, address, total in others:
                size = min(section, total - start)
                if size > 0:
                    self._write(slot + peer * section, address + start, size)

        return stage

    # -- reducing ------------------------------------------------------------------------------

    def _sections(self, dtype: torch.dtype, owner: int) -> list[list[torch.Tensor]]:
        """``[rank][slot]``: the section of ``owner`` in every rank's slots, of its largest length."""
        views = self._views.get(dtype)
        if views is None:
            size = self.section // dtype.itemsize * dtype.itemsize
            first = owner * self.section
            views = self._views[dtype] = [
                [
                    ring[at : at + size].view(dtype)
                    for at in range(first, SLOTS * SLOT_BYTES, SLOT_BYTES)
                ]
                for ring in self._rings
            ]
        return views

    def _summing(
        self,
        own: torch.Tensor,
        output: torch.Tensor,
        op: str,
    ) -> Callable[[int], None]:
        """Reduce a piece of this rank's part: ``own`` and what the others have staged of it."""
        rank = self._rank
        sections = self._sections(own.dtype, rank)
        elements = self.section // own.dtype.itemsize
        total = own.numel()

        def reduce(c: int) -> None:
            start = c * elements
            size = min(elements, total - start)
            if size <= 0:
                return
            parts = [views[c % SLOTS] for views in sections]
            if size < elements:
                parts = [view[:size] for view in parts]
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
        self.open(op)
        self._run(
            op,
            -(-max(nbytes for _, nbytes in parts) // self.section),
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
        self.open(op)
        rank, world_size, section = self._rank, self._world_size, self.section
        flat = tensor.view(-1)
        total, itemsize, address = flat.numel(), flat.dtype.itemsize, flat.data_ptr()
        elements = section // itemsize
        firsts = cuts(total, world_size)
        lengths = [firsts[owner + 1] - firsts[owner] for owner in range(world_size)]
        spans = [
            (address + firsts[owner] * itemsize, lengths[owner] * itemsize)
            for owner in range(world_size)
        ]
        own = flat[firsts[rank] : firsts[rank + 1]]
        here = root is None or root == rank
        start = spans[rank][0]
        sections = self._sections(flat.dtype, rank)
        whole, count = elements * itemsize, own.numel()

        def reduce(c: int) -> None:
            first = c * elements
            size = min(elements, count - first)
            if size <= 0:
                return
            parts = [views[c % SLOTS] for views in sections]
            if size < elements:
                parts = [view[:size] for view in parts]
            sums = parts[rank]
            parts[rank] = own.narrow(0, first, size)
            fold(reduction, parts, sums)
            if here:
                summed = self.slot(rank, c) + rank * section
                _memmove(start + c * whole, summed, size * itemsize)

        others = [(peer, address, size) for peer, (address, size) in _others(rank, spans)]
        output = self.into(spans)

        def collect(c: int) -> None:
            begin = c * whole
            for peer, target, length in others:
                size = min(whole, length - begin)
                if size > 0:
                    output(target + begin, self.slot(peer, c) + peer * section, size)

        self._run(
            op,
            -(-max(lengths) // elements),
            self._staging(spans),
            collect if here else None,
            reduce,
            sources=self._peers,
            meet=meet,
        )


@contextlib.contextmanager
def whole(op: str) -> Iterator[None]:
    """While data moves: what is a refusal that all ranks share elsewhere is this rank's failure here."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"{op} failed while data moved: {error}") from error


def cuts(count: int, world_size: int) -> list[int]:
    """Where the part of each rank of a tensor of ``count`` elements begins, and the end of the last."""
    per = -(-count // world_size // 16) * 16
    return [min(count, owner * per) for owner in range(world_size + 1)]


def around(rank: int, world_size: int) -> list[int]:
    """The others, beginning with the next rank: no two ranks read the same one's data at once."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def _others(rank: int, items: Sequence[T]) -> list[tuple[int, T]]:
    return [(peer, items[peer]) for peer in around(rank, len(items))]
