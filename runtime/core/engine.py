"""Engines, which move and reduce the tensors of one group: the interface under the plain collectives.

An engine gets a collective after its arguments have been checked on this rank. It gets only dense tensors:
contiguous, detached, on the group's device, of a dtype for which the op is defined. It compares the
calls of all ranks before any byte of a caller's tensor changes, and then does the work.

An engine has three primitives. ``exchange``: ranks give tensors, other ranks take them. ``reduce``: ranks
give tensors and take the reduction over ranks. ``agree``: ranks compare calls, and no tensor moves. Every
collective is a layout of the tensors that this rank gives and takes, and :class:`Sides`, which describe the
other ranks. From these an engine chooses a method: inside the message, in one copy, in rings, by a kernel,
in pieces. Several hosts have other methods, because bytes cross between hosts only once.

=====================  ============  ==============
sides                  exchange      reduce
=====================  ============  ==============
all to all, alike      all_gather    all_reduce
all to all             all_to_all    reduce_scatter
all to a root, alike   gather        reduce
a root to all, alike   broadcast
a root to all          scatter
=====================  ============  ==============
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.stream import Event, Outcome

Tensors = Sequence[torch.Tensor]
Parts = torch.Tensor | Tensors
"""Tensors by rank, or one tensor of equal parts, one after another, as many on all ranks."""
ENGINES: dict[str, Callable[..., "Engine"]] = {}
"""Makes the engine of a communicator; "streams" is for ranks that work on streams."""
ALL = -1  # ranks


class Sides(NamedTuple):
    """The givers and takers: a rank, or ``ALL``. ``alike``: a rank gives the same tensor to all takers."""

    giver: int
    taker: int
    alike: bool


TO_ALL, TO_EACH = Sides(ALL, ALL, True), Sides(ALL, ALL, False)
sides_of = functools.cache(Sides)


class Engine(ABC):
    """The collectives of one rank of one group. Ranks are ranks of the group.

    Every method is collective (``send`` and ``recv`` are between two ranks), and starts by comparing
    ``call`` with the other ranks'. It returns the event at which the op's outputs are complete, or None if
    they are complete when it returns. Tensors at the same address as the input are not copied. Reductions
    use ``interlace.runtime.numerics.reductions.fold``, in rank order, so all ranks get the same bits.
    """

    rank: int
    world_size: int

    @abstractmethod
    def barrier(self, call: Call) -> Event | None:
        """Return, or complete the event, once every rank has called it."""

    @abstractmethod
    def agree(self, call: Call) -> list[Any]:
        """Return every rank's ``call.part``, by rank; nothing else moves."""

    @abstractmethod
    def exchange(self, call: Call, gives: Parts, takes: Parts, sides: Sides) -> Event | None:
        """Give tensors to other ranks, and take tensors from them.

        ``gives`` has a tensor for each rank, one alone if ``alike``, and is () if a rank gives nothing.
        ``takes`` has a tensor from each rank, or one alone from the only giver, and is () if it takes
        nothing. Lengths may differ between ranks, except in a broadcast.
        """

    @abstractmethod
    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, sides: Sides
    ) -> Event | None:
        """Set ``take`` to the reduction of the tensors that all ranks give to this one.

        ``gives`` as in :meth:`exchange`; if ``alike``, ``take`` is the tensor that a taker gives.
        """

    def all_gather(self, call: Call, outputs: Parts, input: torch.Tensor) -> Event | None:
        """Set ``outputs[r]`` to rank r's ``input``."""
        return self.exchange(call, (input,), outputs, TO_ALL)

    def all_to_all(self, call: Call, outputs: Parts, inputs: Parts) -> Event | None:
        """Set ``outputs[r]`` to rank r's ``inputs[this rank]``."""
        return self.exchange(call, inputs, outputs, TO_EACH)

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        """Set ``tensor`` to rank ``root``'s ``tensor``."""
        sides = sides_of(root, ALL, True)
        if self.rank == root:
            return self.exchange(call, (tensor,), (), sides)
        return self.exchange(call, (), (tensor,), sides)

    def gather(
        self, call: Call, outputs: Tensors | None, input: torch.Tensor, root: int
    ) -> Event | None:
        """On ``root``, set ``outputs[r]`` to rank r's ``input``. Elsewhere ``outputs`` is None."""
        return self.exchange(call, (input,), outputs or (), sides_of(ALL, root, True))

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors | None, root: int
    ) -> Event | None:
        """Set ``output`` to ``root``'s ``inputs[this rank]``. Elsewhere ``inputs`` is None."""
        return self.exchange(call, inputs or (), (output,), sides_of(root, ALL, False))

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> Event | None:
        """Set ``tensor`` to the reduction over ranks; every rank gets the same bits."""
        return self.reduce(call, (tensor,), tensor, op, TO_ALL)

    def reduce_to(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> Event | None:
        """On ``root``, set ``tensor`` to the reduction over ranks. Elsewhere it stays as it is."""
        take = tensor if self.rank == root else None
        return self.reduce(call, (tensor,), take, op, sides_of(ALL, root, True))

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Parts, op: str
    ) -> Event | None:
        """Set ``output`` to the reduction of all ranks' ``inputs[this rank]``."""
        return self.reduce(call, inputs, output, op, TO_EACH)

    def cut(self, parts: Parts) -> Tensors:
        if isinstance(parts, torch.Tensor):
            return parts.view(self.world_size, parts.numel() // self.world_size).unbind(0)
        return parts

    @abstractmethod
    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Begin to send to ``peer``; never blocks. ``tensor`` may be reused when the future is done.

        Messages of one tag from one rank to another are received in the order they were sent.
        """

    @abstractmethod
    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Begin to receive from ``peer``, or from the first sender if None; never block.

        The future fails with ValueError or TypeError if the message differs in length or dtype.
        """
