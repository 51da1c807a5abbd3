"""User code besides calls of ops: its own kernels, errors on one rank, Ctrl-C."""

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
