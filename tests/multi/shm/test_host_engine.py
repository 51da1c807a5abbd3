"""The engine of processes on one host, below the API: every op, size class and way of failing.

And what it decides by the machine: thresholds by its caches, ways of writing by measuring.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.places.shm.caches import (
    AGAIN,
    FIRST,
    SOON,
    UNKNOWN,
    Caches,
    RingWrites,
    Thresholds,
    WriteChoice,
    caches,
)
from multi.shm import engine_ranks, steps_ranks
from tiers import few


def run(fn: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(fn, world_size, *args, place="shm")


@pytest.mark.parametrize(
    ("fn", "world_size"),
    few(
        itertools.product(
            (engine_ranks.moving, engine_ranks.uneven, engine_ranks.reducing), (1, 2, 3)
        ),
        (engine_ranks.moving, 1),
        (engine_ranks.uneven, 3),
        (engine_ranks.reducing, 2),
    ),
)
def test_every_op_in_every_size(fn: Any, world_size: int) -> None:
    assert run(fn, world_size) == [[]] * world_size


@pytest.mark.parametrize(
    "way", few(["through", "past", "differently", "measured"], "past", "differently")
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_writing_into_rings(world_size: int, way: str) -> None:
    assert run(engine_ranks.many_rounds, world_size, way) == [[]] * world_size


def chosen(choice: WriteChoice, ops: int, through: float, past: float) -> list[bool]:
    """What is chosen in so many ops, of which each takes as long as this."""
    ways = []
    for _ in range(ops):
        ways.append(choice.past())
        choice.took(ways[-1], past if ways[-1] else through)
    return ways


@pytest.mark.parametrize("best", [False, True])
def test_the_faster_way_of_writing_is_chosen(best: bool) -> None:
    times = (2e-6, 1e-6) if best else (1e-6, 2e-6)
    choice = WriteChoice()
    ways = chosen(choice, 2 * AGAIN, *times)
    tried = len(FIRST) // 2
    assert ways[: len(FIRST)].count(best) == tried
    assert [n for n, way in enumerate(ways) if way != best][tried:] == [AGAIN]
    changed = chosen(choice, 2 * AGAIN, *times[::-1])  # the ranks have moved
    assert changed.count(best) <= 4
    both = [2 * each for each in times[::-1]]  # slower, but the order is the same
    assert chosen(choice, AGAIN, *both).count(best) == 2


def test_a_way_that_became_faster_is_found_though_the_other_did_not_change() -> None:
    choice = WriteChoice()
    chosen(choice, AGAIN - 3, 8.0, 3.7)
    assert chosen(choice, 10, 3.0, 3.7)[-1] is False


def test_a_single_slow_op_changes_nothing() -> None:
    choice = WriteChoice()
    chosen(choice, SOON - 1, 2.0, 1.0)
    choice.took(True, 50.0)
    assert chosen(choice, SOON, 2.0, 1.0) == [True] * SOON


def test_a_clock_that_stands_still_is_no_error() -> None:
    assert chosen(WriteChoice(), 2 * AGAIN, 0.0, 0.0).count(True) < AGAIN


def test_the_last_rank_decides_how_all_write() -> None:
    table = bytearray(64)
    first, last = RingWrites(table, decides=False), RingWrites(table, decides=True)
    times = {
        ("a", 3): (1.0, 2.0),
        ("a", 40): (2.0, 1.0),
        ("b", 3): (2.0, 1.0),
        ("b", 2): (4 / 3, 2 / 3),
    }
    for _ in range(SOON):
        for (op, count), both in times.items():
            past = first.past(op, count)
            assert past == last.past(op, count)
            first.took(op, count, not past, 99.0)
            last.took(op, count, past, both[past])
    found = {key: first.past(*key) for key in times}
    assert found == {("a", 3): False, ("a", 40): True, ("b", 3): True, ("b", 2): True}


def test_a_failure_in_the_middle_of_an_op_ends_the_group() -> None:
    others, own = run(engine_ranks.failing_in_the_middle, 2)
    assert own == "RuntimeError: all_reduce failed while data moved: odd"
    assert others.startswith("AbortedError: rank 1 aborted the group: all_reduce failed")


def test_a_death_is_told_to_those_who_wait_for_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(interlace.InterlaceError):
        interlace.run(engine_ranks.killed_in_broadcast, 3, str(tmp_path), place="shm")
    for rank in (0, 1):
        assert (tmp_path / str(rank)).read_text().startswith("PeerDiedError: rank 2 ")


def test_many_ranks() -> None:
    assert run(engine_ranks.uneven, 5) == [[]] * 5


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_in_symmetric_memory_are_not_staged(world_size: int) -> None:
    assert run(engine_ranks.in_shared_memory, world_size) == [[]] * world_size


def test_symmetric_memory_that_one_rank_has_dropped() -> None:
    assert run(engine_ranks.shared_memory_that_is_gone, 3) == [[]] * 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_areas_and_slots_are_used_again(world_size: int) -> None:
    assert run(engine_ranks.mixed, world_size, 60) == [[]] * world_size


@pytest.mark.parametrize("large", [False, True])
def test_a_difference_is_told_before_a_byte_moves(large: bool) -> None:
    texts = run(engine_ranks.differing, 3, large)
    assert len(set(texts)) == 1
    n = 200_000 if large else 4
    assert texts[0] == (
        f"all_reduce: shape of tensor differs between ranks: ({n},) on rank 0, ({n + 1},) on rank 1"
    )


@pytest.mark.parametrize("nbytes", [400, 4_000_000])
def test_messages_that_differ_and_fit_are_summed(nbytes: int) -> None:
    assert run(engine_ranks.fitting, 3, nbytes) == [[3.0] * 8] * 3


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_000])
def test_messages_in_any_order_of_tags(nbytes: int) -> None:
    assert run(engine_ranks.mail, 3, nbytes) == [[]] * 3


def test_messages_move_while_nobody_waits() -> None:
    assert run(engine_ranks.mail_in_background, 2, 3_000_000) == [True, True]


def test_messages_from_anyone() -> None:
    sources = run(engine_ranks.mail_from_anyone, 3, 20)[0]
    assert sorted(sources) == [1] * 20 + [2] * 20


def test_who_has_left_need_not_send() -> None:
    assert run(engine_ranks.mail_from_the_last_one, 3)[0] == [1, 2]


@pytest.mark.parametrize(
    ("dtype", "elements", "said"),
    [
        (torch.int32, 4, "TypeError: recv: dtype of tensor differs between ranks: torch.int32"),
        (torch.float32, 5, "ValueError: recv: number of elements differs between ranks: 4 were"),
    ],
)
def test_a_message_that_does_not_fit(dtype: torch.dtype, elements: int, said: str) -> None:
    sender, receiver = run(engine_ranks.mail_of_other, 2, dtype, elements)
    assert sender == receiver and receiver.startswith(said)


def test_a_message_that_never_comes() -> None:
    text = run(engine_ranks.mail_never_sent, 2)[0]
    assert "rank 1 has left the group" in text


def test_a_rank_that_waits_leaves_its_core_to_others() -> None:
    assert run(engine_ranks.sleeps, 2) == [None, None]


def core(folder: Path, number: int, *found: tuple[str, int, str, str]) -> None:
    """A core's caches as Linux describes them: type, level, size and the cores that share it."""
    for index, values in enumerate(found):
        place = folder / f"cpu{number}/cache/index{index}"
        place.mkdir(parents=True)
        for name, value in zip(("type", "level", "size", "shared_cpu_list"), values, strict=True):
            (place / name).write_text(f"{value}\n")


def two_complexes(folder: Path) -> None:
    """Cores 0 to 3 share 16 MiB, cores 4 to 7 another 16 MiB; each has 512 KiB, core 4 has 1 MiB."""
    for number in range(8):
        shared, second = "0-3" if number < 4 else "4,5-7", "1M" if number == 4 else "512K"
        own = str(number)
        core(folder, number, ("Data", 1, "32K", own), ("Instruction", 1, "64K", own),
             ("Unified", 2, second, own), ("Unified", 3, "16384K", shared))  # fmt: skip


@pytest.mark.parametrize(
    ("cores", "second", "last"),
    [
        (range(8), 512, 32 << 10),
        ([1, 2], 512, 16 << 10),
        ([4], 1024, 16 << 10),
        ([3, 4], 512, 32 << 10),
    ],
)
def test_caches_of_the_cores_that_are_used(
    tmp_path: Path, cores: list[int], second: int, last: int
) -> None:
    two_complexes(tmp_path)
    assert caches(cores, tmp_path) == (second << 10, last << 10)


def test_a_machine_without_a_third_level(tmp_path: Path) -> None:
    for number in (0, 1):
        core(tmp_path, number, ("Data", 1, "32K", str(number)), ("Unified", 2, "2M", "0-1"))
    assert caches([0, 1], tmp_path) == (2 << 20, 2 << 20)


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert caches([0, 1], tmp_path) == UNKNOWN
    core(tmp_path, 0, ("Unified", 2, "unknown", "0"), ("Unified", 3, "0K", "0"))
    assert caches([0], tmp_path) == UNKNOWN


def test_sizes_follow_from_the_caches() -> None:
    small, large = (Thresholds.of(Caches(1 << 20, 32 << 20), ranks) for ranks in (4, 2))
    assert small == (256 << 10, 1 << 20, 1 << 20, 2 << 20, 4 << 20)
    assert large == (256 << 10, 1 << 20, 1 << 20, 4 << 20, 8 << 20)
    assert Thresholds.of(Caches(2 << 20, 32 << 20), 64)[:4] == (
        512 << 10,
        2 << 20,
        2 << 20,
        2 << 20,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_see_other_caches_take_the_last_ones_sizes(world_size: int) -> None:
    assert interlace.run(steps_ranks.other_caches, world_size, place="shm") == [[]] * world_size
