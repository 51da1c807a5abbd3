"""Attention over a sharded sequence in processes: every method, the layer, graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import interlace
from cases.attention_cases import METHODS, AttentionCase, check
from cases.head_exchange_cases import layered
from interlace import nn
from ranks import ranks
from tiers import thorough

CASES = {
    "fused": AttentionCase((18, 5), size=16, batch=1, heads=(2, 1)),
    "pipelined": AttentionCase((130, 0, 77), size=64, dtype=torch.bfloat16, layout="sbhd"),
    "unfused": AttentionCase((9, 20, 4), value_size=8, dtype=torch.float64, window=(6, 0)),
}


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        *(("pipelined", method) for method in METHODS),
        ("fused", "ring"),
        ("unfused", "all_gather"),
        ("unfused", "ulysses"),
    ],
)
def test_agrees_with_the_whole_sequence(algorithm: str, method: str) -> None:
    check(CASES[algorithm], method, algorithm, place="shm")


def test_the_layer_with_projections() -> None:
    case = (7, 4), (4, 2), "auto", "bshd", "zigzag"
    assert max(interlace.run(layered, 2, *case, place="shm")) < 1e-5


def attended(*tensors: torch.Tensor) -> torch.Tensor:
    options: dict[str, Any] = {"causal": True, "window": (5, -1), "layout": "sbhd"}
    return nn.functional.context_parallel_attention(*tensors, **options)


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return interlace.functional.distributed_decode(q * 2, (k, v))[0] + 1


def check_graph(
    call: Callable[..., Any], shapes: Sequence[tuple[int, ...]], parameters: Any = ()
) -> None:
    """A graph without breaks must give the bits of the eager call, also of its gradients."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    found = []
    for form in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaves = [each.clone().requires_grad_(call is not decoded) for each in inputs]
        output = form(*leaves)
        found.append([output.detach()])
        if output.requires_grad:
            found[-1] += torch.autograd.grad(output.square().sum(), [*leaves, *parameters])
    assert all(map(torch.equal, *found))


@thorough
@ranks(2)
def test_graphs_have_it() -> None:
    check_graph(attended, [(10, 1, 4, 8), (10, 1, 2, 8), (10, 1, 2, 6)])
    torch.manual_seed(0)
    layer = nn.UlyssesAttention(16, 4, 2, 8, True, causal=True)
    check_graph(layer, [(2, 6, 16)], list(layer.parameters()))
    check_graph(decoded, [(2, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6)])
