# Written by tests/stubs.py from the signatures of the functions.
from interlace.arguments.words import (
    FusedAlgorithm, Group,
)
from interlace.experts.low_latency import (
    low_latency_combine as low_latency_combine, low_latency_dispatch as low_latency_dispatch,
)
from interlace.experts.products import (
    multiply as multiply,
)
from interlace.experts.quantized import (
    dequantize as dequantize, quantize as quantize,
)
from interlace.experts.rows import (
    permute as permute,
)
from interlace.ops.experts.routing import (
    DispatchHandle as DispatchHandle, Received as Received,
)
from interlace.runtime.core.work import (
    Work,
)
from torch import (
    Tensor,
)
from typing import (
    Literal, overload,
)

__all__ = [
    "DispatchHandle", "Received", "combine", "dequantize", "dispatch", "low_latency_combine",
    "low_latency_dispatch", "multiply", "permute", "quantize",
]
@overload
def combine(
    y: Tensor, handle: DispatchHandle, *, weighted: bool = True, group: Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
) -> Tensor: ...
@overload
def combine(
    y: Tensor, handle: DispatchHandle, *, weighted: bool = True, group: Group = None,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
) -> Work: ...
@overload
def combine(
    y: Tensor, handle: DispatchHandle, *, weighted: bool = True, group: Group = None,
    async_op: bool = False, algorithm: FusedAlgorithm = "auto",
) -> Tensor | Work: ...
@overload
def dispatch(
    x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor | None,
    num_experts: int, *, capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None, use_fp8: bool = False, group: Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle]: ...
@overload
def dispatch(
    x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor | None,
    num_experts: int, *, capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None, use_fp8: bool = False, group: Group = None,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
) -> Work: ...
