"""Dispatch, combine, grouped matmul + combine on simulated ranks: any routing, dtype and schedule."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace import experts, functional, reference
from interlace.ops.experts.routing import Assignment, known_segments
from interlace.runtime.places.sim.place import SimStream
from interlace.runtime.tuning.configuration import override
from interlace.verify import races
from ranks import ranks
from sim.api.refusals import check_refused
from support import failure, noise, poisoned, slow_rank, starved

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """``tokens`` by rank, ``each`` experts on every rank, and ``topk`` slots, some without an expert."""

    tokens: list[int]
    each: int = 2
    topk: int = 2
    hidden: int = 8
    columns: int = 8
    dtype: torch.dtype = F32
    algorithm: str = "fused"
    capacity: int | None = None
    most: int | None = None
    low_latency: bool = False
    weighted: bool = True
    bias: bool = False
    seed: int = 0
    configuration: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.each * self.world

    def x(self, rank: int) -> torch.Tensor:
        return noise(rank, 1, (self.tokens[rank], self.hidden), F32).to(self.dtype)

    def idx(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(31 * self.seed + rank)
        chance = torch.rand(self.tokens[rank], self.experts + 1, generator=generator)
        return chance.argsort(1)[:, : self.topk] - 1  # different ones, now and then none

    def weights(self, rank: int) -> torch.Tensor | None:
        made = noise(rank, 2, (self.tokens[rank], self.topk), F32)
        return made if self.weighted else None

    def weight(self) -> torch.Tensor:
        return noise(9, 3, (self.experts, self.hidden, self.columns), self.dtype)

    def biases(self) -> torch.Tensor | None:
        return noise(9, 4, (self.experts, self.columns), self.dtype) if self.bias else None

    def chosen(self, rank: int) -> Assignment:
        bound = (self.capacity or self.most or 0) if self.low_latency else self.capacity or 0
        return Assignment(self.idx(rank), self.experts, self.world, bound)

    def rows(self, expert: int) -> list[tuple[int, int, int]]:
        """Return (source, token, slot) of an expert's rows, in their order."""
        found = []
        for source in range(self.world):
            here = (self.idx(source) == expert) & (self.chosen(source).position >= 0)
            found += [(source, t, k) for t, k in here.nonzero().tolist()]
        return found

    def own(self, rank: int) -> slice:
        return slice(rank * self.each, (rank + 1) * self.each)


def dispatched(case: Case) -> Any:
    rank = interlace.get_rank()
    x, idx, weights = case.x(rank), case.idx(rank), case.weights(rank)
    how: Any = {"algorithm": case.algorithm}
    if case.low_latency:
        assert case.most is not None
        few = (x, idx, case.most, case.experts)
        received, handle = experts.low_latency_dispatch(*few, use_fp8=False, **how)
        return received, handle._replace(topk_weights=weights)
    bounds = {"capacity": case.capacity, "num_max_dispatch_tokens_per_rank": case.most}
    return experts.dispatch(x, idx, weights, case.experts, **bounds, **how)


def moved(case: Case) -> Any:
    received, handle = dispatched(case)
    return received, experts.combine(received.x, handle, algorithm=case.algorithm)  # type: ignore[call-overload]


def check_moved(case: Case) -> None:
    with poisoned() as done, override(**case.configuration):
        results = interlace.run(moved, case.world, case, seed=case.seed)
    if case.algorithm == "fused" and max(case.tokens):
        assert done["workspaces"] > 0, "nothing was poisoned"
    for rank, (received, output) in enumerate(results):
        found = [case.rows(expert) for expert in range(case.experts)[case.own(rank)]]
        assert received.num_tokens_per_expert.tolist() == [len(each) for each in found]
        for expert, rows in enumerate(found):
            first = int(received.segments[expert, 0, 0])
            flat = received.x.flatten(0, -2)
            here, rest = flat[first : first + len(rows)], None
            expected = [case.x(source)[token] for source, token, _ in rows]
            assert torch.equal(here, torch.stack(expected) if expected else here[:0])
            if case.low_latency:
                rest = received.x[expert, len(rows) :]
                assert first == expert * received.x.shape[1]
            elif case.most and expert == case.each - 1:
                rest = flat[first + len(rows) :]
            assert rest is None or not rest.any(), "rows that nothing came for are zero"
            if case.weighted and not case.low_latency:
                weights = [case.weights(source)[t, k] for source, t, k in rows]  # type: ignore[index]
                there = received.topk_weights[first : first + len(rows)]
                assert there.tolist() == [float(w) for w in weights]
        x = case.x(rank).double()
        kept = (case.chosen(rank).position >= 0).double().unsqueeze(-1)
        rows_of = x.unsqueeze(1) * kept
        exact, bound = reference.combine((rows_of, 0 * rows_of), case.weights(rank), case.dtype)
        assert output.dtype == case.dtype
        assert reference.worst_ratio(output, exact, bound) <= 1


def multiplied(case: Case) -> Any:
    """Multiply the rows of a dispatch by its handle, or, if no row is dropped, by their splits."""
    rank = interlace.get_rank()
    own, bias = case.own(rank), case.biases()
    received, handle = dispatched(replace(case, algorithm="unfused"))
    how: Any = {"bias": None if bias is None else bias[own], "algorithm": case.algorithm}
    rows, weight, about = received.x, case.weight()[own], (case.idx(rank), case.weights(rank))
    if case.most or case.capacity or case.seed % 2:
        return interlace.grouped_matmul_combine(rows, weight, handle, **how)
    return interlace.grouped_matmul_combine(rows, weight, received.splits, *about, **how)


def check_multiplied(case: Case) -> None:
    with poisoned(), override(**case.configuration):
        results = interlace.run(multiplied, case.world, case, seed=case.seed)
    for rank, output in enumerate(results):
        idx, x, bias = case.idx(rank), case.x(rank), case.biases()
        there = case.chosen(rank).position >= 0
        per_slot = [
            reference.matmul(
                x[t : t + 1],
                case.weight()[e],
                case.dtype,
                bias=None if bias is None else bias[e],
                roundings=2,
            )
            if kept
            else (torch.zeros(1, case.columns, dtype=F64),) * 2
            for t, line in enumerate(zip(idx.tolist(), there.tolist(), strict=True))
            for e, kept in zip(*line, strict=True)
        ]
        shape = case.tokens[rank], case.topk, case.columns
        parts = [torch.cat(each).view(shape) for each in zip(*per_slot, strict=True)]
        rows = (parts[0], parts[1]) if parts else (torch.zeros(shape).double(),) * 2
        exact, bound = reference.combine(rows, case.weights(rank), case.dtype)  # type: ignore[arg-type]
        assert output.dtype == case.dtype
        assert reference.worst_ratio(output, exact, bound) <= 1, f"rank {rank}"


BLOCKS = {
    "copy_rows": st.sampled_from([1, 2, 8]),
    "copy_columns": st.sampled_from([16, 32]),
    "programs": st.integers(1, 5),
}
TILES = {
    "block_m": st.sampled_from([16, 32]),
    "block_n": st.sampled_from([16, 32]),
    "block_k": st.sampled_from([16, 32]),
    "group_m": st.sampled_from([1, 8]),
    "descriptors": st.booleans(),
    "epilogue_subtile": st.sampled_from([1, 2]),
    "flatten": st.booleans(),
}


@st.composite
def cases(draw: Any, *, matmul: bool) -> Case:
    names = "fused", "fused", "pipelined", "unfused", "auto"
    algorithm, world = draw(st.sampled_from(names)), draw(st.sampled_from([1, 2, 2, 3, 4]))
    each, length = draw(st.sampled_from([1, 2, 3])), st.sampled_from([0, 0, 1, 2, 7, 17])
    others = ("auto", "unfused") if matmul else ("auto", "pipelined", "unfused")
    dtypes = [F32, F16, BF16] + ([F64] if algorithm in others else [])
    low_latency = draw(st.sampled_from([False, False, True]))
    blocks = {**BLOCKS, **TILES} if matmul else BLOCKS
    return Case(
        tokens=[draw(length) for _ in range(world)],
        each=each,
        topk=draw(st.integers(1, min(3, each * world))),
        hidden=draw(st.sampled_from([0, 1, 8, 37])),
        columns=draw(st.sampled_from([0, 1, 16, 31])),
        dtype=draw(st.sampled_from(dtypes)),
        algorithm=algorithm,
        capacity=None if low_latency else draw(st.sampled_from([None, None, 1, 3])),
        most=17 if low_latency else draw(st.sampled_from([None, 17, 20])),
        low_latency=low_latency,
        weighted=draw(st.booleans()),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
        configuration={name: draw(values) for name, values in blocks.items()},
    )


@hypothesis.settings(max_examples=25)
@given(cases(matmul=False))
def test_rows_arrive_and_return(case: Case) -> None:
    check_moved(case)


@hypothesis.settings(max_examples=25)
@given(cases(matmul=True))
def test_products_return(case: Case) -> None:
    check_multiplied(case)


PLAIN = Case([5, 0, 9], topk=3, hidden=20, columns=37, dtype=BF16, weighted=True)
SMALL = {
    "programs": 3,
    "copy_rows": 4,
    "copy_columns": 16,
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
}


@pytest.mark.parametrize("run", [moved, multiplied])
def test_bits_do_not_depend_on_timing(run: Any) -> None:
    """If data is only moved, bits do not depend on the algorithm either."""
    found = []
    for seed, slow in ((1, 0), (2, 2)):
        with override(**SMALL), starved(slow_rank(slow)):
            found.append(interlace.run(run, 3, PLAIN, seed=seed))
    if run is moved:
        found.append(interlace.run(run, 3, replace(PLAIN, algorithm="unfused")))
    results = [[each if run is multiplied else each[1] for each in one] for one in found]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_placement_of_experts_does_not_change_bits() -> None:
    def on_rank(case: Case) -> torch.Tensor:
        rank, world_size = interlace.get_rank(), interlace.get_world_size()
        x = torch.cat([case.x(r) for r in range(3)]).chunk(world_size)[rank]
        idx = torch.cat([case.idx(r) for r in range(3)]).chunk(world_size)[rank]
        weights = torch.cat([case.weights(r) for r in range(3)]).chunk(world_size)[rank]  # type: ignore[misc]
        received, handle = experts.dispatch(x, idx, weights, 6, algorithm="fused")
        factors = torch.arange(6).chunk(world_size)[rank] + 1.0
        each = factors.to(BF16).repeat_interleave(received.num_tokens_per_expert)
        return experts.combine(received.x * each.unsqueeze(1) / 3, handle, algorithm="fused")

    case = replace(PLAIN, tokens=[5, 5, 5])
    (alone,) = interlace.run(on_rank, 1, case)
    assert torch.equal(alone, torch.cat(interlace.run(on_rank, 3, case)))


@ranks(2, place="sim")
def test_fp8_travels_with_its_scales() -> None:
    rank, idx = interlace.get_rank(), torch.tensor([[0, 1], [1, -1], [1, 0]])
    sent = [experts.quantize(noise(source, 1, (3, 256), BF16)) for source in range(2)]
    x = noise(rank, 1, (3, 256), BF16)
    received, _ = experts.dispatch(x, idx, None, 2, use_fp8=True)
    few, _ = experts.low_latency_dispatch(x, idx, 4, 2)
    tokens = [[0, 2], [0, 1, 2]][rank]
    for part in (0, 1):
        expected = torch.cat([each[part].view(torch.uint8)[tokens] for each in sent])
        here = (received.x, received.scales)[part].view(torch.uint8)
        assert torch.equal(here, expected)
        packed = (few.x, few.scales)[part][0, : len(expected)].view(torch.uint8)
        assert torch.equal(packed, expected)
    assert received.x.dtype is FP8
    assert tuple(few.x.shape) == (1, 8, 256)


def test_quantized_numbers_are_near() -> None:
    x = noise(0, 1, (5, 256), F32)
    back = experts.dequantize(*experts.quantize(x), dtype=F32)
    largest = x.view(5, 2, 128).abs().amax(-1, keepdim=True).expand(5, 2, 128).reshape(5, 256)
    # 4 bits of a number, or of the smallest step, 2**-10 of 448
    assert ((back - x).abs() <= x.abs() / 16 + largest * 2**-9 / 448 * 1.01).all()


IDX = torch.zeros(4, 1, dtype=torch.int64)
RIGHT = {"x": torch.ones(4, 8), "topk_idx": IDX, "topk_weights": None, "num_experts": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 3}, "num_experts must be a multiple of the world size 2, got 3"),
    ({"topk_idx": IDX[:2]}, "topk_idx has 2 rows, x has 4"),
    ({"topk_idx": IDX + 2}, "topk_idx has expert 2, there are 2"),
    ({"topk_idx": IDX - 2}, "topk_idx has -2"),
    ({"topk_idx": torch.tensor([[1, 1]] * 4)}, "topk_idx names an expert twice for token 0: [1, 1]"),
    ({"topk_idx": IDX.float()}, "TypeError: topk_idx must be a tensor of integers, got torch.float32"),
    ({"topk_weights": torch.ones(4, 2)}, "topk_weights has shape (4, 2), topk_idx (4, 1)"),
    ({"num_max_dispatch_tokens_per_rank": 3}, "num_max_dispatch_tokens_per_rank is 3, topk_idx has 4 rows"),
    ({"capacity": 0}, "capacity must be a positive int or None, got 0"),
    ({"use_fp8": True}, "hidden must be a multiple of 128"),
    ({"x": torch.ones(4, 8, dtype=torch.int64)}, "TypeError: x must be of floats or fp8, got torch.int64"),
    ({"x": (torch.ones(4, 8), torch.ones(3, 1))}, "the scales of x must have 2 dimensions and 4 rows"),
    ({"algorithm": "chunked"}, "algorithm must be one of auto, fused, pipelined, unfused"),
    ({"capacity": 1}, "capacity differs between ranks: 0 on rank 0, 1 on rank 1"),
    ({"topk_idx": torch.arange(2).repeat(4, 1)}, "k of topk_idx differs between ranks"),
    ({"x": torch.ones(4, 4)}, "hidden of x differs between ranks: 8 on rank 0, 4 on rank 1"),
    ({"topk_weights": torch.ones(4, 1)}, "whether there are topk_weights differs"),
    ({"x": torch.ones(4, 8, dtype=BF16)}, "TypeError: dtype of x differs between ranks"),
]  # fmt: skip
RIGHT_LOW = {
    "x": torch.ones(2, 128), "topk_idx": torch.tensor([[0, 1], [1, -1]]), "num_experts": 2,
    "num_max_dispatch_tokens_per_rank": 2,
}  # fmt: skip
REFUSED_LOW: list[tuple[dict[str, Any], str]] = [
    ({"use_fp8": "no"}, "TypeError: use_fp8 must be a bool, got 'no'"),
    ({"num_max_dispatch_tokens_per_rank": 3}, "num_max_dispatch_tokens_per_rank differs"),
    ({"num_max_dispatch_tokens_per_rank": 1}, "num_max_dispatch_tokens_per_rank is 1"),
    ({"topk_idx": torch.tensor([[0, 1], [1, -2]])}, "topk_idx has -2"),
    ({"topk_idx": torch.tensor([[0, 1], [1, 1]])}, "topk_idx names an expert twice for token 1: [1, 1]"),
    ({"x": (torch.ones(2, 128),) * 3, "use_fp8": False},
     "x must be a tensor or a pair (values, scales), got 3"),
]  # fmt: skip
REFUSED_FUNCTIONAL = [each for each in REFUSED if "topk_idx" in each[0]][1:4]
CALLS: dict[str, tuple[Any, dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "dispatch": (experts.dispatch, RIGHT, REFUSED),
    "low latency": (experts.low_latency_dispatch, RIGHT_LOW, REFUSED_LOW),
    "functional": (functional.dispatch, RIGHT, REFUSED_FUNCTIONAL),
}


@pytest.mark.parametrize(
    ("form", "number"), [(form, n) for form, call in CALLS.items() for n in range(len(call[2]))]
)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_named_on_all(form: str, number: int) -> None:
    call, right, refused = CALLS[form]
    check_refused(call, right, *refused[number])


def test_lengths_of_packed_rows_are_named_in_bytes() -> None:
    def call() -> None:
        x = torch.zeros(4, 16 * (1 + interlace.get_rank()), dtype=torch.uint8)
        experts.dispatch(x, IDX, None, 2)

    text = "the number of bytes in a row of x differs between ranks: 16 on rank 0, 32 on rank 1"
    assert text in str(failure(call, 2))


def test_splits_must_be_those_of_the_tokens() -> None:
    def call() -> None:
        idx = torch.tensor([[0], [1]])
        splits = [1, 2] if interlace.get_rank() else [1, 1]
        rows = torch.ones(sum(splits), 4)
        interlace.grouped_matmul_combine(rows, torch.ones(1, 4, 2), splits, idx)

    text = "splits on rank 1 have 2 rows of expert 1 from rank 1, topk_idx has 1 on rank 1"
    assert text in str(failure(call, 2))


def test_combine_needs_all_rows() -> None:
    def call() -> None:
        received, handle = experts.dispatch(torch.ones(2, 4), torch.tensor([[0], [1]]), None, 2)
        experts.combine(received.x[:1], handle)

    assert "y has 1 rows, the dispatch has made 2" in str(failure(call, 2))


@pytest.mark.parametrize("how", ["matmuls", "handle", "weighted here", "weighted there"])
@ranks(3, place="sim")
def test_gradients(how: str) -> None:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    case = Case([5, 0, 9][:world_size], topk=3, hidden=8, columns=4, dtype=F64, seed=5)
    ups, downs = case.weight(), noise(8, 5, (case.experts, 4, 8), F64)
    ups, downs = ups.requires_grad_(), downs.requires_grad_()
    xs = [case.x(r).requires_grad_() for r in range(world_size)]
    ws = [case.weights(r).requires_grad_() for r in range(world_size)]  # type: ignore[union-attr]
    total = torch.zeros((), dtype=F64)
    for r in range(world_size):
        idx = case.idx(r)
        valid, some = (idx >= 0), idx.clamp(min=0)
        hidden = torch.einsum("th,tkhn->tkn", xs[r], ups[some]).relu()
        y = torch.einsum("tk,tkn,tknh->th", ws[r] * valid, hidden, downs[some])
        total = total + (y * y).sum()
    total.backward()
    idx, own = case.idx(rank), case.own(rank)
    x, w = xs[rank].detach().requires_grad_(), ws[rank].detach().requires_grad_()
    up, down = (each[own].detach().requires_grad_() for each in (ups, downs))
    if how == "matmuls":
        rows, sent = experts.permute(x, idx, case.experts)
        grouped = interlace.all_to_all_grouped_matmul(rows, up, sent, activation="relu")
        y = interlace.grouped_matmul_combine(grouped[0], down, grouped[1], idx, w)
    elif how == "handle":
        received, handle = experts.low_latency_dispatch(x, idx, 9, case.experts, use_fp8=False)
        hidden = torch.bmm(received.x, up).relu()
        y = interlace.grouped_matmul_combine(hidden, down, handle, topk_weights=w)
    else:
        received, handle = experts.dispatch(x, idx, w, case.experts)
        parts = received.x.split(received.num_tokens_per_expert.tolist())
        made = torch.cat([(p @ up[e]).relu() @ down[e] for e, p in enumerate(parts)])
        if how == "weighted there":
            made = made * received.topk_weights.unsqueeze(1)
        y = experts.combine(made, handle, weighted=how == "weighted here")
    (y * y).sum().backward()
    torch.testing.assert_close(w.grad, ws[rank].grad, rtol=1e-5, atol=1e-6)
    for mine, exact in ((x, xs[rank].grad), (up, ups.grad[own]), (down, downs.grad[own])):  # type: ignore[index]
        torch.testing.assert_close(mine.grad, exact, rtol=1e-6, atol=1e-6)


# -- edges -------------------------------------------------------------------------------------------

ALGORITHMS = ("fused", "pipelined", "unfused")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(2, place="sim")
def test_a_rank_without_tokens_sends_fp8(algorithm: Any) -> None:
    tokens = 2 * interlace.get_rank()
    x, idx = torch.ones(tokens, 128), torch.zeros(tokens, 1, dtype=torch.int64)
    received, _ = experts.low_latency_dispatch(x, idx, 2, 2, algorithm=algorithm)
    back = experts.dequantize(received.x, received.scales, torch.float32)
    assert received.num_tokens_per_expert.tolist() == [0 if interlace.get_rank() else 2]
    assert interlace.get_rank() or back[0, :2].sum().item() == pytest.approx(256)
    assert tuple(experts.quantize(torch.ones(0, 256))[1].shape) == (0, 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(2, place="sim")
def test_the_weight_of_a_slot_without_a_row_is_not_looked_at(algorithm: Any) -> None:
    """The slot has no expert, or its expert is full."""
    idx = torch.tensor([[0, -1], [-1, -1], [0, 1]])
    weights = torch.tensor([[2.0, torch.nan], [torch.nan, torch.inf], [torch.nan, 3.0]])
    how: Any = {"capacity": 1, "algorithm": algorithm}
    received, handle = experts.dispatch(torch.ones(3, 2), idx, weights, 2, **how)
    made = experts.combine(received.x, handle, algorithm=algorithm)
    assert made.tolist() == [[2.0, 2.0], [0.0, 0.0], [3.0, 3.0]]


def test_permute_knows_its_experts() -> None:
    for wrong in (2, -2):
        with pytest.raises(ValueError, match=f"topk_idx has .*{wrong}"):
            experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, wrong]]), 2)
    pair: Any = torch.ones(2, 4), torch.ones(2, 1)
    with pytest.raises(TypeError, match=r"x must be a tensor or an interlace\.Scaled, got tuple"):
        experts.permute(pair, torch.tensor([[0], [1]]), 2)
    rows, splits = experts.permute(torch.ones(2, 4), torch.tensor([[0, 1], [1, -1]]), 2)
    assert rows.shape[0] == 3 and splits.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
@ranks(2, place="sim")
def test_experts_may_be_integers_of_any_width(dtype: Any) -> None:
    given = torch.full((1, 2), 2.0), torch.tensor([[1, 0]], dtype=dtype), None, np.int64(2)
    received, handle = experts.dispatch(*given)
    assert experts.combine(received.x, handle).tolist() == [[4.0, 4.0]]


def test_products_whose_counts_stay_on_the_device() -> None:
    """The reference has its counts on the host."""
    called: list[int] = []

    def grouped(*tensors: torch.Tensor) -> bool:
        called.append(len(tensors))
        return True

    def on_rank() -> list[torch.Tensor]:
        torch.manual_seed(interlace.get_rank())
        made = [torch.randn(each) for each in ((5, 16), (2, 16, 8), (2, 8, 16), (2, 16), (5, 2))]
        x, up, down, bias = (each.bfloat16().requires_grad_() for each in made[:4])
        weights = made[4].requires_grad_()
        idx = torch.tensor([[0, 3], [1, -1], [-1, -1], [3, 2], [0, 1]])
        received, handle = experts.dispatch(x, idx, weights, 4, num_max_dispatch_tokens_per_rank=6)
        hidden = experts.multiply(received, up).relu()
        y = interlace.grouped_matmul_combine(hidden, down, handle, bias=bias)
        y.float().square().sum().backward()
        return [y.detach(), *(each.grad for each in (x, up, down, bias, weights))]  # type: ignore[misc]

    expected = interlace.run(on_rank, 2)
    with mock.patch("interlace.ops.experts.products.grouped_on_device", grouped):
        found = interlace.run(on_rank, 2)
    assert sorted(called) == [2, 2, 3, 3]
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            # sums of bf16 in another order
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(a.abs().max()))


@ranks(1, place="sim")
def test_multiply_names_what_does_not_fit() -> None:
    received, _ = experts.dispatch(torch.ones(1, 4), torch.tensor([[0]]), None, 1)
    multiply: Any = experts.multiply
    with pytest.raises(ValueError, match=r"weight must have shape \(1, 4, n\)"):
        multiply(received, torch.ones(1, 3, 4))
    with pytest.raises(TypeError, match="received must be the Received of a dispatch, got Tensor"):
        multiply(received.x, torch.ones(1, 4, 4))
    with pytest.raises(TypeError, match="weight must be a tensor, got list"):
        multiply(received, [])


@pytest.mark.parametrize("name", ["combine", "low_latency_combine", "functional.combine"])
@ranks(2, place="sim")
def test_all_ranks_are_told_of_a_handle_that_is_none(name: str) -> None:
    combined: Any = functional.combine if "." in name else getattr(experts, name)
    x, idx = torch.ones(2, 128), torch.tensor([[0, 1], [1, -1]])
    handle, rank = experts.dispatch(x, idx, None, 2)[1], interlace.get_rank()
    more = [idx, None] if name == "low_latency_combine" else []
    for wrong_ranks in ([0], [0, 1]):
        said = "handle must be the handle of a dispatch, got NoneType"
        with pytest.raises(TypeError, match=said) as error:
            combined(torch.ones(4, 2), *more, None if rank in wrong_ranks else handle)
        assert f"rank {rank if rank in wrong_ranks else 0}" in str(error.value)


def test_tokens_that_no_dispatch_has_had_are_named() -> None:
    def on_rank() -> None:
        idx = torch.zeros(2, 1, dtype=torch.int64)
        received, handle = experts.dispatch(torch.ones(2, 4), idx, None, 2)
        longer = handle._replace(topk_idx=torch.full((3, 1), -1))
        experts.combine(received.x, longer if interlace.get_rank() else handle)

    assert "topk_idx has 3 rows, no dispatch has had more than 2" in str(failure(on_rank, 2))


# -- signals of pipelined ones: each is needed, and found missing -------------------------------------

PIPELINED = replace(PLAIN, algorithm="pipelined", tokens=[5, 3])
AT_ONCE: Any = {"algorithm": "pipelined", "async_op": True}


def dispatches() -> None:
    rank = interlace.get_rank()
    given = PIPELINED.x(rank), PIPELINED.idx(rank), None, PIPELINED.experts
    for work in [experts.dispatch(*given, **AT_ONCE) for _ in range(3)]:
        work.wait()


def combines() -> None:
    received, handle = dispatched(PIPELINED)
    for work in [experts.combine(received.x, handle, **AT_ONCE) for _ in range(3)]:
        work.wait()


@pytest.mark.parametrize(
    ("run", "without"),
    [
        (dispatches, ""),
        (dispatches, "wait"),
        (dispatches, "publish"),
        (dispatches, "wait_credits"),
        (combines, ""),
        (combines, "wait"),
        (combines, "publish"),
        # not its credits: who has heard of everybody's last rows knows that those before were summed
    ],
)
def test_a_missing_signal_is_found(run: Any, without: str) -> None:
    nothing = mock.patch.object(SimStream, without, lambda *_: None) if without else nullcontext()
    with nothing:
        assert races(run, 2, seeds=1).clean is not bool(without)


# -- places of rows ------------------------------------------------------------------------------------

CHOICES = st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), max_size=7)


@given(CHOICES, st.sampled_from([0, 1, 2]))
def test_assignments(choices: list[list[int]], capacity: int) -> None:
    idx = torch.tensor(choices, dtype=torch.int64).view(-1, 2)
    chosen = Assignment(idx, 6, 3, capacity)
    flat = idx.flatten().tolist()
    rows = [(e, slot) for e in range(6) for slot in [s for s, each in enumerate(flat) if each == e]]
    kept: list[int] = []
    for e in range(6):
        own = [slot for each, slot in rows if each == e]
        kept += own[: capacity or None]
    assert chosen.slots(len(kept)).tolist() == kept
    inverse = chosen.inverse.flatten().tolist()
    assert [inverse.index(row) for row in range(len(kept))] == kept
    assert sum(each >= 0 for each in inverse) == len(kept)
    assert chosen.counts.tolist() == [sum(flat[slot] == e for slot in kept) for e in range(6)]
    _, tokens, lines = (each.tolist() for each in chosen.sent(None))
    for rank in range(3):
        there = [
            t for t in range(len(choices)) if {s // 2 for s in kept if flat[s] // 2 == rank} & {t}
        ]
        assert lines[rank][0] == len(there)
        assert tokens[rank][: len(there)] == there


def test_segments_are_those_of_the_docstring() -> None:
    counts = torch.tensor([[1, 2], [0, 0]])
    assert known_segments(counts, 0, 1).tolist() == [[[0, 1, 0], [1, 0, 0]]]
    assert known_segments(counts, 1, 1).tolist() == [[[0, 2, 1], [2, 0, 0]]]
