"""Scenarios of hosts_ranks.py: attention, experts and reductions with norms, unfused between hosts."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace import functional, nn
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor
QUANTIZED = torch.float8_e4m3fn


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
    sent, slots = torch.bincount(experts.flatten(), minlength=world), rank * 2
    rows = interlace.experts.permute(tokens, experts, world, num_out_tokens=slots)[0]
    for bound in (None, 2 * world):
        given: Any = {"group": group}
        if bound is not None:
            given["num_max_rows_per_rank"] = bound
        learnt = weight.clone().requires_grad_()
        made, _ = interlace.all_to_all_grouped_matmul(rows, learnt, sent, **given)
        of_rank = received.x * (rank + 1)
        if not torch.equal(made[: len(of_rank)], of_rank) or made[len(of_rank) :].any():
            wrong.append(f"all_to_all_grouped_matmul {bound}")
        made.sum().backward()
        if not torch.equal(learnt.grad, received.x.sum(0)[None, :, None].expand(1, 2, 2)):
            wrong.append(f"its gradient {bound}")
    return wrong


def scaling(group: Communicator) -> list[str]:
    """fp8 with scales, gathered and scattered around a matmul."""
    torch.manual_seed(0)
    world, rank, wrong = group.world_size, group.rank, list[str]()
    shards, weights = (torch.randn(world, 16 * world, 16).to(QUANTIZED) for _ in range(2))
    scales, one = torch.rand(world, 16 * world, 1) + 0.5, torch.tensor(0.5)
    real, right = shards.float() * scales, weights[:, :16].float().transpose(1, 2) / 2
    own = slice(16 * rank, 16 * (rank + 1))
    for algorithm in ("auto", "unfused"):
        how: Any = {"group": group, "algorithm": algorithm, "out_dtype": torch.float32}
        about: Any = weights[rank, :16].t(), scales[rank, :16], one
        gathered = functional.all_gather_scaled_matmul(shards[rank, :16], *about, **how)
        if not torch.allclose(gathered, real[:, :16].flatten(0, 1) @ right[rank], rtol=1e-4):
            wrong.append(f"gathered {algorithm}")
        about = weights[rank, :16].t(), scales[rank], one
        scattered = functional.scaled_matmul_reduce_scatter(shards[rank], *about, **how)
        if not torch.allclose(scattered, (real @ right).sum(0)[own], rtol=1e-4, atol=1e-4):
            wrong.append(f"scattered {algorithm}")
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
        x, of = (each.clone().requires_grad_() for each in (products[rank], residual[own]))
        pair = interlace.reduce_scatter_norm(x, residual=of, gather_normed=True, **how)
        pair[0].square().sum().backward()
        whole = total.clone().requires_grad_()
        (world * F.rms_norm(whole, (5,), gain, 1e-6).square().sum()).backward()
        for name, found, expected in (("x", x, whole.grad), ("residual", of, whole.grad[own])):
            if not torch.allclose(found.grad, expected, atol=1e-5):
                wrong.append(f"gradient of {name} {algorithm}")
        rows = shards[rank, :2]  # what the backward of a matmul is
        made = interlace.all_gather_matmul(rows, weights[0], group=group, algorithm=algorithm)
        if not torch.allclose(made, shards[:, :2].flatten(0, 1) @ weights[0], atol=1e-5):
            wrong.append(f"all_gather_matmul {algorithm}")
    return wrong
