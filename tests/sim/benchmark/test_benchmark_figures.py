"""Figures of ``interlace bench``: factors, sizes, overlap, spread, caches, payloads; its protocol."""

import pathlib
import types
from typing import Any

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies

import interlace
import interlace.benchmark
from interlace.benchmark import baselines, figures, kernel, protocol, protocol as payload
from interlace.benchmark.figures import Spread
from interlace.benchmark.requests import FUSED, OPS
from stand_ins.replaced import replaced

CPU = torch.device("cpu")


# -- figures -------------------------------------------------------------------------------------------


def test_factors_are_those_of_nccl_tests() -> None:
    """The sources are doc/PERFORMANCE.md of NVIDIA/nccl-tests, and GetBw of its tests."""
    share = {"all_reduce": 2 * 7 / 8, "matmul_all_reduce": 2 * 7 / 8}
    whole = dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0)
    for op in OPS:
        if op != "barrier":
            assert figures.bus_factor(op, 8) == {**share, **whole}.get(op, 7 / 8), op
    assert figures.bus_factor("all_gather", 1) == 0.0
    with pytest.raises(ValueError, match=r"op must move data, .* got 'barrier'"):
        figures.bus_factor("barrier", 2)


@hypothesis.given(strategies.floats(1, 1e6), strategies.floats(1, 1e6), strategies.floats(0, 1))
def test_overlap_is_the_hidden_share_of_the_shorter_part(a: float, b: float, hidden: float) -> None:
    found = figures.overlap(a, b, a + b - hidden * min(a, b))
    assert found == pytest.approx(hidden, abs=1e-6)


def test_overlap_beyond_its_ends() -> None:
    assert figures.overlap(10.0, 10.0, 30.0) == -1.0  # fusing costs more than it hides
    assert figures.overlap(0.0, 10.0, 10.0) is None


def test_spread() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0])
    assert (spread.median, spread.low, spread.high, spread.least, spread.most) == (
        2.5, 1.75, 3.25, 1.0, 4.0,
    )  # fmt: skip
    assert spread.relative == pytest.approx(0.3)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)


# -- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100", [100]),
        ("1K:1M:x4", [1024, 4096, 16384, 65536, 262144, 1048576]),
        ("1K:5000:x4", [1024, 4096]),
        ("1KiB, 2kb,2K", [1024, 2048]),
        ("1G", [1 << 30]),
        ("512:2048:+512", [512, 1024, 1536, 2048]),
        ("4K:4K:x2", [4096]),
    ],
)
def test_sizes(text: str, expected: list[int]) -> None:
    assert figures.parse_sizes(text) == expected


@hypothesis.given(strategies.integers(1, 1 << 40))
def test_sizes_are_written_so_that_nothing_is_lost(nbytes: int) -> None:
    number, unit = figures.format_size(nbytes).split()
    scale = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=1e-5)


# -- caches --------------------------------------------------------------------------------------------


def test_the_last_level_is_read(tmp_path: pathlib.Path) -> None:
    for index, (level, size) in enumerate([("1", "32K"), ("3", "36M"), ("2", "1024K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    (tmp_path / "index9").mkdir()  # without any facts, as in some containers
    assert protocol.last_level(tmp_path) == 36 << 20
    assert protocol.last_level(tmp_path / "nowhere") == 0


@hypothesis.given(strategies.integers(1, 1 << 32), strategies.integers(1, 1 << 28))
def test_sets_get_past_the_cache_within_limits(set_bytes: int, cache: int) -> None:
    count = protocol.sets_needed(set_bytes, cache)
    assert 1 <= count <= protocol.MOST_SETS
    limited = count == protocol.MOST_SETS or (count + 1) * set_bytes > protocol.MOST_BYTES
    assert count * set_bytes >= protocol.PAST * cache or limited


def test_sets_are_used_in_turn_by_all_who_share_them() -> None:
    rotation = protocol.Rotation([(0,), (1,), (2,)])
    first, second = rotation.calling(lambda x: x), rotation.calling(lambda x: 10 + x)
    assert [first(), first(), second(), first(), second()] == [0, 1, 12, 0, 11]


def test_copies_keep_strides_and_what_is_shared() -> None:
    whole, other = torch.arange(12.0).view(3, 4), torch.arange(5, dtype=torch.float16)
    parts = list(whole.chunk(3))
    value = (whole, parts, None, whole.t(), other[1:])
    copies = protocol.copies_of(value, 3)
    assert protocol.total_bytes(value) == 48 + 10
    for copy, copied_parts, nothing, turned, tail in copies:
        assert nothing is None and turned.stride() == (1, 4) and torch.equal(turned, whole.t())
        assert torch.equal(copy, whole) and torch.equal(tail, other[1:])
        copied_parts[1].fill_(-1)
        assert copy[1].tolist() == turned[:, 1].tolist() == [-1] * 4
        assert copy.data_ptr() % 16 == 0
    assert whole[1, 0] == 4
    assert len({copy.data_ptr() for copy, *_ in copies}) == 3


# -- payloads and checks -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_payloads_are_exact_and_differ(dtype: torch.dtype) -> None:
    by_key = {
        (rank, call): payload.vector(0, 4096, rank, call, dtype, CPU)
        for rank in range(3)
        for call in range(3)
    }
    exact = {key: payload.vector(0, 4096, *key, torch.float64, CPU) for key in by_key}
    for key, x in by_key.items():
        scale = 1 if dtype.is_floating_point else 32
        assert torch.equal(x.double(), exact[key] * scale)
        assert x.unique().numel() == 128
        for other, y in by_key.items():
            same = (x == y).double().mean()
            assert key == other or same < 0.05, (key, other)


def test_pieces_and_rows_are_those_of_the_whole() -> None:
    whole = payload.vector(0, 1000, 1, 2, torch.float32, CPU)
    with replaced((payload, "PIECE", 64)):
        assert torch.equal(payload.vector(0, 1000, 1, 2, torch.float32, CPU), whole)
        assert torch.equal(payload.vector(300, 100, 1, 2, torch.float32, CPU), whole[300:400])
        rows = payload.some_rows(torch.tensor([3, 7]), 20, 1, 2, torch.float32)
        assert torch.equal(rows, whole.view(50, 20)[[3, 7]])
        assert payload.error_of_copy(whole, 0, 1, 2) == 0.0
        for index in (0, 63, 64, 999):  # whichever piece it is in
            broken = whole.clone()
            broken[index] = torch.nan
            assert payload.error_of_copy(broken, 0, 1, 2) == float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_sums_are_judged_by_their_bound(dtype: torch.dtype) -> None:
    parts = [payload.vector(5, 300, rank, 4, dtype, CPU) for rank in range(3)]
    right = torch.stack(parts).to(torch.float64).sum(0).to(dtype)
    assert payload.error_of_sum(right, 5, 3, 4, rounds_often=False) <= 1
    wrong = right.clone()
    wrong[17] += 1
    assert payload.error_of_sum(wrong, 5, 3, 4, rounds_often=False) > 1
    assert payload.error_of_sum(payload.poison(wrong), 5, 3, 4, rounds_often=True) == float("inf")


def test_each_rounding_to_bfloat16_is_allowed_to_others_only() -> None:
    count, ranks = 4096, 8
    total = payload.vector(0, count, 0, 0, torch.bfloat16, CPU)
    for rank in range(1, ranks):
        total = total + payload.vector(0, count, rank, 0, torch.bfloat16, CPU)
    assert payload.error_of_sum(total, 0, ranks, 0, rounds_often=False) > 1
    assert payload.error_of_sum(total, 0, ranks, 0, rounds_often=True) <= 1


@pytest.mark.parametrize("m", [64, 2048])
def test_every_tile_of_a_product_is_looked_at(m: int) -> None:
    place: Any = types.SimpleNamespace(rank=0, world_size=1, device=CPU)
    op = FUSED["all_gather_matmul"](place, torch.float32, m, 8, 16)
    for call in range(2):
        input, weight = op.matmul_inputs(call)
        product = input @ weight
        assert op.check(product, call) <= 1
        for first in range(0, m, 16):
            broken = product.clone()
            broken[first : first + 16, -1] += 1e-3  # one column of a tile of 16 rows
            assert op.check(broken, call) > 1, (call, first)


INFINITE = float("inf")
VERDICTS = [
    (None, 0.0),
    (True, 0.0),
    (False, INFINITE),
    (torch.tensor(True), 0.0),
    (torch.tensor(False), INFINITE),
    (numpy.bool_(True), 0.0),
    (numpy.bool_(False), INFINITE),
    (numpy.array(False), INFINITE),
    (0.5, 0.5),
    (3, 3.0),
    (torch.tensor(0.5), 0.5),
    (torch.tensor(2), 2.0),
    (numpy.float32(0.5), 0.5),
    (float("nan"), INFINITE),
    (torch.tensor(float("nan")), INFINITE),
    (-0.5, INFINITE),
    (numpy.float64(-1), INFINITE),
]


@pytest.mark.parametrize(("found", "expected"), VERDICTS, ids=lambda value: repr(value))
def test_what_a_check_may_say(found: object, expected: float) -> None:
    assert kernel.verdict(lambda result, number: found, None, 0)[0] == expected


@pytest.mark.parametrize("found", ["right", [0.0], (True, 1), torch.ones(2), numpy.zeros(1), 1j])
def test_a_check_that_returns_no_verdict_is_named(found: object) -> None:
    def compare(result: object, number: int) -> object:
        return found

    with pytest.raises(TypeError, match=f"compare returned {type(found).__name__}, .* must return"):
        kernel.verdict(compare, None, 0)


# -- baselines -----------------------------------------------------------------------------------------


def test_default_baselines() -> None:
    assert baselines.default("shm", "cpu", virtual=False) == ("gloo",)
    assert baselines.default("hosts", "cpu", virtual=False) == ("gloo",)
    assert baselines.default("sim", "cpu", virtual=False) == ()
    assert baselines.default("cuda", "cuda", virtual=True) == ("torch",)
    assert baselines.default("cuda", "cuda", virtual=False) == ("nccl",)


@pytest.mark.parametrize(
    ("name", "place", "device", "virtual", "message"),
    [
        ("nccl", "cuda", "cuda", True, "needs one process per GPU, and virtual ranks are one"),
        ("symm_mem", "shm", "cpu", False, "needs a GPU per rank"),
        ("gloo", "cuda", "cuda", False, "is for tensors on a CPU"),
        ("gloo", "sim", "cpu", False, "needs a process per rank"),
    ],
)
def test_baselines_are_refused_with_the_reason(
    name: str, place: str, device: str, virtual: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        baselines.refuse(name, place, device, virtual=virtual)


def test_torchs_symmetric_operators_take_what_the_baseline_gives() -> None:
    """The operators need a GPU; their schemas do not."""
    import torch.distributed._symmetric_memory

    expected = {
        "one_shot_all_reduce": ["input", "reduce_op", "group_name"],
        "two_shot_all_reduce_": ["input", "reduce_op", "group_name"],
        "_low_contention_all_gather": ["tensor", "group_name"],
        "_low_contention_reduce_scatter": ["tensor", "reduce_op", "group_name"],
        "fused_all_gather_matmul": ["A", "Bs", "gather_dim", "group_name", "return_A"],
        "fused_matmul_reduce_scatter": ["A", "B", "reduce_op", "scatter_dim", "group_name"],
    }
    for name, arguments in expected.items():
        schema = getattr(torch.ops.symm_mem, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments


# -- the protocol --------------------------------------------------------------------------------------


def _order(virtual: bool) -> tuple[list[str], list[int], int]:
    calls: list[str] = []
    ticks: list[int] = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}  # type: ignore[misc]
    timings = protocol.alternate(
        functions, 3, calls=2, warm_up=1, virtual=virtual, tick=lambda: ticks.append(len(ticks))
    )
    assert all(len(t.microseconds) == 3 and t.calls == 2 for t in timings.values())
    return calls, ticks, interlace.get_rank()


@pytest.mark.parametrize("virtual", [False, True])
def test_candidates_alternate_block_by_block(virtual: bool) -> None:
    for calls, ticks, _ in interlace.run(_order, 2, virtual):
        assert "".join(calls) == "aabb" * 4 and len(ticks) == 6


def test_a_slow_first_call_does_not_shorten_blocks() -> None:
    taken = iter([1.0, 2e-4, 1e-4, 3e-4])
    with replaced((protocol, "block", lambda *_, **__: next(taken))):
        assert protocol.calls_per_block(lambda: None) == protocol.BLOCK_SECONDS / 1e-4


def _block(order: list[str]) -> None:
    protocol.block(lambda: order.append("launch"), 1, virtual=True)


def test_virtual_ranks_all_launch_before_one_waits_for_the_device() -> None:
    order: list[str] = []
    with replaced(
        (interlace, "device", lambda: torch.device("cuda")),
        (torch.cuda, "synchronize", lambda: order.append("wait")),
    ):
        interlace.run(_block, 3, order)
    assert order == ["launch"] * 3 + ["wait"] * 3


def _slowest_rank() -> float:
    return protocol.slowest(float(interlace.get_rank()))


def test_the_slowest_rank_counts_on_all() -> None:
    assert interlace.run(_slowest_rank, 3) == [2.0, 2.0, 2.0]
