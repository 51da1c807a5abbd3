"""The fusion pass on all-reduces, norms and fp8 by vLLM's ops, and as its ``forward_native``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from multi.functional.fusion_patterns import EPS, Tensor, fused, weight
from ranks import ranks
from stand_ins.models import vllm_ops
from support import SCALES_BY_ROW
from tiers import thorough

FP8 = torch.float8_e4m3fn


def product(x: Tensor) -> Tensor:
    return torch.ops.vllm.all_reduce(x @ weight(8, 6).to(x.dtype), "tp:0")


def room(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=FP8), x.new_empty(x.shape[0], 1, dtype=torch.float32)


def by_one_op(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """After the second norm nothing reads the residual."""
    h, residual = product(x), residual.clone()
    fp8, scale = room(h)
    torch.ops._C.rms_norm_dynamic_per_token_quant(fp8, h, gain, scale, EPS, None, residual)
    again = product(x.cos())
    torch.ops._C.fused_add_rms_norm(again, residual, gain, EPS)
    return (fp8, scale), again


def in_shards(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """vLLM's pass for sequence parallelism makes this graph."""
    size = dist.get_world_size()
    own = residual.chunk(size)[dist.get_rank()]
    h = torch.ops.vllm.reduce_scatter(x @ weight(8, 6), 0, size, "tp:0")
    h, own = torch.ops.vllm_ir.fused_add_rms_norm(h, own, gain, EPS)
    return torch.ops.vllm.all_gather(h, 0, world_size=size, group_name="tp:0") @ weight(6, 5), own


def in_shards_of_fp8(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """fp8 rows are gathered with their scales for a scaled matmul."""
    size, wide = dist.get_world_size(), gain.repeat(8)[:32].bfloat16()
    y = torch.ops.vllm.reduce_scatter(x.bfloat16() @ weight(8, 32).bfloat16(), 0, size, "tp:0")
    y = torch.ops.vllm_ir.rms_norm(y, wide, EPS)
    fp8, scale = room(y)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(fp8, y, scale, None)
    fp8, scale = (torch.ops.vllm.all_gather(each, 0, size, "tp:0") for each in (fp8, scale))
    w, ones = weight(16, 32).to(FP8).t(), torch.ones(1, 16)
    return (torch._scaled_mm(fp8, w, scale, ones, out_dtype=torch.bfloat16),)


def normed_as_native(h: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """``RMSNorm.forward_native``, which adds in fp32."""
    wide = h.to(torch.float32) + residual
    residual = wide.to(h.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS)
    return wide.to(h.dtype) * gain, residual


def native_in_bfloat16(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    return normed_as_native(product(x.bfloat16()), residual.bfloat16(), gain.bfloat16())


def as_native(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """This is ``normed_as_native`` and ``QuantFP8.forward_native``, with a scale for every token."""
    y, residual = normed_as_native(product(x), residual, gain)
    largest, _ = y.abs().max(dim=-1)
    scale = largest.unsqueeze(-1).to(torch.float32) / 448.0
    scale = scale.clamp(min=vllm_ops.SMALLEST_SCALE)
    fp8 = (y.to(torch.float32) * scale.reciprocal()).clamp(-448.0, 448.0).to(FP8)
    return (fp8, scale), residual


def static(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    h, scale = product(x), residual.abs().max()
    result, _ = room(h)
    normed = torch.empty_like(h)
    torch.ops._C.rms_norm(normed, h, gain, EPS)
    torch.ops._C.static_scaled_fp8_quant(result, normed, scale)
    return (result, scale), (h / scale).clamp(-448, 448).to(FP8).float()


def static_at_once(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """One op, and ``QuantFP8.forward_native`` with a scale so small that most numbers saturate."""
    h, residual, scale = product(x), residual.clone(), residual.abs().amax().view(1) / 3
    result, _ = room(h)
    torch.ops._C.fused_add_rms_norm_static_fp8_quant(result, h, residual, gain, scale, EPS)
    alone, _ = room(h)
    torch.ops._C.rms_norm_static_fp8_quant(alone, product(x.cos()), gain, scale, EPS)
    y = torch.nn.functional.rms_norm(product(x.sin()), (6,), None, EPS)
    small = scale / 1000
    quotient = (y.to(torch.float32) * small.reciprocal()).to(torch.bfloat16)  # rounded on the way
    native = quotient.clamp(-448.0, 448.0).to(FP8)
    return (result, scale), (alone, scale), (native, small), residual


def other_scales(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """One scale for all rows, and one for a sixteenth of the range of fp8."""
    made = []
    for each in (x, x.cos()):
        y = torch.nn.functional.rms_norm(product(each), (6,), gain, EPS)
        scale = y.abs().amax(-1, keepdim=True) / 28.0 if made else y.abs().amax() / 448.0
        made.append(((y / scale).clamp(-448.0, 448.0).to(FP8), scale))
    return tuple(made)


def read_by_others(x: Tensor, residual: Tensor, gain: Tensor) -> Any:
    """A router also reads the normed rows."""
    (fp8, scale), residual = as_native(x, residual, gain)
    y, _ = torch.ops.vllm_ir.fused_add_rms_norm(product(x), residual, gain, EPS)
    other, at = room(y)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(other, y, at, None)
    return (fp8, scale), (other, at), y @ weight(6, 2)


def define_vllm() -> None:
    """Define vLLM's ops, and bind their name of the process group."""
    vllm_ops.define()
    interlace.GroupSpec("tp:0", dist.get_world_size()).bind(None)


TAKEN, NORM = "its rows leave as fp8", "matmul_all_reduce_norm"
STATIC = f"{TAKEN} by a scale that is an input"
LEFT = (
    "left out a quantisation: its scale is not from the largest number of a row, and does not exist "
    "before the rows"
)
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[str, tuple[str, ...]]]]] = {
    "one op": (by_one_op, [(NORM, (TAKEN,)), (NORM, ())]),
    "shards": (in_shards, [("matmul_reduce_scatter_norm", ()), ("all_gather_matmul", ())]),
    "shards of fp8": (
        in_shards_of_fp8,
        [
            ("matmul_reduce_scatter_norm", (TAKEN,)),
            ("all_gather_matmul", ()),
            ("all_gather_matmul", ("scales, which travel with the rows",)),
        ],
    ),
    "native": (as_native, [(NORM, (TAKEN,))]),
    "native in bf16": (native_in_bfloat16, [(NORM, ())]),
    "static": (static, [(NORM, (STATIC,))]),
    "static at once": (static_at_once, [(NORM, (STATIC,))] * 3),
    "other scales": (other_scales, [(NORM, (LEFT,)), (NORM, (LEFT,))]),
    "read by others": (
        read_by_others,
        [
            (NORM, (TAKEN,)),
            (NORM, ("left out a quantisation: the normed rows are also read elsewhere",)),
        ],
    ),
}


if not SCALES_BY_ROW:
    del CALLS["shards of fp8"]


@thorough
@pytest.mark.parametrize("version_2", [False, True])
@ranks(backend="interlace")
def test_norms_and_fp8_of_vllm(version_2: bool) -> None:
    """``version_2`` is torch's way to make ops functional that change their arguments."""
    define_vllm()
    x = weight(4, 8, seed=dist.get_rank())
    residual, gain = weight(4, 6, seed=1), weight(6, seed=2)
    for name, (function, expected) in CALLS.items():
        compiled, reports = fused(function)
        with torch._inductor.config.patch(enable_auto_functionalized_v2=version_2):
            results = function(x, residual, gain), compiled(x, residual, gain)
        assert max(error(*pair) for pair in zip(*results, strict=True)) <= 1, name
        (report,) = reports
        assert [(c.op, c.notes) for c in report.candidates] == expected, name
        # only these of its ops have no op of ours
        left = report.after.count("_C.") + report.after.count("vllm")
        assert left == {"read by others": 1}.get(name, 0), name


def normed_by(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor]:
    wide = product(x) + residual
    return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * gain,)


@thorough
@ranks(backend="interlace")
def test_an_eps_that_is_an_input_is_known() -> None:
    """With ``dynamic=True`` floats of the code are inputs; another value compiles the graph again."""
    define_vllm()
    for function, more, graphs in (
        (as_native, [()], 1),
        (normed_by, [(EPS,), (3.0,), (3.0,)], 2),
    ):
        compiled, reports = fused(function, dynamic=True)
        for number, given in enumerate(more):
            x = weight(4 + number, 8, seed=dist.get_rank())
            tensors = x, weight(4 + number, 6, seed=1), weight(6, seed=2)
            results = function(*tensors, *given), compiled(*tensors, *given)
            assert max(error(*pair) for pair in zip(*results, strict=True)) <= 1
        assert [[each.op for each in report.candidates] for report in reports] == [[NORM]] * graphs


def error(expected: Any, actual: Any) -> float:
    """Return the largest error as a multiple of a step of fp8, or of 1e-5."""
    if isinstance(expected, Tensor):
        step = expected.abs().max() / 8 if expected.dtype == torch.bfloat16 else 1e-5
        return float((expected - actual).abs().max() / step)
    (expected, expected_scale), (actual, scale) = expected, actual
    assert actual.dtype == FP8
    assert torch.allclose(scale, expected_scale, rtol=1e-5)
    wanted, got = expected.float() * expected_scale, actual.float() * scale
    return float(((wanted - got).abs() / (wanted.abs() / 8 + scale * 2**-9)).max())
