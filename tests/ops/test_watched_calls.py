"""Calls with a gradient under checkpoints and modes of torch, and several of them in flight."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import interlace
from interlace import experts, functional, nn
from interlace.nn.functional import context_parallel_attention
from ranks import ranks

Tensor = torch.Tensor
unwaited: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size
SIZE = 2
TOP = torch.tensor([[0, 1], [1, 0], [1, -1], [0, -1]])
LAYER = interlace.LayerNorm(torch.full((4,), 1.5), torch.ones(4), 0.5)


def under_no_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        whole: Any = interlace.all_gather_matmul(x, w, algorithm="unfused")
    return (x * 2) @ w + whole.sum()


def sent_and_returned(x: Tensor, w: Tensor) -> Tensor:
    received, handle = experts.dispatch(x, TOP, (w[:2, :2] ** 2).repeat(2, 1), 2)
    rows: Any = received.x
    return experts.combine(torch.sin(rows), handle)  # type: ignore[return-value]


def by_handle(x: Tensor, w: Tensor) -> Any:
    received, handle = experts.dispatch(x, TOP, None, 2)
    return interlace.grouped_matmul_combine(received.x, w[None], handle)


def unequal_shards(x: Tensor, w: Tensor) -> Any:
    return interlace.all_gather_matmul(x[: 2 + interlace.get_rank()], w, return_gathered=True)


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    # x (4, 4) and w (4, 4) differ on each rank
    "all_gather_matmul": lambda x, w: interlace.all_gather_matmul(x, w, activation="relu"),
    "all_gather_matmul of weights": lambda x, w: interlace.all_gather_matmul(
        x, [w, w[:, :2].contiguous()], bias=[w[0], None], return_gathered=True
    ),
    "all_gather_matmul of columns": lambda x, w: interlace.all_gather_matmul(
        x, torch.cat([w, w]), gather_dim=1
    ),
    "all_gather_matmul of unequal shards": unequal_shards,
    "matmul_reduce_scatter": lambda x, w: interlace.matmul_reduce_scatter(x, w, bias=w[0]),
    "matmul_reduce_scatter, norm": lambda x, w: interlace.matmul_reduce_scatter(
        x, w, norm=LAYER, gather_normed=True
    ),
    "matmul_all_reduce": lambda x, w: interlace.matmul_all_reduce(x, w, activation="relu"),
    "matmul_all_reduce, norm": lambda x, w: interlace.matmul_all_reduce(x, w, norm=LAYER),
    "all_reduce_norm": lambda x, w: interlace.all_reduce_norm(x * w, norm=LAYER),
    "reduce_scatter_norm": lambda x, w: interlace.reduce_scatter_norm(x * w, norm=LAYER),
    "all_to_all_grouped_matmul": lambda x, w: interlace.all_to_all_grouped_matmul(
        x, w[None], [2, 2]
    )[0],
    "all_gather_grouped_matmul": lambda x, w: interlace.all_gather_grouped_matmul(
        x, w[None], [4], activation="relu"
    ),
    "grouped_matmul_combine": lambda x, w: interlace.grouped_matmul_combine(
        x, w[None], [2, 2], torch.tensor([[0], [1], [0], [1]])
    ),
    "grouped_matmul_combine by a handle": by_handle,
    "dispatch, combine": sent_and_returned,
    "matmul_all_to_all": lambda x, w: functional.matmul_all_to_all(x, w),
    "all_to_all_matmul": lambda x, w: functional.all_to_all_matmul(x, torch.cat([w, w])),
    "context_parallel_attention": lambda x, w: context_parallel_attention(
        *[each.reshape(1, 4, 1, 4) for each in (x, w, x @ w)]
    ),
    "all_reduce": lambda x, w: functional.all_reduce(x @ w),
    "all_gather": lambda x, w: functional.all_gather(x @ w),
    "reduce_scatter": lambda x, w: functional.reduce_scatter(x @ w),
    "all_to_all": lambda x, w: functional.all_to_all(x @ w),
    "column_parallel_linear": lambda x, w: nn.column_parallel_linear(x, [w], group=None),
    "row_parallel_linear": lambda x, w: nn.row_parallel_linear(x, w, group=None),
    "without a gradient": under_no_grad,
}


def results(call: Callable[..., Any], *given: Tensor) -> tuple[Tensor, ...]:
    """Return the floats among the results, after a wait."""
    leaves = [functional.wait(each) for each in tree_leaves(call(*given))]
    return tuple(each for each in leaves if each.is_floating_point())


def selective(*saved: str) -> Any:
    """Return a policy that saves only the results of ops with such names."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        named = str(op).startswith(saved) and "empty" not in str(op)
        return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def counted(call: Callable[..., Any], *given: Tensor) -> Any:
    with FlopCounterMode(display=False):
        return call(*given)


WAYS: dict[str, Callable[..., Any]] = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "a reentrant checkpoint": functools.partial(checkpoint, use_reentrant=True),
    "products are saved": functools.partial(
        checkpoint, use_reentrant=False, context_fn=selective("aten.mm", "aten.addmm", "aten.bmm")
    ),
    "ops of interlace are saved": functools.partial(
        checkpoint, use_reentrant=False, context_fn=selective("interlace.")
    ),
    "all is saved": functools.partial(checkpoint, use_reentrant=False, context_fn=selective("")),
    "a mode": counted,
}


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + interlace.get_rank())
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]


def found_by(run: Callable[..., Any]) -> list[Tensor]:
    x, w = operands()
    outputs = run(x, w)
    torch.stack([(each**2).sum() for each in outputs if each.requires_grad]).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [*outputs, x.grad, w.grad]


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("error")
@ranks(SIZE)
def test_who_watches_a_call_changes_nothing(place: str, name: str) -> None:
    call = functools.partial(results, CALLS[name])
    right = found_by(call)
    before = unwaited()
    for way, run in WAYS.items():
        for each, other in zip(found_by(functools.partial(run, call)), right, strict=True):
            assert torch.equal(each, other), way
        with FlopCounterMode(display=False):  # also around the backward
            watched = found_by(call)
        assert all(map(torch.equal, watched, right)), way
        assert unwaited() == before, way


def gradients(flip: bool, activation: Any) -> list[torch.Tensor]:
    rank = interlace.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((4, 3), (3, 5), (4, 3), (3, 5))
    ]
    x, w, y, v = tensors
    how: Any = {"async_op": True, "activation": activation}
    first, second = (
        interlace.matmul_reduce_scatter(x, w, **how),
        interlace.matmul_reduce_scatter(y, v, **how),
    )
    if flip and rank:
        of_second, of_first = second.wait(), first.wait()
    else:
        of_first, of_second = first.wait(), second.wait()
    (2 * of_first.sum() + 3 * (of_second**2).sum()).backward()
    return [each.grad for each in tensors]  # type: ignore[misc]


@pytest.mark.parametrize("place", ["sim", "shm"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_ranks_may_wait_in_any_order(place: str, activation: str | None) -> None:
    alike = interlace.run(gradients, 2, False, activation, place=place)
    other = interlace.run(gradients, 2, True, activation, place=place)
    for mine, right in zip(alike, other, strict=True):
        assert all(map(torch.equal, mine, right))


@ranks(2, place="sim")
def test_what_has_changed_before_the_wait_has_no_gradient() -> None:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    work = interlace.matmul_all_reduce(x, w, async_op=True)
    if interlace.get_rank():
        with torch.no_grad():
            w.mul_(10)
    product = work.wait()
    with pytest.raises(
        (RuntimeError, ValueError),
        match="modified by an inplace operation between the call and wait",
    ):
        product.sum().backward()


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(2)
def test_a_future_has_the_recorded_result(place: str) -> None:
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(3, 5)
    work: Any = interlace.matmul_all_reduce(x, w, async_op=True)
    work.get_future().wait().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 10.0))


class OwnParameter(torch.nn.Parameter):
    """A parameter with attributes of its layer."""


@pytest.mark.parametrize("place", ["sim", "shm"])
@ranks(2)
def test_classes_of_parameters_may_have_uneven_shards(place: str) -> None:
    shard = torch.ones(2 + interlace.get_rank(), 3, requires_grad=True)
    weight = OwnParameter(torch.ones(3, 5))
    product: Any = interlace.all_gather_matmul(shard, weight)
    product.sum().backward()
    assert product.shape == (5, 5)
    assert weight.grad is not None and bool((weight.grad == 5.0).all())
