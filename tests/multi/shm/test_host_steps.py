"""Collectives of one host as steps of machine code: waits, interrupts, and the same bits as in Python."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.distributed import HashStore

import interlace
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.places.shm import (
    engine as host_engine,
    machine_code,
    message_steps,
    rounds as host_rounds,
)
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import StoreMeeting
from multi.shm.host_ops import OPS, SLOT_BYTES, check, engine, rounds_of, same
from ranks import ranks
from tiers import thorough

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="no machine code on this host")

NAN = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


@pytest.fixture(scope="module")
def one_with_machine_code() -> Iterator[list[Engine]]:
    """Make two ranks that are threads; one sums with machine code, the other without."""
    meeting = StoreMeeting(HashStore())
    with ThreadPoolExecutor(2) as threads:

        def joined(rank: int) -> HostGroup:
            return HostGroup(meeting, rank, 2, timeout=600, prefix="interlace/nan/0")

        groups, engines = list(threads.map(joined, range(2))), []
        with pytest.MonkeyPatch.context() as patch:
            for rank, group in enumerate(groups):
                patch.setattr(host_engine, "available", lambda rank=rank: rank == 0)
                engines.append(host_engine.HostEngine(group))
        yield engines
        for group in groups:
            group.close()


def same_sums(engines: list[Engine], tensors: list[torch.Tensor]) -> bool:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda e, x: e.all_reduce(Call("sum"), x, "sum"), engines, tensors))
    return same(*tensors)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(list(NAN)),
    words=st.lists(st.tuples(*[st.integers(-(1 << 31), (1 << 31) - 1)] * 2), min_size=1),
    all_nan=st.booleans(),
)
@example(torch.float32, [(0x7FC00001, 0x7FC00002)] * 67, False)
@example(torch.bfloat16, [(0x7FC1, 0x7FC2)] * 67, False)
@example(torch.float16, [(0x7E01, 0x7E02)] * 67, False)
def test_ranks_have_the_same_bits_of_nan_with_machine_code_and_without(
    one_with_machine_code: list[Engine],
    dtype: torch.dtype,
    words: list[tuple[int, int]],
    all_nan: bool,
) -> None:
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = [torch.tensor(column) | all_nan * NAN[dtype] for column in zip(*words, strict=True)]
    assert same_sums(one_with_machine_code, [each.to(integers).view(dtype) for each in bits])


def test_ranks_have_the_same_bits_of_nan_in_a_large_sum(
    one_with_machine_code: list[Engine],
) -> None:
    for _ in range(2):  # the first makes the rings
        bits = [torch.tensor([0x7FC00001 + n, 0x7FC00002 - n], dtype=torch.int32) for n in (0, 1)]
        large = [each.repeat(SLOT_BYTES // 4).view(torch.float32) for each in bits]
        assert same_sums(one_with_machine_code, large)


@thorough
@ranks(2)
def test_as_many_rounds_as_steps_take_and_more() -> None:
    with engine() as e, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_rounds, "MOST", 36 * 2)
        for key, op in enumerate(OPS):
            for rounds in (33, 36, 37) if op == "broadcast" else (33,):
                check(e, op, rounds_of(op, 2, rounds), key)


@ranks(3)
def test_splits_that_are_equal_on_one_rank_only() -> None:
    """Rank 1 keeps ``most`` rows more for itself."""
    rank, everyone = interlace.get_rank(), range(3)
    interlace.all_reduce(torch.ones(1 << 20))  # makes the ring
    cases = [
        *[(3, most) for most in (0, 1000, 20_000, 300_000)],
        *[(60_000, most) for most in (1, 200_000)],
    ]
    for (rows, most), turn in itertools.product(cases, range(4)):
        sent = [rows + most * (rank == peer == 1) for peer in everyone]
        parts = [
            torch.full((length, 5), 100.0 * turn + 10 * rank + peer)
            for peer, length in enumerate(sent)
        ]
        output = torch.zeros(sum(sent), 5)
        splits = () if rank == 0 else (sent, sent)
        interlace.all_to_all_single(output, torch.cat(parts), *splits)
        for peer, part in enumerate(output.split(sent)):
            assert (part == 100 * turn + 10 * peer + rank).all(), (rows, most, turn)


@ranks(2)
def test_lists_of_steps_are_not_kept_without_end() -> None:
    with engine() as e, pytest.MonkeyPatch.context() as patch:
        for number, nbytes in ((5, 1 << 20), (1000, 20_000)):
            patch.setattr(message_steps, "KEPT", number)
            patch.setattr(message_steps, "KEPT_BYTES", nbytes)
            for key in range(60):
                size = 8 * key + (key % 4 == 0) * SLOT_BYTES
                check(e, ("all_reduce", "broadcast")[key % 2], size, key, torch.int64)
                kept = [steps.nbytes for steps in e._steps._kept.values()]
                assert len(kept) <= number and sum(kept) <= nbytes


@pytest.mark.parametrize("op", ["all_reduce", "barrier"])
@ranks(2)
def test_ctrl_c_while_a_peer_is_late(op: str, tmp_path: Path) -> None:
    """No timeout would end rank 0's wait for rank 1 in time."""
    done = tmp_path / "done"
    with engine() as e:
        e.barrier(Call("barrier"))
        if e.rank == 1:
            while not done.exists():
                time.sleep(0.005)
            return
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                if op == "barrier":
                    e.barrier(Call(op))
                else:
                    e.all_reduce(Call(op), torch.zeros(4), "sum")
        finally:
            signal.signal(signal.SIGINT, before)
            done.touch()
