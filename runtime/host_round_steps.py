"""Large collectives of processes on one host as steps: the rounds of ``host_rounds.py``, written down.

The steps of all rounds of an op are one list, which is kept: an op of as many bytes comes back to it, if
its rounds are in the same slots. Addresses in the caller's tensors are counted from registers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.call import Call
from interlace.runtime.control import DONE, REDUCED, STAGED, Control
from interlace.runtime.host_group import LOOK
from interlace.runtime.host_rounds import SLOT_BYTES, around, cuts, place
from interlace.runtime.host_steps import BEFORE, INPUT, OUTPUT, HostSteps, Key, meeting
from interlace.runtime.steps import SUMS, Operand, Steps

STREAMED = 8 << 20  # bytes of an output that are written past the caches: they would not stay there
MOST = 64  # rounds of an op in steps: beside more the time of Python is small

Stage = Callable[[Steps, int, int], None]
Act = Callable[[Steps, int, Sequence[int]], None]


class RoundSteps(HostSteps):
    """The steps of one rank of a group that has joined. Under the group's ``collective_lock``."""

    # -- ops -----------------------------------------------------------------------------------

    def takes(self, call: Call, nbytes: int, section: int) -> bool:
        """Whether an op whose largest part has ``nbytes``, in pieces of ``section``, is done here."""
        return call.equal_fits and nbytes <= MOST * section

    def reduce(
        self, call: Call, control: Control, sequence: int, tensor: torch.Tensor, own_slots: int
    ) -> None:
        """``tensor`` = the sum of everyone's, on all ranks; the ring is there. See ``Rounds.reduce``."""
        rounds, kept, spans = self._rounds, self._kept, Spans(tensor, self._world_size)
        count = -(-spans.largest // rounds.section)
        prior, before = rounds.begin(count)
        first = place(own_slots, before, 0)

        def stage(steps: Steps, c: int, slot: int) -> None:
            for peer in around(self._rank, self._world_size):
                offset, size = spans.piece(peer, c, rounds.section)
                if size:
                    steps.copy(slot + peer * rounds.section, (offset, INPUT), size)

        def collect(steps: Steps, c: int, at: Sequence[int]) -> None:
            for peer in around(self._rank, self._world_size):
                offset, size = spans.piece(peer, c, rounds.section)
                if size:
                    source = rounds.slot(peer, at[peer]) + peer * rounds.section
                    steps.copy((offset, INPUT), source, size)

        def reduce(steps: Steps, c: int, at: Sequence[int]) -> None:
            offset, size = spans.piece(self._rank, c, rounds.section)
            own = self._sections(at)[self._rank]
            if size:
                self._sum(steps, tensor.dtype, own, (offset, INPUT), at, size)
            self._release(steps, control, REDUCED, c + 1)
            if size:
                steps.copy((offset, INPUT), own, size)

        key: Key = "staging", tensor.nbytes, tensor.dtype, first
        steps = kept.get(key)
        if steps is None:
            steps = Steps()
            self._wait(steps, control, DONE, control.peers, 0)
            stage(steps, 0, rounds.slot(self._rank, first))
            meeting(steps, control, self._rank)
            self._keep_as(key, steps)
        steps.registers[INPUT], steps.registers[BEFORE] = tensor.data_ptr(), prior
        self._run(steps, call, control, sequence)
        slots = rounds.all_slots(own_slots, control, sequence)
        late = [peer for peer in control.peers if control.where(peer, sequence)[0]]
        key = "reduce", tensor.nbytes, tensor.dtype, tuple(late)
        self._rounds_of(
            call, control, sequence, key, (tensor.data_ptr(), 0), slots, before, count,
            stage, reduce, collect, late=late,
        )  # fmt: skip

    def scatter_sums(
        self, call: Call, control: Control, sequence: int, output: torch.Tensor, address: int,
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        """``output`` = the sum of everyone's part for this rank; the own parts begin at ``address``."""
        rounds, nbytes, section = self._rounds, output.nbytes, self._rounds.section
        rounds.open(call.op)

        def stage(steps: Steps, c: int, slot: int) -> None:
            size = min(section, nbytes - c * section)
            for peer in around(self._rank, self._world_size):
                steps.copy(slot + peer * section, (peer * nbytes + c * section, INPUT), size)

        def reduce(steps: Steps, c: int, at: Sequence[int]) -> None:
            size = min(section, nbytes - c * section)
            own = self._rank * nbytes + c * section, INPUT
            self._sum(steps, output.dtype, (c * section, OUTPUT), own, at, size)
            self._release(steps, control, REDUCED, c + 1)

        count = -(-nbytes // section)
        _, before = rounds.begin(count)
        key = "scatter_sums", nbytes, output.dtype
        self._rounds_of(
            call, control, sequence, key, (address, output.data_ptr()), slots, before, count,
            stage, reduce, None,
        )  # fmt: skip

    def share(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int,
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        """all_gather: everyone's ``nbytes`` at ``source``, behind each other at ``target``."""
        self._rounds.open(call.op)
        rank = self._rank
        total = nbytes * self._world_size
        in_place = source == target + rank * nbytes

        def stage(steps: Steps, c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            steps.copy(slot, (start, INPUT), size)
            if not in_place:
                _output(steps, total)((rank * nbytes + start, OUTPUT), (start, INPUT), size)

        def collect(steps: Steps, c: int, at: Sequence[int]) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            for peer in around(rank, self._world_size):
                slot = self._rounds.slot(peer, at[peer])
                _output(steps, total)((peer * nbytes + start, OUTPUT), slot, size)

        count = -(-nbytes // SLOT_BYTES)
        _, before = self._rounds.begin(count)
        key = "share", nbytes, in_place
        self._rounds_of(
            call, control, sequence, key, (source, target), slots, before, count,
            stage, None, collect,
        )  # fmt: skip

    def send_all(
        self, call: Call, control: Control, sequence: int, address: int, nbytes: int, root: int,
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        """broadcast: the ``nbytes`` at ``root``'s ``address`` to everyone's."""
        self._rounds.open(call.op)

        def stage(steps: Steps, c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            steps.copy(slot, (start, INPUT), min(SLOT_BYTES, nbytes - start))

        def collect(steps: Steps, c: int, at: Sequence[int]) -> None:
            start = c * SLOT_BYTES
            slot = self._rounds.slot(root, at[root])
            steps.copy((start, INPUT), slot, min(SLOT_BYTES, nbytes - start))

        is_root = root == self._rank
        count = -(-nbytes // SLOT_BYTES)
        _, before = self._rounds.begin(count)
        key = "send_all", nbytes, root
        self._rounds_of(
            call, control, sequence, key, (address, 0), slots, before, count,
            stage if is_root else None, None, None if is_root else collect, sources=[root],
        )  # fmt: skip

    def trade(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int,
        slots: Sequence[int],
    ) -> None:  # fmt: skip
        """all_to_all: everyone's part for this rank, of ``nbytes``, from ``source`` to ``target``."""
        self._rounds.open(call.op)
        rank, section = self._rank, self._rounds.section
        total = nbytes * self._world_size

        def stage(steps: Steps, c: int, slot: int) -> None:
            size = min(section, nbytes - c * section)
            for peer in around(rank, self._world_size):
                steps.copy(slot + peer * section, (peer * nbytes + c * section, INPUT), size)

        def collect(steps: Steps, c: int, at: Sequence[int]) -> None:
            size = min(section, nbytes - c * section)
            for peer in around(rank, self._world_size):
                part = self._rounds.slot(peer, at[peer]) + rank * section
                _output(steps, total)((peer * nbytes + c * section, OUTPUT), part, size)
            own = rank * nbytes + c * section
            _output(steps, total)((own, OUTPUT), (own, INPUT), size)

        count = -(-nbytes // section)
        _, before = self._rounds.begin(count)
        key = "trade", nbytes
        self._rounds_of(
            call, control, sequence, key, (source, target), slots, before, count,
            stage, None, collect,
        )  # fmt: skip

    # -- how -----------------------------------------------------------------------------------

    def _rounds_of(
        self,
        call: Call,
        control: Control,
        sequence: int,
        key: tuple[Any, ...],
        addresses: tuple[int, int],
        slots: Sequence[int],
        before: int,
        count: int,
        stage: Stage | None,
        reduce: Act | None,
        collect: Act | None,
        *,
        sources: Sequence[int] | None = None,
        late: Sequence[int] | None = None,
    ) -> None:
        """Run all rounds of an op whose ranks have met; the first is staged already if ``late`` is given.

        ``slots``: how many each rank uses. ``sources``: from whom is collected. ``late``: who had not
        staged the first round when we met.
        """
        started = time.perf_counter()
        own_slots = slots[self._rank]
        firsts = tuple(place(n, before, 0) for n in slots)
        key = (*key, tuple(slots), firsts)
        steps = self._kept.get(key)
        if steps is None:
            at = [[place(n, before, c) for n in slots] for c in range(count)]
            steps = Steps()
            if late is not None:
                self._release(steps, control, STAGED, 1)
            self._write(steps, control, at, own_slots, stage, reduce, collect, sources, late)
            self._keep_as(key, steps)
        registers = steps.registers
        registers[INPUT], registers[OUTPUT] = addresses
        registers[BEFORE] = before
        self._run(steps, call, control, sequence)
        if not sequence % LOOK:
            control.spread.look()
        self._rounds.ran(call.op, before + count, own_slots if stage is not None else 0, started)

    def _write(
        self,
        steps: Steps,
        control: Control,
        at: Sequence[Sequence[int]],
        own_slots: int,
        stage: Stage | None,
        reduce: Act | None,
        collect: Act | None,
        sources: Sequence[int] | None,
        late: Sequence[int] | None,
    ) -> None:
        """As ``Rounds._run``: staging runs ahead of reducing and collecting. ``at[c][r]``: slot numbers."""
        rank, count, peers = self._rank, len(at), control.peers
        lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
        for step in range(count + lag):
            if stage is not None and (0 if late is None else 1) <= step < count:
                if step >= own_slots:
                    self._wait(steps, control, DONE, peers, step - own_slots + 1)
                stage(steps, step, self._rounds.slot(rank, at[step][rank]))
                self._release(steps, control, STAGED, step + 1)
            c = step - 1
            if reduce is not None and 0 <= c < count:
                from_whom = peers if c or late is None else late
                self._wait(steps, control, STAGED, from_whom, c + 1)
                reduce(steps, c, at[c])
            c = step - lag
            if c >= 0:
                if collect is not None:
                    from_whom = peers if sources is None else sources
                    self._wait(steps, control, wanted, from_whom, c + 1)
                    collect(steps, c, at[c])
                self._release(steps, control, DONE, c + 1)

    def _sections(self, at: Sequence[int]) -> list[int]:
        """The address of this rank's section of every rank's slot."""
        first = self._rank * self._rounds.section
        return [self._rounds.slot(peer, slot) + first for peer, slot in enumerate(at)]

    def _sum(
        self, steps: Steps, dtype: torch.dtype, target: Operand, own: Operand, at: Sequence[int],
        nbytes: int,
    ) -> None:  # fmt: skip
        sources: list[Operand] = [*self._sections(at)]
        sources[self._rank] = own
        steps.sum(dtype, target, sources, nbytes // dtype.itemsize)

    def _wait(
        self, steps: Steps, control: Control, index: int, peers: Sequence[int], further: int
    ) -> None:
        addresses = [control.bases[peer] + 8 * index for peer in peers]
        steps.wait(addresses, (further, BEFORE), (peers, index, BEFORE, further))

    def _release(self, steps: Steps, control: Control, index: int, further: int) -> None:
        steps.release(control.bases[self._rank] + 8 * index, (further, BEFORE))
        steps.ring(control.asleep)


def _output(steps: Steps, nbytes: int) -> Callable[[Operand, Operand, Operand], None]:
    """How to write into an output of ``nbytes`` in all."""
    return steps.stream if nbytes >= STREAMED else steps.copy


class Spans:
    """How a tensor is cut into one part per rank, in bytes, as ``Rounds.reduce`` cuts it."""

    def __init__(self, tensor: torch.Tensor, world_size: int) -> None:
        itemsize = tensor.dtype.itemsize
        self._bytes = [first * itemsize for first in cuts(tensor.numel(), world_size)]
        self.largest = self._bytes[1]

    def piece(self, rank: int, c: int, section: int) -> tuple[int, int]:
        """Where piece ``c`` of a rank's part begins, and its bytes, which may be none."""
        first, end = self._bytes[rank], self._bytes[rank + 1]
        return first + c * section, max(0, min(section, end - first - c * section))


def sums_in_rounds(dtype: torch.dtype, op: str) -> bool:
    """Whether rounds of steps compute this."""
    return op == "sum" and dtype in SUMS
