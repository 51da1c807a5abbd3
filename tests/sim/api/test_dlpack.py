"""Arrays of other libraries as arguments: taken by DLPack without a copy, results written in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import interlace
from ranks import ranks

WORLD_SIZE = 3
LENGTH = 4


class Array:
    """An array that has only DLPack's two methods."""

    def __init__(self, data: Any) -> None:
        self.data = np.array(data, dtype=np.float32)

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


class Broken(Array):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("on another planet")


def values(array: Any) -> Any:
    if isinstance(array, (list, tuple)):
        return [values(each) for each in array]
    return None if array is None else (array.data if isinstance(array, Array) else array).tolist()


def of_numpy(data: Any) -> Any:
    return np.array(data, dtype=np.float32)


Make = Callable[[Any], Any]


def numbers(*shape: int) -> np.ndarray:
    rank = interlace.get_rank()
    return (10 * rank + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def several(arrays: Any, make: Make) -> list[Any]:
    return [make(array) for array in arrays]


def parts() -> list[np.ndarray]:
    return [numbers(LENGTH) + rank for rank in range(WORLD_SIZE)]


def asynchronously(x: Any) -> None:
    work = interlace.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()


def messages(x: Any, own: Any) -> None:
    if interlace.get_rank() == 0:
        interlace.send(own, 1)
    elif interlace.get_rank() == 1:
        interlace.recv(x, 0)


def gather(x: Any, own: Any) -> None:
    interlace.gather(own, x if interlace.get_rank() == 0 else None, 0)


def scatter(x: Any, given: Any) -> None:
    interlace.scatter(x, given if interlace.get_rank() == 1 else None, 1)


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": interlace.all_reduce,
    "all_reduce, asynchronously": asynchronously,
    "broadcast": lambda x: interlace.broadcast(x, 1),
    "reduce": lambda x: interlace.reduce(x, 2),
}
INTO: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], Any], Callable[[], Any]]] = {
    "all_gather": (interlace.all_gather, lambda: zeros(WORLD_SIZE * LENGTH), lambda: numbers(LENGTH)),
    "all_gather, stacked": (
        interlace.all_gather, lambda: zeros(WORLD_SIZE, LENGTH), lambda: numbers(LENGTH)
    ),
    "all_gather, a list": (
        interlace.all_gather, lambda: [zeros(LENGTH)] * WORLD_SIZE, lambda: numbers(LENGTH)
    ),
    "reduce_scatter": (
        interlace.reduce_scatter, lambda: zeros(LENGTH), lambda: numbers(WORLD_SIZE * LENGTH)
    ),
    "reduce_scatter, a list": (interlace.reduce_scatter, lambda: zeros(LENGTH), parts),
    "gather": (gather, lambda: [zeros(LENGTH)] * WORLD_SIZE, lambda: numbers(LENGTH)),
    "scatter": (scatter, lambda: zeros(LENGTH), parts),
    "all_to_all": (interlace.all_to_all, lambda: [zeros(LENGTH)] * WORLD_SIZE, parts),
    "all_to_all_single": (
        interlace.all_to_all_single,
        lambda: zeros(WORLD_SIZE * LENGTH),
        lambda: numbers(WORLD_SIZE * LENGTH),
    ),
    "messages": (messages, lambda: zeros(LENGTH), lambda: numbers(LENGTH)),
}  # fmt: skip
"""The op on an output and an input, and what makes these."""
MATMULS: dict[str, Callable[[Make], Any]] = {
    "all_gather_matmul": lambda make: interlace.all_gather_matmul(
        make(numbers(2, 8)), make(np.ones((8, 3))), bias=make(np.arange(3))
    ),
    "matmul_reduce_scatter": lambda make: interlace.matmul_reduce_scatter(
        make(numbers(6, 8)), make(np.ones((8, 3)))
    ),
    "matmul_all_reduce": lambda make: interlace.matmul_all_reduce(
        make(numbers(6, 8)), make(np.ones((8, 3)))
    ),
}


def called(name: str, make: Make) -> Any:
    """Return the result of the op, or its output."""
    if name in MATMULS:
        return values(MATMULS[name](make))
    if name in IN_PLACE:
        x = make(numbers(LENGTH))
        IN_PLACE[name](x)
        return values(x)
    op, *operands = INTO[name]
    made = [
        several(array, make) if isinstance(array, list) else make(array)
        for array in (each() for each in operands)
    ]
    op(*made)
    return values(made[0])


@pytest.mark.parametrize("make", [of_numpy, Array], ids=["numpy", "DLPack alone"])
@pytest.mark.parametrize("name", [*IN_PLACE, *INTO, *MATMULS])
@ranks(WORLD_SIZE, place="sim")
def test_arrays_are_taken_as_tensors_are(name: str, make: Make) -> None:
    arrays = called(name, make)
    assert arrays == called(name, lambda data: torch.tensor(data, dtype=torch.float32))
    written = {"gather": 0, "messages": 1}.get(name, interlace.get_rank())
    assert torch.tensor(arrays).any() or written != interlace.get_rank()


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
        holder = OfGpu(0)
        holder.data = backwards
        backwards = holder
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
    x: Any = Broken([1.0]) if interlace.get_rank() == 1 else torch.ones(1)
    with pytest.raises(TypeError, match=r"a Broken that cannot be taken as a tensor: "):
        interlace.all_reduce(x)
