"""A rank's part in a collective on one host, in steps: listed for machine code, or done at once in Python.

The protocols (``engine.py``, ``rounds.py``) are functions that call the methods of an object, which is one
of two. :class:`Listed` writes a list, which machine code runs now and whenever the same op comes again.
:class:`AtOnce` does each step immediately. Ranks may use different ones, except where each computes the
same result for itself: the sum of two NaNs has the bits of either.

A list is kept under a key, which contains all that it depends on. An op has no key if it differs from call
to call, or if it is not for machine code. Such an op is done at once, and so is every op without machine
code. Values that differ between ops of one key are in registers. An operand is a number, or a number and
the register to add to it.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.context import current
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.shm import machine_code
from interlace.runtime.places.shm.caches import Caches, Thresholds, own_caches
from interlace.runtime.places.shm.machine_code import SUMS, Copier, Operand, Steps
from interlace.runtime.processes.control import (
    AREA,
    HEADERS,
    HOW,
    PLACES,
    SEQUENCE,
    SMALL_DATA,
    Control,
)
from interlace.runtime.processes.group import LOOK, HostGroup
from interlace.runtime.processes.recorder import BEGAN, ENDED, ENTRIES, ENTRY, ENTRY_WORDS, MESSAGES
from interlace.runtime.processes.waiting import CROWD

NUMBER, LENGTH = 1, 2
BEFORE, ENTRY_AT, AT, SMALL, MEDIUM, INPUT, OUTPUT = range(NUMBER + ENTRY_WORDS, 16)
"""Registers: the first words of the message's entry in the record; after that entry, the rounds before; the
addresses of the entry, its area and the places of data; then all addresses of the op."""

MOST_RANKS = (
    machine_code.FIRST - machine_code.REGISTERS - INPUT
) // 2  # for an op with a list of inputs and one of outputs

MEDIUM_PLACES = 8
PAST_FROM = 4 << 10

KEPT = 256  # lists of steps; each takes about 50 us to make
KEPT_BYTES = 16 << 20  # bytes of all lists; with 64 ranks a list of 64 rounds has 0.9 MB

Key = tuple[object, ...]
Addresses = Sequence[int]
_memmove = ctypes.memmove


def _turns(medium: int) -> list[bytes]:
    """Return ENTRY_AT to MEDIUM by the message's number modulo ENTRIES; a place has ``medium`` bytes."""
    places = ((n % PLACES * SMALL_DATA, n % MEDIUM_PLACES * medium) for n in range(ENTRIES))
    return [struct.pack("<4q", n * ENTRY, n % 2 * AREA, *at) for n, at in enumerate(places)]


assert not (ENTRIES % 2 or ENTRIES % PLACES or ENTRIES % MEDIUM_PLACES)
# By the number of addresses.
_PACKED = [
    struct.Struct(f"<{ENTRY_WORDS + 1}q32s{n}q").pack_into for n in range(2 * MOST_RANKS + 1)
]


class Listed(Steps):
    """Steps of one rank, to be run by machine code."""

    __slots__ = ("_control", "_rank")

    def __init__(self, control: Control, rank: int) -> None:
        super().__init__()
        self._control, self._rank = control, rank

    def reduce(
        self, op: str, dtype: torch.dtype, target: Operand, sources: Sequence[Operand], count: int
    ) -> None:
        """Compute ``target`` = the reduction of ``sources``, in order, of ``count`` elements each."""
        assert op == "sum"
        self.sum(dtype, target, sources, count)

    def post(self, index: int, further: int) -> None:
        """Set this rank's word ``index`` to ``further`` more than the rounds before this op."""
        self.release(self._control.bases[self._rank] + 8 * index, (further, BEFORE))
        self.ring(self._control.asleep, 1 + self._rank)

    def wait_for(
        self, index: int, peers: Sequence[int], further: int, register: int = BEFORE
    ) -> None:
        """Wait until these peers have posted as much."""
        addresses = [self._control.bases[peer] + 8 * index for peer in peers]
        note = peers, index, register, further
        self.wait(addresses, (further, register), note, [1 + peer for peer in peers])

    def meet(self) -> None:
        """Send the message, wait for all others, and compare them with this rank's own."""
        control, rank = self._control, self._rank
        base = control.bases[rank]
        self.store((base + HEADERS, ENTRY_AT), NUMBER, ENTRY)
        self.stamp((base + HEADERS + 8 * BEGAN, ENTRY_AT))  # before others read that line of memory
        self.release(base + 8 * SEQUENCE, (0, NUMBER))
        self.ring(control.asleep, 1 + rank)
        self.wait_for(SEQUENCE, control.peers, 0, NUMBER)
        lengths, areas = ([*map(at, control.peers)] for at in (control.length, control.area))
        self.compare((control.length(rank), ENTRY_AT), lengths, (0, ENTRY_AT), 8)
        self.compare((control.area(rank), AT), areas, (0, AT), (0, LENGTH))

    def end(self) -> None:
        self.stamp((self._control.bases[self._rank] + HEADERS + 8 * ENDED, ENTRY_AT))


class AtOnce:
    """Steps of one rank, done at once in Python."""

    def __init__(self, group: HostGroup, copies: Sequence[Callable[..., object]]) -> None:
        self._group, self._copies = group, copies
        self.op = ""
        self.memory = bytearray(8 * (INPUT + 2 * group.world_size))
        self.registers = memoryview(self.memory).cast("q")

    def _at(self, operand: Operand) -> int:
        if isinstance(operand, int):
            return operand
        number, register = operand
        return number + int(self.registers[register])

    def copy(self, target: Operand, source: Operand, nbytes: int) -> None:
        _memmove(self._at(target), self._at(source), nbytes)

    def stream(self, target: Operand, source: Operand, nbytes: int, *, past: bool) -> None:
        self._copies[past](self._at(target), self._at(source), nbytes)

    def reduce(
        self, op: str, dtype: torch.dtype, target: Operand, sources: Sequence[Operand], count: int
    ) -> None:
        if count:
            parts = [_tensor(self._at(source), dtype, count) for source in sources]
            fold(op, parts, _tensor(self._at(target), dtype, count))

    def post(self, index: int, further: int) -> None:
        self._group.release(index, self.registers[BEFORE] + further)

    def wait_for(self, index: int, peers: Sequence[int], further: int) -> None:
        self._group.await_word(peers, index, self.registers[BEFORE] + further, self.op)


@functools.lru_cache(maxsize=512)
def _tensor(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return a tensor over an address. It keeps nothing alive. Made in 2 us, found in 0.2."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


Doing = Listed | AtOnce
Write = Callable[[Doing], object]


class HostSteps:
    """A rank's steps of one op at a time, under the group's lock. ``rounds`` counts rounds of all ops."""

    call: Call
    control: Control
    sequence: int
    _entry: tuple[int, ...]  # the message's entry without the times

    def __init__(self, group: HostGroup, machine_code: bool) -> None:
        self._group, self._rank = group, group.rank
        self.machine_code = machine_code
        self.rounds = 0
        self.sizes = Thresholds.of(own_caches(), group.world_size)
        self._turns = _turns(self.sizes.medium)
        self.all_alike: bool | None = None  # see :meth:`alike`
        if group.control is not None:
            group.control.own_view[HOW] = 2 * (1 + group.sequence) + machine_code
        copies = (Copier(past=False), Copier(past=True)) if machine_code else (_memmove, _memmove)
        self._at_once = AtOnce(group, copies)
        self._kept: dict[Key, Steps] = {}
        self._kept_bytes = 0

    def begin(
        self,
        call: Call,
        extent: int = 0,
        where: tuple[int, int] = (0, 0),
        key: Key | None = None,
        addresses: Addresses = (),
    ) -> bool | None:
        """Begin an op: write its message, and run the steps kept for ``key``, if any, like :meth:`meet`.

        Returns None if there are none; then the message was not sent.
        """
        self.call = call
        if op_ranges := current().op_ranges:
            op_ranges.begin("message")
        message = call.message
        self.control, self.sequence = control, sequence = self._group.begin(message)
        label = control.recorder.told(message)
        self._entry = sequence, len(message), extent, *where, 0, 0, label
        steps = self._kept.get(key)  # type: ignore[arg-type]  # there is none of None
        if steps is not None and call.equal_fits:
            return self._run(steps, addresses)
        control.recorder.begins(MESSAGES, sequence, len(message), extent, *where, label)
        return None

    def take_sizes(self, caches: Caches) -> None:
        """Use the sizes that follow from ``caches``, which are the same on all ranks."""
        self.sizes = Thresholds.of(caches, len(self.control.bases))
        self._turns = _turns(self.sizes.medium)

    def end(self) -> None:
        """Record the end of the op, unless the kept steps have done so."""
        self.control.recorder.ended(self.sequence)

    def alike(self) -> bool:
        """Return whether it is known, on every rank or on none, that all or none use machine code."""
        if self.all_alike is None and (control := self._group.control) is not None:
            words, last = [int(view[HOW]) for view in control.views], self._group.sequence
            if all(0 < word >> 1 <= last for word in words):  # stated before the last message
                self.all_alike = len({word & 1 for word in words}) == 1
        return self.all_alike is True

    def meet(
        self,
        key: Key | None = (),
        addresses: Addresses = (),
        before: Write | None = None,
        after: Write | None = None,
    ) -> bool:
        """Do ``before``, send the message, meet all ranks, do ``after``.

        Raises if the messages do not fit together. Returns False if they fit but are not equal. Then
        ``after`` is not done, because it would look for data where only an equal message has it.
        """
        if key is None or not self.machine_code or not self.call.equal_fits:
            steps = self.at_once(addresses)
            if before is not None:
                before(steps)
            alike = self._meet()
            if alike and after is not None:
                after(steps)
            return alike
        if key not in self._kept:
            listed = Listed(self.control, self._rank)
            if before is not None:
                before(listed)
            listed.meet()
            if after is not None:
                after(listed)
            if key:
                listed.end()
            self._keep(key, listed)
        return self._run(self._kept[key], addresses)

    def do(self, key: Key | None, addresses: Addresses, write: Write) -> None:
        if key is None or not self.machine_code:
            write(self.at_once(addresses))
            return
        steps = self._kept.get(key)
        if steps is None:
            steps = Listed(self.control, self._rank)
            write(steps)
            self._keep(key, steps)
        self._run(steps, addresses)

    def at_once(self, addresses: Addresses = ()) -> AtOnce:
        """Return the steps to do now, in Python."""
        steps = self._at_once
        steps.op = self.call.op
        self._fill(steps.memory, addresses)
        return steps

    def _fill(self, registers: bytearray | memoryview, addresses: Addresses) -> None:
        entry, turn = self._entry, self._turns[self.sequence % ENTRIES]
        _PACKED[len(addresses)](registers, 8 * NUMBER, *entry, self.rounds, turn, *addresses)

    def _meet(self) -> bool:
        """Send the message, wait for all others, and compare them."""
        call, control, sequence = self.call, self.control, self.sequence
        if self.machine_code and call.equal_fits:
            return self.meet()
        control.send(sequence)
        self._group.await_message(sequence, call.op)
        says, message = control.says, call.message
        if call.equal_fits and all(says(peer, sequence, message) for peer in control.peers):
            return True
        self._verify()
        return False

    def _verify(self) -> None:
        """Raise an error for the difference between the messages. Return if they fit together."""
        control, ranks = self.control, range(len(self.control.bases))
        self.call.verify([control.message(rank, self.sequence) for rank in ranks])

    def _run(self, steps: Steps, addresses: Addresses) -> bool:
        """Return whether the list ran to its end, not to a meeting whose messages differ."""
        self._fill(steps.memory, addresses)
        stopped = steps.run(0)
        while stopped >= 0:
            if steps.kinds[stopped] != machine_code.WAIT:
                self._verify()
                return False
            peers, index, register, further = steps.notes[stopped]
            value = steps.registers[register] + further
            self._group.await_word(peers, index, value, self.call.op)
            stopped = steps.run(stopped)
        if not self.sequence % LOOK:
            self.control.spread.look()
        return True

    def _keep(self, key: Key, steps: Steps) -> None:
        steps.complete(spin=self._group.spins, crowd=CROWD, asleep=self.control.own_asleep)
        if len(self._kept) >= KEPT or self._kept_bytes + steps.nbytes > KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[key] = steps
        self._kept_bytes += steps.nbytes


def at(operand: Operand, further: int) -> Operand:
    if isinstance(operand, int):
        return operand + further
    return operand[0] + further, operand[1]


def beside(doing: Doing, target: Operand, source: Operand, nbytes: int) -> None:
    """Put data beside a message; from PAST_FROM bytes on past the caches.

    Through the caches it took 0.9 to 1.9 times as long for 64 KiB with 2 ranks, but on a Xeon 0.6 times.
    Rejected: timing both ways op by op, which cost small ops 4 to 9 percent (November 2026).
    """
    if nbytes >= PAST_FROM:
        doing.stream(target, source, nbytes, past=True)
    else:
        doing.copy(target, source, nbytes)


@functools.cache
def sums(op: str, dtype: torch.dtype) -> bool:
    """Return whether machine code computes this: sums, and averages whose sum is not rounded before."""
    unrounded = op == "avg" and dtype in (torch.float32, torch.float64)
    return dtype in SUMS and (op == "sum" or unrounded)
