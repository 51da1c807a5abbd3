"""Arrays of other libraries as arguments: taken by DLPack without a copy, results written in place."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map_only

import interlace
from cases import api_cases, support_table
from ranks import ranks
from stand_ins.replaced import replaced

LENGTH = 4


class Array:
    """An array that has only DLPack's two methods."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


class Broken(Array):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("on another planet")


Make = Callable[[np.ndarray], Any]


class OfArrays:
    """``interlace`` with functions that get an array over the memory of each tensor."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        function = getattr(interlace, name)
        if not inspect.isfunction(function):
            return function

        def call(*args: Any, **options: Any) -> Any:
            given = tree_map_only(torch.Tensor, lambda x: self._make(x.numpy()), (args, options))
            return function(*given[0], **given[1])

        return call


def numbers(*shape: int) -> np.ndarray:
    rank = interlace.get_rank()
    return (10 * rank + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


NAMES = [
    each.name
    for each in support_table.OPERATIONS
    if each.payload in (support_table.ANY, support_table.REDUCED)
    and each.name not in ("recv", "irecv", "batch_isend_irecv")
]
WAYS = pytest.mark.parametrize("make", [np.asarray, Array], ids=["numpy", "DLPack alone"])


@WAYS
@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_taken_as_tensors_are(name: str, make: Make) -> None:
    with replaced((api_cases, "interlace", OfArrays(make))):
        interlace.run(api_cases.serve, 3, name, (torch.float32,), False, True)


@WAYS
@ranks(3, place="sim")
def test_fused_ops_take_arrays(make: Make) -> None:
    operands, bias = (numbers(6, 8), np.ones((8, 3), np.float32)), np.arange(3, dtype=np.float32)
    for op in (
        interlace.all_gather_matmul,
        interlace.matmul_reduce_scatter,
        interlace.matmul_all_reduce,
    ):
        right = op(*map(torch.tensor, operands), bias=torch.tensor(bias))
        assert torch.equal(op(*map(make, operands), bias=make(bias)), right)


@ranks(2, place="sim")
def test_what_may_not_be_written_is_refused() -> None:
    x, rank = numbers(LENGTH), interlace.get_rank()
    x.flags.writeable = rank == 0
    with pytest.raises(TypeError, match="tensor is a read-only ndarray; pass a copy"):
        interlace.all_reduce(x)
    assert x.tolist() == [10 * rank + i for i in range(LENGTH)]


class OfGpu(Array):
    """An array with CuPy's attribute."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__


@pytest.mark.parametrize("kind", ["numpy", "gpu"])
@pytest.mark.parametrize("order", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, ::-1]])
@ranks(2, place="sim")
def test_negative_strides_are_refused(order: Any, kind: str) -> None:
    """torch ends the process at such an array."""
    backwards: Any = numbers(4, 2)[order]
    if kind == "gpu":
        backwards = OfGpu(backwards)
    name = rf"tensor is a {type(backwards).__name__} with negative strides .* \(on rank"
    with pytest.raises(ValueError, match=name):
        interlace.all_reduce(backwards)
    with pytest.raises(ValueError, match=r"weight is a .* with negative strides"):
        interlace.all_gather_matmul(torch.ones(2, 4), backwards)
    x: Any = numbers(4, 2)[::-1].copy()
    interlace.all_reduce(x)
    assert x.tolist() == [[22.0, 24.0], [18.0, 20.0], [14.0, 16.0], [10.0, 12.0]]
    one: Any = numbers(4, 2)[:, ::-1][:, :1]  # one column does not run backwards
    interlace.all_reduce(one)
    assert one.tolist() == [[12.0], [16.0], [20.0], [24.0]]


@ranks(2, place="sim")
def test_an_array_that_cannot_be_imported_is_named_on_every_rank() -> None:
    x: Any = Broken(numbers(1)) if interlace.get_rank() == 1 else torch.ones(1)
    with pytest.raises(TypeError, match=r"a Broken that cannot be taken as a tensor: "):
        interlace.all_reduce(x)
