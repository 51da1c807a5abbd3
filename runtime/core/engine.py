"""Engines, which move and reduce the tensors of one group: the interface under the plain collectives.

An engine sees a collective when its arguments have been checked on this rank, and only dense tensors:
contiguous, detached, on the group's device, of a dtype for which the op is defined. It compares the
calls of all ranks before any byte of a caller's tensor changes, and then does the work.

================  ===============================================================================
``places/shm``    processes of one host: shared memory, torch operators, no Triton
``engines``       everywhere else: copies, signals and sums on a rank's streams; within and between nodes
``places/hosts``  processes of several hosts: the engine of ``shm`` within, TCP between
================  ===============================================================================
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.stream import Event, Outcome

Tensors = Sequence[torch.Tensor]
ENGINES: dict[str, Callable[[Any], "Engine"]] = {}
"""What makes the engine of a communicator; "streams" is for ranks that work on streams."""


class Engine(ABC):
    """The collectives of one rank of one group. Ranks are ranks of the group.

    Every method is collective (``send`` and ``recv`` are between two ranks), and starts by comparing
    ``call`` with the other ranks'. What comes back is the point where the op's outputs are complete, or
    None if they are when the method returns. Tensors that are at the same place as the input are not
    copied. Reductions are ``interlace.runtime.numerics.reductions.fold``'s, in rank order, so that all
    ranks get the same bits.
    """

    rank: int
    world_size: int

    @abstractmethod
    def barrier(self, call: Call) -> Event | None:
        """Every rank has called it."""

    @abstractmethod
    def parts(self, call: Call) -> list[Any]:
        """Every rank's ``call.part``, by rank; nothing else moves."""

    @abstractmethod
    def all_gather(self, call: Call, outputs: Tensors, input: torch.Tensor) -> Event | None:
        """``outputs[r]`` = rank r's ``input``; lengths may differ between ranks."""

    @abstractmethod
    def all_to_all(self, call: Call, outputs: Tensors, inputs: Tensors) -> Event | None:
        """``outputs[r]`` = rank r's ``inputs[own rank]``; lengths may differ between pairs."""

    @abstractmethod
    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        """``tensor`` = that of rank ``root``."""

    @abstractmethod
    def gather(
        self, call: Call, outputs: Tensors | None, input: torch.Tensor, root: int
    ) -> Event | None:
        """On ``root``: ``outputs[r]`` = rank r's ``input``. Elsewhere ``outputs`` is None."""

    @abstractmethod
    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors | None, root: int
    ) -> Event | None:
        """``output`` = ``inputs[own rank]`` of ``root``. Elsewhere ``inputs`` is None."""

    @abstractmethod
    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> Event | None:
        """``tensor`` = the reduction over ranks; every rank gets the same bits."""

    @abstractmethod
    def reduce(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> Event | None:
        """On ``root``: ``tensor`` = the reduction over ranks. Elsewhere it stays as it is."""

    @abstractmethod
    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors, op: str
    ) -> Event | None:
        """``output`` = the reduction over ranks of ``inputs[own rank]``; ``inputs[r]`` is r's part."""

    # -- parts of equal size, one behind the other ---------------------------------------------

    def all_gather_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor
    ) -> Event | None:
        """``output`` = all ranks' ``input``, which are equal in size, one behind the other."""
        return self.all_gather(call, self._cut(output), input.view(-1))

    def all_to_all_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor
    ) -> Event | None:
        """Part r of ``output`` = part [own rank] of rank r's ``input``; all parts are equal in size."""
        return self.all_to_all(call, self._cut(output), self._cut(input))

    def reduce_scatter_single(
        self, call: Call, output: torch.Tensor, input: torch.Tensor, op: str
    ) -> Event | None:
        """``output`` = the reduction over ranks of part [own rank] of ``input``."""
        return self.reduce_scatter(call, output.view(-1), self._cut(input), op)

    def _cut(self, whole: torch.Tensor) -> Tensors:
        return whole.view(self.world_size, whole.numel() // self.world_size).unbind(0)

    @abstractmethod
    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        """Begin to send to ``peer``; never blocks. ``tensor`` may be reused when the future is done.

        Messages of one tag from one rank to another are received in the order they were sent.
        """

    @abstractmethod
    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        """Begin to receive from ``peer``, or from whoever sends first if None; never blocks.

        The future fails with ValueError or TypeError if what was sent differs in length or dtype.
        """
