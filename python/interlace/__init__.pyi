# Written by tests/stubs.py from the signatures of the functions.
from collections.abc import (
    Callable, Sequence,
)
from datetime import (
    timedelta,
)
from interlace import (
    aot as aot, compile as compile, experts as experts, functional as functional,
    integrations as integrations, nn as nn, ops as ops, symmetric_memory as symmetric_memory,
    tensor as tensor, verify as verify,
)
from interlace.arguments.checks import (
    RowNorm,
)
from interlace.arguments.words import (
    AnyReduceOp, BlockFormatName, BroadcastAlgorithm, CollectiveAlgorithm, FP8, FusedAlgorithm,
    FusedReduceOp, Group as _Group, NormAlgorithm, Normed, PerRank, Quantized, ReduceOp as ReduceOp,
    RunPlace, ScaledAlgorithm, Splits, Tensors, Unscaled,
)
from interlace.groups.groups import (
    Group as Group, device as device, get_rank as get_rank, get_world_size as get_world_size,
    init as init, shutdown as shutdown,
)
from interlace.groups.new import (
    new_group as new_group, new_subgroups as new_subgroups,
    new_subgroups_by_enumeration as new_subgroups_by_enumeration, rebuild as rebuild,
    shrink as shrink, split_group as split_group,
)
from interlace.groups.specs import (
    GroupSpec as GroupSpec,
)
from interlace.kernels.epilogue import (
    Activation,
)
from interlace.launcher import (
    T,
)
from interlace.numerics import (
    check_numerics as check_numerics,
)
from interlace.ops.collectives.all_to_all import (
    Whole,
)
from interlace.ops.collectives.objects import (
    all_gather_object as all_gather_object, broadcast_object_list as broadcast_object_list,
    gather_object as gather_object, recv_object_list as recv_object_list,
    scatter_object_list as scatter_object_list, send_object_list as send_object_list,
)
from interlace.ops.collectives.point_to_point import (
    P2POp as P2POp, batch_isend_irecv as batch_isend_irecv, irecv as irecv, isend as isend,
    monitored_barrier as monitored_barrier, recv as recv, send as send,
)
from interlace.ops.collectives.rootless import (
    _all_gather_base as _all_gather_base, _reduce_scatter_base as _reduce_scatter_base,
    all_gather_into_tensor as all_gather_into_tensor, all_gather_single as all_gather_single,
    reduce_scatter_single as reduce_scatter_single, reduce_scatter_tensor as reduce_scatter_tensor,
)
from interlace.ops.experts.routing import (
    DispatchHandle,
)
from interlace.ops.matmul.api import (
    LayerNorm as LayerNorm, RMSNorm as RMSNorm,
)
from interlace.ops.matmul.formats import (
    NormedScaled, Scaled as Scaled, quantize as quantize,
)
from interlace.runtime.compat.launchers import (
    launched as launched,
)
from interlace.runtime.core.errors import (
    AbortedError as AbortedError, CollectiveTimeoutError as CollectiveTimeoutError,
    DeadlockError as DeadlockError, InterlaceError as InterlaceError,
    KernelAssertionError as KernelAssertionError, MemoryAccessError as MemoryAccessError,
    PeerDiedError as PeerDiedError, PlaceUnavailableError as PlaceUnavailableError,
    RankError as RankError, StoreGoneError as StoreGoneError,
)
from interlace.runtime.core.hooks import (
    HookedOp as HookedOp,
)
from interlace.runtime.core.place import (
    timeout as timeout,
)
from interlace.runtime.core.work import (
    Work as Work,
)
from interlace.runtime.tuning.configuration import (
    override as configured,
)
from interlace.symmetric_memory.functions import (
    take_over_symm_mem as take_over_symm_mem,
)
from interlace.tracing import (
    trace as trace,
)
from torch import (
    Tensor, dtype,
)
from typing import (
    Any, Literal, overload,
)
from typing_extensions import (
    ParamSpec, TypeVarTuple, Unpack,
)

_P = ParamSpec("_P")
_Ts = TypeVarTuple("_Ts")
__all__ = [
    "AbortedError", "CollectiveTimeoutError", "DeadlockError", "Group", "GroupSpec", "HookedOp",
    "InterlaceError", "KernelAssertionError", "LayerNorm", "MemoryAccessError", "P2POp",
    "PeerDiedError", "PlaceUnavailableError", "RMSNorm", "RankError", "ReduceOp", "Scaled",
    "StoreGoneError", "Work", "_all_gather_base", "_reduce_scatter_base", "all_gather",
    "all_gather_coalesced", "all_gather_grouped_matmul", "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced", "all_gather_matmul", "all_gather_object", "all_gather_single",
    "all_gather_v", "all_reduce", "all_reduce_coalesced", "all_reduce_norm", "all_to_all",
    "all_to_all_grouped_matmul", "all_to_all_single", "all_to_all_v", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "check_numerics", "configured", "device",
    "distributed_decode", "gather", "gather_object", "gather_v", "get_rank", "get_world_size",
    "grouped_matmul_combine", "init", "irecv", "isend", "launched", "matmul_all_reduce",
    "matmul_reduce_scatter", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "quantize", "rebuild", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_norm", "reduce_scatter_single", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_v", "run", "scatter", "scatter_object_list",
    "scatter_v", "send", "send_object_list", "shrink", "shutdown", "split_group", "symmetric_memory",
    "take_over_symm_mem", "timeout", "trace",
]
__version__: str
@overload
def all_gather(
    output: PerRank | None = None, tensor: Tensor | None = None, group: _Group = None, *,
    async_op: Literal[True], algorithm: CollectiveAlgorithm = "auto",
    tensor_list: list[Tensor] | None = None, output_tensor: Tensor | None = None,
    input_tensor: Tensor | None = None,
) -> Work: ...
@overload
def all_gather(
    output: PerRank | None = None, tensor: Tensor | None = None, group: _Group = None,
    async_op: bool = False, *, algorithm: CollectiveAlgorithm = "auto",
    tensor_list: list[Tensor] | None = None, output_tensor: Tensor | None = None,
    input_tensor: Tensor | None = None,
) -> Work | None: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[PerRank], input_tensor_list: Sequence[Tensor], group: _Group = None,
    *, async_op: Literal[True],
) -> Work: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[PerRank], input_tensor_list: Sequence[Tensor], group: _Group = None,
    async_op: bool = False,
) -> Work | None: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None,
    return_received: Literal[False] = False, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: Literal[True],
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: bool = False,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Work: ...
@overload
def all_gather_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: bool = False,
    async_op: bool = False, algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, ...] | Work: ...
@overload
def all_gather_into_tensor_coalesced(
    outputs: Sequence[PerRank], inputs: Sequence[Tensor], group: _Group = None, *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_gather_into_tensor_coalesced(
    outputs: Sequence[PerRank], inputs: Sequence[Tensor], group: _Group = None,
    async_op: bool = False,
) -> Work | None: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensor, *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: Literal[False] = False, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensor, *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: Literal[True], async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Sequence[Tensor], *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: Literal[False] = False, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> list[Tensor]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Sequence[Tensor], *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: Literal[True], async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, list[Tensor]]: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensors | Scaled | Sequence[Scaled], *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: bool = False, async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Work: ...
@overload
def all_gather_matmul(
    input: Tensor | Scaled, weight: Tensors | Scaled | Sequence[Scaled], *, gather_dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    activation: Activation | Sequence[Activation | None] | None = None, group: _Group = None,
    return_gathered: bool = False, async_op: bool = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]] | Work: ...
@overload
def all_gather_v(
    output: Whole, tensor: Tensor, output_split_sizes: Sequence[int] | None = None,
    group: _Group = None, *, async_op: Literal[True], dim: int = 0,
) -> Work: ...
@overload
def all_gather_v(
    output: Whole, tensor: Tensor, output_split_sizes: Sequence[int] | None = None,
    group: _Group = None, async_op: bool = False, *, dim: int = 0,
) -> Work | None: ...
@overload
def all_reduce(
    tensor: Tensor, op: AnyReduceOp = "sum", group: _Group = None, *, async_op: Literal[True],
    algorithm: CollectiveAlgorithm = "auto",
) -> Work: ...
@overload
def all_reduce(
    tensor: Tensor, op: AnyReduceOp = "sum", group: _Group = None, async_op: bool = False, *,
    algorithm: CollectiveAlgorithm = "auto",
) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: AnyReduceOp = "sum", group: _Group = None, *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: AnyReduceOp = "sum", group: _Group = None, async_op: bool = False,
) -> Work | None: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: Unscaled | None = None, reduce_op: FusedReduceOp = "sum", group: _Group = None,
    async_op: Literal[False] = False, algorithm: NormAlgorithm = "auto",
) -> Normed: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8, reduce_op: FusedReduceOp = "sum", group: _Group = None,
    async_op: Literal[False] = False, algorithm: NormAlgorithm = "auto",
) -> Quantized: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: BlockFormatName, reduce_op: FusedReduceOp = "sum", group: _Group = None,
    async_op: Literal[False] = False, algorithm: NormAlgorithm = "auto",
) -> NormedScaled: ...
@overload
def all_reduce_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None, reduce_op: FusedReduceOp = "sum",
    group: _Group = None, async_op: Literal[True], algorithm: NormAlgorithm = "auto",
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: _Group = None, *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: _Group = None,
    async_op: bool = False,
) -> Work | None: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None,
    return_received: Literal[False] = False, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: Literal[True],
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: bool = False,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Work: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Splits,
    output_splits: Splits | None = None, *, bias: Tensor | None = None,
    activation: Activation | None = None, group: _Group = None, return_received: bool = False,
    async_op: bool = False, algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> tuple[Tensor, ...] | Work: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Tensor, *,
    bias: Tensor | None = None, activation: Activation | None = None, group: _Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, num_max_rows_per_rank: int, format: BlockFormatName | None = None,
) -> tuple[Tensor, DispatchHandle]: ...
@overload
def all_to_all_grouped_matmul(
    input: Tensor | Scaled, weight: Tensor | Scaled, input_splits: Tensor, *,
    bias: Tensor | None = None, activation: Activation | None = None, group: _Group = None,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    num_max_rows_per_rank: int, format: BlockFormatName | None = None,
) -> Work: ...
@overload
def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: _Group = None, *, async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all_single(
    output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: _Group = None, async_op: bool = False,
) -> Work | None: ...
@overload
def all_to_all_v(
    output: Whole, input: Whole, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: _Group = None, *, async_op: Literal[True],
    dim: int = 0,
) -> Work: ...
@overload
def all_to_all_v(
    output: Whole, input: Whole, output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None, group: _Group = None, async_op: bool = False, *,
    dim: int = 0,
) -> Work | None: ...
@overload
def barrier(
    group: _Group = None, *, async_op: Literal[True], device_ids: Any = None,
    timeout: timedelta | float | None = None,
) -> Work: ...
@overload
def barrier(
    group: _Group = None, async_op: bool = False, device_ids: Any = None,
    timeout: timedelta | float | None = None,
) -> Work | None: ...
@overload
def broadcast(
    tensor: Tensor, src: int | None = None, group: _Group = None, *, async_op: Literal[True],
    group_src: int | None = None, algorithm: BroadcastAlgorithm = "auto",
) -> Work: ...
@overload
def broadcast(
    tensor: Tensor, src: int | None = None, group: _Group = None, async_op: bool = False,
    group_src: int | None = None, *, algorithm: BroadcastAlgorithm = "auto",
) -> Work | None: ...
@overload
def distributed_decode(
    q: Tensor, kv_cache: Sequence[Tensor], *, lengths: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None, group: _Group = None,
    algorithm: ScaledAlgorithm = "auto", return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def distributed_decode(
    q: Tensor, kv_cache: Sequence[Tensor], *, lengths: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None, group: _Group = None,
    algorithm: ScaledAlgorithm = "auto", return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def distributed_decode(
    q: Tensor, kv_cache: Sequence[Tensor], *, lengths: Tensor | None = None,
    block_table: Tensor | None = None, scale: float | None = None, group: _Group = None,
    algorithm: ScaledAlgorithm = "auto", return_lse: bool,
) -> Any: ...
@overload
def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None,
    group: _Group = None, *, async_op: Literal[True], group_dst: int | None = None,
) -> Work: ...
@overload
def gather(
    tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None,
    group: _Group = None, async_op: bool = False, group_dst: int | None = None,
) -> Work | None: ...
@overload
def gather_v(
    tensor: Tensor, output: Whole | None = None, sizes: Sequence[int] | None = None,
    dst: int | None = None, group: _Group = None, *, async_op: Literal[True],
    group_dst: int | None = None, dim: int = 0,
) -> Work: ...
@overload
def gather_v(
    tensor: Tensor, output: Whole | None = None, sizes: Sequence[int] | None = None,
    dst: int | None = None, group: _Group = None, async_op: bool = False,
    group_dst: int | None = None, *, dim: int = 0,
) -> Work | None: ...
@overload
def grouped_matmul_combine(
    input: Tensor | Scaled, weight: Tensor | Scaled, splits: Splits | DispatchHandle,
    topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, *, bias: Tensor | None = None,
    group: _Group = None, async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def grouped_matmul_combine(
    input: Tensor | Scaled, weight: Tensor | Scaled, splits: Splits | DispatchHandle,
    topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, *, bias: Tensor | None = None,
    group: _Group = None, async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Work: ...
@overload
def grouped_matmul_combine(
    input: Tensor | Scaled, weight: Tensor | Scaled, splits: Splits | DispatchHandle,
    topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, *, bias: Tensor | None = None,
    group: _Group = None, async_op: bool = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor | Work: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, norm: None = None,
    group: _Group = None, async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: Unscaled | None = None, group: _Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Normed: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: FP8, group: _Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Quantized: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, residual: Tensor | None = None,
    norm: RowNorm, quantize: BlockFormatName, group: _Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> NormedScaled: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, residual: Tensor | None = None,
    norm: RowNorm | None = None, quantize: FP8 | Unscaled | BlockFormatName | None = None,
    group: _Group = None, async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Work: ...
@overload
def matmul_all_reduce(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    bias: Tensor | None = None, activation: Activation | None = None, norm: None = None,
    group: _Group = None, async_op: bool, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor | Work: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    norm: None = None, group: _Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Tensor: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    residual: Tensor | None = None, norm: RowNorm, quantize: Unscaled | None = None,
    gather_normed: bool = False, group: _Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> Normed: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    residual: Tensor | None = None, norm: RowNorm, quantize: FP8, gather_normed: bool = False,
    group: _Group = None, async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Quantized: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    residual: Tensor | None = None, norm: RowNorm, quantize: BlockFormatName,
    gather_normed: bool = False, group: _Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto", out_dtype: dtype | None = None,
    format: BlockFormatName | None = None,
) -> NormedScaled: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    residual: Tensor | None = None, norm: RowNorm | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None, gather_normed: bool = False,
    group: _Group = None, async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Work: ...
@overload
def matmul_reduce_scatter(
    input: Tensor | Scaled, weight: Tensor | Scaled, *, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, bias: Tensor | None = None, activation: Activation | None = None,
    norm: None = None, group: _Group = None, async_op: bool, algorithm: FusedAlgorithm = "auto",
    out_dtype: dtype | None = None, format: BlockFormatName | None = None,
) -> Tensor | Work: ...
@overload
def reduce(
    tensor: Tensor, dst: int | None = None, op: AnyReduceOp = "sum", group: _Group = None, *,
    async_op: Literal[True], group_dst: int | None = None,
) -> Work: ...
@overload
def reduce(
    tensor: Tensor, dst: int | None = None, op: AnyReduceOp = "sum", group: _Group = None,
    async_op: bool = False, group_dst: int | None = None,
) -> Work | None: ...
@overload
def reduce_scatter(
    output: Tensor | None = None, input: PerRank | None = None, op: AnyReduceOp = "sum",
    group: _Group = None, *, async_op: Literal[True], algorithm: CollectiveAlgorithm = "auto",
    input_list: list[Tensor] | None = None,
) -> Work: ...
@overload
def reduce_scatter(
    output: Tensor | None = None, input: PerRank | None = None, op: AnyReduceOp = "sum",
    group: _Group = None, async_op: bool = False, *, algorithm: CollectiveAlgorithm = "auto",
    input_list: list[Tensor] | None = None,
) -> Work | None: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: Unscaled | None = None, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: _Group = None, async_op: Literal[False] = False,
    algorithm: NormAlgorithm = "auto",
) -> Normed: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: _Group = None, async_op: Literal[False] = False,
    algorithm: NormAlgorithm = "auto",
) -> Quantized: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: BlockFormatName, gather_normed: bool = False, reduce_op: FusedReduceOp = "sum",
    scatter_dim: int = 0, group: _Group = None, async_op: Literal[False] = False,
    algorithm: NormAlgorithm = "auto",
) -> NormedScaled: ...
@overload
def reduce_scatter_norm(
    input: Tensor, *, norm: RowNorm, residual: Tensor | None = None, bias: Tensor | None = None,
    quantize: FP8 | Unscaled | BlockFormatName | None = None, gather_normed: bool = False,
    reduce_op: FusedReduceOp = "sum", scatter_dim: int = 0, group: _Group = None,
    async_op: Literal[True], algorithm: NormAlgorithm = "auto",
) -> Work: ...
@overload
def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Tensor], inputs: Sequence[PerRank], op: AnyReduceOp = "sum",
    group: _Group = None, *, async_op: Literal[True],
) -> Work: ...
@overload
def reduce_scatter_tensor_coalesced(
    outputs: Sequence[Tensor], inputs: Sequence[PerRank], op: AnyReduceOp = "sum",
    group: _Group = None, async_op: bool = False,
) -> Work | None: ...
@overload
def reduce_scatter_v(
    output: Tensor, input: Whole, input_split_sizes: Sequence[int] | None = None,
    op: AnyReduceOp = "sum", group: _Group = None, *, async_op: Literal[True], dim: int = 0,
) -> Work: ...
@overload
def reduce_scatter_v(
    output: Tensor, input: Whole, input_split_sizes: Sequence[int] | None = None,
    op: AnyReduceOp = "sum", group: _Group = None, async_op: bool = False, *, dim: int = 0,
) -> Work | None: ...
@overload
def run(fn: Callable[_P, T], world_size: int, *args: _P.args, **kwargs: _P.kwargs) -> list[T]: ...
@overload
def run(
    fn: Callable[[Unpack[_Ts]], T], world_size: int, *args: Unpack[_Ts], place: RunPlace = "sim",
    seed: int = 0, timeout: float | timedelta = 300.0, processes: bool = False,
    arch: int | None = None,
) -> list[T]: ...
@overload
def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None,
    group: _Group = None, *, async_op: Literal[True], group_src: int | None = None,
) -> Work: ...
@overload
def scatter(
    tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None,
    group: _Group = None, async_op: bool = False, group_src: int | None = None,
) -> Work | None: ...
@overload
def scatter_v(
    tensor: Tensor, input: Whole | None = None, sizes: Sequence[int] | None = None,
    src: int | None = None, group: _Group = None, *, async_op: Literal[True],
    group_src: int | None = None, dim: int = 0,
) -> Work: ...
@overload
def scatter_v(
    tensor: Tensor, input: Whole | None = None, sizes: Sequence[int] | None = None,
    src: int | None = None, group: _Group = None, async_op: bool = False,
    group_src: int | None = None, *, dim: int = 0,
) -> Work | None: ...
