"""Workspaces: what a lease holds, when memory is allocated, and that slots and data never overlap."""

from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace.groups.groups import default_group
from interlace.kernels.signal import EPOCH_WORD, HEADER_WORDS
from interlace.runtime.core.memory import DATA_ALIGNMENT, WORD, Arena, Layout, SymmetricBuffer
from interlace.runtime.places.sim.place import SimPlace
from ranks import ranks
from stand_ins.replaced import replaced

SIZES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 300_000)), min_size=1, max_size=12)


def allocate(nbytes: int) -> SymmetricBuffer:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return SymmetricBuffer(0, nbytes, torch.tensor([memory.data_ptr()]), [memory])


@given(SIZES)
def test_leases_hold_what_was_asked_and_regions_never_overlap(sizes: list[tuple[int, int]]) -> None:
    arena = Arena(allocate, 4)
    for turn, (slots, nbytes) in enumerate(sizes):
        layout = Layout(slots, nbytes)
        lease = arena.lease(layout, "op")
        assert lease.channel == turn % 2
        assert lease.slot_offset == HEADER_WORDS * WORD
        assert lease.slot_byte(slots) <= lease.data_offset
        assert lease.data_offset + nbytes <= lease.buffer.nbytes
        assert lease.data_offset % DATA_ALIGNMENT == 0
        lease.slots(0, 0, slots).fill_(-1)
        lease.data(0, 0, (nbytes,), torch.uint8).fill_(7)
        assert bool((lease.slots(0, 0, slots) == -1).all())
        assert int(lease.header(0)[EPOCH_WORD]) == 0


def test_sizes_double_so_outgrown_buffers_stay_small() -> None:
    arena = Arena(allocate, 2, channels=1)
    for nbytes in range(0, 1 << 22, 50_000):
        arena.lease(Layout(1, nbytes), "op")
    (current,) = arena.buffers()
    assert arena.nbytes < 2 * current.nbytes
    arena.close()
    assert arena.nbytes == 0


def test_layout_aligns_data() -> None:
    layout = Layout()
    assert [layout.add_data(1), layout.add_data(300), layout.add_data(1)] == [0, 256, 768]
    assert [layout.add_slots(3), layout.add_slots(1)] == [0, 3]


def test_views_outside_the_buffer_are_refused() -> None:
    buffer = allocate(64)
    with pytest.raises(AssertionError):
        buffer.view(0, 60, (2,), torch.float32)


def one_of_each() -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    interlace.all_gather_matmul(torch.ones(rank + 1, 8), torch.ones(8, 4))
    interlace.matmul_reduce_scatter(torch.ones(5, 8), torch.ones(8, 4))
    interlace.all_gather(torch.empty(world * 3), torch.ones(3), algorithm="kernel")
    interlace.all_gather(torch.empty(world * 3), torch.ones(3), algorithm="copy")
    interlace.all_reduce(torch.ones(7), algorithm="kernel")


def test_no_allocation_and_no_zeroing_after_the_first_calls() -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, function: object) -> object:
        def wrapper(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return function(*args, **kwargs)  # type: ignore[operator]

        return wrapper

    def on_rank() -> list[int]:
        # odd and even turns, so that every op has met both channels
        for _ in range(2):
            one_of_each()
        interlace.barrier()
        before = sum(calls.values())
        held = default_group().workspace_bytes
        tables = len(default_group().tables.lasting)
        for _ in range(4):
            one_of_each()
        assert default_group().workspace_bytes == held
        assert len(default_group().tables.lasting) == tables
        interlace.barrier()
        return [before, sum(calls.values())]

    places = ((SimPlace, "allocate"), (torch, "zeros"), (torch.Tensor, "zero_"))
    counting = [(owner, name, counted(name, getattr(owner, name))) for owner, name in places]
    with replaced(*counting):
        results = interlace.run(on_rank, 2)
    assert calls["allocate"] == 4, "two channels on each of two ranks"
    for before, after in results:
        assert before == after == sum(calls.values())


@ranks(2, place="sim")
def test_a_larger_shape_grows_both_channels_once() -> None:
    held = []
    for elements in (10, 10, 100_000, 100_000, 10, 100_000):
        interlace.all_reduce(torch.ones(elements), algorithm="copy")
        held.append(default_group().workspace_bytes)
    assert held == sorted(held)
    assert held[1] < held[3] == held[5]


@ranks(2, place="sim")
def test_a_closed_group_refuses() -> None:
    group = interlace.new_group()
    assert group is not None
    group.close()
    group.close()
    with pytest.raises(interlace.InterlaceError, match=r"rank \d: all_reduce .*closed"):
        interlace.all_reduce(torch.ones(1), group=group)
