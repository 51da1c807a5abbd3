"""The orders of rows, chunks and tiles are permutations that cover everything once."""

import torch
from hypothesis import given, strategies as st

from interlace.kernels import launch_formulas, tiling

WORLDS = st.integers(1, 16)
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=16)


@given(st.integers(0, 200), WORLDS)
def test_split_rows_is_torch_chunk(total: int, world: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(world)] if total else []
    parts = tiling.split_rows(total, world)
    assert [count for _, count in parts] == chunks + [0] * (world - len(chunks))
    covered = [row for first, count in parts for row in range(first, first + count)]
    assert covered == list(range(total))


@given(WORLDS, st.integers(0, 4))
def test_sends_reach_every_peer_once_and_never_the_same_at_once(world: int, chunks: int) -> None:
    orders = [tiling.send_order(rank, world, chunks) for rank in range(world)]
    for rank, order in enumerate(orders):
        peers = [peer for peer in range(world) if peer != rank]
        assert sorted(order) == sorted((chunk, peer) for chunk in range(chunks) for peer in peers)
    for step in zip(*orders, strict=True):
        assert len({peer for _, peer in step}) == world


@given(COUNTS, st.data())
def test_arrivals_are_all_chunks_own_first(counts: list[int], data: st.DataObject) -> None:
    world = len(counts)
    rank = data.draw(st.integers(0, world - 1))
    order = tiling.arrival_order(rank, world, counts)
    everything = [(source, chunk) for source in range(world) for chunk in range(counts[source])]
    assert sorted(order) == everything
    assert order[: counts[rank]] == [(rank, chunk) for chunk in range(counts[rank])]
    for source in range(world):
        chunks = [chunk for s, chunk in order if s == source]
        assert chunks == sorted(chunks), "a source's chunks arrive in the order they are sent"


@given(WORLDS, st.integers(1, 4))
def test_arrivals_follow_the_sends(world: int, chunks: int) -> None:
    """If all ranks send in step, a rank takes chunks in the order of their arrival."""
    orders = [tiling.send_order(rank, world, chunks) for rank in range(world)]
    for rank in range(world):
        arrived = [
            (source, chunk)
            for step in zip(*orders, strict=True)
            for source, (chunk, peer) in enumerate(step)
            if peer == rank
        ]
        assert tiling.arrival_order(rank, world, [chunks] * world)[chunks:] == arrived


@given(WORLDS)
def test_owners_are_all_ranks_own_last(world: int) -> None:
    orders = [tiling.owner_order(rank, world) for rank in range(world)]
    for rank, order in enumerate(orders):
        assert sorted(order) == list(range(world))
        assert order[-1] == rank
    for step in zip(*orders, strict=True):
        assert len(set(step)) == world


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_grouped_tiles_are_a_permutation(tiles_m: int, tiles_n: int, group: int) -> None:
    order = [
        tiling.grouped_tile.fn(index, tiles_m, tiles_n, group) for index in range(tiles_m * tiles_n)
    ]
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    bands = [m // group for m, _ in order]
    assert bands == sorted(bands), "a band is finished before the next one starts"


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.integers(1, 5), st.data()
)
def test_lines_of_chunks_cover_all_rows_and_number_all_tiles(
    rows: list[int], chunks: int, data: st.DataObject
) -> None:
    """The rank's shard is first, as one chunk, because its tiles wait for nothing."""
    world, block_m, tiles_n = len(rows), 8, 3
    rank = data.draw(st.integers(0, world - 1))
    size = launch_formulas.chunk_rows(rows, block_m, chunks)
    lines = launch_formulas.chunk_lines(rank, world, rows, size, block_m, tiles_n)
    assert [line[:3] for line in lines if line[0] == rank] == [[rank, 0, rows[rank]]] * bool(
        rows[rank]
    )
    assert not rows[rank] or lines[0][0] == rank
    covered = sorted(row for _, _, count, to, *_ in lines for row in range(to, to + count))
    assert covered == list(range(sum(rows)))
    for source, first, _, to, slot, _ in lines:
        assert to == sum(rows[:source]) + first
        here = launch_formulas.chunk_slots(rows[:source], size) + first // size
        assert source == rank or slot == here
    tiles = [launch_formulas.ceil_div(line[2], block_m) * tiles_n for line in lines]
    assert [line[5] for line in lines] == tiling.prefix_sums(tiles)[:-1]
