"""The operands of a matmul and what the fused kernels are told about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from interlace.runtime.communicator import Communicator
from interlace.runtime.configuration import Configuration

DESCRIPTOR_ALIGNMENT = 16


@dataclass
class Linear:
    """One weight of an op: ``output = input @ weight + bias``. ``bias_along``: "n" or "m"."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    bias_along: str = "n"


def multiply(
    output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """``output = input @ weight (+ bias)`` by torch, rounding once more where dtypes differ."""
    if output.dtype != input.dtype:
        wide = torch.float64 if output.dtype == torch.float64 else torch.float32
        product = input.to(wide) @ weight.to(wide)
        output.copy_(product if bias is None else product + bias.to(wide))
    elif bias is None:
        torch.mm(input, weight, out=output)
    else:
        torch.addmm(bias, input, weight, out=output)


def is_aligned(tensor: torch.Tensor, row_stride: int) -> bool:
    return (
        tensor.data_ptr() % DESCRIPTOR_ALIGNMENT == 0
        and row_stride * tensor.element_size() % DESCRIPTOR_ALIGNMENT == 0
    )


def descriptor_path(configuration: Configuration, input: torch.Tensor, weight: torch.Tensor) -> str:
    """Which path of ``kernels/matmul.py`` these operands allow: "", "kn" or "nk"."""
    inner = input.shape[1]
    usable = configuration.descriptors and inner > 0 and is_aligned(input, inner)
    if not usable or input.stride(0) < inner or not is_aligned(input, input.stride(0)):
        return ""
    across, along = weight.stride(0), weight.stride(1)
    # rows that overlap, as of an expanded tensor, are no matter for a pointer but for a descriptor
    if along == 1 and across >= weight.shape[1] > 1 and is_aligned(weight, across):
        return "kn"
    if across == 1 and along >= inner > 1 and is_aligned(weight, along):
        return "nk"
    return ""


def input_precision(dtype: torch.dtype) -> str:
    """How fp32 products are taken: as ``torch.set_float32_matmul_precision`` says."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def kernel_operands(
    communicator: Communicator,
    configuration: Configuration,
    input: torch.Tensor,
    linear: Linear,
) -> dict[str, Any]:
    """The arguments of the matmul loop that all fused kernels share."""
    weight = linear.weight
    descriptors = descriptor_path(configuration, input, weight)
    return {
        "input_ptr": input,
        "input_stride": input.stride(0),
        "weight_ptr": weight,
        "weight_stride_k": weight.stride(0),
        "weight_stride_n": weight.stride(1),
        "bias_ptr": linear.output if linear.bias is None else linear.bias,
        "output_ptr": linear.output,
        "N": weight.shape[1],
        "K": weight.shape[0],
        "BLOCK_M": configuration.block_m,
        "BLOCK_N": configuration.block_n,
        "BLOCK_K": configuration.inner_block(descriptors),
        "GROUP_M": configuration.group_m,
        "DESCRIPTORS": descriptors,
        "BIAS": "" if linear.bias is None else linear.bias_along,
        "INPUT_PRECISION": input_precision(input.dtype),
    }


def launch_options(configuration: Configuration) -> dict[str, int]:
    return {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
