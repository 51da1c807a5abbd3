"""Plain collectives by the switch, whose instructions the simulator emulates, and without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace import reference
from interlace.ops.collectives import stream_engine
from interlace.runtime.core.errors import (
    InlineAssemblyError,
    MemoryAccessError,
    PlaceUnavailableError,
)
from interlace.runtime.core.memory import SymmetricBuffer
from interlace.runtime.core.place import Nodes
from interlace.runtime.places.sim.place import SimPlace, address_for
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.interpreter.ptx_kernels import in_memory
from support import failure, noise, payload, poison, poisoned

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL_BLOCKS = {"block_elements": 16, "programs": 2}
WORLDS = st.sampled_from([1, 2, 3, 5])
SWITCH = pytest.mark.parametrize("switch", [True, False], ids=["switch", "peers"])


@contextmanager
def without_a_switch() -> Iterator[None]:
    """Memory has no multicast address, as in place shm."""
    allocate = SimPlace.allocate

    def plain(place: SimPlace, nbytes: int) -> SymmetricBuffer:
        buffer = allocate(place, nbytes)
        buffer.multicast = 0
        return buffer

    with mock.patch.object(SimPlace, "allocate", plain):
        yield


@contextmanager
def small_blocks(switch: bool) -> Iterator[None]:
    with poisoned(), override(**SMALL_BLOCKS):
        if switch:
            yield
            return
        with without_a_switch():
            yield


# -- collectives -----------------------------------------------------------------------------------


@SWITCH
@hypothesis.settings(max_examples=8)
@given(
    world=WORLDS,
    dtype=st.sampled_from([F32, F16, BF16]),
    lengths=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    in_place=st.booleans(),
)
def test_all_gather(
    switch: bool, world: int, dtype: torch.dtype, lengths: list[int], in_place: bool
) -> None:
    """The last vectors of these shards are not whole."""

    def on_rank() -> None:
        rank = interlace.get_rank()
        whole = poison(torch.zeros(sum(lengths[:world]), dtype=dtype))
        outputs = list(torch.split(whole, lengths[:world]))
        own = payload(rank, 1, (lengths[rank],), dtype)
        if in_place:
            outputs[rank].copy_(own)
            own = outputs[rank]
        interlace.all_gather(outputs, own, algorithm="multimem")
        for source, output in enumerate(outputs):
            assert torch.equal(output, payload(source, 1, (lengths[source],), dtype))

    with small_blocks(switch):
        interlace.run(on_rank, world)


@SWITCH
@hypothesis.settings(max_examples=8)
@given(world=WORLDS, dtype=st.sampled_from([F32, F16, BF16]), count=st.integers(1, 60))
def test_all_reduce(switch: bool, world: int, dtype: torch.dtype, count: int) -> None:
    def on_rank() -> list[torch.Tensor]:
        tensors = [noise(interlace.get_rank(), call, (count,), dtype) for call in range(3)]
        started = [
            interlace.all_reduce(t, "sum", None, True, algorithm="multimem") for t in tensors
        ]
        for work in started:
            work.wait()
        return tensors

    with small_blocks(switch):
        results = interlace.run(on_rank, world, seed=count)
    for call in range(3):
        inputs = [noise(rank, call, (count,), dtype) for rank in range(world)]
        expected, bound = reference.reduce(inputs)
        for rank in range(world):
            assert reference.worst_ratio(results[rank][call], expected, bound) <= 1
            assert torch.equal(results[rank][call], results[0][call]), "bits differ between ranks"


@SWITCH
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(switch: bool, dtype: torch.dtype, world: int, in_place: bool) -> None:
    lengths = [37, 5, 0][:world]

    everyone = [noise(rank, 1, (sum(lengths),), dtype) for rank in range(world)]
    parts = list(
        zip(*(torch.split(each, lengths) for each in reference.reduce(everyone)), strict=True)
    )

    def on_rank() -> None:
        rank = interlace.get_rank()
        inputs = list(torch.split(everyone[rank].clone(), lengths))
        output = inputs[rank] if in_place else poison(torch.zeros(lengths[rank], dtype=dtype))
        interlace.reduce_scatter(output, inputs, algorithm="multimem")
        assert reference.worst_ratio(output, *parts[rank]) <= 1

    with small_blocks(switch):
        interlace.run(on_rank, world)


@ranks(2, place="sim")
def test_unaligned_memory_is_copied() -> None:
    gathered = torch.zeros(12, dtype=F16)
    interlace.all_gather(gathered, torch.ones(7, dtype=F16)[1:], algorithm="multimem")
    assert gathered.tolist() == [1.0] * 12


@SWITCH
def test_copiers_of_the_fused_gather(switch: bool) -> None:
    """Rows of 32 bytes allow vectors of 16 bytes."""
    shards = [payload(rank, 1, (20, 8)) for rank in range(3)]

    def on_rank() -> None:
        shard = shards[interlace.get_rank()]
        made = interlace.all_gather_matmul(shard, torch.eye(8), algorithm="fused")
        assert torch.equal(made, torch.cat(shards))

    blocks = {f"block_{axis}": 16 for axis in "mnk"}
    with small_blocks(switch), override(**SMALL_BLOCKS, **blocks, multimem=True):
        interlace.run(on_rank, 3)


# -- refusals --------------------------------------------------------------------------------------


@ranks(2, place="sim")
def test_averages_and_dtypes_are_refused() -> None:
    averages = "algorithm=\"multimem\" reduces with op sum, got 'avg' .on rank"
    with pytest.raises(ValueError, match=averages):
        interlace.all_reduce(torch.ones(4), "avg", algorithm="multimem")
    with pytest.raises(TypeError, match="supports float32, float16 and bfloat16"):
        interlace.all_reduce(torch.ones(4).long(), algorithm="multimem")


def test_without_a_multicast_address_it_is_refused_where_kernels_are_compiled() -> None:
    with without_a_switch(), mock.patch.object(SimPlace, "interpreted", False):
        error = failure(lambda: interlace.all_reduce(torch.ones(4), algorithm="multimem"), 2)
    assert isinstance(error, PlaceUnavailableError)
    assert 'algorithm="multimem" needs memory with a multicast address' in str(error)


@pytest.mark.parametrize("algorithm", ["multimem", "low_latency"])
def test_ranks_of_several_nodes_are_refused(algorithm: str) -> None:
    def call() -> None:
        group: Any = interlace.new_group()
        group.place.nodes = Nodes((0, 1), "stores")
        stream_engine.check_nodes("kernel", group)
        interlace.all_reduce(torch.ones(4), group=group, algorithm=algorithm)

    error = failure(call, 2)
    assert isinstance(error, ValueError) and f'"{algorithm}" needs all ranks on one node' in str(
        error
    )
    assert "this group is on 2 in place 'sim' (on rank" in str(error)


CHOICES = [
    # direct access, interpreted, bytes of a small message, kernel, multicast
    ((False, False, 1 << 20, True, True), "multimem"),
    ((False, False, None, True, True), "multimem"),
    ((False, False, 1 << 20, True, False), "kernel"),
    ((False, True, 1 << 20, True, True), "kernel"),
    ((False, False, 1 << 20, False, True), "copy"),
    ((False, False, 64, False, True), "low_latency"),
    ((True, True, 64, True, True), "copy"),
]


@pytest.mark.parametrize(("given", "chosen"), CHOICES)
def test_who_is_chosen(given: Any, chosen: str) -> None:
    direct, interpreted, small, kernel, switch = given
    place: Any = SimpleNamespace(direct_access=direct, interpreted=interpreted)
    found = tuning.choose_collective(place, small, kernel=kernel, multicast=lambda: switch)
    assert found == chosen


# -- the instructions ------------------------------------------------------------------------------


def everywhere(asm: str, memories: list[torch.Tensor]) -> Any:
    """Run ``asm`` with a multicast address of ``memories``, one per rank, as $1."""

    class Owner:
        """Keeps the address known."""

    owner = Owner()
    address = address_for(owner, memories[0].nbytes, [memory.data_ptr() for memory in memories])

    def on_rank() -> Any:
        holder = torch.tensor([address])
        return in_memory("{ .reg .u64 m; ld.global.u64 m, [$1]; " + asm + " }", holder)

    return interlace.run(on_rank, 1)[0]


def test_a_load_sums_and_rounds_once() -> None:
    big, small = 256.0, 0.6  # in bf16 the neighbour of 256 is 258
    memories = [torch.tensor([value, 1.0], dtype=BF16) for value in (big, small, small)]
    asm = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.bf16x2 $0, [m];"
    bits = everywhere(asm, memories)
    pair = torch.tensor([bits], dtype=torch.int64).view(BF16)[:2]
    assert pair.tolist() == [258.0, 3.0]


def test_a_store_and_a_reduction_reach_all() -> None:
    memories = [torch.arange(4, dtype=torch.int32) for _ in range(3)]
    everywhere("multimem.st.release.sys.global.u32 [m+4], 70; mov.u32 $0, 0;", memories)
    everywhere("multimem.red.release.sys.global.add.u32 [m+8], 5; mov.u32 $0, 0;", memories)
    by_each_of_128_threads = 2 + 128 * 5
    assert all(memory.tolist() == [0, 70, by_each_of_128_threads, 3] for memory in memories)


WRONG = [
    ("multimem.st.relaxed.sys.global.u32 [$1], 1; mov.u32 $0, 0;", ValueError, "is not a multicast"),
    ("multimem.st.relaxed.sys.global.u32 [m+131072], 1; mov.u32 $0, 0;", ValueError, "is not a multicast"),
    ("multimem.st.relaxed.sys.global.u32 [m+16], 1; mov.u32 $0, 0;", MemoryAccessError, "out of bounds"),
    ("multimem.st.relaxed.global.u32 [m], 1; mov.u32 $0, 0;", InlineAssemblyError, "take a scope"),
    ("multimem.ld_reduce.relaxed.sys.global.xchg.u32 $0, [m];", InlineAssemblyError, "known are add"),
    ("multimem.cp.async.bulk $0, [m];", InlineAssemblyError, "multimem.ld_reduce"),
]  # fmt: skip


@pytest.mark.parametrize(("asm", "kind", "message"), WRONG)
def test_wrong_instructions_are_named(asm: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        everywhere(asm, [torch.zeros(4, dtype=torch.int32) for _ in range(2)])
