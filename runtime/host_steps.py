"""Collectives of processes on one host as steps of machine code: what ``host_engine.py`` does in Python.

Both follow the same protocol, so that ranks may differ in which of them they use. Here are ops that move
equal parts in one message, or sum them; everything else, and every wait that takes long, is Python's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace.runtime.call import Call
from interlace.runtime.control import (
    AREA,
    DONE,
    PLACES,
    REDUCED,
    SEQUENCE,
    SMALL_DATA,
    STAGED,
    TEXT,
    Control,
)
from interlace.runtime.host_group import LOOK, HostGroup
from interlace.runtime.host_rounds import MEDIUM_DATA, MEDIUM_PLACES, Rounds, around, cuts, place
from interlace.runtime.reductions import divide
from interlace.runtime.steps import RING, SUMS, WAIT, Operand, Steps

_NUMBER, _AREA, _LENGTH, _INPUT, _OUTPUT, _PLACE, _COUNT = range(1, 8)
"""Registers: of the message, of its area, its bytes, two addresses, the place of the data, rounds."""

MOST_ROUNDS = 64
KEPT = 256  # lists of steps; each is made in some 50 us

Key = tuple[Any, ...]


class HostSteps:
    """The steps of one rank of a group that has joined. Under the group's ``collective_lock``."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        self._group, self._rounds = group, rounds
        self._rank, self._world_size = group.rank, group.world_size
        self._kept: dict[Key, Steps] = {}

    # -- ops -----------------------------------------------------------------------------------

    def meet(self, call: Call, control: Control, sequence: int) -> None:
        """Send the message, wait for everyone's, and compare them."""
        steps = self._kept.get(())
        if steps is None:
            steps = self._keep((), control, lambda steps: None, lambda steps: None)
        self._run(steps, call, control, sequence)

    def all_reduce(
        self, call: Call, control: Control, sequence: int, tensor: torch.Tensor, average: bool
    ) -> None:
        """``tensor`` = the sum of everyone's, of at most ``MEDIUM_DATA`` bytes, or their average."""
        nbytes = tensor.nbytes
        medium = nbytes > SMALL_DATA
        key = "all_reduce", tensor.dtype, nbytes, medium
        steps = self._kept.get(key)
        if steps is None:
            places = self._places(control, medium)

            def before(steps: Steps) -> None:
                steps.copy((places[self._rank], _PLACE), (0, _INPUT), nbytes)

            def after(steps: Steps) -> None:
                sources = [(place, _PLACE) for place in places]
                steps.sum(tensor.dtype, (0, _INPUT), sources, tensor.numel())

            steps = self._keep(key, control, before, after)
        steps.registers[_INPUT] = tensor.data_ptr()
        self._run(steps, call, control, sequence, medium)
        if average:
            divide(tensor, self._world_size)

    def reduce_scatter(
        self, call: Call, control: Control, sequence: int, output: torch.Tensor, address: int,
        stride: int, average: bool,
    ) -> None:  # fmt: skip
        """``output`` = the sum of everyone's part for this rank; the own parts begin at ``address``."""
        nbytes, rank = output.nbytes, self._rank
        medium = stride * self._world_size > SMALL_DATA
        key = "reduce_scatter", output.dtype, nbytes, medium
        steps = self._kept.get(key)
        if steps is None:
            places = self._places(control, medium)

            def before(steps: Steps) -> None:
                for owner in range(self._world_size):
                    target = places[rank] + owner * stride, _PLACE
                    steps.copy(target, (owner * nbytes, _INPUT), nbytes)

            def after(steps: Steps) -> None:
                sources = [(place + rank * stride, _PLACE) for place in places]
                steps.sum(output.dtype, (0, _OUTPUT), sources, output.numel())

            steps = self._keep(key, control, before, after)
        steps.registers[_INPUT], steps.registers[_OUTPUT] = address, output.data_ptr()
        self._run(steps, call, control, sequence, medium)
        if average:
            divide(output, self._world_size)

    def all_gather(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int
    ) -> None:
        """Everyone's ``nbytes`` at ``source``, behind each other at ``target``."""
        medium = nbytes > SMALL_DATA
        key = "all_gather", nbytes, medium
        steps = self._kept.get(key)
        if steps is None:
            places = self._places(control, medium)

            def before(steps: Steps) -> None:
                steps.copy((places[self._rank], _PLACE), (0, _INPUT), nbytes)

            def after(steps: Steps) -> None:
                for peer in control.peers:
                    steps.copy((peer * nbytes, _OUTPUT), (places[peer], _PLACE), nbytes)
                steps.copy((self._rank * nbytes, _OUTPUT), (0, _INPUT), nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[_INPUT], steps.registers[_OUTPUT] = source, target
        self._run(steps, call, control, sequence, medium)

    def all_to_all(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int,
        stride: int,
    ) -> None:  # fmt: skip
        """Everyone's part for this rank, of ``nbytes``, from parts at ``source`` to ``target``."""
        medium = stride * self._world_size > SMALL_DATA
        key = "all_to_all", nbytes, medium
        steps = self._kept.get(key)
        if steps is None:
            places, rank = self._places(control, medium), self._rank

            def before(steps: Steps) -> None:
                for peer in control.peers:
                    to = places[rank] + peer * stride, _PLACE
                    steps.copy(to, (peer * nbytes, _INPUT), nbytes)

            def after(steps: Steps) -> None:
                steps.copy((rank * nbytes, _OUTPUT), (rank * nbytes, _INPUT), nbytes)
                for peer in control.peers:
                    part = places[peer] + rank * stride, _PLACE
                    steps.copy((peer * nbytes, _OUTPUT), part, nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[_INPUT], steps.registers[_OUTPUT] = source, target
        self._run(steps, call, control, sequence, medium)

    def broadcast(
        self, call: Call, control: Control, sequence: int, address: int, nbytes: int, root: int
    ) -> None:
        """The ``nbytes`` at ``root``'s ``address`` to everyone's."""
        medium = nbytes > SMALL_DATA
        key = "broadcast", nbytes, root, medium
        steps = self._kept.get(key)
        if steps is None:
            place = self._places(control, medium)[root]

            def before(steps: Steps) -> None:
                if root == self._rank:
                    steps.copy((place, _PLACE), (0, _INPUT), nbytes)

            def after(steps: Steps) -> None:
                if root != self._rank:
                    steps.copy((0, _INPUT), (place, _PLACE), nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[_INPUT] = address
        self._run(steps, call, control, sequence, medium)

    def rounds(self, call: Call, tensor: torch.Tensor, op: str, root: int | None) -> bool:
        """Whether :meth:`reduce_in_rounds` takes this op: sums for all ranks, in few rounds."""
        if root is not None or op != "sum" or tensor.dtype not in SUMS or not call.equal_fits:
            return False
        return tensor.nbytes <= MOST_ROUNDS * self._rounds.section * self._world_size

    def reduce_in_rounds(
        self,
        call: Call,
        control: Control,
        sequence: int,
        tensor: torch.Tensor,
        own_slots: int,
    ) -> None:
        """``tensor`` = the sum of everyone's, through the rings, which are there; ``Rounds.reduce``."""
        rounds, rank, kept = self._rounds, self._rank, self._kept
        nbytes, dtype = tensor.nbytes, tensor.dtype
        spans = Spans(tensor, self._world_size)
        count = spans.rounds(rounds.section)
        prior, before = rounds.begin(count)
        first = place(own_slots, before, 0)
        key: Key = "staging", nbytes, dtype, first
        steps = kept.get(key)
        if steps is None:
            steps = Steps()
            self._wait(steps, control, DONE, control.peers, 0)
            self._stage(steps, spans, first, 0)
            meeting(steps, control, rank)
            self._kept_as(key, steps)
        self._prepare(steps, call, sequence)
        steps.registers[_INPUT], steps.registers[_COUNT] = tensor.data_ptr(), prior
        self._to_the_end(steps, call, control, sequence)

        started = time.perf_counter()
        slots = rounds.all_slots(own_slots, control, sequence)
        late = tuple(peer for peer in control.peers if control.where(peer, sequence)[0])
        at = tuple(tuple(place(n, before, c) for n in slots) for c in range(count))
        key = "rounds", nbytes, dtype, at, late, own_slots
        steps = kept.get(key)
        if steps is None:
            steps = self._kept_as(key, self._in_rounds(control, spans, at, late, own_slots))
        self._prepare(steps, call, sequence)
        steps.registers[_INPUT], steps.registers[_COUNT] = tensor.data_ptr(), before
        self._to_the_end(steps, call, control, sequence)
        if not sequence % LOOK:
            control.spread.look()
        rounds.ran(call.op, count, own_slots, started)

    def _in_rounds(
        self,
        control: Control,
        spans: Spans,
        at: Sequence[Sequence[int]],
        late: Sequence[int],
        own_slots: int,
    ) -> Steps:
        """All rounds but the staging of the first: staging runs ahead of summing, summing of gathering.

        ``at[c][r]``: the slot of rank r in round c. ``late``: who staged its first round after the meeting.
        """
        steps, rank, count, peers = Steps(), self._rank, len(at), control.peers
        self._release(steps, control, STAGED, 1)
        for step in range(count + 2):
            if 1 <= step < count:
                if step >= own_slots:
                    self._wait(steps, control, DONE, peers, step - own_slots + 1)
                self._stage(steps, spans, at[step][rank], step)
                self._release(steps, control, STAGED, step + 1)
            c = step - 1
            if 0 <= c < count:
                self._wait(steps, control, STAGED, peers if c else late, c + 1)
                self._sum(steps, control, spans, at[c], c)
            c = step - 2
            if c >= 0:
                self._wait(steps, control, REDUCED, peers, c + 1)
                for peer in around(rank, self._world_size):
                    offset, size = spans.piece(peer, c, self._rounds.section)
                    source = self._rounds.slot(peer, at[c][peer]) + peer * self._rounds.section
                    if size:
                        steps.copy((offset, _INPUT), source, size)
                self._release(steps, control, DONE, c + 1)
        return steps

    def _stage(self, steps: Steps, spans: Spans, slot: int, c: int) -> None:
        section = self._rounds.section
        address = self._rounds.slot(self._rank, slot)
        for peer in around(self._rank, self._world_size):
            offset, size = spans.piece(peer, c, section)
            if size:
                steps.copy(address + peer * section, (offset, _INPUT), size)

    def _sum(self, steps: Steps, control: Control, spans: Spans, at: Sequence[int], c: int) -> None:
        """The own piece of everyone's into the own slot, where the peers find it, and to its place."""
        section, rank = self._rounds.section, self._rank
        offset, size = spans.piece(rank, c, section)
        sources: list[Operand] = [
            self._rounds.slot(peer, slot) + rank * section for peer, slot in enumerate(at)
        ]
        own = sources[rank]
        sources[rank] = offset, _INPUT
        if size:
            steps.sum(spans.dtype, own, sources, size // spans.dtype.itemsize)
        self._release(steps, control, REDUCED, c + 1)
        if size:
            steps.copy((offset, _INPUT), own, size)

    def _wait(
        self, steps: Steps, control: Control, index: int, peers: Sequence[int], further: int
    ) -> None:
        addresses = [control.bases[peer] + 8 * index for peer in peers]
        steps.wait(addresses, (further, _COUNT), (peers, index, _COUNT, further))

    def _release(self, steps: Steps, control: Control, index: int, further: int) -> None:
        steps.release(control.bases[self._rank] + 8 * index, (further, _COUNT))
        steps.ring(control.asleep)

    # -- how -----------------------------------------------------------------------------------

    def _places(self, control: Control, medium: bool) -> list[int]:
        """The address of every rank's place 0 for data that goes with a message."""
        data = self._rounds.data if medium else control.data
        return [data(rank, 0) for rank in range(self._world_size)]

    def _keep(
        self,
        key: Key,
        control: Control,
        before: Callable[[Steps], None],
        after: Callable[[Steps], None],
    ) -> Steps:
        """What is done before the message is sent, the meeting, and what is done after it."""
        steps = Steps()
        before(steps)
        meeting(steps, control, self._rank)
        after(steps)
        return self._kept_as(key, steps)

    def _kept_as(self, key: Key, steps: Steps) -> Steps:
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[key] = steps.complete(spin=self._group.spins)
        return steps

    def _run(
        self, steps: Steps, call: Call, control: Control, sequence: int, medium: bool = False
    ) -> None:
        self._prepare(steps, call, sequence)
        registers = steps.registers
        if medium:
            registers[_PLACE] = sequence % MEDIUM_PLACES * MEDIUM_DATA
        else:
            registers[_PLACE] = sequence % PLACES * SMALL_DATA
        self._to_the_end(steps, call, control, sequence)
        if not sequence % LOOK:
            control.spread.look()

    def _prepare(self, steps: Steps, call: Call, sequence: int) -> None:
        registers = steps.registers
        registers[_NUMBER] = sequence
        registers[_AREA] = (sequence & 1) * AREA
        registers[_LENGTH] = len(call.message)

    def _to_the_end(self, steps: Steps, call: Call, control: Control, sequence: int) -> None:
        stopped = steps.run()
        while stopped >= 0:
            stopped = self._go_on(steps, stopped, call, control, sequence)

    def _go_on(
        self, steps: Steps, stopped: int, call: Call, control: Control, sequence: int
    ) -> int:
        """Do what a step of the meeting stopped for; where the steps then stop, or -1."""
        kind = steps.kinds[stopped]
        if kind == WAIT:
            peers, index, register, further = steps.notes[stopped]
            self._group.await_word(peers, index, steps.registers[register] + further, call.op)
            return steps.run(stopped)
        if kind == RING:
            control.bell.ring()
        else:
            verify(call, control, sequence, self._rank)
        return steps.run(stopped + 1)


class Spans:
    """How a tensor is cut into one part per rank, in bytes, as ``Rounds.reduce`` cuts it."""

    def __init__(self, tensor: torch.Tensor, world_size: int) -> None:
        self.dtype = tensor.dtype
        firsts = cuts(tensor.numel(), world_size)
        self._bytes = [first * tensor.dtype.itemsize for first in firsts]

    def rounds(self, section: int) -> int:
        """How many pieces of at most ``section`` bytes the largest part has."""
        return -(-self._bytes[1] // section)

    def piece(self, rank: int, c: int, section: int) -> tuple[int, int]:
        """Where piece ``c`` of a rank's part begins, and its bytes, which may be none."""
        first, end = self._bytes[rank], self._bytes[rank + 1]
        return first + c * section, max(0, min(section, end - first - c * section))


def sums(op: str, dtype: torch.dtype) -> bool:
    """Whether steps compute this: sums, and averages where dividing the rounded sum is the average."""
    return dtype in SUMS and (
        op == "sum" or (op == "avg" and dtype in (torch.float32, torch.float64))
    )


def meeting(steps: Steps, control: Control, rank: int) -> None:
    """Send the message, wait for everyone's, and compare them with one's own."""
    steps.release(control.bases[rank] + 8 * SEQUENCE, (0, _NUMBER))
    steps.ring(control.asleep)
    steps.wait(control.sequences, (0, _NUMBER), (control.peers, SEQUENCE, _NUMBER, 0))
    own, others = control.area(rank), [control.area(peer) for peer in control.peers]
    steps.compare((own, _AREA), others, (0, _AREA), 8)
    texts = [other + TEXT for other in others]
    steps.compare((own + TEXT, _AREA), texts, (0, _AREA), (0, _LENGTH))


def verify(call: Call, control: Control, sequence: int, rank: int) -> None:
    """Raise what the difference between the messages is; return if they fit together all the same."""
    messages = [
        call.message if other == rank else control.message(other, sequence)
        for other in range(len(control.bases))
    ]
    call.verify(messages)
