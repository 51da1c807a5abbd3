"""Gradients that communicate on simulated ranks: ends, orders and what is left behind."""

import ctypes
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import interlace
from interlace import functional
from interlace.nn import column_parallel_linear, row_parallel_linear
from interlace.runtime.core.errors import DeadlockError, InterlaceError
from ranks import ranks
from support import failure, noise, schedule_digest
from tiers import few


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


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("world_size", few([1, 2, 3], 1, 3))
def test_recomputed_activations(use_reentrant: bool, world_size: int) -> None:
    def case() -> None:
        calls = []
        x = noise(interlace.get_rank(), 1, (2, 4)).requires_grad_()
        weight = noise(0, 2, (3, 4)).requires_grad_()

        def layer(given: torch.Tensor) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            y = torch.tanh(column_parallel_linear(given, [weight], group=None)[0])
            return torch.sin(functional.reduce_scatter(y @ weight))

        expected = torch.autograd.grad(layer(layer(x)).sum(), [x, weight])
        del calls[:]
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
        checkpoint(layer, y, use_reentrant=use_reentrant).sum().backward()
        assert calls == [not use_reentrant] * 2 + [True] * 2
        assert torch.equal(x.grad, expected[0])
        torch.testing.assert_close(weight.grad, expected[1])  # a sum over layers, in another order

    for seed in range(2):
        interlace.run(case, world_size, seed=seed)
    assert not left_behind()


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
