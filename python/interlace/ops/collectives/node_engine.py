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
from interlace.runtime.core.engine import ALL, ENGINES, Engine, Parts, Tensors, Traffic
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

    def exchange(self, call: Call, gives: Parts, takes: Parts, traffic: Traffic) -> Event | None:
        self._verify(call)
        (giver, taker, alike), ranks = traffic, range(self.world_size)
        given, taken = [[bytes_of(each) for each in self.cut(of)] for of in (gives, takes)]
        nothing = (given or taken)[0][:0]
        if alike and taker == ALL:
            if giver != ALL:
                taken = [(given or taken)[0] if rank == giver else nothing for rank in ranks]
            source = given[0] if given else nothing
            return algorithms.gather_parts(self._communicator, taken, source)
        if alike:
            given = [given[0] if rank == taker else nothing for rank in ranks]
        if giver != ALL:
            taken = [taken[0] if rank == giver else nothing for rank in ranks]
        given, taken = given or [nothing] * len(ranks), taken or [nothing] * len(ranks)
        sizes = self._everyones(call.op, [part.nbytes for part in given])
        return self._swap(call, taken, given, sizes)

    def _swap(
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
        self._swap(call, [bytes_of(part) for part in collected], pieces, sizes)
        compute = communicator.compute
        compute.call(lambda: fold(op, list(collected), output), op)
        return compute.record()

    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, traffic: Traffic
    ) -> Event | None:
        self._verify(call)
        communicator, gives = self._communicator, self.cut(gives)
        if not traffic.alike:
            assert take is not None
            return self._scatter_sums(call, take.view(-1), [part.view(-1) for part in gives], op)
        flat, ranks = gives[0].view(-1), range(self.world_size)
        if traffic.taker == ALL:
            lengths = [count for _, count in split_rows(flat.numel(), self.world_size)]
        else:
            lengths = [flat.numel() if rank == traffic.taker else 0 for rank in ranks]
        parts = torch.split(flat, lengths)
        total = torch.empty_like(parts[self.rank])
        event = self._scatter_sums(call, total, parts, op)
        if event is None:
            return None
        if traffic.taker == ALL:
            outputs = [bytes_of(part) for part in parts]
            return algorithms.gather_parts(communicator, outputs, bytes_of(total), event)
        if take is not None:
            communicator.compute.copy(flat, total, "sum")
            event = communicator.compute.record()
        return event


ENGINES["streams"] = on_streams
