"""``StreamEngine`` in ``sim``: every algorithm and form of memory.

Each op runs twice in a run with another payload, so that the second finds the memory of the first. All
methods with every dtype, uneven and empty parts: ``sim/api/test_api_operations.py``.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.ops.collectives.stream_engine import StreamEngine
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.tuning.configuration import override
from tiers import few

WORLDS = [1, 2, 3, 4, 5]
ALGORITHMS = ["auto", "copy", "kernel"]


def forms(*names: str) -> Any:
    """Return every form with every algorithm; "auto" does not depend on the form, so it has the first."""
    each = [(form, algorithm) for form in names for algorithm in ALGORITHMS[1:]]
    return pytest.mark.parametrize(("form", "algorithm"), [(names[0], "auto"), *each])


ROUNDS = 2
POISON = -77.0


def run_op(
    op: str, start: Callable[[Engine, Call], Any], algorithm: str = "auto", **call: Any
) -> None:
    communicator = default_group()
    assert isinstance(communicator.engine, StreamEngine)
    made = Call(op, (("algorithm", algorithm),), **call)
    communicator.run(made.op, lambda: start(communicator.engine, made), async_op=False)


def payload(length: int, *key: int) -> torch.Tensor:
    """Return numbers that identify their source, and are small enough for exact sums."""
    base = 0
    for part in key:
        base = base * 7 + part + 1
    return (torch.arange(length) + base).float()


def poisoned(length: int) -> torch.Tensor:
    return torch.full((length,), POISON)


def check(got: torch.Tensor, expected: torch.Tensor, *about: Any) -> None:
    assert torch.equal(got, expected), (about, got, expected)


def lengths_of(world: int, kind: str) -> list[int]:
    return {
        "even": [5] * world,
        "uneven": [(3 * r + 2) % 7 for r in range(world)],  # 2 5 1 4 0
        "empty": [0] * world,
        "one has all": [0] * (world - 1) + [17],
    }[kind]


KINDS = ["even", "uneven", "empty", "one has all"]
cases = pytest.mark.parametrize(
    ("world", "kind"),
    few(
        itertools.product(WORLDS, KINDS),
        *itertools.product([1, 3], KINDS),
        (2, "uneven"),
        (5, "uneven"),
        (5, "one has all"),
    ),
)


def on_ranks(world: int = 2, seeds: int = 2) -> Callable[[Callable[..., None]], Any]:
    """Run a test's body on the ranks of a world, in this many orders of their steps.

    A parameter of the test named ``world`` replaces the number of ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            size = given.get("world", world)
            for seed in range(1 if size == 1 else seeds):
                interlace.run(lambda: body(**given), size, seed=seed)

        return test

    return decorate


# -- moving ------------------------------------------------------------------------------------


@forms("apart", "neighbours", "in place")
@cases
@on_ranks()
def test_all_gather(world: int, kind: str, form: str, algorithm: str) -> None:
    lengths, rank = lengths_of(world, kind), interlace.get_rank()
    for number in range(ROUNDS):
        outputs = [poisoned(length) for length in lengths]
        if form != "apart":
            outputs = list(poisoned(sum(lengths)).split(lengths))
        input = payload(lengths[rank], rank, number)
        if form == "in place":
            input = outputs[rank].copy_(input)
        run_op("all_gather", lambda e, c, o=outputs, i=input: e.all_gather(c, o, i), algorithm)
        for source, output in enumerate(outputs):
            check(output, payload(lengths[source], source, number), source)


@pytest.mark.parametrize("algorithm", ["copy", "kernel"])
@on_ranks(3, seeds=4)
def test_all_gather_whose_input_lies_in_the_part_of_another(algorithm: str) -> None:
    rank, whole = interlace.get_rank(), poisoned(12)
    outputs = list(whole.split(4))
    input = whole[2:6].copy_(payload(4, rank))
    run_op("all_gather", lambda e, c: e.all_gather(c, outputs, input), algorithm)
    for source, output in enumerate(outputs):
        check(output, payload(4, source), source)


@pytest.mark.parametrize("world", few(WORLDS, 1, 3, 5))
@on_ranks()
def test_all_to_all_in_place(world: int) -> None:
    rank = interlace.get_rank()
    for number in range(ROUNDS):
        parts = [payload(3, rank, peer, number) for peer in range(world)]
        run_op("all_to_all", lambda e, c, p=parts: e.all_to_all(c, p, p))
        for source, part in enumerate(parts):
            check(part, payload(3, source, rank, number), source)


@cases
@on_ranks()
def test_gather_in_place(world: int, kind: str) -> None:
    lengths, rank = lengths_of(world, kind), interlace.get_rank()
    for root in range(world):
        input = payload(lengths[rank], rank, root)
        outputs = [poisoned(length) for length in lengths] if rank == root else None
        if outputs is not None:
            outputs[rank] = input
        run_op("gather", lambda e, c, o=outputs, i=input, r=root: e.gather(c, o, i, r))
        for source, output in enumerate(outputs or []):
            check(output, payload(lengths[source], source, root), source)
        check(input, payload(lengths[rank], rank, root))


@cases
@on_ranks()
def test_scatter_in_place(world: int, kind: str) -> None:
    lengths, rank = lengths_of(world, kind), interlace.get_rank()
    for root in range(world):
        inputs = [payload(n, r, root) for r, n in enumerate(lengths)] if rank == root else None
        output = poisoned(lengths[rank]) if inputs is None else inputs[rank]
        run_op("scatter", lambda e, c, o=output, i=inputs, r=root: e.scatter(c, o, i, r))
        check(output, payload(lengths[rank], rank, root), root)


# -- reducing ----------------------------------------------------------------------------------


def summed(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0) / (len(parts) if op == "avg" else 1)


@forms("apart", "neighbours", "in place", "in another part")
@cases
@on_ranks()
def test_reduce_scatter(world: int, kind: str, form: str, algorithm: str) -> None:
    lengths, rank = lengths_of(world, kind), interlace.get_rank()
    for op in ("sum", "avg"):
        inputs = [payload(n, owner, rank) for owner, n in enumerate(lengths)]
        if form != "apart":
            inputs = list(torch.cat(inputs).split(lengths))
        output = poisoned(lengths[rank])
        if form == "in place":
            output = inputs[rank]
        elif form == "in another part":
            other = inputs[(rank + 1) % world]
            output = other[: lengths[rank]] if other.numel() >= lengths[rank] else output
        run_op(
            "reduce_scatter",
            lambda e, c, o=output, i=inputs, op=op: e.reduce_scatter(c, o, i, op),
            algorithm,
        )
        parts = [payload(lengths[rank], rank, source) for source in range(world)]
        check(output, summed(op, parts), op)


@pytest.mark.parametrize("algorithm", ["copy", "kernel"])
@on_ranks(3, seeds=6)
def test_reduce_scatter_whose_output_lies_in_a_part_that_is_sent_late(algorithm: str) -> None:
    """One program may sum a block before another program has sent the data in its place."""
    rank = interlace.get_rank()
    inputs = list(torch.cat([payload(16, owner, rank) for owner in range(3)]).split(16))
    output = inputs[rank - 1]
    with override(block_elements=4):
        run_op("reduce_scatter", lambda e, c: e.reduce_scatter(c, output, inputs, "sum"), algorithm)
    check(output, summed("sum", [payload(16, rank, source) for source in range(3)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("algorithm", ["auto", "copy"])
@on_ranks()
def test_a_single_element_may_have_any_stride(dtype: torch.dtype, algorithm: Any) -> None:
    one = torch.arange(3).to(dtype)[1::2] + interlace.get_rank()
    outputs = [torch.zeros(3, dtype=dtype)[1::2] for _ in range(2)]
    interlace.all_gather(outputs, one.as_strided((1,), (2,)), algorithm=algorithm)
    assert [output.tolist() for output in outputs] == [[1], [2]]


GROUPS = [[0, 1], [3, 2], [3, 0, 2], [0, 1, 2, 3], [1]]


@on_ranks(4, seeds=1)
def test_groups_at_once() -> None:
    rank, pending = interlace.get_rank(), []
    groups = [(interlace.new_group(ranks), ranks) for ranks in GROUPS]
    if rank in GROUPS[2]:
        inner = interlace.new_group([2, 1], group=groups[2][0])
        groups.append((inner, [2, 0]))
    for number, (group, ranks) in 3 * list(enumerate(groups)):
        if rank in ranks:
            out, mine = poisoned(5 * len(ranks)), payload(5, rank, number)
            works = [
                interlace.all_gather(out, mine.clone(), group, async_op=True),
                interlace.all_reduce(mine, "sum", group, async_op=True),
            ]
            pending.append((works, out, mine, [payload(5, r, number) for r in ranks]))
    for works, out, mine, parts in reversed(pending):
        assert all(work is not None and work.wait() for work in works)
        check(out, torch.cat(parts))
        check(mine, summed("sum", parts))


@pytest.mark.parametrize(("dtype", "op"), [(torch.int32, "sum"), (torch.float32, "max")])
@on_ranks(seeds=1)
def test_no_kernel_for_what_kernels_cannot_do(dtype: torch.dtype, op: str) -> None:
    tensor = torch.ones(3, dtype=dtype)
    said = f'algorithm="kernel" does sum .* not op "{op}" of {dtype}'
    with pytest.raises(TypeError, match=said):
        run_op("all_reduce", lambda e, c: e.all_reduce(c, tensor, op), "kernel")
