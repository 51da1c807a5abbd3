"""The grouped ops on simulated ranks: any routing, dtype, layout and schedule."""

from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace import reference
from interlace.ops.experts.grouped import Routes
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.algorithms.test_fused_ops import configurations
from sim.api.refusals import ByRank, check_refused
from support import LAYOUTS, laid_out, noise, poisoned, slow_rank, starved

GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"
ALGORITHMS = ("fused", "pipelined", "unfused", "auto")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@dataclass
class Case:
    """One call on all ranks: ``counts[rank][expert]`` rows; ``experts`` of each rank's weight."""

    op: str
    experts: int
    counts: list[list[int]]
    inner: int
    columns: int
    dtype: torch.dtype = F32
    algorithm: str = "fused"
    bias: bool = False
    activation: str = ""
    layouts: tuple[str, str] = ("contiguous", "transposed")
    seed: int = 0
    configuration: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.counts)

    def input(self, rank: int) -> torch.Tensor:
        rows = sum(self.counts[rank])
        return laid_out(noise(rank, 1, (rows, self.inner), self.dtype), self.layouts[0])

    def weight(self, rank: int) -> torch.Tensor:
        shape = (self.experts, self.inner, self.columns)
        return laid_out(noise(rank, 2, shape, self.dtype), self.layouts[1])

    def bias_matrix(self, rank: int) -> torch.Tensor | None:
        return noise(rank, 3, (self.experts, self.columns), self.dtype) if self.bias else None

    def block(self, rank: int) -> range:
        first = rank * self.experts if self.op == EXCHANGE else 0
        return range(first, first + self.experts)


def on_rank(case: Case) -> Any:
    rank = interlace.get_rank()
    return getattr(interlace, case.op)(
        case.input(rank),
        case.weight(rank),
        case.counts[rank],
        bias=case.bias_matrix(rank),
        activation=case.activation or None,
        return_received=True,
        algorithm=case.algorithm,
    )


def received_rows(case: Case, rank: int) -> list[torch.Tensor]:
    """Return the rows by expert of the rank."""
    parts = [case.input(source).split(case.counts[source]) for source in range(case.world)]
    return [torch.cat([part[e] for part in parts]) for e in case.block(rank)]


def check_products(case: Case, rank: int, output: torch.Tensor) -> None:
    """``output`` has the products of the rows that the rank has received, by expert."""
    weight, bias, by_expert = case.weight(rank), case.bias_matrix(rank), received_rows(case, rank)
    assert output.dtype == case.dtype
    outputs = output.split([len(rows) for rows in by_expert])
    for e, (rows, actual) in enumerate(zip(by_expert, outputs, strict=True)):
        own = None if bias is None else bias[e]
        exact, bound = reference.matmul(
            rows, weight[e], case.dtype, bias=own, activation=case.activation, roundings=2
        )
        ratio = reference.worst_ratio(actual, exact, bound)
        assert ratio <= 1, f"expert {e} on rank {rank}: {ratio:.3g} times the bound"


def check(case: Case) -> None:
    with poisoned() as done, override(**case.configuration):
        results = interlace.run(on_rank, case.world, case, seed=case.seed)
    if case.algorithm in ("fused", "pipelined"):  # a collective's words need no workspace
        assert done["allocations"] == 0 or done["workspaces"] > 0, "nothing was poisoned"
    for rank, (received, output, splits) in enumerate(results):
        assert splits.dtype == torch.int64
        assert splits.tolist() == [[each[e] for each in case.counts] for e in case.block(rank)]
        assert torch.equal(received, torch.cat(received_rows(case, rank))), f"on rank {rank}"
        assert output.shape == (received.shape[0], case.columns)
        check_products(case, rank, output)


@st.composite
def cases(draw: Any) -> Case:
    op = draw(st.sampled_from([GATHER, EXCHANGE]))
    world = draw(st.sampled_from([1, 2, 2, 3, 4]))
    experts = draw(st.sampled_from([1, 2, 3]))
    total = experts * world if op == EXCHANGE else experts
    length = st.sampled_from([0, 0, 1, 2, 7, 16, 17, 33])
    algorithm = draw(st.sampled_from(("fused", *ALGORITHMS)))
    dtypes = [F32, F16, BF16] + ([F64] if algorithm in ("auto", "unfused") else [])
    return Case(
        op=op,
        experts=experts,
        counts=[[draw(length) for _ in range(total)] for _ in range(world)],
        inner=draw(st.sampled_from([0, 1, 8, 16, 37])),
        columns=draw(st.sampled_from([0, 1, 16, 31])),
        dtype=draw(st.sampled_from(dtypes)),
        algorithm=algorithm,
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["", "silu"])),
        layouts=(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))),
        seed=draw(st.integers(0, 1 << 16)),
        configuration=draw(configurations()),
    )


@hypothesis.settings(max_examples=30)
@given(cases())
def test_any_routing(case: Case) -> None:
    check(case)


LOPSIDED = {
    "all to one expert": [[0, 0, 0, 40], [0, 0, 0, 33], [0, 0, 0, 1], [0, 0, 0, 17]],
    "an expert without rows": [[3, 0, 9, 20], [17, 0, 0, 1], [1, 0, 2, 3], [0, 0, 18, 4]],
    "a rank without rows": [[5, 6, 7, 8], [0, 0, 0, 0], [33, 0, 0, 2], [1, 1, 1, 1]],
    "only to oneself": [[20, 0, 0, 0], [0, 20, 0, 0], [0, 0, 20, 0], [0, 0, 0, 20]],
    "nothing at all": [[0] * 4] * 4,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS[:3])
@pytest.mark.parametrize("routing", LOPSIDED)
def test_lopsided_routing(routing: str, algorithm: str) -> None:
    small = {"block_m": 16, "block_n": 16, "block_k": 16, "chunks": 3}
    for op, experts in ((EXCHANGE, 1), (GATHER, 4)):
        check(Case(op, experts, LOPSIDED[routing], 9, 17, BF16, algorithm, configuration=small))


@pytest.mark.parametrize("slow", [0, 1])
def test_rows_that_are_late(slow: int) -> None:
    case = Case(EXCHANGE, 2, [[18, 1, 17, 3], [2, 20, 16, 5]], 8, 16)
    with starved(slow_rank(slow)), override(block_m=16, block_n=16, programs=2):
        results = interlace.run(lambda: [on_rank(case) for _ in range(3)], 2)
    for first, *later in results:
        for other in later:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    check(case)


X, W = torch.ones(4, 8), torch.ones(1, 8, 3)
MISUSE: list[tuple[str, dict[str, Any], str]] = [
    (EXCHANGE, {"input_splits": [5, -1]}, "must not be negative, got [5, -1]"),
    (EXCHANGE, {"input_splits": [2, 1]}, "adds up to 3, input has 4 rows"),
    (EXCHANGE, {"input_splits": [2, 1, 1]}, "has 3 experts, which world size 2 does not divide"),
    (EXCHANGE, {"input_splits": [1] * 4}, "has 4 entries, 2 ranks with 1 experts in weight make 2"),
    (EXCHANGE, {"input_splits": [2.0, 2.0]}, "TypeError: must be a list of ints"),
    (EXCHANGE, {"input_splits": torch.tensor([2.0, 2.0])},
     "TypeError: input_splits must be a tensor of integers, got torch.float32"),
    (EXCHANGE, {"output_splits": ByRank([2, 2], [2, 1])},
     "output_splits[1] (expert 1 from rank 1) is 1 on rank 1, input_splits[1] is 2 on rank 1"),
    (EXCHANGE, {"output_splits": [2, 2, 2]}, "output_splits has 3 entries, 1 experts and 2 ranks make 2"),
    (EXCHANGE, {"input": X[0]}, "must have 2 dimensions"),
    (EXCHANGE, {"weight": W[:, :7]}, "weight has k = 7"),
    (EXCHANGE, {"weight": W[0]}, "weight must have 3 dimensions"),
    (EXCHANGE, {"weight": W[:0]}, "at least one expert"),
    (EXCHANGE, {"weight": W.half()}, "TypeError: weight is torch.float16"),
    (EXCHANGE, {"activation": "tanh"}, "activation must be"),
    (EXCHANGE, {"input": X.double(), "weight": W.double(), "algorithm": "fused"},
     "TypeError: supports float32, fl"),
    (EXCHANGE, {"algorithm": ByRank("fused", "unfused")},
     "algorithm differs between ranks: fused on rank 0, unfused on rank 1"),
    (EXCHANGE, {"weight": W.clone().requires_grad_()},
     "the set of inputs that require a gradient differs between ranks: None on rank 0, weight on rank 1"),
    (GATHER, {"input": ByRank(X.clone().requires_grad_(), X)},
     "the set of inputs that require a gradient differs between ranks: input on rank 0, None on rank 1"),
    (GATHER, {"input_splits": [3]}, "adds up to 3, input has 4 rows"),
    (GATHER, {"bias": torch.ones(3)}, "bias must have shape (1, 3)"),
    (GATHER, {"weight": W.repeat(2, 1, 1), "input_splits": [2, 2]},
     "the number of experts differs between ranks: 1 on rank 0, 2 on rank 1"),
    (GATHER, {"input": X.bfloat16(), "weight": W.bfloat16()},
     "TypeError: dtype of input differs between ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_told_to_all(op: str, changes: dict[str, Any], text: str) -> None:
    right = {"input": X, "weight": W, "input_splits": [2, 2] if op == EXCHANGE else [4]}
    right["algorithm"] = "unfused"
    check_refused(getattr(interlace, op), right, changes, text)


# -- routes --------------------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40]), min_size=6, max_size=6)


@given(st.lists(SIZES, min_size=3, max_size=3), st.booleans(), st.sampled_from([16, 32]))
def test_routes_fit_together(counts: list[list[int]], exchange: bool, chunk: int) -> None:
    """Each row is sent once, is expected by its receiver, and every chunk has its own slot."""
    experts = 2 if exchange else 6
    everyone = [Routes(r, tuple(map(tuple, counts)), experts) for r in range(3)]
    for routes in everyone:
        rank = routes.rank
        arriving = [
            line for other in everyone for line in other.send_lines(chunk) if line[0] == rank
        ]
        slots = [line[4] for line in arriving]
        assert sorted(slots) == sorted(slot for _, slot in routes.arrival_slots(chunk))
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < routes.slots(chunk) for slot in slots)
        filled = [row for _, _, rows, to, _ in arriving for row in range(to, to + rows)]
        segments = [row[rank] for row in routes.mine]
        filled += [row for s in segments for row in range(s.to, s.to + s.rows)]
        assert sorted(filled) == list(range(routes.received(rank)))
        assert routes.received(rank) <= routes.most_received


def test_segments_are_those_of_the_docstring() -> None:
    routes = Routes(0, ((3, 1), (2, 4)), 2)
    assert routes.segment_lines() == [[0, 3, 0], [3, 2, 0], [5, 1, 3], [6, 4, 2]]
    assert routes.arrival_slots(4) == [(1, 1), (1, 4)]
