"""Collectives of one host as steps of machine code: the same bytes, waits and errors as in Python."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.distributed import HashStore

import interlace
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.places.shm import engine as host_engine, machine_code
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.meetings import StoreMeeting
from multi.shm import steps_ranks
from tiers import few, thorough

pytestmark = pytest.mark.skipif(not machine_code.available(), reason="no machine code on this host")


def run(fn: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(fn, world_size, *args, place="shm")


@pytest.mark.parametrize(
    ("world_size", "which"),
    few(
        [(2, "all"), (3, "all"), (4, "all"), (2, "odd"), (3, "first"), (3, "none"), (4, "odd")],
        (2, "odd"),
    ),
)
def test_every_op_in_every_size(world_size: int, which: str) -> None:
    assert run(steps_ranks.every_size, world_size, world_size, which) == [[]] * world_size


@pytest.mark.parametrize("world_size", few([2, 3], 2))
def test_every_dtype(world_size: int) -> None:
    assert run(steps_ranks.every_dtype, world_size) == [[]] * world_size


NAN = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
AS_INT = {4: torch.int32, 2: torch.int16}


@pytest.fixture(scope="module")
def one_with_machine_code() -> Iterator[list[Engine]]:
    """Two ranks, which are threads; one sums with machine code, one without."""
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
    integers = AS_INT[dtype.itemsize]
    bits = torch.tensor(words, dtype=torch.int64).T.contiguous() | all_nan * NAN[dtype]
    tensors = [row.to(integers).view(dtype) for row in bits]

    def on_rank(rank: int) -> None:
        one_with_machine_code[rank].all_reduce(Call("all_reduce"), tensors[rank], "sum")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(on_rank, range(2)))
    assert torch.equal(tensors[0].view(integers), tensors[1].view(integers))


def test_ranks_have_the_same_bits_of_nan_in_a_large_sum(
    one_with_machine_code: list[Engine],
) -> None:
    nbytes = 2 * steps_ranks.SLOT_BYTES
    for _ in range(2):  # the first makes the rings
        tensors = [
            torch.tensor([0x7FC00001 + n, 0x7FC00002 - n], dtype=torch.int32) for n in (0, 1)
        ]
        large = [each.repeat(nbytes // each.nbytes).view(torch.float32) for each in tensors]

        def on_rank(rank: int, large: list[torch.Tensor] = large) -> None:
            one_with_machine_code[rank].all_reduce(Call("all_reduce"), large[rank], "sum")

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(on_rank, range(2)))
        assert torch.equal(large[0].view(torch.int32), large[1].view(torch.int32))


@pytest.mark.parametrize("world_size", [2, 3])
def test_who_calls_a_sum_last_waits_for_nobody(world_size: int) -> None:
    assert run(steps_ranks.awaited, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_ways_of_writing_are_chosen_by_writing_and_reading_not_by_waiting(world_size: int) -> None:
    assert run(steps_ranks.counted, world_size) == [[2.0]] * world_size


@thorough
def test_as_many_rounds_as_steps_take_and_more() -> None:
    assert run(steps_ranks.many_rounds, 2) == [[]] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_symmetric_memory_on_one_rank_only(world_size: int) -> None:
    assert run(steps_ranks.shared_on_one_rank, world_size, 0) == [[]] * world_size


@pytest.mark.parametrize(
    ("rows", "most"), [(3, 0), (3, 1000), (3, 20_000), (3, 300_000), (60_000, 1), (60_000, 200_000)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_splits_that_are_equal_on_one_rank_only(world_size: int, rows: int, most: int) -> None:
    assert run(steps_ranks.uneven_elsewhere, world_size, rows, most) == [[]] * world_size


def test_lists_of_steps_are_not_kept_without_end() -> None:
    assert run(steps_ranks.many_sizes, 2) == [[]] * 2


def test_inference_tensors() -> None:
    assert run(steps_ranks.inference_tensors, 2) == [[]] * 2


def test_a_rank_that_is_late_is_waited_for() -> None:
    assert run(steps_ranks.late, 3, 0.05) == [[]] * 3


@pytest.mark.parametrize("nbytes", [16, 1 << 20, 40 << 20])
def test_a_death_is_told_to_all_and_names_the_rank(nbytes: int, tmp_path: Path) -> None:
    with pytest.raises(interlace.InterlaceError):
        interlace.run(steps_ranks.died, 3, str(tmp_path), nbytes, place="shm")
    for rank in (0, 1):
        assert (tmp_path / str(rank)).read_text().startswith("PeerDiedError: rank 2 ")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_difference_is_told_on_all_ranks_and_the_group_goes_on(world_size: int) -> None:
    texts = run(steps_ranks.mismatched, world_size)
    assert all(text == texts[0] for text in texts)
    assert len(texts[0]) == 10
    assert all("shape of tensor differs between ranks" in text for text in texts[0][:9])
    assert texts[0][9] == (
        "ranks call different ops at the same time: rank 0 calls barrier, rank 1 calls all_gather"
    )


@pytest.mark.parametrize("nbytes", [16, 4 << 20])
def test_an_abort_ends_waits(nbytes: int) -> None:
    assert all(
        "rank 1 aborted the group: enough" in text for text in run(steps_ranks.aborted, 3, nbytes)
    )


def test_another_thread_than_the_main_one() -> None:
    assert run(steps_ranks.in_a_thread, 2) == [["done"]] * 2


@pytest.mark.parametrize("op", [steps_ranks.small_op, steps_ranks.middle_op])
def test_ctrl_c_while_a_peer_is_late(op: Any, tmp_path: Path) -> None:
    assert run(steps_ranks.interrupted, 2, str(tmp_path), op) == [True, True]
