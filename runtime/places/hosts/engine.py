"""The collectives of processes on several hosts: shared memory within a host, gloo between hosts.

Between hosts bytes are dear, so each crosses to another host once, and every rank carries its share.
Legend: H hosts; rank (h, l) is the l-th of the L_h ranks of host h; its *twin* on host k is
(k, l mod L_k), which is (k, l) where hosts have equally many ranks.

==================  ================================================================================
broadcast           root sends to its twins; each host broadcasts
all_gather          all send to their twins; each host gathers, once for the ranks of each host
gather, scatter     between root and the ranks of other hosts directly; within root's host as ever
all_to_all          directly between hosts, as ever within
reduce_scatter      each host reduces, once for the ranks of each host; rank l has the result for its
                    twin and sends it; what arrives is put together in the order of hosts
all_reduce          reduce_scatter of W segments, all_gather of the results; small ones at the hosts'
                    first ranks: one step between hosts instead of two
reduce              each host reduces; its first rank sends the result to root
send, recv          ``transfers.py``
==================  ================================================================================

"Once for the ranks of each host" is a round within the host: in round k of an all_gather rank l shares
what it has received of host k. Where host k has more ranks than this one there are several.

Before that the calls of all ranks are compared; so within a host the engine is given calls of our own,
which agree by construction. Reductions: ``partials.py``.

Rejected: an all-reduce of gloo between hosts. It knows few dtypes, rounds halves at every step, and its
order of summation is its own. Gathering at one rank per host: the others' cores and links would wait.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine, Tensors
from interlace.runtime.core.hooks import profiled_op
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.places.hosts.host_map import HostMap
from interlace.runtime.places.hosts.links import HostLinks, RankTensor
from interlace.runtime.places.hosts.partials import Partial
from interlace.runtime.places.hosts.transfers import HostTransfers
from interlace.runtime.record import dump as record

SMALL_BYTES = 1 << 16
_MOST_CALLS = 256


class HostsEngine(Engine):
    """One rank's engine on several hosts, one op at a time. ``place``: local engine, messages, failures."""

    def __init__(
        self, place: Any, hosts: HostMap, links: HostLinks, transfers: HostTransfers
    ) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._place, self._hosts = place, hosts.hosts
        self._host = hosts.index(place.rank)
        self._mine = hosts.hosts[self._host]
        self._index = self._mine.index(place.rank)
        self._others = [ranks for ranks in self._hosts if ranks is not self._mine]
        self._links, self._transfers = links, transfers
        self._calls: dict[Any, Call] = {}

    @contextmanager
    def _agreed(self, call: Call) -> Iterator[None]:
        """Around what moves the bytes of ``call``, which is compared before."""
        with record.recorded(self._place.group, call.message):
            call.verify(self._place.exchanged(call.message, call.op))
            if op_ranges := profiled_op.get():
                op_ranges.begin("hosts")
            with self._place.guarded(call.op):
                yield

    def barrier(self, call: Call) -> None:
        with self._agreed(call):
            pass

    def parts(self, call: Call) -> list[Any]:
        return call.compared(self._place.exchange(call.message, call.op))

    def _within(self, op: str, *key: Any) -> Call:
        """The call for a step within the host; ``key`` is all that it depends on."""
        op = f"{self._links.doing} within the host ({op})"
        call = self._calls.get((op, key))
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = Call(op, (("its share", repr(key)),))
            self._calls[op, key] = call
        return call

    # -- where things go -----------------------------------------------------------------------

    def _twin(self, rank_index: int, ranks: Sequence[int]) -> int:
        return ranks[rank_index % len(ranks)]

    def _rounds(self, ranks: Sequence[int]) -> list[list[int | None]]:
        """The ranks of a host dealt to those of this one: in each round at most one for each."""
        count = len(self._mine)
        dealt: list[list[int | None]] = []
        for start in range(0, len(ranks), count):
            some: list[int | None] = list(ranks[start : start + count])
            dealt.append(some + [None] * (count - len(some)))
        return dealt

    @property
    def _local(self) -> Engine:
        engine: Engine = self._place.local_engine()
        return engine

    def _wait(self, event: Event | None) -> None:
        if event is not None:
            event.synchronize()

    # -- moving --------------------------------------------------------------------------------

    def all_gather(self, call: Call, outputs: Tensors, input: torch.Tensor) -> None:
        with self._agreed(call):
            self._gather(call.op, outputs, input)

    def _gather(self, op: str, outputs: Tensors, input: torch.Tensor) -> None:
        sends = [(self._twin(self._index, ranks), input) for ranks in self._others]
        receives = [
            (source, outputs[source])
            for ranks in self._others
            for source in ranks[self._index :: len(self._mine)]  # whose twin this rank is
        ]
        self._links.swap(sends, receives, op)
        if len(self._mine) == 1:
            _copy(outputs[self.rank], input)
            return
        nothing = input.new_empty(0)
        for ranks in self._hosts:
            for sources in self._rounds(ranks):
                parts = [nothing if source is None else outputs[source] for source in sources]
                own = input if ranks is self._mine else parts[self._index]
                self._wait(self._local.all_gather(self._within(op), parts, own))

    def all_to_all(self, call: Call, outputs: Tensors, inputs: Tensors) -> None:
        with self._agreed(call):
            self._links.swap(self._far(inputs), self._far(outputs), call.op)
            near = self._near(outputs), self._near(inputs)
            self._wait(self._local.all_to_all(self._within(call.op), *near))

    def _far(self, tensors: Tensors) -> list[RankTensor]:
        return [(rank, tensors[rank]) for ranks in self._others for rank in ranks]

    def _near(self, tensors: Tensors) -> list[torch.Tensor]:
        return [tensors[rank] for rank in self._mine]

    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None:
        home = next(ranks for ranks in self._hosts if root in ranks)
        place = home.index(root)
        source = self._twin(place, self._mine)
        with self._agreed(call):
            if self.rank == root:
                sends = [(self._twin(place, ranks), tensor) for ranks in self._others]
                self._links.swap(sends, [], call.op)
            elif self.rank == source:
                self._links.swap([], [(root, tensor)], call.op)
            if len(self._mine) > 1:
                local_root = self._mine.index(source)
                self._wait(self._local.broadcast(self._within(call.op), tensor, local_root))

    def gather(self, call: Call, outputs: Tensors | None, input: torch.Tensor, root: int) -> None:
        with self._agreed(call):
            if root not in self._mine:
                self._links.swap([(root, input)], [], call.op)
                return
            near = None
            if outputs is not None:
                self._links.swap([], self._far(outputs), call.op)
                near = self._near(outputs)
            local_root = self._mine.index(root)
            self._wait(self._local.gather(self._within(call.op), near, input, local_root))

    def scatter(self, call: Call, output: torch.Tensor, inputs: Tensors | None, root: int) -> None:
        with self._agreed(call):
            if root not in self._mine:
                self._links.swap([], [(root, output)], call.op)
                return
            near = None
            if inputs is not None:
                self._links.swap(self._far(inputs), [], call.op)
                near = self._near(inputs)
            local_root = self._mine.index(root)
            self._wait(self._local.scatter(self._within(call.op), output, near, local_root))

    # -- reducing ------------------------------------------------------------------------------

    def all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> None:
        flat, partial = tensor.view(-1), Partial.of(op, tensor.dtype)
        with self._agreed(call):
            if flat.nbytes <= SMALL_BYTES or flat.numel() < self.world_size:
                self._reduce(call.op, flat, partial, self._hosts[0][0], everywhere=True)
            else:
                segments = list(flat.tensor_split(self.world_size))
                wide = list(partial.widened(flat).tensor_split(self.world_size))
                self._reduce_scatter(call.op, segments[self.rank], wide, partial)
                self._gather(call.op, segments, segments[self.rank])

    def reduce(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> None:
        flat, partial = tensor.view(-1), Partial.of(op, tensor.dtype)
        with self._agreed(call):
            self._reduce(call.op, flat, partial, root, everywhere=False)

    def _reduce(
        self, op: str, flat: torch.Tensor, partial: Partial, root: int, *, everywhere: bool
    ) -> None:
        """With ``everywhere`` a rank of each host gets the result and hands it out, else ``root`` alone."""
        collectors = [root if root in ranks else ranks[0] for ranks in self._hosts]
        own = collectors[self._host]
        part = partial.widened(flat)
        if self.rank == own and part is flat:
            part = flat.clone()
        if len(self._mine) > 1:
            call = self._within("reduce", part.dtype, part.numel())
            self._wait(self._local.reduce(call, part, self._mine.index(own), partial.step))
        if self.rank == own:
            others = [rank for rank in collectors if rank != own]
            receivers = others if everywhere else [root] if own != root else []
            arriving = others if everywhere or own == root else []
            parts = {rank: torch.empty_like(part) for rank in arriving}
            self._links.swap([(rank, part) for rank in receivers], list(parts.items()), op)
            if everywhere or own == root:
                parts[own] = part
                partial.finish([parts[rank] for rank in collectors], flat, self.world_size)
        if everywhere and len(self._mine) > 1:
            call = self._within("broadcast")
            self._wait(self._local.broadcast(call, flat, self._mine.index(own)))

    def reduce_scatter(self, call: Call, output: torch.Tensor, inputs: Tensors, op: str) -> None:
        partial = Partial.of(op, output.dtype)
        with self._agreed(call):
            wide = [partial.widened(part.view(-1)) for part in inputs]
            self._reduce_scatter(call.op, output.view(-1), wide, partial)

    def _reduce_scatter(
        self, op: str, output: torch.Tensor, wide: Tensors, partial: Partial
    ) -> None:
        """``wide[r]`` is this rank's part for rank r, in the dtype of partial results."""
        sends: list[RankTensor] = []
        own = wide[self.rank]
        for ranks in self._hosts:
            for owners in self._rounds(ranks):
                reduced = self._reduced_within(wide, owners, partial)
                owner = owners[self._index]
                if owner == self.rank:
                    own = reduced
                elif owner is not None:
                    sends.append((owner, reduced))
        parts = [own if ranks is self._mine else torch.empty_like(own) for ranks in self._hosts]
        receives: list[RankTensor] = [
            (self._twin(self._index, ranks), part)
            for ranks, part in zip(self._hosts, parts, strict=True)
            if ranks is not self._mine
        ]
        self._links.swap(sends, receives, op)
        partial.finish(parts, output, self.world_size)

    def _reduced_within(
        self, wide: Tensors, owners: Sequence[int | None], partial: Partial
    ) -> torch.Tensor:
        """This host's partial result for the owner that is this rank's in this round."""
        parts = [wide[0].new_empty(0) if owner is None else wide[owner] for owner in owners]
        if len(self._mine) == 1:
            return parts[0]
        reduced = torch.empty_like(parts[self._index])
        lengths = tuple(part.numel() for part in parts)
        call = self._within("reduce_scatter", partial.dtype, lengths)
        self._wait(self._local.reduce_scatter(call, reduced, parts, partial.step))
        return reduced

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._transfers.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._transfers.recv(call, tensor, peer, tag)


def _copy(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input.view(output.shape))
