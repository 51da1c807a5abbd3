"""Reductions whose rows are normed, against float64: any op, algorithm, norm, dtype, shape and schedule."""

import math
import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import functional, reference
from interlace.ops.matmul import launch_norms as norms
from interlace.runtime.numerics.norms import LARGEST, SMALLEST_SCALE, RowNorm
from interlace.runtime.tuning.configuration import override
from ranks import ranks
from sim.algorithms.node_support import TWO, on_nodes
from sim.api.refusals import both, check_refused
from sim.norms.counted import launches
from support import LAYOUTS, laid_out, noise, poisoned, schedule_digest, slow_rank, starved
from tiers import few

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm")
STATIC = "fp8_static"
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "programs": 2}


@dataclass
class Case:
    """One call on all ranks; dimension ``dim`` of the inputs is scattered, or none."""

    op: str
    algorithm: str = "fused"
    world: int = 3
    lengths: tuple[int, ...] = (21,)
    columns: int = 40
    inner: int = 24
    dim: int = 0
    dtype: torch.dtype = F32
    out_dtype: torch.dtype | None = None
    kind: str = "rms"
    affine: bool = True
    residual: bool = True
    bias: bool = False
    activation: str | None = None
    average: bool = False
    quantize: Any = None
    gather: bool = False
    layout: str = "contiguous"
    seed: int = 0

    @property
    def result_dtype(self) -> torch.dtype:
        return self.out_dtype or self.dtype

    def vector(self, call: int) -> torch.Tensor:
        return noise(0, call, (self.columns,), self.result_dtype)

    def norm(self) -> Any:
        # this static scale is so small that fp8 saturates
        by = 1 / 400 if self.quantize == STATIC else 1
        if self.kind == "rms":
            return interlace.RMSNorm(self.vector(30) / by if self.affine else None, 1e-5)
        vectors = (self.vector(30) / by, self.vector(31) / by) if self.affine else (None, None)
        return interlace.LayerNorm(*vectors, eps=1e-5)

    @property
    def scattered(self) -> bool:
        return "scatter" in self.op

    def input(self, rank: int) -> torch.Tensor:
        last = self.inner if self.op.startswith("matmul") else self.columns
        return laid_out(noise(rank, 1, (*self.lengths, last), self.dtype), self.layout)

    def weight(self, rank: int) -> torch.Tensor:
        return noise(rank, 2, (self.inner, self.columns), self.dtype)

    def whole_residual(self) -> torch.Tensor | None:
        shape = (*self.lengths, self.columns)
        return noise(0, 3, shape, self.result_dtype) if self.residual else None

    def own(self, whole: Any, rank: int) -> Any:
        return reference.split(whole, self.world, self.dim)[rank] if self.scattered else whole

    def call(self, group: Any = None) -> Any:
        rank, residual = interlace.get_rank(), self.whole_residual()
        matmul = self.op.startswith("matmul")
        own = None if residual is None else laid_out(self.own(residual, rank), self.layout)
        how: dict[str, Any] = {"norm": self.norm(), "residual": own, "group": group}
        how |= {"quantize": self.quantize, "algorithm": self.algorithm}
        how |= {"reduce_op": "avg" if self.average else "sum"}
        if self.bias:
            how["bias"] = noise(0, 4, (self.columns,), self.dtype)
        if self.scattered:
            how |= {"scatter_dim": self.dim, "gather_normed": self.gather}
        if matmul:
            how |= {"activation": self.activation, "out_dtype": self.out_dtype}
        operands = (self.input(rank), self.weight(rank)) if matmul else (self.input(rank),)
        return getattr(interlace, self.op)(*operands, **how)

    def total(self) -> reference.Bounded:
        """Return all rows of the sum with the residual."""
        ranks, op = range(self.world), "avg" if self.average else "sum"
        inputs = [self.input(rank) for rank in ranks]
        bias = noise(0, 4, (self.columns,), self.dtype) if self.bias else None
        if self.op.startswith("matmul"):
            weights, dtype = [self.weight(rank) for rank in ranks], self.result_dtype
            found = reference.matmul_all_reduce(
                inputs, weights, dtype, bias, op, self.activation or ""
            )
        else:
            found = reference.reduce(inputs, op)
            if bias is not None:
                found = reference.with_residual(found, bias, self.dtype)
        return reference.with_residual(found, self.whole_residual(), self.result_dtype)


def check(case: Case, results: list[Any]) -> None:
    value, bound = case.total()
    sums = [result[1] for result in results]
    whole = torch.cat(sums, case.dim) if case.scattered else sums[0]
    assert reference.worst_ratio(whole, value, bound) <= 1, case
    given = case.norm()
    norm = RowNorm(case.kind, given.eps, given.weight, getattr(given, "bias", None))
    right = reference.norm(whole, norm, case.result_dtype)
    if case.quantize == STATIC:
        right = right[0].clamp(-LARGEST, LARGEST), right[1]
        results = [((y, torch.ones(*y.shape[:-1], 1)), total) for y, total in results]
    for rank, (normed, total) in enumerate(results):
        assert case.scattered or torch.equal(total, sums[0]), "bits differ between ranks"
        want = [each if case.gather else case.own(each, rank) for each in right]
        if case.quantize:
            normed, scale = normed
            assert normed.dtype == torch.float8_e4m3fn and scale.dtype == F32
            assert scale.shape == (*want[0].shape[:-1], 1)
            largest = (want[0].abs() + want[1]).amax(-1, keepdim=True) if want[0].numel() else 0
            least = SMALLEST_SCALE if case.quantize == "fp8" else 1
            assert bool((scale <= largest / LARGEST * 1.0001 + least).all())
            want = list(reference.dequantized((normed, scale), (want[0], want[1])))
            normed = normed.double() * scale.double()
        else:
            assert normed.dtype == case.result_dtype
        assert reference.worst_ratio(normed, *want) <= 1, (case, rank)
        if case.gather or not case.scattered:
            first = results[0][0][0] if case.quantize else results[0][0]
            own = results[rank][0][0] if case.quantize else normed
            assert torch.equal(own.double(), first.double()), "bits differ between ranks"


def run(case: Case, **configuration: Any) -> list[Any]:
    def on_rank() -> Any:
        with override(**configuration):
            return case.call()

    with poisoned():
        return interlace.run(on_rank, case.world, seed=case.seed)


def drawn(seed: int) -> tuple[Case, dict[str, Any]]:
    pick = random.Random(seed)
    op = OPS[seed % 4]
    matmul = op.startswith("matmul")
    names = ["fused", "fused", "pipelined", "unfused", "auto"]
    algorithm = pick.choice([*names, "low_latency"] if op == "all_reduce_norm" else names)
    dtypes = [F32, F16, BF16] + [F64] * (algorithm in ("unfused", "auto"))
    dtype = pick.choice(dtypes)
    lengths: tuple[int, ...] = pick.choice([(17,), (5,), (2, 7), (5, 3), (1, 2, 4)])
    case = Case(
        op,
        algorithm,
        world=pick.choice([1, 2, 3, 4]),
        lengths=lengths,
        columns=pick.choice([1, 8, 33, 48]),
        inner=pick.choice([1, 16, 37]),
        dim=pick.randrange(len(lengths)),
        dtype=dtype,
        out_dtype=pick.choice([None, F32]) if matmul and dtype != F64 else None,
        kind=pick.choice(["rms", "layer"]),
        affine=pick.random() < 0.8,
        residual=pick.random() < 0.8,
        bias=pick.random() < 0.4,
        activation=pick.choice([None, "gelu"]) if matmul else None,
        average=pick.random() < 0.3,
        quantize=pick.choice([None, "fp8", STATIC]),
        gather="scatter" in op and pick.random() < 0.5,
        layout=pick.choice(LAYOUTS[:4]),
        seed=seed,
    )
    blocks = {"block_elements": pick.choice([16, 64, 1024]), "programs": pick.choice([1, 2, 3])}
    return case, SMALL | {"group_m": pick.choice([1, 2, 8])} | blocks


@pytest.mark.parametrize("seed", few(list(range(120)), *range(28)))
def test_any_call(seed: int) -> None:
    case, configuration = drawn(seed)
    check(case, run(case, **configuration))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused", "auto"])
def test_empty_parts_and_no_rows(op: str, algorithm: str) -> None:
    for lengths, columns, inner in (((2,), 8, 4), ((0,), 8, 4), ((3,), 0, 4), ((3,), 8, 0)):
        case = Case(op, algorithm, 3, lengths, columns, inner, quantize="fp8" if inner else None)
        results = run(case, **SMALL)
        if columns:
            check(case, results)
        else:
            assert [total.shape[-1] for _, total in results] == [0] * 3


@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_reduce_norm"])
def test_in_two_shots(op: str) -> None:
    """There are more rows than one shot takes: every rank norms its rows and gathers the sums."""
    patched = mock.patch.object(norms, "ONE_SHOT_BYTES", 0)
    by_op = mock.patch("interlace.ops.matmul.norms.ONE_SHOT_BYTES", 0)
    for quantize in (None, "fp8"):
        with patched, by_op, launches() as seen:
            case = Case(op, lengths=(23,), dtype=BF16, quantize=quantize, bias=True)
            check(case, run(case, **SMALL, block_elements=32))
        name = "reduce_norm" if op == "all_reduce_norm" else "matmul_reduce_scatter_norm"
        assert seen == {f"{name}_kernel": 3}, "one kernel on every rank, and no other"


def test_the_chain_of_a_sequence_parallel_block_is_one_kernel() -> None:
    """Normed rows go from registers to the output and to every peer; no gather follows."""
    for op in ("matmul_reduce_scatter", "reduce_scatter_norm"):
        with launches() as seen:
            case = Case(op, lengths=(20,), gather=True, dim=0)
            check(case, run(case, **SMALL))
        assert len(seen) == 1 and seen.total() == 3


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("columns", [300, 513, 1024])
def test_low_latency_rows_of_several_blocks(dtype: torch.dtype, columns: int) -> None:
    """Rows end within a block or a word."""

    def on_rank() -> list[Any]:
        return [case.call() for case in cases]

    how: dict[str, Any] = {"algorithm": "low_latency", "columns": columns, "dtype": dtype}
    cases = [
        Case("all_reduce_norm", lengths=(rows,), kind=kind, bias=rows == 2, **how)
        for rows, kind in ((2, "rms"), (1, "layer"), (3, "rms"))
    ]
    with poisoned(), launches() as seen:
        results = interlace.run(on_rank, 3)
    for index, case in enumerate(cases):
        check(case, [each[index] for each in results])
    assert seen == {"low_latency_norm_kernel": 9}


def test_a_token_behind_a_matmul_goes_by_words() -> None:
    """ "auto" finds nothing to fuse, so torch multiplies and one kernel follows."""
    few = mock.patch("interlace.ops.matmul.reduce.choose_algorithm", lambda *_, **how: "unfused")
    for dtype, quantize in ((BF16, None), (F32, "fp8")):
        case = Case(
            "matmul_all_reduce", "auto", 3, (2,), 520, dtype=dtype, quantize=quantize, bias=True
        )
        with few, launches() as seen:
            check(case, run(case))
        assert seen == {"low_latency_norm_kernel": 3}


def test_auto_takes_words_for_a_token_and_the_kernel_for_more() -> None:
    for rows, kernel in ((1, "low_latency_norm_kernel"), (80, "reduce_norm_kernel")):
        with launches() as seen:
            run(Case("all_reduce_norm", "auto", 2, (rows,), 128), block_elements=4096)
        assert set(seen) == {kernel}


@pytest.mark.parametrize("op", OPS)
def test_equal_bits_in_every_schedule(op: str) -> None:
    case = Case(op, lengths=(9,), columns=24, kind="layer", gather="scatter" in op)

    def on_rank() -> Any:
        with override(**SMALL, block_elements=16):
            return [*case.call(), schedule_digest()]

    found, digests = [], set()
    for seed in range(3):
        with starved(slow_rank(seed)):
            results = interlace.run(on_rank, 3, seed=seed)
        found.append([torch.cat([y, h]) for y, h, _ in results])
        digests |= {each[2] for each in results}
    assert len(digests) > 3
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", ["auto", "pipelined"])
def test_on_several_nodes(op: str, algorithm: str) -> None:
    """The op without a norm reduces between nodes, and torch computes the norm."""
    how: Any = {"gather": "scatter" in op, "quantize": "fp8", "bias": True, "dtype": BF16}
    case = Case(op, algorithm, 4, (13,), **how)
    with launches() as seen:
        check(case, interlace.run(lambda: case.call(on_nodes(TWO, "late")), 4))
    by_kernel = op.startswith("matmul") and algorithm == "auto"
    assert ("matmul_node_reduce_scatter_kernel" in seen) == by_kernel


@ranks(2, place="sim")
def test_statistics_do_not_cancel() -> None:
    """The numbers are far from zero: a variance from fp32 sums of squares would be all error."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) + 3000
    normed, total = interlace.all_reduce_norm(x / 2, norm=interlace.LayerNorm(), algorithm="fused")
    right = torch.nn.functional.layer_norm(total.double(), (256,))
    assert float((normed - right).abs().max()) < 256 * 3000 * 2.0**-24


@ranks(2, place="sim")
def test_scales_are_as_a_scaled_matmul_takes_them() -> None:
    case = Case("all_reduce_norm", lengths=(16,), columns=32, quantize="fp8", world=2)
    (values, scale), _ = case.call()
    weight, ones = torch.eye(32).to(torch.float8_e4m3fn).t(), torch.ones(1, 32)
    product = torch._scaled_mm(values, weight, scale, ones, out_dtype=BF16)
    assert math.isclose(float(values.float().abs().max()), LARGEST)
    right = values.float() * scale
    assert float((product - right).abs().max()) <= float(right.abs().max()) * 2.0**-8


@pytest.mark.parametrize("arch", few([80, 90], 90))
def test_compiled_kernels_have_the_same_sums(arch: int) -> None:
    """The kernels run in place ``ptx``; below 9.0 torch makes fp8."""
    cases = [
        Case("all_reduce_norm", "fused", 2, (5,), 64, dtype=BF16),
        Case("all_reduce_norm", "low_latency", 2, (1,), 64, dtype=BF16, kind="layer"),
        Case("reduce_scatter_norm", "auto", 2, (5,), 64, dtype=BF16, gather=True, quantize="fp8"),
    ]

    def on_rank() -> list[Any]:
        return [case.call() for case in cases]

    interpreted = interlace.run(on_rank, 2)
    compiled = interlace.run(on_rank, 2, place="ptx", arch=arch)
    for index, case in enumerate(cases):
        check(case, [each[index] for each in compiled])
        if arch == 90 or not case.quantize:
            for one, other in zip(interpreted, compiled, strict=True):
                assert torch.equal(one[index][1], other[index][1])


RMS = interlace.RMSNorm(torch.ones(8))
SCATTER, REDUCE, PARTS, ROWS = (
    "matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm",
)  # fmt: skip


def arguments(op: str) -> dict[str, Any]:
    weight = {"weight": torch.ones(6, 8)} if op.startswith("matmul") else {}
    input = torch.ones(4, 6 if weight else 8)
    return {"input": input, **weight, "norm": RMS, "algorithm": "unfused"}


MISUSE: tuple[tuple[str, dict[str, Any], str], ...] = (
    (SCATTER, {"residual": torch.ones(2, 8), "norm": None}, "need a norm, but norm is None"),
    (REDUCE, {"quantize": "fp8", "norm": None}, "need a norm, but norm is None"),
    (SCATTER, {"norm": torch.nn.RMSNorm(8)}, "TypeError: norm must be an interlace.RMSNorm or"),
    (ROWS, {"norm": None}, "TypeError: norm must be an interlace.RMSNorm or"),
    (SCATTER, {"scatter_dim": 1}, "is the last dimension"),
    (PARTS, {"scatter_dim": -1}, "is the last dimension"),
    (SCATTER, {"residual": torch.ones(4, 8)}, "(2, 8), got (4, 8)"),
    (REDUCE, {"residual": torch.ones(2, 8)}, "(4, 8), got (2, 8)"),
    (ROWS, {"residual": torch.ones(4, 8).half()}, "TypeError: residual is torch.float16"),
    (ROWS, {"norm": interlace.RMSNorm(torch.ones(7))}, "(8,), got (7,)"),
    (ROWS, {"norm": interlace.RMSNorm(torch.ones(8).half())}, "TypeError: weight of norm is torch.float16"),
    (ROWS, {"norm": interlace.LayerNorm(None, torch.ones(7))}, "bias of norm"),
    (ROWS, {"norm": interlace.RMSNorm(None, -1.0)}, "eps of norm must be 0 or more"),
    (ROWS, {"norm": interlace.RMSNorm(None, None)}, "TypeError: eps of norm must be a number"),  # type: ignore[arg-type]
    (ROWS, {"quantize": "int8"}, "mxfp8, mxfp8_e5m2, mxfp4, nvfp4, got 'int8'"),
    (SCATTER, {"gather_normed": 1}, "TypeError: gather_normed must be a bool, got 1"),
    (PARTS, {"algorithm": "low_latency"}, "use all_reduce_norm"),
    (ROWS, {"bias": torch.ones(4)}, "bias must have shape (8,)"),
    # a block for every row
    (ROWS, {"input": both(torch.ones(65, 16)), "norm": both(interlace.RMSNorm()),
            "algorithm": both("low_latency")}, "each row in whole blocks of 1024, got 66560"),
    (ROWS, {"input": both(torch.ones(1, 8).double()), "norm": both(interlace.RMSNorm()),
            "algorithm": both("fused")}, "TypeError: supports float32, float16 and bfloat16"),
    *(
        (op, changes, text)
        for op in (SCATTER, REDUCE, PARTS, ROWS)
        for changes, text in (
            ({"norm": interlace.LayerNorm(torch.ones(8))}, "differs between ranks"),
            ({"norm": interlace.RMSNorm(torch.ones(8), 0.5)}, "eps of norm differs between ranks"),
            ({"norm": interlace.RMSNorm(None)}, "TypeError: weight of norm differs between ranks"),
            ({"quantize": "fp8"}, "quantize differs between ranks: None on rank 0, fp8 on rank 1"),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_named_on_all(op: str, changes: dict[str, Any], text: str) -> None:
    check_refused(getattr(interlace, op), arguments(op), changes, text)


@ranks(2, place="sim")
def test_with_an_activation_and_gradients_the_norm_is_checked_too() -> None:
    """In this case torch computes the norm after the op."""
    right = {**arguments(SCATTER), "activation": "relu"}
    right["input"].requires_grad_()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"residual": torch.ones(8)}, "(2, 8), got (8,)"),
        ({"scatter_dim": 1}, "is the last dimension"),
        ({"norm": interlace.RMSNorm(torch.ones(8), 0.5)}, "eps of norm differs"),
    ]
    for changes, text in refused:
        check_refused(interlace.matmul_reduce_scatter, right, changes, text)


@ranks(2, place="sim")
def test_fp8_has_no_gradient() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    _, total = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
    total.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 8] * 2
    (values, _), _ = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
    with pytest.raises(RuntimeError, match="with quantize='fp8' has no gradient"):
        values.float().sum().backward()


@ranks(2, place="sim")
def test_functional_forms_refuse_too() -> None:
    call: Any = functional.all_reduce_norm
    refused: list[tuple[dict[str, Any], str]] = [
        ({"norm": 1}, "norm must be"),
        ({"residual": 3}, "residual must be"),
        ({"norm": interlace.RMSNorm(None, True)}, "eps of norm must be a number, got True"),
        ({"residual": torch.ones(2, 8, device="meta")}, "residual is on meta"),
        ({"residual": torch.ones(2, 8).to_sparse()}, "residual must be a strided"),
    ]
    for changes, text in refused:
        with pytest.raises(TypeError, match=text):
            call(torch.ones(2, 8), **{"norm": RMS, **changes})
    matmul: Any = functional.matmul_all_reduce
    with pytest.raises(ValueError, match="need a norm"):
        matmul(torch.ones(3, 8), torch.ones(8, 8), residual=torch.ones(3, 8))
