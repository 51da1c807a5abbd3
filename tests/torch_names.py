"""Names that the oldest torch that interlace supports (2.11) has otherwise than the newest."""

import inspect
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def _either(module: Any, new: str, old: str) -> Any:
    return getattr(module, new, None) or getattr(module, old)


all_gather_single = _either(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _either(dist, "reduce_scatter_single", "reduce_scatter_tensor")

functional_gather_autograd = _either(
    functional, "all_gather_single_autograd", "all_gather_tensor_autograd"
)
functional_reduce_scatter = _either(functional, "reduce_scatter_single", "reduce_scatter_tensor")
functional_gather_coalesced = _either(
    functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
functional_reduce_scatter_coalesced = _either(
    functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)

NEWEST = hasattr(functional, "all_gather_single")  # torch 2.13
NEW_GROUP_SORTS = "sort_ranks" in inspect.signature(dist.new_group).parameters


def premul_sum(factor: Any) -> Any:
    """``ReduceOp.PREMUL_SUM(factor)``."""
    kind = dist.ReduceOp.PREMUL_SUM
    return kind(factor) if callable(kind) else dist._make_nccl_premul_sum(factor)
