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
from interlace.runtime.core.engine import Engine, Tensors
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

    def _told(self, op: str, mine: Any) -> list[Any]:
        """Every rank's ``mine``, once all agree on the call."""
        if self.world_size == 1:
            return [mine]
        recorder = self._communicator.place.recorder
        if recorder is not None:
            recorder.spoil()  # it may differ the next time
        answers = self._communicator.place.exchange(plain.dumps(mine), op)
        return [plain.loads(answer) for answer in answers]

    def _verify_copies(self, call: Call) -> None:
        """Raise unless all ranks agree on ``call``, which copies do."""
        call.verify(self._communicator.messages(call))
        name_algorithm("copy")

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

    def parts(self, call: Call) -> list[Any]:
        return call.compared(self._communicator.messages(call))

    def barrier(self, call: Call) -> Event | None:
        place = self._communicator.place
        place.arrive()
        call.verify(self._communicator.messages(call))
        place.depart()
        return None

    # -- moving --------------------------------------------------------------------------------

    def all_gather(self, call: Call, outputs: Tensors, input: torch.Tensor) -> Event | None:
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

    def all_to_all(self, call: Call, outputs: Tensors, inputs: Tensors) -> Event | None:
        self._verify_copies(call)
        rank = self.rank
        starts = [_starts(s) for s in self._told(call.op, [part.nbytes for part in inputs])]
        keep = _same(outputs[rank], inputs[rank])
        staged = [
            Staged(starts[rank][peer], bytes_of(inputs[peer]), [] if peer == rank else [peer])
            for peer in owner_order(rank, self.world_size)
            if not (peer == rank and keep)
        ]
        taken = [
            Taken(source, starts[source][rank], bytes_of(outputs[source]))
            for source in algorithms.sources(self._communicator)
            if not (source == rank and keep)
        ]
        nbytes = max(each[-1] for each in starts)
        return algorithms.pull(self._communicator, call.op, nbytes, staged, taken)

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        call.verify(self._communicator.messages(call))
        algorithm = dict(call.terms).get("algorithm", "auto")
        if algorithm == "auto":
            place = self._communicator.place
            algorithm = auto.choose_collective(place, tensor.nbytes, kernel=False)
        if algorithm == "low_latency" and tensor.numel():
            name_algorithm(algorithm)
            return kernels.broadcast(self._communicator, tensor, root)
        name_algorithm("copy")
        data = bytes_of(tensor)
        is_root = self.rank == root
        staged = [Staged(0, data, algorithms.others(self._communicator))] if is_root else []
        taken = [] if is_root else [Taken(root, 0, data)]
        return algorithms.pull(self._communicator, call.op, tensor.nbytes, staged, taken)

    def gather(
        self, call: Call, outputs: Tensors | None, input: torch.Tensor, root: int
    ) -> Event | None:
        self._verify_copies(call)
        nbytes = max(self._told(call.op, input.nbytes))
        staged = [Staged(0, bytes_of(input), [] if self.rank == root else [root])]
        taken: list[Taken] = []
        if outputs is not None:
            taken = [
                Taken(source, 0, bytes_of(outputs[source]))
                for source in algorithms.sources(self._communicator)
                if not (source == root and _same(outputs[root], input))
            ]
        return algorithms.pull(self._communicator, call.op, nbytes, staged, taken)

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors | None, root: int
    ) -> Event | None:
        self._verify_copies(call)
        mine = None if inputs is None else [part.nbytes for part in inputs]
        starts = _starts(self._told(call.op, mine)[root])
        staged: list[Staged] = []
        if inputs is not None:
            staged = [
                Staged(starts[peer], bytes_of(inputs[peer]), [] if peer == root else [peer])
                for peer in owner_order(root, self.world_size)
            ]
        taken = [Taken(root, starts[self.rank], bytes_of(output))]
        if inputs is not None and _same(output, inputs[root]):
            taken = []
        return algorithms.pull(self._communicator, call.op, starts[-1], staged, taken)

    # -- reducing ------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> Event | None:
        self._verify(call)
        algorithm = self._chosen(
            call, tensor.dtype, tensor.numel(), small=tensor.nbytes, reduction=op
        )
        if algorithm != "copy":
            return kernels.all_reduce(self._communicator, tensor, op, algorithm)
        flat = tensor.view(-1)
        segments = split_rows(flat.numel(), self.world_size)
        return algorithms.all_reduce_copy(self._communicator, flat, flat, segments, reduction=op)

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> Event | None:
        self._verify_copies(call)
        return algorithms.reduce_copy(self._communicator, tensor.view(-1), root, reduction=op)

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors, op: str
    ) -> Event | None:
        self._verify(call)
        elements = sum(part.numel() for part in inputs)
        algorithm = self._chosen(call, output.dtype, elements, reduction=op)
        if algorithm != "copy":
            return kernels.reduce_scatter(self._communicator, output, inputs, op, algorithm)
        flat = [part.view(-1) for part in inputs]
        return algorithms.reduce_scatter_copy(
            self._communicator, flat, output.view(-1), reduction=op
        )

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._communicator.place.send(tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._communicator.place.recv(tensor, peer, tag)
