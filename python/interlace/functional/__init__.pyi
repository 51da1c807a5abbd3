# Written by tests/stubs.py from the signatures of the functions.
from collections.abc import (
    Sequence,
)
from interlace.arguments.checks import (
    RowNorm,
)
from interlace.arguments.words import (
    BlockFormatName, FP8, FunctionalGroup, FusedAlgorithm, FusedReduceOp, NormAlgorithm, Normed,
    Quantized, ScaledAlgorithm, Tensors, Unscaled,
)
from interlace.groups.specs import (
    GroupSpec as GroupSpec,
)
from interlace.ops import (
    library as library, local_tensor as local_tensor,
)
from interlace.ops.attention.functional import (
    all_to_all_matmul as all_to_all_matmul, distributed_decode as distributed_decode,
    matmul_all_to_all as matmul_all_to_all,
)
from interlace.ops.collectives.functional import (
    all_gather as all_gather, all_reduce as all_reduce, all_to_all as all_to_all,
    broadcast as broadcast, gather as gather, permute as permute, reduce as reduce,
    reduce_scatter as reduce_scatter, scatter as scatter,
)
from interlace.ops.experts.functional import (
    combine as combine, dispatch as dispatch, grouped_matmul_combine as grouped_matmul_combine,
)
from interlace.ops.matmul.formats import (
    NormedScaled, Scaled,
)
from interlace.ops.matmul.functional import (
    scaled_matmul_reduce_scatter as scaled_matmul_reduce_scatter,
)
from interlace.ops.op.async_tensor import (
    AsyncTensor as AsyncTensor, wait as wait,
)
from torch import (
    Tensor, dtype,
)
from typing import (
    Any, Literal, overload,
)

__all__ = [
    "AsyncTensor", "GroupSpec", "all_gather", "all_gather_grouped_matmul", "all_gather_matmul",
    "all_gather_scaled_matmul", "all_reduce", "all_reduce_norm", "all_to_all",
    "all_to_all_grouped_matmul", "all_to_all_matmul", "broadcast", "combine", "dispatch",
    "distributed_decode", "gather", "grouped_matmul_combine", "matmul_all_reduce",
    "matmul_all_to_all", "matmul_reduce_scatter", "permute", "reduce", "reduce_scatter",
    "reduce_scatter_norm", "scaled_matmul_reduce_scatter", "scatter", "wait",
]
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: bool, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Any: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensor, gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[False] = False, save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensor, gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[True], save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Sequence[Tensor], gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[False] = False, save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> list[Tensor]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Sequence[Tensor], gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[True], save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, list[Tensor]]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensors | Scaled | Sequence[Scaled], gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: bool, save_gathered: bool = True,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Any: ...
@overload
def all_gather_scaled_matmul(
    input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensors, gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[False] = False, out_dtype: dtype | None = None,
    use_fast_accum: bool = False, algorithm: ScaledAlgorithm = "auto",
) -> Tensor: ...
@overload
def all_gather_scaled_matmul(
    input: Tensor, weight: Tensor, input_scale: Tensor, weight_scale: Tensors, gather_dim: int = 0, *,
    bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: Literal[True], out_dtype: dtype | None = None,
    use_fast_accum: bool = False, algorithm: ScaledAlgorithm = "auto",
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_scaled_matmul(
    input: Tensor, weight: Sequence[Tensor], input_scale: Tensor, weight_scale: Tensors,
    gather_dim: int = 0, *, bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None, tag: str = "", return_gathered: Literal[False] = False,
    out_dtype: dtype | None = None, use_fast_accum: bool = False, algorithm: ScaledAlgorithm = "auto",
) -> list[Tensor]: ...
@overload
def all_gather_scaled_matmul(
    input: Tensor, weight: Sequence[Tensor], input_scale: Tensor, weight_scale: Tensors,
    gather_dim: int = 0, *, bias: Tensor | Sequence[Tensor | None] | None = None,
    group: FunctionalGroup = None, tag: str = "", return_gathered: Literal[True],
    out_dtype: dtype | None = None, use_fast_accum: bool = False, algorithm: ScaledAlgorithm = "auto",
) -> tuple[Tensor, list[Tensor]]: ...
@overload
def all_gather_scaled_matmul(
    input: Tensor, weight: Tensors, input_scale: Tensor, weight_scale: Tensors, gather_dim: int = 0,
    *, bias: Tensor | Sequence[Tensor | None] | None = None, group: FunctionalGroup = None,
    tag: str = "", return_gathered: bool, out_dtype: dtype | None = None,
    use_fast_accum: bool = False, algorithm: ScaledAlgorithm = "auto",
) -> Any: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: Unscaled | None = None, reduce_op: FusedReduceOp = "sum", group: FunctionalGroup = None,
    tag: str = "", algorithm: NormAlgorithm = "auto",
) -> Normed: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8, reduce_op: FusedReduceOp = "sum", group: FunctionalGroup = None, tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Quantized: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: BlockFormatName, reduce_op: FusedReduceOp = "sum", group: FunctionalGroup = None,
    tag: str = "", algorithm: NormAlgorithm = "auto",
) -> NormedScaled: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Sequence[int],
    output_splits: Sequence[int], *, bias: Tensor | None = None, group: FunctionalGroup = None,
    tag: str = "", return_received: bool, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Any: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum", *,
    bias: Tensor | None = None, residual: Tensor | None = None, norm: None = None,
    group: FunctionalGroup = None, tag: str = "", algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum", *,
    bias: Tensor | None = None, residual: Tensor | None = None, norm: RowNorm,
    quantize: Unscaled | None = None, group: FunctionalGroup = None, tag: str = "",
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Normed: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum", *,
    bias: Tensor | None = None, residual: Tensor | None = None, norm: RowNorm, quantize: FP8,
    group: FunctionalGroup = None, tag: str = "", algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Quantized: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum", *,
    bias: Tensor | None = None, residual: Tensor | None = None, norm: RowNorm,
    quantize: BlockFormatName, group: FunctionalGroup = None, tag: str = "",
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> NormedScaled: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, *, bias: Tensor | None = None, residual: Tensor | None = None,
    norm: None = None, group: FunctionalGroup = None, tag: str = "",
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, *, bias: Tensor | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: Unscaled | None = None, gather_normed: bool = False,
    group: FunctionalGroup = None, tag: str = "", algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Normed: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, *, bias: Tensor | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: FP8, gather_normed: bool = False, group: FunctionalGroup = None,
    tag: str = "", algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Quantized: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, *, bias: Tensor | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: BlockFormatName, gather_normed: bool = False,
    group: FunctionalGroup = None, tag: str = "", algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> NormedScaled: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: Unscaled | None = None, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: FunctionalGroup = None, tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Normed: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: FunctionalGroup = None, tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> Quantized: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: BlockFormatName, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: FunctionalGroup = None, tag: str = "",
    algorithm: NormAlgorithm = "auto",
) -> NormedScaled: ...
