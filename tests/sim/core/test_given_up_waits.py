"""After a wait that times out, a kernel stores nothing into memory that a peer may still read.

An op runs once on simulated ranks. Then its kernel runs again on rank 0 alone, as if rank 1 had never
finished. The credit of rank 1 is missing, so rank 0 must time out without a store to rank 1's memory.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

import interlace
from interlace.kernels import signal, slots
from interlace.kernels.arguments import Peers
from interlace.kernels.signal import (
    ABORT_WORD,
    CREDIT_WORDS,
    EPOCH_WORD,
    HEADER_WORDS,
    SPIN_LIMIT_WORD,
)
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, SymmetricBuffer
from interlace.runtime.places.sim.place import SimPlace, SimStream
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler
from interlace.runtime.tuning.configuration import override
from mutants.mutations import Edit, Mutant, mutated
from stand_ins.replaced import replaced
from support import POISON_BYTE, noise, run_alone

TILES = {f"block_{axis}": 16 for axis in "mnk"} | {"block_elements": 16, "programs": 2}
NUMBERS = noise(0, 0, (32, 16))
WEIGHT = noise(0, 1, (16, 24))


class Case(NamedTuple):
    """An op, the file whose stores have to wait, and its way to ask for credit."""

    call: Callable[[], object]
    file: str
    credit: str


def collective(name: str, rows: int | None, algorithm: str) -> Callable[[], object]:
    """``rows``: of the output; None: in place."""
    function = getattr(interlace, name)
    if rows is None:
        return lambda: function(NUMBERS.clone(), algorithm=algorithm)
    return lambda: function(torch.empty(rows, 16), NUMBERS, algorithm=algorithm)


def fused(name: str, *operands: torch.Tensor, **options: Any) -> Callable[[], object]:
    return lambda: getattr(interlace, name)(*operands, algorithm="fused", **options)


OF_ONE, OF_ALL = "epoch) >= epoch - 1", "wait_credits(workspace, epoch) == 0"
REDUCTION, MULTIMEM = "collectives/reduction", "collectives/multimem"
SCATTER, REDUCE = "matmul/matmul_reduce_scatter", "matmul/matmul_reduce_scatter"
NORM = {"norm": interlace.RMSNorm()}
NORMED = {**NORM, "gather_normed": True}
PRODUCT = NUMBERS, WEIGHT
OPS = {
    "all_gather": Case(collective("all_gather", 64, "kernel"), "transfer", OF_ONE),
    "reduce_scatter": Case(collective("reduce_scatter", 16, "kernel"), REDUCTION, OF_ONE),
    "all_reduce": Case(collective("all_reduce", None, "kernel"), REDUCTION, OF_ALL),
    "multimem_all_gather": Case(collective("all_gather", 64, "multimem"), MULTIMEM, OF_ALL),
    "multimem_reduce_scatter": Case(collective("reduce_scatter", 16, "multimem"), MULTIMEM, OF_ALL),
    "multimem_all_reduce": Case(collective("all_reduce", None, "multimem"), MULTIMEM, OF_ALL),
    "all_gather_matmul": Case(fused("all_gather_matmul", *PRODUCT), "transfer", OF_ONE),
    "matmul_reduce_scatter": Case(fused("matmul_reduce_scatter", *PRODUCT), SCATTER, OF_ONE),
    "matmul_all_reduce": Case(fused("matmul_all_reduce", *PRODUCT), REDUCE, OF_ALL),
    "matmul_reduce_scatter_norm": Case(
        fused("matmul_reduce_scatter", *PRODUCT, **NORMED), SCATTER, OF_ONE
    ),
    "matmul_all_reduce_norm": Case(fused("matmul_all_reduce", *PRODUCT, **NORM), REDUCE, OF_ALL),
    "reduce_norm": Case(
        fused("reduce_scatter_norm", NUMBERS, **NORMED), "matmul/row_norms", OF_ONE
    ),
}


@dataclass(frozen=True)
class Seen:
    """The launch of rank 0's kernel and the memory of both ranks, which survive their run."""

    launch: KernelLaunch
    buffer: SymmetricBuffer
    after: list[torch.Tensor]

    def again(self) -> None:
        """Run the kernel, or its present replacement, on rank 0 alone."""
        kernel = getattr(sys.modules[self.launch.kernel.fn.__module__], self.launch.name)
        run_alone(replace(self.launch, kernel=kernel))


@functools.cache
def seen(op: str) -> Seen:
    """Run ``op`` on two ranks. A test of a mutant calls this first, to have interlace's own kernel."""
    launch, allocate = SimStream.launch, SimPlace.allocate
    launches, buffers = list[KernelLaunch](), list[SymmetricBuffer]()

    def noting_launch(stream: SimStream, made: KernelLaunch) -> None:
        if stream._place.rank == 0:
            launches.append(made)
        launch(stream, made)

    def noting_allocate(place: SimPlace, nbytes: int) -> SymmetricBuffer:
        buffer = allocate(place, nbytes)
        if place.rank == 0:
            buffers.append(buffer)
        return buffer

    noting = (SimStream, "launch", noting_launch), (SimPlace, "allocate", noting_allocate)
    with override(**TILES), replaced(*noting):
        interlace.run(OPS[op].call, 2)
    (made,), (buffer,) = launches, buffers
    assert made.name == f"{op}_kernel"
    return Seen(made, buffer, [part.clone() for part in buffer.peer_bytes])


def run_again(
    op: str, *, credit: int, void: bool = False, gathered: bool = False
) -> tuple[bool, bool]:
    """Return whether rank 1's memory has changed, and whether rank 0 has reported a timed-out wait.

    ``void``: a wait of rank 0 timed out before the kernel began. ``gathered``: look at the memory of normed
    rows.
    """
    buffer, arguments = seen(op).buffer, seen(op).launch.arguments
    for part, after in zip(buffer.peer_bytes, seen(op).after, strict=True):
        part.copy_(after)
    header = buffer.view(0, 0, (HEADER_WORDS,), torch.int64)
    header[SPIN_LIMIT_WORD] = 10
    header[CREDIT_WORDS + 1] = credit
    header[ABORT_WORD] = int(void)
    theirs = buffer.peer_bytes[1][HEADER_WORDS * WORD :]
    theirs.fill_(POISON_BYTE)
    seen(op).again()
    if gathered:
        first = arguments["workspace"].data_offset + arguments["gathered"].normed_byte
        theirs = buffer.peer_bytes[1][first : first + 32 * 4]
    told = buffer.view(1, 0, (HEADER_WORDS,), torch.int64)[ABORT_WORD]
    return not bool((theirs == POISON_BYTE).all()), bool(told)


@pytest.mark.parametrize("op", OPS)
def test_without_credit_nothing_is_stored(op: str) -> None:
    assert run_again(op, credit=0) == (False, True)


@pytest.mark.parametrize("op", OPS)
def test_with_credit_it_is_stored(op: str) -> None:
    """Rank 0 times out here too, but only on the data of rank 1, which does not run."""
    assert run_again(op, credit=1) == (True, True)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter_norm", "reduce_norm"])
def test_rows_without_a_contribution_are_not_sent(op: str, tmp_path: pathlib.Path) -> None:
    """The arrival of rank 1's tiles is rank 0's proof that rank 1 has read the earlier data."""
    assert run_again(op, credit=1, gathered=True) == (False, True)
    edit = Edit("free = missing == 0", "free = missing >= 0")
    with mutated(Mutant(f"sends {op}", "kernels/matmul/row_norms.py", (edit,)), tmp_path):
        assert run_again(op, credit=1, gathered=True) == (True, True)


@pytest.mark.parametrize("op", OPS)
def test_in_a_void_channel_nothing_is_stored(op: str) -> None:
    """A wait of an earlier kernel or stream timed out."""
    assert run_again(op, credit=1, void=True) == (False, False)


def test_a_kernel_that_asks_for_no_void_is_seen(tmp_path: pathlib.Path) -> None:
    assert not any(run_again(op, credit=1, void=True)[0] for op in OPS)
    edit = Edit("tl.where(is_void(peers), _VOID, epoch)", "epoch")
    with mutated(Mutant("not void", "kernels/signal.py", (edit,)), tmp_path):
        assert all(run_again(op, credit=1, void=True)[0] for op in OPS)


# -- the kernels of streams --------------------------------------------------------------------------


class Header:
    """Ranks 0 and 1 with headers and a slot; both have finished 6 ops."""

    def __init__(self, *, void: bool) -> None:
        words = HEADER_WORDS + 1
        self.own, self.theirs = torch.zeros(words).long(), torch.zeros(words).long()
        self.own[EPOCH_WORD], self.own[SPIN_LIMIT_WORD] = 6, 100
        self.own[CREDIT_WORDS : CREDIT_WORDS + 2] = 6
        self.theirs[CREDIT_WORDS] = 6
        self.own[ABORT_WORD] = int(void)
        self.peers = torch.tensor([self.own.data_ptr(), self.theirs.data_ptr()])

    def run(self, name: str, **arguments: int) -> None:
        kernel = getattr(slots if hasattr(slots, name) else signal, name)  # which may be a mutant's
        known = {"peers": Peers(self.peers, 0, 2)}
        run_alone(KernelLaunch(kernel, 1, {**known, **arguments}, "a signal", num_warps=1))


def published(void: bool) -> int:
    header = Header(void=void)
    header.run("publish_kernel", peer=1, slot_byte=HEADER_WORDS * WORD)
    return int(header.theirs[HEADER_WORDS])


def finished(void: bool) -> tuple[int, int]:
    header = Header(void=void)
    header.run("finish_kernel")
    return int(header.theirs[CREDIT_WORDS]), int(header.own[EPOCH_WORD])


def test_a_void_channel_signals_nothing(tmp_path: pathlib.Path) -> None:
    assert published(False) == 7 and published(True) == 0
    edit = Edit("    if not is_void(peers):\n        publish", "    if True:\n        publish")
    mutant = Mutant("signals", "kernels/signal.py", (edit,))
    with mutated(mutant, tmp_path):
        assert published(True) == 7


def test_a_void_channel_gives_no_credit_and_tells_so(tmp_path: pathlib.Path) -> None:
    assert finished(False) == (7, 7) and finished(True) == (-7, 6)
    edit = Edit("void = is_void(peers)", "void = peers.rank < 0")
    with mutated(Mutant("credit all the same", "kernels/slots.py", (edit,)), tmp_path):
        assert finished(True) == (7, 7)


def polls_for_credit(credit: int, *, void: bool = False) -> int:
    """Return the number of polls of ``wait_credits_kernel`` for rank 1's credit, which does not change."""
    header = Header(void=void)
    header.own[CREDIT_WORDS + 1] = credit
    polls = 0

    class Counting(Scheduler):
        def give_way(self) -> None:
            nonlocal polls
            polls += 1
            super().give_way()

    with replaced((run_alone.__globals__, "Scheduler", Counting)):
        header.run("wait_credits_kernel")
    assert bool(header.theirs[ABORT_WORD]) == (credit < 6 and not void)
    return polls


def test_a_stream_stays_with_a_credit_that_it_gave_up(tmp_path: pathlib.Path) -> None:
    """Copies cannot check the channel, so the stream waits for the peer, or for a fixed time."""
    given, told, neither = (polls_for_credit(credit) for credit in (6, -6, 5))
    assert given < 20 < told < neither - 90
    # void before it begins, it still knows who has finished
    assert polls_for_credit(6, void=True) < polls_for_credit(5, void=True) - 90
    edit = Edit("            linger(peers, peer, finished)", "            pass")
    with mutated(Mutant("goes on at once", "kernels/slots.py", (edit,)), tmp_path):
        assert polls_for_credit(5) < neither - 90


@pytest.mark.parametrize(("file", "credit"), sorted({case[1:] for case in OPS.values()}))
def test_a_kernel_that_goes_on_is_seen(file: str, credit: str, tmp_path: pathlib.Path) -> None:
    ops = [op for op in OPS if OPS[op][1:] == (file, credit)]
    assert {run_again(op, credit=0) for op in ops} == {(False, True)}
    edit = Edit(credit, credit.replace("epoch - 1", "epoch - 9").replace("==", ">="))
    with mutated(Mutant(f"goes on {file}", f"kernels/{file}.py", (edit,)), tmp_path):
        for op in ops:
            assert run_again(op, credit=0) == (True, True), op
