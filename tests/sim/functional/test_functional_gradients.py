"""Gradients of functional and fused ops against plain torch; backwards of simulated ranks in engines."""

import ctypes
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import interlace
from interlace import functional, nn
from interlace.functional import wait
from interlace.nn import column_parallel_linear, row_parallel_linear
from interlace.nn.functional import context_parallel_attention
from interlace.runtime.core.errors import DeadlockError, InterlaceError
from multi.functional.op_cases import TABLE, flat, reference
from ranks import ranks
from support import failure, noise, schedule_digest

Tensor = torch.Tensor


REAL = re.compile(r"matmul|norm|=max|=min")


def gradients(outputs: list[Tensor], of: list[Tensor]) -> list[Tensor]:
    """Return first and second gradients, also of complex numbers."""
    loss = torch.stack([(each * each.conj() * each).real.sum() for each in outputs]).sum()
    first = torch.autograd.grad(loss, of, create_graph=True, materialize_grads=True)
    parts = [(each * each).imag if each.is_complex() else each * each for each in first]
    squares = torch.stack([each.sum() for each in parts]).sum()
    if not squares.requires_grad:
        return list(first)
    return [*first, *torch.autograd.grad(squares, of, materialize_grads=True)]


def check_second_gradients(*, of_complex: bool) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    for case in TABLE:
        everyone = [case.inputs(of, size) for of in range(size)]
        if of_complex:
            everyone = [
                [torch.complex(x, x.flip(-1) + of + 0.5 if x.dim() else x) for x in inputs]
                for of, inputs in enumerate(everyone)
            ]
        of_all = [each.requires_grad_() for inputs in everyone for each in inputs]
        own = [each.detach().clone().requires_grad_() for each in everyone[rank]]
        if of_complex and REAL.search(case.name):
            with pytest.raises(TypeError, match="complex"):
                wait(case.bound()(*own))
            continue
        found = gradients(flat(case.bound()(*own)), own)
        right = gradients(flat(reference(case, everyone)), of_all)
        mine = slice(rank * len(own), (rank + 1) * len(own))
        expected = [*right[: len(of_all)][mine], *right[len(of_all) :][mine]]
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                wait(each), other, msg=lambda text, n=case.name: f"{n}: {text}"
            )


@ranks(place="sim")
def test_complex_numbers() -> None:
    check_second_gradients(of_complex=True)


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.filterwarnings("error")
@ranks(2)
def test_second_gradients(place: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also in processes
        check_second_gradients(of_complex=False)


NOT_TWICE: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "attention": (
        "context_parallel_attention_backward has no gradients",
        lambda x: context_parallel_attention(HEADS * x[0, 0], HEADS, HEADS),
    ),
    "combine": (
        "combine has no .* second ones of topk_weights", lambda x: returned(x, x[:, :1] ** 2),
    ),
    "routed_matmul_combine": (
        "routed_matmul_combine_backward has no gradients", lambda x: multiplied_and_returned(x),
    ),
}  # fmt: skip


def returned(x: Tensor, weights: Tensor) -> Tensor:
    received, handle = interlace.experts.dispatch(x, ONE_EACH, weights, num_experts=3)
    rows: Any = received.x
    return interlace.experts.combine(rows**2, handle)  # type: ignore[return-value]


def multiplied_and_returned(x: Tensor) -> Tensor:
    received, handle = interlace.experts.dispatch(x, ONE_EACH, None, num_experts=3)
    return interlace.grouped_matmul_combine(received.x, SQUARE[None], handle)  # type: ignore[return-value]


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize("name", NOT_TWICE)
@ranks(3)
def test_what_has_no_second_gradients_says_so(place: str, name: str) -> None:
    text, call = NOT_TWICE[name]
    x = torch.rand(3, 3, requires_grad=True)
    output = functional.wait(call(x))
    (first,) = torch.autograd.grad((output**3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=text):
        (first**2).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_second_derivative_of_a_product_with_zeros(dtype: torch.dtype) -> None:
    """The reference is ``torch.prod``; a column has zero, one or two zeros."""
    every = torch.tensor([[2, 3, 0], [0, 5, 0], [4, 7, 6]], dtype=dtype)
    if dtype.is_complex:
        every = every * torch.tensor([[1j], [1 + 1j], [2 - 1j]])
    weights = torch.tensor([[1.0], [2.0], [3.0]])

    def derived(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad(y.real.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.real.mul(weight).sum(), x)
        return first.detach(), second

    def on_rank() -> tuple[Tensor, Tensor]:
        rank = interlace.get_rank()
        x = every[rank].clone().requires_grad_()
        return derived(x, functional.all_reduce(x, "product").wait() / 3, weights[rank])  # type: ignore[attr-defined]

    whole = every.clone().requires_grad_()
    first, second = derived(whole, whole.prod(0), weights)
    for rank, found in enumerate(interlace.run(on_rank, 3)):
        torch.testing.assert_close(found, (first[rank], second[rank]))


@ranks(1, place="sim")
def test_a_lone_rank() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    y = functional.all_gather_matmul(x, torch.full((3, 1), 2.0))
    functional.reduce_scatter(y, "avg").sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("seed", range(4))
@ranks(place="sim")
def test_ranks_take_turns_in_many_orders(seed: int) -> None:
    """Each rank's graph has several ops in flight, in the order of the seed."""
    x = torch.arange(1.0, 4.0).add(interlace.get_rank()).requires_grad_()
    parts = [functional.all_reduce(x * k, group="0") for k in (1, 2)]
    whole = functional.all_gather(functional.broadcast(parts[0] + parts[1], 1), group="0")
    (whole.square().sum() / 2).backward()
    # y = 3 * sum(x) is gathered twice on both ranks; these are the parts of rank 1
    total = torch.arange(1.0, 4.0) * 2 + 1
    assert x.grad is not None and torch.equal(x.grad, 3 * 3 * total * 4)


@pytest.mark.parametrize("algorithm", ["fused", "pipelined"])
@ranks(place="sim")
def test_columns_that_are_scattered_have_gradients(algorithm: Any) -> None:
    """The gradient is gathered along the dimension that a matmul sums. Some algorithms cannot do this."""
    rank = interlace.get_rank()
    x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
    w = torch.ones(3, 5, requires_grad=True)
    interlace.matmul_reduce_scatter(x, w, scatter_dim=1, algorithm=algorithm).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[5.0] * 3] * 2
    assert w.grad is not None and w.grad.tolist() == [[2.0 * (1 + rank)] * 5] * 3


ROWS, SQUARE = torch.ones(3, 3), torch.ones(3, 3)
HEADS = torch.ones(1, 3, 3, 4)
ONE_EACH: Any = torch.arange(3).unsqueeze(1)
NORM = interlace.RMSNorm()
CALLS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    # op: (what needs a gradient, a call with that)
    "all_gather_matmul": ("a weight", lambda w: interlace.all_gather_matmul(ROWS, w)),
    "matmul_reduce_scatter": ("weight", lambda w: interlace.matmul_reduce_scatter(ROWS, w)),
    "matmul_all_reduce": ("input or weight", lambda w: functional.matmul_all_reduce(ROWS, w)),
    "all_reduce_norm": ("input", lambda x: functional.all_reduce_norm(x, norm=NORM)),
    "reduce_scatter_norm": (
        "bias, residual or norm",
        lambda w: functional.reduce_scatter_norm(ROWS, norm=interlace.RMSNorm(w[0])),
    ),
    "matmul_all_to_all": ("input, weight or bias", lambda w: functional.matmul_all_to_all(ROWS, w)),
    "all_to_all_matmul": ("input", lambda x: functional.all_to_all_matmul(x, torch.ones(9, 2))),
    "context_parallel_attention": (
        "q, k or v", lambda x: context_parallel_attention(HEADS, HEADS, HEADS * x[0, 0]),
    ),
    "dispatch": (
        "x or topk_weights", lambda x: interlace.experts.dispatch(x, ONE_EACH, None, num_experts=3),
    ),
    "all_to_all_grouped_matmul": (
        "weight", lambda w: interlace.all_to_all_grouped_matmul(ROWS, w[None], [1, 1, 1]),
    ),
    "all_to_all_grouped_matmul, whose counts stay on the device": (
        "another tensor",
        lambda b: interlace.all_to_all_grouped_matmul(
            ROWS, SQUARE[None], torch.ones(3, dtype=torch.int64), bias=b[:1], num_max_rows_per_rank=3
        ),
    ),
    "grouped_matmul_combine": (
        "input, weight or bias",
        lambda x: interlace.grouped_matmul_combine(x, SQUARE[None], [1, 1, 1], ONE_EACH),
    ),
    "all_gather_matmul, of a layer": (
        "a weight", lambda w: nn.column_parallel_linear(ROWS, [w], group=None)[0],
    ),
    "matmul_reduce_scatter, of a layer": (
        "weight", lambda w: nn.row_parallel_linear(ROWS, w, group=None),
    ),
    "matmul_reduce_scatter, of what is activated": (
        "another tensor",
        lambda b: interlace.matmul_reduce_scatter(ROWS, SQUARE, bias=b[0], activation="relu"),
    ),
    "matmul_all_reduce, and a norm of what is activated": (
        "another tensor",
        lambda r: interlace.matmul_all_reduce(
            ROWS, SQUARE, residual=r, activation="relu", norm=NORM
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CALLS)
@ranks(3, place="sim")
def test_what_needs_a_gradient_on_some_ranks_only_is_refused_on_all(op: str) -> None:
    """A rank's backward would wait for ranks that have no backward."""
    what, call = CALLS[op]
    text = f"^{op.split(',')[0]}: the set of inputs that require a gradient differs between ranks: "
    for odd, recording in ((2, True), (0, False)):
        x, alone = torch.ones(3, 3), interlace.get_rank() == odd
        x.requires_grad_(alone or not recording)
        told = f"{text}None on rank 0, {what} on rank {2 if recording else 1}$"
        with torch.set_grad_enabled(recording or not alone), pytest.raises(ValueError, match=told):
            call(x)
        for each in (False, True):  # alike on all ranks; and what was remembered is not mixed up
            call(torch.ones(3, 3, requires_grad=each))


BIASED: dict[str, Callable[[Tensor], Any]] = {
    "all_gather_matmul": lambda b: interlace.all_gather_matmul(
        ROWS, SQUARE, bias=b, activation="relu"
    ),
    "all_gather_matmul of weights": lambda b: interlace.all_gather_matmul(
        ROWS, [SQUARE, SQUARE], bias=[None, b]
    ),
    "matmul_reduce_scatter": lambda b: interlace.matmul_reduce_scatter(ROWS, SQUARE, bias=b),
    "matmul_all_reduce": lambda b: interlace.matmul_all_reduce(ROWS, SQUARE, bias=b),
    "matmul_all_reduce, norm": lambda b: interlace.matmul_all_reduce(
        ROWS, SQUARE, bias=b, norm=interlace.RMSNorm(b)
    ),
    "all_reduce_norm": lambda b: interlace.all_reduce_norm(
        ROWS, bias=b, residual=ROWS + b, norm=NORM
    ),
    "all_gather_grouped_matmul": lambda b: interlace.all_gather_grouped_matmul(
        ROWS, SQUARE[None], [3], bias=b[None], activation="relu"
    ),
    "functional.matmul_all_reduce": lambda b: functional.matmul_all_reduce(ROWS, SQUARE, bias=b),
    "functional.matmul_reduce_scatter": lambda b: functional.matmul_reduce_scatter(
        ROWS, SQUARE, bias=b
    ),
}


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(3)
def test_biases_may_need_gradients_on_some_ranks_only(place: str) -> None:
    """The gradient of a bias needs only the rank's rows."""
    for op, call in BIASED.items():
        gradients = []
        for learning in (interlace.get_rank() == 1, True):
            bias = torch.ones(3, requires_grad=learning)
            outputs = [each for each in tree_leaves(call(bias)) if isinstance(each, Tensor)]
            with torch.no_grad():
                right = [each for each in tree_leaves(call(bias)) if isinstance(each, Tensor)]
            torch.testing.assert_close(outputs, right, msg=op)
            if learning:
                torch.stack([each.float().sum() for each in outputs]).sum().backward()
                gradients.append(bias.grad)
        assert all(each is not None for each in gradients), op
        assert interlace.get_rank() != 1 or torch.equal(*gradients), op  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["fused", "pipelined"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_any_lengths_have_gradients(dim: int, algorithm: Any) -> None:
    lengths = [3, 0, 5]
    how: Any = {"return_gathered": True, "activation": ["relu", None], "algorithm": algorithm}
    if dim == 2:
        how["algorithm"] = "auto"
    torch.manual_seed(0)
    shards = [torch.randn([n if i == dim else 2 + i for i in range(3)]) for n in lengths]
    k = sum(lengths) if dim == 2 else 4
    given = [torch.randn(k, 6), torch.randn(k, 2), torch.randn(6), torch.randn(2)]

    def loss(gathered: Tensor, outputs: list[Tensor], rank: int) -> Tensor:
        squares = [each.square().sum() for each in (gathered, *outputs)]
        return torch.stack(squares).sum() * (1 + rank)

    inputs = [each.double().requires_grad_() for each in shards]
    whole, right = torch.cat(inputs, dim), []
    for _ in shards:
        w, v, b, c = own = [each.double().requires_grad_() for each in given]
        right.append((whole, [(whole @ w + b).relu(), whole @ v + c], own))
    losses = [loss(*made, rank) for rank, (*made, _) in enumerate(right)]  # type: ignore[call-arg]
    torch.stack(losses).sum().backward()

    def case() -> None:
        rank = interlace.get_rank()
        x, *own = (each.clone().requires_grad_() for each in (shards[rank], *given))
        made = interlace.all_gather_matmul(x, own[:2], gather_dim=dim, bias=own[2:], **how)
        loss(*made, rank).backward()
        whole, outputs, leaves = right[rank]
        found = [made[0], *made[1], x.grad, *(each.grad for each in own)]
        expected = [whole, *outputs, inputs[rank].grad, *(each.grad for each in leaves)]
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each.double(), other, rtol=1e-5, atol=1e-4)  # type: ignore[union-attr]

    interlace.run(case, 3)


@pytest.mark.parametrize("dim", [0, 1])
def test_second_derivatives_of_unequal_shards(dim: int) -> None:
    lengths = [2, 0, 3]
    torch.manual_seed(0)
    of_rank = [torch.randn((n, 4) if dim == 0 else (4, n)).double() for n in lengths]
    weight = torch.randn(4 if dim == 0 else sum(lengths), 2).double()

    def derived(y: list[Tensor], of: list[Tensor]) -> list[Tensor]:
        loss = torch.stack([each.pow(3).sum() for each in y]).sum()
        first = torch.autograd.grad(loss, of, create_graph=True)
        squares = torch.stack([each.square().sum() for each in first]).sum()
        return list(torch.autograd.grad(squares, of))

    def on_rank() -> list[Tensor]:
        x, w = (each.clone().requires_grad_() for each in (of_rank[interlace.get_rank()], weight))
        return derived([interlace.all_gather_matmul(x, w, gather_dim=dim)], [x, w])

    shards = [each.clone().requires_grad_() for each in of_rank]
    weights = [weight.clone().requires_grad_() for _ in lengths]
    whole = torch.cat(shards, dim)
    right = derived([whole @ w for w in weights], [*shards, *weights])
    for rank, found in enumerate(interlace.run(on_rank, 3)):
        torch.testing.assert_close(found, [right[rank], right[3 + rank]])


@ranks(3, place="sim")
def test_unequally_many_rows_of_experts_have_gradients() -> None:
    rank = interlace.get_rank()
    rows, weight = torch.ones(rank, 4).requires_grad_(), torch.ones(1, 4, 2, requires_grad=True)
    output, _ = interlace.all_gather_grouped_matmul(rows, weight, [rank])
    (output.sum() * (1 + rank)).backward()
    assert rows.grad is not None and rows.grad.tolist() == [[12.0] * 4] * rank
    assert weight.grad is not None and weight.grad.tolist() == [[[3.0 * (1 + rank)] * 2] * 4]


@ranks(3, place="sim")
def test_a_call_with_a_gradient_is_one_op() -> None:
    seen: list[str] = []
    group, weight = interlace.new_group(), torch.ones(4, 2, requires_grad=True)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_matmul": lambda: interlace.all_gather_matmul(
            torch.ones(interlace.get_rank(), 4), weight, group=group
        ),
        "matmul_reduce_scatter": lambda: interlace.matmul_reduce_scatter(
            torch.ones(4, 4), weight, activation="relu", norm=NORM, group=group
        ),
        "all_to_all_grouped_matmul": lambda: interlace.all_to_all_grouped_matmul(
            torch.ones(3, 4), weight[None], [1, 1, 1], group=group
        ),
    }
    with group.register_hook(before=lambda op: seen.append(op.op)):
        for call in calls.values():
            call()
    assert seen == list(calls)


@ranks(place="sim")
def test_who_waits_without_recording_has_the_history_of_the_call() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    work: Any = interlace.matmul_all_reduce(x, torch.ones(3, 1), activation="relu", async_op=True)
    with torch.no_grad():
        y = work.wait()
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    ("dim", "rows", "text"),
    [
        (0, [4, 4, 5], r"weight has 5 rows, input has k = 4 \(shape \(4, 4\)\)"),
        (1, [16, 16, 16], r"weight has 16 rows, the gathered input has k = 15 \(\d on rank \d\)"),
        (1, [15, 15, 16], r"rows of weight differs .* \(15,\) on rank 0, \(16,\) on rank 2"),
    ],
)
@ranks(3, place="sim")
def test_weights_that_do_not_fit_unequal_shards_are_refused(
    dim: int, rows: list[int], text: str
) -> None:
    rank = interlace.get_rank()
    shard = torch.ones(2 + rank, 4) if dim == 0 else torch.ones(4, 4 + rank)
    with pytest.raises(ValueError, match=text):
        weight = torch.ones(rows[rank], 3)
        interlace.all_gather_matmul(shard.requires_grad_(), weight, gather_dim=dim)
    interlace.barrier()


def test_ranks_that_differ_in_what_a_plain_op_needs_are_told_in_backward() -> None:
    def case() -> None:
        x = torch.ones(2, requires_grad=True)
        y = functional.all_gather(x if interlace.get_rank() else x.detach())
        (y.sum() + x.sum()).backward()
        interlace.barrier()

    error = failure(case, 2)
    assert isinstance(error, ValueError), error
    assert "rank 0 calls barrier, rank 1 calls reduce_scatter" in str(error)


def test_what_still_needs_ranks_of_its_own() -> None:
    def case() -> None:
        torch.ops.interlace.all_reduce(torch.ones(2), "sum", 2, "0")

    error = failure(case, 2)
    assert isinstance(error, interlace.InterlaceError) and 'place="shm"' in str(error)


def test_results_that_are_not_waited_for_are_complete_outside() -> None:
    def started() -> dict[str, Any]:
        return {"sum": functional.all_reduce(torch.ones(2)), "parts": [torch.zeros(1)]}

    for result in interlace.run(started, 3):
        assert type(result["sum"]) is torch.Tensor
        assert result["sum"].tolist() == [3.0, 3.0] and result["parts"][0].item() == 0


def test_transforms_are_refused_after_a_backward_too() -> None:
    def backward() -> None:
        functional.wait(functional.all_reduce(torch.ones(2, requires_grad=True))).sum().backward()

    def mapped() -> None:
        torch.vmap(lambda t: functional.all_reduce(t))(torch.ones(2, 3))

    interlace.run(backward, 2)
    with pytest.raises(interlace.InterlaceError, match=r"torch\.func .* is not supported"):
        interlace.run(mapped, 2)


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks; ``broken`` ranks raise there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: tuple[int, ...] = ()) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if interlace.get_rank() in ctx.broken:
            raise ZeroDivisionError("broken")
        total = grad.clone()
        interlace.all_reduce(total)
        return total, None


def left_behind() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "backward"]


@ranks(3, place="sim")
def test_many_nodes_side_by_side_find_their_ranks() -> None:
    rank = interlace.get_rank()
    x = torch.full((2,), 1.0 + rank, requires_grad=True)
    branches = [Summed.apply(x * (i + 1 + rank)) for i in range(5)]
    torch.stack(branches).square().sum().backward()
    sums = [sum(2 * (1 + r) * (i + 1 + r) for r in range(3)) for i in range(5)]
    expected = sum((i + 1 + rank) * total for i, total in enumerate(sums))
    assert x.grad is not None and x.grad.tolist() == [float(expected)] * 2


def test_the_same_seed_is_the_same_order() -> None:
    def case() -> str:
        x = noise(interlace.get_rank(), 1, (2, 4)).requires_grad_()
        (y,) = column_parallel_linear(x, [torch.ones(3, 4)], group=None)
        row_parallel_linear(y, torch.ones(2, 3), group=None).sum().backward()
        return schedule_digest()

    first = interlace.run(case, 2, seed=5)
    assert interlace.run(case, 2, seed=5) == first
    assert interlace.run(case, 2, seed=6) != first


def test_hooks_on_saved_tensors_are_those_of_their_rank() -> None:
    def case() -> bool:
        packed = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        rank = interlace.get_rank()
        x = torch.ones(2, requires_grad=True)
        if rank == 0:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                interlace.barrier()
                interlace.barrier()
                y = x * x
            assert len(packed) == 2
        else:
            interlace.barrier()
            y = x * x
            interlace.barrier()
        y.sum().backward()
        return len(packed) == (2 if rank == 0 else 0)

    assert interlace.run(case, 3) == [True] * 3
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]


def test_a_rank_that_is_ended_under_hooks_takes_its_own_away() -> None:
    def case() -> None:
        if interlace.get_rank() == 0:
            raise ZeroDivisionError("broken")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            interlace.barrier()

    for seed in range(3):
        assert isinstance(failure(case, 3, seed=seed), ZeroDivisionError)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]


def test_what_cannot_wait_in_backward_says_so() -> None:
    def case() -> None:
        x = torch.ones(2, requires_grad=True)
        (y,) = column_parallel_linear(x.view(1, 2), [torch.ones(2, 2)], group=None)
        x.register_hook(lambda grad: interlace.barrier())
        y.sum().backward()

    error = failure(case, 2)
    assert isinstance(error, InterlaceError) and not isinstance(error, DeadlockError)
    assert "as in hooks of tensors" in str(error) and not left_behind()


def test_nothing_is_left_behind() -> None:
    def case() -> list[Any]:
        x = torch.ones(2, requires_grad=True)
        Summed.apply(x * 2).sum().backward()
        return [weakref.ref(x)]

    assert [each[0]() for each in interlace.run(case, 2)] == [None] * 2 and not left_behind()


def test_an_error_in_backward_is_the_error_of_its_rank() -> None:
    def case() -> None:
        x = torch.ones(2, requires_grad=True)
        Summed.apply(x * 2, (1,)).sum().backward()

    error = failure(case, 2)
    assert isinstance(error, ZeroDivisionError) and "rank 1" in str(error)
    assert not left_behind()


def test_a_rank_that_never_comes_is_a_deadlock() -> None:
    def case() -> None:
        x = torch.ones(2, requires_grad=True)
        y = Summed.apply(x * 2)
        if interlace.get_rank() == 0:
            y.sum().backward()
        else:
            interlace.recv(torch.ones(1), 0)

    error = failure(case, 2)
    assert isinstance(error, (DeadlockError, ValueError)), error
    assert not left_behind()


def test_an_engine_ends_with_its_rank() -> None:
    """Ctrl-C may end a rank while it serves its engine."""

    rank = threading.get_ident()

    def interrupt(grad: torch.Tensor) -> None:  # in the engine's thread; the rank waits for it
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(rank), ctypes.py_object(KeyboardInterrupt)
        )

    def case() -> None:
        y = Summed.apply(torch.ones(2, requires_grad=True))
        y.register_hook(interrupt)  # and the engine comes to a node of Python next
        y.sum().backward()

    with pytest.raises(KeyboardInterrupt):
        interlace.run(case, 2)
    assert not left_behind()


def test_an_error_leaves_no_gradients_behind() -> None:
    """Gradients in the queue of an ended engine would be freed after Python, and abort it."""
    notes: dict[int, list[weakref.ref[Any]]] = {0: [], 1: []}

    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.stack(inputs).sum(0)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            grads = [grad.clone() for _ in range(9)]
            for each in grads[:8]:  # the last is in the frame of the error
                each.note = Note()  # type: ignore[attr-defined]
                notes[interlace.get_rank()].append(weakref.ref(each.note))  # type: ignore[attr-defined]
            return tuple(grads)

    class Note:
        pass

    def case() -> int:
        x = torch.ones(2, requires_grad=True)
        y = Many.apply(*[x * i for i in range(8)], Summed.apply(x, (0, 1)))
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        return sum(each() is not None for each in notes[interlace.get_rank()])

    assert interlace.run(case, 2) == [0, 0] and {*map(len, notes.values())} == {8}
