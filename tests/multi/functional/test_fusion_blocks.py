"""The fusion pass on block-scaled operands, in graphs as torchao's and vLLM's: the results of the ops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import interlace
import interlace.compile
from interlace.ops.matmul.formats import Scaled, quantize, swizzled
from multi.functional.fusion_patterns import Tensor, fused, gathered, scattered, total
from ranks import ranks
from stand_ins.models import block_ops, vllm_ops
from tiers import thorough

E8M0, E4M3, FP4 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
BYTES = torch.uint8
ROWS, INNER, COLUMNS = 12, 256, 32
EPS = 0.1
GATHER, SCATTER, REDUCE = (
    f"block_scaled_{name}"
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
)


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def shard(name: Any, rows: int = ROWS, whole: Tensor | None = None) -> Scaled:
    return quantize(numbers(rows, INNER, dist.get_rank()), name, whole=whole)


def weight(name: Any, seed: int = 9, **how: Any) -> Scaled:
    return quantize(numbers(COLUMNS, INNER, seed), name, **how)


def gathered_bytes(x: Tensor) -> Tensor:
    return gathered(x.view(BYTES)).view(x.dtype)


def of_vllm(x: Tensor) -> Tensor:
    made: Tensor = torch.ops.vllm.all_gather(x, 0, dist.get_world_size(), "tp:0")
    return made


Made = tuple[Callable[..., Any], tuple[Any, ...], Any]
"""A function, its arguments, and what it has to return."""


def plain(x: Scaled, w: Scaled, **how: Any) -> Any:
    return interlace.all_gather_matmul(x, w.t(), **how)  # type: ignore[arg-type]


def blocked(scales: Tensor) -> Tensor:
    """``MXTensor`` swizzles the bytes of scales."""
    return block_ops.to_blocked(scales).view(E8M0)


def mx_product(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor, **how: Any) -> Tensor:
    return torch._scaled_mm(q, w.t(), s, w_scales, out_dtype=torch.bfloat16, **how)


def group_product(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
    op = torch.ops.vllm.w8a8_triton_block_scaled_mm_func
    made: Tensor = op(q, w, s, w_scales, [128, 128], torch.bfloat16)
    return made


def mxfp8_of_torchao(name: str = "mxfp8", of_weight: str = "mxfp8") -> Made:
    """``MXTensor``: scales are gathered plain, and swizzled for the matmul."""

    def layer(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        return mx_product(gathered_bytes(q), blocked(gathered(s.view(BYTES))), w, w_scales)

    x, w = shard(name), weight(of_weight)
    return layer, (x.values, x.scales, w.values, swizzled(w.scales)), plain(x, w)


def two_readers() -> Made:
    """The graph also has a bias, and returns the gathered values."""

    def layer(
        q: Tensor, s: Tensor, w: Tensor, t: Tensor, v: Tensor, u: Tensor, bias: Tensor
    ) -> Any:
        whole, scales = gathered_bytes(q), blocked(gathered(s.view(BYTES)))
        one, other = mx_product(whole, scales, w, t), mx_product(whole, scales, v, u, bias=bias)
        return one, other, whole.view(BYTES)

    x, w, v = shard("mxfp8"), weight("mxfp8"), weight("mxfp8", 8)
    bias = torch.arange(COLUMNS).bfloat16()
    weights: Any = [w.t(), v.t()]
    made: Any = interlace.all_gather_matmul(x, weights, bias=[None, bias], return_gathered=True)
    given = (x.values, x.scales, w.values, swizzled(w.scales), v.values, swizzled(v.scales), bias)
    return layer, given, (*made[1], made[0].values.view(BYTES))


def mxfp4_of_torchao() -> Made:
    def layer(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        scales = blocked(gathered(s.view(BYTES)))
        recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        pairs: Any = scales, recipe, w_scales, recipe, swizzle, swizzle
        return F.scaled_mm(gathered(q).view(FP4), w.view(FP4).t(), *pairs)

    # with a larger k torch takes shapes of scales for half of k
    x = quantize(numbers(ROWS, 128, dist.get_rank()), "mxfp4")
    w = quantize(numbers(COLUMNS, 128, 9), "mxfp4")
    given = x.values.view(BYTES), x.scales, w.values.view(BYTES), swizzled(w.scales)
    return layer, given, plain(x, w)


def nvfp4_of_torchao() -> Made:
    """``nvfp4_col_parallel_mm``: swizzled scales are gathered, in tiles."""

    def layer(
        q: Tensor, s: Tensor, one: Tensor, w: Tensor, w_scales: Tensor, other: Tensor
    ) -> Tensor:
        scales = gathered(s.view(BYTES)).view(E4M3).flatten()
        recipe: Any = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        swizzle: Any = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        pairs: Any = [scales, one], recipe, [w_scales, other], recipe, swizzle, swizzle
        return F.scaled_mm(gathered(q).view(FP4), w.view(FP4).t(), *pairs)

    one, other = torch.tensor(0.5), torch.tensor(2.0**-6)
    x, w = shard("nvfp4", 128, one), weight("nvfp4", whole=other)
    tiles = swizzled(x.scales).view(1, INNER // 64, 32, 16)
    given = x.values.view(BYTES), tiles, one, w.values.view(BYTES), swizzled(w.scales), other
    return layer, given, plain(x, w)


def blocks_of_torchao() -> Made:
    """Scales are in columns, as cuBLAS needs them; the scales of the weight are padded."""

    def layer(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        scales = gathered(s).t().contiguous().t()
        recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return F.scaled_mm(gathered_bytes(q), w.t(), scales, recipes[0], w_scales, recipes[1])

    x = shard("fp8_block128")
    w = quantize(numbers(256, INNER, 9), "fp8_block128", weight=True)
    padded = torch.ones(2, 4)
    padded[:, :2] = w.scales
    return layer, (x.values, x.scales, w.values, padded.t()), plain(x, w)


def blocks_of_dtensor() -> Made:
    def layer(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        op = torch.ops.torchao.blockwise_scaled_mm
        return op(gathered_bytes(q), w.t(), gathered(s), 4, w_scales.t(), 5, torch.bfloat16)  # type: ignore[no-any-return]

    x, w = shard("fp8_block128"), weight("fp8_block128", weight=True)
    return layer, (x.values, x.scales, w.values, w.scales), plain(x, w)


def quantized_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    q, s = torch.empty_like(x, dtype=E4M3), x.new_empty(len(x), x.shape[1] // 128)
    torch.ops._C.per_token_group_fp8_quant(x, q, s, 128, 1e-10, -448.0, 448.0, False, False, False)
    return q, s


def groups_of_vllm(name: str) -> Made:
    def layer(x: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        q, s = map(of_vllm, quantized_groups(x))
        if name in ("cutlass_scaled_mm", "fp8_gemm_nt_op"):
            out = x.new_empty(len(q), len(w), dtype=torch.bfloat16)
            if name == "fp8_gemm_nt_op":
                torch.ops.vllm.fp8_gemm_nt_op(q, s, w, w_scales, out, False)
            else:
                torch.ops._C.cutlass_scaled_mm(out, q, w.t(), s, w_scales.t(), None)
            return out
        op = getattr(torch.ops.vllm, name)
        return op(q, w, s, w_scales, [128, 128], torch.bfloat16)  # type: ignore[no-any-return]

    x, w = numbers(ROWS, INNER, dist.get_rank()), weight("fp8_block128", weight=True)
    return layer, (x, w.values, w.scales), plain(quantize(x, "fp8_block128"), w)


def nvfp4_of_vllm(flashinfer: bool) -> Made:
    """``flashinfer``: its op, with a weight and scales that are transposed views."""

    def layer(x: Tensor, of_input: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor) -> Tensor:
        q, s = torch.ops._C.scaled_fp4_quant(x, of_input, True)
        q, s = of_vllm(q), of_vllm(s).view(E4M3)
        if flashinfer:
            scales = s.view(BYTES), w_scales.view(BYTES).t()
            about = alpha, torch.bfloat16, False, "cutlass"
            return torch.ops.vllm.flashinfer_mm_fp4(q, w.t(), *scales, *about)  # type: ignore[no-any-return]
        out = x.new_empty(len(q), len(w), dtype=torch.bfloat16)
        torch.ops._C.cutlass_scaled_fp4_mm(out, q, w, s, w_scales, alpha)
        return out

    x, rank = numbers(128, INNER, dist.get_rank()), dist.get_rank()
    of_input = torch.tensor(64.0)
    # weights of ranks, and so the alphas that multiply all rows, differ
    w = quantize(numbers(128, INNER, 9), "nvfp4", whole=torch.tensor(2.0**-7 * (1 + rank)))
    assert w.whole is not None
    scales = swizzled(w.scales).view(128, -1)
    given = x, of_input, w.values.view(BYTES), scales, w.whole / of_input
    return layer, given, plain(quantize(x, "nvfp4", whole=1 / of_input), w)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "scatter": (scattered, interlace.matmul_reduce_scatter),
    "all": (total, interlace.matmul_all_reduce),
}


def reduced_groups(reduction: str) -> Made:
    reduce, form = FORMS[reduction]

    def layer(x: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
        return reduce(group_product(*quantized_groups(x), w, w_scales)) * 1

    x, w = numbers(ROWS, INNER, dist.get_rank()), weight("fp8_block128", weight=True)
    return layer, (x, w.values, w.scales), form(quantize(x, "fp8_block128"), w.t())


def reduced_norm(reduction: str, quantisation: str) -> Made:
    """A norm behind the reduction; its rows may leave as fp8, by a scale of each row or one that exists."""
    reduce, form = FORMS[reduction]

    def layer(product: tuple[Tensor, ...], residual: Tensor, gain: Tensor, t: Tensor) -> Any:
        h = reduce(group_product(*product)) + residual
        y = F.rms_norm(h, (COLUMNS,), gain, EPS)
        if not quantisation:
            return y, h
        fp8, scale = torch.empty_like(y, dtype=E4M3), y.new_empty(len(y), 1, dtype=torch.float32)
        if quantisation == "fp8_static":
            torch.ops._C.static_scaled_fp8_quant(fp8, y, t)
            return fp8, h
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(fp8, y, scale, None)
        return fp8, scale, h

    rows = ROWS // (dist.get_world_size() if reduction == "scatter" else 1)
    x, w = shard("fp8_block128"), weight("fp8_block128", weight=True)
    residual, gain = numbers(rows, COLUMNS, 5).bfloat16(), numbers(1, COLUMNS, 6)[0].bfloat16()
    t = torch.tensor(0.25)
    vector = gain.float() / t if quantisation == "fp8_static" else gain
    about: Any = {"norm": interlace.RMSNorm(vector, eps=EPS), "quantize": quantisation or None}
    normed, sums = form(x, w.t(), residual=residual, **about)
    parts = normed if isinstance(normed, tuple) else (normed,)
    return layer, ((x.values, x.scales, w.values, w.scales), residual, gain, t), (*parts, sums)


def biased_and_normed() -> Made:
    """Each rank adds a bias to its product, and all add one to the sum."""

    def layer(
        q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor, one: Tensor, other: Tensor
    ) -> Tensor:
        h = total(mx_product(q, blocked(s.view(BYTES)), w, w_scales, bias=one)) + other
        return F.rms_norm(h, (COLUMNS,), None, EPS)

    x, w, one = shard("mxfp8"), weight("mxfp8"), torch.arange(COLUMNS).bfloat16()
    bias = one * dist.get_world_size() + 1
    norm = interlace.RMSNorm(eps=EPS)
    right: Any = interlace.matmul_all_reduce(x, w.t(), bias=bias, norm=norm)
    arguments = (x.values, x.scales, w.values, swizzled(w.scales), one, torch.ones_like(one))
    return layer, arguments, right[0]


def nvfp4_scattered() -> Made:
    """``NVFP4Tensor``: the scales of both whole tensors multiply the product, behind the matmul."""

    def layer(
        q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor, one: Tensor, other: Tensor
    ) -> Tensor:
        scales = block_ops.to_blocked(s.view(BYTES)).view(E4M3)
        factors = q.view(FP4), w.view(FP4).t(), scales, w_scales
        product = torch._scaled_mm(*factors, out_dtype=torch.bfloat16)
        return scattered(product * (one * other).to(torch.bfloat16))

    one, other = torch.tensor(0.5), torch.tensor(2.0**-6)
    x, w = shard("nvfp4", whole=one), weight("nvfp4", whole=other)
    right = interlace.matmul_reduce_scatter(x, w.t())
    given = x.values.view(BYTES), x.scales, w.values.view(BYTES), swizzled(w.scales), one, other
    return layer, given, right


def rows_of_cutlass() -> Made:
    """Each row has one scale, so there are no blocks."""

    def layer(q: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
        out = q.new_empty(len(q) * dist.get_world_size(), len(w), dtype=torch.bfloat16)
        torch.ops._C.cutlass_scaled_mm(out, of_vllm(q), w.t(), of_vllm(s), t, None)
        return out

    q, s = quantize(numbers(ROWS, 128, dist.get_rank()), "fp8_block128").values, torch.ones(ROWS, 1)
    w, t = quantize(numbers(COLUMNS, 128, 9), "fp8_block128").values, torch.ones(1, COLUMNS)
    right: Any = interlace.functional.all_gather_scaled_matmul(q, w.t(), s, t)
    return layer, (q, s, w, t), interlace.functional.wait(right)


OPERANDS = "its operands are "
ALONG = (GATHER, ("scales, which travel with the rows",))


def both(name: str, op: str = GATHER) -> list[tuple[str, tuple[str, ...]]]:
    return [(op, (OPERANDS + name,)), ALONG] if op == GATHER else [(op, (OPERANDS + name,))]


ROWWISE = "all_gather_matmul"
QUANTISATIONS = {
    "": (),
    "fp8": ("its rows leave as fp8",),
    "fp8_static": ("its rows leave as fp8 by a scale that is an input",),
}
GROUP_PRODUCTS = (
    "w8a8_triton_block_scaled_mm_func", "padded_cutlass", "fp8_gemm_nt_op", "cutlass_scaled_mm",
)  # fmt: skip
CASES: dict[str, tuple[Callable[[], Made], list[tuple[str, tuple[str, ...]]]]] = {
    "mxfp8 of torchao": (mxfp8_of_torchao, both("mxfp8")),
    "e5m2 beside e4m3": (
        partial(mxfp8_of_torchao, "mxfp8_e5m2", "mxfp8"), both("mxfp8_e5m2 x mxfp8"),
    ),
    "two readers": (two_readers, both("mxfp8")),
    "blocks of DTensor": (blocks_of_dtensor, both("fp8_block128")),
    **{name: (partial(groups_of_vllm, name), both("fp8_block128")) for name in GROUP_PRODUCTS},
    "nvfp4 of vLLM": (partial(nvfp4_of_vllm, False), both("nvfp4")),
    "nvfp4 of FlashInfer": (partial(nvfp4_of_vllm, True), both("nvfp4")),
    "groups, scattered": (partial(reduced_groups, "scatter"), both("fp8_block128", SCATTER)),
    "groups, all-reduced": (partial(reduced_groups, "all"), both("fp8_block128", REDUCE)),
    **{
        f"{reduction} and norm {quantisation}": (
            partial(reduced_norm, reduction, quantisation),
            [(f"{op}_norm", (*notes, OPERANDS + "fp8_block128"))],
        )
        for reduction, op in (("scatter", SCATTER), ("all", REDUCE))
        for quantisation, notes in QUANTISATIONS.items()
    },
    "biases and norm": (biased_and_normed, both("mxfp8", f"{REDUCE}_norm")),
    "nvfp4, scattered": (nvfp4_scattered, both("nvfp4", SCATTER)),
    "rows of cutlass": (
        rows_of_cutlass, [(ROWWISE, ()), (ROWWISE, ("scales, which travel with the rows",))],
    ),
}  # fmt: skip
if hasattr(F, "scaled_mm"):
    CASES |= {
        "mxfp4 of torchao": (mxfp4_of_torchao, both("mxfp4")),
        "nvfp4 of torchao": (nvfp4_of_torchao, both("nvfp4")),
        "blocks of torchao": (blocks_of_torchao, both("fp8_block128")),
    }


def define_stand_ins() -> None:
    vllm_ops.define()
    block_ops.define()
    interlace.GroupSpec("tp:0", dist.get_world_size()).bind(None)


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


# Not MX formats: on a CPU Inductor has no code for the dtype of their scales.
BY_INDUCTOR = "cutlass_scaled_mm", "groups, scattered", "nvfp4 of vLLM"


@thorough
@pytest.mark.parametrize(
    ("codegen", "names"),
    [("aot_eager", tuple(CASES)), ("inductor", BY_INDUCTOR)],
    ids=["all", "Inductor"],
)
@ranks(backend="interlace")
def test_graphs_of_torchao_and_vllm(codegen: str, names: tuple[str, ...]) -> None:
    define_stand_ins()
    for name in names:
        make, expected = CASES[name]
        layer, given, right = make()
        compiled, reports = fused(layer, codegen)
        found = compiled(*given)
        (report,) = reports
        made = sorted((c.op, c.notes) for c in report.candidates)
        assert made == sorted(expected), (name, str(report))
        assert all(c.fused for c in report.candidates), (name, str(report))
        for one, other in zip(listed(found), listed(right), strict=True):
            assert torch.equal(one, other), name


# -- graphs that stay, and the reasons -----------------------------------------------------------------


def scales_of_all(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
    """Scales of all ranks come without a gather."""
    return group_product(of_vllm(q), torch.cat([s] * dist.get_world_size()), w, w_scales)


def in_another_order(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
    """These scales belong to other rows, by ops that only move numbers."""
    first, *others = of_vllm(s).chunk(dist.get_world_size())
    return group_product(of_vllm(q), torch.cat([*others, first]), w, w_scales)


def scales_for_more(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Another op also reads the gathered scales, so their gather stays beside the fused one."""
    whole = of_vllm(s)
    return group_product(of_vllm(q), whole, w, w_scales), whole * 2


def other_numbers(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
    """The matmul takes floats that were gathered as ints."""
    return of_vllm(s.view(torch.int32)).view(torch.float32) @ w_scales.t()


NOT_GATHERED = "its scales are not gathered as the rows are"
LEFT: dict[Callable[..., Any], tuple[str, int]] = {
    scales_of_all: (NOT_GATHERED, 0),
    in_another_order: (NOT_GATHERED, 0),
    other_numbers: ("the gathered bytes are read as another dtype", 0),
    scales_for_more: ("the gathered tensor has the scales of a matmul", 1),
}


@thorough
@ranks(backend="interlace")
def test_what_is_left_is_said() -> None:
    define_stand_ins()
    x, w = shard("fp8_block128"), weight("fp8_block128", weight=True)
    given = x.values, x.scales, w.values, w.scales
    for layer, (reason, count) in LEFT.items():
        compiled, reports = fused(layer)
        found = compiled(*given)
        (report,) = reports
        assert len(report.fused) == count, str(report)
        assert reason in {c.reason for c in report.candidates}, str(report)
        for one, other in zip(listed(found), listed(layer(*given)), strict=True):
            torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-4)


def tiles_of_8x4(q: Tensor, s: Tensor, w: Tensor, w_scales: Tensor, alpha: Tensor) -> Tensor:
    group: Any = {"group": interlace.GroupSpec("tp", 2)}
    q, s = (interlace.functional.all_gather(each, **group) for each in (q, s))
    about = alpha, torch.bfloat16, True, "trtllm"
    return torch.ops.vllm.flashinfer_mm_fp4(q, w.t(), s, w_scales.t(), *about)  # type: ignore[no-any-return]


def test_explain_needs_no_ranks() -> None:
    block_ops.define()
    x, w = (quantize(numbers(128, INNER, seed), "nvfp4") for seed in (1, 2))
    scales = (swizzled(each.scales).view(128, -1).view(BYTES) for each in (x, w))
    given = x.values.view(BYTES), next(scales), w.values.view(BYTES), next(scales), torch.ones(())
    found = interlace.compile.explain(tiles_of_8x4, *given, policy="always")
    assert "its scales are in tiles of 8 x 4" in {each.reason for each in found.candidates}
