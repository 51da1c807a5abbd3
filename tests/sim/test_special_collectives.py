"""Plain collectives by the switch ("multimem") and with flags in their words ("low_latency")."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import interlace
from interlace import reference
from interlace.groups import default_group
from interlace.runtime import low_latency_algorithms
from interlace.runtime.configuration import override
from interlace.runtime.place_sim import SimStream
from support import failure, noise, payload, poison, poisoned, slow_rank, starved

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ANY = [F32, BF16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
SMALL_BLOCKS = {"block_elements": 16, "programs": 2}
WORLDS = st.sampled_from([1, 2, 3, 5])


def small_words() -> Any:
    """Programs of 8 words, so that a few numbers make several."""
    return mock.patch.object(low_latency_algorithms, "BLOCK_WORDS", 8)


class Launched(Counter[str]):
    """Which kernels ran, counted."""

    def __enter__(self) -> Launched:
        launch, seen = SimStream.launch, self

        def noting(stream: SimStream, made: Any) -> None:
            seen[made.name] += 1
            launch(stream, made)

        self._patch = mock.patch.object(SimStream, "launch", noting)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


# -- all_gather ------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=30)
@given(world=WORLDS, dtype=st.sampled_from(ANY), count=st.integers(1, 20), calls=st.integers(1, 5))
def test_low_latency_all_gather(world: int, dtype: torch.dtype, count: int, calls: int) -> None:
    """Ops in flight, of growing length: programs join in that have missed the ops before."""
    lengths = [count + 7 * call for call in range(calls)]
    lengths = [-(-length * dtype.itemsize // 4) * 4 // dtype.itemsize for length in lengths]

    def on_rank() -> list[torch.Tensor]:
        started = []
        for call, length in enumerate(lengths):
            out = poison(torch.zeros(world * length, dtype=dtype))
            own = payload(interlace.get_rank(), call, (length,), dtype)
            work = interlace.all_gather(out, own, async_op=True, algorithm="low_latency")
            started.append((work, out))
        for work, _ in started:
            work.wait()
        return [out for _, out in started]

    with poisoned(), small_words(), Launched() as seen:
        results = interlace.run(on_rank, world, seed=count)
    assert set(seen) == {"low_latency_all_gather_kernel"}, "and no finish_kernel"
    for outputs in results:
        for call, (out, length) in enumerate(zip(outputs, lengths, strict=True)):
            parts = [payload(rank, call, (length,), dtype) for rank in range(world)]
            assert out.tolist() == torch.cat(parts).tolist()


@hypothesis.settings(max_examples=30)
@given(
    world=WORLDS,
    dtype=st.sampled_from([F32, F16, BF16]),
    lengths=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    in_place=st.booleans(),
)
def test_multimem_all_gather(
    world: int, dtype: torch.dtype, lengths: list[int], in_place: bool
) -> None:
    """Shards of any lengths, of which the last vectors are not whole."""

    def on_rank() -> list[torch.Tensor]:
        rank = interlace.get_rank()
        whole = poison(torch.zeros(sum(lengths[:world]), dtype=dtype))
        outputs = list(torch.split(whole, lengths[:world]))
        own = payload(rank, 1, (lengths[rank],), dtype)
        if in_place:
            outputs[rank].copy_(own)
            own = outputs[rank]
        interlace.all_gather(outputs, own, algorithm="multimem")
        return outputs

    with poisoned(), override(**SMALL_BLOCKS):
        for outputs in interlace.run(on_rank, world):
            for source, output in enumerate(outputs):
                assert torch.equal(output, payload(source, 1, (lengths[source],), dtype))


# -- sums ------------------------------------------------------------------------------------------


@hypothesis.settings(max_examples=40)
@given(
    world=WORLDS,
    dtype=st.sampled_from([F32, F16, BF16]),
    count=st.integers(1, 60),
    how=st.sampled_from(["multimem sum", "low_latency sum", "low_latency avg"]),
)
def test_all_reduce(world: int, dtype: torch.dtype, count: int, how: str) -> None:
    algorithm, op = how.split()
    count += count % 2  # whole words

    def on_rank() -> list[torch.Tensor]:
        results = []
        for call in range(3):
            tensor = noise(interlace.get_rank(), call, (count,), dtype)
            results.append(
                (tensor, interlace.all_reduce(tensor, op, None, True, algorithm=algorithm))
            )
        for _, work in results:
            work.wait()
        return [tensor for tensor, _ in results]

    with poisoned(), small_words(), override(**SMALL_BLOCKS), Launched() as seen:
        results = interlace.run(on_rank, world, seed=count)
    assert seen[f"{algorithm}_all_reduce_kernel"] == 3 * world
    for call in range(3):
        inputs = [noise(rank, call, (count,), dtype) for rank in range(world)]
        expected, bound = reference.reduce_reference(inputs, op), reference.reduce_bound(inputs, op)
        for rank in range(world):
            assert reference.worst_ratio(results[rank][call], expected, bound) <= 1
            assert torch.equal(results[rank][call], results[0][call]), "bits differ between ranks"


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_multimem_reduce_scatter(dtype: torch.dtype, world: int, in_place: bool) -> None:
    lengths = [37, 5, 0][:world]

    def on_rank() -> torch.Tensor:
        rank = interlace.get_rank()
        inputs = list(torch.split(noise(rank, 1, (sum(lengths),), dtype), lengths))
        output = inputs[rank] if in_place else poison(torch.zeros(lengths[rank], dtype=dtype))
        interlace.reduce_scatter(output, inputs, algorithm="multimem")
        return output

    with poisoned(), override(**SMALL_BLOCKS):
        results = interlace.run(on_rank, world)
    inputs = [noise(rank, 1, (sum(lengths),), dtype) for rank in range(world)]
    whole, bound = reference.reduce_reference(inputs), reference.reduce_bound(inputs)
    parts = zip(torch.split(whole, lengths), torch.split(bound, lengths), strict=True)
    for mine, (expected, off) in zip(results, parts, strict=True):
        assert reference.worst_ratio(mine, expected, off) <= 1


# -- broadcast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_low_latency_broadcast(world: int) -> None:
    """Roots in turn, between other ops on the same words, one rank always behind."""

    def on_rank() -> list[list[int]]:
        rank = interlace.get_rank()
        results = []
        for call in range(4):
            tensor = payload(rank, call, (5 + 6 * call,), torch.int32)
            interlace.broadcast(tensor, call % world, algorithm="low_latency")
            results.append(tensor.tolist())
            interlace.all_reduce(torch.ones(3), algorithm="low_latency")
        return results

    expected = [
        payload(call % world, call, (5 + 6 * call,), torch.int32).tolist() for call in range(4)
    ]
    for slow in range(world):
        with small_words(), starved(slow_rank(slow)):
            assert interlace.run(on_rank, world, seed=slow) == [expected] * world


# -- the rest --------------------------------------------------------------------------------------


def test_words_are_allocated_once_and_counted() -> None:
    def on_rank() -> list[int]:
        held = [default_group().workspace_bytes]
        for count in (4, 8, 300, 4):
            interlace.all_reduce(torch.ones(count), algorithm="low_latency")
            held.append(default_group().workspace_bytes)
        return held

    (held, *others) = interlace.run(on_rank, 2)
    assert all(each == held for each in others)
    assert held[0] == 0 < held[1] == held[2] < held[3] == held[4]


def test_unaligned_memory_is_copied() -> None:
    def on_rank() -> list[torch.Tensor]:
        rank = interlace.get_rank()
        moved = torch.arange(9, dtype=torch.int8)[1:] + rank
        gathered = torch.zeros(17, dtype=torch.int8)[1:]
        interlace.all_gather(gathered, moved, algorithm="low_latency")
        summed = torch.ones(7, dtype=F16)[1:]
        interlace.all_reduce(summed, algorithm="low_latency")
        switched = torch.zeros(12, dtype=F16)
        interlace.all_gather(switched, torch.ones(7, dtype=F16)[1:], algorithm="multimem")
        return [gathered, summed, switched]

    for gathered, summed, switched in interlace.run(on_rank, 2):
        assert gathered.tolist() == [*range(1, 9), *range(2, 10)]
        assert summed.tolist() == [2.0] * 6 and switched.tolist() == [1.0] * 12


REFUSED = [
    (lambda: interlace.all_reduce(torch.ones(3, dtype=F16), algorithm="low_latency"),
     "all_reduce: algorithm=\"low_latency\" cannot do this: it moves words of 4 bytes, got 6 bytes"),
    (lambda: interlace.all_reduce(torch.ones(1 << 15), algorithm="low_latency"),
     "it is for at most 65536 bytes, got 131072"),
    (lambda: interlace.all_gather([torch.ones(2), torch.ones(4)], torch.ones(2 + 2 * interlace.get_rank()),
                                  algorithm="low_latency"), "it gathers equal shards only"),
    (lambda: interlace.reduce_scatter(torch.ones(2), torch.ones(4), algorithm="low_latency"),
     "use all_reduce"),
    (lambda: interlace.all_reduce(torch.ones(4), "avg", algorithm="multimem"),
     "algorithm=\"multimem\" reduces with op sum, got 'avg' on rank"),
    (lambda: interlace.broadcast(torch.ones(4), 0, algorithm="kernel"),
     "algorithm must be one of auto, copy, low_latency, got 'kernel'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_done_is_said(call: Any, message: str) -> None:
    error = failure(call, 2)
    assert isinstance(error, ValueError) and message in str(error)


def test_dtypes_without_sums_are_refused() -> None:
    for algorithm in ("multimem", "low_latency"):
        error = failure(
            lambda name: interlace.all_reduce(torch.ones(4).long(), algorithm=name), 2, algorithm
        )
        assert isinstance(error, TypeError) and "supports float32, float16 and bfloat16" in str(
            error
        )
