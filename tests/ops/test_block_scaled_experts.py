"""The functional forms of the experts' ops on block-scaled operands: as the eager ones, also in a graph."""

from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from interlace.ops.matmul.formats import FORMATS, quantize
from ranks import ranks
from tiers import few

Tensor = torch.Tensor
INNER, COLUMNS = 160, 20


def made(name: Any, *shape: int, seed: int) -> Any:
    return quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), name)


def weights(name: Any, count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(count, COLUMNS, INNER, generator=generator), name, weight=True).t()


def same(found: Any, right: Any) -> None:
    found, right = functional.wait(found), functional.wait(right)
    assert torch.equal(found, right)


def exchanges(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    experts = 2 * size
    w, sent = weights(name, 2, 20 + rank), [1 + (rank + e) % 2 for e in range(experts)]
    x = made(name, sum(sent), INNER, seed=rank)
    received, right, splits = interlace.all_to_all_grouped_matmul(x, w, sent, return_received=True)  # type: ignore[misc]
    lengths = splits.flatten().tolist()
    exchange: Any = functional.all_to_all_grouped_matmul
    rows, output = exchange(x, w, sent, lengths, return_received=True)
    same(output, right)
    same(exchange(x, w, sent, lengths), right)
    assert rows.format == name
    assert torch.equal(rows.dequantize(), received.dequantize())
    every, sent_to = weights(name, 2, 7), [1 + rank, 2]
    shard = made(name, sum(sent_to), INNER, seed=5 + rank)
    right, splits = interlace.all_gather_grouped_matmul(shard, every, sent_to)  # type: ignore[misc]
    gather: Any = functional.all_gather_grouped_matmul
    same(gather(shard, every, sent_to, splits.flatten().tolist()), right)


def dispatches(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    experts, tokens = 2 * size, (5, 3)[rank]
    x, w = made(name, tokens, INNER, seed=rank), weights(name, 2, 20 + rank)
    chosen = (torch.arange(tokens)[:, None] + torch.tensor([rank, rank + size])) % experts
    share = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(rank))
    combine: Any = functional.grouped_matmul_combine
    for most in (None, 5):
        given, how = (x, chosen, share, experts), {"num_max_dispatch_tokens_per_rank": most}
        eager, handle = interlace.experts.dispatch(*given, **how)  # type: ignore[arg-type]
        rows: Any = eager.x
        right = interlace.grouped_matmul_combine(rows, w, handle)
        received, handle = functional.dispatch(*given, **how)  # type: ignore[arg-type]
        found: Any = received.x
        assert found.format == name
        assert found.shape == rows.shape
        assert torch.equal(found.dequantize(), rows.dequantize())
        same(combine(found, w, handle), right)
    rows, sent = interlace.experts.permute(torch.ones(tokens, INNER), chosen, experts)
    hidden, splits = interlace.all_to_all_grouped_matmul(
        quantize(rows, name),  # type: ignore[arg-type]
        w,
        sent,
        return_received=True,
    )[::2]  # type: ignore[index]
    right = interlace.grouped_matmul_combine(hidden, w, splits, chosen, share)
    lengths = {"home_splits": sent.tolist(), "splits": splits.flatten().tolist()}
    same(combine(hidden, w, topk_idx=chosen, topk_weights=share, **lengths), right)


@pytest.mark.parametrize("form", [exchanges, dispatches])
@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
def test_as_the_eager_ones(form: Any, name: str) -> None:
    interlace.run(form, 2, name)


def compiled(name: str) -> None:
    """A graph of one rank: simulated ranks cannot all trace at once."""
    w = weights(name, 2, 1)
    chosen, share = torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.rand(3, 2)

    def layer(x: Tensor) -> Any:
        quantized: Any = quantize(x, name)  # type: ignore[arg-type]
        how: Any = {"num_max_dispatch_tokens_per_rank": 3}
        received, handle = functional.dispatch(quantized, chosen, share, 2, **how)
        rows: Any = received.x
        combined = functional.grouped_matmul_combine(rows, w, handle)
        exchanged = functional.all_to_all_grouped_matmul(quantized, w, [1, 2], [1, 2])
        return functional.wait(combined), functional.wait(exchanged)  # type: ignore[arg-type]

    x = torch.randn(3, INNER)
    for found, right in zip(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x), layer(x), strict=True
    ):
        assert torch.equal(found, right)


@pytest.mark.parametrize("name", few(tuple(FORMATS), "nvfp4"))
def test_in_a_graph(name: str) -> None:
    interlace.run(compiled, 1, name)


@ranks(2, place="sim")
def test_wrong_operands_are_refused_on_all_ranks() -> None:
    first = interlace.get_rank() == 0
    x, w = made("mxfp8", 2, INNER, seed=0), weights("mxfp8", 1, 1)
    other = weights("mxfp4", 1, 1)
    exchange: Any = functional.all_to_all_grouped_matmul
    with pytest.raises(ValueError, match="input is in mxfp8, weight in mxfp4"):
        exchange(x, other if first else w, [1, 1], [1, 1])
    with pytest.raises(ValueError, match=r"x must be \(tokens, hidden\), its blocks along hidden"):
        functional.dispatch(x.t() if first else x, torch.zeros(2, 1, dtype=torch.long), None, 2)


@ranks(2, place="sim")
def test_weights_of_tokens_learn() -> None:
    """The gradient of a token's weight is its row's product with the gradient of the sum."""
    rank = interlace.get_rank()
    x, w = made("mxfp8", 2, INNER, seed=rank), weights("mxfp8", 1, 3 + rank)
    chosen, grad = torch.tensor([[0], [1]]), torch.randn(2, COLUMNS)
    received, handle = interlace.experts.dispatch(x, chosen, torch.ones(2, 1), 2)
    rows: Any = received.x
    how: Any = {"out_dtype": torch.float32}
    given = rows, w, handle, chosen
    for form in (interlace, functional):
        share = torch.ones(2, 1, requires_grad=True)
        alone: Any = functional.wait(form.grouped_matmul_combine(*given, torch.ones(2, 1), **how))
        found: Any = form.grouped_matmul_combine(*given, share, **how)
        same(found, alone)
        found.backward(grad)
        torch.testing.assert_close(share.grad, (alone * grad).sum(1, keepdim=True))
