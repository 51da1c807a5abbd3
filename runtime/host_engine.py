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
from interlace.runtime.host_rounds import Rounds
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
        input: torch.Tensor | None,
        outputs: Sequence[torch.Tensor | None],
        here: torch.Tensor | None,
    ) -> None:
        """``outputs[r]`` = rank r's ``input``, where neither is None.

        ``here`` is a tensor that may lie in shared memory: the input, or what receives it.
        """
        nbytes = 0 if input is None else input.nbytes
        address = 0 if input is None else input.data_ptr()
        rank = self.rank
        where = self._direct.find(here) if here is not None and here.nbytes > SMALL_DATA else (0, 0)
        with self._group.collective_lock:
            control, sequence = self._group.begin(call.message, nbytes, where)
            half = sequence & 1
            if nbytes <= SMALL_DATA:
                _memmove(control.data(rank, half), address, nbytes)
            self._met(call, control, sequence)
            if self._direct.everywhere(control, sequence, where[0]):
                own = outputs[rank]
                if own is not None and own.data_ptr() != address:
                    _memmove(own.data_ptr(), address, nbytes)
                self._direct.share(call.op, control, sequence, outputs, 0)
                return
            large = [0] * self.world_size
            for peer, output in enumerate(outputs):
                if peer == rank:
                    continue
                extent = control.extent(peer, sequence)
                if extent > SMALL_DATA:
                    large[peer] = extent
                elif output is not None:
                    _memmove(output.data_ptr(), control.data(peer, half), output.nbytes)
            own = outputs[rank]
            target = address if own is None else own.data_ptr()
            if nbytes > SMALL_DATA:
                large[rank] = nbytes
            elif target != address:
                _memmove(target, address, nbytes)
            if any(large):
                targets = [None if o is None else (o.data_ptr(), o.nbytes) for o in outputs]
                targets[rank] = (target, nbytes)
                self._rounds.share(call.op, address, nbytes, targets, large)

    def all_gather(
        self, call: Call, outputs: Sequence[torch.Tensor], input: torch.Tensor
    ) -> Event | None:
        self._share(call, input, outputs, input)
        return None

    def gather(
        self, call: Call, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, root: int
    ) -> Event | None:
        self._share(call, input, outputs or [None] * self.world_size, input)
        return None

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        outputs: list[torch.Tensor | None] = [None] * self.world_size
        outputs[root] = tensor
        self._share(call, tensor if root == self.rank else None, outputs, tensor)
        return None

    def _trade(
        self,
        call: Call,
        inputs: Sequence[torch.Tensor] | None,
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """``outputs[r]`` = rank r's ``inputs[own rank]``, where neither is None."""
        parts = [] if inputs is None else [(part.data_ptr(), part.nbytes) for part in inputs]
        extent = max((nbytes for _, nbytes in parts), default=0)
        rank, stride = self.rank, self._stride
        where = (0, 0)
        if inputs is not None and extent > stride:
            where = self._direct.find_adjacent(inputs, outputs)
        with self._group.collective_lock:
            control, sequence = self._group.begin(call.message, extent, where)
            half = sequence & 1
            if extent <= stride:
                base = control.data(rank, half)
                for peer, (address, nbytes) in enumerate(parts):
                    if peer != rank:
                        _memmove(base + peer * stride, address, nbytes)
            self._met(call, control, sequence)
            direct = self._direct.everywhere(control, sequence, where[0])
            large = [0] * self.world_size
            if extent > stride:
                large[rank] = extent
            for peer, output in enumerate(outputs):
                if peer == rank:
                    continue
                theirs = control.extent(peer, sequence)
                if direct:
                    continue
                if theirs > stride:
                    large[peer] = theirs
                elif output is not None:
                    source = control.data(peer, half) + rank * stride
                    _memmove(output.data_ptr(), source, output.nbytes)
            own = outputs[rank]
            if parts and own is not None and own.data_ptr() != parts[rank][0]:
                _memmove(own.data_ptr(), parts[rank][0], own.nbytes)
            if direct:
                self._direct.share(call.op, control, sequence, outputs, rank)
            elif any(large):
                targets = [None if o is None else (o.data_ptr(), o.nbytes) for o in outputs]
                self._rounds.trade(call.op, parts, targets, large)

    def all_to_all(
        self, call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Event | None:
        self._trade(call, inputs, outputs)
        return None

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int
    ) -> Event | None:
        outputs: list[torch.Tensor | None] = [None] * self.world_size
        outputs[root] = output
        self._trade(call, inputs, outputs)
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
        rank, stride = self.rank, self._stride
        if self.world_size == 1:
            if output.data_ptr() != inputs[0].data_ptr():
                output.copy_(inputs[0].view(output.shape))
            return None
        with self._group.collective_lock:
            extent = max(part.nbytes for part in inputs)
            if extent > stride:
                where = self._direct.find_adjacent(inputs, (output,))
                control, sequence = self._group.begin(call.message, extent, where)
                self._met(call, control, sequence)
                if self._direct.everywhere(control, sequence, where[0]):
                    own = inputs[rank]
                    self._direct.reduce_scatter(call.op, control, sequence, own, output, op)
                else:
                    self._rounds.reduce_scatter(call.op, inputs, output, op)
                return None
            control, sequence = self._group.begin(call.message, extent)
            small = call.prepared
            if small is None:
                small = call.prepared = _SmallParts(control, rank, output, rank * stride)
            half = sequence & 1
            base = small.own[half]
            for owner, part in enumerate(inputs):
                _memmove(base + owner * stride, part.data_ptr(), part.nbytes)
            self._met(call, control, sequence)
            fold(op, small.parts[half], output)
        return None

    # -- between two ranks ---------------------------------------------------------------------

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._mail.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._mail.recv(call, tensor, peer, tag)
