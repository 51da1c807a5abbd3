"""Routes of the rows of a grouped op, from the ranks' counts: whole numbers only, no tensors.

Legend: ``counts[s][e]`` is how many rows rank s has for expert e; a rank's rows are sorted by expert.
``blocks[r]`` are the experts of rank r, (first, end): all of them where rows are gathered, its own where
they are exchanged. A *segment* is the rows of one expert from one source. A rank's results are in the
order (expert, source, row of the source), and so is its workspace.
"""

from dataclasses import dataclass
from functools import cached_property

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.launch_formulas import Line
from interlace.kernels.tiling import prefix_sums


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

    @cached_property
    def _splits(self) -> tuple[int, list[int], int]:
        """As ``launch_formulas.py`` has them: ranks, their rows by expert, experts of a rank."""
        first, end = self.blocks[0]
        return self.world_size, [rows for each in self.counts for rows in each], end - first

    def offsets(self, rank: int) -> list[int]:
        return formulas.expert_offsets(rank, *self._splits)

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
        return formulas.chunk_rows([max(1, self.longest)], block_m, chunks)

    def slots(self, chunk_rows: int) -> int:
        """Signal slots that the rank with the most rows, or the most experts, needs."""
        return self._splits[2] * self.world_size + self.most_received // chunk_rows + 1

    def segment_lines(self) -> list[Line]:
        return formulas.expert_segment_lines(self.rank, *self._splits)

    def send_lines(self, chunk_rows: int) -> list[Line]:
        return formulas.expert_send_lines(self.rank, *self._splits, chunk_rows)

    def arrival_slots(self, chunk_rows: int) -> list[tuple[int, int]]:
        """(source, slot) of all that arrives, in the order of consumption."""
        return [
            (source, line[4])
            for source in self.sources[1:]
            for line in formulas.expert_send_lines(source, *self._splits, chunk_rows)
            if line[0] == self.rank
        ]

    @property
    def sources(self) -> list[int]:
        """All ranks in the order in which their rows arrive: this one, then rank - 1 and so on."""
        return [(self.rank - step) % self.world_size for step in range(self.world_size)]

    def tiles(self, block_m: int, tiles_n: int) -> int:
        """The number of tiles that this rank computes."""
        rows = [segment.rows for expert in self.mine for segment in expert]
        return formulas.tiles_of(rows, block_m, tiles_n)
