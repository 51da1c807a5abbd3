"""Large collectives of processes on one host as steps: the rounds of ``rounds.py``, written down.

The steps of all rounds of an op are one list, which is kept: an op of as many bytes comes back to it, if
it is written into the ring alike. Addresses in the caller's tensors are counted from registers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.places.one_host.control import DONE, REDUCED, STAGED, Control
from interlace.runtime.places.one_host.group import LOOK
from interlace.runtime.places.shm.machine_code.steps import SUMS, Operand, Steps
from interlace.runtime.places.shm.message_steps import (
    BEFORE,
    INPUT,
    OUTPUT,
    HostSteps,
    Key,
    meeting,
)
from interlace.runtime.places.shm.rounds import SLOT_BYTES, SLOTS, STREAMED, around, cuts, whole

MOST = 4096  # rounds of an op in steps, times ranks: a list has 200 to 500 bytes for each

Copy = Callable[[Operand, Operand, Operand], None]
Act = Callable[[Steps, int], None]
Stage = Callable[[Copy, int, int], None]
"""How to write into the ring, the round, and its slot."""


class RoundSteps(HostSteps):
    """The steps of one rank of a group that has joined. Under the group's ``collective_lock``."""

    # -- ops -----------------------------------------------------------------------------------

    def takes(self, call: Call, nbytes: int, section: int) -> bool:
        """Whether an op whose largest part has ``nbytes``, in pieces of ``section``, is done here."""
        return call.equal_fits and nbytes <= MOST // self._world_size * section

    def reduce(self, call: Call, control: Control, sequence: int, tensor: torch.Tensor) -> None:
        """``tensor`` = the sum of everyone's, on all ranks; the ring is there. See ``Rounds.reduce``."""
        rounds, kept, spans = self._rounds, self._kept, Spans(tensor, self._world_size)
        rank, count = self._rank, -(-spans.largest // rounds.section)
        past = rounds.ways.past(call.op, count)

        def stage(write: Copy, c: int, slot: int) -> None:
            for peer in around(rank, self._world_size):
                offset, size = spans.piece(peer, c, rounds.section)
                if size:
                    write(slot + peer * rounds.section, (offset, INPUT), size)

        def collect(steps: Steps, c: int) -> None:
            for peer in around(rank, self._world_size):
                offset, size = spans.piece(peer, c, rounds.section)
                if size:
                    source = rounds.slot(peer, c) + peer * rounds.section
                    _output(steps, tensor.nbytes)((offset, INPUT), source, size)

        def reduce(steps: Steps, c: int) -> None:
            offset, size = spans.piece(rank, c, rounds.section)
            if size:
                self._sum(steps, tensor.dtype, (offset, INPUT), (offset, INPUT), c, size)
                write = _streams(steps, past)
                write(rounds.slot(rank, c) + rank * rounds.section, (offset, INPUT), size)
            self._release(steps, control, REDUCED, c + 1)

        key: Key = "staging", tensor.nbytes, tensor.dtype, past
        steps = kept.get(key)
        if steps is None:
            steps = Steps()
            self._wait(steps, control, DONE, control.peers, 0)
            stage(_streams(steps, past), 0, rounds.slot(rank, 0))
            meeting(steps, control, rank)
            self._keep_as(key, steps)
        steps.registers[INPUT], steps.registers[BEFORE] = tensor.data_ptr(), rounds.count
        self._run(steps, call, control, sequence)
        late = [peer for peer in control.peers if control.where(peer, sequence)[0]]
        key = "reduce", tensor.nbytes, tensor.dtype, tuple(late)
        self._rounds_of(
            call, control, sequence, key, (tensor.data_ptr(), 0), count,
            stage, reduce, collect, late=late, past=past,
        )  # fmt: skip

    def scatter_sums(
        self, call: Call, control: Control, sequence: int, output: torch.Tensor, address: int
    ) -> None:
        """``output`` = the sum of everyone's part for this rank; the own parts begin at ``address``."""
        rounds, nbytes, section = self._rounds, output.nbytes, self._rounds.section
        rounds.open(call.op)

        def stage(write: Copy, c: int, slot: int) -> None:
            size = min(section, nbytes - c * section)
            for peer in around(self._rank, self._world_size):
                write(slot + peer * section, (peer * nbytes + c * section, INPUT), size)

        def reduce(steps: Steps, c: int) -> None:
            size = min(section, nbytes - c * section)
            own = self._rank * nbytes + c * section, INPUT
            self._sum(steps, output.dtype, (c * section, OUTPUT), own, c, size)
            self._release(steps, control, REDUCED, c + 1)

        key = "scatter_sums", nbytes, output.dtype
        self._rounds_of(
            call, control, sequence, key, (address, output.data_ptr()), -(-nbytes // section),
            stage, reduce, None,
        )  # fmt: skip

    def share(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int
    ) -> None:
        """all_gather: everyone's ``nbytes`` at ``source``, behind each other at ``target``."""
        self._rounds.open(call.op)
        rank, rounds = self._rank, self._rounds
        total = nbytes * self._world_size
        in_place = source == target + rank * nbytes

        def stage(write: Copy, c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            write(slot, (start, INPUT), min(SLOT_BYTES, nbytes - start))

        def collect(steps: Steps, c: int) -> None:
            start = c * SLOT_BYTES
            size = min(SLOT_BYTES, nbytes - start)
            output = _output(steps, total)
            if not in_place:
                output((rank * nbytes + start, OUTPUT), (start, INPUT), size)
            for peer in around(rank, self._world_size):
                output((peer * nbytes + start, OUTPUT), rounds.slot(peer, c), size)

        key = "share", nbytes, in_place
        self._rounds_of(
            call, control, sequence, key, (source, target), -(-nbytes // SLOT_BYTES),
            stage, None, collect,
        )  # fmt: skip

    def send_all(
        self, call: Call, control: Control, sequence: int, address: int, nbytes: int, root: int
    ) -> None:
        """broadcast: the ``nbytes`` at ``root``'s ``address`` to everyone's."""
        self._rounds.open(call.op)

        def stage(write: Copy, c: int, slot: int) -> None:
            start = c * SLOT_BYTES
            write(slot, (start, INPUT), min(SLOT_BYTES, nbytes - start))

        def collect(steps: Steps, c: int) -> None:
            start = c * SLOT_BYTES
            slot, size = self._rounds.slot(root, c), min(SLOT_BYTES, nbytes - start)
            _output(steps, nbytes)((start, INPUT), slot, size)

        is_root = root == self._rank
        key = "send_all", nbytes, root
        self._rounds_of(
            call, control, sequence, key, (address, 0), -(-nbytes // SLOT_BYTES),
            stage if is_root else None, None, None if is_root else collect, sources=[root],
        )  # fmt: skip

    def trade(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int
    ) -> None:
        """all_to_all: everyone's part for this rank, of ``nbytes``, from ``source`` to ``target``."""
        self._rounds.open(call.op)
        rank, rounds, section = self._rank, self._rounds, self._rounds.section
        total = nbytes * self._world_size

        def stage(write: Copy, c: int, slot: int) -> None:
            size = min(section, nbytes - c * section)
            for peer in around(rank, self._world_size):
                write(slot + peer * section, (peer * nbytes + c * section, INPUT), size)

        def collect(steps: Steps, c: int) -> None:
            size = min(section, nbytes - c * section)
            output = _output(steps, total)
            for peer in around(rank, self._world_size):
                part = rounds.slot(peer, c) + rank * section
                output((peer * nbytes + c * section, OUTPUT), part, size)
            own = rank * nbytes + c * section
            output((own, OUTPUT), (own, INPUT), size)

        key = "trade", nbytes
        self._rounds_of(
            call, control, sequence, key, (source, target), -(-nbytes // section),
            stage, None, collect,
        )  # fmt: skip

    # -- how -----------------------------------------------------------------------------------

    def _rounds_of(
        self,
        call: Call,
        control: Control,
        sequence: int,
        key: Key,
        addresses: tuple[int, int],
        count: int,
        stage: Stage | None,
        reduce: Act | None,
        collect: Act | None,
        *,
        sources: Sequence[int] | None = None,
        late: Sequence[int] | None = None,
        past: bool = False,
    ) -> None:
        """Run all rounds of an op whose ranks have met; ``sources``: from whom is collected.

        If ``late`` is given, the first round is staged already, ``past`` the caches or not, and those
        are who had not staged it when we met.
        """
        ways = self._rounds.ways
        if late is None:
            past = ways.past(call.op, count)
        key = (*key, past)
        steps = self._kept.get(key)
        if steps is None:
            steps = Steps()
            if late is not None:
                self._release(steps, control, STAGED, 1)
            self._write(steps, control, count, stage, past, reduce, collect, sources, late)
            self._keep_as(key, steps)
        registers = steps.registers
        registers[INPUT], registers[OUTPUT] = addresses
        registers[BEFORE] = self._rounds.count
        started = time.perf_counter()
        with whole(call.op):
            self._run(steps, call, control, sequence)
        if not sequence % LOOK:
            control.spread.look()
        self._rounds.count += count
        ways.took(call.op, count, past, time.perf_counter() - started)

    def _write(
        self,
        steps: Steps,
        control: Control,
        count: int,
        stage: Stage | None,
        past: bool,
        reduce: Act | None,
        collect: Act | None,
        sources: Sequence[int] | None,
        late: Sequence[int] | None,
    ) -> None:
        """As ``Rounds._run``: staging runs ahead of reducing and collecting."""
        rank, peers = self._rank, control.peers
        lag, wanted = (1, STAGED) if reduce is None else (2, REDUCED)
        for step in range(count + lag):
            if stage is not None and (0 if late is None else 1) <= step < count:
                if step >= SLOTS:
                    self._wait(steps, control, DONE, peers, step - SLOTS + 1)
                stage(_streams(steps, past), step, self._rounds.slot(rank, step))
                self._release(steps, control, STAGED, step + 1)
            c = step - 1
            if reduce is not None and 0 <= c < count:
                from_whom = peers if c or late is None else late
                self._wait(steps, control, STAGED, from_whom, c + 1)
                reduce(steps, c)
            c = step - lag
            if c >= 0:
                if collect is not None:
                    from_whom = peers if sources is None else sources
                    self._wait(steps, control, wanted, from_whom, c + 1)
                    collect(steps, c)
                self._release(steps, control, DONE, c + 1)

    def _sum(
        self, steps: Steps, dtype: torch.dtype, target: Operand, own: Operand, c: int, nbytes: int
    ) -> None:
        """``target`` = the sum of this rank's sections of everyone's slots, its own from ``own``."""
        first = self._rank * self._rounds.section
        sources: list[Operand] = [
            self._rounds.slot(peer, c) + first for peer in range(self._world_size)
        ]
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


def _output(steps: Steps, nbytes: int) -> Copy:
    """How to write into an output of ``nbytes`` in all."""
    return _streams(steps, past=nbytes >= STREAMED)


def _streams(steps: Steps, past: bool) -> Copy:
    return functools.partial(steps.stream, past=past)


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
