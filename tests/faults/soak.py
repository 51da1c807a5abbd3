"""A soak: random ops of random sizes and dtypes, some asynchronous, compared bit for bit on every rank."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from faults.crew import BRIEF, LONG, crew
from faults.rows import Plan, Row, Trial
from support import payload

RANKS = 4
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
AT_ONCE = 50
"""Rounds after which ranks say how it goes."""


class Op(NamedTuple):
    """The outputs of an op, their right values, and the function that starts the op."""

    out: torch.Tensor
    expected: torch.Tensor
    start: Callable[[], Sequence[Any]]


def op_of(api: Any, chance: random.Random, number: int) -> Op:
    """Return a random op on numbers of no other op, which are never rounded."""
    rank, dtype, part = api.get_rank(), chance.choice(DTYPES), 1 << chance.randrange(15)
    inputs = [payload(each, number, (RANKS * part,), dtype) for each in range(RANKS)]
    mine, own = inputs[rank].clone(), slice(rank * part, (rank + 1) * part)
    exact = torch.float64 if dtype.is_floating_point else dtype
    total = torch.stack([each.to(exact) for each in inputs]).sum(0, dtype=exact).to(dtype)
    lazily: Any = {"async_op": chance.random() < 0.3}
    which, source = chance.randrange(6), chance.randrange(RANKS)
    before, out = (rank - 1) % RANKS, torch.empty(RANKS * part, dtype=dtype)
    if which == 0:
        return Op(mine, total, lambda: [api.all_reduce(mine, **lazily)])
    if which == 1:
        out = torch.empty(RANKS * RANKS * part, dtype=dtype)
        gathered = torch.cat(inputs)
        return Op(out, gathered, lambda: [api.all_gather_into_tensor(out, mine, **lazily)])
    if which == 2:
        out = torch.empty(part, dtype=dtype)
        return Op(out, total[own], lambda: [api.reduce_scatter_tensor(out, mine, **lazily)])
    if which == 3:
        return Op(mine, inputs[source], lambda: [api.broadcast(mine, source, **lazily)])
    if which == 4:
        parts = torch.cat([each[own] for each in inputs])
        return Op(out, parts, lambda: [api.all_to_all_single(out, mine, **lazily)])
    ring = lambda: [api.isend(mine, (rank + 1) % RANKS), api.irecv(out, before)]  # noqa: E731
    return Op(out, inputs[before], ring)


def rounds(join: Any, end: Any, seconds: float, broken: bool) -> None:
    """Run ops until rank 0 reports the end of the time; report the ms of each op, now and then, and the
    end. In the control rank 2 finds a bit changed in its tenth result.
    """
    api, chance, number, ms = join(), random.Random(8), 0, []
    until, go_on = time.monotonic() + seconds, torch.ones(1)
    while go_on:
        for _ in range(AT_ONCE):
            number += 1
            op = op_of(api, chance, number)
            began = time.monotonic()
            for work in op.start():
                if work is not None:
                    work.wait()
            ms.append(1e3 * (time.monotonic() - began))
            if broken and number == 10 and api.get_rank() == 2:
                op.out.view(torch.uint8)[0] ^= 1
            same = torch.equal(op.out.view(torch.uint8), op.expected.view(torch.uint8))
            assert same, f"round {number}: {op.out} is not {op.expected}"
        go_on[0] = float(time.monotonic() < until)
        api.broadcast(go_on, 0)
        end.send(ms)
        ms = []
    end.send("the end")


def soaked(place: str, plan: Plan) -> Iterator[Trial]:
    timeout = BRIEF if plan.broken else LONG / 2
    with crew(place, RANKS, rounds, plan.seconds, plan.broken, timeout=timeout) as team:
        while (reports := team.reports())[0] != "the end":
            for each in zip(*reports, strict=True):
                yield Trial(True, [max(each)])


def rows() -> list[Row]:
    return [
        Row("soak of random ops", place, partial(soaked, place), share=0.5, few_seconds=1.0)
        for place in ("shm", "hosts")
    ]
