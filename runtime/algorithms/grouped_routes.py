"""Routes of the rows of a grouped op, from the ranks' counts: whole numbers only, no tensors.

Legend: ``counts[s][e]`` is how many rows rank s has for expert e; a rank's rows are sorted by expert.
``blocks[r]`` are the experts of rank r, (first, end): all of them where rows are gathered, its own where
they are exchanged. A *segment* is the rows of one expert from one source. A rank's results are in the
order (expert, source, row of the source), and so is its workspace.
"""

from dataclasses import dataclass
from functools import cached_property

from interlace.kernels.launch_formulas import Line, ceil_div
from interlace.kernels.tiling import chunks_of, prefix_sums


@dataclass(frozen=True)
class RouteSegment:
    """``rows`` rows that ``source`` has from ``first`` on and that go to row ``to`` of the result."""

    expert: int
    source: int
    first: int
    rows: int
    to: int


@dataclass(frozen=True)
class Routes:
    """The routes of one call, as all ranks see them. ``rank`` is this one."""

    rank: int
    counts: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[int, int], ...]

    @property
    def world_size(self) -> int:
        return len(self.counts)

    @cached_property
    def firsts(self) -> list[list[int]]:
        """Where the rows of an expert begin, by source and expert; the number of all rows last."""
        return [list(prefix_sums(each)) for each in self.counts]

    def block(self, source: int, rank: int) -> tuple[int, int]:
        """The rows of ``source`` that go to ``rank``: (first, rows)."""
        first, end = self.blocks[rank]
        begin = self.firsts[source][first]
        return begin, self.firsts[source][end] - begin

    def received(self, rank: int) -> int:
        return sum(self.block(source, rank)[1] for source in range(self.world_size))

    @cached_property
    def most_received(self) -> int:
        return max(self.received(rank) for rank in range(self.world_size))

    @cached_property
    def longest(self) -> int:
        return max(max(each) for each in self.counts)

    def offsets(self, rank: int) -> list[int]:
        """Where the segments of ``rank`` begin, by expert and source; the number of all rows last."""
        first, end = self.blocks[rank]
        return list(prefix_sums([each[e] for e in range(first, end) for each in self.counts]))

    def segments(self, rank: int) -> list[list[RouteSegment]]:
        """The segments that ``rank`` multiplies, by expert and source; experts count from its first one."""
        first, end = self.blocks[rank]
        offsets, world_size = self.offsets(rank), self.world_size
        return [
            [
                RouteSegment(
                    expert - first,
                    source,
                    self.firsts[source][expert],
                    self.counts[source][expert],
                    offsets[(expert - first) * world_size + source],
                )
                for source in range(world_size)
            ]
            for expert in range(first, end)
        ]

    @cached_property
    def mine(self) -> list[list[RouteSegment]]:
        return self.segments(self.rank)

    def expert_rows(self) -> list[tuple[int, int]]:
        """(first row, rows) of this rank's result, by expert."""
        return [(each[0].to, sum(segment.rows for segment in each)) for each in self.mine]

    def splits(self) -> list[list[int]]:
        """Rows of this rank's result by expert and source."""
        return [[segment.rows for segment in each] for each in self.mine]

    def own_segments(self) -> list[RouteSegment]:
        """The segments of rows that this rank has itself, by expert."""
        return [each[self.rank] for each in self.mine]

    # -- for the kernel ------------------------------------------------------------------------

    def chunk_rows(self, block_m: int, chunks: int) -> int:
        """Rows per chunk: whole tiles, and the longest segment in about ``chunks`` chunks."""
        return max(1, ceil_div(ceil_div(self.longest, block_m), chunks)) * block_m

    def slots(self, chunk_rows: int) -> int:
        """Signal slots that the rank with the most rows, or the most experts, needs."""
        experts = max(end - first for first, end in self.blocks)
        return experts * self.world_size + self.most_received // chunk_rows + 1

    def offset_lines(self) -> list[Line]:
        """``grouped_matmul_kernel``'s ``offsets``."""
        return [[self.block(self.rank, self.rank)[0]], self.offsets(self.rank)]

    def send_lines(self, chunk_rows: int) -> list[Line]:
        """Lines as of ``transfer.py``; to the next rank first, so that all send to different ones."""
        lines = []
        for step in range(1, self.world_size):
            peer = (self.rank + step) % self.world_size
            for expert in self.segments(peer):
                lines += self._chunk_lines(peer, expert[self.rank], chunk_rows)
        return lines

    def arrival_slots(self, chunk_rows: int) -> list[tuple[int, int]]:
        """(source, slot) of all that arrives, in the order of consumption."""
        return [
            (source, line[4])
            for source in self.sources[1:]
            for expert in self.mine
            for line in self._chunk_lines(self.rank, expert[source], chunk_rows)
        ]

    @property
    def sources(self) -> list[int]:
        """All ranks in the order in which their rows arrive: this one, then rank - 1 and so on."""
        return [(self.rank - step) % self.world_size for step in range(self.world_size)]

    def _chunk_lines(self, peer: int, segment: RouteSegment, chunk_rows: int) -> list[Line]:
        """The chunks of a segment of ``peer``'s: [peer, first row, rows, row of the result, slot]."""
        number = segment.expert * self.world_size + segment.source
        slot = number + segment.to // chunk_rows
        return [
            [peer, segment.first + first, rows, segment.to + first, slot + chunk]
            for chunk, (first, rows) in enumerate(chunks_of(segment.rows, chunk_rows))
        ]

    def tiles(self, block_m: int, chunk_rows: int, tiles_n: int) -> int:
        """The number of tiles that this rank computes."""
        return tiles_n * sum(
            ceil_div(rows, block_m)
            for expert in self.mine
            for segment in expert
            for _, rows in chunks_of(segment.rows, chunk_rows)
        )
