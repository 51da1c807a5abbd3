"""nn.MoE on simulated ranks: the layer, its gradients, state and statistics, beside a dense one."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import interlace
from interlace import nn
from ranks import ranks
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
    """Send every token through its experts, by the whole parameters."""

    def between(y: torch.Tensor) -> torch.Tensor:
        if not options.get("gated"):
            return F.silu(y)
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    logits = x.float() @ state["router"].float().t()
    sigmoid = options.get("scoring") == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    chosen = torch.tensor([best(line, state, options) for line in scores.tolist()])
    chosen = chosen.view(-1, TOPK).to(torch.int64)
    weights = scores.gather(1, chosen)
    if options.get("normalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * options.get("scale", 1.0) * stays(chosen, weights, options)
    hidden = between(torch.einsum("th,tkfh->tkf", x, state["up"][chosen]))
    output = torch.einsum("tk,tkf,tkhf->th", weights.double(), hidden, state["down"][chosen])
    if "shared_up" in state:
        output = output + between(x @ state["shared_up"].t()) @ state["shared_down"].t()
    return output


def best(scores: list[float], state: dict[str, torch.Tensor], options: dict[str, Any]) -> list[int]:
    bias = state["expert_bias"].tolist() if "expert_bias" in state else [0.0] * EXPERTS
    ranked = [score + more for score, more in zip(scores, bias, strict=True)]
    groups = options.get("groups", 1)
    each = EXPERTS // groups
    sums = {g: sum(sorted(ranked[g * each : (g + 1) * each])[-2:]) for g in range(groups)}
    taken = sorted(sums, key=lambda g: -sums[g])[: options.get("topk_groups", groups)]
    return sorted((e for e in range(EXPERTS) if e // each in taken), key=lambda e: -ranked[e])[
        :TOPK
    ]


def stays(chosen: torch.Tensor, weights: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Return 1 for rows that are not dropped."""
    kept, factor = torch.ones_like(weights), options.get("capacity_factor")
    if factor is None:
        return kept
    capacity = -(-chosen.numel() * factor // EXPERTS)
    for expert in range(EXPERTS):
        rows = (chosen == expert).nonzero().tolist()
        if options.get("drop", "probs") == "probs":
            rows.sort(key=lambda row: -weights[row[0], row[1]].item())
        for token, slot in rows[int(capacity) :]:
            kept[token, slot] = 0
    return kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gated": True, "shared_size": SHARED, "scoring": "sigmoid"},
        {"normalize": False, "shared_size": SHARED, "algorithm": "pipelined"},
        {"scoring": "sigmoid", "expert_bias": True, "groups": 3, "topk_groups": 2, "scale": 2.5},
        {"expert_bias": True, "capacity_factor": 0.8, "gated": True},
        {"capacity_factor": 0.5, "drop": "position", "normalize": False},
        {"capacity_factor": 9.0},
        {"num_max_dispatch_tokens_per_rank": 8, "gated": True, "expert_bias": True},
        {"num_max_dispatch_tokens_per_rank": 7, "capacity_factor": 0.7, "algorithm": "pipelined"},
    ],
)
@ranks(3, place="sim")
def test_as_one_process(options: dict[str, Any]) -> None:
    rank, layer = interlace.get_rank(), made(**options)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(torch.linspace(-0.3, 0.4, EXPERTS))
    whole = {name: each.clone() for name, each in nn.full_state_dict(layer).items()}
    for name, each in whole.items():
        each.requires_grad_(name != "expert_bias")
    x, xs = tokens(rank).requires_grad_(), [tokens(r).requires_grad_() for r in range(3)]
    output = layer(x.unsqueeze(0)).squeeze(0)
    outputs = [dense(each, whole, options) for each in xs]
    torch.stack([(y * y).sum() for y in outputs]).sum().backward()
    (output * output).sum().backward()
    pairs = {"output": (output, outputs[rank]), "x": (x.grad, xs[rank].grad)}
    for name, parameter in layer.named_parameters():
        exact = parameter.sharding.local(whole[name].grad)  # type: ignore[attr-defined]
        pairs[name] = parameter.grad, exact
    for name, (own, right) in pairs.items():
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)  # type: ignore[misc]


@ranks(3, place="sim")
def test_fused() -> None:
    torch.manual_seed(0)
    layer = nn.MoE(HIDDEN, INNER, EXPERTS, TOPK, gated=True, algorithm="fused")
    whole = {name: each.double() for name, each in nn.full_state_dict(layer).items()}
    x = tokens(interlace.get_rank()).float()
    with torch.no_grad():
        assert float((layer(x) - dense(x.double(), whole, {"gated": True})).abs().sum()) < 1e-5


def test_state_and_draws_are_those_of_any_number_of_ranks() -> None:
    def on_rank() -> dict[str, torch.Tensor]:
        layer, after = made(shared_size=SHARED), torch.rand(1)
        state = {name: each.clone() for name, each in nn.full_state_dict(layer).items()}
        layer.load_state_dict({name: each + 1 for name, each in state.items()})
        again = nn.full_state_dict(layer)
        assert all(torch.equal(again[name], state[name] + 1) for name in state)
        return {**state, "drawn next": after}

    one, three = (interlace.run(on_rank, count)[0] for count in (1, 3))
    assert one.keys() == three.keys() and one["up"].shape == (EXPERTS, INNER, HIDDEN)
    assert all(torch.equal(one[name], three[name]) for name in one)


@ranks(3, place="sim")
def test_load_balance() -> None:
    layer = made()
    with pytest.raises(RuntimeError, match="no forward"):
        layer.load_balance()
    layer(tokens(interlace.get_rank()))
    counts, loss = layer.load_balance()
    loss.backward()
    assert layer.router.grad is not None
    copy.deepcopy(layer)  # as FSDP's users do
    router = nn.full_state_dict(layer)["router"].float()
    scores = (torch.cat([tokens(r) for r in range(3)]).float() @ router.t()).softmax(-1)
    expected = torch.bincount(scores.topk(TOPK)[1].flatten(), minlength=EXPERTS)
    assert torch.equal(counts, expected)
    total = loss.detach().clone()
    interlace.all_reduce(total)
    whole = EXPERTS * (counts / counts.sum() * scores.mean(0)).sum()
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)


@ranks(3, place="sim")
def test_a_bias_evens_experts_out() -> None:
    """All ranks take equal steps though their tokens differ, and a cast does not change the bias."""
    layer, x = made(expert_bias=True), tokens(interlace.get_rank()) + 0.5
    layer.eval()(x)
    assert not layer._chosen.any(), "counted without training"
    layer.train()
    for _ in range(2):
        layer(x)  # accumulated
    counts = layer.load_balance().tokens_per_expert
    mean = counts.sum() / EXPERTS
    layer.update_expert_bias(0.25)
    steps = 0.25 * (mean - counts).sign()
    torch.testing.assert_close(layer.expert_bias, steps - steps.mean())
    unevenness = []
    for _ in range(20):
        layer(x)
        unevenness.append(float((layer.load_balance().tokens_per_expert - mean).abs().sum()))
        layer.update_expert_bias(0.05)
    assert min(unevenness) < unevenness[0] / 2
    assert layer.to(torch.bfloat16).expert_bias.dtype is torch.float32
    whole = nn.full_state_dict(layer)
    assert "_chosen" not in whole
    every: list[Any] = [None] * 3
    interlace.all_gather_object(every, [counts, unevenness, whole["expert_bias"].tolist()])
    assert all(each[1:] == every[0][1:] and torch.equal(each[0], counts) for each in every)


@ranks(1, place="sim")
def test_autocast_leaves_the_router_in_fp32() -> None:
    layer, x = made().float(), tokens(2).float()
    layer(x)
    chosen, share = layer._routed
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert torch.equal(chosen, layer._routed[0]) and torch.equal(share, layer._routed[1])


@pytest.mark.parametrize(
    ("rate", "kind", "text"),
    [
        ("x", TypeError, "rate must be a number, got 'x'"),
        (float("nan"), ValueError, "rate must be finite, got nan"),
    ],
)
@pytest.mark.parametrize("wrong", [(1,), (0, 1)])
@ranks(place="sim")
def test_a_rate_that_is_none_is_refused_by_all_ranks(
    wrong: tuple[int, ...], rate: Any, kind: Any, text: str
) -> None:
    layer = made(expert_bias=True)
    layer(tokens(2))
    with pytest.raises(kind, match=text) as error:
        layer.update_expert_bias(rate if interlace.get_rank() in wrong else 0.25)
    assert "rank" in str(error.value)
    assert not layer.expert_bias.any() and layer._chosen.any()
    layer.update_expert_bias(0.25)  # the group goes on
    assert layer.expert_bias.any()


@ranks(1, place="sim")
def test_a_layer_without_a_bias_says_so() -> None:
    with pytest.raises(RuntimeError, match="no expert_bias"):
        made().update_expert_bias()


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("num_experts must be a positive multiple of the group's size 2, got 3", (8, 4, 3, 1)),
        ("topk is 5, it must be at most num_experts, 4", (8, 4, 4, 5)),
        ("hidden_size must be positive, got 0", (0, 4, 4, 1)),
        ("activation must be None or one of", (8, 4, 4, 1, "swish")),
        ("num_experts 4 must be a multiple of groups, got 3", (8, 4, 4, 1, {"groups": 3})),
        ("topk is 3, topk_groups is 1 of 2", (8, 4, 4, 3, {"groups": 2, "topk_groups": 1})),
        ("capacity_factor must be positive", (8, 4, 4, 1, {"capacity_factor": 0.0})),
        ("scale must be a number, got None", (8, 4, 4, 1, {"scale": None})),
        ("capacity_factor must be positive", (8, 4, 4, 1, {"capacity_factor": "1"})),
        ("tokens_per_rank must be positive", (8, 4, 4, 1, {"num_max_dispatch_tokens_per_rank": 0})),
        ("drop must be one of probs, position", (8, 4, 4, 1, {"drop": "last"})),
    ],
)
def test_misuse(text: str, given: tuple[Any, ...]) -> None:
    *sizes, more = given if isinstance(given[-1], dict) else (*given, {})
    assert text in str(failure(lambda: nn.MoE(*sizes, **more), 2))


OTHERWISE: dict[str, Any] = {
    "activation": "relu", "gated": True, "shared_size": 4, "scoring": "sigmoid", "normalize": False,
    "scale": 2.0, "groups": 2, "expert_bias": True, "capacity_factor": 2.0, "drop": "position",
    "sequence_parallel": False,
}  # fmt: skip


@pytest.mark.parametrize("bound", [None, 2])
@pytest.mark.parametrize("name", OTHERWISE)
@ranks(place="sim")
def test_ranks_whose_layers_differ_are_told(name: str, bound: int | None) -> None:
    """Otherwise a sum would mix two kinds of layers, or a backward would wait."""
    options = {name: OTHERWISE[name]} if interlace.get_rank() == 1 else {}
    with pytest.raises(ValueError, match=f"{name} of MoE differs between ranks"):
        made(num_max_dispatch_tokens_per_rank=bound, **options)(tokens(0)[:2])
    assert len(made(num_max_dispatch_tokens_per_rank=bound)(tokens(0)[:2])) == 2


@ranks(place="sim")
def test_a_router_that_learns_on_some_ranks_only_is_refused() -> None:
    """With a bound, the gradients of experts do not show the difference, and backward would wait."""
    layer = made(num_max_dispatch_tokens_per_rank=2)
    layer.router.requires_grad_(interlace.get_rank() == 0)
    text = "list of MoE parameters with gradients differs between ranks: router on rank 0, None on rank 1"
    with pytest.raises(ValueError, match=text):
        layer(tokens(0)[:2].requires_grad_())


def test_features_must_fit() -> None:
    assert "input must have 8 features" in str(failure(lambda: made()(torch.ones(2, 4)), 2))


@pytest.mark.parametrize(
    "name", ["algorithm", "gated", "normalize", "expert_bias", "sequence_parallel"]
)
@ranks(place="sim")
def test_the_constructor_refuses_what_forward_could_not_take(name: str) -> None:
    x, layer = torch.ones(1, 4), None if interlace.get_rank() else nn.MoE(4, 8, 2, 1)
    text = "algorithm must be one of" if name == "algorithm" else f"{name} must be a bool, got 'no'"
    with pytest.raises((TypeError, ValueError), match=text) as error:
        nn.MoE(4, 8, 2, 1, **{name: "no"}) if layer is None else layer(x)
    assert "rank 1" in str(error.value)
    torch.manual_seed(0)  # rank 0 has made a layer more
    assert nn.MoE(4, 8, 2, 1, algorithm="fused", normalize=False)(x).shape[1] == 4
