"""The fused ops against float64 references: any shape, world, dtype, layout, schedule, algorithm."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, strategies as st

import interlace
from interlace import reference
from interlace.runtime.numerics.norms import NAMES as ACTIVATIONS
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.api.refusals import check_refused
from support import LAYOUTS, laid_out, noise, poisoned
from tiers import few

ALGORITHMS = ("fused", "pipelined", "unfused", "auto")
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
LENGTHS = st.sampled_from([0, 1, 2, 3, 7, 16, 17, 31, 33])
INNER = st.sampled_from([0, 1, 5, 8, 16, 32, 37])
WORLDS = st.sampled_from([1, 2, 2, 3, 3, 4, 5, 7])


@dataclass
class Case:
    """One call on all ranks. ``lengths`` are the shards' along ``dim``, or one length for a scatter."""

    world: int
    lengths: list[int]
    others: list[int]
    dim: int
    inner: list[int]
    columns: list[int]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    bias: bool
    activation: str
    algorithm: str
    layouts: tuple[str, str]
    seed: int
    average: bool = False
    configuration: dict[str, Any] = field(default_factory=dict)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    @property
    def along_last(self) -> bool:
        return self.dim in (-1, len(self.others) + 1)

    def input(self, rank: int) -> torch.Tensor:
        if self.along_last:
            shape = [*self.others, self.lengths[min(rank, len(self.lengths) - 1)]]
        else:
            shape = [*self.others, self.inner[min(rank, len(self.inner) - 1)]]
            length = self.lengths[min(rank, len(self.lengths) - 1)]
            shape.insert(self.dim if self.dim >= 0 else self.dim + len(shape) + 1, length)
        return laid_out(noise(rank, 1, shape, self.dtype), self.layouts[0])

    def weight(self, rank: int, index: int, inner: int) -> torch.Tensor:
        columns = self.columns[index]
        plain = noise(rank, 10 + index, (inner, columns), self.dtype)
        return laid_out(plain, self.layouts[1])

    def bias_vector(self, index: int) -> torch.Tensor | None:
        return noise(0, 20 + index, (self.columns[index],), self.dtype) if self.bias else None

    @property
    def roundings(self) -> int:
        fused = self.algorithm in ("fused", "auto") and self.result_dtype != F64
        return 1 if fused and F64 not in (self.dtype, self.result_dtype) else 2


@st.composite
def configurations(draw: Any) -> dict[str, Any]:
    block = draw(st.sampled_from([16, 16, 32, 64]))
    return {
        "block_m": block,
        "block_n": draw(st.sampled_from([16, 32, 64])),
        "block_k": draw(st.sampled_from([16, 32, 64])),
        "group_m": draw(st.sampled_from([1, 2, 8])),
        "copiers": draw(st.integers(0, 3)),
        "chunks": draw(st.integers(1, 3)),
        "programs": draw(st.integers(1, 4)),
        "copy_rows": draw(st.sampled_from([4, 16])),
        "descriptors": draw(st.booleans()),
        "epilogue_subtile": draw(st.sampled_from([1, 2, 4])),
        "output_descriptors": draw(st.booleans()),
        "flatten": draw(st.booleans()),
        "warp_specialize": draw(st.booleans()),
    }


@st.composite
def cases(draw: Any, *, gather: bool) -> Case:
    world = draw(WORLDS)
    algorithm = draw(st.sampled_from(("fused", *ALGORITHMS)))
    any_dtype = algorithm in ("unfused", "auto")
    dtypes = [F32, F16, BF16, F64] if any_dtype else [F32, F16, BF16]
    dtype = draw(st.sampled_from(dtypes))
    ndim = draw(st.sampled_from([2, 2, 2, 3, 4]))
    dim = draw(st.integers(-ndim, ndim - 1))
    if gather and dim in (-1, ndim - 1) and algorithm in ("fused", "pipelined"):
        dim = 0
    last = dim in (-1, ndim - 1)
    others = [draw(st.sampled_from([1, 2, 3])) for _ in range(ndim - 1 if last else ndim - 2)]
    count = world if gather else 1
    lengths = [draw(LENGTHS) for _ in range(count)]
    inner = [draw(INNER)]
    if gather and last:
        inner = [sum(lengths)]
    elif not gather and last:
        lengths = inner
    elif not gather:
        inner = draw(st.sampled_from([inner, [draw(INNER) for _ in range(world)]]))
    return Case(
        world=world,
        lengths=lengths,
        others=others,
        dim=dim,
        inner=inner,
        columns=[
            draw(LENGTHS) for _ in range(draw(st.sampled_from([1, 1, 2, 3])) if gather else 1)
        ],
        dtype=dtype,
        out_dtype=draw(st.sampled_from([None, None, *dtypes])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["", "", *ACTIVATIONS])),
        algorithm=algorithm,
        layouts=(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS))),
        seed=draw(st.integers(0, 1 << 16)),
        average=draw(st.booleans()),
        configuration=draw(configurations()),
    )


def run(case: Case, function: Any) -> list[Any]:
    with poisoned() as done, override(**case.configuration):
        results = interlace.run(function, case.world, case, seed=case.seed)
    assert done["allocations"] == 0 or done["workspaces"] > 0, "nothing was poisoned"
    return results


def check(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    ratio = reference.worst_ratio(actual, expected, bound)
    assert ratio <= 1, f"{what}: {ratio:.3g} times the bound"


def gather_on_rank(case: Case) -> Any:
    rank = interlace.get_rank()
    several = len(case.columns) > 1
    weights = [case.weight(0, i, case.inner[0]) for i in range(len(case.columns))]
    biases = [case.bias_vector(i) for i in range(len(case.columns))]
    return interlace.all_gather_matmul(
        case.input(rank),
        weights if several else weights[0],
        gather_dim=case.dim,
        bias=biases if several else biases[0],
        activation=case.activation,
        return_gathered=True,
        algorithm=case.algorithm,
        out_dtype=case.out_dtype,
    )


def check_gather(case: Case) -> None:
    shards = [case.input(rank) for rank in range(case.world)]
    whole = torch.cat(shards, case.dim)
    for rank, (gathered, outputs) in enumerate(run(case, gather_on_rank)):
        assert torch.equal(gathered, whole), f"gathered on rank {rank}"
        for index, output in enumerate(outputs if len(case.columns) > 1 else [outputs]):
            weight, bias = case.weight(0, index, case.inner[0]), case.bias_vector(index)
            assert output.dtype == case.result_dtype
            check(
                output,
                *reference.all_gather_matmul(
                    shards,
                    weight,
                    case.result_dtype,
                    case.dim,
                    bias=bias,
                    activation=case.activation,
                    roundings=case.roundings,
                ),
                f"output {index} on rank {rank}",
            )


def reduce_on_rank(case: Case, scatter: bool) -> torch.Tensor:
    rank = interlace.get_rank()
    x = case.input(rank)
    options: dict[str, Any] = {
        "reduce_op": "avg" if case.average else "sum",
        "bias": case.bias_vector(0),
        "activation": case.activation,
        "algorithm": case.algorithm,
        "out_dtype": case.out_dtype,
    }
    weight = case.weight(rank, 0, x.shape[-1])
    if scatter:
        return interlace.matmul_reduce_scatter(x, weight, scatter_dim=case.dim, **options)
    return interlace.matmul_all_reduce(x, weight, **options)


def check_reduce(case: Case, *, scatter: bool) -> None:
    inputs = [case.input(rank) for rank in range(case.world)]
    weights = [case.weight(rank, 0, x.shape[-1]) for rank, x in enumerate(inputs)]
    how = "avg" if case.average else "sum"
    bias = case.bias_vector(0)
    expected, bound = reference.matmul_all_reduce(
        inputs, weights, case.result_dtype, bias, how, case.activation
    )
    results = run(case, lambda case: reduce_on_rank(case, scatter))
    dim = case.dim if scatter else 0
    split = reference.split if scatter else lambda whole, world, dim: [whole] * world
    parts = zip(split(expected, case.world, dim), split(bound, case.world, dim), strict=True)
    for rank, (part, bound_part) in enumerate(parts):
        assert results[rank].dtype == case.result_dtype
        check(results[rank], part, bound_part, f"rank {rank}")
        if not scatter:
            assert torch.equal(results[rank], results[0]), "bits differ between ranks"


@hypothesis.settings(max_examples=15)
@given(cases(gather=True))
def test_all_gather_matmul(case: Case) -> None:
    check_gather(case)


@hypothesis.settings(max_examples=20)
@given(cases(gather=False))
def test_matmul_reduce_scatter(case: Case) -> None:
    check_reduce(case, scatter=True)


@hypothesis.settings(max_examples=20)
@given(cases(gather=False))
def test_matmul_all_reduce(case: Case) -> None:
    check_reduce(case, scatter=False)


def simple(world: int, **changes: Any) -> Case:
    values: dict[str, Any] = {
        "world": world,
        "lengths": [3 + (rank * 5) % 4 for rank in range(world)],
        "others": [],
        "dim": 0,
        "inner": [9],
        "columns": [6],
        "dtype": F32,
        "out_dtype": None,
        "bias": True,
        "activation": "",
        "algorithm": "fused",
        "layouts": ("contiguous", "contiguous"),
        "seed": world,
        "configuration": {"programs": 1, "chunks": 1},
    }
    return Case(**{**values, **changes})


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 13, 16, 8])
def test_world_sizes(world: int) -> None:
    """The scatter has fewer rows than ranks, so the last ranks get none."""
    check_gather(simple(world))
    check_reduce(simple(world, lengths=[max(1, world - 2)]), scatter=True)
    check_reduce(simple(world, lengths=[3]), scatter=False)


WITHOUT: dict[str, dict[str, Any]] = {
    "inner length": {"inner": [0]},
    "inner length, 3-D": {"inner": [0], "others": [3]},
    "rows": {"lengths": [0]},
    "columns": {"columns": [0]},
    "columns of one weight": {"columns": [0, 5]},
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("what", WITHOUT)
def test_lengths_of_zero(what: str, algorithm: str) -> None:
    case = simple(2, algorithm=algorithm, **WITHOUT[what])
    check_gather(case)
    if len(case.columns) == 1:
        rows = case.lengths[:1]
        for scatter in (False, True):
            check_reduce(dataclasses.replace(case, lengths=rows), scatter=scatter)
        by_columns = {"dim": -1, "others": [*rows, *case.others], "lengths": case.inner}
        check_reduce(dataclasses.replace(case, **by_columns), scatter=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_without_inner_length(algorithm: str) -> None:
    check_reduce(simple(3, lengths=[3], inner=[0, 2, 4], algorithm=algorithm), scatter=False)


@pytest.mark.parametrize("algorithm", few(ALGORITHMS, "fused"))
@ranks(3, place="sim")
def test_a_rank_without_columns_still_sends(algorithm: Any) -> None:
    """A rank that computes nothing must still send."""
    rank = interlace.get_rank()
    for call in range(4):
        gathered, _ = interlace.all_gather_matmul(
            noise(rank, call, (4, 8)),
            noise(0, 50, (8, 0 if rank == 0 else 5)),
            algorithm=algorithm,
            return_gathered=True,
        )
        assert torch.equal(gathered, torch.cat([noise(r, call, (4, 8)) for r in range(3)]))


@pytest.mark.parametrize("copiers", range(4))
@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("weight_layout", ["contiguous", "transposed"])
def test_many_tiles(copiers: int, descriptors: bool, weight_layout: str) -> None:
    blocks = {f"block_{axis}": 16 for axis in "mnk"}
    configuration = {**blocks, "copiers": copiers, "descriptors": descriptors, "chunks": 3}
    check_gather(
        simple(
            2,
            lengths=[50, 33],
            inner=[40],
            columns=[48],
            dtype=BF16,
            layouts=("contiguous", weight_layout),
            configuration=configuration,
        )
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activations(activation: str, algorithm: str, dtype: torch.dtype) -> None:
    case = simple(
        2,
        lengths=[20, 7],
        inner=[60],
        columns=[24],
        dtype=dtype,
        activation=activation,
        algorithm=algorithm,
        configuration={f"block_{axis}": 16 for axis in "mnk"} | {"epilogue_subtile": 2},
    )
    check_gather(case)
    scattered = dataclasses.replace(case, lengths=[27], seed=3)
    check_reduce(scattered, scatter=True)
    check_reduce(scattered, scatter=False)


def stated(activation: str, x: float) -> float:
    """Return the formula for one number: torch's vectors give nan for gelu(inf) on some processors."""
    if activation == "relu":
        return x if x > 0 or math.isnan(x) else 0.0
    inside = {
        "gelu": lambda: math.erf(x / math.sqrt(2)),
        "gelu_tanh": lambda: math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        "silu": lambda: math.tanh(x / 2),
    }
    return x * 0.5 * (1 + inside[activation]())


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("extreme", [torch.inf, -torch.inf, torch.nan, 1e30, -1e30])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extreme_numbers(activation: str, extreme: float) -> None:
    """The formula's infinities and nan count; torch's result of infinities may differ."""
    x, weight = torch.eye(4), torch.eye(4)
    x[1, 1] = extreme
    z = (torch.cat([x, x]).double() @ weight.double()).flatten().tolist()
    expected = torch.tensor([stated(activation, each) for each in z]).view(8, 4)
    for algorithm in ("fused", "unfused"):
        if algorithm == "fused" or not math.isinf(extreme):
            found = interlace.run(
                lambda algorithm=algorithm: interlace.all_gather_matmul(
                    x, weight, activation=activation, algorithm=algorithm
                ),
                2,
            )
            torch.testing.assert_close(found[0], expected, equal_nan=True)


ACTIVATION = "activation must be None or one of relu, gelu, gelu_tanh, silu"


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@ranks(2, place="sim")
def test_wrong_activations_are_refused(op: str) -> None:
    right = {"input": torch.eye(4), "weight": torch.eye(4), "activation": "relu"}
    for wrong in ("tanh", 3, ["relu", "silu"]):
        check_refused(getattr(interlace, op), right, {"activation": wrong}, ACTIVATION)
    if op != "all_gather_matmul":
        differs = "activation differs between ranks: relu on rank 0, silu on rank 1"
        check_refused(getattr(interlace, op), right, {"activation": "silu"}, differs)


@ranks(2, place="sim")
def test_as_many_activations_as_weights() -> None:
    right = {"input": torch.eye(4), "weight": [torch.eye(4)] * 2, "activation": None}
    for wrong, text in (
        (["relu"], "activation has 1 entries, weight has 2"),
        (7, "TypeError: sequence like weight"),
    ):
        check_refused(interlace.all_gather_matmul, right, {"activation": wrong}, text)
