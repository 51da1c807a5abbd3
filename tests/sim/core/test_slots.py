"""Many slots at once: waits, fences and polls do not grow with ranks; and tuples as kernel arguments."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import mangle_type

import interlace
from interlace.kernels import slots, transfer
from interlace.kernels.arguments import Peers, Rows, Table, Workspace
from interlace.kernels.matmul import matmul_reduce_scatter
from interlace.kernels.signal import ABORT_WORD, CLAIMED_WORD, HEADER_WORDS, SPIN_LIMIT_WORD
from interlace.kernels.slots import publish_to_all, publish_turn, wait_sources
from interlace.runtime.core.launch import (
    KernelLaunch,
    compiled_with,
    join_leaves,
    leaves,
    specialise,
)
from interlace.runtime.core.memory import WORD
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler
from interlace.runtime.tuning.configuration import override
from stand_ins.replaced import replaced
from support import run_alone

SLOT_BYTE = tl.constexpr(HEADER_WORDS * WORD)
EPOCH = 3


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls of rank 0's first programs in the block, by kernel."""
    found: Counter[tuple[str, str]] = Counter()
    atomic, barrier = Scheduler.atomic, Scheduler.barrier

    def note(scheduler: Any, what: str) -> None:
        task = scheduler.current if scheduler.inside else None
        program = None if task is None or task.rank else task.program
        if program is not None and program.index == 0:
            found[program.kernel, what] += 1

    def noting_atomic(scheduler: Any, made: Any, perform: Any) -> Any:
        note(scheduler, "releases" if made.releases else "looks")
        return atomic(scheduler, made, perform)

    def noting_barrier(scheduler: Any, threads: Any = None) -> None:
        note(scheduler, "barriers")
        barrier(scheduler, threads)

    with replaced((Scheduler, "atomic", noting_atomic), (Scheduler, "barrier", noting_barrier)):
        yield found


# -- waits -----------------------------------------------------------------------------------------


@triton.jit
def wait_alone(peers, missing_ptr, each, epoch):
    tl.store(missing_ptr, wait_sources(peers, SLOT_BYTE, each, epoch))


def waited(words: list[int], each: int = 1) -> tuple[int, list[int], Counter[tuple[str, str]]]:
    """Return how many slots were missing among those with ``words``, the timeout record, and the counts."""
    memory = torch.zeros(HEADER_WORDS + len(words) * each, dtype=torch.int64)
    memory[HEADER_WORDS::each] = torch.tensor(words)
    memory[SPIN_LIMIT_WORD] = 10
    table = torch.zeros(len(words), dtype=torch.int64)  # no other rank is mapped
    table[0], missing = memory.data_ptr(), torch.empty(1, dtype=torch.int32)
    arguments = {
        "peers": Peers(table, 0, len(words)),
        "missing_ptr": missing,
        "each": each,
        "epoch": EPOCH,
    }
    with counted() as counts:
        run_alone(KernelLaunch(wait_alone, 1, arguments, "waits", num_warps=1))
    assert bool(memory[ABORT_WORD]) == bool(memory[CLAIMED_WORD]) == bool(missing[0])
    return int(missing), memory[CLAIMED_WORD + 1 : CLAIMED_WORD + 5].tolist(), counts


@pytest.mark.parametrize("ranks", [1, 3, 32, 33, 64])
def test_all_that_have_come_are_seen_by_one_look(ranks: int) -> None:
    missing, _, counts = waited([EPOCH + rank % 2 for rank in range(ranks)], each=2)
    vectors = -(-ranks // 32)
    assert missing == 0
    assert counts == {("wait_alone", "looks"): vectors, ("wait_alone", "barriers"): vectors}


@pytest.mark.parametrize("late", [[0], [2], [1, 2], [35], [2, 40]])
def test_who_is_late_is_named(late: list[int]) -> None:
    missing, record, _ = waited([1 if rank in late else EPOCH for rank in range(50)], each=3)
    assert missing == len(late)
    assert record == [late[0], (HEADER_WORDS + 3 * late[0]) * WORD, EPOCH, 1]


# -- publishes -------------------------------------------------------------------------------------


@triton.jit
def publish_alone(peers, first, end, programs, epoch):
    publish_turn(peers, 1, SLOT_BYTE, first, end, programs, epoch)


@pytest.mark.parametrize(
    ("first", "end", "programs"), [(0, 1, 1), (2, 40, 3), (0, 80, 1), (5, 5, 2)]
)
def test_the_tiles_of_a_turn_are_published(first: int, end: int, programs: int) -> None:
    memory = torch.zeros(HEADER_WORDS + 90, dtype=torch.int64)
    peers = Peers(torch.tensor([0, memory.data_ptr()]), 0, 2)
    arguments = {"peers": peers, "first": first, "end": end, "programs": programs, "epoch": EPOCH}
    with counted() as counts:
        run_alone(KernelLaunch(publish_alone, 1, arguments, "publishes", num_warps=1))
    slots = memory[HEADER_WORDS:]
    assert slots.nonzero().ravel().tolist() == list(range(first, end, programs))
    assert set(slots.tolist()) <= {0, EPOCH}
    assert counts["publish_alone", "releases"] == -(-len(range(first, end, programs)) // 32)


@triton.jit
def tell_all(peers, epoch):
    publish_to_all(peers, SLOT_BYTE, epoch)


@pytest.mark.parametrize("ranks", [1, 2, 33])
def test_every_mapped_rank_is_told(ranks: int) -> None:
    words = [torch.zeros(HEADER_WORDS + 1, dtype=torch.int64) for _ in range(ranks)]
    table = torch.tensor([word.data_ptr() if rank != 1 else 0 for rank, word in enumerate(words)])
    arguments = {"peers": Peers(table, 0, ranks), "epoch": EPOCH}
    run_alone(KernelLaunch(tell_all, 1, arguments, "tells", num_warps=1))
    assert [int(word.sum()) for word in words] == [EPOCH * (rank != 1) for rank in range(ranks)]


# -- ops -------------------------------------------------------------------------------------------

SIZE = 16
SMALL = {f"block_{axis}": SIZE for axis in "mnk"} | {"block_elements": SIZE, "programs": 1}


def numbers(tiles: int) -> torch.Tensor:
    return torch.ones(tiles * SIZE)


def product(op: str, tiles: int) -> None:
    getattr(interlace, op)(
        torch.ones(tiles * SIZE, SIZE), torch.ones(SIZE, SIZE), algorithm="fused"
    )


OPS: dict[str, Callable[[int, int], object]] = {
    "matmul_reduce_scatter": lambda ranks, tiles: product("matmul_reduce_scatter", ranks * tiles),
    "matmul_all_reduce": lambda ranks, tiles: product("matmul_all_reduce", tiles),
    "reduce_scatter": lambda ranks, tiles: interlace.reduce_scatter(
        numbers(tiles), numbers(ranks * tiles), algorithm="kernel"
    ),
    "all_reduce": lambda ranks, tiles: interlace.all_reduce(numbers(tiles), algorithm="kernel"),
    "multimem_all_gather": lambda ranks, tiles: interlace.all_gather(
        numbers(ranks * tiles), numbers(tiles), algorithm="multimem"
    ),
    "multimem_reduce_scatter": lambda ranks, tiles: interlace.reduce_scatter(
        numbers(tiles), numbers(ranks * tiles), algorithm="multimem"
    ),
}


def releases(op: str, ranks: int, tiles: int) -> int:
    with override(**SMALL), counted() as counts:
        interlace.run(lambda: OPS[op](ranks, tiles), ranks)
    return counts[f"{op}_kernel", "releases"]


@pytest.mark.parametrize(
    "op", ["matmul_reduce_scatter", "reduce_scatter", "multimem_reduce_scatter"]
)
def test_tiles_of_an_owner_share_a_release(op: str) -> None:
    found = {(ranks, tiles): releases(op, ranks, tiles) for ranks in (2, 3) for tiles in (1, 5)}
    assert found == {(ranks, tiles): ranks for ranks, tiles in found}


@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_reduce", "multimem_all_gather"])
def test_all_ranks_are_told_by_one_release(op: str) -> None:
    found = {(ranks, tiles): releases(op, ranks, tiles) for ranks in (2, 3) for tiles in (1, 3)}
    assert found == {(ranks, tiles): tiles for ranks, tiles in found}


TABLE = torch.zeros(4, dtype=torch.int64)
ARGUMENTS = {"input": Rows(TABLE, 8), "sends": Table(TABLE, 3), "peers": Peers(TABLE, 1, 4), "N": 5}


def test_taken_apart_and_put_together() -> None:
    apart = leaves(ARGUMENTS)
    assert list(apart)[:4] == ["input.ptr", "input.stride", "sends.ptr", "sends.count"]
    again = join_leaves(apart)
    assert again == ARGUMENTS and again["peers"].world_size == 4
    assert join_leaves({"table.1": None}) == {
        "table": (None,)
    }  # the constant part of (tensor, None)


def _tritons(value: Any) -> Any:
    return mangle_type(value, specialize=True)


@pytest.mark.parametrize("rank", [0, 1, 16])
def test_ranks_share_a_compilation(rank: int) -> None:
    """The control: Triton by itself compiles the value 1 of a rank into the kernel."""
    launch = {"peers": Peers(TABLE, rank, 32)}
    compiled = compiled_with(slots.finish_kernel, launch)["peers"]
    assert _tritons(compiled) == ("*i64", "i32", "i32")
    assert compiled == compiled_with(slots.finish_kernel, {"peers": Peers(TABLE, 3, 5)})["peers"]
    assert (_tritons(launch["peers"]) == _tritons(compiled)) == (rank != 1)
    types, constants, divisible = specialise(slots.finish_kernel, launch)
    assert (list(types.values()), constants) == (["*i64", "i32", "i32"], {})
    assert divisible == ("peers.peers_ptr",)


def test_wide_numbers_stay_wide() -> None:
    workspace = Workspace(TABLE, 1, 4, 1 << 12, 1 << 33)
    compiled = compiled_with(transfer.all_gather_kernel, {"workspace": workspace})
    assert _tritons(compiled["workspace"]) == ("*i64", "i32", "i32", "i32", "i64")


def test_what_is_specialised_tells_ones_and_multiples() -> None:
    arguments = {"input": Rows(TABLE, 1), "K": 48, "N": 47, "M": 16}
    types, constants, divisible = specialise(
        matmul_reduce_scatter.matmul_all_reduce_kernel, arguments
    )
    assert types == {"input.ptr": "*i64", "input.stride": "constexpr", "K": "i32"} | dict.fromkeys(
        "NM", "i32"
    )
    assert constants == {"input.stride": 1} and divisible == ("input.ptr", "K")


@triton.jit
def keep(out_ptr, values):
    """The first of two if it is true."""
    tl.store(out_ptr, tl.where(values[0], 1.0, values[1]))


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_arguments_are_what_a_gpu_takes(place: str) -> None:
    def on_rank(value: Any) -> float:
        out = torch.zeros(1)
        keep[(1,)](out, value)
        return out.item()

    assert interlace.run(on_rank, 1, (True, 2.5), place=place) == [1.0]
    text = r"argument values\.0: failed to specialize argument of type: numpy.ndarray"
    with pytest.raises(TypeError, match=text):
        interlace.run(on_rank, 1, (torch.ones(1).numpy(), 2.5), place=place)


@pytest.mark.parametrize("place", ["sim", "ptx"])
def test_keywords_are_parameters_or_options_of_triton(place: str) -> None:
    """Options for other GPUs, such as AMD's, count too."""

    def step(**named: Any) -> float:
        out = torch.zeros(1)
        keep[(1,)](out, values=(False, 2.0), **named)
        return float(out)

    for options in ({"num_warps": 1}, {"num_stages": 2, "maxnreg": 64}, {"waves_per_eu": 2}):
        assert interlace.run(step, 1, place=place, **options) == [2.0]
    for name, meant in (("num_wraps", "'num_warps'"), ("value", "'values'")):
        problem = f"'{name}' is neither a parameter of keep nor an option .*; did you mean {meant}"
        with pytest.raises(KeyError, match=problem):
            interlace.run(lambda name=name: step(**{name: 4}), 1, place=place)
