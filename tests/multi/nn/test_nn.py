"""Layers of interlace.nn against the unsharded ones of torch, in float64, over two steps; cross entropy."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import interlace
from cases import linear_cases
from interlace import nn as inn
from interlace.kernels.tiling import split_rows
from interlace.nn import vocabulary
from ranks import ranks
from tiers import few

LENGTH, BATCH, WIDTH, INNER, HEADS, VOCABULARY = 12, 2, 12, 24, 12, 29
WHOLE, SEQUENCE, FEATURES = "whole", "sequence", "features"
F64 = torch.float64


class Projections(nn.Module):
    def __init__(self, kv: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * head_dim, bias=bias, dtype=F64)
        self.k = nn.Linear(WIDTH, kv * head_dim, bias=bias, dtype=F64)
        self.v = nn.Linear(WIDTH, kv * head_dim, bias=bias, dtype=F64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.q(x), self.k(x), self.v(x)


class GatedMLP(nn.Module):
    def __init__(self, activation: str, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = getattr(nn.functional, activation)
        self.gate = nn.Linear(WIDTH, INNER, bias=bias, dtype=F64) if gated else None
        self.up = nn.Linear(WIDTH, INNER, bias=bias, dtype=F64)
        self.down = nn.Linear(INNER, WIDTH, bias=bias, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@dataclass
class LayerCase:
    """``layer`` and ``reference`` make modules; ``takes`` and ``gives`` name the part of a rank."""

    layer: Callable[..., nn.Module]
    reference: Callable[[], nn.Module]
    takes: str
    gives: str
    layout: str = "sbh"
    features: int = WIDTH

    @property
    def indices(self) -> bool:
        return self.layer.func is inn.VocabParallelEmbedding  # type: ignore[attr-defined]


def of_kind(kind: Any, *sizes: Any, **options: Any) -> Callable[..., Any]:
    return functools.partial(kind, *sizes, dtype=F64, **options)


def sharded(options: dict[str, Any]) -> str:
    return SEQUENCE if options.get("sequence_parallel", True) else WHOLE


def column(layout: str = "sbh", reference: Any = None, **options: Any) -> LayerCase:
    layer = of_kind(inn.ColumnParallelLinear, WIDTH, INNER, batch_first=layout != "sbh", **options)
    reference = reference or of_kind(nn.Linear, WIDTH, INNER, bias=options.get("bias", True))
    gives = WHOLE if options.get("gather_output") else FEATURES
    return LayerCase(layer, reference, sharded(options), gives, layout)


def row(layout: str = "sbh", **options: Any) -> LayerCase:
    layer = of_kind(inn.RowParallelLinear, INNER, WIDTH, batch_first=layout == "bsh", **options)
    reference = of_kind(nn.Linear, INNER, WIDTH, bias=options.get("bias", True))
    takes = FEATURES if options.get("input_is_parallel", True) else WHOLE
    return LayerCase(layer, reference, takes, sharded(options), layout, INNER)


def heads(kv: int | None = None, head_dim: int = 1, bias: bool = True) -> LayerCase:
    layer = of_kind(inn.QKVParallelLinear, WIDTH, HEADS, kv, head_dim, bias=bias)
    reference = functools.partial(Projections, kv or HEADS, head_dim, bias)
    return LayerCase(layer, reference, SEQUENCE, FEATURES)


def mlp(activation: str, layout: str = "sbh", **options: Any) -> LayerCase:
    options["batch_first"] = layout == "bsh"
    layer = of_kind(inn.SequenceParallelMLP, WIDTH, INNER, activation, **options)
    gated, bias = options.get("gated", False), options.get("bias", True)
    reference = functools.partial(GatedMLP, activation, gated, bias)
    return LayerCase(layer, reference, sharded(options), sharded(options), layout)


def norm(kind: str, **options: Any) -> LayerCase:
    more = {name: value for name, value in options.items() if name == "bias"}
    layer = of_kind(getattr(inn, kind), WIDTH, **options)
    reference = of_kind(getattr(nn, kind), WIDTH, **more)
    return LayerCase(layer, reference, sharded(options), sharded(options))


def embedding(padding: int | None = None, layout: str = "sbh", **options: Any) -> LayerCase:
    how = {"padding_idx": padding}
    options["batch_first"] = layout == "bsh"
    layer = of_kind(inn.VocabParallelEmbedding, VOCABULARY, WIDTH, **how, **options)
    reference = of_kind(nn.Embedding, VOCABULARY, WIDTH, **how)
    return LayerCase(layer, reference, WHOLE, sharded(options), layout)


def uniform(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight, -0.5, 0.5)


def initialised() -> nn.Module:
    made = nn.utils.skip_init(nn.Linear, WIDTH, INNER, dtype=F64)
    with torch.no_grad():
        uniform(made.weight)
        made.bias.zero_()
    return made


CASES = {
    "column": column(),
    "column, batch first": column("bsh", save_gathered=True),
    "column, matrix": column("sh"),
    "column, init": column(reference=initialised, init_method=uniform),
    "column, replicated": column(sequence_parallel=False),
    "column, gathered": column(gather_output=True),
    "column, gathered, skip bias": column(
        gather_output=True, skip_bias_add=True, sequence_parallel=False
    ),
    "row": row(),
    "row, batch first": row("bsh"),
    "row, matrix": row("sh"),
    "row, replicated": row(sequence_parallel=False),
    "row, replicated, skip bias": row(skip_bias_add=True, sequence_parallel=False),
    "row, whole input": row(input_is_parallel=False),
    "qkv": heads(),
    "qkv, grouped heads": heads(None, 2, False),
    "mlp": mlp("gelu"),
    "mlp, gated, batch first": mlp("silu", "bsh", gated=True, bias=False),
    "mlp, replicated": mlp("relu", sequence_parallel=False),
    "layer norm": norm("LayerNorm"),
    "layer norm, no bias": norm("LayerNorm", bias=False),
    "rms norm": norm("RMSNorm"),
    "rms norm, replicated": norm("RMSNorm", sequence_parallel=False),
    "embedding": embedding(),
    "embedding, batch first": embedding(-1, "bsh"),
    "embedding, replicated": embedding(0, sequence_parallel=False),
}


def part(tensor: torch.Tensor, kind: str, layout: str, sharding: Any = None) -> torch.Tensor:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    if kind == WHOLE:
        return tensor
    if kind == SEQUENCE:
        return tensor.chunk(size, layout.index("s"))[rank]
    if sharding is not None:  # heads may be replicated
        return tensor.narrow(-1, *sharding.part())
    return tensor.chunk(size, -1)[rank]


def close(found: Any, expected: Any, what: str) -> None:
    """The bound is for sums of products of numbers of order one."""
    assert found is not None, what
    bound = 1e-12 if found.dtype == F64 else 16 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(
        found.double(), expected, rtol=bound, atol=bound, msg=lambda text: f"{what}: {text}"
    )


def outputs_of(result: Any, skipped: bool) -> list[torch.Tensor]:
    if skipped:
        output, bias = result
        return [output + bias]
    return list(result) if isinstance(result, tuple) else [result]


def compare(name: str, case: LayerCase) -> None:
    """Initialisation, outputs and gradients of two steps."""
    torch.manual_seed(7)
    layer = case.layer()
    drawn = torch.get_rng_state()
    torch.manual_seed(7)
    reference = case.reference()
    assert torch.equal(torch.get_rng_state(), drawn), f"{name}: what was drawn differs"
    own = inn.shardings(layer)
    expected = dict(reference.named_parameters())
    assert set(own) == set(expected) == set(layer.state_dict()), name
    for key, value in layer.named_parameters():
        assert torch.equal(value, own[key].local(expected[key])), f"{name}: {key} is another"
        assert value.sharding is own[key]  # type: ignore[attr-defined]
    if "norm" in name:  # ones and zeros would hide a mistake
        with torch.no_grad():
            for key, value in expected.items():
                value.add_(torch.randn(value.shape, dtype=F64))
                dict(layer.named_parameters())[key].copy_(value)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (layer, reference)]
    for step in range(2):
        compare_step(name, case, layer, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, value in layer.named_parameters():
        close(value, own[key].local(expected[key]), f"{name}: {key} after two steps")


def compare_step(
    name: str,
    case: LayerCase,
    layer: nn.Module,
    reference: nn.Module,
    step: int,
    dtype: torch.dtype = F64,
) -> None:
    generator = torch.Generator().manual_seed(step)
    shape = {"sbh": (LENGTH, BATCH), "bsh": (BATCH, LENGTH), "sh": (LENGTH,)}[case.layout]
    if case.indices:
        x = torch.randint(VOCABULARY, shape, generator=generator)
        x[0] = 0  # the padding of one of the cases
    else:
        x = torch.randn(*shape, case.features, generator=generator, dtype=F64)
        x = x.to(dtype).double().requires_grad_()
    mine = part(x.detach(), case.takes, case.layout).clone()
    if not case.indices:
        mine = mine.to(dtype).requires_grad_()
    skipped = getattr(layer, "skip_bias_add", False)
    results, whole = outputs_of(layer(mine), skipped), outputs_of(reference(x), False)
    losses, total = [], torch.zeros((), dtype=F64)
    for index, (result, expected) in enumerate(zip(results, whole, strict=True)):
        probe = torch.randn(expected.shape, generator=generator, dtype=F64).to(dtype).double()
        sharding = getattr(layer, "qkv"[index]).weight.sharding if len(whole) > 1 else None
        right = part(expected, case.gives, case.layout, sharding)
        close(result, right, f"{name}: output {index}")
        weight = part(probe, case.gives, case.layout, sharding)
        if sharding is not None and sharding.copies > 1:
            # each replica has an own share of the loss
            weight = weight * (1 + interlace.get_rank() % sharding.copies)
            probe = probe * sum(1 + r for r in range(sharding.copies))
        losses.append((result * weight.to(dtype)).sum())
        total = total + (expected * probe).sum()
    torch.stack(losses).sum().backward()
    total.backward()  # type: ignore[no-untyped-call]
    if not case.indices:
        right = part(x.grad, case.takes, case.layout)  # type: ignore[arg-type]
        close(mine.grad, right, f"{name}: gradient of the input")
    own, expected_grads = inn.shardings(layer), dict(reference.named_parameters())
    for key, value in layer.named_parameters():
        right = own[key].local(expected_grads[key].grad)  # type: ignore[arg-type]
        close(value.grad, right, f"{name}: gradient of {key}")


@pytest.mark.parametrize(("place", "dtype"), [("sim", torch.float32), ("shm", torch.bfloat16)])
@ranks()
def test_linear_layers_within_the_bounds_of_their_dtype(place: str, dtype: torch.dtype) -> None:
    torch.manual_seed(7)  # processes that other tests have used may have drawn unequally
    for name in ("column", "column, replicated", "row", "row, replicated", "qkv"):
        case = CASES[name]
        layer, reference = case.layer().to(dtype), case.reference()
        shardings = inn.shardings(layer)
        with torch.no_grad():
            for key, value in reference.named_parameters():
                value.copy_(value.to(dtype))
                dict(layer.named_parameters())[key].copy_(shardings[key].local(value))
        compare_step(name, case, layer, reference, 0, dtype)


def compare_all(names: Iterable[str] = tuple(CASES)) -> None:
    for name in names:
        compare(name, CASES[name])


@pytest.mark.parametrize("world_size", few([1, 2, 3, 4], 2))
@ranks()
def test_layers(world_size: int) -> None:
    compare_all()


@pytest.mark.parametrize("kv, world_size", [(1, 2), (1, 3), (2, 4), (1, 4)])
@ranks()
def test_key_value_heads_that_ranks_share(kv: int, world_size: int) -> None:
    compare("qkv", heads(kv, 1, world_size != 3))


# -- options that change when, not what ----------------------------------------------------------------


def block(**options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        inn.LayerNorm(WIDTH, dtype=F64),
        inn.SequenceParallelMLP(WIDTH, INNER, "silu", gated=True, dtype=F64, **options),
    )


def some_input() -> torch.Tensor:
    generator = torch.Generator().manual_seed(interlace.get_rank())
    return torch.randn(4, BATCH, WIDTH, generator=generator, dtype=F64)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of two microbatches."""
    for factor in (1.0, -0.5):
        (model(some_input() * factor) ** 2).sum().backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_deferred_and_accumulated_gradients_are_the_same(world_size: int) -> None:
    expected = gradients(block())
    deferred = inn.DeferredWeightGradients()
    model = block(deferred=deferred, save_gathered=True)
    early = gradients(model)
    assert not any(key.endswith(("up.weight", "gate.weight", "down.weight")) for key in early)
    assert len(deferred) == 4 and deferred.run() == 4
    for key, value in model.named_parameters():
        close(value.grad, expected[key], key)
    model = block(gradient_accumulation_fusion=True)
    for key, value in model.named_parameters():
        if key.startswith("1.") and key.endswith("weight"):
            value.main_grad = torch.zeros_like(value)  # type: ignore[attr-defined]
    found = gradients(model)
    for key, value in model.named_parameters():
        close(getattr(value, "main_grad", found.get(key)), expected[key], key)


@ranks()
def test_shared_heads_refuse_what_would_leave_their_sum_out() -> None:
    options = {"gradient_accumulation_fusion": True, "deferred": inn.DeferredWeightGradients()}
    for name, value in options.items():
        layer = inn.QKVParallelLinear(WIDTH, HEADS, 1, **{name: value})
        with pytest.raises(ValueError, match=f"^{name} needs at least one key-value head per rank"):
            layer(torch.ones(2, WIDTH))


@pytest.mark.filterwarnings("ignore")
@ranks()
def test_compiled_models_have_the_same_gradients() -> None:
    model = nn.Sequential(block(), nn.Linear(WIDTH, 3, dtype=F64), nn.GELU())
    kept = {key: value.clone() for key, value in gradients(model).items()}
    model.zero_grad()
    found = gradients(torch.compile(model, backend="eager"))
    for key, value in kept.items():
        close(found[f"_orig_mod.{key}"], value, key)


@ranks()
def test_without_gradients() -> None:
    frozen = block().requires_grad_(False)(some_input())
    assert not frozen.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(block()(some_input()).clone(), frozen, "output")


@pytest.mark.parametrize("world_size", [2, 4])
@ranks()
def test_weight_that_is_embedding_and_head(world_size: int) -> None:
    torch.manual_seed(2)
    embedding = inn.VocabParallelEmbedding(VOCABULARY, WIDTH, dtype=F64)
    torch.manual_seed(2)
    whole = nn.Embedding(VOCABULARY, WIDTH, dtype=F64)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (LENGTH, BATCH), generator=generator)
    (logits,) = inn.column_parallel_linear(embedding(tokens).tanh(), [embedding.weight], group=None)
    loss = inn.vocab_parallel_cross_entropy(logits, tokens.roll(-1, 0), vocab_size=VOCABULARY)
    loss.backward()
    all_logits = whole(tokens).tanh() @ whole.weight.t()
    expected = nn.functional.cross_entropy(all_logits.flatten(0, 1), tokens.roll(-1, 0).flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    close(loss, expected, "loss")
    sharding = embedding.weight.sharding
    close(embedding.weight.grad, sharding.local(whole.weight.grad), "gradient")
    close(sharding.full(embedding.weight.grad), whole.weight.grad, "gathered gradient")


@ranks()
def test_linear_functions() -> None:
    linear_cases.autocast()
    linear_cases.side_by_side()


TOKENS, CLASSES, IGNORED = (5, 3), 29, -100
DOUBLE, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
BOUNDS = {DOUBLE: 1e-13, F32: 1e-5, BF16: 1e-5}


def losses_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def compare_losses(
    classes: int = CLASSES, *, dtype: torch.dtype = DOUBLE, ignored: bool = True, **options: Any
) -> None:
    """Compare loss and gradient with a reference in float64 of the rounded logits."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*TOKENS, classes, generator=generator, dtype=DOUBLE) * 4).to(dtype)
    target = torch.randint(classes, TOKENS, generator=generator)
    if ignored:
        target[1] = IGNORED
    size = interlace.get_world_size()
    first, count = split_rows(classes, size)[interlace.get_rank()]
    mine = logits.narrow(-1, first, count).clone().requires_grad_()
    whole = logits.double().requires_grad_()
    of_all = {} if classes % size == 0 else {"vocab_size": classes}
    loss = inn.VocabParallelCrossEntropy(**of_all, **options)(mine, target)
    expected = F.cross_entropy(whole.flatten(0, 1), target.flatten(), **options)
    assert loss.dtype == (DOUBLE if dtype == DOUBLE else F32)
    losses_close(loss, expected.view(loss.shape), BOUNDS[dtype])
    probe = torch.randn(loss.shape, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    (loss * probe).sum().backward()
    (expected * probe.view(expected.shape)).sum().backward()
    assert mine.grad is not None and whole.grad is not None and mine.grad.dtype == dtype
    rounding = 2.0**-8 if dtype == BF16 else BOUNDS[dtype]
    losses_close(mine.grad, whole.grad.narrow(-1, first, count), rounding)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@ranks()
def test_loss_and_gradient(world_size: int) -> None:
    for smoothing in (0.0, 0.1):
        compare_losses(12, reduction="sum", label_smoothing=smoothing)
        compare_losses(reduction="mean", label_smoothing=smoothing)
        compare_losses(reduction="none", ignored=False, label_smoothing=smoothing)


@ranks()
def test_other_dtypes_and_pieces() -> None:
    for dtype in (F32, BF16):
        compare_losses(dtype=dtype, label_smoothing=0.2)
    with mock.patch("interlace.nn.vocabulary.ELEMENTS_AT_ONCE", 40):
        compare_losses(label_smoothing=0.1)


@pytest.mark.parametrize("classes", [1, 5])
@ranks(4)
def test_ranks_without_classes(classes: int) -> None:
    compare_losses(classes, ignored=False)


@ranks()
def test_no_tokens_that_count() -> None:
    logits, target = torch.zeros(2, 3, requires_grad=True), torch.full((2,), IGNORED)
    assert math.isnan(inn.vocab_parallel_cross_entropy(logits, target).item())  # as torch
    total = inn.vocab_parallel_cross_entropy(logits, target, reduction="sum")
    total.backward()
    assert logits.grad is not None and total.item() == logits.grad.abs().sum().item() == 0.0


@ranks()
def test_large_logits() -> None:
    """exp() of these logits overflows in fp32."""
    logits = torch.full((1, 2), 500.0 if interlace.get_rank() else -500.0)
    for target, expected in ((2, math.log(2)), (0, 1000 + math.log(2))):
        loss = inn.vocab_parallel_cross_entropy(logits, torch.tensor([target]))
        assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("step", ["forward", "backward"])
@ranks()
def test_an_error_within_it_ends_it_on_all_ranks(step: str) -> None:
    logits = torch.zeros(*TOKENS, 2, requires_grad=True)
    target = torch.zeros(TOKENS, dtype=torch.int64)
    failing: Any = contextlib.nullcontext()
    if interlace.get_rank() == 1:
        full = mock.Mock(side_effect=RuntimeError("memory is full"))
        failing = mock.patch.object(vocabulary, "_pieces", full)
    loss = inn.vocab_parallel_cross_entropy(logits, target) if step == "backward" else None
    with pytest.raises(Exception, match=r"memory is full.*") as caught:
        with failing:
            if loss is None:
                inn.vocab_parallel_cross_entropy(logits, target)
            else:
                loss.backward()
        interlace.barrier()
    assert interlace.get_rank() or (caught.type is ValueError and "rank 1" in str(caught.value))


TARGET = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        (
            {"target": TARGET[:3]}, ValueError,
            "target must have shape (4,) for logits of shape (4, 3), got (3,)",
        ),
        ({"target": TARGET + 6}, ValueError, "target must be within 0..5, got 6"),
        ({"target": TARGET.float()}, TypeError, "target must be an int64 tensor, got torch.float32"),
        ({"reduction": "average"}, ValueError, "reduction must be one of"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be within 0..1, got 1.5"),
        ({"vocab_size": 4}, ValueError, "logits must have 2 of vocab_size 4 classes, got 3"),
    ],
)  # fmt: skip
@ranks()
def test_misuse_on_one_rank_is_refused_on_all(wrong: Any, kind: Any, text: str) -> None:
    given = {"target": TARGET, **(wrong if interlace.get_rank() == 1 else {})}
    with pytest.raises(kind, match=re.escape(text)):
        inn.vocab_parallel_cross_entropy(torch.zeros(4, 3), **given)
