"""Ops of vLLM and torchao for block-scaled operands, for machines without them, computed by torch.

- vLLM, ``csrc/libtorch_stable/torch_bindings.cpp``: ``per_token_group_fp8_quant``, ``scaled_fp4_quant``,
  ``cutlass_scaled_mm``, ``cutlass_scaled_fp4_mm``.
- vLLM, ``model_executor/layers/quantization/utils/fp8_utils.py``: ``w8a8_triton_block_scaled_mm_func``,
  ``padded_cutlass``, ``fp8_gemm_nt_op``. ``utils/flashinfer.py``: ``flashinfer_mm_fp4``.
- torchao, ``prototype/blockwise_fp8_training/kernels.py``: ``blockwise_scaled_mm``.
  ``prototype/mx_formats/utils.py``: :func:`to_blocked`.
"""

from typing import Any

import torch

from interlace.ops.matmul.formats import Scaled, quantize, swizzled, unswizzle
from stand_ins.models.vllm_ops import define_ops

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
SCHEMAS = {
    "_C::per_token_group_fp8_quant": (
        "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, "
        "float fp8_max, bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
    ),
    "_C::scaled_fp4_quant": (
        "(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout) -> (Tensor, Tensor)"
    ),
    "_C::cutlass_scaled_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
    ),
    "_C::cutlass_scaled_fp4_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()"
    ),
    "vllm::w8a8_triton_block_scaled_mm_func": (
        "(Tensor qx, Tensor weight, Tensor x_scale, Tensor weight_scale, SymInt[] block_size, "
        "ScalarType output_dtype) -> Tensor"
    ),
    "vllm::padded_cutlass": (
        "(Tensor qx, Tensor weight, Tensor x_scale, Tensor weight_scale, SymInt[] block_size, "
        "ScalarType output_dtype) -> Tensor"
    ),
    "vllm::fp8_gemm_nt_op": (
        "(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, Tensor! output, "
        "bool use_deep_gemm_e8m0) -> ()"
    ),
    "vllm::flashinfer_mm_fp4": (
        "(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, Tensor g_scale, ScalarType dtype, "
        "bool use_8x4_sf_layout, str backend) -> Tensor"
    ),
    "torchao::blockwise_scaled_mm": (
        "(Tensor a, Tensor b, Tensor a_s, SymInt scale_recipe_a, Tensor b_s, SymInt scale_recipe_b, "
        "ScalarType out_dtype) -> Tensor"
    ),
}


def to_blocked(scales: Tensor) -> Tensor:
    """Change plain scales into the layout SWIZZLE_32_4_4, with torchao's ops."""
    rows, columns = scales.shape
    bands, groups = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros((bands * 128, groups * 4), dtype=scales.dtype)
    padded[:rows, :columns] = scales
    blocks = padded.view(bands, 128, groups, 4).permute(0, 2, 1, 3)
    return blocks.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1, 32, 16).flatten()


def per_token_group_fp8_quant(input: Tensor, output_q: Tensor, output_s: Tensor, *_: Any) -> None:
    made = quantize(input, "fp8_block128")
    output_q.view(torch.uint8).copy_(made.values.view(torch.uint8))
    output_s.copy_(made.scales)


def scaled_fp4_quant(input: Tensor, input_scale: Tensor, swizzle: bool) -> tuple[Tensor, Tensor]:
    """Return scales as int32, each of which is four scales."""
    made = quantize(input, "nvfp4", whole=1 / input_scale)
    scales = swizzled(made.scales).view(-1, made.scales.shape[1]) if swizzle else made.scales
    return made.values.view(torch.uint8), scales.view(torch.int32)


def multiplied(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    left, right = (Scaled(*pair, "fp8_block128") for pair in ((a, a_scales), (b, b_scales)))
    return left.dequantize() @ right.dequantize().T


def multiplied_blocks(a: Any, b: Any, a_scales: Any, b_scales: Any, _: Any, dtype: Any) -> Tensor:
    return multiplied(a, b, a_scales, b_scales).to(dtype)


def deep_gemm(a: Any, a_scales: Any, b: Any, b_scales: Any, output: Tensor, _: bool) -> None:
    output.copy_(multiplied(a, b, a_scales, b_scales))


def cutlass(out: Tensor, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
    if a_scales.shape[1] > 1:
        out.copy_(multiplied(a, b.T, a_scales, b_scales.T))
    else:
        out.copy_((a.float() * a_scales) @ (b.float() * b_scales))


def multiplied_fp4(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> Tensor:
    """Multiply ``(m, k / 2)`` and ``(n, k / 2)`` with swizzled scales."""
    sides = []
    for values, scales in ((a, a_scales), (b, b_scales)):
        rows, blocks = values.shape[0], values.shape[1] // 8
        plain = unswizzle(scales.reshape(-1).view(E4M3), rows, blocks)
        sides.append(Scaled(values, plain, "nvfp4").dequantize())
    return sides[0] @ sides[1].T


def cutlass_fp4(out: Tensor, a: Any, b: Any, a_scales: Any, b_scales: Any, alpha: Tensor) -> None:
    out.copy_(multiplied_fp4(a, b, a_scales, b_scales) * alpha)


def flashinfer_fp4(
    a: Any, b: Any, a_scales: Any, b_scales: Any, alpha: Any, dtype: Any, *_: Any
) -> Tensor:
    return (multiplied_fp4(a, b.T.contiguous(), a_scales, b_scales.T) * alpha).to(dtype)


def torchao_blocks(a: Any, b: Any, a_s: Any, _: int, b_s: Any, recipe: int, dtype: Any) -> Tensor:
    assert recipe == 5
    return multiplied(a, b.T, a_s, b_s.T).to(dtype)


KERNELS = (
    *(per_token_group_fp8_quant, scaled_fp4_quant, cutlass, cutlass_fp4, multiplied_blocks),
    *(multiplied_blocks, deep_gemm, flashinfer_fp4, torchao_blocks),
)


def define() -> None:
    """Define the ops and their fake forms, once in a process."""
    if not define_ops(SCHEMAS, KERNELS):
        return
    register: Any = torch.library.register_fake
    for name in ("vllm::w8a8_triton_block_scaled_mm_func", "vllm::padded_cutlass"):
        register(name, lambda a, b, *about: a.new_empty(len(a), len(b), dtype=about[-1]))
    register(
        "vllm::flashinfer_mm_fp4",
        lambda a, b, s, t, g, dtype, *_: a.new_empty(len(a), b.shape[1], dtype=dtype),
    )
    register(
        "torchao::blockwise_scaled_mm",
        lambda a, b, *about: a.new_empty(len(a), b.shape[1], dtype=about[-1]),
    )
    register("_C::scaled_fp4_quant", _like_fp4)


def _like_fp4(input: Tensor, input_scale: Tensor, swizzle: bool) -> tuple[Tensor, Tensor]:
    rows, columns = input.shape
    blocks = columns // 16
    if swizzle:
        rows, blocks = -(-rows // 128) * 128, -(-blocks // 4) * 4
    values = input.new_empty(input.shape[0], columns // 2, dtype=torch.uint8)
    return values, input.new_empty(rows, blocks // 4, dtype=torch.int32)
