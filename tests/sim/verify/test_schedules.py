"""``interlace.verify.schedules``: it finds, shrinks and replays; weak memory; deadlock reports."""

import copy
import gc
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

import interlace
from interlace import symmetric_memory
from interlace.runtime.compat.triton_interpreter import TensorHandle
from interlace.runtime.places.sim.scheduler import program_hooks
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.store_buffers import StoreBuffers
from interlace.runtime.places.sim.scheduler.strategies import (
    Priority,
    Random,
    Task,
    for_seed,
)
from interlace.verify import ScheduleReport, VerificationError, check, races, replay, schedules
from interlace_verify.race_check import check as race_check
from interlace_verify.schedule_check import check as schedule_check
from interlace_verify.schedule_check.check import digest_of
from sim.verify import memory_kernels, race_kernels as kernels
from sim.verify.test_races import buffer, launch
from sim.verify.user_exchange import exchange, exchange_kernel, last_program
from tiers import few


def test_right_kernels_pass_with_and_without_late_stores() -> None:
    for late in (False, True):
        for fn in (exchange, last_program):
            report = schedules(fn, 2, n=15, store_buffers=late, workers=1)
            assert report.clean and report.schedules == 15 and report.failure is None
            assert "none fails" in str(report)


def test_late_stores_do_not_depend_on_where_memory_lies() -> None:
    """A load of two words makes no store visible that lies between them."""
    data, late = np.zeros(3, np.int64), StoreBuffers(0, Observer())
    first, middle, last = (data.ctypes.data + 8 * each for each in range(3))

    def pointers(*addresses: int) -> Any:
        return TensorHandle(np.array(addresses, np.uint64), tl.pointer_type(tl.int64))

    task = Task(0, "program 0", "program 0", None)
    late.store(task, pointers(middle), TensorHandle(np.array([7]), tl.int64), None)
    late.before_load(task, pointers(first, last))
    assert data[1] == 0
    late.before_load(task, pointers(first, middle))
    assert data[1] == 7


def test_a_failure_is_found_shrunk_told_and_replayed() -> None:
    report = schedules(exchange, 2, 2, n=12, workers=1)
    failure = report.failure
    assert failure is not None and not report.clean
    assert failure.seed == report.failing[0] and failure.kind == "RankAssertionError"
    assert failure.switches < failure.found_switches
    assert "wrong sum on rank" in failure.text and f"seed {failure.seed} fails" in str(report)
    stores = [line for line in failure.story if "stores 16 elements at symmetric buffer 0" in line]
    assert stores and all("[user_exchange.py:" in line for line in stores)
    for _ in range(2):
        with pytest.raises(AssertionError, match="wrong sum"):
            replay(exchange, 2, failure.segments, 2, seed=failure.seed)


def test_a_step_in_a_function_of_interlace_has_the_lines_that_called_it() -> None:
    report = schedules(launch(kernels.raises_a_flag), 1, n=1, workers=1, check=lambda _: 1 / 0)
    assert report.failure is not None
    (swap, *others) = (line for line in report.failure.story if line.startswith("    cas "))
    chain = r"\[signal\.py:\d+ in put_flag, called from race_kernels\.py:\d+ in raises_a_flag\]"
    assert len(others) == 1 and re.search(chain, swap), swap


def test_an_exception_without_a_message_is_named() -> None:
    failure = schedules(sys.exit, 1, n=1).failure
    assert failure is not None and failure.text == "rank 0: SystemExit without a message"


def exchanged(kernel: Any, *how: str) -> list[float]:
    memory, rank = buffer(), interlace.get_rank()
    kernel[(2,)](memory.peers, rank, *how)
    interlace.barrier()
    return memory.view(2, 64, (16,), torch.float32).tolist()


@pytest.mark.parametrize(
    "how", [("block", "relaxed", "relaxed"), ("volatile", "volatile", "volatile")]
)
def test_late_stores_show_what_a_cpu_hides(how: tuple[str, ...]) -> None:
    assert schedules(launch(kernels.passed, *how), 3, n=30, workers=1).clean
    given = exchanged, 3, kernels.passed, *how
    assert schedules(*given, n=30, workers=1).clean
    late = schedules(*given, n=30, store_buffers=True, workers=1)
    assert len(late.failing) > 3
    assert late.failure is not None and late.failure.kind == "different results"


@pytest.mark.parametrize(
    "how",
    [
        (kernels.passed, "block", "relaxed", "relaxed", "sys", "sys"),
        (kernels.passed, "volatile", "volatile", "volatile", "sys", "sys"),
        (kernels.volatile_words_with_flags,),
    ],
)
def test_what_late_stores_do_no_harm(how: tuple[Any, ...]) -> None:
    """A fence makes them visible."""
    assert schedules(exchanged, 3, *how, n=30, store_buffers=True, workers=1).clean
    assert races(exchanged, 3, *how, seeds=4).clean


def test_results_that_depend_on_the_schedule() -> None:
    def on_rank() -> Any:
        memory = buffer()
        kernels.all_write_one_place[(1,)](memory.peers, interlace.get_rank())
        first = memory.view(0, 0, (1,), torch.int32)
        seen = int(first)
        first.add_(1)
        interlace.barrier()
        return seen

    report = schedules(on_rank, 3, n=30, workers=1)
    assert report.failure is not None and report.failure.kind == "different results"
    assert schedules(on_rank, 3, n=30, workers=1, deterministic=False).clean


def test_check_sees_the_results_by_rank() -> None:
    def right(results: list[Any]) -> None:
        assert results == [0, 1, 2]

    def wrong(results: list[Any]) -> None:
        raise ValueError(f"got {results}")

    assert schedules(interlace.get_rank, 3, n=4, check=right, workers=1).clean
    report = schedules(interlace.get_rank, 3, n=4, check=wrong, workers=1)
    assert report.failing == (0, 1, 2, 3) and "got [0, 1, 2]" in str(report)


def test_schedules_are_not_spent_on_garbage() -> None:
    """None of them looks for it; of as many runs one by one, the control, each does."""
    begun: list[str] = []
    gc.callbacks.append(note := lambda phase, info: begun.append(phase))
    before = gc.get_threshold()
    try:
        schedules(exchange, 2, n=6, workers=1)
        assert gc.get_threshold() == before and begun.count("start") <= 1
        for seed in range(6):
            interlace.run(exchange, 2, seed=seed)
        assert begun.count("start") >= 6
    finally:
        gc.callbacks.remove(note)


def test_workers_find_the_same() -> None:
    alone, shared = (schedules(exchange, 2, 2, n=24, workers=w, shrink=False) for w in (1, 2))
    assert alone.failing == shared.failing and len(alone.failing) > 3
    assert alone.failure == shared.failure


def test_a_deadlock_lists_every_program() -> None:
    def on_rank() -> None:
        memory, rank = buffer(), interlace.get_rank()
        if rank == 0:
            x = torch.zeros(64)
            exchange_kernel[(4,)](memory.peers, x, x, rank, 7, BLOCK=16)

    report = schedules(on_rank, 2, n=4, workers=1, shrink=False)
    assert report.failure is not None and report.failure.kind.endswith("DeadlockError")
    for program in range(4):
        line = f"rank 0 exchange_kernel program {program} waits for symmetric buffer 0 of rank 0, "
        line += f"byte {4 * program}, seen 0, expected 7 at user_exchange.py:"
        assert line in str(report), str(report)


def test_what_ends_a_poll_is_told_where_the_source_says_it() -> None:
    """A loop that goes on while a word is 0 ends with any other number, and 0 is not what it expects."""
    with pytest.raises(
        interlace.DeadlockError,
        match=r"byte 16 \(flag_ptr\[4\]\), seen 0 at memory_kernels\.py:\d+ in",
    ):
        interlace.run(lambda: memory_kernels.poll[(1,)](signal_pad(), 4), 1)


def signal_pad() -> torch.Tensor:
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(4))
    return handle.get_signal_pad(handle.rank, (16,), torch.int32)


def test_bounded_polls_are_no_deadlock() -> None:
    def on_rank() -> int:
        counted = torch.zeros(1, dtype=torch.int32)
        kernels.poll_fifty_times[(1,)](torch.zeros(1, dtype=torch.int32), counted)
        return int(counted)

    assert interlace.run(on_rank, 2) == [50, 50]


@pytest.mark.parametrize("places", [8, 80])
def test_polls_of_several_places_in_turn_are_a_deadlock(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 nothing repeats; they are counted, and the run ends, not a rank with an error of its own."""
    monkeypatch.setattr(program_hooks, "STALLED_POLLS", 1000)

    def on_rank() -> None:
        kernels.poll_in_turn[(1,)](torch.zeros(places, dtype=torch.int32), places)

    report = schedules(on_rank, 2, n=1, workers=1, shrink=False)
    assert report.failure is not None and report.failure.kind == "DeadlockError", str(report)
    assert "poll_in_turn program 0 waits" in report.failure.text
    assert "more words at race_kernels.py:" in report.failure.text


@pytest.mark.parametrize("seed", range(6))
def test_who_spins_lets_others_go_on(seed: int) -> None:
    """Under priorities too, where the spinning program may be the first of all."""
    plain, many = launch(kernels.wait_plainly), launch(kernels.wait_for_one_of_many, 100)
    for fn in (plain, many):
        assert schedules(fn, 2, seeds=[seed], workers=1).clean


@pytest.mark.parametrize("seed", few(range(3), 0))
def test_a_spin_that_nothing_can_end_is_a_deadlock(seed: int) -> None:
    """By plain loads, too: the report says which word never changes, and in which line it is loaded."""

    def on_rank() -> None:
        group = interlace.new_group([0])
        if interlace.get_rank() == 0:
            buffer = group.place.allocate(64)
            kernels.wait_plainly[(1,)](buffer.peers, 0)

    report = schedules(on_rank, 2, seeds=[seed], workers=1, shrink=False)
    assert report.failure is not None and report.failure.kind == "DeadlockError"
    text = report.failure.text
    assert "waits for symmetric buffer 0 of rank 0, byte 0, seen 0" in text
    assert "race_kernels.py:" in text and "in wait_plainly" in text


def test_what_cannot_be_run_is_not_checked_and_does_not_fail() -> None:
    """Nor is it shrunk, or run again for each seed."""

    def refused() -> None:
        raise NotImplementedError("no such instruction")

    tried = []
    report = schedules(refused, 2, n=20, workers=1, on_progress=tried.append)
    assert not report.clean and not report.failing and report.failure is None
    assert tried == [1] and report.schedules == 0 and report.refused == (0,)
    assert "none fails" in str(report) and "seed 0 is not checked" in str(report)
    assert "no such instruction" in str(report)


@pytest.mark.parametrize("seed", range(6))
def test_spins_that_write_what_is_there_are_polls(seed: int) -> None:
    def eight() -> None:
        memory = buffer()
        kernels.take_flags_that_are_not_set_yet[(8,)](memory.peers, interlace.get_rank())

    assert schedules(eight, 2, seeds=[seed], workers=1).clean
    if not seed:
        with pytest.raises(interlace.DeadlockError, match="take_flags_that_are_not_set_yet"):
            interlace.run(lambda: eight() if interlace.get_rank() == 0 else buffer() and None, 2)


def test_time_limits_hold_where_nothing_gives_way() -> None:
    def on_rank() -> None:
        while interlace.get_rank() == 0:
            pass

    assert interlace.run(interlace.get_rank, 2) == [0, 1]  # imports take longer than the limit
    line = r"rank 0 user code neither ends nor touches memory at test_schedules\.py:\d+ in on_rank"
    with pytest.raises(interlace.CollectiveTimeoutError, match=line):
        interlace.run(on_rank, 2, timeout=0.5)
    with pytest.raises(interlace.CollectiveTimeoutError, match=line):
        replay(on_rank, 2, [], timeout=0.5)
    assert interlace.run(interlace.get_rank, 2) == [0, 1]


@pytest.mark.parametrize(
    "endless", few([kernels.counts_for_ever, kernels.asks_itself_for_ever], kernels.counts_for_ever)
)
def test_a_kernel_that_goes_round_for_ever_is_found_once(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its line, long before the time limit; a program that only takes longer is not."""

    def on_rank(rounds: int = -1) -> None:
        endless[(1,)](torch.zeros(1, dtype=torch.int32), rounds)

    assert races(on_rank, 1, 100, seeds=1).clean  # and what takes long in a first call is done
    for home in (schedule_check, race_check):
        monkeypatch.setattr(home, "QUIET_SECONDS", 0.5)
    failing = schedules(on_rank, 1, n=3)
    found = races(on_rank, 1, seeds=3)
    line = rf"nothing has happened for 0\.5 s .* at race_kernels\.py:\d+ in {endless.__name__}$"
    assert failing.failure is not None and re.search(line, failing.failure.text)
    ((_, error),) = found.errors
    assert re.search(line, error) and found.seeds == (0,)

    def after_a_race() -> None:
        endless[(2,)](torch.zeros(1, dtype=torch.int32), 1)
        on_rank()

    found = races(after_a_race, 1, seeds=3)
    assert "write-write" in [each.kind for each in found.findings] and found.errors


def test_a_failure_that_does_not_repeat_is_reported() -> None:
    calls: list[int] = []

    def on_rank() -> None:
        calls.append(1)
        assert len(calls) != 3

    report = schedules(on_rank, 1, n=6, workers=1)
    assert report.failure is not None and report.failure.kind == "not repeatable"


@dataclass
class Pair:
    first: int
    second: Any


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.int64(1), np.int64(2)),
        (np.float32(1), np.float32(2)),
        ({1, 2}, {1, 3}),
        (Pair(1, torch.ones(2)), Pair(1, torch.zeros(2))),
        ({"a": [1, (2,)]}, {"a": [1, (3,)]}),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64)),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
        ((1, 23), (12, 3)),
    ],
)
def test_results_are_compared_by_value(one: Any, other: Any) -> None:
    assert digest_of([one, 0]) == digest_of([copy.deepcopy(one), 0])
    assert digest_of([one, 0]) != digest_of([other, 0])


def test_results_that_cannot_be_compared_are_equal() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, object(), torch.empty(2, device="meta"), np.array([object()])):
        assert digest_of(value) == digest_of(value)
    assert digest_of(object()) == digest_of(object())


# -- strategies ----------------------------------------------------------------------------------------


def tasks(count: int) -> list[Task]:
    return [Task(rank, "program", f"rank {rank} program", None) for rank in range(count)]


def test_strategies_take_turns_by_seed() -> None:
    assert isinstance(for_seed(0), Random) and isinstance(for_seed(3), Random)
    assert isinstance(for_seed(1), Priority) and isinstance(for_seed(2), Priority)


def test_priority_stays_until_it_changes() -> None:
    strategy, all_tasks = Priority(1, depth=2, length=50), tasks(4)
    chosen = []
    for _ in range(100):
        strategy.passes()
        task = strategy.choose(all_tasks)
        assert task is not None
        chosen.append(task.name)
    assert len(set(chosen)) == 2 and chosen == sorted(chosen, key=chosen.index)


# -- check, for tests ------------------------------------------------------------------------------------


def test_check_raises_what_the_other_checks_report() -> None:
    little: dict[str, Any] = {"seeds": 1, "n": 3}
    check(exchange, 2, **little)
    racy = launch(kernels.passed, "block", "plain", "volatile")
    with pytest.raises(AssertionError) as raced:
        check(racy, 3, **little)
    assert str(raced.value) == str(races(racy, 3, seeds=1))

    def wrong(results: list[Any]) -> None:
        raise ValueError("wrong results")

    with pytest.raises(VerificationError, match=r"3 fail\n\n.*: wrong results") as failed:
        check(exchange, 2, check=wrong, **little)
    assert isinstance(failed.value.report, ScheduleReport)


# -- workers, misuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be positive, got 0"),
        ({"n": 2.5}, "n must be an int, got 2.5"),
        ({"workers": 0}, "workers must be positive, got 0"),
        ({"workers": "2"}, "workers must be an int or None, got '2'"),
        ({"check": 3}, "check must be callable, got int"),
        ({"seeds": []}, "seeds must name at least one schedule"),
    ],
)
def test_misuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        schedules(exchange, 2, **arguments)
