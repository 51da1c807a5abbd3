"""The collectives on a rank's streams: copies, signals and torch operators, or one Triton kernel.

Works in every place of one node, and is what ``sim`` and ``cuda`` use. Two algorithms do nearly all::

    pull      every rank stages what others need in its own workspace and signals; they take it
    staged    as pull, but what is taken is reduced: ``fold`` over the workspaces, in rank order
    reduction

================  ======================================  ==================================
op                a rank stages                           a rank takes
================  ======================================  ==================================
all_gather        its input                               every rank's input
all_to_all        one part per rank                       its part of every rank
broadcast         the root: the tensor                    all but the root: the root's
gather            its input                               the root: every rank's
scatter           the root: one part per rank             its part of the root's
reduce_scatter    one part per rank                       the reduction of its part
reduce            its tensor                              the root: the reduction
all_reduce        its tensor, then its part's reduction   all parts
================  ======================================  ==================================

Staging costs one copy more than writing into the peers' outputs would, but nobody needs to know where
those lie. Where lengths differ between ranks a second message tells them, because all ranks must lease
workspaces of the same size and readers must know the source's layout.

In places whose ranks have no direct access to each other's memory, ``cost.choose_collective`` says which
ops one Triton kernel does instead: one whose words carry their own flags, for what is small; one that
pushes, for sums and averages of a dtype that kernels have and for all-gathers; one that lets the switch
send to all, for large all-gathers. The term ``algorithm`` of a call, if it is not "auto", names it.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from interlace.kernels.tiling import owner_order, prefix_sums, split_rows
from interlace.ops.collectives import launch as algorithms
from interlace.ops.collectives import single_kernel as kernels
from interlace.ops.collectives.launch import KERNEL_DTYPES, Staged, Taken
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current, name_algorithm
from interlace.runtime.core.engine import ALL, TO_ALL, Engine, Parts, Tensors, Traffic
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import bytes_of
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import auto

PART_ALIGNMENT = 16


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of ``sizes`` bytes begin in a workspace, and the end of the last."""
    aligned = [-(-size // PART_ALIGNMENT) * PART_ALIGNMENT for size in sizes]
    return list(prefix_sums(aligned))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one length are the same memory; empty ones are."""
    return one.data_ptr() == other.data_ptr()


class StreamEngine(Engine):
    """The collectives of ``communicator``, on its streams and workspaces."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank = communicator.rank
        self.world_size = communicator.world_size

    def _verify(self, call: Call) -> None:
        """Raise unless all ranks agree on ``call``, which a kernel may do, and on how it would do it."""
        if overrides := current().overrides:
            call = replace(call, terms=(*call.terms, ("configuration", overrides)))
        call.verify(self._communicator.messages(call))

    def _everyones(self, op: str, mine: Any) -> list[Any]:
        """Every rank's ``mine``, once all agree on the call."""
        if self.world_size == 1:
            return [mine]
        recorder = self._communicator.place.recorder
        if recorder is not None:
            recorder.spoil()  # it may differ the next time
        answers = self._communicator.place.exchange(plain.dumps(mine), op)
        return [plain.loads(answer) for answer in answers]

    def _chosen(
        self,
        call: Call,
        dtype: torch.dtype,
        elements: int,
        *,
        small: int | None = None,
        reduction: str | None = None,
    ) -> str:
        """The kernel to run, or "copy". ``small``: bytes for a low-latency one. ``reduction``: if any."""
        algorithm = self._allowed(call, dtype, reduction)
        if elements == 0:
            algorithm = "copy"
        if algorithm == "auto":
            supported = dtype in KERNEL_DTYPES and reduction in (None, *kernels.REDUCTIONS)
            algorithm = auto.choose_collective(
                self._communicator.place,
                small if reduction is None or supported else None,
                kernel=supported,
                multicast=lambda: reduction is None and self._communicator.arena.multicast(),
            )
        name_algorithm(algorithm)
        return algorithm

    def _allowed(self, call: Call, dtype: torch.dtype, reduction: str | None) -> str:
        """The algorithm that ``call`` names; raises if it cannot do it."""
        place = self._communicator.place
        algorithm = str(dict(call.terms).get("algorithm", "auto"))
        supported = dtype in KERNEL_DTYPES and reduction in (None, *kernels.REDUCTIONS)
        if algorithm == "kernel" and not supported:
            raise TypeError(
                f'{call.op}: algorithm="kernel" does sum and avg of float32, float16 and bfloat16, '
                f'not op "{reduction or "sum"}" of {dtype}'
            )
        if (
            algorithm == "multimem"
            and not place.interpreted
            and not self._communicator.arena.multicast()
        ):
            raise PlaceUnavailableError(
                f'{call.op}: algorithm="multimem" needs memory with a multicast address, and this group\'s '
                f"has none, on rank {self.rank}: its GPUs have no NVLink switch, or ranks share a GPU"
            )
        return algorithm

    def agree(self, call: Call) -> list[Any]:
        return call.compared(self._communicator.messages(call))

    def barrier(self, call: Call) -> Event | None:
        place = self._communicator.place
        place.arrive()
        call.verify(self._communicator.messages(call))
        place.depart()
        return None

    # -- moving --------------------------------------------------------------------------------

    def exchange(self, call: Call, gives: Parts, takes: Parts, traffic: Traffic) -> Event | None:
        (giver, taker, alike), rank, communicator = traffic, self.rank, self._communicator
        gives, takes = self.cut(gives), self.cut(takes)
        if traffic == TO_ALL:
            return self._gather_all(call, takes, gives[0])
        call.verify(communicator.messages(call))
        if alike and taker == ALL:
            (tensor,) = gives or takes
            algorithm = dict(call.terms).get("algorithm", "auto")
            if algorithm == "auto":
                algorithm = auto.choose_collective(communicator.place, tensor.nbytes, kernel=False)
            if algorithm == "low_latency" and tensor.numel():
                name_algorithm(algorithm)
                return kernels.broadcast(communicator, tensor, giver)
            starts = [[0, tensor.nbytes]] * self.world_size
        else:
            sizes = self._everyones(call.op, [each.nbytes for each in gives])
            starts = [_starts(each) for each in sizes]
        name_algorithm("copy")
        mine, own = 0 if alike else rank, rank if giver == ALL else 0
        keep = bool(gives and takes) and _same(takes[own], gives[mine])
        if alike:
            readers = algorithms.others(communicator) if taker == ALL else [taker]
            readers = [reader for reader in readers if reader != rank]
            staged = [Staged(0, bytes_of(give), readers) for give in gives]
        else:
            staged = [
                Staged(starts[rank][peer], bytes_of(gives[peer]), [] if peer == rank else [peer])
                for peer in owner_order(rank, self.world_size)
                if gives and not (peer == rank and keep)
            ]
        sources = algorithms.sources(communicator) if giver == ALL else [giver]
        taken = [
            Taken(source, starts[source][mine], bytes_of(takes[source if giver == ALL else 0]))
            for source in sources
            if takes and not (source == rank and keep)
        ]
        nbytes = max(each[-1] for each in starts)
        return algorithms.pull(communicator, call.op, nbytes, staged, taken)

    def _gather_all(self, call: Call, outputs: Tensors, input: torch.Tensor) -> Event | None:
        self._verify(call)
        elements = sum(output.numel() for output in outputs)
        equal = all(output.numel() == input.numel() for output in outputs)
        small = input.nbytes if equal else None
        algorithm = self._chosen(call, input.dtype, elements, small=small)
        if algorithm != "copy":
            return kernels.all_gather(self._communicator, outputs, input, algorithm)
        return algorithms.all_gather_copy(
            self._communicator, bytes_of(input), [bytes_of(output) for output in outputs]
        )

    # -- reducing ------------------------------------------------------------------------------

    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, traffic: Traffic
    ) -> Event | None:
        communicator, gives = self._communicator, self.cut(gives)
        if traffic.taker != ALL:
            call.verify(communicator.messages(call))
            name_algorithm("copy")
            return algorithms.reduce_copy(
                communicator, gives[0].view(-1), traffic.taker, reduction=op
            )
        assert take is not None
        self._verify(call)
        elements = sum(part.numel() for part in gives)
        small = take.nbytes if traffic.alike else None
        algorithm = self._chosen(call, take.dtype, elements, small=small, reduction=op)
        flat = take.view(-1)
        if traffic.alike:
            if algorithm != "copy":
                return kernels.all_reduce(communicator, take, op, algorithm)
            segments = split_rows(flat.numel(), self.world_size)
            return algorithms.all_reduce_copy(communicator, flat, flat, segments, reduction=op)
        if algorithm != "copy":
            return kernels.reduce_scatter(communicator, take, gives, op, algorithm)
        parts = [part.view(-1) for part in gives]
        return algorithms.reduce_scatter_copy(communicator, parts, flat, reduction=op)

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._communicator.place.send(tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._communicator.place.recv(tensor, peer, tag)
