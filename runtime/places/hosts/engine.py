"""The collectives of processes on several hosts: shared memory within a host, TCP between hosts.

Sending between hosts is expensive, so each byte crosses to another host once, and every rank sends its
share. Legend: H hosts; rank (h, l) is the l-th of the L_h ranks of host h. Its *twin* on host k is (k, l
mod L_k), which is (k, l) if hosts have equally many ranks; C is the smallest number of ranks of a host.

==================  ================================================================================
broadcast           root sends to a twin on each host; each host broadcasts
all_gather          all send to their twins; each host gathers, once for the ranks of each host
gather, scatter     between root and the ranks of other hosts directly; within root's host as usual
all_to_all          directly between hosts, as usual within a host
reduce_scatter      each host reduces, once for the ranks of each host; rank l has the result for its
                    twin and sends it; the received results are combined in the order of hosts
all_reduce          each host reduces and scatters C parts; rank l < C exchanges its part with the
                    l-th rank of each other host and combines them; each host gathers
reduce              each host reduces; its first rank sends the result to root
send, recv          ``mail.py``
==================  ================================================================================

An op is done in one of three ways, by its bytes:

small     data goes with the call: one meeting within the host, after which every rank has what its twins
          need, and one frame from each twin (``pieces.py``). Bytes cross once per rank, not once per host,
          which costs less than a second meeting
middle    the step within the host comes with the call. The rank's data goes with its frame, and data for
          other ranks directly after it. Then comes the second step within the host
large     in pieces, after all ranks agree. The steps within the host overlap with pieces on the wire. Data
          that goes directly is sent as in the middle way

"Once for the ranks of each host" is a round within the host: in round k of an all_gather, rank l shares the
data that it has received from host k. If host k has more ranks than this one, there are several rounds.

Rejected: an all-reduce of gloo between hosts. It supports few dtypes, rounds halves at every step, and sums
in another order. Also rejected: gathering at one rank per host, where other cores and links idle.

Reductions have two steps: over the ranks of each host, then over the hosts. A host sends a partial result
in the dtype in which :func:`reductions.fold` would continue, so that there is one rounding, at the end::

    float16, bfloat16, float8   sum, avg, product: float32 (min and max select, so they stay as they are)
    complex32                   complex64
    integers, avg               the sum in int64 (uint64: itself, modulo 2**64); divided at the end

The order is ``(r0 + r1 + ...) + (r4 + r5 + ...) + ...``: ranks within a host, then hosts, both ascending.
It depends only on which rank is on which host. Each element is finished by one rank, or by ranks that
compute the same from the same numbers. So all ranks get the same bits, in every run. The rounding may
differ from the rounding on one host, whose sum has no brackets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import ALL, TO_ALL, TO_EACH, Engine, Parts, Sides, Tensors
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics import reductions
from interlace.runtime.places.hosts.links import HostLinks
from interlace.runtime.places.hosts.pieces import HostsOps, MakePiece, OpPiece, in_pieces
from interlace.runtime.places.shm.mail import Mail


@dataclass(frozen=True)
class Partial:
    """The two steps of ``op`` over tensors of one dtype: ``step`` in ``dtype``, then the rest."""

    op: str
    step: str
    dtype: torch.dtype

    @classmethod
    def of(cls, op: str, dtype: torch.dtype) -> Partial:
        if dtype == torch.bool:
            # the truncated mean of bools is true if all are true
            return cls("band", "band", dtype) if op == "avg" else cls(op, op, dtype)
        step = "sum" if op == "avg" else op
        if dtype in reductions.NARROW_FLOATS and op not in ("min", "max"):
            return cls(op, step, torch.float32)
        if dtype == torch.complex32:
            return cls(op, step, torch.complex64)
        whole = not dtype.is_floating_point and not dtype.is_complex
        if op == "avg" and whole and dtype != torch.uint64:
            return cls(op, step, torch.int64)
        return cls(op, step, dtype)

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in the dtype of partial results; the same tensor if it has that dtype."""
        return tensor.to(self.dtype)

    def finish(self, parts: Sequence[torch.Tensor], output: torch.Tensor, count: int) -> None:
        """Combine the ``parts`` of all hosts into ``output``, which may be a part, for ``count`` ranks."""
        total = output
        if output.dtype != self.dtype:
            total = torch.empty(output.shape, dtype=self.dtype)
        reductions.fold(self.step, parts, total)
        if self.op == "avg":
            reductions.divide(total, count)
        if total is not output:
            output.copy_(total)


SMALL_BYTES = 32 << 10  # bytes of all ranks of the largest host
MEETING_BYTES = 256 << 10  # data that goes with a meeting in the host


class HostsEngine(Engine):
    """One rank's engine on several hosts, one op at a time. ``place``: local engine, messages, failures."""

    def __init__(self, place: Any, links: HostLinks, mail: Mail) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._place, self._hosts, self._mail = place, place.map.hosts, mail
        self._ops, self._frames = HostsOps(place, links), place.frames
        self._mine, self._index = self._frames.mine, self._frames.index
        self._others = self._frames.others
        self._columns, self._most = min(map(len, self._hosts)), max(map(len, self._hosts))

    def barrier(self, call: Call) -> None:
        self._ops.run(call, [OpPiece])

    def agree(self, call: Call) -> list[Any]:
        return call.compared(self._place.exchange(call.message, call.op))

    def _twin(self, index: int, ranks: Sequence[int]) -> int:
        return ranks[index % len(ranks)]

    def _rounds(self, ranks: Sequence[int]) -> list[list[int | None]]:
        """Assign the ranks of a host to this host's ranks: in each round at most one to each."""
        count = len(self._mine)
        padded = [*ranks, *[None] * (-len(ranks) % count)]
        return [padded[start : start + count] for start in range(0, len(ranks), count)]

    def _far(self, tensors: Tensors) -> dict[int, torch.Tensor]:
        """Return the tensors of ranks on other hosts, twins first: no two ranks begin with the same one."""
        return {
            rank: tensors[rank]
            for ranks in self._others
            for rank in (*ranks[self._index :], *ranks[: self._index])
        }

    def exchange(self, call: Call, gives: Parts, takes: Parts, sides: Sides) -> None:
        single, (giver, taker, alike) = isinstance(takes, torch.Tensor), sides
        gives, takes = self.cut(gives), self.cut(takes)
        sizes = {each.nbytes for each in (*gives, *takes)}
        if alike and giver != ALL:
            pieces = self._broadcast(call, (*gives, *takes)[0], giver)
        elif sides == TO_ALL:
            if len(sizes) == 1 and gives[0].nbytes * self._most <= SMALL_BYTES:
                pieces = [lambda: self._small_gather(gives[0], takes, ALL, None)]
            else:
                pieces = self._gather_all(call, takes, gives[0])
        else:
            even = single or (call.match is not None and (sides != TO_EACH or len(sizes) == 1))

            def direct() -> OpPiece:
                return self._direct(call, gives, takes, sides, even=even)

            def small() -> OpPiece:
                if alike:
                    return self._small_gather(gives[0], takes, taker, direct)
                if giver == ALL:
                    return self._small_exchange(gives, takes, direct)
                return self._small_scatter(gives, takes[0], giver, direct)

            part = (gives if alike else takes)[0].nbytes  # equal on all ranks if messages are equal
            pieces = [small if even and part * self.world_size <= MEETING_BYTES else direct]
        self._ops.run(call, pieces)

    def _gather_all(self, call: Call, outputs: Tensors, input: torch.Tensor) -> list[MakePiece]:
        """Compute ``outputs[r]`` = rank r's ``input``, in pieces."""
        longest = max(outputs, key=torch.Tensor.numel)

        def piece(part: slice) -> OpPiece:
            sends = dict.fromkeys(self._frames.twins, input[part])
            receives = {source: outputs[source][part] for source in self._frames.receivers}
            parts = [output[part] for output in outputs]

            def share(hosts: Sequence[Sequence[int]]) -> None:
                for sources in itertools.chain.from_iterable(map(self._rounds, hosts)):
                    self._share(call.op, parts, sources, input[part])

            near = functools.partial(share, [self._mine])
            return OpPiece(None, sends, receives, near, functools.partial(share, self._others))

        outputs, input = [output.view(-1) for output in outputs], input.view(-1)
        return in_pieces(piece, longest)

    def _share(
        self, op: str, parts: Tensors, sources: Sequence[int | None], input: torch.Tensor
    ) -> None:
        """Share within the host the parts of ``sources``, of which each rank has one."""
        if len(self._mine) > 1:
            nothing = input.new_empty(0)
            outputs = [nothing if source is None else parts[source] for source in sources]
            part = input if sources[self._index] == self.rank else outputs[self._index]
            self._ops.local.all_gather(self._ops.within(op), outputs, part)
        elif sources[0] == self.rank:
            _copy(parts[self.rank], input)

    def _direct(
        self, call: Call, gives: Tensors, takes: Tensors, sides: Sides, *, even: bool
    ) -> OpPiece:
        """Send data from rank to rank. ``even``: all parts have one size, if messages are equal."""
        (giver, taker, alike), local_ranks = sides, self._mine
        sends: dict[int, torch.Tensor] = {}
        if alike:
            sends = {taker: gives[0]} if taker not in local_ranks else {}
        elif gives:
            sends = self._far(gives)
        receives: dict[int, torch.Tensor] = {}
        if giver != ALL:
            receives = {giver: takes[0]} if giver not in local_ranks else {}
        elif takes:
            receives = self._far(takes)
        if not {giver, taker} <= {ALL, *local_ranks}:  # the root is on another host
            return OpPiece(None, sends, receives, route=(giver, taker))
        near_gives = gives if alike or not gives else [gives[rank] for rank in local_ranks]
        near_takes = takes if giver != ALL or not takes else [takes[rank] for rank in local_ranks]
        within = [rank if rank == ALL else local_ranks.index(rank) for rank in (giver, taker)]
        of_host = Sides(within[0], within[1], alike)

        def share(call: Call, takes: Tensors) -> None:
            self._ops.local.exchange(call, near_gives, takes, of_host)

        if giver != ALL and even and takes[0].nbytes <= MEETING_BYTES:
            part = self._ops.buffer(takes[0])
            return OpPiece(
                lambda call: share(call, (part,)),
                sends,
                after=lambda: _copy(takes[0], part),
                route=(giver, taker),
            )
        return OpPiece(
            None,
            sends,
            receives,
            lambda: share(self._ops.within(call.op, even=even), near_takes),
            route=(giver, taker),
        )

    def _small_gather(
        self, input: torch.Tensor, outputs: Tensors, taker: int, uneven: MakePiece | None
    ) -> OpPiece:
        """Share all parts with all ranks of a host; the twins of the taking ranks send them."""
        block = input.new_empty(len(self._mine), input.numel())
        blocks = [input.new_empty(len(ranks), input.numel()) for ranks in self._others]

        def after() -> None:
            if outputs:
                for ranks, found in zip((self._mine, *self._others), (block, *blocks), strict=True):
                    self._fill(outputs, ranks, found)

        return OpPiece(
            lambda call: self._ops.local.all_gather(call, block.view(-1), input.view(-1)),
            {peer: block for peer in self._frames.receivers if taker in (ALL, peer)},
            dict(zip(self._frames.twins, blocks, strict=True)) if outputs else {},
            after=after,
            uneven=uneven,
        )

    def _small_exchange(self, inputs: Tensors, outputs: Tensors, uneven: MakePiece) -> OpPiece:
        """Share all parts with all ranks of the host, so that each has all that its twin receives."""
        count, local_ranks = inputs[0].numel(), self._mine
        joined = torch.cat([part.view(-1) for part in inputs])
        block = joined.new_empty(len(local_ranks), self.world_size, count)
        packed = {
            peer: joined.new_empty(len(local_ranks), count) for peer in self._frames.receivers
        }
        found = [joined.new_empty(len(ranks), count) for ranks in self._others]

        def near(call: Call) -> None:
            self._ops.local.all_gather(call, block.view(-1), joined)
            for peer, to in packed.items():
                to.copy_(block[:, peer])

        def after() -> None:
            self._fill(outputs, local_ranks, block[:, self.rank])
            for ranks, parts in zip(self._others, found, strict=True):
                self._fill(outputs, ranks, parts)

        from_twins = dict(zip(self._frames.twins, found, strict=True))
        return OpPiece(near, packed, from_twins, after=after, uneven=uneven)

    def _small_scatter(
        self, inputs: Tensors, output: torch.Tensor, root: int, uneven: MakePiece
    ) -> OpPiece:
        """Share all parts with all ranks of the root's host, which send their twins' parts."""
        whole = output.new_empty(self.world_size, output.numel())
        for row, part in zip(whole, inputs, strict=False):
            row.copy_(part.view(-1))
        near, sends, receives = None, {}, {}
        if root in self._mine:
            in_host = self._mine.index(root)
            near = lambda call: self._ops.local.broadcast(call, whole, in_host)  # noqa: E731
            sends = {peer: whole[peer] for peer in self._frames.receivers}
        else:
            home = next(ranks for ranks in self._hosts if root in ranks)
            receives = {self._twin(self._index, home): whole[self.rank]}

        def after() -> None:
            output.copy_(whole[self.rank].view(output.shape))

        return OpPiece(near, sends, receives, after=after, uneven=uneven)

    def _fill(self, outputs: Tensors, ranks: Sequence[int], parts: Iterable[torch.Tensor]) -> None:
        for rank, part in zip(ranks, parts, strict=True):
            outputs[rank].copy_(part.view(outputs[rank].shape))

    def _broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> list[MakePiece]:
        home = next(ranks for ranks in self._hosts if root in ranks)
        place, flat, here = home.index(root), tensor.view(-1), root in self._mine
        source = self._twin(place, self._mine)
        in_host = self._mine.index(source)

        def share(call: Call, part: torch.Tensor) -> None:
            if len(self._mine) > 1:
                self._ops.local.broadcast(call, part, in_host)

        def small(everyone: bool) -> OpPiece:
            """Broadcast in the root's host at once. If ``everyone`` there sends, no other rank has to."""
            copy = flat.clone()
            senders = home if everyone else (root,)
            twin = self._twin(self._index, home)

            def after() -> None:
                if not here and not everyone:
                    share(self._ops.within(call.op), copy)
                if self.rank != root:
                    flat.copy_(copy)

            return OpPiece(
                (lambda call: share(call, copy)) if here else None,
                dict.fromkeys(self._frames.receivers, copy) if self.rank in senders else {},
                {twin: copy} if not here and twin in senders else {},
                after=after,
            )

        def piece(part: slice) -> OpPiece:
            some, sends, receives = flat[part], {}, {}
            if self.rank == root:
                sends = {self._twin(place, ranks): some for ranks in self._others}
            elif self.rank == source:
                receives = {root: some}
            then = functools.partial(share, self._ops.within(call.op), some)
            return OpPiece(None, sends, receives, after=then)

        if flat.nbytes * len(home) <= SMALL_BYTES:
            return [lambda: small(True)]
        if flat.nbytes <= MEETING_BYTES and len(set(map(len, self._hosts))) == 1:
            return [lambda: small(False)]
        return in_pieces(piece, flat)

    def reduce(
        self, call: Call, gives: Parts, take: torch.Tensor | None, op: str, sides: Sides
    ) -> None:
        gives, (_, taker, alike) = self.cut(gives), sides
        if not alike:
            assert take is not None
            self._reduce_scatter(call, take, gives, op)
        elif taker == ALL:
            self._all_reduce(call, gives[0], op)
        else:
            self._reduce_to(call, gives[0], taker, op)

    def _all_reduce(self, call: Call, tensor: torch.Tensor, op: str) -> None:
        flat, partial = tensor.view(-1), Partial.of(op, tensor.dtype)
        if flat.nbytes * self._most <= SMALL_BYTES or flat.numel() < self._columns:
            self._ops.run(call, [lambda: self._small_reduce(flat, 1, flat, partial)])
        else:
            pieces = in_pieces(lambda part: self._columns_of(call.op, flat[part], partial), flat)
            self._ops.run(call, pieces)

    def _small_reduce(
        self, whole: torch.Tensor, count: int, output: torch.Tensor, partial: Partial
    ) -> OpPiece:
        """Reduce ``whole`` to ``output``; only this rank's part of it if it has a ``count`` of them."""
        sums = partial.widened(whole)
        sums = sums.clone() if sums is whole else sums
        parts, single = sums.view(count, output.numel()), count == 1
        found = {twin: self._ops.buffer(parts[0]) for twin in self._frames.twins}

        def after() -> None:
            host_part = parts[0 if single else self.rank]
            partial.finish(self._by_host(found, host_part), output, self.world_size)

        return OpPiece(
            lambda call: self._ops.local.all_reduce(call, sums, partial.step),
            {peer: parts[0 if single else peer] for peer in self._frames.receivers},
            found,
            after=after,
        )

    def _by_host(
        self, found: Mapping[int, torch.Tensor], host_part: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the parts ``found`` at a rank of each other host, and ``host_part``, in hosts' order."""
        parts = iter(found.values())
        return [host_part if ranks is self._mine else next(parts) for ranks in self._hosts]

    def _columns_of(self, op: str, flat: torch.Tensor, partial: Partial) -> OpPiece:
        """All-reduce ``flat``: this rank combines its column of it, if it has one."""
        count, index = self._columns, self._index
        more = [flat[:0]] * (len(self._mine) - count)
        targets = [*flat.tensor_split(count), *more]
        wide = [*partial.widened(flat).tensor_split(count), *more]
        column = self._ops.buffer(wide[index])
        peers = [ranks[index] for ranks in self._others] if index < count else []
        found = {peer: self._ops.buffer(column) for peer in peers}

        def near(call: Call) -> None:
            if len(self._mine) > 1:
                self._ops.local.reduce_scatter(call, column, wide, partial.step)
            else:
                column.copy_(wide[0])

        def after() -> None:
            if peers:
                partial.finish(self._by_host(found, column), targets[index], self.world_size)
            if len(self._mine) > 1:
                self._ops.local.all_gather(self._ops.within(op), targets, targets[index])

        return OpPiece(near, dict.fromkeys(peers, column), found, after=after)

    def _reduce_to(self, call: Call, tensor: torch.Tensor, root: int, op: str) -> None:
        flat, partial = tensor.view(-1), Partial.of(op, tensor.dtype)
        home = next(ranks for ranks in self._hosts if root in ranks)
        collector = self._twin(home.index(root), self._mine)
        place = self._mine.index(collector)

        def piece(part: slice) -> OpPiece:
            sums = partial.widened(flat[part])
            if self.rank == collector and sums.data_ptr() == flat[part].data_ptr():
                sums = self._ops.buffer(sums).copy_(sums)
            found = {}
            if self.rank == root:
                found = {self._twin(place, ranks): self._ops.buffer(sums) for ranks in self._others}

            def after() -> None:
                if self.rank == root:
                    partial.finish(self._by_host(found, sums), flat[part], self.world_size)

            return OpPiece(
                lambda call: self._ops.local.reduce_to(call, sums, place, partial.step),
                {root: sums} if self.rank == collector != root else {},
                found,
                after=after,
            )

        self._ops.run(call, in_pieces(piece, flat))

    def _reduce_scatter(self, call: Call, output: torch.Tensor, inputs: Tensors, op: str) -> None:
        partial, longest = Partial.of(op, output.dtype), max(inputs, key=torch.Tensor.numel)
        even = all(part.numel() == output.numel() for part in inputs)
        if even and output.nbytes * self.world_size <= MEETING_BYTES:

            def small() -> OpPiece:
                whole = torch.cat([part.view(-1) for part in inputs])
                return self._small_reduce(whole, self.world_size, output.view(-1), partial)

            self._ops.run(call, [small])
            return

        def piece(part: slice) -> OpPiece:
            parts = [each.view(-1)[part] for each in inputs]
            return self._parts_of(call.op, output.view(-1)[part], parts, partial)

        self._ops.run(call, in_pieces(piece, longest))

    def _parts_of(self, op: str, output: torch.Tensor, parts: Tensors, partial: Partial) -> OpPiece:
        """Reduce-scatter: the host reduces for the ranks of each host in turn, its own last."""
        wide = [partial.widened(part) for part in parts]
        dealt = [owners for ranks in (*self._others, self._mine) for owners in self._rounds(ranks)]
        assigned = [owners[self._index] for owners in dealt]
        reduced = {owner: self._ops.buffer(wide[owner]) for owner in assigned if owner is not None}
        sends = {owner: part for owner, part in reduced.items() if owner != self.rank}
        found = {twin: self._ops.buffer(wide[self.rank]) for twin in self._frames.twins}

        def near(call: Call) -> None:
            for owners in dealt:
                shares = [wide[0][:0] if owner is None else wide[owner] for owner in owners]
                owner = owners[self._index]
                into = wide[0].new_empty(0) if owner is None else reduced[owner]
                if len(self._mine) > 1:
                    self._ops.local.reduce_scatter(call, into, shares, partial.step)
                elif owner is not None:
                    into.copy_(wide[owner])
                call = self._ops.within(op)

        def after() -> None:
            partial.finish(self._by_host(found, reduced[self.rank]), output, self.world_size)

        return OpPiece(near, sends, found, after=after)

    def send(self, call: Call, tensor: torch.Tensor, peer: int, tag: int) -> Future[Outcome]:
        return self._mail.send(call, tensor, peer, tag)

    def recv(self, call: Call, tensor: torch.Tensor, peer: int | None, tag: int) -> Future[Outcome]:
        return self._mail.recv(call, tensor, peer, tag)


def _copy(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input.view(output.shape))
