"""Attention over a sharded sequence on simulated ranks: results, bits, gradients, misuse."""

import itertools
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import interlace
from cases.attention_cases import ALGORITHMS, METHODS, AttentionCase, attend, check, ratios, visible
from interlace import nn, reference
from interlace.ops.attention.problem import AttentionReference
from mutants.mutations import mutant_of, mutated
from ranks import ranks
from sim.api.refusals import ByRank, both, check_refused
from support import poisoned, slow_rank, starved
from tiers import few, thorough

EVEN = AttentionCase((6, 6, 6))
UNEVEN = AttentionCase((19, 0, 34), heads=(3, 1), size=20, layout="sbhd", scale=0.3)
WINDOW = AttentionCase(
    (20, 41, 7), (2, 2), causal=False, balance="contiguous", window=(9, 3), copiers=0
)
PACKED = AttentionCase((20, 33, 10), causal=True, cu_seqlens=(0, 5, 5, 40, 58), batch=1)
LATENT = AttentionCase((19, 0, 14), heads=(2, 1), size=24, value_size=16, batch=1, copiers=0)
LARGER = AttentionCase(
    (6, 13), (2, 1), 8, value_size=20, causal=False, window=(5, 3), layout="sbhd"
)
WIDE = AttentionCase((18, 18), size=80, dtype=torch.bfloat16, tiles=(32, 16))
CASES = {"even": EVEN, "uneven": UNEVEN, "window": WINDOW, "packed": PACKED, "wide": WIDE}


WAYS = tuple(itertools.product(METHODS, ALGORITHMS))
KEPT = ("all_gather", "pipelined"), ("ring", "fused"), ("ulysses", "unfused")
BY_TORCH = [
    *(("uneven", method, "pipelined") for method in METHODS),
    ("packed", "all_gather", "unfused"),
    ("packed", "ulysses", "unfused"),
    ("uneven", "ulysses", "unfused"),
    ("window", "ring", "pipelined"),
    ("wide", "ring", "unfused"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_whole_sequence(name: str, method: str) -> None:
    with poisoned() as done:
        check(CASES[name], method, "fused")
    assert done["workspaces"]


@pytest.mark.parametrize(("name", "method", "algorithm"), BY_TORCH)
def test_torch_agrees_with_the_whole_sequence(name: str, method: str, algorithm: str) -> None:
    with poisoned():
        check(CASES[name], method, algorithm)


@pytest.mark.parametrize(("method", "algorithm"), KEPT)
def test_values_of_another_head_size(method: str, algorithm: str) -> None:
    """DeepSeek's latent attention has larger keys than values."""
    with poisoned():
        for case in (LATENT, LARGER):
            check(case, method, algorithm)


@thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_case_by_every_way(dtype: torch.dtype) -> None:
    cases = *CASES.values(), LATENT, LARGER
    for case, (method, algorithm) in itertools.product(cases, WAYS):
        if dtype != torch.float64 or algorithm != "fused":
            check(replace(case, dtype=dtype), method, algorithm)


WHOLE = AttentionCase((50, 38), (2, 1), 20, batch=1, dtype=torch.float16, balance="contiguous")
SOME_WHOLE = {
    "causal": WHOLE,
    "zigzag": replace(WHOLE, lengths=(70, 51), heads=(1, 1), balance="zigzag", size=16),
    "window": replace(WHOLE, heads=(1, 1), causal=False, window=(40, 25), size=16),
    "negative": replace(WHOLE, heads=(1, 1), scale=-0.3),
    "many": AttentionCase((600,), (1, 1), 16, batch=1, causal=False, window=(20, 9)),
}


TILED = [(name, method) for name in SOME_WHOLE for method in METHODS]
FIRST = [(name, "all_gather") for name in SOME_WHOLE]


@pytest.mark.parametrize(("name", "method"), few(TILED, *FIRST))
def test_tiles_that_all_rows_see_whole(name: str, method: str) -> None:
    """Such tiles have no masks. Heads of 20 use pointers, and heads of 16 use descriptors."""
    with poisoned():
        check(SOME_WHOLE[name], method, "fused")


_BOUNDS = "return first * TILES.BLOCK_N, start * TILES.BLOCK_N, stop * TILES.BLOCK_N, end"
_SETS = "sets = tl.cdiv(sums.rows, TILES.BLOCK_M * _SET)"


TOO_MANY = [
    ("causal", _BOUNDS, _BOUNDS.replace("stop *", "(stop + 1) *"), ("output", "query")),
    ("window", _BOUNDS, _BOUNDS.replace("start *", "(start - 1) *"), ("output", "query")),
    ("negative", "tl.where(scale > 0, tl.min(high), 0)", "tl.min(high)", ("output",)),
    ("causal", "tl.min(high, 1) > last", "tl.max(high, 1) > last", ("key", "value")),
    ("window", "tl.max(low, 1) <= first", "tl.min(low, 1) <= first", ("key", "value")),
    ("many", _SETS, "sets = 1", ("key", "value")),
]


@pytest.mark.parametrize(("name", "old", "new", "wrong"), few(TOO_MANY, TOO_MANY[0], TOO_MANY[3]))
def test_control_tiles_without_masks_that_want_some(
    name: str, old: str, new: str, wrong: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    file = f"kernels/attention/{'backward' if 'key' in wrong else 'tiles'}.py"
    mutant = mutant_of(file, f"too many whole, {name}", (old, new))
    case = SOME_WHOLE[name]
    # With a negative scale the scores are so far apart that weights relative to the least of them overflow.
    case = replace(case, heads=(1, 1), size=16, scale=case.scale and 20 * case.scale)
    with mutated(mutant, tmp_path):
        found = interlace.run(attend, len(case.lengths), case, "all_gather", "fused")
    worst = ratios(case, found)
    assert not any(worst[each] <= 1 for each in wrong), worst


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    """torch's attention fills masked scores with -inf before it scales them."""
    case = AttentionCase((5, 0, 4), heads=(2, 1), size=8, batch=1, scale=scale)
    for method, algorithm in KEPT:
        check(case, method, algorithm)


def test_methods_and_schedules_have_the_same_bits() -> None:
    """Partial results are merged in the order of ranks, not in the order of arrival."""
    case = AttentionCase((5, 16, 9), heads=(1, 1), batch=1)
    first = interlace.run(attend, 3, case, "all_gather", "fused", seed=0)
    again = [interlace.run(attend, 3, case, method, "fused", seed=5) for method in METHODS]
    with starved(slow_rank(1)):
        again.append(interlace.run(attend, 3, case, "all_gather", "fused", seed=1))
    again.append(interlace.run(attend, 3, replace(case, copiers=0), "all_gather", "fused", seed=2))
    for number, found in enumerate(again):
        # a ring adds gradients of keys step by step, "ulysses" for all queries at once
        own = METHODS[number] in ("ring", "ulysses") if number < len(METHODS) else False
        for mine, other in zip(first, found, strict=True):
            assert all(map(torch.equal, mine[: 3 if own else 5], other))
    for method in ("ring", "ulysses"):
        with starved(slow_rank(2)):
            late = interlace.run(attend, 3, case, method, "fused", seed=3)
        for mine, other in zip(again[METHODS.index(method)], late, strict=True):
            assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("value_size", [8, 5])
def test_the_reference_is_torch_s(value_size: int) -> None:
    query, key, value, grad = (
        torch.randn(1, 2, 9, size, dtype=torch.float64) for size in (8, 8, value_size, value_size)
    )
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    for mask in (visible(9, causal=True), visible(9, window=(2, 1))):
        known = AttentionReference(query, key, value, mask, 8**-0.5)
        right = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        torch.testing.assert_close(known.output()[0], right.detach())
        grads = torch.autograd.grad(right, leaves, grad)
        torch.testing.assert_close(tuple(each for each, _ in known.gradients(grad)), grads)


TINY = AttentionCase((17, 16), heads=(2, 1), size=32, batch=1, dtype=torch.float16, scale=3.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_that_fp16_has_few_bits_for_fit_the_bound(algorithm: str) -> None:
    check(TINY, "all_gather", algorithm)


def test_a_kernel_that_drops_such_weights_or_a_key_is_beyond_the_bound() -> None:
    query, key, value, grad = (each.transpose(1, 2) for each in (*TINY.tensors(), TINY.grads()[0]))
    mask = visible(33, causal=True)
    known = AttentionReference(query, key, value, mask, 3.0)
    right, bound = known.gradients(grad)[2]
    normal = torch.where(known.weight < torch.finfo(torch.float16).smallest_normal, 0, known.weight)
    dropped = (normal.mT @ grad.double()).sum(1, keepdim=True)
    assert reference.worst_ratio(dropped, right, bound) > 1
    assert known.weight[0, :, 19, 14].max() < 0.01
    mask[19, 14] = False
    wrong = AttentionReference(query, key, value, mask, 3.0).gradients(grad)
    for made, (exact, allowed) in zip(wrong, known.gradients(grad), strict=True):
        assert reference.worst_ratio(made[0], exact, allowed) > 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@ranks(3, place="sim")
def test_gradients_of_the_logarithms(algorithm: Any) -> None:
    """The reference is autograd of the plain formula; both results are differentiable."""
    query, key, value = (each.double().requires_grad_() for each in EVEN.tensors())
    heads = [each.transpose(1, 2) for each in (query, key, value)]
    score = heads[0] @ heads[1].repeat_interleave(2, 1).mT / 4
    score = score.masked_fill(~visible(18, causal=True), float("-inf"))
    output = (score.softmax(-1) @ heads[2].repeat_interleave(2, 1)).transpose(1, 2)
    grad, of_lse = EVEN.grads()
    ((output * grad).sum() + (score.logsumexp(-1) * of_lse).sum()).backward()
    own = [nn.functional.shard_sequence(each).requires_grad_() for each in EVEN.tensors()]
    options: dict[str, Any] = {"causal": True, "method": "all_gather", "algorithm": algorithm}
    output, lse = nn.functional.context_parallel_attention(*own, return_lse=True, **options)
    wanted = nn.functional.shard_sequence(grad), nn.functional.shard_sequence(of_lse, 2)
    ((output * wanted[0]).sum() + (lse * wanted[1]).sum()).backward()
    for mine, whole in zip(own, (query, key, value), strict=True):
        assert mine.grad is not None and whole.grad is not None
        right = nn.functional.shard_sequence(whole.grad)
        torch.testing.assert_close(mine.grad.double(), right, rtol=1e-4, atol=1e-5)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ZEROS, WIDER = zeros(1, 4, 2, 8), zeros(1, 4, 1, 300)
MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"q": ZEROS[0]}, "q must have 4 dimensions"),
    ({"k": zeros(1, 5, 2, 8)}, "v has shape"),
    ({"q": zeros(1, 4, 3, 8)}, "k has 2 heads, which does not divide q's 3"),
    ({"q": ZEROS.double()}, "TypeError: k is torch.float32, q is torch.float64"),
    ({"window": 5}, "TypeError: window must be a list of ints, got 5"),
    ({"window": (1, -2)}, "window must be two numbers of keys, -1 for all"),
    ({"cu_seqlens": torch.tensor([0, 3, 2])}, "cu_seqlens must begin with 0 and not fall"),
    ({"cu_seqlens": both(torch.tensor([0, 9]))}, "cu_seqlens ends at 9, the ranks have 8 tokens"),
    ({"causal": ZEROS}, "TypeError: causal must be a bool, got tensor"),
    ({"causal": ByRank(True, False)}, "causal differs between ranks: True on rank 0"),
    ({"scale": "1"}, "TypeError: scale must be a number or None, got '1'"),
    ({"scale": float("nan")}, "scale must be finite, got nan"),
    ({"return_lse": "x"}, "TypeError: return_lse must be a bool, got 'x'"),
    ({**dict.fromkeys("qkv", both(WIDER)), "algorithm": both("fused")},
     'algorithm="fused" takes heads of at most 256, got 300'),
    ({"v": both(zeros(1, 4, 2, 300)), "algorithm": both("fused")},
     'algorithm="fused" takes heads of at most 256, got 300'),
    ({"v": zeros(1, 4, 8)}, "v must have 4 dimensions (bshd), got shape (1, 4, 8)"),
    ({"v": zeros(1, 4, 2, 0)}, "v has heads of size 0 (shape (1, 4, 2, 0))"),
    ({"k": zeros(1, 4, 2, 9)}, "k has d = 9 (shape (1, 4, 2, 9)), q has d = 8"),
    ({"v": zeros(1, 4, 2, 16)}, "the size of v's heads differs between ranks: 8 on rank 0, 16 on rank 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_is_named_on_all_ranks(changes: dict[str, Any], text: str) -> None:
    call = nn.functional.context_parallel_attention
    right = {**dict.fromkeys("qkv", ZEROS), "algorithm": "unfused"}
    check_refused(call, right, changes, text)


SHARDS: list[tuple[Any, int, list[list[int]]]] = [
    ("zigzag", 12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ("contiguous", 4, [[0, 1], [2], [3]]),
    ("zigzag", 2, [[0], [1], []]),
    ("contiguous", 2, [[0], [1], []]),
]


@ranks(3, place="sim")
def test_shards_of_a_sequence() -> None:
    for balance, total, parts in SHARDS:
        whole = torch.arange(2 * total).view(2, total)
        part = nn.functional.shard_sequence(whole, balance=balance)
        assert part[0].tolist() == parts[interlace.get_rank()]
        assert torch.equal(nn.functional.unshard_sequence(part, balance=balance), whole)
    with pytest.raises(ValueError, match="dim 1 does not exist: there are no dimensions"):
        nn.functional.shard_sequence(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"lengths must not be negative, got \[-1, 2\]"):
        nn.functional.positions_of_ranks([-1, 2])


def ulysses(**options: Any) -> nn.UlyssesAttention:
    return nn.UlyssesAttention(8, 4, 2, **options)


@pytest.mark.parametrize("layer", [nn.ContextParallelAttention, ulysses])
@pytest.mark.parametrize("on", [lambda value: value, both], ids=["one", "both"])
@ranks(2, place="sim")
def test_a_layer_refuses_options_when_it_is_made(layer: Any, on: Callable[[Any], Any]) -> None:
    def made(**options: Any) -> None:
        layer(**options)
        interlace.barrier()  # here a rank gets the error of another's refusal

    wrong: list[tuple[str, Any, str]] = [
        ("layout", "thd", "layout must be one of bshd, sbhd, got 'thd'"),
        ("balance", "even", "balance must be one of zigzag, contiguous, got 'even'"),
        ("algorithm", "kernel", "algorithm must be one of auto, fused, pipelined, unfused, got"),
        ("causal", "x", "TypeError: causal must be a bool, got 'x'"),
        ("window", 3, "TypeError: window must be None or two ints (before, after), got 3"),
        ("scale", float("nan"), "scale must be finite, got nan"),
    ]
    if layer is nn.ContextParallelAttention:
        wrong.append(
            ("method", "x", "method must be one of auto, all_gather, ring, ulysses, got 'x'")
        )
    for name, value, said in wrong:
        check_refused(made, {}, {name: on(value)}, said)


@ranks(2, place="sim")
def test_a_layer_is_the_function() -> None:
    torch.manual_seed(0)
    whole = [torch.randn(1, 10, 2, 8) for _ in range(3)]
    own = [nn.functional.shard_sequence(each) for each in whole]
    layer = nn.ContextParallelAttention(causal=True, window=(4, 0), method="ring")
    assert "ring, causal=True" in repr(layer)
    heads, mask = [each.transpose(1, 2) for each in whole], visible(10, causal=True, window=(4, 0))
    right = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(layer(*own), nn.functional.shard_sequence(right))
