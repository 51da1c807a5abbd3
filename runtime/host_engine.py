"""The collectives of processes on one host: shared memory and torch operators, no kernels.

Every op begins with one message of each rank to all: the call, to be compared, and what is small enough
beside it. So a small op is one release and W - 1 acquires per rank, and nothing has to be waited for at
its end: see ``control.py`` why two areas, used in turn, are enough. What is larger goes through rings,
in rounds: ``host_rounds.py``. Messages between two ranks: ``host_mail.py``.

A rank's data is beside its message if its largest part fits there. Every rank says in its message how
large that is, and so knows of every other where its data is and how many rounds there will be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.call import Call
from interlace.runtime.control import SMALL_DATA, Control
from interlace.runtime.engine import Engine
from interlace.runtime.host_direct import Direct
from interlace.runtime.host_group import HostGroup
from interlace.runtime.host_mail import Mail
from interlace.runtime.host_rounds import Part, Rounds, Target
from interlace.runtime.reductions import fold
from interlace.runtime.stream import Event, Outcome

_memmove = ctypes.memmove


class _SmallParts:
    """Where the small data of every rank is, as tensors of one shape, for both areas."""

    __slots__ = ("own", "parts")

    def __init__(self, control: Control, rank: int, like: torch.Tensor, offset: int) -> None:
        self.own = [control.data(rank, half) for half in (0, 1)]
        self.parts = [
            [control.tensor(peer, half, offset, like) for peer in range(len(control.bases))]
            for half in (0, 1)
        ]


class HostEngine(Engine):
    """The engine of one rank of a :class:`HostGroup`. One op at a time; the group's lock sees to it."""

    def __init__(self, group: HostGroup) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._group = group
        self._stride = SMALL_DATA // group.world_size & ~63
        self._rounds = Rounds(group)
        self._direct = Direct(group)
        self._mail = Mail(group)

    # -- agreement -----------------------------------------------------------------------------

    def _met(self, call: Call, control: Control, sequence: int) -> None:
        """Send the message, wait for everyone's, and compare them."""
        control.send(sequence)
        self._group.await_message(sequence, call.op)
        message = call.message
        if call.match is None:
            for peer in control.peers:
                if not control.says(peer, sequence, message):
                    break
            else:
                return
        call.verify(self._messages(call, control, sequence))

    def _messages(self, call: Call, control: Control, sequence: int) -> list[bytes]:
        return [
            call.message if rank == self.rank else control.message(rank, sequence)
            for rank in range(self.world_size)
        ]

    def barrier(self, call: Call) -> Event | None:
        if self.world_size > 1:
            with self._group.collective_lock:
                self._met(call, *self._group.begin(call.message))
        return None

    def parts(self, call: Call) -> list[Any]:
        return call.compared(self._group.exchange(call.message, call.op))

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
            control, sequence = self._group.begin(call.message, nbytes, where)
            half = sequence & 1
            if nbytes <= SMALL_DATA:
                _memmove(control.data(rank, half), address, nbytes)
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
                if extent > SMALL_DATA:
                    large = large or [0] * self.world_size
                    large[peer] = extent
                elif target is not None:
                    _memmove(target[0], control.data(peer, half), target[1])
            if nbytes > SMALL_DATA:
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
        targets = [(base + rank * nbytes, nbytes) for rank in range(self.world_size)]
        self._share(call, input.data_ptr(), nbytes, targets, self._direct.find(input))
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
        targets: list[Target] = [None] * self.world_size
        where = self._direct.find(tensor)
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
        rank, stride = self.rank, self._stride
        own = targets[rank]
        if self.world_size == 1:
            if own is not None and own[0] != parts[0][0]:
                _memmove(own[0], *parts[0])
            return
        extent = max(nbytes for _, nbytes in parts) if parts else 0
        where = self._direct.find_adjacent(parts, targets) if extent > stride else (0, 0)
        with self._group.collective_lock:
            control, sequence = self._group.begin(call.message, extent, where)
            half = sequence & 1
            if 0 < extent <= stride:
                base = control.data(rank, half)
                for peer, (address, nbytes) in enumerate(parts):
                    if peer != rank:
                        _memmove(base + peer * stride, address, nbytes)
            self._met(call, control, sequence)
            if parts and own is not None and own[0] != parts[rank][0]:
                _memmove(own[0], *parts[rank])
            if where[0] and self._direct.everywhere(control, sequence, where[0]):
                self._direct.share(call.op, control, sequence, targets, rank)
                return
            large: list[int] | None = None
            for peer in control.peers:
                target = targets[peer]
                theirs = control.extent(peer, sequence)
                if theirs > stride:
                    large = large or [0] * self.world_size
                    large[peer] = theirs
                elif target is not None:
                    _memmove(target[0], control.data(peer, half) + rank * stride, target[1])
            if extent > stride:
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
        self._trade(
            call,
            [(source + rank * nbytes, nbytes) for rank in range(world_size)],
            [(target + rank * nbytes, nbytes) for rank in range(world_size)],
        )
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
        group, nbytes = self._group, tensor.nbytes
        with group.collective_lock:
            if nbytes > SMALL_DATA:
                where = self._direct.find(tensor) if root is None else (0, 0)
                control, sequence = group.begin(call.message, nbytes, where)
                self._met(call, control, sequence)
                if self._direct.everywhere(control, sequence, where[0]):
                    self._direct.reduce(call.op, control, sequence, tensor, op)
                else:
                    self._rounds.reduce(call.op, tensor, op, root)
                return
            control, sequence = group.begin(call.message, nbytes)
            small = call.prepared
            if small is None:
                small = call.prepared = _SmallParts(control, self.rank, tensor, 0)
            half = sequence & 1
            _memmove(small.own[half], tensor.data_ptr(), nbytes)
            self._met(call, control, sequence)
            if root is None or root == self.rank:
                fold(op, small.parts[half], tensor)

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
        rank, stride = self.rank, self._stride
        if self.world_size == 1:
            if output.data_ptr() != parts[0][0]:
                _memmove(output.data_ptr(), *parts[0])
            return
        extent = max(nbytes for _, nbytes in parts)
        with self._group.collective_lock:
            if extent > stride:
                where = self._direct.find_adjacent(
                    parts, [(output.data_ptr(), output.nbytes)], overwritten=parts[rank]
                )
                control, sequence = self._group.begin(call.message, extent, where)
                self._met(call, control, sequence)
                own, n = input.view(-1), output.numel()
                if own.numel() != n:
                    own = own.narrow(0, rank * n, n)
                if where[0] and self._direct.everywhere(control, sequence, where[0]):
                    self._direct.reduce_scatter(call.op, control, sequence, own, output, op)
                else:
                    self._rounds.reduce_scatter(call.op, parts, own, output, op)
                return
            control, sequence = self._group.begin(call.message, extent)
            small = call.prepared
            if small is None:
                small = call.prepared = _SmallParts(control, rank, output, rank * stride)
            half = sequence & 1
            base = small.own[half]
            for owner, (address, nbytes) in enumerate(parts):
                _memmove(base + owner * stride, address, nbytes)
            self._met(call, control, sequence)
            fold(op, small.parts[half], output)

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._mail.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._mail.recv(call, tensor, peer, tag)
