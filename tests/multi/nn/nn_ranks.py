"""Ranks of test_nn.py: a layer against the unsharded one of torch, in float64, over two steps.

Every rank makes both under the same seed, gives each its part of the same input, and compares what comes
out, and all gradients, with its part of the unsharded ones.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

import interlace
from interlace import nn as inn
from interlace.ops.op.pending import Started

LENGTH, BATCH, WIDTH, INNER, HEADS, VOCABULARY = 12, 2, 12, 24, 12, 29
RATE = 0.01
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


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[..., Any], gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(WIDTH, INNER, bias=bias, dtype=F64) if gated else None
        self.up = nn.Linear(WIDTH, INNER, bias=bias, dtype=F64)
        self.down = nn.Linear(INNER, WIDTH, bias=bias, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


@dataclass
class Case:
    """``layer`` and ``reference`` make modules; ``takes`` and ``gives`` say which part a rank has."""

    layer: Callable[..., nn.Module]
    reference: Callable[[], nn.Module]
    takes: str
    gives: str
    options: dict[str, Any] = field(default_factory=dict)
    features: int = WIDTH
    layout: str = "sbh"
    indices: bool = False
    norm: bool = False
    init: bool = False


def linear(inputs: int, outputs: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, bias=bias, dtype=F64)


def uniform(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight, -0.5, 0.5)


def initialised() -> nn.Module:
    made = nn.utils.skip_init(nn.Linear, WIDTH, INNER, dtype=F64)
    with torch.no_grad():
        uniform(made.weight)
        made.bias.zero_()
    return made


def column(**options: Any) -> Callable[..., nn.Module]:
    return lambda **more: inn.ColumnParallelLinear(WIDTH, INNER, **options, **more)


def row(**options: Any) -> Callable[..., nn.Module]:
    return lambda **more: inn.RowParallelLinear(INNER, WIDTH, **options, **more)


def qkv(*sizes: Any, **options: Any) -> Callable[..., nn.Module]:
    return lambda **more: inn.QKVParallelLinear(WIDTH, HEADS, *sizes, **options, **more)


def mlp(activation: str, **options: Any) -> Callable[..., nn.Module]:
    return lambda **more: inn.SequenceParallelMLP(WIDTH, INNER, activation, **options, **more)


def embedding(**options: Any) -> Callable[..., nn.Module]:
    return lambda **more: inn.VocabParallelEmbedding(VOCABULARY, WIDTH, **options, **more)


def torch_embedding(padding: int | None = None) -> Callable[[], nn.Module]:
    return lambda: nn.Embedding(VOCABULARY, WIDTH, padding, dtype=F64)


REPLICATED = {"sequence_parallel": False}
BATCH_FIRST = {"batch_first": True}
relu, gelu, silu = nn.functional.relu, nn.functional.gelu, nn.functional.silu

CASES = {
    "column": Case(column(), linear(WIDTH, INNER), SEQUENCE, FEATURES),
    "column, batch first": Case(
        column(save_gathered=True), linear(WIDTH, INNER), SEQUENCE, FEATURES, BATCH_FIRST, layout="bsh"
    ),
    "column, matrix": Case(
        column(), linear(WIDTH, INNER), SEQUENCE, FEATURES, BATCH_FIRST, layout="sh"
    ),
    "column, no bias": Case(
        column(bias=False), linear(WIDTH, INNER, False), SEQUENCE, FEATURES, {"save_gathered": True}
    ),
    "column, skip bias": Case(column(skip_bias_add=True), linear(WIDTH, INNER), SEQUENCE, FEATURES),
    "column, init": Case(column(init_method=uniform), initialised, SEQUENCE, FEATURES, init=True),
    "column, replicated": Case(column(), linear(WIDTH, INNER), WHOLE, FEATURES, REPLICATED),
    "column, gathered": Case(column(gather_output=True), linear(WIDTH, INNER), SEQUENCE, WHOLE),
    "column, gathered, skip bias": Case(
        column(gather_output=True, skip_bias_add=True), linear(WIDTH, INNER), WHOLE, WHOLE, REPLICATED
    ),
    "row": Case(row(), linear(INNER, WIDTH), FEATURES, SEQUENCE, features=INNER),
    "row, batch first": Case(
        row(), linear(INNER, WIDTH), FEATURES, SEQUENCE, BATCH_FIRST, features=INNER, layout="bsh"
    ),
    "row, matrix": Case(
        row(), linear(INNER, WIDTH), FEATURES, SEQUENCE, features=INNER, layout="sh"
    ),
    "row, no bias": Case(
        row(bias=False), linear(INNER, WIDTH, False), FEATURES, SEQUENCE, features=INNER
    ),
    "row, skip bias": Case(
        row(skip_bias_add=True), linear(INNER, WIDTH), FEATURES, SEQUENCE, features=INNER
    ),
    "row, replicated": Case(row(), linear(INNER, WIDTH), FEATURES, WHOLE, REPLICATED, INNER),
    "row, replicated, skip bias": Case(
        row(skip_bias_add=True), linear(INNER, WIDTH), FEATURES, WHOLE, REPLICATED, INNER
    ),
    "row, whole input": Case(
        row(input_is_parallel=False), linear(INNER, WIDTH), WHOLE, SEQUENCE, features=INNER
    ),
    "qkv": Case(qkv(), lambda: Projections(HEADS, 1, True), SEQUENCE, FEATURES),
    "qkv, grouped heads": Case(
        qkv(None, 2, bias=False), lambda: Projections(HEADS, 2, False), SEQUENCE, FEATURES
    ),
    "mlp": Case(mlp("gelu"), lambda: FeedForward(gelu, False, True), SEQUENCE, SEQUENCE),
    "mlp, gated, batch first": Case(
        mlp("silu", gated=True, bias=False),
        lambda: FeedForward(silu, True, False),
        SEQUENCE, SEQUENCE, BATCH_FIRST, layout="bsh",
    ),
    "mlp, replicated": Case(
        mlp("relu"), lambda: FeedForward(relu, False, True), WHOLE, WHOLE, REPLICATED
    ),
    "layer norm": Case(
        lambda **o: inn.LayerNorm(WIDTH, **o),
        lambda: nn.LayerNorm(WIDTH, dtype=F64),
        SEQUENCE, SEQUENCE, norm=True,
    ),
    "layer norm, no bias": Case(
        lambda **o: inn.LayerNorm(WIDTH, bias=False, **o),
        lambda: nn.LayerNorm(WIDTH, bias=False, dtype=F64),
        SEQUENCE, SEQUENCE, norm=True,
    ),
    "rms norm": Case(
        lambda **o: inn.RMSNorm(WIDTH, **o), lambda: nn.RMSNorm(WIDTH, dtype=F64), SEQUENCE, SEQUENCE,
        norm=True,
    ),
    "rms norm, replicated": Case(
        lambda **o: inn.RMSNorm(WIDTH, **o), lambda: nn.RMSNorm(WIDTH, dtype=F64), WHOLE, WHOLE,
        REPLICATED, norm=True,
    ),
    "embedding": Case(embedding(), torch_embedding(), WHOLE, SEQUENCE, indices=True),
    "embedding, batch first": Case(
        embedding(padding_idx=-1), torch_embedding(-1), WHOLE, SEQUENCE, BATCH_FIRST, layout="bsh",
        indices=True,
    ),
    "embedding, replicated": Case(
        embedding(padding_idx=0), torch_embedding(0), WHOLE, WHOLE, REPLICATED, indices=True
    ),
}  # fmt: skip


def shape_of(layout: str, *last: int) -> tuple[int, ...]:
    return {"sbh": (LENGTH, BATCH), "bsh": (BATCH, LENGTH), "sh": (LENGTH,)}[layout] + last


def part(tensor: torch.Tensor, kind: str, layout: str, sharding: Any = None) -> torch.Tensor:
    """The calling rank's part of what all of them have."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    if kind == WHOLE:
        return tensor
    if kind == SEQUENCE:
        return tensor.chunk(size, layout.index("s"))[rank]
    if sharding is not None:  # heads may be replicated
        return tensor.narrow(-1, *sharding.part())
    return tensor.chunk(size, -1)[rank]


def close(found: Any, expected: Any, what: str) -> None:
    """Sums of at most a thousand products of numbers of order one: 1000 * 2**-53."""
    torch.testing.assert_close(
        found,
        expected,
        rtol=1e-12,
        atol=1e-12,
        msg=lambda m: f"{what}, rank {interlace.get_rank()}: {m}",
    )


def outputs_of(result: Any, skipped: bool) -> list[torch.Tensor]:
    if skipped:
        output, bias = result
        return [output + bias]
    return list(result) if isinstance(result, tuple) else [result]


def compare(case: Case) -> None:
    """Initialisation, outputs and gradients of two steps."""
    torch.manual_seed(7)
    layer = case.layer(**case.options, dtype=F64)
    drawn = torch.get_rng_state()
    torch.manual_seed(7)
    reference = case.reference()
    assert torch.equal(torch.get_rng_state(), drawn), "what was drawn differs"
    own = inn.shardings(layer)
    expected = dict(reference.named_parameters())
    assert set(own) == set(expected) == set(layer.state_dict())
    for key, value in layer.named_parameters():
        assert torch.equal(value, own[key].local(expected[key])), f"{key} is another"
        assert value.sharding is own[key]
    if case.norm:  # ones and zeros would hide a mistake
        with torch.no_grad():
            for key, value in expected.items():
                value.add_(torch.randn(value.shape, dtype=F64))
                dict(layer.named_parameters())[key].copy_(value)
    optimizers = [torch.optim.SGD(each.parameters(), lr=RATE) for each in (layer, reference)]
    for step in range(2):
        one_step(case, layer, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, value in layer.named_parameters():
        close(value, own[key].local(expected[key]), f"{key} after two steps")


def one_step(case: Case, layer: nn.Module, reference: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    if case.indices:
        x = torch.randint(VOCABULARY, shape_of(case.layout), generator=generator)
        x[0] = 0  # the padding of one of the cases
    else:
        x = torch.randn(shape_of(case.layout, case.features), generator=generator, dtype=F64)
        x.requires_grad_()
    mine = part(x.detach(), case.takes, case.layout).clone()
    if not case.indices:
        mine.requires_grad_()
    skipped = getattr(layer, "skip_bias_add", False)
    results, whole = outputs_of(layer(mine), skipped), outputs_of(reference(x), False)
    losses, total = [], torch.zeros((), dtype=F64)
    names = ["q", "k", "v"]
    for index, (result, expected) in enumerate(zip(results, whole, strict=True)):
        probe = torch.randn(expected.shape, generator=generator, dtype=F64)
        sharding = getattr(layer, names[index]).weight.sharding if len(whole) > 1 else None
        close(result, part(expected, case.gives, case.layout, sharding), f"output {index}")
        weight = part(probe, case.gives, case.layout, sharding)
        if sharding is not None and sharding.copies > 1:
            # each replica has an own share of the loss
            weight = weight * (1 + interlace.get_rank() % sharding.copies)
            replicas = sum(1 + r for r in range(sharding.copies))
            probe = probe * replicas
        losses.append((result * weight).sum())
        total = total + (expected * probe).sum()
    sum(losses[1:], losses[0]).backward()
    total.backward()
    if not case.indices:
        close(mine.grad, part(x.grad, case.takes, case.layout), "gradient of the input")
    own, expected_grads = inn.shardings(layer), dict(reference.named_parameters())
    for key, value in layer.named_parameters():
        close(value.grad, own[key].local(expected_grads[key].grad), f"gradient of {key}")


def run_all(names: Sequence[str] = tuple(CASES)) -> dict[str, str]:
    """What was wrong, by case."""
    found = {}
    for name in names:
        try:
            compare(CASES[name])
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error)
    return found


def run_replicated_heads(kv: int, bias: bool = True) -> None:
    """Fewer key-value heads than ranks."""
    made = qkv(kv, bias=bias)
    compare(Case(made, lambda: Projections(kv, 1, bias), SEQUENCE, FEATURES))


# -- negative controls ---------------------------------------------------------------------------------


class _Done:
    def wait(self) -> None:
        pass


def _nothing(*args: Any, **kwargs: Any) -> _Done:
    return _Done()


def _own_part(group: Any, tensor: torch.Tensor, reduce_op: str, dim: int) -> Started:
    return Started([tensor.chunk(group.world_size, dim)[group.rank].clone()], None)


def _own(group: Any, tensor: torch.Tensor, reduce_op: str) -> Started:
    return Started([tensor.clone()], None)


class _Record(NamedTuple):
    """In place of an op's record: it starts with ``start``."""

    start: Callable[..., Started]

    def begin(self, group: Any, given: tuple[Any, ...]) -> Started:
        return self.start(group, *given)


def _own_sum(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
    return tensor


REGIONS = "interlace.nn.regions"
DROPPED = {
    "layer norm": (f"{REGIONS}.all_reduce", _own_sum, "gradient of weight"),
    "row, skip bias": (f"{REGIONS}.all_reduce", _own_sum, "gradient of bias"),
    "row": ("interlace.nn.linear_functions._all_reduce", _nothing, "gradient of bias"),
    "embedding": (f"{REGIONS}.records.REDUCE_SCATTER", _Record(_own_part), "output"),
    "embedding, replicated": (f"{REGIONS}.records.ALL_REDUCE", _Record(_own), "output"),
}


def without_a_sum(name: str) -> str:
    """The case with a sum over ranks left out: what the comparison says."""
    target, instead, _ = DROPPED[name]
    with ExitStack() as stack:
        stack.enter_context(mock.patch(target, instead))
        try:
            compare(CASES[name])
        except AssertionError as error:
            return str(error)
    return "nothing"


def without_the_replicas_sum() -> str:
    with mock.patch(f"{REGIONS}.all_reduce", _own_sum):
        try:
            run_replicated_heads(1)
        except AssertionError as error:
            return str(error)
    return "nothing"


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


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of two microbatches."""
    for factor in (1.0, -0.5):
        (model(some_input() * factor) ** 2).sum().backward()
    return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}


def later_or_elsewhere() -> None:
    """Deferred gradients and main_grad are the gradients that backward gives."""
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
            value.main_grad = torch.zeros_like(value)
    found = gradients(model)
    for key, value in model.named_parameters():
        close(getattr(value, "main_grad", found.get(key)), expected[key], key)


def shared_heads_refuse() -> list[str]:
    """What would leave the sum over replicas out."""
    texts = []
    for options in (
        {"gradient_accumulation_fusion": True},
        {"deferred": inn.DeferredWeightGradients()},
    ):
        layer = inn.QKVParallelLinear(WIDTH, HEADS, 1, **options)
        try:
            layer(torch.ones(2, WIDTH))
        except ValueError as error:
            texts.append(str(error))
    return texts


def compiled() -> None:
    """torch.compile goes around the layers, to the same numbers."""
    model = nn.Sequential(block(), nn.Linear(WIDTH, 3, dtype=F64), nn.GELU())
    expected = gradients(model)
    kept = {key: value.clone() for key, value in expected.items()}
    model.zero_grad()
    found = gradients(torch.compile(model, backend="eager"))
    for key, value in kept.items():
        close(found[f"_orig_mod.{key}"], value, key)


def without_gradients() -> None:
    model = block()
    model.requires_grad_(False)
    frozen = model(some_input())
    assert not frozen.requires_grad
    with torch.no_grad():
        close(block()(some_input()), frozen, "output")
    with torch.inference_mode():
        close(block()(some_input()).clone(), frozen, "output")


def tied() -> None:
    """One weight is embedding and head, of a vocabulary that the ranks do not divide."""
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
    expected.backward()
    close(loss, expected, "loss")
    sharding = embedding.weight.sharding  # type: ignore[attr-defined]
    close(embedding.weight.grad, sharding.local(whole.weight.grad), "gradient")
    close(sharding.full(embedding.weight.grad), whole.weight.grad, "gathered gradient")
