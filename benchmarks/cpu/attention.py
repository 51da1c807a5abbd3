"""Attention over a sharded sequence against torch's own ring, that of its ``context_parallel``, over gloo.

``context_parallel`` patches attention on GPUs only. The ring in it takes an op that returns output and
logarithms, so here it gets the one that torch has for CPUs, which interlace's "pipelined" calls, too. Both
of torch's ways of keys are candidates ("allgather", its default, and "alltoall"), with its balancing, which
is zigzag. Tokens are those of all ranks; causal, float32, 8 heads of 64. Results are compared before
anything is timed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cpu.measure import Case
from torch.distributed.tensor.experimental._context_parallel import _attention

import interlace
from interlace import nn

TOKENS = (1024, 2048, 4096)
HEADS, SIZE = 8, 64
METHODS = ("all_gather", "ring", "ulysses")
torchs: Any = _attention
_aten: Any = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
Tensors = list[torch.Tensor]


def _op(query: Any, key: Any, value: Any, *, is_causal: bool) -> Any:
    return _FORWARD(query, key, value, 0.0, is_causal)


def _op_backward(*, grad_out: Any, query: Any, key: Any, value: Any, **rest: Any) -> Any:
    out, lse, causal = rest["out"], rest["logsumexp"], rest["is_causal"]
    return _BACKWARD(grad_out, query, key, value, out, lse, 0.0, causal)


def torch_forward(way: str, tensors: Tensors) -> Any:
    torchs.set_rotate_method(way)
    group: Any = dist.group.WORLD
    return torchs._templated_ring_attention(group, 2, _op, *tensors, is_causal=True)


def torch_both(way: str, tensors: Tensors, grad: torch.Tensor) -> Any:
    output, lse, *_ = torch_forward(way, tensors)
    group: Any = dist.group.WORLD
    return torchs._templated_ring_attention_backward(
        group, 2, _op_backward, grad, "grad_out", *tensors, output, lse, is_causal=True
    )


def ours_forward(method: Any, tensors: Tensors) -> torch.Tensor:
    with torch.no_grad():
        made = nn.functional.context_parallel_attention(*tensors, causal=True, method=method)
        return interlace.functional.wait(made)


def ours_both(method: Any, tensors: Tensors, grad: torch.Tensor) -> Any:
    leaves = [each.detach().requires_grad_() for each in tensors]
    made = nn.functional.context_parallel_attention(*leaves, causal=True, method=method)
    return torch.autograd.grad(made, leaves, grad)


def _compared(theirs: Any, ours: Any) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2), rtol=1e-4, atol=1e-4)


def cases(op: str) -> Iterator[Case]:
    """Forward, and forward with backward, one case per length; run on every rank."""
    for tokens in TOKENS:
        torch.manual_seed(0)
        whole = [torch.randn(1, tokens, HEADS, SIZE) for _ in range(4)]
        *ours, grad = (nn.functional.shard_sequence(each) for each in whole)
        *theirs, their_grad = (each.transpose(1, 2).contiguous() for each in (*ours, grad))
        shape: dict[str, int | str] = {"tokens": tokens, "dtype": "float32"}
        forward: dict[str, Callable[[], object]] = {}
        both: dict[str, Callable[[], object]] = {}
        for way in ("allgather", "alltoall"):
            forward[f"torch {way}"] = partial(torch_forward, way, theirs)
            both[f"torch {way}"] = partial(torch_both, way, theirs, their_grad)
        for method in METHODS:
            forward[method] = partial(ours_forward, method, ours)
            both[method] = partial(ours_both, method, ours, grad)
            _compared([torch_forward("allgather", theirs)[0]], [ours_forward(method, ours)])
            grads = torch_both("alltoall", theirs, their_grad)[:3]
            _compared(grads, ours_both(method, ours, grad))
        yield Case(f"{op}, forward", shape, "torch allgather", forward)
        yield Case(f"{op}, forward and backward", shape, "torch allgather", both)
