"""The engine of processes on one host, below the API: every op, size class and way of failing."""

import gc
import itertools
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import interlace
from interlace.groups import groups
from interlace.runtime.core.call import Call
from interlace.runtime.places.shm import message_steps, rounds as host_rounds
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
from interlace.runtime.places.shm.machine_code import available
from interlace.runtime.processes.control import SMALL_DATA
from multi.shm.host_ops import (
    DTYPES,
    MEDIUM_DATA,
    MOVED_PARTS,
    OPS,
    REDUCED,
    SLOT_BYTES,
    check,
    check_lengths,
    data,
    engine,
    make_ring,
    rounds_of,
    same,
)
from ranks import ranks
from tiers import few

EVERY_DTYPE = (
    *DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint64, torch.complex64
)  # fmt: skip
"""Also those that steps do not reduce."""


def sizes(op: str, world_size: int) -> list[int]:
    """Return sizes around each change of the data's way; all are multiples of 8."""
    small, medium = SMALL_DATA, MEDIUM_DATA
    if op in ("reduce_scatter", *MOVED_PARTS):
        small, medium = (limit // world_size & ~63 for limit in (small, medium))
    edges = [small, medium, *(rounds_of(op, world_size, n) for n in (1, 2))]
    around = [edge + more for edge in edges for more in (-8, 0, 8)]
    return [0, 8, 24, *around, rounds_of(op, world_size, 5) - 8]


@pytest.mark.parametrize(
    ("world_size", "which"),
    few(
        [
            *[(1, "none"), (2, "all"), (2, "odd"), (2, "none"), (3, "all"), (3, "first")],
            *[(3, "none"), (4, "all"), (4, "odd")],
        ],
        (2, "odd"),
    ),
)
@ranks()
def test_every_op_in_every_size(world_size: int, which: str) -> None:
    """The order is random, some ranks are late, and ``which`` ranks use machine code."""
    rank = interlace.get_rank()
    has_steps = {"all": True, "none": False, "odd": rank % 2 == 1, "first": rank == 0}[which]
    with engine(has_steps and available()) as e:
        jobs = [(op, nbytes) for op in OPS for nbytes in sizes(op, world_size)]
        jobs += [("barrier", 0)] * 5
        generator = random.Random(world_size)
        order = 2 * jobs  # the second time the steps are there
        generator.shuffle(order)
        make_ring(e)
        for key, (op, nbytes) in enumerate(order):
            reduction = generator.choice(("sum", "sum", "avg", "max", "product"))
            dtype = generator.choice(EVERY_DTYPE)
            if generator.random() < 0.1 and rank == generator.randrange(world_size):
                time.sleep(0.001)
            if op == "barrier":
                e.barrier(Call("barrier"))
            else:
                if op not in REDUCED or (reduction == "max" and dtype.is_complex):
                    reduction = "sum"
                check(e, op, nbytes, key, dtype, reduction)


@pytest.mark.parametrize("world_size", few([1, 2, 3, 5], 3))
@ranks()
def test_lengths_that_differ_by_rank_and_pair(world_size: int) -> None:
    check_lengths(groups.default_group().engine, [0, 1, 70_000, 3_000_000])


@pytest.mark.parametrize(
    ("world_size", "way"),
    few(
        [(2, "through"), (2, "past"), (3, "differently"), (3, "measured")],
        (2, "past"),
        (3, "differently"),
    ),
)
@ranks()
def test_writing_into_rings(world_size: int, way: str) -> None:
    used: set[bool] = set()
    one = {"through": False, "past": True, "differently": interlace.get_rank() % 2 == 1}
    choose = RingWrites.past

    def past(self: RingWrites, op: str, count: int) -> bool:
        chosen = one[way] if way in one else choose(self, op, count)
        used.add(chosen)
        return chosen

    with engine(available()) as e, mock.patch.object(RingWrites, "past", past):
        for turn in range(8 if way == "measured" else 2):
            for op, reduction in itertools.product(OPS, ("sum", "max")):
                if reduction == "sum" or op in REDUCED:
                    nbytes = rounds_of(op, world_size, 6) + 8
                    check(e, op, nbytes, turn, reduction=reduction)
    if available():
        assert used == ({one[way]} if way in one else {False, True})


# -- failing ---------------------------------------------------------------------------------------


@ranks(2)
def test_a_failure_in_the_middle_of_an_op_ends_the_group() -> None:
    """Before data moves, the same error would be raised on all ranks and the group would continue."""
    tensor = torch.ones(1 << 20)
    interlace.all_reduce(tensor, op="max")
    if interlace.get_rank() == 1:
        odd = mock.patch.object(message_steps, "fold", side_effect=ValueError("odd"))
        with odd, pytest.raises(RuntimeError, match="all_reduce failed while data moved: odd"):
            interlace.all_reduce(tensor, op="max")
    else:
        said = "^rank 1 aborted the group: all_reduce failed"
        with pytest.raises(interlace.AbortedError, match=said):
            interlace.all_reduce(tensor, op="max")


@pytest.mark.parametrize(
    ("op", "nbytes"),
    [("broadcast", 64 << 20), *[("all_reduce", nbytes) for nbytes in (16, 40 << 20)]],
)
@ranks(3, gone=[2])
def test_a_death_is_told_to_those_who_wait_for_somebody_else(
    op: str, nbytes: int, tmp_path: Path
) -> None:
    """In a broadcast rank 1 waits only for rank 0, but the error names rank 2."""
    with engine(available()) as e:
        make_ring(e)
        if e.rank == 2:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        with pytest.raises(interlace.PeerDiedError, match=r"^rank 2 "):
            while True:
                if op == "broadcast":
                    e.broadcast(Call(op), tensor, 0)
                else:
                    e.all_reduce(Call(op), tensor, "sum")
        (tmp_path / str(e.rank)).touch()
        while not all((tmp_path / str(rank)).exists() for rank in (0, 1)):
            time.sleep(0.005)  # lives on: nobody learns it from this one's end


@pytest.mark.parametrize(
    ("world_size", "with_steps"),
    few([(2, True), (2, False), (3, True), (3, False)], (2, True), (3, False)),
)
@ranks()
def test_a_difference_is_told_on_all_ranks_and_the_group_goes_on(
    world_size: int, with_steps: bool
) -> None:
    with engine(with_steps and available()) as e:
        make_ring(e)
        section = SLOT_BYTES // world_size
        lengths = [
            (4, 5), (4, 100_000), (100_000, 4), (100_000, 100_001), (1 << 20, 4), (4, 1 << 20),
            (2 * section, 30 * section), (30 * section, 2 * section), (30 * section, 31 * section),
        ]  # fmt: skip
        for number, (most, one) in enumerate(lengths):
            odd = number % world_size
            tensor = torch.ones(one if e.rank == odd else most)
            shapes = [f"({one if rank == odd else most},) on rank {rank}" for rank in (0, odd or 1)]
            with pytest.raises(ValueError) as caught:
                interlace.all_reduce(tensor)
            said = f"all_reduce: shape of tensor differs between ranks: {', '.join(shapes)}"
            assert str(caught.value) == said
            assert (tensor == 1).all()
            check(e, "all_reduce", rounds_of("all_reduce", world_size, 5), number, torch.float32)
            check(e, "broadcast", 2 * SLOT_BYTES, number, torch.float32)
        said = "ranks call different ops at the same time: rank 0 calls barrier, rank 1 calls all_g"
        with pytest.raises(ValueError, match=said):
            if e.rank:
                interlace.all_gather(torch.zeros(world_size), torch.zeros(1))
            else:
                interlace.barrier()
        check(e, "all_to_all", 64, 1, torch.float32)


@ranks(3)
def test_messages_that_differ_and_fit_are_summed() -> None:
    e = groups.default_group().engine
    for count, op in itertools.product(
        (100, 100, 1_000_000, 1_000_000), ("all_reduce", "reduce_scatter")
    ):
        check(e, op, 4 * count, 0, torch.float32, part=e.rank)


# -- symmetric memory ------------------------------------------------------------------------------


@ranks(3)
def test_tensors_in_symmetric_memory_are_not_staged() -> None:
    rank, world_size, n = interlace.get_rank(), 3, 60_000
    shared = interlace.symmetric_memory.empty(world_size * n)
    interlace.symmetric_memory.rendezvous(shared)

    def check_with(memory: torch.Tensor, op: str, key: int) -> None:
        e.barrier(Call("barrier"))  # others may have read it until now
        nbytes = 4 * n * (world_size if op in ("all_reduce", "broadcast") else 1)
        check(e, op, nbytes, key, torch.float32, memory=memory)

    with engine(available()) as e:
        ops = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all")
        for key, op in itertools.product((1, 2, 3, 4), ops):
            check_with(shared, op, key)
            shared.zero_()  # whoever left the op early would see this
        assert not e._rounds._rings
        e.barrier(Call("barrier"))
        parts = list(shared.fill_(rank).split(n))
        e.all_to_all(Call("all_to_all"), parts, parts)  # its outputs are what peers would read
        for peer, part in enumerate(parts):
            assert (part == peer).all()
        check_with(shared if rank else shared.clone(), "all_reduce", 5)


@ranks(3)
def test_symmetric_memory_that_one_rank_has_dropped() -> None:
    tensor = interlace.symmetric_memory.empty(100_000)
    interlace.symmetric_memory.rendezvous(tensor)
    if interlace.get_rank() == 0:
        del tensor
        gc.collect()
        tensor = torch.empty(100_000)
    interlace.all_reduce(tensor.fill_(1.0))
    assert (tensor == 3).all()


# -- messages --------------------------------------------------------------------------------------


@ranks(2)
def test_messages_move_while_nobody_waits() -> None:
    """Rank 0 sends more than a box holds and never waits, so the thread must move the data."""
    e, nbytes = groups.default_group().engine, 3_000_000
    if e.rank == 0:
        sent = e.send(Call("send"), data(0, nbytes, 0), 1, 0)
        e.barrier(Call("barrier"))
        assert sent.result(300).event is None
    else:
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        e.recv(Call("recv"), buffer, 0, 0).result(300)
        e.barrier(Call("barrier"))
        assert same(buffer, data(0, nbytes, 0))


@ranks(3)
def test_who_has_left_need_not_send() -> None:
    e = groups.default_group().engine
    if e.rank:
        time.sleep(0.5 if e.rank == 2 else 0)
        e.send(Call("send"), torch.tensor([e.rank]), 0, 5).result(300)
        return
    for source in (1, 2):
        buffer = torch.zeros(1, dtype=torch.int64)
        outcome = e.recv(Call("recv"), buffer, None, 5).result(300)
        assert outcome.source is not None and outcome.source() == source == buffer.item()


@ranks(2)
def test_a_rank_that_waits_leaves_its_core_to_others() -> None:
    """Rank 1 calls after rank 0 has slept some number of times: a rank that spins never sleeps."""
    interlace.barrier()
    if interlace.get_rank() == 1:
        status = Path(f"/proc/{groups.default_group().place.group.pids[0]}/status")

        def slept() -> int:
            return int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        enough = slept() + 50
        while slept() < enough:
            time.sleep(0.001)
    interlace.barrier()


# -- decisions by the machine ----------------------------------------------------------------------


def chosen(choice: WriteChoice, ops: int, through: float, past: float) -> list[bool]:
    """Return the choices of this many ops that take these times."""
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


def core(folder: Path, number: int, *found: tuple[str, int, str, str]) -> None:
    """Write a core's caches as Linux describes them: type, level, size and the cores that share it."""
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


def test_machines_without_a_third_level_or_that_do_not_say(tmp_path: Path) -> None:
    assert caches([0, 1], tmp_path) == UNKNOWN
    for number in (0, 1):
        core(tmp_path, number, ("Data", 1, "32K", str(number)), ("Unified", 2, "2M", "0-1"))
    assert caches([0, 1], tmp_path) == (2 << 20, 2 << 20)
    core(tmp_path, 2, ("Unified", 2, "unknown", "2"), ("Unified", 3, "0K", "2"))
    assert caches([2], tmp_path) == UNKNOWN


@ranks(3)
def test_ranks_that_see_other_caches_take_the_last_ones_sizes() -> None:
    world_size = interlace.get_world_size()
    seen = [Caches((256 << 10) << peer, 32 << 20) for peer in range(world_size)]
    taken = [Thresholds.of(each, world_size) for each in seen]
    own = seen[interlace.get_rank()]
    with engine(available()) as e, mock.patch.object(host_rounds, "own_caches", lambda: own):
        check(e, "all_gather", 1 << 20)  # opens the rings
        assert e._steps.sizes == taken[-1]
        edges = sorted({size for each in taken for size in each[:3]})
        for op, edge in itertools.product(("all_reduce", "all_gather", "scatter"), edges):
            check(e, op, edge + 8)
