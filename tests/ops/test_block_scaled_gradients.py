"""Gradients of matmuls in a block-scaled format, against their definition in plain torch, bit by bit."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import interlace
from cases.block_products import PLAIN, close, product
from interlace import functional
from interlace.ops.matmul.formats import FORMATS, quantize
from ranks import ranks
from tiers import few

Tensor = torch.Tensor
INNER, COLUMNS, BATCH = 160, (18, 34), 3
SHARDS = (5, 24, 0, 3)
"""Rows of each rank's shard: more than one block of 32 with ``BATCH``, fewer, and none; odd numbers too."""


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_rows(left: Sequence[Tensor], right: Sequence[Tensor], name: str) -> Tensor:
    """Return ``left.T @ right`` of the ranks' rows; no two ranks share a block."""
    found = [product(a.T, b.T, name) for a, b in zip(left, right, strict=True) if len(a)]
    return sum(found[1:], found[0])


def summed(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


# -- against it ----------------------------------------------------------------------------------------


def matrix(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).flatten(0, -2)


def gathers(name: str, dim: int, algorithm: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    lengths = SHARDS[:size]
    shape = [(BATCH, n, INNER) if dim else (n, BATCH, INNER) for n in lengths]
    shards = [noise(r, *shape[r]) for r in range(size)]
    every = [[noise(10 * i + r, n, INNER) for i, n in enumerate(COLUMNS)] for r in range(size)]
    x = shards[rank].clone().requires_grad_()
    weights = [w.clone().requires_grad_() for w in every[rank]]
    bias = noise(7, COLUMNS[0]).requires_grad_()
    how: Any = {"gather_dim": dim, "bias": [bias, None], "algorithm": algorithm, "format": name}
    outputs: Any = interlace.all_gather_matmul(x, [w.t() for w in weights], **how)
    of_outputs = [[noise(20 * i + r, *y.shape) for i, y in enumerate(outputs)] for r in range(size)]
    torch.autograd.backward(outputs, of_outputs[rank])
    whole = matrix(torch.cat(shards, dim), dim)
    rows = [matrix(each, dim) for each in shards]
    grads = [torch.cat([matrix(g, dim) for g in grad], 1) for grad in of_outputs]
    joined = [torch.cat(each) for each in every]
    own = [matrix(g, dim) for g in of_outputs[rank]]
    if name in PLAIN:
        for y, w, b in zip(outputs, every[rank], (bias.detach(), 0.0), strict=True):
            assert torch.equal(matrix(y, dim), product(whole, w, name, weight=True) + b)
        of_all = summed(
            [product(g, w.T, name, weight=True) for g, w in zip(grads, joined, strict=True)]
        )
        mine = of_all.split([n * BATCH for n in lengths])[rank]
        assert torch.equal(matrix(x.grad, dim), mine)  # type: ignore[arg-type]
        for w, g in zip(weights, own, strict=True):
            parts = g.split([n * BATCH for n in lengths])
            assert torch.equal(w.grad.T, of_rows(rows, parts, name))  # type: ignore[union-attr]
    of_bias = of_outputs[rank][0].flatten(0, -2).sum(0)
    assert torch.equal(bias.grad, of_bias)  # type: ignore[arg-type]
    for w, g in zip(weights, own, strict=True):
        close(w.grad.T, whole.T, g, name)  # type: ignore[union-attr]


def scatters(name: str, algorithm: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    rows = 24 * size - 3  # the last part is shorter
    inputs = [noise(r, rows, BATCH, INNER) for r in range(size)]
    weights = [noise(10 + r, COLUMNS[0], INNER) for r in range(size)]
    x, w = inputs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    products = [matrix(x, 0) for x in inputs]
    for op, whole in (
        (interlace.matmul_reduce_scatter, False),
        (interlace.matmul_all_reduce, True),
    ):
        for reduce_op in ("sum", "avg"):
            x.grad = w.grad = None
            how: Any = {"reduce_op": reduce_op, "algorithm": algorithm, "format": name}
            y: Any = op(x, w.t(), **how)
            grad = noise(30, rows, BATCH, COLUMNS[0])
            # every rank has a loss of its rows, or each the same share of all
            (y * (grad if whole else grad.chunk(size)[rank])).sum().backward()
            grad = grad * (size if whole else 1) / (size if reduce_op == "avg" else 1)
            of_product = matrix(grad, 0)
            if name in PLAIN:
                pairs = zip(products, weights, strict=True)
                total = summed([product(a, b, name, weight=True) for a, b in pairs])
                total = total / size if reduce_op == "avg" else total
                total = total.view(rows, BATCH, -1)
                assert torch.equal(y, total if whole else total.chunk(size)[rank])
                found = product(of_product, weights[rank].T, name, weight=True)
                assert torch.equal(matrix(x.grad, 0), found)  # type: ignore[arg-type]
                parts = 1 if whole else size
                sides = [[matrix(p, 0) for p in t.chunk(parts)] for t in (inputs[rank], grad)]
                assert torch.equal(w.grad.T, of_rows(*sides, name))  # type: ignore[union-attr]
            close(matrix(x.grad, 0), of_product, weights[rank], name)  # type: ignore[arg-type]
            close(w.grad.T, products[rank].T, of_product, name)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "algorithm"),
    few(
        itertools.product(PLAIN, ("fused", "pipelined", "unfused")),
        ("fp8_block128", "unfused"),
        ("mxfp8", "fused"),
    ),
)
def test_products_are_as_defined(name: str, algorithm: str) -> None:
    interlace.run(gathers, 3, name, 0, algorithm)
    interlace.run(scatters, 2, name, algorithm)


@pytest.mark.parametrize(
    ("name", "ranks"), few(itertools.product(FORMATS, (1, 2, 4)), ("nvfp4", 2))
)
def test_gradients_are_within_the_bound_of_the_format(name: str, ranks: int) -> None:
    interlace.run(gathers, ranks, name, 1, "auto")
    interlace.run(scatters, ranks, name, "auto")


# -- faces ---------------------------------------------------------------------------------------------


def step(form: Any, name: str, around: Callable[[Any], Any] = lambda step: step) -> list[Tensor]:
    """Return the result and the gradients of a pair of linear layers and a sum."""

    def forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = functional.wait(form.all_gather_matmul(x, up.t(), format=name))
        part = functional.wait(form.matmul_reduce_scatter(hidden, down.t(), format=name))
        return functional.wait(form.matmul_all_reduce(part, up.t(), format=name))

    rank = interlace.get_rank()
    shapes = (6, BATCH, INNER), (COLUMNS[0], INNER), (INNER, COLUMNS[0])
    operands = [noise(3 * rank + i, *shape).requires_grad_() for i, shape in enumerate(shapes)]
    result = around(forward)(*operands)
    result.square().sum().backward()
    return [result.detach(), *(each.grad for each in operands)]  # type: ignore[list-item]


def compiled(name: str) -> list[Tensor]:
    def around(forward: Any) -> Any:
        return torch.compile(forward, backend="aot_eager", fullgraph=True)

    return step(functional, name, around)


@pytest.mark.parametrize("name", PLAIN)
def test_functional_and_compiled_calls_have_the_same_gradients(name: str) -> None:
    expected = interlace.run(step, 2, interlace, name)
    others = [
        interlace.run(step, 2, functional, name),
        interlace.run(compiled, 2, name, place="shm"),
    ]
    for found in others:
        for rank in range(2):
            assert all(map(torch.equal, found[rank], expected[rank]))


@ranks(2, place="sim")
def test_the_dtype_of_the_input_is_that_of_results_and_gradients() -> None:
    x = noise(0, 4, 64).bfloat16().requires_grad_()
    w = noise(1, 64, 8).requires_grad_()  # as optimizers keep it
    y: Any = interlace.all_gather_matmul(x, w, format="mxfp8")
    wide: Any = interlace.matmul_all_reduce(x, w, format="mxfp8", out_dtype=torch.float32)
    (y.sum() + wide.sum()).backward()
    assert (y.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert x.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    whole = torch.cat([x.detach()] * 2)
    of_w = product(whole.float().T, torch.ones(8, 8), "mxfp8")
    y = interlace.all_gather_matmul(x, w, format="mxfp8")
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], of_w)


def tails(form: Any, scatters: bool, options: dict[str, Any]) -> None:
    """Return the ops after the product, by torch and as options of the op."""
    x, w = noise(interlace.get_rank(), 4, 64), noise(9, 64, 8)
    op = getattr(form, "matmul_reduce_scatter" if scatters else "matmul_all_reduce")
    residual = noise(4, 2 if scatters else 4, 8)
    found = []
    for apart in (False, True):
        operands = x.clone().requires_grad_(), w.clone().requires_grad_()
        if apart:
            y: Any = functional.wait(op(*operands, format="mxfp8"))
            total = residual + (y.relu() if options else y)
            normed = torch.nn.functional.rms_norm(total, (8,), torch.ones(8), 1e-6)
        else:
            norm = interlace.RMSNorm(torch.ones(8))
            how: Any = {"norm": norm, "residual": residual, **options}
            normed = functional.wait(op(*operands, format="mxfp8", **how)[0])
        (normed * noise(3, *normed.shape)).sum().backward()
        found.append([normed.detach(), *(each.grad for each in operands)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scatters", [True, False])
def test_an_activation_and_a_norm_have_gradients(scatters: bool) -> None:
    for form in (interlace, functional):
        interlace.run(tails, 2, form, scatters, {})
    interlace.run(tails, 2, interlace, scatters, {"activation": "relu"})


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
@ranks(2, place="sim")
def test_without_a_gradient_it_is_the_op_of_scaled_operands(name: str) -> None:
    x, w = noise(interlace.get_rank(), 4, INNER), noise(9, COLUMNS[0], INNER)
    left, right = quantize(x, name), quantize(w, name, weight=True).t()  # type: ignore[arg-type]
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        expected = getattr(interlace, op)(left, right, out_dtype=torch.float32)
        for form in (interlace, functional):
            run: Any = getattr(form, op)
            assert torch.equal(functional.wait(run(left, right, out_dtype=torch.float32)), expected)
            for mine in ((x, w.t()), (x, right), (left, w.t())):
                how: Any = {} if mine[0] is x else {"out_dtype": torch.float32}
                found = functional.wait(run(*mine, format=name, **how))
                assert torch.equal(found, expected)
    bias = [None, noise(8, COLUMNS[0]).bfloat16()]
    for found, expected in zip(
        functional.all_gather_matmul(left, [right, right], bias=bias),
        interlace.all_gather_matmul(left, [right, right], bias=bias),
        strict=True,
    ):
        assert torch.equal(functional.wait(found), expected)
    columns: Any = interlace.matmul_reduce_scatter(x, w.t(), scatter_dim=1, format=name)  # type: ignore[arg-type]
    assert columns.shape == (4, COLUMNS[0] // 2)


X, W = noise(0, 4, 64), noise(1, 64, 8)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"format": "fp8"}, ValueError, "format must be one of fp8_block128, mxfp8"),
        ({"return_gathered": True}, ValueError, "pass interlace.quantize"),
        ({"gather_dim": -1}, ValueError, "gather_dim must not be the last one, -1, with format="),
        ({"weight": W[:32]}, ValueError, "weight has 32 rows, input has k = 64"),
        ({"weight": W.int()}, TypeError, "weight must be a float tensor that format= quantizes"),
        ({"weight": W[0]}, ValueError, r"weight must be \(k, n\), got shape"),
        ({"input": X[:, :33], "format": "mxfp4"}, ValueError, "two numbers in a byte"),
        ({"input": quantize(X, "mxfp4")}, ValueError, "format is 'mxfp8', input is in mxfp4"),
    ],
)
@pytest.mark.parametrize("form", [interlace.all_gather_matmul, functional.all_gather_matmul])
@pytest.mark.parametrize("learning", [True, False])
@ranks(2, place="sim")
def test_what_cannot_be_multiplied_is_refused_on_all_ranks(
    form: Any, learning: bool, how: dict[str, Any], error: type[Exception], words: str
) -> None:
    given: dict[str, Any] = {"input": X, "weight": W, "format": "mxfp8"}
    if interlace.get_rank():
        given.update(how)
    with torch.set_grad_enabled(learning):
        bias = torch.zeros(8, requires_grad=learning)
        with pytest.raises(error, match=words if interlace.get_rank() else "rank 1|differ"):
            form(**given, bias=bias)


@ranks(2, place="sim")
def test_ranks_compare_k() -> None:
    k = (64, 60)[interlace.get_rank()]  # which have packed rows of the same length
    w = W.clone().requires_grad_()
    for form in (interlace, functional):
        with pytest.raises(ValueError, match="k differs between ranks: 64 on rank 0"):
            form.matmul_all_reduce(X[:, :k], w[:k], format="mxfp8")


@ranks(2, place="sim")
def test_a_gradient_has_no_gradient_and_columns_have_none() -> None:
    w = W.clone().requires_grad_()
    y: Any = interlace.all_gather_matmul(X, w, format="mxfp8")
    with pytest.raises(RuntimeError, match="in a block-scaled format have no gradients"):
        torch.autograd.grad(y.square().sum(), w, create_graph=True)
    with pytest.raises(ValueError, match="scatter_dim must not be the last one, 1, with"):
        interlace.matmul_reduce_scatter(X, w, scatter_dim=1, format="mxfp8")
