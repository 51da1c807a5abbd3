"""Column- and row-parallel linear functions against autograd of the unsharded ones in float64."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from cases.linear_cases import BATCH, IN, OUT, SHARD
from interlace import nn
from interlace.groups.groups import resolve
from interlace.nn import (
    DeferredWeightGradients,
    column_parallel_linear,
    linear_functions as linear,
    row_parallel_linear,
)
from interlace.runtime.core.work import Work
from ranks import ranks
from support import noise


def column_step(
    *,
    dtype: torch.dtype = torch.float64,
    weights: Any = None,
    shared: bool = True,
    frozen: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, list[Any]]:
    """Run forward and backward of two weights; return the input and the weights with their gradients."""
    rank = interlace.get_rank()
    x = noise(rank, 1, (SHARD, BATCH, IN), dtype).requires_grad_(shared)
    if weights is None:
        weights = [noise(rank, 2 + i, (OUT[i], IN), dtype).requires_grad_() for i in range(2)]
        weights[0].requires_grad_(not frozen)
    ys = column_parallel_linear(x, weights, group=None, **options)
    losses = [(y * noise(rank, 5 + i, y.shape, dtype)).sum() for i, y in enumerate(ys)]
    torch.stack(losses).sum().backward()
    return x, weights


def row_step(
    *,
    dtype: torch.dtype = torch.float64,
    weight: Any = None,
    shared: bool = True,
    frozen: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    x = noise(rank, 1, (SHARD * size, BATCH, IN), dtype).requires_grad_(shared)
    if weight is None:
        weight = noise(rank, 2, (OUT[0], IN), dtype).requires_grad_(not frozen)
    bias = noise(0, 3, (OUT[0],), dtype).requires_grad_()
    y = row_parallel_linear(x, weight, bias, group=None, **options)
    (y * noise(rank, 4, y.shape, dtype)).sum().backward()
    return x, weight, bias


@ranks(place="sim")
def test_what_is_frozen_gets_no_gradient_and_the_rest_does() -> None:
    x, (w, v) = column_step()
    assert w.grad is not None
    y, (frozen, learning) = column_step(frozen=True)
    assert frozen.grad is None
    assert torch.equal(y.grad, x.grad) and torch.equal(learning.grad, v.grad)
    y, (left, right) = column_step(shared=False)
    assert y.grad is None
    assert torch.equal(left.grad, w.grad) and torch.equal(right.grad, v.grad)
    x, w, b = row_step()
    y, frozen, c = row_step(frozen=True)
    assert frozen.grad is None
    assert torch.equal(y.grad, x.grad) and torch.equal(c.grad, b.grad)
    y, learning, c = row_step(shared=False)
    assert y.grad is None
    assert torch.equal(learning.grad, w.grad) and torch.equal(c.grad, b.grad)


@ranks(place="sim")
def test_an_output_that_nobody_uses_is_left_out() -> None:
    x = noise(interlace.get_rank(), 1, (SHARD, IN)).requires_grad_()
    weights = [torch.ones(3, IN, requires_grad=True), torch.ones(2, IN, requires_grad=True)]
    _, used = column_parallel_linear(x, weights, group=None)
    used.sum().backward()
    assert weights[0].grad is None and weights[1].grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0 * 2))


def test_saving_the_gathered_input_is_the_same_as_gathering_again() -> None:
    def case() -> None:
        x, (w, v) = column_step(dtype=torch.float32)
        assert "+all_gather" in events[interlace.get_rank()]
        events[interlace.get_rank()].clear()
        y, (left, right) = column_step(dtype=torch.float32, save_gathered=True)
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(w.grad, left.grad) and torch.equal(v.grad, right.grad)

    with recorded() as events:
        interlace.run(case, 2)
    assert all("+all_gather" not in each for each in events.values())


# -- main_grad -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@ranks(place="sim")
def test_main_grad_is_the_sum_over_microbatches(
    dtype: torch.dtype, main_dtype: torch.dtype
) -> None:
    weights = column_step(dtype=dtype)[1]
    expected = [2 * w.grad.double() for w in weights]
    for w in weights:
        w.grad, w.main_grad = None, torch.zeros_like(w, dtype=main_dtype)
    for _ in range(2):
        column_step(dtype=dtype, weights=weights, gradient_accumulation_fusion=True)
    for w, e in zip(weights, expected, strict=True):
        assert w.grad is None
        rounded = max(torch.finfo(dtype).eps, torch.finfo(main_dtype).eps)
        torch.testing.assert_close(w.main_grad.double(), e, rtol=4 * rounded, atol=4 * rounded)
    _, weight, _ = row_step(dtype=dtype)
    main = weight.grad.to(main_dtype)
    weight.grad, weight.main_grad = None, torch.zeros_like(main)
    row_step(dtype=dtype, weight=weight, gradient_accumulation_fusion=True)
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, main, rtol=4 * rounded, atol=4 * rounded)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_half_products_are_summed_in_fp32(chunk: int) -> None:
    """A sum in bf16 would stay at 256, where adding 1 changes nothing."""
    weight: Any = torch.zeros(1, 1, dtype=torch.bfloat16)
    weight.main_grad = torch.zeros(1, 1)
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)
    with mock.patch.object(linear, "ROWS_AT_ONCE", chunk):
        linear.add_to_main_grad(weight, ones, ones)
        linear.add_to_main_grad(weight, ones, ones)
    assert weight.main_grad.item() == 2000


@ranks(place="sim")
def test_megatrons_attributes_decide_what_autograd_is_given() -> None:
    weight: Any = torch.zeros(OUT[0], IN, dtype=torch.float64, requires_grad=True)
    weight.main_grad = torch.zeros(OUT[0], IN)
    row_step(weight=weight, gradient_accumulation_fusion=True)
    assert weight.grad is None and not hasattr(weight, "grad_added_to_main_grad")
    weight.grad_added_to_main_grad = False
    seen: list[torch.Size] = []
    weight.register_hook(lambda grad: seen.append(grad.shape))
    row_step(weight=weight, gradient_accumulation_fusion=True)
    assert weight.grad_added_to_main_grad and seen == [weight.shape]
    weight.grad, weight.zero_out_wgrad = None, True
    row_step(weight=weight, gradient_accumulation_fusion=True)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_weight_of_megatrons_fsdp_makes_its_buffer_itself() -> None:
    weight: Any = torch.zeros(2, 3)
    weight.__fsdp_param__ = True
    buffer = torch.full((2, 3), 7.0)
    weight.get_main_grad = lambda: buffer
    linear.add_to_main_grad(weight, torch.ones(4, 2), torch.ones(4, 3))
    assert weight.main_grad is buffer and torch.equal(buffer, torch.full((2, 3), 4.0))


# -- deferral ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("save_gathered", [False, True])
@ranks(place="sim")
def test_deferred_gradients_are_the_same_later(fusion: bool, save_gathered: bool) -> None:
    weights = column_step()[1]
    _, weight, _ = row_step()
    expected = [*(2 * w.grad for w in weights), weight.grad]
    trained: list[Any] = [*weights, weight]
    for each in trained:
        each.grad, each.main_grad = None, torch.zeros_like(each)
    deferred = DeferredWeightGradients()
    common = {"deferred": deferred, "gradient_accumulation_fusion": fusion}
    for _ in range(2):
        column_step(weights=weights, save_gathered=save_gathered, **common)
    x, _, bias = row_step(weight=weight, **common)
    assert x.grad is not None and bias.grad is not None
    assert len(deferred) == 3 and all(w.grad is None for w in trained)
    assert (deferred.run(1), len(deferred)) == (1, 2)
    assert (deferred.run(0), deferred.run(), deferred.run()) == (0, 2, 0)
    for each, e in zip(trained, expected, strict=True):
        torch.testing.assert_close(each.main_grad if fusion else each.grad, e)


def test_deferred_gradients_hold_nothing_afterwards() -> None:
    def backward() -> None:
        deferred = DeferredWeightGradients()
        x, weights = column_step(deferred=deferred)
        held = [weakref.ref(x), *(weakref.ref(w) for w in weights)]
        deferred.run()
        del x, weights
        assert [each() for each in held] == [None] * 3

    def gathered() -> None:
        deferred = DeferredWeightGradients()
        weight, grad, x = torch.ones(2, IN), torch.ones(2 * SHARD, 2), torch.ones(SHARD, IN)
        deferred.add([weight], [grad], x, communicator=resolve(None))
        held = [weakref.ref(each) for each in (weight, grad, x)]
        deferred.run()
        torch.testing.assert_close(weight.grad, torch.full((2, IN), 2.0 * SHARD))
        del weight, grad, x
        assert [each() for each in held] == [None] * 3

    enabled = gc.isenabled()
    gc.disable()  # a cycle would keep them
    try:
        interlace.run(backward, 1)
        interlace.run(gathered, 2)
    finally:
        if enabled:
            gc.enable()


# -- overlap -------------------------------------------------------------------------------------------


@contextmanager
def recorded(*, at_once: bool = False) -> Iterator[dict[int, list[str]]]:
    """Return the starts and waits of each rank, and the matmuls for weight gradients.

    With ``at_once`` every op is awaited directly after its start, as the negative control.
    """
    events: dict[int, list[str]] = defaultdict(list)
    init, wait, gradient = Work.__init__, Work.wait, linear.weight_gradient

    def started(self: Work, op: str, place: Any, *args: Any, **kwargs: Any) -> None:
        init(self, op, place, *args, **kwargs)
        events[place.rank].append(f"+{op}")
        if at_once:
            self.wait()

    def waited(self: Work, *args: Any, **kwargs: Any) -> Any:
        events[self._place.rank].append(self._op)
        return wait(self, *args, **kwargs)

    def multiplied(*args: Any, **kwargs: Any) -> Any:
        events[interlace.get_rank()].append("weight")
        return gradient(*args, **kwargs)

    with (
        mock.patch.object(Work, "__init__", started),
        mock.patch.object(Work, "wait", waited),
        mock.patch.object(linear, "weight_gradient", multiplied),
    ):
        yield events


ORDERS: dict[str, tuple[Callable[[], Any], str]] = {
    "column": (
        column_step,
        "+all_gather +matmul_reduce_scatter all_gather weight weight matmul_reduce_scatter",
    ),
    "column, whole input": (
        lambda: column_step(sequence_parallel=False),
        "+matmul_all_reduce weight weight matmul_all_reduce",
    ),
    "row": (row_step, "+all_gather_matmul +all_reduce all_gather_matmul weight all_reduce"),
    "row, frozen input": (
        lambda: row_step(shared=False),
        "+all_gather +all_reduce all_gather weight all_reduce",
    ),
}
"""A step, and its backward: what is started, after a plus, and waited for."""


@pytest.mark.parametrize("name", ORDERS)
def test_collectives_are_under_way_while_matmuls_run(name: str) -> None:
    step, expected = ORDERS[name][0], ORDERS[name][1].split()

    def orders(*, at_once: bool) -> list[list[str]]:
        with recorded(at_once=at_once) as events:
            interlace.run(lambda: step() and None, 2)
        return [events[rank][-len(expected) :] for rank in range(2)]

    assert orders(at_once=False) == [expected] * 2
    assert expected not in orders(at_once=True)  # the check can fail


# -- misuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"weights": torch.ones(3, 4)}, TypeError, "weights must be a non-empty sequence"),
        (
            {"weights": [torch.ones(3, 5)]},
            ValueError,
            r"as many features as weights\[0\] .* = \(3, 5\)",
        ),
        ({"weights": [torch.ones(3, 4).half()]}, TypeError, r"weights\[0\] is torch.float16"),
        ({"biases": [torch.ones(4)]}, ValueError, r"biases\[0\] must have shape \(3,\)"),
        ({"biases": [None, None]}, ValueError, "biases has 2 entries, weights has 1"),
        ({"gather_dim": 1}, ValueError, "gather_dim must not be the last"),
        ({"gradient_accumulation_fusion": True}, ValueError, r"weights\[0\] has main_grad None"),
        ({"deferred": []}, TypeError, "deferred must be a DeferredWeightGradients"),
        ({"input": torch.ones(4)}, ValueError, "input must have at least 2 dimensions"),
        ({"input": torch.ones(3, 4)}, ValueError, "lengths by rank are"),
    ],
)
@ranks(place="sim")
def test_what_one_rank_does_wrong_all_ranks_are_told(
    wrong: dict[str, Any], kind: type[Exception], text: str
) -> None:
    given = {"input": torch.ones(2, 4), "weights": [torch.ones(3, 4, requires_grad=True)]}
    with pytest.raises(kind, match=text):
        column_parallel_linear(**given | (wrong if interlace.get_rank() else {}), group=None)


@pytest.mark.parametrize(
    ("make", "bias", "weight"),
    [
        (lambda **how: nn.ColumnParallelLinear(8, 8, **how), "bias", "weight"),
        (lambda **how: nn.QKVParallelLinear(8, 2, head_dim=4, **how), "k.bias", "q.weight"),
        (lambda **how: nn.SequenceParallelMLP(8, 8, **how), "up.bias", "up.weight"),
        (lambda **how: nn.SequenceParallelMLP(8, 8, gated=True, **how), "up.bias", "gate.weight"),
    ],
)
def test_a_layer_names_its_own_parameters(
    make: Callable[..., torch.nn.Module], bias: str, weight: str
) -> None:
    def without_buffers() -> None:
        make(gradient_accumulation_fusion=True)(torch.ones(2, 1, 8))

    def of_another_dtype() -> None:
        layer = make()
        layer.get_parameter(bias).data = layer.get_parameter(bias).double()
        layer(torch.ones(2, 1, 8))

    with pytest.raises(ValueError, match=f" {weight} has main_grad None"):
        interlace.run(without_buffers, 2)
    with pytest.raises(TypeError, match=f" {bias} is torch.float64"):
        interlace.run(of_another_dtype, 2)


@pytest.mark.parametrize("layer", ["column", "row"])
@pytest.mark.parametrize("step", ["forward", "backward"])
@ranks(place="sim")
def test_what_fails_within_a_layer_on_one_rank_fails_on_all(layer: str, step: str) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    weight = torch.ones(2, 2, requires_grad=True)

    def multiplied() -> torch.Tensor:
        if layer == "row":
            return row_parallel_linear(x, weight, group=None)
        return column_parallel_linear(x, [weight], group=None)[0]

    found, own = multiplied(), torch.ones(4, 2)
    full = mock.Mock(side_effect=RuntimeError("memory is full"))
    at = "_compute_dtype" if step == "forward" else "weight_gradient"
    failing = mock.patch.object(linear, at, full) if interlace.get_rank() else nullcontext()
    told = pytest.raises((RuntimeError, ValueError), match=r"(?s)memory is full.*on rank 1")
    with failing, told:
        if step == "forward":
            multiplied()
        else:
            found.backward(torch.ones_like(found))
        interlace.all_reduce(own)
