"""Scenarios of hosts_ranks.py: attention, experts and reductions with norms, unfused between hosts."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace import functional, nn
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


def attending(group: Communicator) -> list[str]:
    """Decoding with caches of every host, one of them empty, and attention: both as torch alone has it."""
    torch.manual_seed(0)
    heads, torch_s = torch.randn(3, 1, 2, 12, 8), torch.nn.functional.scaled_dot_product_attention
    query, key, value = (each.transpose(1, 2) for each in heads)
    cuts = [0, 4, 4, *[12] * (group.world_size - 2)]
    own = slice(cuts[group.rank], cuts[group.rank + 1])
    caches = key[:, own], value[:, own]
    decoded = interlace.distributed_decode(query[:, -1], caches, group=group)
    right, wrong = torch_s(*heads, is_causal=True).transpose(1, 2), []
    if (decoded - right[:, -1]).abs().max() > 1e-5:
        wrong.append("decoding")
    part = functools.partial(nn.functional.shard_sequence, group=group)
    for method in ("auto", "ulysses"):
        how: Any = {"causal": True, "method": method, "group": group}
        made = nn.functional.context_parallel_attention(*map(part, (query, key, value)), **how)
        if not torch.allclose(functional.wait(made), part(right), atol=1e-5):
            wrong.append(method)
    return wrong


def routing(group: Communicator) -> list[str]:
    """Tokens to experts and home again, by one that is times its number."""
    world, rank = group.world_size, group.rank
    tokens, wrong = torch.arange(2.0 * rank).reshape(-1, 2) + 1, []
    experts = (torch.arange(rank * 2).reshape(-1, 2) + rank) % world
    received, handle = interlace.experts.dispatch(tokens, experts, None, world, group=group)
    if not torch.equal(
        interlace.experts.combine(received.x * (rank + 1), handle),
        tokens * (experts + 1).sum(1, True),
    ):
        wrong.append("combine")
    weight = torch.eye(2).repeat(1, 1, 1) * (rank + 1)
    if not torch.equal(
        interlace.grouped_matmul_combine(received.x, weight, handle),
        tokens * (experts + 1).sum(1, True),
    ):
        wrong.append("grouped_matmul_combine")
    return wrong


def norming(group: Communicator) -> list[str]:
    """Reductions with norms, with and without a matmul, scattered and gathered, as torch alone has them."""
    torch.manual_seed(0)
    rank, world, wrong = group.rank, group.world_size, list[str]()
    shards, weights = torch.randn(world, 7, 3), torch.randn(world, 3, 5)
    residual, bias, gain = torch.randn(7, 5), torch.randn(5), torch.rand(5)
    each = -(-7 // world)
    own = slice(min(7, each * rank), min(7, each * (rank + 1)))
    products = shards @ weights
    total = products.sum(0) + bias + residual
    normed = F.rms_norm(total, (5,), gain, 1e-6)

    def check(case: str, pair: Any, rows: slice, of_sum: slice) -> None:
        for name, found, expected in (
            ("normed", pair[0], normed[rows]),
            ("sum", pair[1], total[of_sum]),
        ):
            if found.shape != expected.shape or not torch.allclose(found, expected, atol=1e-5):
                wrong.append(f"{case}: {name}")

    everything = slice(None)
    for algorithm in ("unfused", "auto"):
        how: Any = {"norm": interlace.RMSNorm(gain, 1e-6), "bias": bias, "group": group}
        how["algorithm"] = algorithm
        summed, scattered = interlace.all_reduce_norm, interlace.reduce_scatter_norm
        for form, given, to_all, to_owners in (
            ("rows", (products[rank],), summed, scattered),
            (
                "matmul",
                (shards[rank], weights[rank]),
                interlace.matmul_all_reduce,
                interlace.matmul_reduce_scatter,
            ),
        ):
            case, mine = f"{form} {algorithm}", {"residual": residual[own], **how}
            whole: Any = to_all(*given, residual=residual, **how)
            check(case, whole, everything, everything)
            check(f"{case} scattered", to_owners(*given, **mine), own, own)
            gathered = to_owners(*given, gather_normed=True, **mine)
            check(f"{case} gathered", gathered, everything, own)
        pair: Any = interlace.all_reduce_norm(
            products[rank], residual=residual, quantize="fp8", **how
        )
        values, scales = pair[0]
        if not torch.allclose(values.float() * scales, normed, rtol=2**-4, atol=2**-6):
            wrong.append(f"fp8 {algorithm}")
        rows = shards[rank, :2]  # what the backward of a matmul is
        made = interlace.all_gather_matmul(rows, weights[0], group=group, algorithm=algorithm)
        if not torch.allclose(made, shards[:, :2].flatten(0, 1) @ weights[0], atol=1e-5):
            wrong.append(f"all_gather_matmul {algorithm}")
    return wrong
