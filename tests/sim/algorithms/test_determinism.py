"""Results do not depend on the schedule, a seed is a schedule, and ops in flight never meet."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.tuning.configuration import override
from sim.algorithms.node_support import OPS, Started
from support import noise, payload, poisoned, schedule_digest, slow_rank, starved
from tiers import few

WORLD = 2
TILES = {
    **dict.fromkeys(("block_m", "block_n", "block_k", "block_elements"), 16),
    "programs": 2,
    "chunks": 1,
}


def of_kernel(op: Callable[..., Any], out: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    op(out, *given, algorithm="kernel")
    return out


FUSED: dict[str, Any] = {"algorithm": "fused"}
KERNELS: dict[str, Callable[[int], torch.Tensor]] = {
    "all_gather_matmul": lambda rank: interlace.all_gather_matmul(
        noise(rank, 1, (16, 8)), noise(0, 2, (8, 12)), **FUSED
    ),
    "matmul_reduce_scatter": lambda rank: interlace.matmul_reduce_scatter(
        noise(rank, 3, (31, 8)), noise(rank, 4, (8, 12)), **FUSED
    ),
    "matmul_all_reduce": lambda rank: interlace.matmul_all_reduce(
        noise(rank, 5, (13, 8)), noise(rank, 6, (8, 12)), **FUSED
    ),
    "all_gather": lambda rank: of_kernel(
        interlace.all_gather, torch.empty(WORLD * 16), noise(rank, 7, (16,))
    ),
    "reduce_scatter": lambda rank: of_kernel(
        interlace.reduce_scatter, torch.empty(13), noise(rank, 8, (WORLD * 13,))
    ),
    "all_reduce": lambda rank: of_kernel(interlace.all_reduce, noise(rank, 9, (13,))),
}


def bits(results: list[torch.Tensor]) -> list[str]:
    return [hashlib.sha1(t.contiguous().numpy().tobytes()).hexdigest() for t in results]


@pytest.mark.parametrize("seeds", few([20, 200], 20))
@pytest.mark.parametrize("op", KERNELS)
def test_same_bits_in_every_schedule(op: str, seeds: int) -> None:
    def on_rank() -> tuple[torch.Tensor, str]:
        result = KERNELS[op](interlace.get_rank())
        return result, schedule_digest()

    seen, schedules = set(), set()
    for seed in range(seeds):
        with override(**TILES), poisoned():
            results = interlace.run(on_rank, WORLD, seed=seed)
        seen.add(tuple(bits([result for result, _ in results])))
        schedules.add(results[0][1])
    assert len(seen) == 1
    assert len(schedules) > seeds * 0.95, "the seeds hardly changed the schedule"
    if op in ("all_reduce", "matmul_all_reduce", "all_gather"):
        (only,) = seen
        assert len(set(only)) == 1, "ranks differ"


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("slow", range(WORLD))
def test_same_bits_with_a_slow_rank(op: str, slow: int) -> None:
    def on_rank() -> list[torch.Tensor]:
        return [KERNELS[op](interlace.get_rank()) for _ in range(3)]

    seen = set()
    for seed in range(2):
        with override(**TILES), poisoned(), starved(slow_rank(slow)):
            for results in interlace.run(on_rank, WORLD, seed=seed):
                assert len(set(bits(results))) == 1
            seen.add(tuple(bits(results)))
    assert len(seen) == 1


def test_a_seed_is_a_schedule() -> None:
    def on_rank() -> str:
        KERNELS["matmul_reduce_scatter"](interlace.get_rank())
        return schedule_digest()

    first = [interlace.run(on_rank, WORLD, seed=seed) for seed in range(8)]
    again = [interlace.run(on_rank, WORLD, seed=seed) for seed in range(8)]
    assert first == again
    assert len({digests[0] for digests in first}) == 8


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
def test_all_ranks_get_the_same_bits(algorithm: str) -> None:
    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        x, w = noise(rank, 1, (33, 50)), noise(rank, 2, (50, 17))
        return interlace.matmul_all_reduce(x, w, algorithm=algorithm)

    results = interlace.run(on_rank, 5)
    assert len(set(bits(results))) == 1


def in_flight(group: Any, call: int) -> list[Started]:
    """Start one op of each kind."""
    started = [start(group, call + number) for number, start in enumerate(OPS.values())]
    parts = [payload(rank, call + 10, (5, 8)) for rank in range(group.world_size)]
    out, options = torch.empty(group.world_size * 5, 8), {"group": group, "async_op": True}
    copied = interlace.all_gather(out, parts[group.rank], algorithm="copy", **options)
    pipelined = interlace.all_gather_matmul(
        parts[group.rank] * 2, torch.eye(8), algorithm="pipelined", **options
    )  # type: ignore[call-overload]
    return [*started, (copied, out, torch.cat(parts)), (pipelined, None, torch.cat(parts) * 2)]


@pytest.mark.parametrize("slow", few([None, 0, 1, 2], None, 1))
def test_ops_in_flight_do_not_meet(slow: int | None) -> None:
    def on_rank() -> None:
        pair = interlace.new_group([2, 0])
        started = in_flight(default_group(), 100)
        if interlace.get_rank() != 1:
            started += in_flight(pair, 200)
        started += in_flight(default_group(), 300)
        for number, (work, out, right) in reversed(list(enumerate(started))):
            result = work.wait()
            assert torch.equal(result if out is None else out, right), f"op {number}"
            assert work.is_completed()

    for seed in range(2):
        with poisoned(), starved(slow_rank(-1 if slow is None else slow)):
            interlace.run(on_rank, 3, seed=seed)


def test_a_push_does_not_hit_what_a_third_rank_still_reads() -> None:
    """Op 1 is pulled, and op 3 pushes on the same channel. Rank 1 may push into rank 2 only after slow
    rank 0 has read the data of op 1.
    """

    def on_rank() -> None:
        rank, started = interlace.get_rank(), []
        one = torch.ones(1, 4), torch.ones(4, 1)
        for call in range(2):
            out = [torch.empty(64) for _ in range(3)]
            shard = payload(rank, call + 10, (8 if rank == 1 else 1, 8))
            works = [
                interlace.all_gather(out, payload(rank, call, (64,)), None, True, algorithm="copy"),
                interlace.matmul_reduce_scatter(*one, async_op=True, algorithm="fused"),
                interlace.all_gather_matmul(shard, torch.eye(8), async_op=True, algorithm="fused"),
                interlace.matmul_reduce_scatter(*one, async_op=True, algorithm="fused"),
            ]
            started.append((out, works))
        for call, (out, works) in enumerate(started):
            works[0].wait()
            for source in range(3):
                assert torch.equal(out[source], payload(source, call, (64,)))
            works[2].wait()

    for seed in range(4):
        with starved(slow_rank(0)):
            interlace.run(on_rank, 3, seed=seed)
