"""Negative controls: a protocol with one fault must give wrong results or a deadlock.

The faults are put into the shipped kernels by replacing the device functions that they call. Every
scenario runs the unchanged kernels first, in the same schedules, and those must be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import triton

import interlace
from interlace.kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduction,
    signal,
    transfer,
)
from interlace.runtime.configuration import override
from interlace.runtime.place_sim import SimStream
from interlace.runtime.program_hooks import ProgramHooks
from support import payload, poisoned, slow_rank, starved

MODULES = (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, reduction, transfer)
SEEDS = 9
CALLS = 3
WORLD = 3
TILES = {"block_m": 16, "block_n": 16, "block_k": 16, "block_elements": 16, "programs": 2}
wait, publish = signal.wait, signal.publish


@triton.jit
def no_wait(peers_ptr, rank, world_size, source, slot_byte, epoch):
    return epoch


@triton.jit
def no_credit(peers_ptr, rank, world_size, peer, epoch):
    return epoch


@triton.jit
def wait_for_the_last_epoch(peers_ptr, rank, world_size, source, slot_byte, epoch):
    return wait(peers_ptr, rank, world_size, source, slot_byte, epoch - 1)


@triton.jit
def wait_next_slot(peers_ptr, rank, world_size, source, slot_byte, epoch):
    return wait(peers_ptr, rank, world_size, source, slot_byte + 8, epoch)


@triton.jit
def wait_except_for_rank_0(peers_ptr, rank, world_size, source, slot_byte, epoch):
    seen = epoch
    if source != 0:
        seen = wait(peers_ptr, rank, world_size, source, slot_byte, epoch)
    return seen


@triton.jit
def publish_next_slot(slot_ptr, epoch):
    publish(slot_ptr + 1, epoch)


@triton.jit
def publish_nothing(slot_ptr, epoch):
    pass


@contextmanager
def replaced(**functions: Any) -> Iterator[None]:
    """In every kernel module that uses them, these device functions instead."""
    with ExitStack() as stack:
        hit = 0
        for module in MODULES:
            for name, function in functions.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, function))
                    hit += 1
        assert hit
        yield


@contextmanager
def published_before_the_store() -> Iterator[None]:
    """A program's stores happen only after its next atomic: a publish overtakes them."""
    store, atomic = ProgramHooks.store, ProgramHooks.atomic
    held: dict[Any, list[Callable[[], Any]]] = {}

    def late_store(self: ProgramHooks, *arguments: Any) -> None:
        held.setdefault(self.current, []).append(lambda: store(self, *arguments))

    def flush(self: ProgramHooks) -> None:
        for each in held.pop(self.current, []):
            each()

    def early_atomic(self: ProgramHooks, *arguments: Any) -> Any:
        result = atomic(self, *arguments)
        flush(self)
        return result

    with (
        mock.patch.object(ProgramHooks, "store", late_store),
        mock.patch.object(ProgramHooks, "atomic", early_atomic),
    ):
        yield


@contextmanager
def no_finish() -> Iterator[None]:
    """The op ends without credit and with its epoch still the current one."""
    with mock.patch.object(SimStream, "finish", lambda self, workspace: None):
        yield


@contextmanager
def no_credit_waits() -> Iterator[None]:
    """Kernels and streams write into peers' memory without asking."""
    with (
        replaced(wait_credit=no_credit),
        mock.patch.object(SimStream, "wait_credits", lambda self, workspace: None),
    ):
        yield


def gather_matmul(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    shards = [payload(r, call, (20, 8)) for r in range(WORLD)]
    work = interlace.all_gather_matmul(shards[rank], torch.eye(8), async_op=True, algorithm="fused")
    return work, torch.cat(shards), work.wait


def scatter(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    inputs = [payload(r, call, (WORLD * 17, 8)) for r in range(WORLD)]
    work = interlace.matmul_reduce_scatter(
        inputs[rank], torch.eye(8), async_op=True, algorithm="fused"
    )
    return work, sum(inputs)[17 * rank : 17 * rank + 17], work.wait


def matmul_reduce(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    inputs = [payload(r, call, (18, 8)) for r in range(WORLD)]
    work = interlace.matmul_all_reduce(inputs[rank], torch.eye(8), async_op=True, algorithm="fused")
    return work, sum(inputs), work.wait


def gather(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    shards, out = [payload(r, call, (20,)) for r in range(WORLD)], torch.empty(WORLD * 20)
    work = interlace.all_gather(out, shards[rank], None, True, algorithm="kernel")
    return work, torch.cat(shards), lambda: out


def reduce_parts(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    inputs, out = [payload(r, call, (WORLD, 20)) for r in range(WORLD)], torch.empty(20)
    work = interlace.reduce_scatter(out, inputs[rank], "sum", None, True, algorithm="kernel")
    return work, sum(inputs)[rank], lambda: out


def reduce_all(rank: int, call: int) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    inputs = [payload(r, call, (20,)) for r in range(WORLD)]
    out = inputs[rank].clone()
    work = interlace.all_reduce(out, "sum", None, True, algorithm="kernel")
    return work, sum(inputs), lambda: out


ONE = (torch.ones(1, 4), torch.ones(4, 1))
OPS = [gather_matmul, scatter, matmul_reduce, gather, reduce_parts, reduce_all]


@dataclass(frozen=True)
class Mutant:
    name: str
    make: Callable[[], Any]


MUTANTS = [
    Mutant("missing wait", lambda: replaced(wait=no_wait)),
    Mutant("wait for the last epoch", lambda: replaced(wait=wait_for_the_last_epoch)),
    Mutant("wait for the wrong slot", lambda: replaced(wait=wait_next_slot)),
    Mutant("one rank skipped", lambda: replaced(wait=wait_except_for_rank_0)),
    Mutant("publish to the wrong slot", lambda: replaced(publish=publish_next_slot)),
    Mutant("missing publish", lambda: replaced(publish=publish_nothing)),
    Mutant("publish before the store", published_before_the_store),
    Mutant("missing credit wait", no_credit_waits),
    Mutant("epoch reused", no_finish),
]


def caught(
    op: Callable[..., Any], mutant: Callable[[], Any], seed: int, *, separated: bool = False
) -> bool:
    """Whether this schedule shows the fault, by numbers or by a deadlock."""
    slow = seed % WORLD

    def on_rank() -> bool:
        rank = interlace.get_rank()
        started = []
        for call in range(CALLS):
            started.append(op(rank, call))
            if separated:
                # Its one row belongs to rank 0, so no other rank waits for anybody in it. Without it
                # an op needs data of every rank, which are sent only after the op before last is over.
                interlace.matmul_reduce_scatter(*ONE, async_op=True, algorithm="fused")
        right = []
        for work, expected, result in started:
            work.wait()
            right.append(torch.equal(result(), expected))
        return all(right)

    try:
        with override(**TILES), poisoned(), starved(slow_rank(slow), chance=0.01), mutant():
            return not all(interlace.run(on_rank, WORLD, seed=seed))
    except interlace.DeadlockError:
        return True


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("separated", [False, True])
def test_the_unchanged_kernel_passes(op: Callable[..., Any], separated: bool) -> None:
    for seed in range(3):
        assert not caught(op, nullcontext, seed, separated=separated)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_mutant_is_caught(op: Callable[..., Any], mutant: Mutant) -> None:
    separated = mutant.make is no_credit_waits
    assert any(caught(op, mutant.make, seed, separated=separated) for seed in range(SEEDS))
