"""User code besides calls of ops: kernels, errors, Ctrl-C, torch's state of a thread, vain polls."""

import contextlib
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace import functional
from interlace.runtime.places.sim.scheduler import scheduler, torch_state
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler


@triton.jit
def add_program_id(x_ptr, n, BLOCK: tl.constexpr):
    """Add the program's number to its block; reads the number on both sides of a load."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, values + tl.program_id(0), mask=offsets < n)


def launch_own_kernel() -> list[float]:
    x = torch.zeros(128)
    add_program_id[(4,)](x, 128, BLOCK=32)
    assert float(x.view(4, 32).std(1).max()) == 0
    return x.view(4, 32)[:, 0].tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_own_kernels_between_ops(world_size: int) -> None:
    def on_rank() -> list[float]:
        interlace.all_gather_matmul(torch.ones(64, 64), torch.ones(64, 64))
        return launch_own_kernel()

    for seed in range(20):
        assert interlace.run(on_rank, world_size, seed=seed) == [[0, 1, 2, 3]] * world_size
    assert launch_own_kernel() == [0, 1, 2, 3]


@pytest.mark.parametrize("grid", [(-1,), (1.5,), (1, 1, 1, 1), ()])
def test_a_grid_that_is_none_is_named(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grid must be 1 to 3 whole numbers from 0 on, got"):
        interlace.run(lambda: add_program_id[grid](torch.zeros(32), 32, BLOCK=32), 2)


def test_own_kernels_are_corrupted_without_the_grid_of_the_task() -> None:
    """This is the negative control: the test above fails if a task does not get its own grid back."""

    def give_way(self: Scheduler) -> None:
        self.strategy.passes()
        self._hub.switch()

    corrupted = pytest.raises(Exception, match=r"assert|x >= grid_dim|deadlock: nothing can run")
    with mock.patch.object(Scheduler, "give_way", give_way), corrupted:
        test_own_kernels_between_ops(3)


def test_a_refusal_that_nobody_hears_is_in_the_deadlock_report() -> None:
    def on_rank() -> None:
        if interlace.get_rank() == 1:
            interlace.all_gather_matmul(torch.ones(2, 2), "weight")  # type: ignore[arg-type]

    with pytest.raises(interlace.DeadlockError, match=r"refused .*weight must be a tensor"):
        interlace.run(on_rank, 2)


def test_errors_in_a_part_of_the_ranks_say_whose_numbers_they_use() -> None:
    def on_rank() -> None:
        group = interlace.new_group([1, 2, 3])
        if interlace.get_rank():
            interlace.all_reduce(torch.ones(4 + (interlace.get_rank() == 3)), group=group)

    with pytest.raises(ValueError, match=r"\(5,\) on rank 2 .*group's ranks \[1, 2, 3\]"):
        interlace.run(on_rank, 4)


def test_keyboard_interrupt_is_not_swallowed() -> None:
    def on_rank() -> None:
        if interlace.get_rank() == 1:
            raise KeyboardInterrupt
        interlace.barrier()

    with pytest.raises(KeyboardInterrupt) as caught:
        interlace.run(on_rank, 2)
    assert not isinstance(caught.value, Exception)


def test_triton_imported_first_says_what_to_do() -> None:
    script = (
        "import triton, interlace, torch\n"
        "print(interlace.run(interlace.get_rank, 2))\n"  # which needs no kernel
        "interlace.run(lambda: interlace.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 4)), 2)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (1, "[0, 1]\n")
    assert "import interlace first" in done.stderr


def test_ctrl_c_while_a_run_begins_leaves_no_watchdog() -> None:
    """A watchdog would raise in later code of this thread after the run's time."""
    dogs, start = [], threading.Thread.start

    def interrupted(dog: threading.Thread) -> None:
        start(dog)
        dogs.append(dog)
        raise KeyboardInterrupt

    with (
        mock.patch.object(threading.Thread, "start", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        interlace.run(interlace.get_rank, 1)
    (dog,) = dogs
    dog.join()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_modes_are_each_ranks_own(mode: str, seed: int) -> None:
    def on_rank() -> None:
        inside = interlace.get_rank() == 0
        for _ in range(3):
            with getattr(torch, mode)() if inside else contextlib.nullcontext():
                interlace.barrier()
                assert torch.is_grad_enabled() is not inside
                assert torch.ones(1).is_inference() is (inside and mode == "inference_mode")
        assert torch.is_grad_enabled() and not torch.ones(1).is_inference()

    interlace.run(on_rank, 3, seed=seed)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def doubled() -> torch.Tensor:
    """Wait within torch's dispatcher."""
    mine: torch.Tensor = functional.all_gather(torch.tensor([1.0 + interlace.get_rank()])) * 2
    return mine


@pytest.mark.parametrize("seed", range(4))
def test_warnings_and_dispatch_are_left_as_they_were(seed: int) -> None:
    """A handler on the stack of an ended rank would crash the next warning."""

    def state() -> tuple[object, object]:
        return torch_state.warning_handler(), torch._C._dispatch_tls_local_exclude_set()

    before = state()
    assert before[0] is not None
    assert interlace.run(doubled, 3, seed=seed)[0].tolist() == [2.0, 4.0, 6.0]
    assert state() == before
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def drawn() -> list[float]:
    """Return random numbers from before and after the turns of other ranks."""
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        found += torch.randn(2).tolist()
        interlace.barrier()
    torch.nn.Dropout()(torch.ones(interlace.get_rank() * 7))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_ranks_draw_as_in_processes(seed: int) -> None:
    (alone,) = interlace.run(drawn, 1)
    before = torch.get_rng_state()
    assert interlace.run(drawn, 3, seed=seed) == [alone] * 3
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_begin_to_draw_where_their_caller_is() -> None:
    def fails() -> None:
        drawn.append(torch.rand(1))
        interlace.barrier()
        raise ValueError

    drawn: list[torch.Tensor] = []
    with pytest.raises(ValueError):
        interlace.run(fails, 3)
    assert drawn == [torch.rand(1)] * 3


@triton.jit
def counting_wait(flag, looks, AT_MOST: tl.constexpr, SETS: tl.constexpr, WORK: tl.constexpr):
    """Program 0 waits for the flag, at most AT_MOST polls; program 1 sets it after other work."""
    if tl.program_id(0) == 0:
        seen = 0
        while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0) & (seen < AT_MOST):
            seen = tl.atomic_add(looks, 1)
    elif SETS:
        for _ in range(WORK):
            tl.atomic_add(looks + 1, 1)
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def waited(at_most: int, sets: bool) -> None:
    words = torch.zeros(3, dtype=torch.int32)
    counting_wait[(2,)](words, words[1:], at_most, sets, 400)


few_polls = mock.patch.object(scheduler, "VAIN_POLLS", 200)


@few_polls
@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_a_wait_that_counts_its_looks_is_a_deadlock(place: str) -> None:
    with pytest.raises(interlace.DeadlockError, match=r"byte 0.*test_user_code.py:\d+ in count"):
        interlace.run(waited, 1, 1 << 30, False, place=place)


@few_polls
@pytest.mark.parametrize(("at_most", "sets"), [(1 << 30, True), (300, False)])
def test_a_wait_that_ends_is_none(at_most: int, sets: bool) -> None:
    for seed in range(4):
        interlace.run(waited, 1, at_most, sets, seed=seed)


@triton.jit
def long_reader(flag, looks, words, READS: tl.constexpr, SETS: tl.constexpr, COUNTS: tl.constexpr):
    """Program 1 reads the same words for long, and then sets the flag; program 0 waits for it."""
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
            if COUNTS:
                tl.atomic_add(looks, 1)
    else:
        total = tl.zeros((16,), tl.int32)
        for _ in range(READS):
            total += tl.load(words + tl.arange(0, 16))
        tl.store(words + tl.arange(0, 16), total)
        if SETS:
            tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@pytest.mark.parametrize("counts", [False, True])
def test_who_reads_the_same_for_long_waits_for_nothing(counts: bool) -> None:
    """Polls of other ranks meanwhile do not make this a deadlock."""

    def read(sets: bool) -> int:
        words = torch.ones(18, dtype=torch.int32)
        words[:2] = 0
        long_reader[(2,)](words, words[1:], words[2:], 1500, sets, counts)
        return int(words[2])

    assert interlace.run(read, 1, True, seed=1) == [1500]
    with pytest.raises(interlace.DeadlockError, match=r"byte 0.*test_user_code.py:\d+ in long"):
        interlace.run(read, 1, False, seed=1)
