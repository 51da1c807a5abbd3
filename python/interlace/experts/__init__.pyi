# Written by tests/stubs.py from the signatures of the functions.
from interlace.arguments.words import (
    FusedAlgorithm, Group,
)
from interlace.ops.experts.api import (
    dequantize as dequantize, permute as permute, quantize as quantize,
)
from interlace.ops.experts.products import (
    multiply as multiply,
)
from interlace.ops.experts.routing import (
    DispatchHandle as DispatchHandle, Received as Received,
)
from interlace.ops.matmul.formats import (
    Scaled,
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
    x: Tensor | Scaled | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor | None,
    num_experts: int, *, capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None, use_fp8: bool = False, group: Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle]: ...
@overload
def dispatch(
    x: Tensor | Scaled | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weights: Tensor | None,
    num_experts: int, *, capacity: int | None = None,
    num_max_dispatch_tokens_per_rank: int | None = None, use_fp8: bool = False, group: Group = None,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
) -> Work: ...
@overload
def low_latency_combine(
    y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: DispatchHandle, *, group: Group = None,
    async_op: Literal[False] = False, algorithm: FusedAlgorithm = "auto",
) -> Tensor: ...
@overload
def low_latency_combine(
    y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: DispatchHandle, *, group: Group = None,
    async_op: Literal[True], algorithm: FusedAlgorithm = "auto",
) -> Work: ...
@overload
def low_latency_combine(
    y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: DispatchHandle, *, group: Group = None,
    async_op: bool = False, algorithm: FusedAlgorithm = "auto",
) -> Tensor | Work: ...
@overload
def low_latency_dispatch(
    x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, *,
    use_fp8: bool = True, group: Group = None, async_op: Literal[False] = False,
    algorithm: FusedAlgorithm = "auto",
) -> tuple[Received, DispatchHandle]: ...
@overload
def low_latency_dispatch(
    x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, *,
    use_fp8: bool = True, group: Group = None, async_op: Literal[True],
    algorithm: FusedAlgorithm = "auto",
) -> Work: ...
