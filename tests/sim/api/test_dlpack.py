"""Arrays of other libraries as arguments: taken by DLPack without a copy, results written in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import interlace

WORLD_SIZE = 3
LENGTH = 4


class Array:
    """An array that can do nothing but say where its memory is."""

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


def all_reduce(make: Make) -> Any:
    x = make(numbers(LENGTH))
    interlace.all_reduce(x)
    return x


def all_reduce_asynchronously(make: Make) -> Any:
    x = make(numbers(LENGTH))
    work = interlace.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def broadcast(make: Make) -> Any:
    x = make(numbers(LENGTH))
    interlace.broadcast(x, 1)
    return x


def reduce(make: Make) -> Any:
    x = make(numbers(LENGTH))
    interlace.reduce(x, 2)
    return x if interlace.get_rank() == 2 else None


def all_gather(make: Make) -> Any:
    x = make(np.zeros((WORLD_SIZE * LENGTH,)))
    interlace.all_gather(x, make(numbers(LENGTH)))
    return x


def all_gather_stacked(make: Make) -> Any:
    x = make(np.zeros((WORLD_SIZE, LENGTH)))
    interlace.all_gather(x, make(numbers(LENGTH)))
    return x


def all_gather_list(make: Make) -> Any:
    x = [make(np.zeros(LENGTH)) for _ in range(WORLD_SIZE)]
    interlace.all_gather(x, make(numbers(LENGTH)))
    return x


def reduce_scatter(make: Make) -> Any:
    x = make(np.zeros(LENGTH))
    interlace.reduce_scatter(x, make(numbers(WORLD_SIZE * LENGTH)))
    return x


def reduce_scatter_list(make: Make) -> Any:
    x = make(np.zeros(LENGTH))
    interlace.reduce_scatter(x, [make(numbers(LENGTH) + r) for r in range(WORLD_SIZE)])
    return x


def gather(make: Make) -> Any:
    root = interlace.get_rank() == 0
    x = [make(np.zeros(LENGTH)) for _ in range(WORLD_SIZE)] if root else None
    interlace.gather(make(numbers(LENGTH)), x, 0)
    return x


def scatter(make: Make) -> Any:
    root = interlace.get_rank() == 1
    parts = [make(numbers(LENGTH) + r) for r in range(WORLD_SIZE)] if root else None
    x = make(np.zeros(LENGTH))
    interlace.scatter(x, parts, 1)
    return x


def all_to_all(make: Make) -> Any:
    x = [make(np.zeros(LENGTH)) for _ in range(WORLD_SIZE)]
    interlace.all_to_all(x, [make(numbers(LENGTH) + r) for r in range(WORLD_SIZE)])
    return x


def all_to_all_single(make: Make) -> Any:
    x = make(np.zeros(WORLD_SIZE * LENGTH))
    interlace.all_to_all_single(x, make(numbers(WORLD_SIZE * LENGTH)))
    return x


def send_and_receive(make: Make) -> Any:
    rank = interlace.get_rank()
    if rank == 0:
        interlace.send(make(numbers(LENGTH)), 1)
    if rank != 1:
        return None
    x = make(np.zeros(LENGTH))
    interlace.recv(x, 0)
    return x


def all_gather_matmul(make: Make) -> Any:
    bias = make(np.arange(3))
    return interlace.all_gather_matmul(make(numbers(2, 8)), make(np.ones((8, 3))), bias=bias)


def matmul_reduce_scatter(make: Make) -> Any:
    return interlace.matmul_reduce_scatter(make(numbers(6, 8)), make(np.ones((8, 3))))


def matmul_all_reduce(make: Make) -> Any:
    return interlace.matmul_all_reduce(make(numbers(6, 8)), make(np.ones((8, 3))))


OPS = [
    all_reduce, all_reduce_asynchronously, broadcast, reduce, all_gather, all_gather_stacked,
    all_gather_list, reduce_scatter, reduce_scatter_list, gather, scatter, all_to_all,
    all_to_all_single, send_and_receive, all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce,
]  # fmt: skip


@pytest.mark.parametrize("make", [of_numpy, Array], ids=["numpy", "DLPack alone"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_arrays_are_taken_as_tensors_are(op: Any, make: Make) -> None:
    def on_rank() -> tuple[Any, Any]:
        tensors = values(op(lambda data: torch.tensor(data, dtype=torch.float32)))
        return values(op(make)), tensors

    results = interlace.run(on_rank, WORLD_SIZE)
    for arrays, tensors in results:
        assert arrays == tensors
    assert any(tensors is not None and tensors != 0 for _, tensors in results)


def test_memory_is_shared_not_copied() -> None:
    def on_rank() -> bool:
        x = numbers(LENGTH)
        view = x[:]
        interlace.all_reduce(x)
        return bool((view == x).all()) and np.shares_memory(view, x)

    assert all(interlace.run(on_rank, 2))


def test_what_may_not_be_written_is_refused() -> None:
    def on_rank() -> list[float]:
        x = numbers(LENGTH)
        x.flags.writeable = interlace.get_rank() == 0
        with pytest.raises(TypeError, match=r"tensor is a ndarray that is read-only; give a copy"):
            interlace.all_reduce(x)
        return x.tolist()

    assert interlace.run(on_rank, 2) == [[0, 1, 2, 3], [10, 11, 12, 13]]


class OfGpu(Array):
    """An array that says what CuPy's does."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__


@pytest.mark.parametrize("kind", ["numpy", "gpu"])
@pytest.mark.parametrize("order", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, ::-1]])
def test_negative_strides_are_refused(order: Any, kind: str) -> None:
    """torch ends the process at such an array, so this ends in an error or not at all."""

    def on_rank() -> list[float]:
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
        x = numbers(4, 2)[::-1].copy()
        interlace.all_reduce(x)
        one = numbers(4, 2)[:, ::-1][:, :1]  # one column does not run backwards
        interlace.all_reduce(one)
        assert one.tolist() == [[12.0], [16.0], [20.0], [24.0]]
        return x.tolist()

    results = interlace.run(on_rank, 2)
    assert results[0] == results[1] == [[22.0, 24.0], [18.0, 20.0], [14.0, 16.0], [10.0, 12.0]]


def test_an_array_that_cannot_be_imported_is_named_on_every_rank() -> None:
    def on_rank() -> None:
        x: Any = Broken([1.0]) if interlace.get_rank() == 1 else torch.ones(1)
        with pytest.raises(TypeError, match=r"a Broken that cannot be taken as a tensor: "):
            interlace.all_reduce(x)

    interlace.run(on_rank, 2)


def test_what_is_no_array_is_refused_as_before() -> None:
    def on_rank() -> None:
        with pytest.raises(TypeError, match=r"tensor must be a tensor, got str \(on rank 0\)"):
            interlace.all_reduce("text")  # type: ignore[arg-type]

    interlace.run(on_rank, 1)
