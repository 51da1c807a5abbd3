"""nn.MoE on simulated ranks: the layer, its gradients, state and statistics, beside a dense one."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import interlace
from interlace import nn
from support import failure

HIDDEN, INNER, EXPERTS, TOPK, SHARED = 8, 12, 6, 2, 5
TOKENS = [4, 0, 7]


def made(**options: Any) -> nn.MoE:
    torch.manual_seed(0)  # the same on all ranks
    return nn.MoE(HIDDEN, INNER, EXPERTS, TOPK, dtype=torch.float64, **options)


def tokens(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64)


def dense(x: torch.Tensor, state: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """Every token through its experts, by the whole parameters."""

    def between(y: torch.Tensor) -> torch.Tensor:
        if not options.get("gated"):
            return F.silu(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    logits = x.float() @ state["router"].float().t()
    sigmoid = options.get("scoring") == "sigmoid"
    weights, chosen = (logits.sigmoid() if sigmoid else logits.softmax(-1)).topk(TOPK)
    if options.get("normalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    hidden = between(torch.einsum("th,tkfh->tkf", x, state["up"][chosen]))
    output = torch.einsum("tk,tkf,tkhf->th", weights.double(), hidden, state["down"][chosen])
    if "shared_up" in state:
        output = output + between(x @ state["shared_up"].t()) @ state["shared_down"].t()
    return output


def compared(options: dict[str, Any]) -> list[str]:
    """What differs on this rank from one process that has all tokens."""
    rank, layer = interlace.get_rank(), made(**options)
    whole = {name: each.clone() for name, each in nn.full_state_dict(layer).items()}
    for each in whole.values():
        each.requires_grad_()
    x, xs = tokens(rank).requires_grad_(), [tokens(r).requires_grad_() for r in range(3)]
    output = layer(x.unsqueeze(0)).squeeze(0)
    outputs = [dense(each, whole, options) for each in xs]
    sum((y * y).sum() for y in outputs).backward()  # type: ignore[union-attr]
    (output * output).sum().backward()
    pairs = {"output": (output, outputs[rank]), "x": (x.grad, xs[rank].grad)}
    for name, parameter in layer.named_parameters():
        exact = whole[name].grad
        assert exact is not None
        pairs[name] = parameter.grad, parameter.sharding.local(exact)  # type: ignore[attr-defined]
    return [
        name
        for name, (mine, exact) in pairs.items()
        if mine is None or exact is None or not torch.allclose(mine, exact, rtol=1e-5, atol=1e-6)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": True, "shared_size": SHARED, "scoring": "sigmoid"},
        {"normalize": False, "shared_size": SHARED, "algorithm": "pipelined"},
    ],
)
def test_as_one_process(options: dict[str, Any]) -> None:
    assert interlace.run(compared, 3, options) == [[]] * 3


def test_fused() -> None:
    def on_rank() -> float:
        torch.manual_seed(0)
        layer = nn.MoE(HIDDEN, INNER, EXPERTS, TOPK, gated=True, algorithm="fused")
        whole = nn.full_state_dict(layer)
        x = tokens(interlace.get_rank()).float()
        with torch.no_grad():
            expected = dense(x.double(), {k: v.double() for k, v in whole.items()}, {"gated": True})
            return float((layer(x) - expected).abs().sum())

    assert max(interlace.run(on_rank, 3)) < 1e-5


def test_state_and_draws_are_those_of_any_number_of_ranks() -> None:
    def whole(ranks: int) -> Any:
        def on_rank() -> Any:
            layer = made(shared_size=SHARED)
            state, after = nn.full_state_dict(layer), torch.rand(1)
            state = {name: each.clone() for name, each in state.items()}
            layer.load_state_dict({name: each + 1 for name, each in state.items()})
            again = nn.full_state_dict(layer)
            assert all(torch.equal(again[name], state[name] + 1) for name in state)
            return {**state, "drawn next": after}

        return interlace.run(on_rank, ranks)[0]

    one, three = whole(1), whole(3)
    assert one.keys() == three.keys() and one["up"].shape == (EXPERTS, INNER, HIDDEN)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_load_balance() -> None:
    def on_rank() -> Any:
        layer = made()
        with pytest.raises(RuntimeError, match="no forward"):
            layer.load_balance()
        layer(tokens(interlace.get_rank()))
        counts, loss = layer.load_balance()
        loss.backward()
        assert layer.router.grad is not None
        copy.deepcopy(layer)  # as FSDP's users do
        return counts.tolist(), loss.item(), nn.full_state_dict(layer)["router"]

    results = interlace.run(on_rank, 3)
    router = results[0][2].float()
    scores = (torch.cat([tokens(r) for r in range(3)]).float() @ router.t()).softmax(-1)
    chosen = scores.topk(TOPK)[1].flatten()
    counts = torch.bincount(chosen, minlength=EXPERTS)
    assert [each[0] for each in results] == [counts.tolist()] * 3
    loss = EXPERTS * (counts / counts.sum() * scores.mean(0)).sum()
    assert sum(each[1] for each in results) == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("num_experts must be a positive multiple of the group's size 2, got 3", (8, 4, 3, 1)),
        ("topk is 5, there are 4 experts", (8, 4, 4, 5)),
        ("hidden_size must be positive, got 0", (0, 4, 4, 1)),
        ("activation must be None or one of", (8, 4, 4, 1, "swish")),
    ],
)
def test_misuse(text: str, given: tuple[Any, ...]) -> None:
    assert text in str(failure(lambda: nn.MoE(*given), 2))


def test_features_must_fit() -> None:
    assert "input must have 8 features" in str(failure(lambda: made()(torch.ones(2, 4)), 2))
