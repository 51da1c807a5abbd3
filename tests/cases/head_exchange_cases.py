"""Calls of the exchanges of heads with their projections, and of the layer around both."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import interlace
from interlace import functional, nn, reference
from interlace.runtime.tuning.configuration import override
from support import laid_out, noise

ALGORITHMS = ("fused", "pipelined", "unfused")
F32 = torch.float32


@dataclass(frozen=True)
class ExchangeCase:
    """``lengths``: of dimension 0, by rank. ``columns``: of a rank's heads. ``hidden``: size of a token."""

    lengths: tuple[int, ...]
    hidden: int = 24
    columns: int = 12
    others: tuple[int, ...] = ()
    bias: bool = True
    dtype: torch.dtype = F32
    weight: str = "transposed"
    copiers: int = 2

    def whole(self, number: int, columns: int) -> torch.Tensor:
        return noise(0, number, (sum(self.lengths), *self.others, columns), self.dtype)

    def parameters(self, number: int, inner: int, columns: int) -> tuple[torch.Tensor, Any]:
        weight = laid_out(noise(0, number, (inner, columns), self.dtype), self.weight)
        return weight, noise(0, number + 1, (columns,), self.dtype) if self.bias else None


def exchanged(case: ExchangeCase, algorithm: str) -> dict[str, torch.Tensor]:
    """Return the results of both ops, and their gradients."""
    rank, world = interlace.get_rank(), interlace.get_world_size()
    begin, every = sum(case.lengths[:rank]), world * case.columns
    own = slice(begin, begin + case.lengths[rank])
    heads = slice(rank * case.columns, (rank + 1) * case.columns)
    found = {}
    how: Any = {"algorithm": algorithm}
    tiles = {"block_m": 16, "block_n": 16, "block_k": 16, "chunks": 2, "copiers": case.copiers}
    with override(**tiles):
        for name, hidden, columns, length in (
            ("matmul_all_to_all", case.hidden, every, sum(case.lengths)),
            ("all_to_all_matmul", every, case.hidden, case.lengths[rank]),
        ):
            to_heads = name == "matmul_all_to_all"
            input, grad = case.whole(1, hidden), case.whole(2, columns)
            input = (input[own] if to_heads else input[..., heads]).clone()
            grad = grad[..., heads] if to_heads else grad[own]
            weight, bias = case.parameters(3, hidden, columns)
            leaves = [
                each if each is None else each.detach().requires_grad_()
                for each in (input, weight, bias)
            ]
            op = getattr(functional, name)
            output = op(leaves[0], leaves[1], bias=leaves[2], length=length, **how)
            (output * grad).sum().backward()
            found[name] = functional.wait(output).detach().clone()
            grads = zip(("input", "weight", "bias"), leaves, strict=True)
            found |= {f"{name} {of}": each.grad for of, each in grads if each is not None}
    return found


def worst(case: ExchangeCase, found: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the largest error of all ranks as a multiple of the bound."""
    world, ratios = len(case.lengths), dict[str, float]()
    every = world * case.columns
    for name, hidden, columns in (
        ("matmul_all_to_all", case.hidden, every),
        ("all_to_all_matmul", every, case.hidden),
    ):
        to_heads = name == "matmul_all_to_all"
        input, grad = case.whole(1, hidden), case.whole(2, columns)
        weight, bias = case.parameters(3, hidden, columns)
        rows, of_rows = input.flatten(0, -2), grad.flatten(0, -2)
        known = {
            name: reference.matmul(rows, weight, case.dtype, bias=bias),
            f"{name} input": reference.matmul(of_rows, weight.T, case.dtype),
        }
        for rank, made in enumerate(found):
            each = len(rows) // max(1, sum(case.lengths))
            begin = each * sum(case.lengths[:rank])
            own = slice(begin, begin + each * case.lengths[rank])
            heads = slice(rank * case.columns, (rank + 1) * case.columns)
            known |= {f"{name} weight": reference.matmul(rows[own].T, of_rows[own], case.dtype)}
            if bias is not None:
                ones = torch.ones(1, len(of_rows[own]), dtype=case.dtype)
                known[f"{name} bias"] = reference.matmul(ones, of_rows[own], case.dtype)
            for what, (value, bound) in known.items():
                tokens = what == ("all_to_all_matmul" if not to_heads else f"{name} input")
                whole = what.endswith(("weight", "bias"))
                part = (slice(None),) if whole else (own,) if tokens else (slice(None), heads)
                given = made[what].reshape(value[part].shape)
                ratio = reference.worst_ratio(given, value[part], bound[part])
                ratios[what] = max(ratios.get(what, 0.0), ratio)
    return ratios


def turned(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply an embedding of positions to tensors of layout "sbhd"."""
    at = positions.to(q.dtype).view(-1, 1, 1, 1) / 10
    return q * at.cos() + q.flip(-1) * at.sin(), k * at.cos() + k.flip(-1) * at.sin()


def layered(
    lengths: tuple[int, ...], heads: tuple[int, int], algorithm: str, layout: str, balance: str
) -> float:
    """Return the largest error of the layer's output and of its gradients, summed over ranks."""
    rank, size = interlace.get_rank(), 8
    torch.manual_seed(0)
    options: Any = {"layout": layout, "balance": balance, "algorithm": algorithm, "causal": True}
    layer = nn.UlyssesAttention(20, *heads, size, True, True, **options)
    whole, grad = torch.randn(sum(lengths), 2, 20), torch.randn(sum(lengths), 2, 20)
    places = nn.functional.positions_of_ranks(lengths, balance=balance)  # type: ignore[arg-type]
    own = places[sum(lengths[:rank]) : sum(lengths[: rank + 1])]

    def laid(tokens: torch.Tensor) -> torch.Tensor:
        return tokens if layout == "sbhd" else tokens.transpose(0, 1)

    def rotary(q: torch.Tensor, k: torch.Tensor, at: torch.Tensor) -> Any:
        return [laid(each) for each in turned(laid(q), laid(k), at)]

    input = laid(whole[own]).clone().requires_grad_()
    output = layer(input, lengths=lengths, rotary=rotary)
    (output * laid(grad[own])).sum().backward()
    wide = layer.double()
    x = whole.double().requires_grad_()
    q, k, v = (each(x).unflatten(-1, (-1, size)) for each in (wide.q, wide.k, wide.v))
    q, k = turned(q, k, torch.arange(sum(lengths)))  # type: ignore[misc]
    by_head = [each.permute(1, 2, 0, 3) for each in (q, k, v)]
    attended = F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
    right = wide.out(attended.permute(2, 0, 1, 3).flatten(-2))
    parameters = list(wide.parameters())
    of_x, *grads = torch.autograd.grad((right * grad).sum(), [x, *parameters])
    errors = [laid(output) - right[own], laid(input.grad) - of_x[own]]
    for parameter, expected in zip(parameters, grads, strict=True):
        assert parameter.grad is not None
        total = parameter.grad.clone()
        interlace.all_reduce(total)
        errors.append(total - expected)
    return max(float(each.detach().abs().max()) for each in errors if each.numel())
