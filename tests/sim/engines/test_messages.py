"""Messages between simulated ranks (``StreamEngine.send`` and ``recv``), and sums of sparse tensors."""

from concurrent.futures import Future

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.core.call import Call
from interlace.runtime.core.stream import Outcome
from interlace.runtime.core.work import Work
from interlace.runtime.numerics import reductions
from interlace.verify import races
from sim.engines.test_stream_engine import POISON, WORLDS, check, on_ranks, payload, poisoned
from support import failure


def send(tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
    call = Call("send")
    return default_group().transfer(call, lambda e: e.send(call, tensor, peer, tag), tensor)


def recv(tensor: torch.Tensor, peer: int | None, tag: int = 0) -> Work:
    call = Call("recv")
    return default_group().transfer(call, lambda e: e.recv(call, tensor, peer, tag), tensor)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks(seeds=6)
def test_a_ring_of_messages_in_any_order_of_calls(world: int) -> None:
    rank = interlace.get_rank()
    after, before = (rank + 1) % world, (rank - 1) % world
    received = [poisoned(length) for length in (0, 1, 9)]
    if rank % 2:
        works = [recv(tensor, before, tag) for tag, tensor in enumerate(received)]
    sent = [payload(length, rank, length) for length in (0, 1, 9)]
    for tag in (2, 0, 1):
        assert send(sent[tag], after, tag).wait() is True
        sent[tag].fill_(POISON)  # it may be used again
    if not rank % 2:
        works = [recv(tensor, before, tag) for tag, tensor in enumerate(received)]
    for work, tensor in reversed(list(zip(works, received, strict=True))):
        assert work.wait() is True and work.source_rank() == before and work.is_success()
        check(tensor, payload(len(tensor), before, len(tensor)))


@on_ranks(seeds=6)
def test_messages_of_one_tag_arrive_in_the_order_they_were_sent() -> None:
    if interlace.get_rank() == 0:
        for number in range(4):
            send(payload(2, number), 1)
        return
    received = [poisoned(2) for _ in range(4)]
    works = [recv(tensor, 0) for tensor in received]
    for number in (3, 1, 0, 2):
        works[number].wait()
        check(received[number], payload(2, number), number)


@on_ranks(4, seeds=4)
def test_from_any_rank() -> None:
    if rank := interlace.get_rank():
        send(payload(3, rank), 0, 5)
        return
    sources = set()
    for _ in range(3):
        tensor = poisoned(3)
        source = recv(tensor, None, 5).source_rank()
        check(tensor, payload(3, source))
        sources.add(source)
    assert sources == {1, 2, 3}


def said_at_ends(*works: Work) -> list[str]:
    said = []
    for work in works:
        try:
            work.wait()
            assert work.is_success()
        except (TypeError, ValueError) as error:
            assert work.exception() is error and work.is_completed() and not work.is_success()
            said.append(f"{type(error).__name__}: {error}")
    return said


MISFITS = [
    "ValueError: recv: number of elements differs between ranks: 3 were sent by rank 0, 2 are "
    "received on rank 1 (tag 4)",
    "TypeError: recv: dtype of tensor differs between ranks: torch.int32 was sent by rank 0, "
    "torch.float32 is received on rank 1 (tag 4)",
]


@on_ranks(seeds=4)
def test_a_receive_that_does_not_fit_fails_on_both_ranks() -> None:
    """The sender gets the error at one of its next waits, because the message has already left."""
    if interlace.get_rank() == 0:
        works = [send(torch.ones(3), 1, 4), send(torch.ones(3, dtype=torch.int32), 1, 4)]
        works.append(send(payload(2, 1), 1, 4))
        assert said_at_ends(*works, recv(poisoned(1), 1, 5), recv(poisoned(1), 1, 5)) == MISFITS
        return
    for said in MISFITS:
        tensor = poisoned(2)
        work = recv(tensor, 0, 4)
        with pytest.raises((TypeError, ValueError)) as caught:
            work.wait()
        assert work.exception() is caught.value and not work.is_success()
        assert f"{type(caught.value).__name__}: {caught.value}" == said
        check(tensor, poisoned(2))
    recv(tensor, 0, 4).wait()
    check(tensor, payload(2, 1))
    for _ in range(2):
        send(payload(1, 1), 0, 5)


@on_ranks(1)
def test_a_message_to_oneself_that_does_not_fit_is_said_once() -> None:
    works = [send(torch.ones(3), 0, 4), recv(poisoned(2), 0, 4)]
    assert len(said_at_ends(*works, send(torch.ones(1), 0, 4), recv(poisoned(1), 0, 4))) == 1


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        (0, r"rank 1 user code waits for a message from rank 0 with tag 3 at test_messages\.py:"),
        (None, "a message from any rank with tag 3"),
    ],
)
def test_a_receive_without_a_message_is_a_deadlock_with_a_name(peer: int | None, told: str) -> None:
    def on_rank() -> None:
        if interlace.get_rank() == 1:
            recv(poisoned(2), peer, 3).wait()

    with pytest.raises(interlace.DeadlockError, match=told):
        interlace.run(on_rank, 2)


@on_ranks(seeds=1)
def test_a_receive_that_nobody_waits_for_may_stay_open() -> None:
    assert not recv(poisoned(2), 0, 3).is_completed()


@on_ranks(seeds=4)
def test_a_callback_of_a_receive_runs_as_the_receiver() -> None:
    if interlace.get_rank() == 0:
        send(torch.ones(1), 1)
        return
    ran: list[int] = []
    future: Future[Outcome] = default_group().engine.recv(Call("recv"), poisoned(1), 0, 0)
    future.add_done_callback(lambda _: ran.append(interlace.get_rank()))
    future.result()
    assert ran == [1]


def a_message(waits: bool) -> None:
    tensor = torch.ones(20)
    if interlace.get_rank() == 0:
        send(tensor, 1)
        tensor.zero_()
    else:
        work = recv(tensor, 0)
        if waits:
            work.wait()
        tensor.sum()
        work.wait()


def test_a_message_orders_and_reading_before_the_wait_is_a_race() -> None:
    report = races(a_message, 2, True, seeds=4)
    assert report.clean, str(report)
    report = races(a_message, 2, False, seeds=4)
    assert not report.errors and {f.kind for f in report.findings} <= {"write-read", "read-write"}
    assert not report.clean


ROWS, WIDTH = 6, 2


def entries(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return rows that overlap between ranks, one of them twice; rank 2 has none."""
    rows = torch.tensor([rank, rank + 1, rank + 1] if rank != 2 else [], dtype=torch.int64)
    values = torch.arange(1.0, 1 + rows.numel() * WIDTH).view(-1, WIDTH).to(dtype) + rank
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, WIDTH), check_invariants=True)


def reduced(op: str, async_op: bool) -> torch.Tensor:
    tensor = entries(interlace.get_rank())
    work = interlace.all_reduce(tensor, op, async_op=async_op)
    if work is not None:
        work.wait()
    assert tensor.is_sparse and tensor.is_coalesced()
    return tensor.to_dense()


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize(("op", "async_op"), [("sum", False), ("avg", False), ("sum", True)])
def test_equals_the_dense_sum(op: str, async_op: bool, place: str) -> None:
    world_size = 3
    expected = sum(entries(rank).to_dense() for rank in range(world_size))
    results = interlace.run(reduced, world_size, op, async_op, place=place)
    assert isinstance(expected, torch.Tensor)
    for result in results:
        torch.testing.assert_close(result, expected / (world_size if op == "avg" else 1))
        assert torch.equal(result, results[0])


def test_misuse() -> None:
    def maximum() -> None:
        interlace.all_reduce(entries(interlace.get_rank()), "max")

    def dtypes() -> None:
        rank = interlace.get_rank()
        interlace.all_reduce(entries(rank, torch.float32 if rank else torch.float64))

    def mixed() -> None:
        tensor = entries(interlace.get_rank())
        interlace.all_reduce(tensor if interlace.get_rank() else tensor.to_dense())

    assert "op of a sparse all_reduce must be one of sum, avg" in str(failure(maximum, 2))
    assert "dtype of tensor differs between ranks" in str(failure(dtypes, 2))
    assert "torch.float64 on rank 0, torch.float64, sparse COO on rank 1" in str(failure(mixed, 2))


def sums_on_ranks(op: str, *values: torch.Tensor) -> torch.Tensor:
    """Return the results of ranks that each have these entries of row 0."""

    def on_rank() -> torch.Tensor:
        own = values[interlace.get_rank()]
        rows = torch.zeros(1, len(own), dtype=torch.int64)
        tensor = torch.sparse_coo_tensor(rows, own, (ROWS,), check_invariants=True)
        interlace.all_reduce(tensor, op)
        return tensor._values()

    first, *others = interlace.run(on_rank, len(values))
    assert all(first.tolist() == other.tolist() for other in others)
    return first


def test_sums_are_rounded_once() -> None:
    half = torch.float16
    large, one = torch.tensor([2048], dtype=half), torch.ones(1, dtype=half)
    assert sums_on_ranks("sum", large, one, one).tolist() == [2050]
    assert sums_on_ranks("sum", torch.cat([large, one, one]), one[:0]).tolist() == [
        2050
    ]  # on one rank
    assert sums_on_ranks("avg", *[torch.tensor([60000.0], dtype=half)] * 3).tolist() == [60000]


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", reductions.DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_entries_are_reduced_as_dense_tensors_are(op: str, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex:
        parts = [torch.tensor([value], dtype=torch.float32).to(dtype) for value in (1.5, -4.0, 1.0)]
    elif dtype == torch.bool:
        parts = [torch.tensor([value]) for value in (True, False, True)]
    else:
        most = torch.iinfo(dtype).max
        parts = [torch.tensor([most - less], dtype=torch.uint64).to(dtype) for less in (0, 2, 50)]
    expected = torch.empty_like(parts[0])
    reductions.fold(op, parts, expected)
    assert sums_on_ranks(op, *parts).tolist() == expected.tolist()
