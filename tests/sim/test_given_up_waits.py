"""A wait that gives up lets nothing behind it go: what a peer may still be reading is left alone.

An op runs once on simulated ranks; then its kernel runs again on rank 0 alone, as if rank 1 had never
finished: its credit is missing, so rank 0 has to give up and must not have touched rank 1's memory.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.kernels.signal import ABORT_WORD, CREDIT_WORDS, HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.runtime.configuration import override
from interlace.runtime.interpreter import program_function
from interlace.runtime.launch import KernelLaunch
from interlace.runtime.memory import WORD, SymmetricBuffer
from interlace.runtime.place_sim import SimPlace, SimStream
from interlace.runtime.scheduler import Program, Scheduler
from mutations import Edit, Mutant, mutated
from support import POISON_BYTE, noise

TILES = {f"block_{axis}": 16 for axis in "mnk"} | {"block_elements": 16, "programs": 2}
NUMBERS = noise(0, 0, (32, 16))
WEIGHT = noise(0, 1, (16, 24))


def all_gather() -> None:
    interlace.all_gather(torch.empty(64, 16), NUMBERS, algorithm="kernel")


def reduce_scatter() -> None:
    interlace.reduce_scatter(torch.empty(16, 16), NUMBERS, algorithm="kernel")


def all_reduce() -> None:
    interlace.all_reduce(NUMBERS.clone(), algorithm="kernel")


def multimem_all_gather() -> None:
    interlace.all_gather(torch.empty(64, 16), NUMBERS, algorithm="multimem")


def multimem_reduce_scatter() -> None:
    interlace.reduce_scatter(torch.empty(16, 16), NUMBERS, algorithm="multimem")


def multimem_all_reduce() -> None:
    interlace.all_reduce(NUMBERS.clone(), algorithm="multimem")


def all_gather_matmul() -> None:
    interlace.all_gather_matmul(NUMBERS, WEIGHT, algorithm="fused")


def matmul_reduce_scatter() -> None:
    interlace.matmul_reduce_scatter(NUMBERS, WEIGHT, algorithm="fused")


def matmul_all_reduce() -> None:
    interlace.matmul_all_reduce(NUMBERS, WEIGHT, algorithm="fused")


# Each with the file whose stores have to wait.
OPS: dict[Callable[[], None], str] = {
    all_gather: "transfer",
    reduce_scatter: "reduction",
    all_reduce: "reduction",
    multimem_all_gather: "multimem",
    multimem_reduce_scatter: "multimem",
    multimem_all_reduce: "multimem",
    all_gather_matmul: "transfer",
    matmul_reduce_scatter: "matmul_reduce_scatter",
    matmul_all_reduce: "matmul_all_reduce",
}


class Seen:
    """The launch of rank 0's kernel and the memory of both ranks, which outlive their run."""

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []
        self.buffers: list[SymmetricBuffer] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        launch, allocate = SimStream.launch, SimPlace.allocate

        def noting_launch(stream: SimStream, made: KernelLaunch) -> None:
            if stream._place.rank == 0:
                self.launches.append(made)
            launch(stream, made)

        def noting_allocate(place: SimPlace, nbytes: int) -> SymmetricBuffer:
            buffer = allocate(place, nbytes)
            if place.rank == 0:
                self.buffers.append(buffer)
            return buffer

        with (
            mock.patch.object(SimStream, "launch", noting_launch),
            mock.patch.object(SimPlace, "allocate", noting_allocate),
        ):
            yield


def run_again(op: Callable[[], None], *, credit: int) -> tuple[bool, bool]:
    """Whether rank 1's memory has changed, and whether rank 0 has told that it gave up."""
    seen = Seen()
    with override(**TILES), seen.looking():
        interlace.run(op, 2)
    (launch,), (buffer,) = seen.launches, seen.buffers
    header = buffer.view(0, 0, (HEADER_WORDS,), torch.int64)
    header[SPIN_LIMIT_WORD] = 100
    header[CREDIT_WORDS + 1] = credit
    theirs = buffer.peer_bytes[1][HEADER_WORDS * WORD :]
    theirs.fill_(POISON_BYTE)
    scheduler = Scheduler(0, block_polls=False, timeout=60)

    def programs() -> None:
        body = program_function(launch.kernel, launch.arguments)
        for index in range(launch.extents[0]):
            program = Program(launch.name, launch.op, index, (index, 0, 0), launch.extents)
            scheduler.spawn(0, f"program {index}", body, program=program)

    scheduler.spawn(0, "host", programs)
    scheduler.run()
    told = buffer.view(1, 0, (HEADER_WORDS,), torch.int64)[ABORT_WORD]
    return not bool((theirs == POISON_BYTE).all()), bool(told)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_without_credit_nothing_is_stored(op: Callable[[], None]) -> None:
    assert run_again(op, credit=0) == (False, True)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_with_credit_it_is_stored(op: Callable[[], None]) -> None:
    """Rank 0 gives up here too, but only on the data of rank 1, which does not run."""
    assert run_again(op, credit=1) == (True, True)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_kernel_that_goes_on_is_seen(op: Callable[[], None], tmp_path: pathlib.Path) -> None:
    edit = Edit("epoch) >= epoch - 1", "epoch) >= epoch - 9")
    mutant = Mutant(f"goes on {op.__name__}", f"kernels/{OPS[op]}.py", (edit,))
    with mutated(mutant, tmp_path):
        assert run_again(op, credit=0) == (True, True)


def test_the_names_of_arguments_are_not_made_up() -> None:
    """The kernels that ran are those of the ops."""
    for op in OPS:
        seen: Any = Seen()
        with override(**TILES), seen.looking():
            interlace.run(op, 2)
        assert [launch.name for launch in seen.launches] == [f"{op.__name__}_kernel"]
