"""The collectives on a rank's streams: copies, signals and torch operators, or one Triton kernel.

:class:`StreamEngine` is for ranks of one node. With "copy" each rank does this, and folds what is reduced
over the workspaces, in rank order.

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
ops one Triton kernel does instead. docs/reference/collectives.md has all algorithms. They run on a rank's
streams, in every place, also where the group's own engine uses none.

:class:`HierarchicalEngine` is for ranks of several nodes: the fast link within a node, puts between nodes.

==============  ==============================================================================
all_gather      one transfer per chunk and node, handed on within the node
broadcast       the same, of the root's data alone
reduce_scatter  sums within each node, then one partial sum per node: float sums and averages
all_reduce      reduce_scatter, then all_gather of the sums
reduce          reduce_scatter in which the root owns everything
all_to_all      by way of the rank of this node that is the destination's counterpart
gather,scatter  the same, with parts of or for one rank alone
==============  ==============================================================================

Other reductions and dtypes exchange their contributions and fold them in rank order. Sums within nodes
first are rounded once, as everywhere, but are added in another order than on a single node. So bits may
differ from other places, never between ranks.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, get_args

import torch

from interlace.arguments import checks
from interlace.arguments.words import CollectiveAlgorithm
from interlace.kernels.tiling import owner_order, prefix_sums, split_rows
from interlace.ops.collectives import launch as algorithms, launch as low_latency, node_moves
from interlace.ops.collectives.launch import KERNEL_DTYPES, BySwitch, Staged, Taken
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import current, name_algorithm
from interlace.runtime.core.engine import ALL, ENGINES, TO_ALL, Engine, Parts, Sides, Tensors
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.memory import bytes_of, neighbours, overlap
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.tuning import configuration, tuning

PART_ALIGNMENT = 16
REDUCTIONS = ("sum", "avg")  # in kernels
COLLECTIVE_ALGORITHMS: tuple[str, ...] = get_args(CollectiveAlgorithm)
ONE_NODE_ALGORITHMS = ("multimem", "low_latency")


def check_algorithm(
    algorithm: str, dtype: torch.dtype, communicator: Communicator, op: str | None = None
) -> None:
    """Raise ValueError or TypeError unless ``algorithm`` can do ``op`` (None: only move) for ``dtype``."""
    checks.one_of("algorithm", algorithm, COLLECTIVE_ALGORITHMS)
    check_nodes(algorithm, communicator)
    typed = algorithm in ("kernel", "multimem") or (algorithm == "low_latency" and op is not None)
    if typed and dtype not in KERNEL_DTYPES:
        raise TypeError(
            f'algorithm="{algorithm}" supports float32, float16 and bfloat16, got {dtype}'
        )
    reductions = ("sum",) if algorithm == "multimem" else checks.REDUCE_OPS
    if typed and op is not None and op not in reductions:
        raise ValueError(
            f'algorithm="{algorithm}" reduces with op {" or ".join(reductions)}, got {op!r}'
        )


def check_nodes(algorithm: str, communicator: Communicator) -> None:
    """Raise ValueError if ``algorithm`` cannot reach all ranks."""
    nodes = communicator.place.nodes
    if nodes is not None and algorithm in ONE_NODE_ALGORITHMS:
        raise ValueError(
            f'algorithm="{algorithm}" needs all ranks on one node, and this group is on '
            f"{len(nodes.names())} in place {communicator.place.name!r}"
        )


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

    def _everyones(self, op: str, part: Any) -> list[Any]:
        """Every rank's ``part``, once all agree on the call."""
        if self.world_size == 1:
            return [part]
        recorder = self._communicator.place.recorder
        if recorder is not None:
            recorder.spoil()  # it may differ the next time
        answers = self._communicator.place.exchange(plain.dumps(part), op)
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
        """The kernel to run, or "copy"; raises if it cannot. ``small``: bytes for a low-latency one."""
        place, multicast = self._communicator.place, self._communicator.arena.multicast
        algorithm = str(dict(call.terms).get("algorithm", "auto"))
        supported = dtype in KERNEL_DTYPES and reduction in (None, *REDUCTIONS)
        if algorithm == "kernel" and not supported:
            raise TypeError(
                f'{call.op}: algorithm="kernel" does sum and avg of float32, float16 and bfloat16, '
                f'not op "{reduction or "sum"}" of {dtype}'
            )
        if algorithm == "multimem" and not (place.interpreted or multicast()):
            raise PlaceUnavailableError(
                f'{call.op}: algorithm="multimem" needs memory with a multicast address, and this group\'s '
                f"has none, on rank {self.rank}: its GPUs have no NVLink switch, or ranks share a GPU"
            )
        if elements == 0:
            algorithm = "copy"
        if algorithm == "auto":
            algorithm = tuning.choose_collective(
                place,
                small if reduction is None or supported else None,
                kernel=supported,
                multicast=lambda: reduction is None and multicast(),
            )
        name_algorithm(algorithm)
        return algorithm

    def agree(self, call: Call) -> list[Any]:
        return call.compared(self._communicator.messages(call))

    def barrier(self, call: Call) -> Event | None:
        place = self._communicator.place
        place.arrive()
        call.verify(self._communicator.messages(call))
        place.depart()
        return None

    def exchange(self, call: Call, gives: Parts, takes: Parts, sides: Sides) -> Event | None:
        (giver, taker, alike), rank, communicator = sides, self.rank, self._communicator
        gives, takes = self.cut(gives), self.cut(takes)
        if sides == TO_ALL:
            return self._gather_all(call, takes, gives[0])
        call.verify(communicator.messages(call))
        if alike and taker == ALL:
            (tensor,) = gives or takes
            algorithm = dict(call.terms).get("algorithm", "auto")
            if algorithm == "auto":
                algorithm = tuning.choose_collective(
                    communicator.place, tensor.nbytes, kernel=False
                )
            if algorithm == "low_latency" and tensor.numel():
                name_algorithm(algorithm)
                _refuse("broadcast", low_latency.why_not(tensor.nbytes))
                return low_latency.broadcast(communicator, tensor, giver)
            starts = [[0, tensor.nbytes]] * self.world_size
        else:
            sizes = self._everyones(call.op, [give.nbytes for give in gives])
            starts = [_starts(size) for size in sizes]
        name_algorithm("copy")
        give_index, take_index = 0 if alike else rank, rank if giver == ALL else 0
        keep = bool(gives and takes) and _same(takes[take_index], gives[give_index])
        if alike:
            readers = algorithms.other_ranks(communicator) if taker == ALL else [taker]
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
            Taken(
                source, starts[source][give_index], bytes_of(takes[source if giver == ALL else 0])
            )
            for source in sources
            if takes and not (source == rank and keep)
        ]
        nbytes = max(start[-1] for start in starts)
        return algorithms.pull(communicator, call.op, nbytes, staged, taken)

    def _gather_all(self, call: Call, outputs: Tensors, input: torch.Tensor) -> Event | None:
        self._verify(call)
        elements = sum(output.numel() for output in outputs)
        equal = all(output.numel() == input.numel() for output in outputs)
        small = input.nbytes if equal else None
        algorithm = self._chosen(call, input.dtype, elements, small=small)
        if algorithm != "copy":
            return _gather_by_kernel(self._communicator, outputs, input, algorithm)
        return algorithms.all_gather_copy(
            self._communicator, bytes_of(input), [bytes_of(output) for output in outputs]
        )

    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, sides: Sides
    ) -> Event | None:
        communicator, gives = self._communicator, self.cut(gives)
        if sides.taker != ALL:
            call.verify(communicator.messages(call))
            name_algorithm("copy")
            return algorithms.reduce_copy(
                communicator, gives[0].view(-1), sides.taker, reduction=op
            )
        assert take is not None
        self._verify(call)
        elements = sum(part.numel() for part in gives)
        small = take.nbytes if sides.alike else None
        algorithm = self._chosen(call, take.dtype, elements, small=small, reduction=op)
        flat = take.view(-1)
        if sides.alike:
            if algorithm != "copy":
                return _reduce_by_kernel(communicator, take, op, algorithm)
            segments = split_rows(flat.numel(), self.world_size)
            return algorithms.all_reduce_copy(communicator, flat, flat, segments, reduction=op)
        if algorithm != "copy":
            return _scatter_by_kernel(communicator, take, gives, op, algorithm)
        parts = [part.view(-1) for part in gives]
        return algorithms.reduce_scatter_copy(communicator, parts, flat, reduction=op)

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._communicator.place.send(tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._communicator.place.recv(tensor, peer, tag)


def _refuse(op: str, why_not: str) -> None:
    if why_not:
        raise ValueError(f'{op}: algorithm="low_latency" cannot do this: {why_not}')


def _gather_by_kernel(
    communicator: Communicator, outputs: Sequence[torch.Tensor], input: torch.Tensor, algorithm: str
) -> Event:
    """An all_gather of at least one element; ``algorithm`` names the kernel.

    Kernels want one flat tensor. Tensors that are neighbours in one storage are that already; others are
    copied.
    """
    lengths = [output.numel() for output in outputs]
    if algorithm == "low_latency":
        equal = min(lengths) == max(lengths)
        _refuse("all_gather", low_latency.why_not(input.nbytes, equal=equal))

    def gather(flat: torch.Tensor, target: torch.Tensor) -> Event:
        if algorithm == "low_latency":
            return low_latency.all_gather(communicator, flat, target)
        config = configuration.choose(communicator.place, input.dtype, max(lengths), 1, 1)
        if algorithm == "multimem":
            return BySwitch(communicator, config).all_gather(flat, target, lengths)
        return algorithms.all_gather_kernel(communicator, flat, target, lengths, config)

    return node_moves.gather_into(communicator, outputs, input.view(-1), gather)


def _scatter_by_kernel(
    communicator: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: str,
    algorithm: str,
) -> Event:
    """A reduce_scatter of at least one element, for ``op`` in ``REDUCTIONS``."""
    lengths = [part.numel() for part in inputs]
    if algorithm == "low_latency":
        _refuse("reduce_scatter", "every rank has all sums in the end; use all_reduce")
    whole = neighbours(inputs)
    own_input = inputs[communicator.rank]
    # a block is read before its sum is written
    in_place = output.data_ptr() == own_input.data_ptr()
    if whole is None or (overlap(output, whole) and not in_place):
        whole = torch.cat([part.view(-1) for part in inputs])
    config = configuration.choose(communicator.place, output.dtype, max(lengths), 1, 1)
    if algorithm == "multimem":
        return BySwitch(communicator, config).reduce_scatter(whole, output.view(-1), lengths)
    return algorithms.reduce_scatter_kernel(
        communicator, whole, output.view(-1), lengths, config, average=op == "avg"
    )


def _reduce_by_kernel(
    communicator: Communicator, tensor: torch.Tensor, op: str, algorithm: str
) -> Event:
    """An all_reduce of at least one element, for ``op`` in ``REDUCTIONS``."""
    flat = tensor.view(-1)
    if algorithm == "low_latency":
        _refuse("all_reduce", low_latency.why_not(tensor.nbytes))
        return low_latency.all_reduce(communicator, flat, average=op == "avg")
    config = configuration.choose(communicator.place, tensor.dtype, flat.numel(), 1, 1)
    if algorithm == "multimem":
        return BySwitch(communicator, config).all_reduce(flat, flat)
    return algorithms.all_reduce_kernel(communicator, flat, flat, config, average=op == "avg")


class HierarchicalEngine(StreamEngine):
    """The collectives of ``communicator``, whose place has nodes."""

    def _verify(self, call: Call) -> None:
        super()._verify(call)
        name_algorithm("hierarchical")

    def exchange(self, call: Call, gives: Parts, takes: Parts, sides: Sides) -> Event | None:
        self._verify(call)
        (giver, taker, alike), ranks = sides, range(self.world_size)
        record, taken = [[bytes_of(each) for each in self.cut(of)] for of in (gives, takes)]
        nothing = (record or taken)[0][:0]
        if alike and taker == ALL:
            if giver != ALL:
                taken = [(record or taken)[0] if rank == giver else nothing for rank in ranks]
            source = record[0] if record else nothing
            return node_moves.gather_parts(self._communicator, taken, source)
        if alike:
            record = [record[0] if rank == taker else nothing for rank in ranks]
        if giver != ALL:
            taken = [taken[0] if rank == giver else nothing for rank in ranks]
        record, taken = record or [nothing] * len(ranks), taken or [nothing] * len(ranks)
        sizes = self._everyones(call.op, [part.nbytes for part in record])
        return self._swap(call, taken, record, sizes)

    def _swap(
        self, call: Call, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]
    ) -> Event | None:
        """Part r of ``inputs`` to rank r, all as flat uint8; ``sizes[source][destination]``."""
        compute = self._communicator.compute
        parts = list(inputs)
        own_part = parts[self.rank]
        whole = neighbours(parts)
        if whole is None or any(overlap(whole, output) for output in outputs):
            whole = torch.cat(parts)
        event: Event | None = None
        if any(map(sum, sizes)):
            longest = max(map(max, sizes))
            place = self._communicator.place
            config = configuration.choose(place, torch.uint8, longest, 1, 1)
            event = node_moves.exchange(self._communicator, call.op, whole, outputs, sizes, config)
        own_output = outputs[self.rank]
        if own_output.numel() and own_output.data_ptr() != own_part.data_ptr():
            first = sum(sizes[self.rank][: self.rank])
            compute.copy(own_output, whole[first : first + own_output.numel()], "own part")
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
            return node_moves.reduce_scatter(
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
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, sides: Sides
    ) -> Event | None:
        self._verify(call)
        communicator, gives = self._communicator, self.cut(gives)
        if not sides.alike:
            assert take is not None
            return self._scatter_sums(call, take.view(-1), [part.view(-1) for part in gives], op)
        flat, ranks = gives[0].view(-1), range(self.world_size)
        if sides.taker == ALL:
            lengths = [count for _, count in split_rows(flat.numel(), self.world_size)]
        else:
            lengths = [flat.numel() if rank == sides.taker else 0 for rank in ranks]
        parts = torch.split(flat, lengths)
        total = torch.empty_like(parts[self.rank])
        event = self._scatter_sums(call, total, parts, op)
        if event is None:
            return None
        if sides.taker == ALL:
            outputs = [bytes_of(part) for part in parts]
            return node_moves.gather_parts(communicator, outputs, bytes_of(total), event)
        if take is not None:
            communicator.compute.copy(flat, total, "sum")
            event = communicator.compute.record()
        return event


def on_streams(communicator: Communicator) -> Engine:
    """The engine of a group whose ranks work on streams: on one node, or on several."""
    nodes = communicator.place.nodes
    return (StreamEngine if nodes is None else HierarchicalEngine)(communicator)


ENGINES["streams"] = on_streams


def serving(communicator: Communicator, algorithm: str) -> Engine:
    """The engine that runs a call whose term "algorithm" is ``algorithm``."""
    engine = communicator.engine
    if algorithm == "auto" or isinstance(engine, StreamEngine):
        return engine
    return StreamEngine(communicator)
