"""Agreement of ranks on GPUs on their hosts, by processes: calls, and messages, in memory of the host."""

import random
import time
from typing import Any

import pytest
import torch

from interlace.groups.groups import default_group
from interlace.runtime.core.call import Call, compare
from interlace.runtime.places.gpu.agreement import NOTES, Agreement
from interlace.runtime.places.gpu.process_place import DeviceProcessPlace
from ranks import ranks
from tiers import thorough


def call(number: int, part: Any = None) -> Call:
    return Call("an op", (("number", number),), part=part)


@ranks(3)
def test_answers_are_right_in_any_order_of_calls() -> None:
    place = default_group().place
    world_size = place.world_size
    agreement = Agreement(place)
    common, own = random.Random(3), random.Random(place.rank)
    for _ in range(600):
        kind, number = common.random(), common.randrange(20)
        if own.random() < 0.02:
            time.sleep(0.002)
        if kind < 0.6:
            made = call(number)
            assert agreement.agree(made) == [made.message] * world_size
        elif kind < 0.8:
            parts = compare(agreement.agree(call(number, (number, place.rank))))
            assert parts == [(number, rank) for rank in range(world_size)]
        else:
            payload = bytes([place.rank, number]) * common.randrange(1, 4000)
            answers = agreement.exchange(payload, "an exchange")
            starts = [bytes([rank, number]) for rank in range(world_size)]
            assert [answer[:2] for answer in answers] == starts
        assert agreement.mismatch() is None


@ranks(2)
def test_a_rank_runs_ahead_but_not_for_ever() -> None:
    place = default_group().place
    agreement = Agreement(place)
    agreement.agree(call(1))
    place.exchange(b"", "in step")
    lead = NOTES - 1 if place.rank == 0 else 0
    for _ in range(lead):
        agreement.agree(call(1))
    place.exchange(b"", "rank 0 is ahead")
    for _ in range(5 * NOTES - 1 - lead):
        agreement.agree(call(1))
    numbers = place.exchange(str(agreement.number).encode(), "done")
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("known", [False, True])
@ranks(3)
def test_a_mismatch_is_found_by_every_rank(known: bool) -> None:
    """A rank that has run ahead finds the mismatch when it looks."""
    place = default_group().place
    agreement, said = Agreement(place), ""
    for number in (1, 2) if known else (1,):
        agreement.agree(call(number))
    try:
        compare(agreement.agree(call(2 if place.rank == 2 else 1)))
    except ValueError as error:
        said = str(error)
    place.exchange(b"", "all have called")
    said += str(agreement.mismatch())
    place.exchange(b"", "all have looked")
    assert "number differs between ranks: 1 on rank 0, 2 on rank 2" in said


@thorough
@ranks(2)
def test_more_kinds_of_calls_than_are_kept() -> None:
    place = default_group().place
    agreement = Agreement(place)
    for number in 2 * list(range(1100)):
        assert compare(agreement.agree(call(number, place.rank))) == [0, 1]
        if number % 7 == 0:
            agreement.exchange(f"{number} {place.rank}".encode(), "an exchange")
    assert agreement.exchange(b"", "nothing") == [b"", b""]


@ranks(3)
def test_messages_of_a_gpu_go_by_way_of_the_host() -> None:
    """Tensors of the CPU take the place of a GPU's."""
    place, brought = default_group().place, list[torch.Tensor]()

    class WithoutGpu(DeviceProcessPlace):
        def __init__(self) -> None:
            self.processes = place

        def _allocate(self, nbytes: int) -> Any: ...

        def _order_messages(self) -> None: ...

        def _bring(self, to: torch.Tensor, source: torch.Tensor) -> Any:
            to.copy_(source)
            brought.append(to)

    messages = WithoutGpu()
    after, before = (place.rank + 1) % 3, (place.rank - 1) % 3
    for number in range(4):
        x, y = torch.full((1000,), 10.0 * number + place.rank), torch.empty(1000)
        receiving = messages.recv(y, before if number % 2 else None, number)
        sending = messages.send(x, after, number)
        x.fill_(-1)  # was copied
        outcome = receiving.result(20)
        assert outcome.source is not None and outcome.source() == before
        assert receiving.done() and receiving.exception() is None
        sending.result(20)
        assert brought.pop() is not None and not brought
        assert (y == 10.0 * number + before).all()
    with_error = messages.recv(torch.empty(3), before, 99)
    messages.send(torch.empty(4), after, 99)
    assert isinstance(with_error.exception(20), ValueError)
