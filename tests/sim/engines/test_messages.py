"""Messages between simulated ranks: ``StreamEngine.send`` and ``recv`` in ``sim``."""

from concurrent.futures import Future

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.core.call import Call
from interlace.runtime.core.stream import Outcome
from interlace.runtime.core.work import Work
from interlace.verify import races
from sim.engines.test_stream_engine import POISON, WORLDS, check, on_ranks, payload, poisoned


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
