"""Large tensors between the processes of one host: through rings of shared memory, in rounds.

Every rank owns a ring of slots. In round c it puts the next piece of its data into slot c mod their number
and says so (STAGED); the others take it from there and say so too (DONE). A slot is written again when
everyone is done with the round that used it last. How many slots of its ring a rank uses is its own
choice, see ``ring_depth.py``; its message tells the others. Few slots are used from the first one on in
every op, and stay in a cache; many are used in turn over the ops, and have left it.

In ops where each rank gets a part of its own, a slot has one section per rank. In reductions the owner
of a part sums it from everyone's sections, in rank order; where others want the sum, it goes into the
owner's own section, which nobody stages into (REDUCED).

Rounds are counted over the life of the group, alike on all ranks. An op begins when everybody has called
it, and nobody calls an op before it is done with the last, so its first rounds find their slots free.

Behind the first slots are places for data of middle size, which goes with its message like small data;
the other slots are memory of their own, made when GROWN rounds have been run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from interlace.runtime.control import DONE, REDUCED, STAGED, Control
from interlace.runtime.errors import InterlaceError
from interlace.runtime.host_group import HostGroup
from interlace.runtime.reductions import fold
from interlace.runtime.ring_depth import FEW, MANY, Depth

SLOT_BYTES = 1 << 20
MEDIUM_PLACES = 8
MEDIUM_DATA = 256 << 10
GROWN = 64
ALIGNED = 4
LOOK = 16  # rounds after which the ranks look again whether they share cores evenly

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
        self.section = SLOT_BYTES // group.world_size & ~63
        self.count = 0
        self.opened = False
        self._rings: list[torch.Tensor] = []
        self._bases: list[int] = []
        self._slots: list[list[int]] = []  # [rank][slot]: its address
        self._memory: list[list[torch.Tensor]] = []  # [rank][slot]
        self._views: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._may_grow = True
        self._depths: dict[tuple[str, int], Depth] = {}
        self._depth: Depth | None = None  # of the op that runs

    def open(self, op: str) -> None:
        if not self._rings:
            nbytes = FEW * SLOT_BYTES + MEDIUM_PLACES * MEDIUM_DATA
            mappings = self._group.allocate(nbytes, op)
            self._rings = [torch.from_numpy(mapping.array()) for mapping in mappings]
            self._bases = [mapping.data_address for mapping in mappings]
            self._slots = [[] for _ in mappings]
            self._memory = [[] for _ in mappings]
            self._add_slots(self._rings, self._bases, FEW)
            self.opened = True

    def _open_many(self, op: str) -> None:
        """Collective, at the end of an op. All ranks get more slots, or none does and all go on."""
        if self._may_grow:
            self._may_grow = False
            try:
                mappings = self._group.allocate((MANY - FEW) * SLOT_BYTES, op)
            except InterlaceError as error:
                if type(error) is not InterlaceError:  # a death, an abort, a timeout
                    raise
                return
            rings = [torch.from_numpy(mapping.array()) for mapping in mappings]
            self._add_slots(rings, [mapping.data_address for mapping in mappings], MANY - FEW)
            self._views.clear()

    def _add_slots(self, rings: list[torch.Tensor], bases: list[int], count: int) -> None:
        for rank, (ring, base) in enumerate(zip(rings, bases, strict=True)):
            for first in range(0, count * SLOT_BYTES, SLOT_BYTES):
                self._slots[rank].append(base + first)
                self._memory[rank].append(ring[first : first + SLOT_BYTES])

    def slots(self, op: str, nbytes: int) -> int:
        """How many slots of its ring this rank uses in its ``op`` of ``nbytes`` that is about to begin.

        Each op has its own record: an all_gather takes W times as long as a broadcast of as many bytes.
        """
        if not self._slots or len(self._slots[0]) == FEW:
            return FEW
        key = op, nbytes.bit_length()
        depth = self._depths.get(key)
        if depth is None:
            depth = self._depths[key] = Depth()
        self._depth = depth
        return depth.choice()

    def all_slots(self, own: int, control: Control, sequence: int) -> list[int]:
        """How many slots each rank uses in the op whose messages are there; 1 if it stages nothing."""
        return [
            own if peer == self._rank else control.slots(peer, sequence)
            for peer in range(self._world_size)
        ]

    def data(self, peer: int, sequence: int) -> int:
        """The address of the data of middle size of ``peer`` that goes with message ``sequence``."""
        place = sequence % MEDIUM_PLACES
        return self._bases[peer] + FEW * SLOT_BYTES + place * MEDIUM_DATA

    def tensor(self, peer: int, place: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """What is at ``offset`` of a place for such data, in the shape and dtype of ``like``."""
        first = FEW * SLOT_BYTES + place * MEDIUM_DATA + offset
        flat = self._rings[peer][first : first + like.nbytes]
        return flat.view(like.dtype).view(like.shape)

    def _run(
        self,
        op: str,
        count: int,
        stage: Callable[[int, int], None] | None,
        collect: Callable[[int, list[int]], None] | None,
        reduce: Callable[[int, list[int]], None] | None = None,
        *,
        slots: list[int],
        sources: Sequence[int],
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Rounds 0..count - 1: staging is given the round and the address of its slot, the others the
        round and the number of every rank's slot.

        Staging runs ahead of reducing and collecting, so that peers rarely wait. ``slots``: how many
        each rank uses. ``meet`` is called when round 0 is staged, if the ranks have not met in this
        op. It may raise, and returns the peers that have not staged when it does; then ``slots`` has
        the peers' numbers.
        """
        group, rank = self._group, self._rank
        prior, before = self.begin(count)
        peers: Sequence[int] = self._peers
        lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
        own, addresses = slots[rank], self._slots[rank]
        late = peers
        if meet is not None:
            assert stage is not None
            group.await_word(peers, DONE, prior, op)
            stage(0, addresses[place(own, before, 0)])
            late = meet()
            group.release(STAGED, before + 1)
        started, spread = time.perf_counter(), group.spread
        for step in range(count + lag):
            if not step % LOOK:
                spread.say()
            if stage is not None and (0 if meet is None else 1) <= step < count:
                if step >= own:
                    group.await_word(peers, DONE, before + step - own + 1, op)
                stage(step, addresses[place(own, before, step)])
                group.release(STAGED, before + step + 1)
            c = step - 1
            if reduce is not None and 0 <= c < count:
                group.await_word(peers if c else late, STAGED, before + c + 1, op)
                reduce(c, [place(each, before, c) for each in slots])
                group.release(REDUCED, before + c + 1)
            c = step - lag
            if c >= 0:
                if collect is not None:
                    group.await_word(sources, wanted, before + c + 1, op)
                    collect(c, [place(each, before, c) for each in slots])
                group.release(DONE, before + c + 1)
                if not c % LOOK:
                    spread.look()
        self.ran(op, before + count, own if stage is not None else 0, started)

    def begin(self, count: int) -> tuple[int, int]:
        """The number of rounds before an op of ``count``, and the number of its first round.

        An op of more than ALIGNED rounds begins with slot 0 of whatever ring, so that it comes with the
        same slots each time; the rounds between are nobody's. Nothing is changed: an op that the ranks do
        not agree on has no rounds, and how many it would have had differs between them.
        """
        prior = self.count
        return prior, prior if count <= ALIGNED else -(-prior // MANY) * MANY

    def ran(self, op: str, end: int, own: int, started: float) -> None:
        """After an op whose rounds end before number ``end``; ``own``: the slots that it used, or 0."""
        self.count = end
        depth, self._depth = self._depth, None
        if depth is not None and own:
            depth.took(own, time.perf_counter() - started)
        if self.count >= GROWN:
            self._open_many(op)

    def slot(self, rank: int, number: int) -> int:
        """The address of a slot of ``rank``'s ring."""
        return self._slots[rank][number]

    # -- moving --------------------------------------------------------------------------------

    def share(
        self,
        op: str,
        address: int,
        nbytes: int,
        targets: Sequence[Target],
        large: Sequence[int],
        slots: list[int],
    ) -> None:
        """Rank r's data to ``targets[r]``, for every r with ``large[r]`` bytes of it.

        ``targets[own rank]`` may be the data itself. ``slots``: how many each rank uses, here and below.
        """
        self.open(op)
        rank = self._rank
        own_target = targets[rank]
        own = address if own_target is None else own_target[0]

        def stage(c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            if size > 0:
                _memmove(slot, address + start, size)
                if own != address:
                    _memmove(own + start, slot, size)

        staging = stage if large[rank] else None
        self._move(op, staging, targets, large, slots, SLOT_BYTES, 0)

    def trade(
        self,
        op: str,
        parts: Sequence[Part],
        targets: Sequence[Target],
        large: Sequence[int],
        slots: list[int],
    ) -> None:
        """Part [own rank] of rank r's to ``targets[r]``, for every r whose largest part is large."""
        self.open(op)
        rank, section = self._rank, self.section
        stage = self._staging(parts) if large[rank] else None
        self._move(op, stage, targets, large, slots, section, rank * section)

    def _move(
        self,
        op: str,
        stage: Callable[[int, int], None] | None,
        targets: Sequence[Target],
        large: Sequence[int],
        slots: list[int],
        piece: int,
        offset: int,
    ) -> None:
        """Pieces of each rank's slots, at ``offset``, to its target, where there are both."""
        sources = [
            (peer, self._slots[peer], *target)
            for peer, target in _others(self._rank, targets)
            if target is not None and large[peer]
        ]

        def collect(c: int, at: list[int]) -> None:
            start = c * piece
            for peer, addresses, target, total in sources:
                size = min(piece, total - start)
                if size > 0:
                    _memmove(target + start, addresses[at[peer]] + offset, size)

        self._run(
            op,
            -(-max(large) // piece),
            stage,
            collect if sources else None,
            slots=slots,
            sources=[peer for peer, *_ in sources],
        )

    def _staging(self, parts: Sequence[Part]) -> Callable[[int, int], None]:
        """Put a piece of each peer's part into its section."""
        section = self.section
        others = [(peer, address, size) for peer, (address, size) in _others(self._rank, parts)]

        def stage(c: int, slot: int) -> None:
            start = c * section
            for peer, address, total in others:
                size = min(section, total - start)
                if size > 0:
                    _memmove(slot + peer * section, address + start, size)

        return stage

    # -- reducing ------------------------------------------------------------------------------

    def _sections(self, dtype: torch.dtype, owner: int) -> list[list[torch.Tensor]]:
        """``[rank][slot]``: the section of ``owner`` in every rank's slots, of its largest length."""
        views = self._views.get(dtype)
        if views is None:
            size = self.section // dtype.itemsize * dtype.itemsize
            first = owner * self.section
            views = self._views[dtype] = [
                [slot[first : first + size].view(dtype) for slot in slots] for slots in self._memory
            ]
        return views

    def _summing(
        self,
        own: torch.Tensor,
        output: torch.Tensor,
        op: str,
    ) -> Callable[[int, list[int]], None]:
        """Reduce a piece of this rank's part: ``own`` and what the others have staged of it."""
        rank = self._rank
        sections = self._sections(own.dtype, rank)
        elements = self.section // own.dtype.itemsize
        total = own.numel()

        def reduce(c: int, at: list[int]) -> None:
            start = c * elements
            size = min(elements, total - start)
            if size <= 0:
                return
            parts = [views[slot] for views, slot in zip(sections, at, strict=True)]
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
        slots: list[int],
    ) -> None:
        """``output`` = the reduction of everyone's ``own``, which is what ``parts[own rank]`` is."""
        self.open(op)
        self._run(
            op,
            -(-max(nbytes for _, nbytes in parts) // self.section),
            self._staging(parts),
            self._summing(own, output.view(-1), reduction),
            slots=slots,
            sources=self._peers,
        )

    def reduce(
        self,
        op: str,
        tensor: torch.Tensor,
        reduction: str,
        root: int | None,
        slots: list[int],
        meet: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """``tensor`` = the reduction of everyone's; on ``root`` only, unless that is None.

        ``meet`` as for :meth:`_run`; only once the ring is there.
        """
        self.open(op)
        rank, world_size, section, addresses = (
            self._rank, self._world_size, self.section, self._slots,
        )  # fmt: skip
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

        def reduce(c: int, at: list[int]) -> None:
            first = c * elements
            size = min(elements, count - first)
            if size <= 0:
                return
            parts = [views[slot] for views, slot in zip(sections, at, strict=True)]
            if size < elements:
                parts = [view[:size] for view in parts]
            sums = parts[rank]
            parts[rank] = own.narrow(0, first, size)
            fold(reduction, parts, sums)
            if here:
                summed = addresses[rank][at[rank]] + rank * section
                _memmove(start + c * whole, summed, size * itemsize)

        others = [(peer, address, size) for peer, (address, size) in _others(rank, spans)]

        def collect(c: int, at: list[int]) -> None:
            begin = c * whole
            for peer, target, length in others:
                size = min(whole, length - begin)
                if size > 0:
                    _memmove(target + begin, addresses[peer][at[peer]] + peer * section, size)

        self._run(
            op,
            -(-max(lengths) // elements),
            self._staging(spans),
            collect if here else None,
            reduce,
            slots=slots,
            sources=self._peers,
            meet=meet,
        )


def place(slots: int, before: int, step: int) -> int:
    """The slot of round ``step`` of an op, for a rank that uses ``slots``, after ``before`` rounds."""
    return step % FEW if slots == FEW else (before + step) % slots


def cuts(count: int, world_size: int) -> list[int]:
    """Where the part of each rank of a tensor of ``count`` elements begins, and the end of the last."""
    per = -(-count // world_size // 16) * 16
    return [min(count, owner * per) for owner in range(world_size + 1)]


def around(rank: int, world_size: int) -> list[int]:
    """The others, beginning with the next rank: no two ranks read the same one's data at once."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def _others(rank: int, items: Sequence[T]) -> list[tuple[int, T]]:
    return [(peer, items[peer]) for peer in around(rank, len(items))]
