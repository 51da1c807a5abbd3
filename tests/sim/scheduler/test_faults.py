"""Failures: deadlock reports, exceptions of ranks, time limits, and waits that time out."""

import inspect
import re
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.kernels.arguments import Peers
from interlace.kernels.collectives import reduction
from interlace.kernels.signal import ABORT_WORD, CLAIMED_WORD, HEADER_WORDS, SPIN_LIMIT_WORD, wait
from interlace.runtime.places.sim.interpreter.session import program_function
from interlace.runtime.places.sim.scheduler.scheduler import Program, Scheduler
from support import failure


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# -- deadlocks ---------------------------------------------------------------------------------


def one_rank_skips() -> None:
    if interlace.get_rank() != 1:
        interlace.all_reduce(torch.ones(3))  # rank 1 never comes


def test_a_rank_that_skips_an_op_is_named() -> None:
    error = failure(one_rank_skips, 3)
    assert isinstance(error, interlace.DeadlockError)
    assert {wait.rank for wait in error.blocked} == {0, 2}
    line = line_of(one_rank_skips, "never comes")
    for blocked in error.blocked:
        assert blocked.waiting_for == "ranks [1] to call all_reduce"
        assert blocked.where == f"test_faults.py:{line}"
    text = str(error)
    assert "rank 1 has returned" in text and "seed 0" in text
    assert re.search(r"rank 0 user code waits for ranks \[1\] to call all_reduce", text)


@triton.jit
def publish_nothing(peers, slot_byte, epoch):
    pass


def test_a_producer_that_never_publishes_is_named() -> None:
    def on_rank() -> None:
        interlace.all_reduce(torch.ones(3), algorithm="kernel")

    with mock.patch.object(reduction, "publish_to_all", publish_nothing):
        error = failure(on_rank, 2)
    assert isinstance(error, interlace.DeadlockError)
    programs = [blocked for blocked in error.blocked if "program" in blocked.who]
    assert {blocked.rank for blocked in programs} == {0, 1}
    line = line_of(reduction.all_reduce_kernel.fn, " wait_sources(")
    for blocked in programs:
        assert (blocked.seen, blocked.expected) == (0, 1)
        assert blocked.who == "all_reduce_kernel program 0"
        assert re.fullmatch(r"slot at byte \d+ from rank 0", blocked.waiting_for)
        byte = int(re.findall(r"byte (\d+)", blocked.waiting_for)[0])
        assert byte == HEADER_WORDS * 8
        assert blocked.where == f"reduction.py:{line} in all_reduce_kernel"


def test_a_stream_that_waits_is_named() -> None:
    from interlace.runtime.places.sim.place import SimStream

    def on_rank() -> None:
        interlace.all_reduce(torch.ones(3), algorithm="copy")

    with mock.patch.object(SimStream, "publish", lambda self, workspace, peer, slot: None):
        error = failure(on_rank, 2)
    assert isinstance(error, interlace.DeadlockError)
    streams = [blocked for blocked in error.blocked if blocked.who == "stream compute"]
    assert [(b.rank, b.waiting_for, b.seen, b.expected) for b in streams] == [
        (0, "slot 1 from rank 1 in all_reduce", 0, 1),
        (1, "slot 0 from rank 0 in all_reduce", 0, 1),
    ]


def test_a_deadlock_is_the_same_again_from_its_seed() -> None:
    first, again = (failure(one_rank_skips, 3, seed=5) for _ in range(2))
    assert str(first) == str(again) and "seed 5" in str(first)


# -- exceptions of a rank ----------------------------------------------------------------------


class Strange(Exception):
    """An exception that cannot be made from one argument."""

    def __init__(self, first: int, *, second: int) -> None:
        self.first, self.second = first, second
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    "original",
    [ValueError("v"), KeyError("k"), ZeroDivisionError("z"), OSError(2, "no file"),
     Strange(1, second=2), StopIteration(3), UnicodeDecodeError("ascii", b"x", 0, 1, "why")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("slow", [False, True])
def test_an_exception_of_a_rank_reaches_the_caller(original: Exception, slow: bool) -> None:
    ended: list[int] = []

    def on_rank() -> None:
        if slow:
            interlace.all_reduce(torch.ones(2))
        if interlace.get_rank() == 1:
            raise original
        try:
            for _ in range(1000):
                interlace.barrier()
        finally:
            ended.append(interlace.get_rank())

    error = failure(on_rank, 3)
    assert isinstance(error, interlace.RankError)
    assert isinstance(error, type(original)) or isinstance(original, UnicodeDecodeError)
    assert error.rank == 1 and error.original is original and error.__cause__ is original
    assert str(error).startswith(f"rank 1: {type(original).__name__}")
    assert set(ended) <= {0, 2}
    assert interlace.run(interlace.get_rank, 2) == [0, 1], "the next run is not affected"


def test_other_ranks_end_even_if_they_catch_everything() -> None:
    def on_rank() -> None:
        if interlace.get_rank() == 0:
            raise ValueError("stop")
        while True:
            try:
                interlace.barrier()
            except Exception:
                continue

    assert isinstance(failure(on_rank, 3), ValueError)


def test_an_error_inside_a_stream_names_the_rank() -> None:
    from interlace.ops.collectives import launch as plain

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("in the sum")

    def on_rank() -> None:
        interlace.all_reduce(torch.ones(3), algorithm="copy")

    with mock.patch.object(plain, "fold", broken):
        error = failure(on_rank, 2)
    assert isinstance(error, ZeroDivisionError) and isinstance(error, interlace.RankError)


def test_a_run_that_does_not_end_is_given_up() -> None:
    def on_rank() -> None:
        while True:
            interlace.barrier()

    error = failure(on_rank, 2, timeout=0.3, seed=3)
    assert isinstance(error, interlace.CollectiveTimeoutError)
    assert "0.3 s" in str(error) and "seed 3" in str(error)


def test_a_run_inside_a_run_is_refused() -> None:
    error = failure(lambda: interlace.run(interlace.get_rank, 2), 2)
    assert isinstance(error, interlace.PlaceUnavailableError)


# -- the bounded wait itself -------------------------------------------------------------------


@triton.jit
def one_wait(peers, source, slot_byte, epoch, seen_ptr):
    seen = wait(peers, source, slot_byte, epoch)
    tl.store(seen_ptr, seen)


class Ranks:
    """Headers and slots of a few ranks, without a communicator."""

    def __init__(self, world: int, spin_limit: int) -> None:
        self.memory = [torch.zeros(HEADER_WORDS + 16, dtype=torch.int64) for _ in range(world)]
        self.peers = torch.tensor([memory.data_ptr() for memory in self.memory])
        for memory in self.memory:
            memory[SPIN_LIMIT_WORD] = spin_limit

    def run(self, kernel: Any, *, rank: int = 0, programs: int = 1, **arguments: Any) -> int:
        """Run a kernel, and return the number of steps of its schedule."""
        scheduler = Scheduler(0, block_polls=False, timeout=300)

        def launch() -> None:
            peers = Peers(self.peers, rank, len(self.memory))
            body = program_function(kernel, {"peers": peers, **arguments})
            for index in range(programs):
                program = Program(kernel.__name__, "test", index, (index, 0, 0), (programs, 1, 1))
                scheduler.spawn(rank, f"program {index}", body, program=program)

        scheduler.spawn(rank, "host", launch)
        scheduler.run()
        return scheduler.steps


SLOT_BYTE = 8 * (HEADER_WORDS + 3)


def test_a_wait_that_gives_up_says_for_whom_and_aborts_every_rank() -> None:
    ranks, seen = Ranks(3, spin_limit=200), torch.full((1,), -1)
    ranks.memory[1][HEADER_WORDS + 3] = 4
    ranks.run(one_wait, rank=1, source=2, slot_byte=SLOT_BYTE, epoch=7, seen_ptr=seen)
    assert seen.item() == 4
    record = ranks.memory[1][CLAIMED_WORD : CLAIMED_WORD + 6].tolist()
    assert record == [1, 2, SLOT_BYTE, 7, 4, 0], "claimed, source, slot, expected, seen, program"
    assert [int(memory[ABORT_WORD]) != 0 for memory in ranks.memory] == [True] * 3
    for rank in (0, 2):
        assert int(ranks.memory[rank][CLAIMED_WORD]) == 0, "only the rank that waited has a record"


def test_only_the_first_program_that_gives_up_writes_the_record() -> None:
    ranks, seen = Ranks(2, spin_limit=100), torch.full((1,), -1)
    ranks.run(one_wait, programs=4, source=1, slot_byte=SLOT_BYTE, epoch=1, seen_ptr=seen)
    record = ranks.memory[0][CLAIMED_WORD : CLAIMED_WORD + 6].tolist()
    assert record[:5] == [1, 1, SLOT_BYTE, 1, 0] and record[5] in range(4)


def test_a_wait_in_an_aborted_group_returns_soon_and_leaves_no_record() -> None:
    ranks, seen = Ranks(2, spin_limit=1_000_000), torch.full((1,), -1)
    ranks.memory[0][ABORT_WORD] = 1
    steps = ranks.run(one_wait, source=1, slot_byte=SLOT_BYTE, epoch=1, seen_ptr=seen)
    assert steps < 1000
    assert seen.item() == 0
    assert ranks.memory[0][CLAIMED_WORD + 1 : CLAIMED_WORD + 6].tolist() == [0] * 5


def test_the_limit_is_the_number_of_polls() -> None:
    polls = []
    for limit in (50, 100):
        ranks, seen = Ranks(1, spin_limit=limit), torch.full((1,), -1)
        polls.append(ranks.run(one_wait, source=0, slot_byte=SLOT_BYTE, epoch=1, seen_ptr=seen))
    assert 45 <= polls[1] - polls[0] <= 55
