"""The collectives of processes on one host: shared memory and torch operators, no kernels.

Every op begins with one message from each rank to all others: the call, to be compared, and any data that
is small enough to go with it. So a small op is one release and W - 1 acquires per rank, and its end needs
no wait: ``processes/control.py`` explains why two areas, used in turn, are enough. Larger data goes through
rings, in rounds: ``rounds.py``. Messages between two ranks: ``mail.py``.

A rank's data goes with its message if its largest part fits. Every rank states in its message how large
that part is. So every rank knows where the data of each other rank is and how many rounds there will be.
"""

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import ALL, Engine, Parts, Sides
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics.reductions import divide
from interlace.runtime.places.shm.boxes import Boxes
from interlace.runtime.places.shm.machine_code import SUMS, Operand, available
from interlace.runtime.places.shm.mail import Mail
from interlace.runtime.places.shm.message_steps import (
    INPUT,
    MEDIUM,
    MOST_RANKS,
    SMALL,
    Addresses,
    Doing,
    HostSteps,
    Key,
    at,
    beside,
    sums,
)
from interlace.runtime.places.shm.rounds import Direct, RingPart, RingTarget, Rounds
from interlace.runtime.processes.control import SMALL_DATA
from interlace.runtime.processes.group import HostGroup

PartsAndTargets = tuple[Sequence[RingPart], Sequence[RingTarget]]

_memmove = ctypes.memmove


class HostEngine(Engine):
    """One rank's engine. An op that may come again has a key, which determines all but its addresses."""

    def __init__(self, group: HostGroup) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._steps = HostSteps(group, group.world_size > 1 and available())
        self._rounds = Rounds(group, self._steps)
        self._direct = Direct(group, self._steps)
        self.mail = Mail(group, lambda: Boxes(group))

    def barrier(self, call: Call) -> None:
        if self.world_size > 1:
            with self._group.collective_lock:
                key = ("barrier",)
                if not self._steps.begin(call, key=key):
                    self._steps.meet(key)
                    self._steps.end()

    def agree(self, call: Call) -> list[Any]:
        return call.compared(self._group.exchange(call.message, call.op))

    def _data(self, peer: int, nbytes: int) -> Operand:
        """Return where ``peer``'s data, of ``nbytes`` in all, is, if it goes with the message."""
        if nbytes <= SMALL_DATA:
            return self._steps.control.data(peer), SMALL
        return self._rounds.data(peer), MEDIUM

    def _stride(self, extent: int) -> int:
        """Return the distance of parts whose largest has ``extent`` bytes; 0 if they need a ring."""
        small = SMALL_DATA // self.world_size & ~63
        if extent <= small:
            return small
        medium = self._steps.sizes.medium // self.world_size & ~63
        return medium * (extent <= medium and self._rounds.opened)

    def _part(self, peer: int, number: int, stride: int) -> Operand:
        return at(self._data(peer, stride * self.world_size), number * stride)

    def _parts(self, register: int, tensors: Parts) -> list[RingPart]:
        """Return the parts; their addresses, or the one of all, are in registers from ``register`` on."""
        if isinstance(tensors, torch.Tensor):
            nbytes = tensors.nbytes // self.world_size
            return [((rank * nbytes, register), nbytes) for rank in range(self.world_size)]
        return [((0, number), tensor.nbytes) for number, tensor in enumerate(tensors, register)]

    def _key(self, sizes: list[int], known: bool, *key: Any) -> Key | None:
        """Return ``key`` if its last items are the bytes of each part and the sizes of other ranks are
        ``known`` to be equal to this rank's. Otherwise only equal calls may say that sizes differ.
        """
        known = known and self.world_size <= MOST_RANKS
        return key if known and sizes.count(key[-1]) == len(sizes) else None

    def exchange(self, call: Call, gives: Parts, takes: Parts, sides: Sides) -> None:
        giver, _, alike = sides
        key: Key | None
        if alike and giver != ALL:  # all lengths are equal
            whole: Any = (gives or takes)[0]
            nbytes, addresses, in_place = whole.nbytes, [whole.data_ptr()], False
            extent, key = nbytes if gives else 0, (sides, nbytes)
        elif isinstance(takes, torch.Tensor):
            whole = gives[0] if alike else gives
            extent = nbytes = takes.nbytes // self.world_size
            addresses = [whole.data_ptr(), takes.data_ptr()]
            in_place = alike and addresses[0] == addresses[1] + self.rank * nbytes
            key = sides, in_place, nbytes
        else:
            tensors = [*gives, *takes]
            addresses = [tensor.data_ptr() for tensor in tensors]
            sizes = [tensor.nbytes for tensor in tensors]
            whole, extent = tensors[0], sizes[0]
            nbytes, in_place = extent, False
            if alike:
                known = len(takes) > 0
                in_place = known and addresses[1 + self.rank] == addresses[0]
            else:
                known = giver != ALL and len(gives) > 0
                extent = max(sizes[: len(gives)], default=0)
            key = self._key(sizes, known or call.match is not None, "list", sides, in_place, nbytes)
        if self.world_size == 1:  # there are no other ranks to meet
            if len(addresses) > 1:
                _memmove(addresses[1], addresses[0], extent)
            return
        with self._group.collective_lock:
            where = 0, 0
            if self._group.shared_ranges:
                if alike:
                    where = self._direct.find(whole)
                else:
                    where = self._where(*self._laid_out(gives, takes, giver, in_place), addresses)
            same = self._steps.begin(call, extent, where, None if where[0] else key, addresses)
            if not same:
                laid_out = self._laid_out(gives, takes, giver, in_place)
                self._move_anew(same, key, addresses, extent, laid_out, where[0], nbytes, not alike)
                self._steps.end()

    def _move_anew(
        self, alike: bool | None, key: Key | None, addresses: Addresses, extent: int,
        laid_out: PartsAndTargets, direct: int, longest: int, apart: bool,
    ) -> None:  # fmt: skip
        """Do the rest of :meth:`exchange` if no steps were kept, or the messages were not ``alike``.

        This rank's parts have at most ``extent`` bytes, any rank's ``longest`` if there is a key.
        ``apart``: a rank has one part for each rank, not one for all.
        """
        rank, steps, rounds, (parts, targets) = self.rank, self._steps, self._rounds, laid_out
        part = parts[rank if apart else 0] if parts else None
        limit = steps.sizes.medium if rounds.opened else SMALL_DATA

        def beside_message(peer: int, number: int, longest: int) -> Operand | None:
            """Return where part ``number`` of ``peer`` is, if its parts need no ring."""
            if apart:
                stride = self._stride(longest)
                return self._part(peer, number, stride) if stride else None
            return self._data(peer, longest) if longest <= limit else None

        def stage(doing: Doing) -> None:
            for number, (address, nbytes) in enumerate(parts):
                to = beside_message(rank, number, extent)
                if to is not None and not (apart and number == rank):
                    beside(doing, to, address, nbytes)

        def collect(doing: Doing, extents: Sequence[int]) -> list[int]:
            """Return the extents of parts that need a ring, and 0 for parts that came with the message."""
            large = list(extents)
            for peer, target in enumerate(targets):
                source = beside_message(peer, rank, extents[peer])
                if source is not None:
                    large[peer] = 0
                    if target is not None:
                        if peer == rank and part is not None:
                            source = part[0]
                        doing.copy(target[0], source, target[1])
            return large

        together = key is not None and not direct and beside_message(rank, 0, longest) is not None
        if alike is None and together:
            extents = [longest] * self.world_size
            alike = steps.meet(key, addresses, stage, lambda doing: collect(doing, extents))
        elif alike is None:
            alike = steps.meet(None, addresses, stage)
        if alike and together:
            return
        if direct and self._direct.everywhere(direct):
            found = _spans(targets, addresses)
            if found[rank] is not None:
                ((start, nbytes),) = _spans([part], addresses)
                _memmove(found[rank][0], start, nbytes)
            self._direct.share(found, rank if apart else 0)
            return
        extents = [steps.control.extent(peer, steps.sequence) for peer in range(self.world_size)]
        large = collect(steps.at_once(addresses), extents)
        if any(large):
            rounds.open()
            kept = key if alike else None
            rounds.move(kept, addresses, parts, targets, large, apart=apart)

    def _laid_out(self, gives: Parts, takes: Parts, giver: int, in_place: bool) -> PartsAndTargets:
        """Return parts and targets. Registers have the addresses: first those given, then those taken."""
        parts = self._parts(INPUT, gives)
        first = 1 if isinstance(gives, torch.Tensor) else len(parts)
        targets: list[RingTarget] = [*self._parts(INPUT + first, takes)]
        if giver != ALL or not targets:
            alone, targets = targets, [None] * self.world_size
            if alone:
                targets[giver] = alone[0]
        if in_place:
            targets[self.rank] = None
        return parts, targets

    def _where(
        self,
        parts: Sequence[RingPart],
        targets: Sequence[RingTarget],
        addresses: Addresses,
        overwritten: RingTarget = None,
    ) -> tuple[int, int]:
        """Return where all parts are in shared memory; range 0 if not, or if overwritten too early."""
        found, (over,) = _spans(parts, addresses), _spans([overwritten], addresses)
        return self._direct.find_adjacent(found, _spans(targets, addresses), over)

    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, sides: Sides
    ) -> None:
        _, taker, alike = sides
        if not alike:
            assert take is not None
            self._reduce_scatter(call, gives, take, op)
            return
        if self.world_size == 1:
            return
        tensor, root = gives[0], None if taker == ALL else taker
        nbytes, dtype, steps = tensor.nbytes, tensor.dtype, self._steps
        with self._group.collective_lock:
            if nbytes > SMALL_DATA and nbytes > self._reduced_everywhere():
                self._reduce_large(call, tensor, op, root)
                steps.end()
                return
            here, key = take is not None, None
            by_sum = sums(op, dtype) and (root is not None or steps.all_alike or steps.alike())
            if by_sum:
                key = "reduce", nbytes, dtype, here
            same = steps.begin(call, nbytes, (0, 0), key, (tensor.data_ptr(),))
            if not same:
                self._reduce_anew(same, key, tensor, op, here)
                steps.end()
            if by_sum and op == "avg" and here:
                divide(tensor, self.world_size)

    def _reduced_everywhere(self) -> int:
        """Return the most bytes that every rank reads from all others to reduce them in its own cache."""
        sizes = self._steps.sizes
        return min(sizes.medium, sizes.reduced // self.world_size) * self._rounds.opened

    def _reduce_anew(
        self, alike: bool | None, key: Key | None, tensor: torch.Tensor, op: str, here: bool
    ) -> None:
        """Do the rest of :meth:`reduce`, like :meth:`_move_anew`. ``here``: this rank needs the result."""
        nbytes, reduction = tensor.nbytes, op if key is None else "sum"

        def stage(doing: Doing) -> None:
            beside(doing, self._data(self.rank, nbytes), (0, INPUT), nbytes)

        def reduce(doing: Doing) -> None:
            if here:
                sources = [self._data(peer, nbytes) for peer in range(self.world_size)]
                doing.reduce(reduction, tensor.dtype, (0, INPUT), sources, tensor.numel())

        addresses = (tensor.data_ptr(),)
        if alike is None:
            alike = self._steps.meet(key, addresses, stage, reduce)
        if not alike:  # the calls fit together all the same, and the data is where it always is
            reduce(self._steps.at_once(addresses))

    def _reduce_large(self, call: Call, tensor: torch.Tensor, op: str, root: int | None) -> None:
        steps, rounds = self._steps, self._rounds
        # With two ranks, each reads as much as if each summed a half, and does not wait for the other half.
        whole = self.world_size == 2 and root is None and op == "sum" and tensor.dtype in SUMS
        whole = whole and steps.alike()  # known before this op; otherwise ranks may not agree
        where = self._direct.find(tensor) if root is None else (0, 0)
        steps.begin(call, tensor.nbytes, where)
        meets = rounds.opened and not where[0]
        if not meets:
            steps.meet()
            if self._direct.everywhere(where[0]):
                self._direct.reduce(op, tensor)
                return
            rounds.open()
        if whole and tensor.nbytes < steps.sizes.in_place:  # larger halves go past the caches
            rounds.sum_everywhere(tensor, meets=meets)
        else:
            rounds.reduce(tensor, op, root, meets=meets)

    def _reduce_scatter(self, call: Call, gives: Parts, output: torch.Tensor, op: str) -> None:
        key: Key | None
        if isinstance(gives, torch.Tensor):
            extent, addresses = output.nbytes, [gives.data_ptr(), output.data_ptr()]
            key = "reduce_scatter", extent
        else:
            sizes = [give.nbytes for give in gives]
            extent, addresses = max(sizes), [each.data_ptr() for each in (*gives, output)]
            key = self._key(sizes, True, "reduce_scatter list", extent)
        parts = functools.partial(self._parts, INPUT, gives)
        rank, world_size, steps, rounds = self.rank, self.world_size, self._steps, self._rounds
        dtype = output.dtype
        if world_size == 1:
            _memmove(addresses[1], addresses[0], extent)
            return
        by_sum, to = sums(op, dtype), (0, INPUT + len(addresses) - 1)
        key = (*key, dtype) if by_sum and key is not None else None
        with self._group.collective_lock:
            stride = self._stride(extent)
            if not stride:
                where = 0, 0
                if self._group.shared_ranges:
                    target = to, output.nbytes
                    where = self._where(parts(), [target], addresses, overwritten=parts()[rank])
                steps.begin(call, extent, where)
                steps.meet()
                if where[0] and self._direct.everywhere(where[0]):
                    stretch = _spans(parts(), addresses)[rank]
                    self._direct.reduce_scatter(op, stretch, addresses[-1], dtype)
                else:
                    rounds.open()
                    key = key if op == "sum" else None
                    rounds.reduce_scatter(key, addresses, parts(), to, dtype, op)
                steps.end()
                return
            alike = steps.begin(call, extent, (0, 0), key, addresses)

            def stage(doing: Doing) -> None:
                for owner, (address, nbytes) in enumerate(parts()):
                    beside(doing, self._part(rank, owner, stride), address, nbytes)

            def reduce(doing: Doing) -> None:
                sources = [self._part(peer, rank, stride) for peer in range(world_size)]
                reduction = "sum" if by_sum else op
                doing.reduce(reduction, dtype, to, sources, output.numel())

            if alike is None:
                alike = steps.meet(key, addresses, stage, reduce)
                if alike:
                    steps.end()
            if not alike:  # the calls fit together all the same, and the data is where it always is
                reduce(steps.at_once(addresses))
                steps.end()
            if by_sum and op == "avg":
                divide(output, world_size)

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self.mail.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self.mail.recv(call, tensor, peer, tag)


def _spans(targets: Sequence[RingTarget], addresses: Addresses) -> list[Any]:
    found: list[Any] = []
    for target in targets:
        if target is None or isinstance(target[0], int):
            found.append(target)
        else:
            number, register = target[0]
            found.append((number + addresses[register - INPUT], target[1]))
    return found
