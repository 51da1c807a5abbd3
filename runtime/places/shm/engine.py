"""The collectives of processes on one host: shared memory and torch operators, no kernels.

Every op begins with one message of each rank to all: the call, to be compared, and what is small enough
beside it. So a small op is one release and W - 1 acquires per rank, and nothing has to be waited for at
its end: see ``one_host/control.py`` why two areas, used in turn, are enough. What is larger goes through
rings, in rounds: ``rounds.py``. Messages between two ranks: ``mail.py``.

A rank's data is beside its message if its largest part fits there. Every rank says in its message how
large that is, and so knows of every other where its data is and how many rounds there will be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.one_host.control import PLACES, SMALL_DATA, Control
from interlace.runtime.places.one_host.group import HostGroup
from interlace.runtime.places.one_host.words import ORDERED
from interlace.runtime.places.shm.direct import Direct, adjacent
from interlace.runtime.places.shm.machine_code.steps import available
from interlace.runtime.places.shm.mail import Mail
from interlace.runtime.places.shm.message_data import Places
from interlace.runtime.places.shm.message_steps import sums, verify
from interlace.runtime.places.shm.round_steps import RoundSteps, sums_in_rounds
from interlace.runtime.places.shm.rounds import (
    MEDIUM_DATA,
    MEDIUM_PLACES,
    SLOT_BYTES,
    Part,
    Rounds,
    Target,
)

_memmove = ctypes.memmove


class HostEngine(Engine):
    """The engine of one rank of a :class:`HostGroup`. One op at a time; the group's lock sees to it."""

    def __init__(self, group: HostGroup) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._strides = (
            SMALL_DATA // group.world_size & ~63,
            MEDIUM_DATA // group.world_size & ~63,
        )
        machine_code = group.world_size > 1 and ORDERED and available()
        self._rounds = Rounds(group, machine_code)
        self._direct = Direct(group, self._rounds)
        self._mail = Mail(group)
        self._steps = RoundSteps(group, self._rounds) if machine_code else None

    # -- agreement -----------------------------------------------------------------------------

    def _met(self, call: Call, control: Control, sequence: int) -> None:
        """Send the message, wait for everyone's, and compare them."""
        if self._steps is not None and call.equal_fits:
            self._steps.meet(call, control, sequence)
            return
        control.send(sequence)
        self._group.await_message(sequence, call.op)
        if call.equal_fits and all(
            control.says(peer, sequence, call.message) for peer in control.peers
        ):
            return
        verify(call, control, sequence, self.rank)

    def barrier(self, call: Call) -> Event | None:
        if self.world_size > 1:
            with self._group.collective_lock:
                self._met(call, *self._group.begin(call.message))
        return None

    def parts(self, call: Call) -> list[Any]:
        return call.compared(self._group.exchange(call.message, call.op))

    # -- data that goes with messages ----------------------------------------------------------

    def _data(self, control: Control, peer: int, sequence: int, nbytes: int) -> int:
        """The address of the data of ``peer``, of ``nbytes`` in all, that goes with a message."""
        holder = control if nbytes <= SMALL_DATA else self._rounds
        return holder.data(peer, sequence)

    def _stride(self, extent: int) -> int:
        """The distance of parts of which the largest has ``extent`` bytes; 0 if they need a ring."""
        small, medium = self._strides
        return small if extent <= small else medium * (extent <= medium and self._rounds.opened)

    def _places(self, control: Control, like: torch.Tensor, offset: int, nbytes: int) -> Places:
        """Tensors such as ``like`` at ``offset`` of data of ``nbytes`` in all."""
        model = torch.empty_like(like)
        if nbytes <= SMALL_DATA:
            at, count = control.tensor, PLACES
        else:
            at, count = self._rounds.tensor, MEDIUM_PLACES
        return Places(lambda rank, place: at(rank, place, offset, model), count, self.world_size)

    def _stepwise(self, call: Call, nbytes: int) -> RoundSteps | None:
        """The steps of an op whose data of ``nbytes`` goes with its message, if there are any."""
        if self._steps is None or not call.equal_fits:
            return None
        fits = nbytes <= SMALL_DATA or (nbytes <= MEDIUM_DATA and self._rounds.opened)
        return self._steps if fits else None

    def _meet(
        self, call: Call, extent: int, where: tuple[int, int] = (0, 0)
    ) -> tuple[Control, int]:
        """Write the message and meet; the message's number."""
        control, sequence = self._group.begin(call.message, extent, where)
        self._met(call, control, sequence)
        return control, sequence

    def _in_rounds(self, call: Call, nbytes: int, piece: int) -> RoundSteps | None:
        """The steps of an op through the rings, in pieces of ``piece``, if there are any."""
        if self._steps is None or not self._steps.takes(call, nbytes, piece):
            return None
        return self._steps

    # -- moving --------------------------------------------------------------------------------

    def _share(
        self,
        call: Call,
        address: int,
        nbytes: int,
        targets: Sequence[Target],
        where: tuple[int, int] = (0, 0),
    ) -> None:
        """Rank r's bytes at ``address`` to its target in ``targets``, where there are both.

        ``where``: of the caller's tensor in shared memory.
        """
        rank = self.rank
        own = targets[rank]
        if self.world_size == 1:
            if own is not None and own[0] != address:
                _memmove(own[0], address, nbytes)
            return
        with self._group.collective_lock:
            limit = MEDIUM_DATA if self._rounds.opened else SMALL_DATA
            control, sequence = self._group.begin(call.message, nbytes, where)
            if nbytes <= limit:
                self._rounds.stage(self._data(control, rank, sequence, nbytes), address, nbytes)
            self._met(call, control, sequence)
            if where[0] and self._direct.everywhere(control, sequence, where[0]):
                if own is not None and own[0] != address:
                    _memmove(own[0], address, nbytes)
                self._direct.share(call.op, control, sequence, targets, 0)
                return
            large: list[int] | None = None
            for peer in control.peers:
                target = targets[peer]
                extent = control.extent(peer, sequence)
                if extent > limit:
                    large = large or [0] * self.world_size
                    large[peer] = extent
                elif target is not None:
                    _memmove(target[0], self._data(control, peer, sequence, extent), target[1])
            if nbytes > limit:
                large = large or [0] * self.world_size
                large[rank] = nbytes
            elif own is not None and own[0] != address:
                _memmove(own[0], address, nbytes)
            if large is not None:
                self._rounds.share(call.op, address, nbytes, targets, large)

    def all_gather(
        self, call: Call, outputs: Sequence[torch.Tensor], input: torch.Tensor
    ) -> Event | None:
        targets = [(output.data_ptr(), output.nbytes) for output in outputs]
        where = self._direct.find(input)
        self._share(call, input.data_ptr(), input.nbytes, targets, where)
        return None

    def all_gather_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor
    ) -> Event | None:
        base, nbytes = output.data_ptr(), input.nbytes
        if self.world_size == 1:
            _memmove(base, input.data_ptr(), nbytes)
            return None
        where = self._direct.find(input)
        with self._group.collective_lock:
            steps = self._stepwise(call, nbytes)
            if steps is not None and not where[0]:
                control, sequence = self._group.begin(call.message, nbytes)
                steps.all_gather(call, control, sequence, base, input.data_ptr(), nbytes)
                return None
            steps = self._in_rounds(call, nbytes, SLOT_BYTES)
            if steps is not None and not where[0]:
                control, sequence = self._meet(call, nbytes)
                steps.share(call, control, sequence, base, input.data_ptr(), nbytes)
                return None
        targets = [(base + rank * nbytes, nbytes) for rank in range(self.world_size)]
        self._share(call, input.data_ptr(), nbytes, targets, where)
        return None

    def gather(
        self, call: Call, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, root: int
    ) -> Event | None:
        targets: list[Target] = [None] * self.world_size
        for rank, output in enumerate(outputs or ()):
            targets[rank] = output.data_ptr(), output.nbytes
        where = self._direct.find(input)
        self._share(call, input.data_ptr(), input.nbytes, targets, where)
        return None

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        where = self._direct.find(tensor)
        if self.world_size > 1 and not where[0]:
            with self._group.collective_lock:
                steps = self._stepwise(call, nbytes)
                if steps is not None:
                    extent = nbytes if root == self.rank else 0
                    control, sequence = self._group.begin(call.message, extent)
                    steps.broadcast(call, control, sequence, address, nbytes, root)
                    return None
                steps = self._in_rounds(call, nbytes, SLOT_BYTES)
                if steps is not None:
                    extent = nbytes if root == self.rank else 0
                    control, sequence = self._meet(call, extent)
                    steps.send_all(call, control, sequence, address, nbytes, root)
                    return None
        targets: list[Target] = [None] * self.world_size
        if root == self.rank:
            self._share(call, address, nbytes, targets, where)
        else:
            targets[root] = address, nbytes
            self._share(call, 0, 0, targets, where)
        return None

    def _trade(
        self,
        call: Call,
        parts: Sequence[Part],
        targets: Sequence[Target],
    ) -> None:
        """Rank r's part for this rank to ``targets[r]``, where there are both."""
        rank = self.rank
        own = targets[rank]
        if self.world_size == 1:
            if own is not None and own[0] != parts[0][0]:
                _memmove(own[0], *parts[0])
            return
        extent = max(nbytes for _, nbytes in parts) if parts else 0
        where = self._direct.find_adjacent(parts, targets)
        with self._group.collective_lock:
            stride = self._stride(extent)
            control, sequence = self._group.begin(call.message, extent, where)
            if parts and stride:
                base = self._data(control, rank, sequence, stride * self.world_size)
                for peer, (address, nbytes) in enumerate(parts):
                    if peer != rank:
                        self._rounds.stage(base + peer * stride, address, nbytes)
            self._met(call, control, sequence)
            if where[0] and self._direct.everywhere(control, sequence, where[0]):
                if own is not None and own[0] != parts[rank][0]:
                    _memmove(own[0], *parts[rank])
                self._direct.share(call.op, control, sequence, targets, rank)
                return
            self._receive(call, control, sequence, parts, targets, extent)

    def _receive(
        self,
        call: Call,
        control: Control,
        sequence: int,
        parts: Sequence[Part],
        targets: Sequence[Target],
        extent: int,
    ) -> None:
        """Trade once the ranks have met, each with what it said in its message."""
        rank = self.rank
        own = targets[rank]
        if parts and own is not None and own[0] != parts[rank][0]:
            _memmove(own[0], *parts[rank])
        large: list[int] | None = None
        for peer in control.peers:
            target = targets[peer]
            theirs = control.extent(peer, sequence)
            apart = self._stride(theirs)
            if not apart:
                large = large or [0] * self.world_size
                large[peer] = theirs
            elif target is not None:
                base = self._data(control, peer, sequence, apart * self.world_size)
                _memmove(target[0], base + rank * apart, target[1])
        if not self._stride(extent):
            large = large or [0] * self.world_size
            large[rank] = extent
        if large is not None:
            self._rounds.trade(call.op, parts, targets, large)

    def all_to_all(
        self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Event | None:
        self._trade(
            call,
            [(part.data_ptr(), part.nbytes) for part in inputs],
            [(output.data_ptr(), output.nbytes) for output in outputs],
        )
        return None

    def all_to_all_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor
    ) -> Event | None:
        world_size = self.world_size
        nbytes, source, target = input.nbytes // world_size, input.data_ptr(), output.data_ptr()
        if world_size == 1:
            _memmove(target, source, nbytes)
            return None
        parts = [(source + peer * nbytes, nbytes) for peer in range(world_size)]
        targets = [(target + peer * nbytes, nbytes) for peer in range(world_size)]
        with self._group.collective_lock:
            stride = self._stride(nbytes)
            where = self._direct.find_adjacent(parts, targets)
            steps = self._stepwise(call, stride * world_size) if stride else None
            if steps is not None and not where[0]:
                control, sequence = self._group.begin(call.message, nbytes)
                if not steps.all_to_all(call, control, sequence, target, source, nbytes, stride):
                    self._receive(call, control, sequence, parts, targets, nbytes)
                return None
            steps = None if stride else self._in_rounds(call, nbytes, self._rounds.section)
            if steps is not None and not where[0]:
                control, sequence = self._meet(call, nbytes)
                if all(control.extent(peer, sequence) == nbytes for peer in control.peers):
                    steps.trade(call, control, sequence, target, source, nbytes)
                else:
                    self._receive(call, control, sequence, parts, targets, nbytes)
                return None
        self._trade(call, parts, targets)
        return None

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
    ) -> Event | None:
        targets: list[Target] = [None] * self.world_size
        targets[root] = output.data_ptr(), output.nbytes
        self._trade(call, [(part.data_ptr(), part.nbytes) for part in inputs or ()], targets)
        return None

    # -- reducing ------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> Event | None:
        self._reduce(call, tensor, op, None)
        return None

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> Event | None:
        self._reduce(call, tensor, op, root)
        return None

    def _reduce(self, call: Call, tensor: torch.Tensor, op: str, root: int | None) -> None:
        """``tensor`` = the reduction, on ``root`` only unless that is None."""
        if self.world_size == 1:
            return
        group, nbytes, rounds = self._group, tensor.nbytes, self._rounds
        with group.collective_lock:
            # reducing everything everywhere is worth it for few ranks only
            limit = MEDIUM_DATA if rounds.opened and self.world_size <= 4 else SMALL_DATA
            if nbytes > limit:
                self._reduce_large(call, tensor, op, root)
                return
            control, sequence = group.begin(call.message, nbytes)
            steps = self._stepwise(call, nbytes)
            if steps is not None and root in (None, self.rank) and sums(op, tensor.dtype):
                steps.all_reduce(call, control, sequence, tensor, op == "avg")
                return
            places = call.prepared
            if places is None:
                places = call.prepared = self._places(control, tensor, 0, nbytes)
            own = self._data(control, self.rank, sequence, nbytes)
            self._rounds.stage(own, tensor.data_ptr(), nbytes)
            self._met(call, control, sequence)
            if root is None or root == self.rank:
                fold(op, places.of(sequence), tensor)

    def _reduce_large(self, call: Call, tensor: torch.Tensor, op: str, root: int | None) -> None:
        rounds = self._rounds
        where = self._direct.find(tensor) if root is None else (0, 0)
        control, sequence = self._group.begin(call.message, tensor.nbytes, where)
        if rounds.opened and not where[0]:
            part = tensor.nbytes // self.world_size
            if root is None and sums_in_rounds(tensor.dtype, op):
                steps = self._in_rounds(call, part, rounds.section)
                if steps is not None:
                    steps.reduce(call, control, sequence, tensor)
                    return

            def meet() -> list[int]:
                self._met(call, control, sequence)
                return [peer for peer in control.peers if control.where(peer, sequence)[0]]

            rounds.reduce(call.op, tensor, op, root, meet)
            return
        self._met(call, control, sequence)
        if self._direct.everywhere(control, sequence, where[0]):
            self._direct.reduce(call.op, control, sequence, tensor, op)
        else:
            rounds.reduce(call.op, tensor, op, root)

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str
    ) -> Event | None:
        parts = [(part.data_ptr(), part.nbytes) for part in inputs]
        self._reduce_scatter(call, output, parts, inputs[self.rank], op)
        return None

    def reduce_scatter_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor, op: str
    ) -> Event | None:
        base, nbytes = input.data_ptr(), output.nbytes
        if self.world_size == 1:
            _memmove(output.data_ptr(), base, nbytes)
            return None
        parts = [(base + rank * nbytes, nbytes) for rank in range(self.world_size)]
        self._reduce_scatter(call, output, parts, input, op)
        return None

    def _reduce_scatter(
        self,
        call: Call,
        output: torch.Tensor,
        parts: Sequence[Part],
        input: torch.Tensor,
        op: str,
    ) -> None:
        """``output`` = the reduction of everyone's part for this rank.

        ``input`` is this rank's own part, or all parts one behind the other.
        """
        rank = self.rank
        if self.world_size == 1:
            if output.data_ptr() != parts[0][0]:
                _memmove(output.data_ptr(), *parts[0])
            return
        extent = max(nbytes for _, nbytes in parts)
        with self._group.collective_lock:
            stride = self._stride(extent)
            if not stride:
                where = self._direct.find_adjacent(
                    parts, [(output.data_ptr(), output.nbytes)], overwritten=parts[rank]
                )
                control, sequence = self._meet(call, extent, where)
                own, n = input.view(-1), output.numel()
                if own.numel() != n:
                    own = own.narrow(0, rank * n, n)
                if where[0] and self._direct.everywhere(control, sequence, where[0]):
                    self._direct.reduce_scatter(call.op, control, sequence, own, output, op)
                    return
                steps = self._in_rounds(call, extent, self._rounds.section)
                if steps is not None and sums_in_rounds(output.dtype, op) and adjacent(parts):
                    steps.scatter_sums(call, control, sequence, output, parts[0][0])
                else:
                    self._rounds.reduce_scatter(call.op, parts, own, output, op)
                return
            control, sequence = self._group.begin(call.message, extent)
            nbytes = stride * self.world_size
            steps = self._stepwise(call, nbytes)
            if steps is not None and sums(op, output.dtype) and adjacent(parts):
                steps.reduce_scatter(
                    call, control, sequence, output, parts[0][0], stride, op == "avg"
                )
                return
            places = call.prepared
            if places is None:
                places = call.prepared = self._places(control, output, rank * stride, nbytes)
            base = self._data(control, rank, sequence, nbytes)
            for owner, (address, size) in enumerate(parts):
                self._rounds.stage(base + owner * stride, address, size)
            self._met(call, control, sequence)
            fold(op, places.of(sequence), output)

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._mail.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._mail.recv(call, tensor, peer, tag)
