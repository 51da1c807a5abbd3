"""The fused ops on scaled operands by one Triton kernel each: fp8 is multiplied where it arrives.

Everything is checked and agreed on when these are called (``scaled.py``). Mixed scales, one number
beside one per row or column, become one per row and per column.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from interlace.kernels.tiling import split_rows
from interlace.ops.matmul import launch_gather as gather_matmul
from interlace.ops.matmul import launch_reduce as matmul_reduce
from interlace.ops.matmul.operands import DESCRIPTOR_ALIGNMENT, Linear, factors, rows_of
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning import tuning

OUTPUTS = (torch.float32, torch.float16, torch.bfloat16)


class ScaledOperands(NamedTuple):
    """The operands of one product: fp8 matrices, their scales, and a bias."""

    input: torch.Tensor
    weight: torch.Tensor
    input_scale: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None


class ReduceOptions(NamedTuple):
    """The arguments of scaled_matmul_reduce_scatter that follow the tensors."""

    reduce_op: str
    scatter_dim: int
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    algorithm: str = "auto"


def why_not(
    communicator: Communicator,
    inner: int,
    weights: Sequence[torch.Tensor],
    out_dtype: torch.dtype | None,
) -> str:
    """Why the kernels cannot multiply these; empty if they can."""
    for weight in weights:
        across, along = weight.stride()
        columns = weight.shape[1]  # a stride matters where there is a second row or column
        if (inner > 1 and across != 1) or (columns > 1 and along < inner):
            return f"weight must be contiguous along k, strides are {weight.stride()}"
        if not communicator.place.interpreted and (inner | columns) % DESCRIPTOR_ALIGNMENT:
            return f"k and n must be multiples of 16, weight is {tuple(weight.shape)}"
    if out_dtype is not None and out_dtype not in OUTPUTS:
        return f"out_dtype must be float32, float16 or bfloat16, got {out_dtype}"
    return ""


def _by_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    return scale.reshape(-1).expand(rows).contiguous()


def gather(
    communicator: Communicator,
    operands: Sequence[ScaledOperands],
    by_row: bool,
    outputs: Sequence[torch.Tensor],
    gathered: torch.Tensor | None,
    fast_accum: bool,
    columns: Sequence[int],
) -> Event:
    """``operands``: one input, own rows; ``outputs``: all ranks' rows; ``columns``: all ranks' weights'."""
    input, row_scale = operands[0].input, operands[0].input_scale
    rows, inner = input.shape
    by_row = by_row or any(each.weight_scale.numel() != 1 for each in operands)
    targets = [
        Linear(
            each.weight,
            each.bias,
            output,
            scales="row" if by_row else "tensor",
            scale=_by_row(each.weight_scale, each.weight.shape[1]) if by_row else each.weight_scale,
            fast_accum=fast_accum,
            row_scale=_by_row(row_scale, rows) if by_row else row_scale,
        )
        for each, output in zip(operands, outputs, strict=True)
    ]
    problem = tuning.gather_problem(
        communicator.world_size, input.dtype, rows, tuple(columns), inner, fast_accum=fast_accum
    )
    config = tuning.choose(communicator, problem, "fused").configuration
    return gather_matmul.all_gather_matmul_fused(
        communicator, input, targets, [rows] * communicator.world_size, gathered, config
    )


def reduce(
    communicator: Communicator,
    operands: ScaledOperands,
    output: torch.Tensor,
    options: ReduceOptions,
    *,
    average: bool,
    inner: int,
) -> Event:
    """Into ``output``, the matrix of this rank's part. ``inner`` is the largest k of all ranks."""
    input, weight, row_scale, column_scale, bias = operands
    dim, size = options.scatter_dim % input.dim(), communicator.world_size
    by_row = row_scale.numel() != 1 or column_scale.numel() != 1
    left, right, along = factors(input, weight, dim)
    if along == "m":
        right = right if right.stride(0) == 1 else right.T.contiguous().T
        row_scale, column_scale = column_scale, row_scale
        bias = None if bias is None else bias.tensor_split(size)[communicator.rank]
    elif row_scale.numel() != 1:
        row_scale = rows_of(row_scale, dim)
    linear = Linear(
        right,
        bias,
        output,
        along,
        scales="row" if by_row else "tensor",
        scale=_by_row(column_scale, right.shape[1]) if by_row else column_scale,
        fast_accum=options.use_fast_accum,
        row_scale=_by_row(row_scale, left.shape[0]) if by_row else row_scale,
        average=average,
    )
    rows, columns = output.shape
    op, fast = "matmul_reduce_scatter", options.use_fast_accum
    problem = tuning.Problem(op, input.dtype, rows, columns, inner, size, fast)
    config = tuning.choose(communicator, problem, "fused").configuration
    segments = split_rows(left.shape[0], size)
    return matmul_reduce.matmul_reduce_scatter_fused(communicator, left, linear, segments, config)
