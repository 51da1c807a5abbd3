"""The collectives of ranks on several nodes: over the fast link within a node, by puts between nodes.

==============  ==============================================================================
all_gather      one transfer per chunk and node, handed on within the node
broadcast       the same, of the root's data alone
reduce_scatter  sums within each node, then one partial sum per node: float sums and averages
all_reduce      reduce_scatter, then all_gather of the sums
reduce          reduce_scatter in which the root owns everything
all_to_all      by way of the rank of this node that is the destination's counterpart
gather,scatter  the same, with parts of or for one rank alone
==============  ==============================================================================

Other reductions and dtypes exchange their contributions and fold them in rank order. What sums within
nodes first rounds once, as everywhere, but adds in another order than a single node would: bits may
differ from those of other places, never between ranks.
"""

from collections.abc import Sequence

import torch

from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import node_moves as algorithms
from interlace.ops.collectives.stream_engine import StreamEngine
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.engine import ENGINES, Engine, Tensors
from interlace.runtime.core.memory import bytes_of, neighbours, overlap
from interlace.runtime.core.stream import Event
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.tuning import configuration


def on_streams(communicator: Communicator) -> Engine:
    """The engine of a group whose ranks work on streams: on one node, or on several."""
    nodes = communicator.place.nodes
    return (StreamEngine if nodes is None else HierarchicalEngine)(communicator)


class HierarchicalEngine(StreamEngine):
    """The collectives of ``communicator``, whose place has nodes."""

    def _verify(self, call: Call) -> None:
        super()._verify(call)
        name_algorithm("hierarchical")

    def all_gather(self, call: Call, outputs: Tensors, input: torch.Tensor) -> Event | None:
        self._verify(call)
        parts = [bytes_of(output) for output in outputs]
        return algorithms.gather_parts(self._communicator, parts, bytes_of(input))

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> Event | None:
        self._verify(call)
        data = bytes_of(tensor)
        outputs = [data if rank == root else data[:0] for rank in range(self.world_size)]
        return algorithms.gather_parts(self._communicator, outputs, outputs[self.rank])

    def _exchange(
        self, call: Call, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]
    ) -> Event | None:
        """Part r of ``inputs`` to rank r, all as flat uint8; ``sizes[source][destination]``."""
        compute = self._communicator.compute
        parts = list(inputs)
        mine = parts[self.rank]
        whole = neighbours(parts)
        if whole is None or any(overlap(whole, output) for output in outputs):
            whole = torch.cat(parts)
        event: Event | None = None
        if any(map(sum, sizes)):
            longest = max(map(max, sizes))
            place = self._communicator.place
            config = configuration.choose(place, torch.uint8, longest, 1, 1)
            event = algorithms.exchange(self._communicator, call.op, whole, outputs, sizes, config)
        own = outputs[self.rank]
        if own.numel() and own.data_ptr() != mine.data_ptr():
            first = sum(sizes[self.rank][: self.rank])
            compute.copy(own, whole[first : first + own.numel()], "own part")
            event = compute.record()
        return event

    def all_to_all(self, call: Call, outputs: Tensors, inputs: Tensors) -> Event | None:
        self._verify(call)
        parts = [bytes_of(part) for part in inputs]
        sizes = self._told(call.op, [part.nbytes for part in parts])
        return self._exchange(call, [bytes_of(output) for output in outputs], parts, sizes)

    def gather(
        self, call: Call, outputs: Tensors | None, input: torch.Tensor, root: int
    ) -> Event | None:
        self._verify(call)
        data = bytes_of(input)
        lengths = self._told(call.op, data.nbytes)
        ranks = range(self.world_size)
        sizes = [[lengths[source] if rank == root else 0 for rank in ranks] for source in ranks]
        parts = [data if rank == root else data[:0] for rank in ranks]
        empty = [data[:0] for _ in ranks]
        targets = empty if outputs is None else [bytes_of(output) for output in outputs]
        return self._exchange(call, targets, parts, sizes)

    def scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors | None, root: int
    ) -> Event | None:
        self._verify(call)
        ranks = range(self.world_size)
        mine = None if inputs is None else [part.nbytes for part in inputs]
        lengths = self._told(call.op, mine)[root]
        sizes = [lengths if source == root else [0] * self.world_size for source in ranks]
        data = bytes_of(output)
        parts = [data[:0] for _ in ranks] if inputs is None else [bytes_of(p) for p in inputs]
        targets = [data if source == root else data[:0] for source in ranks]
        return self._exchange(call, targets, parts, sizes)

    def _scatter_sums(
        self, call: Call, output: torch.Tensor, parts: Tensors, op: str
    ) -> Event | None:
        """``output`` = the reduction over ranks of ``parts[own rank]``; flat tensors, any lengths."""
        lengths = [part.numel() for part in parts]
        whole = neighbours(parts)
        if whole is None or overlap(output, whole):
            whole = torch.cat(list(parts))
        if not sum(lengths):
            return None
        communicator = self._communicator
        algorithm = self._chosen(call, output.dtype, sum(lengths), reduction=op)
        if algorithm == "kernel":
            config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
            return algorithms.reduce_scatter(
                communicator, whole, output, lengths, config, average=op == "avg", op=call.op
            )
        collected = torch.empty(
            (self.world_size, output.numel()), dtype=output.dtype, device=output.device
        )
        sizes = [[length * output.element_size() for length in lengths]] * self.world_size
        pieces = [bytes_of(part) for part in torch.split(whole, lengths)]
        self._exchange(call, [bytes_of(part) for part in collected], pieces, sizes)
        compute = communicator.compute
        compute.call(lambda: fold(op, list(collected), output), op)
        return compute.record()

    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors, op: str
    ) -> Event | None:
        self._verify(call)
        parts = [part.view(-1) for part in inputs]
        return self._scatter_sums(call, output.view(-1), parts, op)

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> Event | None:
        self._verify(call)
        flat = tensor.view(-1)
        parts = [flat if rank == root else flat[:0] for rank in range(self.world_size)]
        total = torch.empty_like(parts[self.rank])
        event = self._scatter_sums(call, total, parts, op)
        if event is not None and self.rank == root:
            self._communicator.compute.copy(flat, total, "sum")
            event = self._communicator.compute.record()
        return event

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> Event | None:
        self._verify(call)
        flat = tensor.view(-1)
        lengths = [count for _, count in split_rows(flat.numel(), self.world_size)]
        total = torch.empty(lengths[self.rank], dtype=flat.dtype, device=flat.device)
        event = self._scatter_sums(call, total, torch.split(flat, lengths), op)
        if event is None:
            return None
        outputs = [bytes_of(part) for part in torch.split(flat, lengths)]
        return algorithms.gather_parts(self._communicator, outputs, bytes_of(total), event)


ENGINES["streams"] = on_streams
