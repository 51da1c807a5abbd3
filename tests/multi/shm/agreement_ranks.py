"""Ranks of test_device_agreement.py: agree on calls through memory of the host."""

import random
import time
from typing import Any

import torch

from interlace.groups.groups import default_group
from interlace.runtime.core.call import Call, compare
from interlace.runtime.places.gpu.agreement import NOTES, Agreement
from interlace.runtime.places.gpu.process_place import HostMessages


def call(number: int, part: Any = None) -> Call:
    return Call("an op", (("number", number),), part=part)


def random_calls(rounds: int) -> int:
    """Known and new calls, with and without parts, at ranks that are slow in turn; how many were right."""
    place = default_group().place
    agreement, right = Agreement(place), 0
    common, own = random.Random(3), random.Random(place.rank)
    for _ in range(rounds):
        kind, number = common.random(), common.randrange(20)
        if own.random() < 0.02:
            time.sleep(0.002)
        if kind < 0.6:
            made = call(number)
            answers = agreement.agree(made)
            right += answers == [made.message] * place.world_size
        elif kind < 0.8:
            parts = compare(agreement.agree(call(number, (number, place.rank))))
            right += parts == [(number, rank) for rank in range(place.world_size)]
        else:
            payload = bytes([place.rank, number]) * common.randrange(1, 4000)
            answers = agreement.exchange(payload, "an exchange")
            right += [answer[:2] for answer in answers] == [
                bytes([rank, number]) for rank in range(place.world_size)
            ]
        assert agreement.mismatch() is None
    return right


def ahead() -> tuple[int, int]:
    """How far rank 0 gets while nobody else calls, and that it gets on once they do."""
    place = default_group().place
    agreement = Agreement(place)
    agreement.agree(call(1))
    place.exchange(b"", "in step")
    lead = NOTES - 1 if place.rank == 0 else 0
    for _ in range(lead):
        agreement.agree(call(1))
    place.exchange(b"", "rank 0 is ahead")
    if place.rank == 0:
        for _ in range(4 * NOTES):
            agreement.agree(call(1))
    else:
        for _ in range(5 * NOTES - 1):
            agreement.agree(call(1))
    place.exchange(b"", "done")
    return lead, agreement.number


def many_calls(count: int) -> bool:
    """More kinds of calls than are kept, again and again, between payloads that are not."""
    place = default_group().place
    agreement, good = Agreement(place), True
    for number in [*range(count), *range(count)]:
        parts = compare(agreement.agree(call(number, place.rank)))
        good &= parts == list(range(place.world_size))
        if number % 7 == 0:
            agreement.exchange(f"{number} {place.rank}".encode(), "an exchange")
    return good and agreement.exchange(b"", "nothing") == [b""] * place.world_size


def mismatch(known: bool) -> list[str]:
    """One rank calls something else; what every rank finds."""
    place = default_group().place
    agreement = Agreement(place)
    for number in (1, 2) if known else (1,):
        agreement.agree(call(number))
    different = place.rank == place.world_size - 1
    texts = []
    try:
        compare(agreement.agree(call(2 if different else 1)))
    except ValueError as error:
        texts.append(str(error))
    place.exchange(b"", "all have called")
    problem = agreement.mismatch()
    texts.append(str(problem))
    place.exchange(b"", "all have looked")
    return texts


def messages_by_way_of_the_host(rounds: int) -> list[list[float]]:
    """A ring of messages, with tensors of the CPU's in the place of a GPU's; from anyone, too."""
    place = default_group().place
    brought: list[torch.Tensor] = []

    def bring(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)
        brought.append(to)

    messages = HostMessages(place.new_engine(None), bring)
    rank, size = place.rank, place.world_size
    seen = []
    for number in range(rounds):
        x, y = torch.full((1000,), 10.0 * number + rank), torch.empty(1000)
        receiving = messages.recv(y, (rank - 1) % size if number % 2 else None, number)
        sending = messages.send(x, (rank + 1) % size, number)
        x.fill_(-1)  # was copied
        outcome = receiving.result(20)
        assert outcome.source is not None and outcome.source() == (rank - 1) % size
        assert receiving.done() and receiving.exception() is None
        sending.result(20)
        assert brought.pop() is not None and not brought
        seen.append([float(y.min()), float(y.max())])
    with_error = messages.recv(torch.empty(3), (rank - 1) % size, 99)
    messages.send(torch.empty(4), (rank + 1) % size, 99)
    assert isinstance(with_error.exception(20), ValueError)
    return seen
