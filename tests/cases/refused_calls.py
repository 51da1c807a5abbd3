"""Calls that rank 1 of two gets wrong, each in its own way, and rank 0 right; for every place."""

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
import torch_names

Call = Callable[[bool], Any]


class _Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert function is torch.ops.aten.detach.default, function
        return args[0]


def _tensor(length: int = 2) -> torch.Tensor:
    return torch.ones(length)


def _zero() -> torch.Tensor:
    return torch._efficientzerotensor((2,))  # type: ignore[attr-defined, no-any-return]


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def _emptied() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def _wrapper() -> torch.Tensor:
    made = torch.Tensor._make_wrapper_subclass(_Wrapper, (2,))  # type: ignore[attr-defined]
    return cast(torch.Tensor, made)


def _nested() -> torch.Tensor:
    parts = [torch.ones(1), torch.ones(2)]
    with warnings.catch_warnings(action="ignore"):  # that they are a prototype
        return torch._nested_tensor_from_tensor_list(parts)


def _quantized(length: int = 2) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # that they are deprecated
        return torch.quantize_per_tensor(torch.ones(length), 0.5, 0, torch.qint8)


def _all_gather_twice(bad: bool, make: Callable[[], torch.Tensor]) -> None:
    """The second call is a known call, which takes the shorter way."""
    interlace.all_gather(_tensor(4), _tensor())
    interlace.all_gather(_tensor(4), make() if bad else _tensor())


def _reduce_scatter_twice(bad: bool) -> None:
    interlace.reduce_scatter(_tensor(), _tensor(4))
    interlace.reduce_scatter(_tensor(), _tensor(4), "no" if bad else "sum")


def _gather(bad: bool) -> None:
    wide = torch.ones(2, 2)
    mine = wide[0] if bad else _tensor()  # rank 1's place is wide[1]
    interlace.gather(mine, list(wide) if interlace.get_rank() == 1 else None, 1)


def _scatter(bad: bool) -> None:
    wide = torch.ones(2, 2)
    mine = wide[0] if bad else _tensor()
    interlace.scatter(mine, list(wide) if interlace.get_rank() == 1 else None, 1)


def _split_sizes(bad: bool, wrong: Any) -> None:
    interlace.all_to_all_single(_tensor(), _tensor(), wrong if bad else [1, 1])


def _with_lists(bad: bool, dim: int, wrong: Any = None) -> None:
    lists = [wrong, wrong] if bad and wrong != 0 else [_tensor(), _tensor()]
    interlace.all_gather_v(lists, _tensor(), [2, 2], dim=dim if bad else 0)


CALLS: dict[str, tuple[Call, type[Exception]]] = {
    "reduce_scatter of a known shape": (_reduce_scatter_twice, ValueError),
    "all_reduce_coalesced": (
        lambda bad: interlace.all_reduce_coalesced([_tensor()], "no" if bad else "sum"), ValueError),
    "reduce_scatter_tensor_coalesced": (
        lambda bad: interlace.reduce_scatter_tensor_coalesced(
            [_tensor()], [_tensor(4)], "no" if bad else "sum"), ValueError),
    "all_gather without tensor": (
        lambda bad: interlace.all_gather(_tensor(4), **({} if bad else {"tensor": _tensor()})), TypeError),
    "reduce_scatter without input": (
        lambda bad: interlace.reduce_scatter(_tensor(), **({} if bad else {"input": _tensor(4)})),
        TypeError),
    "split sizes of several numbers": (lambda bad: _split_sizes(bad, torch.ones(2)), TypeError),
    "split sizes of fractions": (lambda bad: _split_sizes(bad, [1.5, 0.5]), TypeError),
    "split sizes of inf": (lambda bad: _split_sizes(bad, [float("inf")] * 2), TypeError),
    "split sizes as one number": (lambda bad: _split_sizes(bad, 2), TypeError),
    "all_to_all_single without dims": (
        lambda bad: interlace.all_to_all_single(torch.empty(() if bad else 2), _tensor()), ValueError),
    "all_to_all_single of lists": (
        lambda bad: interlace.all_to_all_single([1] if bad else _tensor(), _tensor()), TypeError),
    "dim of lists": (lambda bad: _with_lists(bad, 5, 0), ValueError),
    "lists of None": (lambda bad: _with_lists(bad, 0), TypeError),
    "gather_list as a number": (
        lambda bad: interlace.gather(_tensor(), 7 if bad else [_tensor(), _tensor()], dst=0)
        if bad or interlace.get_rank() == 0 else interlace.gather(_tensor()), TypeError),
    "device_ids": (lambda bad: interlace.barrier(device_ids=1 if bad else None), TypeError),
    "timeout": (lambda bad: interlace.barrier(timeout="x" if bad else None), TypeError),
    "timeout of monitored_barrier": (
        lambda bad: interlace.monitored_barrier(timeout="x" if bad else 60), TypeError),
    "negative timeout": (
        lambda bad: interlace.monitored_barrier(timeout=-1 if bad else 60), ValueError),
    "name of a group": (lambda bad: interlace.new_group(name=5 if bad else None), TypeError),
    "an object that cannot be pickled": (
        lambda bad: interlace.gather_object(
            (lambda: 1) if bad else 1, None if bad else [None, None], 0), TypeError),
    "rank of a group": (lambda bad: interlace.new_group([0, 77 if bad else 1]), ValueError),
    "rank of a group twice": (lambda bad: interlace.new_group([0, 0 if bad else 1]), ValueError),
    "timeout of a group": (lambda bad: interlace.new_group(timeout=-3 if bad else 60), ValueError),
    "nan as timeout": (lambda bad: interlace.new_group(timeout=float("nan") if bad else 60), ValueError),
    "size of groups": (lambda bad: interlace.new_subgroups(7 if bad else 2), ValueError),
    "rank in two groups": (
        lambda bad: interlace.split_group(None, [[0], [0]] if bad else [[0, 1]]), ValueError),
    "gather": (_gather, ValueError),
    "scatter": (_scatter, ValueError),
    "zeros": (lambda bad: interlace.all_reduce(_zero() if bad else _tensor()), TypeError),
    "fake": (lambda bad: interlace.all_reduce(_fake() if bad else _tensor()), TypeError),
    "emptied": (lambda bad: interlace.all_reduce(_emptied() if bad else _tensor()), TypeError),
    "nested": (lambda bad: interlace.all_reduce(_nested() if bad else _tensor()), TypeError),
    "wrapper": (lambda bad: interlace.all_reduce(_wrapper() if bad else _tensor()), TypeError),
    "wrapper of a known shape": (lambda bad: _all_gather_twice(bad, _wrapper), TypeError),
    "nested of a known shape": (lambda bad: _all_gather_twice(bad, _nested), TypeError),
    "quantized": (lambda bad: interlace.broadcast(_quantized() if bad else _tensor(), 0), TypeError),
    "quantized whole": (
        lambda bad: interlace.all_gather(_quantized(4), _quantized()) if bad
        else interlace.all_gather(_tensor(4), _tensor()), TypeError),
    "quantized, functional": (
        lambda bad: interlace.functional.wait(
            interlace.functional.broadcast(_quantized() if bad else _tensor(), 1)), TypeError),
    "quantized, picked": (
        lambda bad: interlace.tensor.indexed_all_to_all_v(
            _quantized() if bad else _tensor(), [torch.tensor([0])] * 2), TypeError),
    "complex factor": (
        lambda bad: interlace.all_reduce(
            _tensor(), torch_names.premul_sum(torch.tensor([1j if bad else 1.0]))), TypeError),
}  # fmt: skip


def refused_by_rank_1() -> None:
    """Every call raises on both ranks, and afterwards the ranks can sum, and make a group."""
    rank = interlace.get_rank()
    for name, (call, kind) in CALLS.items():
        try:
            call(rank == 1)
        except (TypeError, ValueError) as error:
            text = str(error)
            assert rank == 0 or isinstance(error, kind), (name, repr(error))
            assert rank == 0 or text.endswith(" (on rank 1)"), (name, text)
            assert rank == 1 or "rank 1 cannot take part" in text, (name, text)
            assert rank == 1 or text.count("rank 1") == 1, (name, text)
        else:
            raise AssertionError(f"{name} raised nothing on rank {rank}")
        total = torch.ones(2)
        interlace.all_reduce(total)
        assert total.tolist() == [2, 2], name
    total = torch.ones(2)
    interlace.all_reduce(total, group=interlace.new_group([1, 0]))
    assert total.tolist() == [2, 2]
