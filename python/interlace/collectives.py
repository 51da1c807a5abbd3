"""Collectives without a root: all_reduce, all_gather, reduce_scatter, barrier; torch's semantics.

Each has an internal form, ``_all_reduce(communicator, ...)``, which returns ``Work | None``. It checks this
rank's arguments, looks up the :class:`Call` that the ranks have to agree on, and hands dense tensors to the
group's engine. A misuse on one rank is reported on all.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from interlace import chosen_algorithm, dense, reduce_ops
from interlace.forms import NOT_GIVEN, either, parts
from interlace.groups import resolve
from interlace.runtime.call import Call
from interlace.runtime.communicator import Communicator
from interlace.runtime.engine import Engine
from interlace.runtime.stream import Event
from interlace.runtime.work import Work

# -- all_reduce ---------------------------------------------------------------------------------------


def _reduction(
    communicator: Communicator, name: str, tensor: torch.Tensor, op: str, *terms: Any
) -> Call:
    """The call of a reduction of tensors that are equal in shape, made once."""
    key = (name, tensor.dtype, tensor.shape, op, *terms)
    call = communicator.calls.get(key)
    if call is None:
        reduce_ops.check_dtype(name, op, "tensor", tensor.dtype, communicator.rank)
        common = (
            ("shape of tensor", tuple(tensor.shape)),
            ("dtype of tensor", tensor.dtype),
            ("op", op),
        )
        call = dense.remember(communicator, key, Call(name, (*common, *terms)))
    return call


def _all_reduce(
    communicator: Communicator,
    tensor: torch.Tensor,
    op: Any = "sum",
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    try:
        data = dense.target("tensor", tensor, communicator)
        name, factor = reduce_ops.parse(op, communicator.rank)
        if algorithm != "auto":
            chosen_algorithm.check(algorithm, data.dtype, communicator, name)
        call = _reduction(communicator, "all_reduce", data, name, ("algorithm", algorithm))
        if factor is not None:
            reduce_ops.checked_factor(factor, tuple(data.shape), communicator.rank)
    except (TypeError, ValueError):
        with communicator.accepting("all_reduce"):
            raise
    if factor is None and algorithm == "auto" and data.is_contiguous():
        return communicator.collective(
            call, lambda engine: engine.all_reduce(call, data, name), (tensor,), async_op=async_op
        )

    def start(engine: Engine) -> Event | None:
        if algorithm != "auto":
            engine.parts(call)
            made = data.contiguous()
            event: Event | None = chosen_algorithm.all_reduce(communicator, made, name, algorithm)
        elif factor is not None:
            made = reduce_ops.scaled(data, factor)
            event = engine.all_reduce(call, made, "sum")
        else:
            made = data.contiguous()
            event = engine.all_reduce(call, made, name)
        return dense.copied_back(communicator, [data], [made], event)

    return communicator.collective(call, start, (tensor,), async_op=async_op)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    """Reduce ``tensor`` over ranks, in place; every rank ends with the same bits.

    ``op``: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", torch's ``ReduceOp`` of these
    names, or ``ReduceOp.PREMUL_SUM(factor)``. ``algorithm``: "auto", or for sums and averages "kernel"
    (Triton, one-shot) or "copy" (two-shot).

    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank, before
    any data moves, if shapes, dtypes or ops differ or ``op`` is not defined for the dtype. Semantics:
    ``torch.distributed.all_reduce``.

    >>> import interlace, torch
    >>> def reduce():
    ...     x = torch.full((2,), 1.0 + interlace.get_rank())
    ...     interlace.all_reduce(x)
    ...     return x
    >>> interlace.run(reduce, 2)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    return _all_reduce(resolve(group), tensor, op, async_op, algorithm=algorithm)


# -- all_gather ---------------------------------------------------------------------------------------


def _shape_terms(name: str, tensors: list[torch.Tensor]) -> tuple[tuple[str, Any], ...]:
    return tuple((f"shape of {name}[{r}]", tuple(each.shape)) for r, each in enumerate(tensors))


def _all_gather(
    communicator: Communicator,
    output: torch.Tensor | list[torch.Tensor],
    tensor: torch.Tensor,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    try:
        data = dense.source("tensor", tensor, communicator)
        outputs = parts("output", output, "tensor", data, communicator, written=True)
        if algorithm != "auto":
            chosen_algorithm.check(algorithm, data.dtype, communicator)
        key: Any = ("all_gather", data.dtype, data.shape, algorithm)
        if not isinstance(output, torch.Tensor):
            key = (*key, *[each.shape for each in outputs])
        call = communicator.calls.get(key)
        if call is None:
            terms = (
                ("dtype of tensor", data.dtype),
                *_shape_terms("output", outputs),
                ("algorithm", algorithm),
            )
            call = dense.remember(communicator, key, Call("all_gather", terms))
    except (TypeError, ValueError):
        with communicator.accepting("all_gather"):
            raise
    given = (output,) if isinstance(output, torch.Tensor) else output

    def start(engine: Engine) -> Event | None:
        made = data.contiguous()

        def run(targets: list[torch.Tensor]) -> Event | None:
            if algorithm == "auto":
                return engine.all_gather(call, targets, made)
            engine.parts(call)
            return chosen_algorithm.all_gather(communicator, targets, made, algorithm)

        return dense.filled(communicator, outputs, run)

    return communicator.collective(call, start, given, async_op=async_op)


def all_gather(
    output: Any = NOT_GIVEN,
    tensor: Any = NOT_GIVEN,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    tensor_list: Any = NOT_GIVEN,
    output_tensor: Any = NOT_GIVEN,
    input_tensor: Any = NOT_GIVEN,
) -> Work | None:
    """Gather every rank's ``tensor`` into ``output``. Any dtype.

    Parameters
    ----------
    output : a list with one tensor per rank, each of that rank's shape (shapes may differ); or one
        tensor, ``(world_size * n, ...)`` to concatenate along dim 0 or ``(world_size, n, ...)`` to stack.
        ``tensor`` may be this rank's part of it, which is then not copied.
    algorithm : "auto", "kernel" (Triton), "copy" (copy engine).
    tensor_list, output_tensor, input_tensor : torch's names of ``output`` and ``tensor``.

    Returns None, or a :class:`Work` with ``async_op``. Semantics: ``torch.distributed.all_gather`` and
    ``all_gather_into_tensor``. Raises ValueError or TypeError before any data moves.

    >>> import interlace, torch
    >>> def gather():
    ...     out = torch.empty(2, dtype=torch.int64)
    ...     interlace.all_gather(out, torch.tensor([interlace.get_rank()]))
    ...     return out
    >>> interlace.run(gather, 2)
    [tensor([0, 1]), tensor([0, 1])]
    """
    if tensor_list is not NOT_GIVEN:
        output = either("output", output, "tensor_list", tensor_list, "all_gather")
    output = either("output", output, "output_tensor", output_tensor, "all_gather")
    tensor = either("tensor", tensor, "input_tensor", input_tensor, "all_gather")
    return _all_gather(resolve(group), output, tensor, async_op, algorithm=algorithm)


all_gather_into_tensor = all_gather
all_gather_single = all_gather
_all_gather_base = all_gather

# -- reduce_scatter -----------------------------------------------------------------------------------


def _reduce_scatter(
    communicator: Communicator,
    output: torch.Tensor,
    input: torch.Tensor | list[torch.Tensor],
    op: Any = "sum",
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    rank = communicator.rank
    try:
        out = dense.target("output", output, communicator)
        name, factor = reduce_ops.parse(op, rank)
        if algorithm != "auto":
            chosen_algorithm.check(algorithm, out.dtype, communicator, name)
        inputs = parts("input", input, "output", out, communicator, written=False)
        key: Any = ("reduce_scatter", out.dtype, out.shape, name, algorithm)
        if not isinstance(input, torch.Tensor):
            key = (*key, *[each.shape for each in inputs])
        call = communicator.calls.get(key)
        if call is None:
            reduce_ops.check_dtype("reduce_scatter", name, "output", out.dtype, rank)
            terms = (
                ("dtype of input", out.dtype),
                ("op", name),
                *_shape_terms("input", inputs),
                ("algorithm", algorithm),
            )
            call = dense.remember(communicator, key, Call("reduce_scatter", terms))
        if factor is not None:
            reduce_ops.checked_factor(factor, tuple(out.shape), rank)
    except (TypeError, ValueError):
        with communicator.accepting("reduce_scatter"):
            raise

    def start(engine: Engine) -> Event | None:
        if factor is None:
            made = [each.contiguous() for each in inputs]
        else:
            made = [reduce_ops.scaled(each, factor) for each in inputs]

        def run(targets: list[torch.Tensor]) -> Event | None:
            if algorithm == "auto":
                reducing = name if factor is None else "sum"
                return engine.reduce_scatter(call, targets[0], made, reducing)
            engine.parts(call)
            return chosen_algorithm.reduce_scatter(communicator, targets[0], made, name, algorithm)

        return dense.filled(communicator, [out], run)

    return communicator.collective(call, start, (output,), async_op=async_op)


def reduce_scatter(
    output: Any = NOT_GIVEN,
    input: Any = NOT_GIVEN,
    op: Any = "sum",
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
    input_list: Any = NOT_GIVEN,
) -> Work | None:
    """Reduce over ranks; rank r keeps part r in ``output``.

    Parameters
    ----------
    output : this rank's part. It may be this rank's part of ``input``.
    input : a list with one part per rank (shapes may differ, each equal to its owner's ``output``), or
        one tensor that is the parts concatenated along dim 0 or stacked. ``input_list`` is torch's name.
    op, algorithm : as for :func:`all_reduce`.

    Reduces in rank order, in fp32 for narrower floats. Returns None, or a :class:`Work` with ``async_op``.
    Raises ValueError or TypeError before any data moves. Semantics: ``torch.distributed.reduce_scatter``
    and ``reduce_scatter_tensor``.
    """
    output = either("output", output, "output", NOT_GIVEN, "reduce_scatter")
    input = either("input", input, "input_list", input_list, "reduce_scatter")
    return _reduce_scatter(resolve(group), output, input, op, async_op, algorithm=algorithm)


reduce_scatter_tensor = reduce_scatter
reduce_scatter_single = reduce_scatter
_reduce_scatter_base = reduce_scatter

# -- barrier ------------------------------------------------------------------------------------------

_BARRIER = Call("barrier")


def _barrier(
    communicator: Communicator, async_op: bool = False, timeout: timedelta | float | None = None
) -> Work | None:
    place = communicator.place

    def start(engine: Engine) -> Event | None:
        place.arrive()
        event = engine.barrier(_BARRIER)
        place.depart()
        return event

    if timeout is None or async_op:
        return communicator.collective(_BARRIER, start, async_op=async_op)
    work = communicator.collective(_BARRIER, start, async_op=True)
    assert work is not None
    work.wait(timeout)
    return None


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Return once every rank of the group has called it, and what their callers had issued has finished.

    Blocks the host, unless ``async_op``. ``timeout``, in seconds or a timedelta, bounds the blocking in
    ``shm``; the group's own always does. ``device_ids`` is torch's, for its NCCL backend, and must be a
    list of ints or None. Returns None, or a :class:`Work` with ``async_op``. Raises
    CollectiveTimeoutError. Semantics: ``torch.distributed.barrier``.
    """
    communicator = resolve(group)
    if device_ids is not None and not isinstance(device_ids, list):
        raise TypeError(
            f"device_ids must be a list of ints, got {device_ids!r} on rank {communicator.rank}"
        )
    return _barrier(communicator, async_op, timeout)
