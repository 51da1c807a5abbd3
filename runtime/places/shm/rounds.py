"""Large tensors between the processes of one host: through rings of shared memory, in rounds.

Every rank owns a ring of SLOTS slots. In round c of an op it puts the next piece of its data into slot c
mod SLOTS and publishes that (STAGED). The others read it there and also publish that (DONE). A slot is
overwritten when all ranks have finished the round that used it last. ``caches.py`` measures whether rings
are written through the caches or past them, and derives the size of a slot. Data copied into an output that
is too large to stay in the caches is written past them.

In ops in which each rank gets another part, a slot has one section per rank. In reductions, the owner
of a part sums it from all ranks' sections, in rank order. If others need the sum, it goes into the owner's
own section, which no rank stages into (REDUCED). With two ranks, each sums everything: as many bytes cross,
and neither waits a second time. That matters on a busy host, where a waiting rank has just used up its time
slice. (6 busy loops on 2 cores, steps of computing and 1 MiB: 5.6 sleeps per step before, 1.0 now; November
2026.)

Rounds are counted over the life of the group, alike on all ranks. An op begins when every rank has called
it, and a rank calls an op only after it has finished the last one, so its first slots are free.

After the slots there are places for data of middle size, which goes with its message like small data.

Ops are given addresses, from which their operands are counted: first the inputs, then the outputs.

If the tensors of all ranks are in the same shared range (``processes/segment.py``), every rank reads the
others' tensors in place. Nothing is staged, so a rank may leave the op only when its peers have read its
tensor: ranks meet at the end (MET), and in all_reduce once more between reducing and gathering.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.memory import Array
from interlace.runtime.places.shm import message_steps
from interlace.runtime.places.shm.caches import Caches, RingWrites, own_caches
from interlace.runtime.places.shm.machine_code import SUMS, Operand
from interlace.runtime.places.shm.message_steps import Addresses, Doing, HostSteps, Key, at
from interlace.runtime.processes.control import DONE, MET, REDUCED, SMALL_DATA, STAGED
from interlace.runtime.processes.group import HostGroup

SLOTS = 4
MOST = 4096  # rounds of a list, times ranks: each has 200 to 500 bytes

RingPart = tuple[Operand, int]  # address and bytes
RingTarget = RingPart | None
Copy = Callable[[Operand, Operand, int], None]  # target, source, bytes
Stage = Callable[[Copy, int], None]
"""Puts the piece of a round into its slot, with its first argument as the copy."""

Reducer = Callable[[Doing, Copy, int], None]
Collect = Callable[[Doing, int], None]


class Rounds:
    """The rings of a group, as one rank sees them. The first large op creates them."""

    def __init__(self, group: HostGroup, steps: HostSteps) -> None:
        self._group, self._steps = group, steps
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = [peer for peer in range(group.world_size) if peer != group.rank]
        self._around = around(group.rank, group.world_size)
        self.opened = False
        self._rings: list[Array] = []
        self._bases: list[int] = []

    def open(self) -> None:
        if not self.opened:
            steps, doing = self._steps, self._steps.call.op
            messages = self._group.exchange(own_caches().packed(), doing)
            steps.take_sizes(Caches.unpacked(messages[-1]))
            self._slot_bytes, medium = steps.sizes.slot, steps.sizes.medium
            self.section = self._slot_bytes // self._world_size & ~63
            self._medium = SLOTS * self._slot_bytes
            nbytes = self._medium + message_steps.MEDIUM_PLACES * medium
            mappings = self._group.allocate(nbytes, doing)
            self._rings = [mapping.array() for mapping in mappings]
            self._bases = [mapping.data_address for mapping in mappings]
            self.opened = True

    @functools.cached_property
    def ring_writes(self) -> RingWrites:
        """The ways in which the ranks write into their rings, once they have joined."""
        assert self._group.control is not None
        return RingWrites(self._group.control.writes, decides=self._rank == self._world_size - 1)

    def data(self, peer: int) -> int:
        """Return the address of the first place for data of middle size of ``peer``."""
        return self._bases[peer] + self._medium

    def _slot(self, rank: int, c: int) -> int:
        return self._bases[rank] + c % SLOTS * self._slot_bytes

    def move(
        self,
        key: Key | None,
        addresses: Addresses,
        parts: Sequence[RingPart],
        targets: Sequence[RingTarget],
        large: Sequence[int],
        *,
        apart: bool,
    ) -> None:
        """Move rank r's part, at most ``large[r]`` bytes, to ``targets[r]``; one for all or ``apart``."""
        rank = self._rank
        piece, number = (self.section, rank) if apart else (self._slot_bytes, 0)
        part = parts[number][0] if parts else 0
        found = [
            (peer, *target)
            for peer in (*self._around, rank)
            if (target := targets[peer]) is not None and large[peer]
        ]
        past = sum(total for *_, total in found) >= self._steps.sizes.outputs

        def collect(steps: Doing, c: int) -> None:
            start, offset = c * piece, number * piece
            for peer, target, total in found:
                if (size := min(piece, total - start)) > 0:
                    source = at(part, start) if peer == rank else self._slot(peer, c) + offset
                    steps.stream(at(target, start), source, size, past=past)

        stage = functools.partial(self._stage, parts, self._around if apart else [0], piece)
        self._run(
            key,
            addresses,
            -(-max(large) // piece),
            stage if large[rank] else None,
            None,
            collect if found else None,
            [peer for peer, *_ in found if peer != rank],
        )

    def _stage(
        self, parts: Sequence[RingPart], numbers: Sequence[int], piece: int, write: Copy, c: int
    ) -> None:
        """Put a piece of each of these parts into its section of the slot."""
        start = c * piece
        for number in numbers:
            address, total = parts[number]
            if (size := min(piece, total - start)) > 0:
                write(self._slot(self._rank, c) + number * piece, at(address, start), size)

    def reduce_scatter(
        self,
        key: Key | None,
        addresses: Addresses,
        parts: Sequence[RingPart],
        target: Operand,
        dtype: torch.dtype,
        op: str,
    ) -> None:
        """Compute, at ``target``, the reduction of all ranks' parts for this rank."""
        part, total = parts[self._rank]

        def reduce(steps: Doing, write: Copy, c: int) -> None:
            start = c * self.section
            if (size := min(self.section, total - start)) > 0:
                self._reduce(steps, op, dtype, at(target, start), at(part, start), c, size)

        stage = functools.partial(self._stage, parts, self._around, self.section)
        count = -(-max(nbytes for _, nbytes in parts) // self.section)
        self._run(key, addresses, count, stage, reduce, None, self._peers)

    def sum_everywhere(self, tensor: torch.Tensor, *, meets: bool) -> None:
        """Compute ``tensor`` = the sum of all ranks', which each reads; ``meets``: see :meth:`reduce`."""
        piece, total, dtype = self._slot_bytes, tensor.nbytes, tensor.dtype
        whole: RingPart = (0, message_steps.INPUT), total

        def collect(steps: Doing, c: int) -> None:
            part = at(whole[0], c * piece)
            sources: list[Operand] = [self._slot(peer, c) for peer in range(self._world_size)]
            sources[self._rank] = part
            count = min(piece, total - c * piece) // dtype.itemsize
            steps.reduce("sum", dtype, part, sources, count)

        self._run(
            ("sum", total, dtype),
            (tensor.data_ptr(),),
            -(-total // piece),
            functools.partial(self._stage, [whole], [0], piece),
            None,
            collect,
            self._peers,
            meets=meets,
        )

    def reduce(self, tensor: torch.Tensor, op: str, root: int | None, *, meets: bool) -> None:
        """Compute ``tensor`` = the reduction of all ranks'; only on ``root``, unless that is None.

        If it ``meets``, the ranks have not met in this op yet. They meet when as many rounds are staged as
        there are slots: the last rank then finds all of them, and waits for no other rank.
        """
        rank, section, dtype = self._rank, self.section, tensor.dtype
        edges = [n * dtype.itemsize for n in cuts(tensor.numel(), self._world_size)]
        parts: list[RingPart] = [
            ((first, message_steps.INPUT), end - first) for first, end in itertools.pairwise(edges)
        ]
        address, total = parts[rank]
        here = root is None or root == rank
        past_caches = tensor.nbytes >= self._steps.sizes.in_place
        key = ("reduce", tensor.nbytes, dtype, root) if op == "sum" and dtype in SUMS else None

        def reduce(steps: Doing, write: Copy, c: int) -> None:
            start = c * section
            if (size := min(section, total - start)) > 0:
                part, summed = at(address, start), self._slot(rank, c) + rank * section
                self._reduce(steps, op, dtype, part if here else summed, part, c, size)
                if root is None:
                    write(summed, part, size)

        def collect(steps: Doing, c: int) -> None:
            start = c * section
            for peer in self._around:
                target, length = parts[peer]
                if (size := min(section, length - start)) > 0:
                    source = self._slot(peer, c) + peer * section
                    steps.stream(at(target, start), source, size, past=past_caches)

        self._run(
            key,
            (tensor.data_ptr(),),
            -(-parts[0][1] // section),
            functools.partial(self._stage, parts, self._around, self.section),
            reduce,
            collect if here else None,
            self._peers,
            meets=meets,
        )

    def _reduce(
        self,
        steps: Doing,
        op: str,
        dtype: torch.dtype,
        target: Operand,
        section: Operand,
        c: int,
        nbytes: int,
    ) -> None:
        """Compute ``target``, the reduction of this rank's section of all slots; its own is ``section``."""
        first = self._rank * self.section
        sources: list[Operand] = [self._slot(peer, c) + first for peer in range(self._world_size)]
        sources[self._rank] = section
        steps.reduce(op, dtype, target, sources, nbytes // dtype.itemsize)

    def _run(
        self,
        key: Key | None,
        addresses: Addresses,
        count: int,
        stage: Stage | None,
        reduce: Reducer | None,
        collect: Collect | None,
        sources: Sequence[int],
        *,
        meets: bool = False,
    ) -> None:
        """Run rounds 0 to ``count`` - 1; ``sources``: the ranks whose data is collected."""
        steps = self._steps
        op, control, late = steps.call.op, steps.control, None
        name_algorithm("rings")
        if not steps.machine_code or count > MOST // self._world_size:
            key = None
        method = f"{op} by Python" if key is None else op
        past = steps.machine_code and self.ring_writes.past(method, count)
        ahead, started = min(count, SLOTS) if meets else 0, time.perf_counter()
        if meets:
            assert stage is not None

            def first(doing: Doing) -> None:
                doing.wait_for(DONE, self._peers, 0)
                for c in range(ahead):
                    stage(functools.partial(doing.stream, past=past), c)

            steps.do(None if key is None else ("first", *key, past), addresses, first)
            staged = time.perf_counter()
            steps.meet()
            started += time.perf_counter() - staged  # without the wait for the last caller
            late = [peer for peer in self._peers if control.where(peer, steps.sequence)[0]]
        if key is not None:
            key = "rounds", *key, past, None if late is None else tuple(late)

        def await_round(doing: Doing, word: int, peers: Sequence[int], c: int) -> None:
            """Wait until ``peers`` have posted round ``c``. The meeting covers rounds staged ``ahead``."""
            if word == STAGED and late is not None and c < ahead:
                peers = [peer for peer in peers if peer in late]
            doing.wait_for(word, peers, c + 1)

        def rounds(doing: Doing) -> None:
            """Stage ahead of reducing and collecting, so that peers rarely wait.

            If the ranks have met when the first rounds were staged, ``late`` are those that had not.
            """
            peers, write = self._peers, functools.partial(doing.stream, past=past)
            lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
            if ahead:
                doing.post(STAGED, ahead)
            for step in range(count + lag):
                if stage is not None and ahead <= step < count:
                    if step >= SLOTS:
                        doing.wait_for(DONE, peers, step - SLOTS + 1)
                    stage(write, step)
                    doing.post(STAGED, step + 1)
                c = step - 1
                if reduce is not None and 0 <= c < count:
                    await_round(doing, STAGED, peers, c)
                    reduce(doing, write, c)
                    doing.post(REDUCED, c + 1)
                c = step - lag
                if c >= 0:
                    if collect is not None:
                        await_round(doing, wanted, sources, c)
                        collect(doing, c)
                    doing.post(DONE, c + 1)

        try:
            steps.do(key, addresses, rounds)
        except (TypeError, ValueError) as error:  # these would be refusals that all ranks share
            raise RuntimeError(f"{op} failed while data moved: {error}") from error
        steps.rounds += count  # not before: ranks may not agree on an op
        if steps.machine_code:
            self.ring_writes.took(method, count, past, time.perf_counter() - started)


def cuts(count: int, world_size: int) -> list[int]:
    """Return where each rank's part of a tensor of ``count`` elements begins, and the end of the last."""
    per = -(-count // world_size // 16) * 16
    return [min(count, owner * per) for owner in range(world_size + 1)]


def around(rank: int, world_size: int) -> list[int]:
    """Return the other ranks, beginning with the next: no two ranks read the same one's data at once."""
    return [(rank + step) % world_size for step in range(1, world_size)]


Stretch = tuple[int, int]  # address and bytes


def adjacent(parts: Sequence[Stretch]) -> bool:
    first, nbytes = parts[0]
    return all(part == (first + number * nbytes, nbytes) for number, part in enumerate(parts))


class Direct:
    """The direct ops of one rank of a group. The messages of the running op say where tensors are."""

    def __init__(self, group: HostGroup, steps: HostSteps) -> None:
        self._group, self._steps = group, steps
        self._rank, self._world_size = group.rank, group.world_size
        self._peers = around(group.rank, group.world_size)
        self._meetings = 0

    def find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return ``tensor``'s range and offset in shared memory; range 0 if it is small or not there."""
        if tensor.nbytes <= SMALL_DATA or not self._group.shared_ranges:
            return 0, 0
        return self._group.shared_ranges.find(tensor.data_ptr(), tensor.nbytes)

    def find_adjacent(
        self,
        parts: Sequence[Stretch],
        targets: Sequence[Stretch | None],
        overwritten: Stretch | None = None,
    ) -> tuple[int, int]:
        """Return where ``parts`` are, if they are equal in size and adjacent; otherwise range 0.

        Also range 0 if a target is in memory that a peer reads: it would be written while the peer may
        still read. ``overwritten`` is a part that only this rank reads.
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
        """Return whether the tensors of all ranks are in range ``number``, and so are read in place."""
        where, sequence = self._steps.control.where, self._steps.sequence
        direct = number > 0 and all(where(peer, sequence)[0] == number for peer in self._peers)
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
        """Copy part ``part`` of rank r's tensor to ``targets[r]``, in parts of the target's size."""
        steps, outputs = self._steps.at_once(), self._steps.sizes.outputs
        past = sum(target[1] for target in targets if target) >= outputs
        for peer in self._peers:
            if (target := targets[peer]) is not None:
                address, nbytes = target
                steps.stream(address, self._address(peer) + part * nbytes, nbytes, past=past)
        self._meet()

    def _reduce(
        self, op: str, stretch: Stretch, target: int, offset: int, dtype: torch.dtype
    ) -> None:
        """Compute ``target`` = the reduction of ``stretch`` and the others' data at ``offset``."""
        address, nbytes = stretch
        sources = [
            address if rank == self._rank else self._address(rank) + offset
            for rank in range(self._world_size)
        ]
        self._steps.at_once().reduce(op, dtype, target, sources, nbytes // dtype.itemsize)

    def reduce_scatter(self, op: str, stretch: Stretch, target: int, dtype: torch.dtype) -> None:
        """Compute ``target`` = the reduction of all ranks' parts for this rank; ``stretch`` is its own."""
        self._reduce(op, stretch, target, self._rank * stretch[1], dtype)
        self._meet()

    def reduce(self, op: str, tensor: torch.Tensor) -> None:
        """Reduce ``tensor`` over ranks: each rank reduces a segment, then all gather the segments."""
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
