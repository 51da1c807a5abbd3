"""The experts' ops in a block-scaled format: gradients as defined, bit by bit, and functional forms."""

import functools
from typing import Any, NamedTuple

import pytest
import torch

import interlace
from cases.block_products import PLAIN, close, product
from interlace import functional, nn
from interlace.ops.matmul.formats import FORMATS, quantize
from ranks import ranks
from support import noise
from tiers import few, thorough

Tensor = torch.Tensor
TOKENS = (40, 4, 0)
"""Tokens of each rank: more than a block of 32 for an expert, few, and none."""
WIDTHS = 160, 36
LOCAL = 2
"""Experts of a rank."""


class Problem(NamedTuple):
    """The operands of a layer of experts on all ranks; ``up`` and ``down`` are of all experts.

    Experts 0 and 1 share the first slots. The last expert has all second slots, and the others nothing.
    """

    tokens: list[Tensor]
    chosen: list[Tensor]
    share: list[Tensor]
    up: Tensor
    down: Tensor
    grads: list[Tensor]

    def rows(self, expert: int) -> list[tuple[int, int, int]]:
        """Return rank, token and slot of the expert's rows in their order."""
        return [
            (rank, *place)
            for rank, chosen in enumerate(self.chosen)
            for place in (chosen == expert).nonzero().tolist()
        ]


def problem(size: int) -> Problem:
    experts, (wide, narrow) = LOCAL * size, WIDTHS
    counts = TOKENS[:size]
    chosen = [
        torch.stack([torch.arange(n) % 5 % 2, torch.full((n,), experts - 1)], 1) for n in counts
    ]
    return Problem(
        [noise(r, 1, (n, wide)) for r, n in enumerate(counts)],
        chosen,
        [noise(r, 2, (n, 2)) for r, n in enumerate(counts)],
        noise(0, 3, (experts, narrow, wide)),
        noise(0, 4, (experts, wide, narrow)),
        [noise(r, 5, (n, wide)) for r, n in enumerate(counts)],
    )


@functools.cache
def definition(size: int, name: str) -> dict[str, list[Tensor]]:
    """Return the results and gradients of all ranks. Gradients of weights are by expert."""
    case = problem(size)
    found = {
        "y": [torch.zeros_like(tensor) for tensor in case.grads],
        "tokens": [torch.zeros_like(tensor) for tensor in case.tokens],
        "share": [torch.zeros_like(tensor) for tensor in case.share],
        "up": [torch.zeros_like(tensor) for tensor in case.up],
        "down": [torch.zeros_like(tensor) for tensor in case.down],
    }
    for expert, (up, down) in enumerate(zip(case.up, case.down, strict=True)):
        where = case.rows(expert)
        if not where:
            continue
        x = torch.stack([case.tokens[r][t] for r, t, _ in where])
        share = torch.stack([case.share[r][t, slot] for r, t, slot in where])[:, None]
        grad = torch.stack([case.grads[r][t] for r, t, _ in where])
        before = product(x, up, name, weight=True)
        hidden = before.relu()
        rows = product(hidden, down, name, weight=True)
        of_rows = grad * share
        of_hidden = product(of_rows, down.T, name, weight=True) * (before > 0)
        of_x = product(of_hidden, up.T, name, weight=True)
        found["down"][expert] = product(of_rows.T, hidden.T, name)
        found["up"][expert] = product(of_hidden.T, x.T, name)
        close(found["down"][expert], of_rows.T, hidden, name)
        close(found["up"][expert], of_hidden.T, x, name)
        close(of_x, of_hidden, up, name)
        for (rank, token, slot), row, one in zip(where, rows * share, of_x, strict=True):
            found["y"][rank][token] += row
            found["tokens"][rank][token] += one
            of_share = rows[[place[:3] == (rank, token, slot) for place in where].index(True)]
            found["share"][rank][token, slot] = (of_share * case.grads[rank][token]).sum()
    return found


def layer_results(form: Any, name: str, way: str, algorithm: str = "auto") -> dict[str, Tensor]:
    """Return this rank's result and gradients of two products of experts."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    case, local = problem(size), slice(LOCAL * rank, LOCAL * (rank + 1))
    x, share, up, down = (
        tensor.clone().requires_grad_()
        for tensor in (case.tokens[rank], case.share[rank], case.up[local], case.down[local])
    )
    chosen, options = case.chosen[rank], {"algorithm": algorithm, "format": name}
    bound: dict[str, Any]
    first, second = up.transpose(1, 2), down.transpose(1, 2)
    if way in ("splits", "counted"):
        rows, sent = interlace.experts.permute(x, chosen, LOCAL * size)
        received = [
            len([1 for r, *_ in case.rows(expert) if r == source])
            for expert in range(local.start, local.stop)
            for source in range(size)
        ]
        if way == "splits":
            hidden = form.all_to_all_grouped_matmul(rows, first, sent.tolist(), received, **options)
            hidden = hidden[0] if form is interlace else functional.wait(hidden)
        else:
            bound = {"num_max_rows_per_rank": 2 * max(TOKENS)}
            hidden, _ = form.all_to_all_grouped_matmul(rows, first, sent, **bound, **options)
            hidden = hidden[: sum(received)]
        last = {} if form is interlace else {"home_splits": sent.tolist()}
        about = received, chosen, share
        y = form.grouped_matmul_combine(hidden.relu(), second, *about, **last, **options)
    else:
        most = {"exact": None}.get(way, max(TOKENS))
        bound = {"num_max_dispatch_tokens_per_rank": most, "algorithm": algorithm}
        if form is interlace and way == "low latency":
            tokens: Any = x, chosen, most, LOCAL * size
            arrived, handle = interlace.experts.low_latency_dispatch(*tokens, use_fp8=False)
            handle = handle._replace(topk_weights=share)
        else:
            send: Any = functional.dispatch if form is functional else interlace.experts.dispatch
            if way == "low latency":
                bound["low_latency"] = True
            arrived, handle = send(x, chosen, share, LOCAL * size, **bound)
        hidden = interlace.experts.multiply(arrived, first, format=name).relu()  # type: ignore[arg-type]
        y = form.grouped_matmul_combine(hidden, second, handle, **options)
    y = functional.wait(y)
    y.backward(case.grads[rank])
    found = {"y": y.detach(), "tokens": x.grad, "share": share.grad, "up": up.grad}
    return {**found, "down": down.grad}  # type: ignore[dict-item]


def check(found: list[dict[str, Tensor]], right: dict[str, list[Tensor]]) -> None:
    for rank, results in enumerate(found):
        local = slice(LOCAL * rank, LOCAL * (rank + 1))
        for name, tensor in results.items():
            whole = right[name]
            expected = torch.stack(whole[local]) if name in ("up", "down") else whole[rank]
            if name == "share":  # a sum of torch
                torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-3)
            else:
                assert torch.equal(tensor, expected), name


WAYS = [
    (interlace, "splits"),
    (interlace, "counted"),
    (interlace, "exact"),
    (interlace, "bound"),
    (interlace, "low latency"),
    (functional, "splits"),
    (functional, "exact"),
    (functional, "bound"),
    (functional, "low latency"),
]


@pytest.mark.parametrize(("form", "way"), few(WAYS, *WAYS[:3], *WAYS[-2:]))
@pytest.mark.parametrize("name", few(PLAIN, "mxfp8"))
def test_all_ways_have_the_defined_gradients(name: str, form: Any, way: str) -> None:
    check(interlace.run(layer_results, 3, form, name, way), definition(3, name))


@pytest.mark.parametrize("algorithm", ["fused", "pipelined", "unfused"])
def test_all_algorithms_have_the_defined_gradients(algorithm: str) -> None:
    right = definition(2, "mxfp8")
    for way in ("splits", "bound"):
        check(interlace.run(layer_results, 2, interlace, "mxfp8", way, algorithm), right)


def test_with_nvfp4_no_row_depends_on_another() -> None:
    """The rows of experts have a scale each: some ways quantise an expert's rows, others a rank's."""
    right = interlace.run(layer_results, 2, interlace, "nvfp4", "splits")
    for form, way in ((interlace, "bound"), (interlace, "low latency"), (functional, "exact")):
        for found, expected in zip(
            interlace.run(layer_results, 2, form, "nvfp4", way), right, strict=True
        ):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", few(tuple(FORMATS), "nvfp4"))
@ranks(2, place="sim")
def test_unused_rows_may_have_any_values(name: Any) -> None:
    """A low-latency dispatch has room for more rows than it brings."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    x, chosen = noise(rank, 1, (3, 64)), torch.tensor([[0], [1], [0]])
    w = noise(rank, 2, (1, 64, 8)).requires_grad_()
    received, handle = interlace.experts.low_latency_dispatch(x, chosen, 5, size, use_fp8=False)  # type: ignore[misc]
    found = []
    for unused in (0.0, 1e3, float("nan")):
        rows = received.x.clone()
        rows[0, int(received.num_tokens_per_expert[0]) :] = unused
        rows.requires_grad_()
        y: Any = interlace.grouped_matmul_combine(rows, w, handle, format=name)
        grads = torch.autograd.grad(y.square().sum(), (rows, w))
        with torch.no_grad():
            scaled = quantize(w.mT, name, weight=True).t()
            mixed: Any = interlace.grouped_matmul_combine(rows, scaled, handle, format=name)
        found.append([y, mixed, *grads])
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.parametrize("name", few(tuple(FORMATS), "nvfp4"))
@ranks(2, place="sim")
def test_counts_stay_on_the_device(name: Any) -> None:
    rank = interlace.get_rank()
    x, w = noise(rank, 1, (7, WIDTHS[0])), noise(rank, 2, (2, WIDTHS[0], 20))
    sent = torch.tensor(([1, 4, 0, 2], [2, 0, 3, 1])[rank])
    bound: Any = {"num_max_rows_per_rank": 9, "format": name}
    for algorithm in ("fused", "unfused"):
        y, handle = interlace.all_to_all_grouped_matmul(x, w, sent, algorithm=algorithm, **bound)  # type: ignore[arg-type, misc]
        right, splits = interlace.all_to_all_grouped_matmul(x[: sum(sent)], w, sent, format=name)  # type: ignore[misc]
        assert torch.equal(handle.segments[..., 1], splits)
        assert torch.equal(y[: len(right)], right)
        assert not y[len(right) :].any()


@pytest.mark.parametrize("name", few(tuple(FORMATS), "nvfp4"))
@ranks(2, place="sim")
def test_products_of_low_latency_rows_read_no_counts(name: Any) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    x, chosen = noise(rank, 1, (3, 64)), torch.tensor([[0, 2], [1, 3], [0, 1]])
    received, _ = interlace.experts.low_latency_dispatch(x, chosen, 5, 2 * size, use_fp8=False)  # type: ignore[misc]
    w = noise(rank, 2, (2, 64, 8))
    on_device = received._replace(segments=received.segments.to("meta"))  # has no values
    found = interlace.experts.multiply(on_device, w, format=name)
    right = interlace.experts.multiply(received, w.requires_grad_(), format=name)
    for expert, count in enumerate(received.num_tokens_per_expert.tolist()):
        assert torch.equal(found[expert, :count], right[expert, :count])


COUNTS = ([35, 0], [0, 3], [2, 0])
"""Rows of each rank, by expert."""


def check_gather(form: Any, name: str, algorithm: str = "auto") -> None:
    """Compare a gather of rows and its gradients with their definition, or the format's bound."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    sent = COUNTS[:size]
    wide, narrow = WIDTHS
    inputs = [noise(r, 1, (sum(counts), wide)) for r, counts in enumerate(sent)]
    weights = [noise(r, 2, (2, narrow, wide)) for r in range(size)]
    x, w = (tensors[rank].clone().requires_grad_() for tensors in (inputs, weights))
    bias = noise(rank, 3, (2, narrow)).requires_grad_()
    lengths = [counts[expert] for expert in range(2) for counts in sent]
    options: Any = {"bias": bias, "format": name, "algorithm": algorithm}
    y: Any = form.all_gather_grouped_matmul(x, w.transpose(1, 2), sent[rank], lengths, **options)
    y = y[0] if form is interlace else functional.wait(y)
    grads = [noise(r, 4, y.shape) for r in range(size)]
    y.backward(grads[rank])
    of_x = torch.zeros(len(y), wide)
    counts = [sum(of_expert) for of_expert in zip(*sent, strict=True)]
    parts = [torch.split(rows, list(of_rank)) for rows, of_rank in zip(inputs, sent, strict=True)]
    rows = [torch.cat(of_expert) for of_expert in zip(*parts, strict=True)]
    begin = 0
    for expert, count in enumerate(counts):
        part = slice(begin, begin + count)
        begin += count
        close(y[part] - bias[expert], rows[expert], weights[rank][expert].T, name)
        close(w.grad[expert], grads[rank][part].T, rows[expert], name)  # type: ignore[index]
        if name in PLAIN:
            assert torch.equal(w.grad[expert], product(grads[rank][part].T, rows[expert].T, name))  # type: ignore[index]
            for grad, weight in zip(grads, weights, strict=True):
                of_x[part] += product(grad[part], weight[expert].T, name, weight=True)
            assert torch.equal(bias.grad[expert], grads[rank][part].sum(0))  # type: ignore[index]
    if name in PLAIN:
        by_expert = torch.split(of_x, counts)
        expected = [
            torch.split(tensor, [of_rank[expert] for of_rank in sent])[rank]
            for expert, tensor in enumerate(by_expert)
        ]
        assert torch.equal(x.grad, torch.cat(expected))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", few(tuple(FORMATS), "mxfp8", "nvfp4"))
def test_gathered_rows_have_the_gradients_of_the_format(name: str) -> None:
    interlace.run(check_gather, 3, interlace, name)


def test_gathered_rows_have_them_with_every_algorithm() -> None:
    for algorithm in ("pipelined", "unfused"):
        interlace.run(check_gather, 3, interlace, "mxfp8", algorithm)
    interlace.run(check_gather, 3, functional, "mxfp8")


def experts_layer(around: Any = lambda layer: layer, **options: Any) -> list[Tensor]:
    """Return the output of a layer of experts, and the gradients of the input and the parameters."""
    rank = interlace.get_rank()
    torch.manual_seed(0)
    layer = nn.MoE(64, 40, 4, 2, gated=True, shared_size=8, **options)
    x = noise(rank, 1, (7 - 4 * rank, 64)).requires_grad_()
    y = around(layer)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore[list-item]


def compile_whole(layer: Any) -> Any:
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


def test_the_layer_is_the_same_by_splits_by_a_dispatch_and_compiled() -> None:
    plain = interlace.run(experts_layer, 2)
    right = interlace.run(experts_layer, 2, format="mxfp8")
    by_dispatch: Any = {"format": "mxfp8", "num_max_dispatch_tokens_per_rank": 7}
    other_ways = [
        interlace.run(experts_layer, 2, **by_dispatch),
        interlace.run(experts_layer, 2, compile_whole, format="mxfp8", place="shm"),
    ]
    for rank in range(2):
        for one, other in zip(right[rank], plain[rank], strict=True):
            assert not torch.equal(one, other)
            assert (one - other).norm() < 0.2 * other.norm()
        for found in other_ways:
            for one, other in zip(found[rank], right[rank], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_layer_has_no_cached_function() -> None:
    torch._dynamo.utils.warn_once_cache.clear()
    interlace.run(experts_layer, 1, lambda layer: torch.compile(layer, backend="aot_eager"))


@thorough
@ranks(1, place="sim")
def test_inductor_compiles_gradients() -> None:
    """Inductor has no code for all dtypes of the formats."""
    x, w = noise(0, 1, (5, 64)), noise(0, 2, (2, 8, 64))

    def loss(w: Tensor) -> Tensor:
        operands = x, w.transpose(1, 2), [2, 3], [2, 3]
        rows: Any = functional.all_to_all_grouped_matmul(*operands, format="mxfp8")
        return functional.wait(rows).square().sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        weight = w.clone().requires_grad_()
        function(weight).backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)  # type: ignore[arg-type]


@ranks(2, place="sim")
def test_a_gradient_has_no_gradient_and_blocks_along_an_odd_n_are_refused_in_forward() -> None:
    w = W.clone().requires_grad_()
    received, _ = interlace.experts.dispatch(X, torch.tensor([[0], [1], [0]]), None, 2)  # type: ignore[misc]
    for y in (
        interlace.experts.multiply(received, w, format="mxfp8"),
        interlace.all_to_all_grouped_matmul(X, w, [1, 2], format="mxfp8")[0],  # type: ignore[index]
    ):
        with pytest.raises(RuntimeError, match="in a block-scaled format have no gradients"):
            torch.autograd.grad(y.square().sum(), w, create_graph=True)
    x = X.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"dimension of weight must be even, got \(1, 64, 7\)"):
        interlace.all_to_all_grouped_matmul(x, W[..., :7], [1, 2], format="nvfp4")


X, W = noise(0, 1, (3, 64)), noise(0, 2, (1, 64, 8))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"format": "fp8"}, ValueError, "format must be one of fp8_block128, mxfp8"),
        ({"return_received": True}, ValueError, "return_received returns the sent data"),
        ({"weight": W[:, :32]}, ValueError, "weight has 32 rows, input has k = 64"),
        ({"weight": W[0]}, ValueError, r"weight must be \(experts, k, n\), got shape \(64, 8\)"),
        ({"weight": W.int()}, TypeError, "weight must be a float tensor that format= quantizes"),
        ({"input": quantize(X, "mxfp4")}, ValueError, "format is 'mxfp8', input is in mxfp4"),
    ],
)
@pytest.mark.parametrize("form", [interlace, functional])
@ranks(2, place="sim")
def test_what_cannot_be_multiplied_is_refused_on_all_ranks(
    form: Any, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {"input": X, "weight": W, "format": "mxfp8"}
    if interlace.get_rank():
        options.update(change)
    for learning in (False, True):
        options["bias"] = torch.zeros(1, 8, requires_grad=learning)
        with pytest.raises(error, match=words if interlace.get_rank() else "rank 1|differ"):
            form.all_to_all_grouped_matmul(**options, input_splits=[1, 2], output_splits=[1, 1])


@pytest.mark.parametrize("other", ["mxfp8_e5m2", None])
@ranks(2, place="sim")
def test_ranks_compare_the_format(other: Any) -> None:
    rank, one_token = interlace.get_rank(), torch.tensor([[0], [0], [1]])
    words = f"format.* differs between ranks: mxfp8 on rank 0, {other}.* on rank 1"
    options: Any = {"format": ("mxfp8", other)[rank]}
    for form in (interlace, functional):
        sent = {} if form is interlace else {"home_splits": [2, 1]}
        for op, operands, more in (
            (form.all_gather_matmul, (X, W[0]), {}),
            (form.matmul_all_reduce, (X, W[0]), {}),
            (form.all_gather_grouped_matmul, (X, W, [3], [3, 3]), {}),
            (form.grouped_matmul_combine, (X, W, [2, 1], one_token), sent),
        ):
            with pytest.raises(ValueError, match=words):
                op(*operands, **more, **options)
    layer = nn.MoE(64, 8, 2, 1, **options)
    with pytest.raises(ValueError, match=words):
        layer(X)


# -- operands that are block-scaled: functional forms are as the eager ones ----------------------------


def scaled(name: Any, *shape: int, seed: int) -> Any:
    return quantize(noise(0, seed, shape), name)


def scaled_weights(name: Any, count: int, seed: int) -> Any:
    return quantize(noise(0, seed, (count, 20, WIDTHS[0])), name, weight=True).t()


def same(found: Any, right: Any) -> None:
    assert torch.equal(functional.wait(found), functional.wait(right))


def exchanges(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    w, sent = scaled_weights(name, 2, 20 + rank), [1 + (rank + e) % 2 for e in range(2 * size)]
    x = scaled(name, sum(sent), WIDTHS[0], seed=rank)
    received, right, splits = interlace.all_to_all_grouped_matmul(x, w, sent, return_received=True)  # type: ignore[misc]
    lengths = splits.flatten().tolist()
    exchange: Any = functional.all_to_all_grouped_matmul
    rows, output = exchange(x, w, sent, lengths, return_received=True)
    same(output, right)
    same(exchange(x, w, sent, lengths), right)
    assert rows.format == name
    assert torch.equal(rows.dequantize(), received.dequantize())
    every, sent_to = scaled_weights(name, 2, 7), [1 + rank, 2]
    shard = scaled(name, sum(sent_to), WIDTHS[0], seed=5 + rank)
    right, splits = interlace.all_gather_grouped_matmul(shard, every, sent_to)  # type: ignore[misc]
    gather: Any = functional.all_gather_grouped_matmul
    same(gather(shard, every, sent_to, splits.flatten().tolist()), right)


def dispatches(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    experts, tokens = 2 * size, (5, 3)[rank]
    x, w = scaled(name, tokens, WIDTHS[0], seed=rank), scaled_weights(name, 2, 20 + rank)
    chosen = (torch.arange(tokens)[:, None] + torch.tensor([rank, rank + size])) % experts
    share = noise(rank, 2, (tokens, 2))
    combine: Any = functional.grouped_matmul_combine
    for most in (None, 5):
        about: Any = x, chosen, share, experts
        how: Any = {"num_max_dispatch_tokens_per_rank": most}
        eager, handle = interlace.experts.dispatch(*about, **how)
        rows: Any = eager.x
        right = interlace.grouped_matmul_combine(rows, w, handle)
        received, handle = functional.dispatch(*about, **how)
        found: Any = received.x
        assert (found.format, found.shape) == (name, rows.shape)
        assert torch.equal(found.dequantize(), rows.dequantize())
        same(combine(found, w, handle), right)
    rows, sent = interlace.experts.permute(x, chosen, experts)
    hidden, _, splits = interlace.all_to_all_grouped_matmul(rows, w, sent, return_received=True)  # type: ignore[misc]
    right = interlace.grouped_matmul_combine(hidden, w, splits, chosen, share)
    lengths = {"home_splits": sent.tolist(), "splits": splits.flatten().tolist()}
    same(combine(hidden, w, topk_idx=chosen, topk_weights=share, **lengths), right)


@pytest.mark.parametrize("form", [exchanges, dispatches])
@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
def test_as_the_eager_ones(form: Any, name: str) -> None:
    interlace.run(form, 2, name)


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
@ranks(1, place="sim")
def test_in_a_graph(name: Any) -> None:
    """A graph of one rank: simulated ranks cannot all trace at once."""
    w, chosen, share = (
        scaled_weights(name, 2, 1),
        torch.tensor([[0, 1], [1, 0]]),
        noise(0, 2, (2, 2)),
    )

    def layer(x: Tensor) -> Any:
        quantized: Any = quantize(x, name)
        how: Any = {"num_max_dispatch_tokens_per_rank": 3}
        received, handle = functional.dispatch(quantized, chosen, share, 2, **how)
        rows: Any = received.x
        combined = functional.grouped_matmul_combine(rows, w, handle)
        exchanged: Any = functional.all_to_all_grouped_matmul(quantized, w, [1, 1], [1, 1])
        return functional.wait(combined), functional.wait(exchanged)

    x = noise(0, 1, (2, WIDTHS[0]))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(x), layer(x)))


@ranks(2, place="sim")
def test_wrong_operands_are_refused_on_all_ranks() -> None:
    first = interlace.get_rank() == 0
    x, w = scaled("mxfp8", 2, WIDTHS[0], seed=0), scaled_weights("mxfp8", 1, 1)
    exchange: Any = functional.all_to_all_grouped_matmul
    with pytest.raises(ValueError, match="input is in mxfp8, weight in mxfp4"):
        exchange(x, scaled_weights("mxfp4", 1, 1) if first else w, [1, 1], [1, 1])
    with pytest.raises(ValueError, match=r"x must be \(tokens, hidden\), its blocks along hidden"):
        functional.dispatch(x.t() if first else x, torch.zeros(2, 1, dtype=torch.long), None, 2)


@ranks(2, place="sim")
def test_weights_of_tokens_learn() -> None:
    """The gradient of a token's weight is its row's product with the gradient of the sum."""
    rank = interlace.get_rank()
    x, w = scaled("mxfp8", 2, WIDTHS[0], seed=rank), scaled_weights("mxfp8", 1, 3 + rank)
    chosen, grad = torch.tensor([[0], [1]]), noise(0, 5, (2, 20))
    received, handle = interlace.experts.dispatch(x, chosen, torch.ones(2, 1), 2)
    rows: Any = received.x
    about: Any = rows, w, handle, chosen
    how: Any = {"out_dtype": torch.float32}
    for form in (interlace, functional):
        share = torch.ones(2, 1, requires_grad=True)
        alone = functional.wait(form.grouped_matmul_combine(*about, torch.ones(2, 1), **how))
        found: Any = form.grouped_matmul_combine(*about, share, **how)
        same(found, alone)
        found.backward(grad)
        torch.testing.assert_close(share.grad, (alone * grad).sum(1, keepdim=True))
