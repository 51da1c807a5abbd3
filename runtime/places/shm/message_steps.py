"""Collectives of processes on one host as steps of machine code: what ``engine.py`` does in Python.

Both follow the same protocol, so that ranks may differ in which of them they use. Here are ops that move
equal parts in one message, or sum them; everything else, and every wait that takes long, is Python's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.numerics.reductions import divide
from interlace.runtime.places.one_host.control import (
    AREA,
    PLACES,
    SEQUENCE,
    SMALL_DATA,
    TEXT,
    Control,
)
from interlace.runtime.places.one_host.group import LOOK, HostGroup
from interlace.runtime.places.shm.machine_code.steps import RING, SUMS, WAIT, Operand, Steps
from interlace.runtime.places.shm.rounds import MEDIUM_DATA, MEDIUM_PLACES, PAST_FROM, Rounds

_NUMBER, _AREA, _LENGTH, INPUT, OUTPUT, _PLACE, BEFORE = range(1, 8)
"""Registers: of the message, of its area, its bytes, two addresses, the place of the data, rounds."""

KEPT = 256  # lists of steps; each is made in some 50 us
KEPT_BYTES = 16 << 20  # and of all of them; with 64 ranks a list of 64 rounds has 0.9 MB

Key = tuple[Any, ...]


class HostSteps:
    """The steps of one rank of a group that has joined. Under the group's ``collective_lock``."""

    def __init__(self, group: HostGroup, rounds: Rounds) -> None:
        self._group, self._rounds = group, rounds
        self._rank, self._world_size = group.rank, group.world_size
        self._kept: dict[Key, Steps] = {}
        self._kept_bytes = 0

    # -- ops -----------------------------------------------------------------------------------

    def meet(self, call: Call, control: Control, sequence: int) -> None:
        """Send the message, wait for everyone's, and compare them."""
        steps = self._kept.get(())
        if steps is None:
            steps = self._keep((), control, lambda steps: None, lambda steps: None)
        self._with_data(steps, call, control, sequence)

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
                _stage(steps, (places[self._rank], _PLACE), (0, INPUT), nbytes)

            def after(steps: Steps) -> None:
                sources = [(place, _PLACE) for place in places]
                steps.sum(tensor.dtype, (0, INPUT), sources, tensor.numel())

            steps = self._keep(key, control, before, after)
        steps.registers[INPUT] = tensor.data_ptr()
        self._with_data(steps, call, control, sequence, medium)
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
                    _stage(steps, target, (owner * nbytes, INPUT), nbytes)

            def after(steps: Steps) -> None:
                sources = [(place + rank * stride, _PLACE) for place in places]
                steps.sum(output.dtype, (0, OUTPUT), sources, output.numel())

            steps = self._keep(key, control, before, after)
        steps.registers[INPUT], steps.registers[OUTPUT] = address, output.data_ptr()
        self._with_data(steps, call, control, sequence, medium)
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
                _stage(steps, (places[self._rank], _PLACE), (0, INPUT), nbytes)

            def after(steps: Steps) -> None:
                for peer in control.peers:
                    steps.copy((peer * nbytes, OUTPUT), (places[peer], _PLACE), nbytes)
                steps.copy((self._rank * nbytes, OUTPUT), (0, INPUT), nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[INPUT], steps.registers[OUTPUT] = source, target
        self._with_data(steps, call, control, sequence, medium)

    def all_to_all(
        self, call: Call, control: Control, sequence: int, target: int, source: int, nbytes: int,
        stride: int,
    ) -> bool:  # fmt: skip
        """Everyone's part for this rank, of ``nbytes``, from parts at ``source`` to ``target``.

        False if others have cut theirs otherwise: then the ranks have met, and nothing was received.
        """
        medium = stride * self._world_size > SMALL_DATA
        key = "all_to_all", nbytes, medium
        steps = self._kept.get(key)
        if steps is None:
            places, rank = self._places(control, medium), self._rank

            def before(steps: Steps) -> None:
                for peer in control.peers:
                    to = places[rank] + peer * stride, _PLACE
                    _stage(steps, to, (peer * nbytes, INPUT), nbytes)

            def after(steps: Steps) -> None:
                steps.copy((rank * nbytes, OUTPUT), (rank * nbytes, INPUT), nbytes)
                for peer in control.peers:
                    part = places[peer] + rank * stride, _PLACE
                    steps.copy((peer * nbytes, OUTPUT), part, nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[INPUT], steps.registers[OUTPUT] = source, target
        return self._with_data(steps, call, control, sequence, medium)

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
                    _stage(steps, (place, _PLACE), (0, INPUT), nbytes)

            def after(steps: Steps) -> None:
                if root != self._rank:
                    steps.copy((0, INPUT), (place, _PLACE), nbytes)

            steps = self._keep(key, control, before, after)
        steps.registers[INPUT] = address
        self._with_data(steps, call, control, sequence, medium)

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
        return self._keep_as(key, steps)

    def _keep_as(self, key: Key, steps: Steps) -> Steps:
        steps.complete(spin=self._group.spins)
        if len(self._kept) >= KEPT or self._kept_bytes + steps.nbytes > KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[key] = steps
        self._kept_bytes += steps.nbytes
        return steps

    def _with_data(
        self, steps: Steps, call: Call, control: Control, sequence: int, medium: bool = False
    ) -> bool:
        """Run steps of which the data goes with the message, as :meth:`_run` does."""
        if medium:
            steps.registers[_PLACE] = sequence % MEDIUM_PLACES * MEDIUM_DATA
        else:
            steps.registers[_PLACE] = sequence % PLACES * SMALL_DATA
        alike = self._run(steps, call, control, sequence)
        if not sequence % LOOK:
            control.spread.look()
        return alike

    def _run(self, steps: Steps, call: Call, control: Control, sequence: int) -> bool:
        """Whether they ran to the end. Messages that differ, but fit together, end them at the meeting:
        what comes after it would look for data where only an equal message has it.
        """
        registers = steps.registers
        registers[_NUMBER] = sequence
        registers[_AREA] = (sequence & 1) * AREA
        registers[_LENGTH] = len(call.message)
        stopped = steps.run()
        while stopped >= 0:
            kind = steps.kinds[stopped]
            if kind == WAIT:
                peers, index, register, further = steps.notes[stopped]
                self._group.await_word(peers, index, registers[register] + further, call.op)
            elif kind == RING:
                control.bell.ring()
                stopped += 1
            else:
                verify(call, control, sequence, self._rank)
                return False
            stopped = steps.run(stopped)
        return True


def _stage(steps: Steps, target: Operand, source: Operand, nbytes: int) -> None:
    """Put data beside a message."""
    if nbytes >= PAST_FROM:
        steps.stream(target, source, nbytes, past=True)
    else:
        steps.copy(target, source, nbytes)


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
