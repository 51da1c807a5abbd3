"""Collectives without a root: all_reduce, all_gather, reduce_scatter, barrier; torch's semantics.

Each has a function ``checked_...``, which checks this rank's arguments, finds the :class:`Call` on which
the ranks must agree, and returns a function that passes dense tensors to the group's engine. The internal
form runs it, ``_all_reduce(communicator, ...)``. A misuse on one rank is reported on all.

Coalesced forms run several collectives of one kind: one comparison before any data moves, one handle.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from interlace.arguments import checks, words
from interlace.arguments.checks import copied_back, disjoint, either, fill_dense, parts, remember
from interlace.arguments.words import AnyReduceOp, CollectiveAlgorithm, Group, PerRank
from interlace.groups.groups import resolve
from interlace.ops.collectives import stream_engine
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.engine import TO_ALL, TO_EACH
from interlace.runtime.core.memory import contiguous
from interlace.runtime.core.stream import Event
from interlace.runtime.core.work import Work
from interlace.runtime.numerics import reductions


def checked_all_reduce(
    communicator: Communicator, tensor: torch.Tensor, op: Any = "sum", algorithm: str = "auto"
) -> PreparedCall:
    data = checks.target("tensor", tensor, communicator)
    name, factor = checks.reduce_op(op)
    if factor is not None:
        words.check_factor(factor, "tensor", data)
    if algorithm != "auto":
        stream_engine.check_algorithm(algorithm, data.dtype, communicator, name)
    key = ("all_reduce", data.dtype, data.shape, name, algorithm)
    call = communicator.calls.get(key)
    if call is None:
        words.check_dtype("all_reduce", name, "tensor", data.dtype)
        terms = (
            ("shape of tensor", tuple(data.shape)),
            ("dtype of tensor", data.dtype),
            ("op", name),
            ("algorithm", algorithm),
        )
        call = remember(communicator, key, Call("all_reduce", terms))
    if factor is None and algorithm == "auto" and data.is_contiguous():
        reduce = communicator.engine.reduce
        return functools.partial(reduce, call, (data,), data, name, TO_ALL), (tensor,), call

    def start() -> Event | None:
        made, reducing = words.dense(data, name, factor)
        event = stream_engine.serving(communicator, algorithm).all_reduce(call, made, reducing)
        return copied_back(communicator, [data], [made], event)

    return start, (tensor,), call


_all_reduce = internal_form("all_reduce", checked_all_reduce, fills=True)


def all_reduce(
    tensor: torch.Tensor,
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: CollectiveAlgorithm = "auto",
) -> Work | None:
    """Reduce ``tensor`` over ranks, in place; every rank ends with the same bits.

    ``op``: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", torch's ``ReduceOp`` of these
    names, or ``ReduceOp.PREMUL_SUM(factor)``. ``algorithm``: "auto", or for sums and averages "kernel"
    (Triton, one-shot) or "copy" (two-shot). A sparse COO ``tensor`` may have other entries on every rank;
    it is summed or averaged, and coalesced afterwards.

    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank, before
    any data moves, if shapes, dtypes or ops differ or ``op`` is not defined for the dtype. Semantics:
    ``torch.distributed.all_reduce``.

    >>> def reduce():
    ...     x = torch.full((2,), 1.0 + interlace.get_rank())
    ...     interlace.all_reduce(x)
    ...     return x
    >>> interlace.run(reduce, 2)
    [tensor([3., 3.]), tensor([3., 3.])]
    """
    communicator = resolve(group).on(tensor)
    if algorithm == "auto" and getattr(tensor, "layout", None) is torch.sparse_coo:
        return _all_reduce_sparse(communicator, (tensor,), (op,), async_op)
    return _all_reduce(communicator, (tensor,), (op, algorithm), async_op)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in a wider dtype, in which sums are taken and rounded once, see :func:`_narrow`."""
    dtype = values.dtype
    if dtype in reductions.NARROW_FLOATS:
        return values.to(torch.float32)
    if dtype.is_floating_point or dtype.is_complex:
        return values.to(torch.complex64) if dtype == torch.complex32 else values
    return values.view(torch.int64) if dtype == torch.uint64 else values.to(torch.int64)


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.view(dtype) if dtype == torch.uint64 else values.to(dtype)


def _sum_entries(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each index once, with the sum of its ``values`` from left to right."""
    shape = (*like.shape[: like.sparse_dim()], *values.shape[1:])
    total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()
    return total.indices(), total.values()


def _checked_sparse(
    communicator: Communicator, tensor: torch.Tensor, op: Any = "sum"
) -> PreparedCall:
    """All-reduce sparse COO tensors: every rank gets all entries, and sums them by index in rank order.

    This moves world_size times the entries of one rank, which is less than the dense tensor if entries are
    few, as in the gradients of embeddings. Narrow floats are summed in fp32, whole numbers in int64, and
    rounded to the tensor's dtype once, as by the dense op.
    """
    engine, place = communicator.engine, communicator.place
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"tensor must be dense or sparse COO, got {tensor.layout}")
    if tensor.device.type != place.device.type:
        raise ValueError(f"tensor is on {tensor.device}, the group's memory on {place.device}")
    name, _ = checks.reduce_op(op)
    checks.one_of("op of a sparse all_reduce", name, checks.REDUCE_OPS)
    words.check_dtype("all_reduce", name, "tensor", tensor.dtype)
    dtype, detached = tensor.dtype, tensor.detach()
    own_indices, values = _sum_entries(detached._indices(), _wide(detached._values()), detached)
    if not (dtype.is_floating_point or dtype.is_complex):
        values = _narrow(values, dtype)  # a rank's own sum wraps around
    indices, values = own_indices.t().contiguous(), values.contiguous()
    terms = (
        ("shape of tensor", tuple(tensor.shape)),
        ("sparse dims of tensor", tensor.sparse_dim()),
        ("dtype of tensor", f"{tensor.dtype}, sparse COO"),
        ("op", name),
    )
    call = Call("all_reduce", terms, part=len(indices))

    def start() -> None:
        counts, everyones = engine.agree(call), []
        for part_name, part in (("indices", indices), ("values", values)):
            parts = [part.new_empty((count, *part.shape[1:])) for count in counts]
            about = (("part of a sparse tensor", part_name), ("dtype of tensor", part.dtype))
            event = engine.all_gather(Call("all_reduce", about), parts, part)
            if event is not None:
                event.synchronize()
            everyones.append(torch.cat(parts))
        rows, entries = everyones
        rows, total = _sum_entries(rows.t(), _wide(entries), detached)
        if name == "avg":
            reductions.divide(
                total.view(dtype) if dtype == torch.uint64 else total, communicator.world_size
            )
        result = torch.sparse_coo_tensor(
            rows, _narrow(total, dtype), tensor.shape, check_invariants=False, is_coalesced=True
        )
        with torch.no_grad():  # a detached sparse tensor does not share its entries
            tensor.copy_(result)

    return start, (tensor,), call


_all_reduce_sparse = internal_form("all_reduce", _checked_sparse)


def _shape_terms(name: str, tensors: list[torch.Tensor]) -> tuple[tuple[str, Any], ...]:
    return tuple((f"shape of {name}[{r}]", tuple(each.shape)) for r, each in enumerate(tensors))


def _uncut(whole: torch.Tensor, part: torch.Tensor, rank: int) -> bool:
    """Return whether ``whole``, in one of the forms for ``part``, may go to the engine as it is."""
    nbytes = part.nbytes
    offset = part.data_ptr() - whole.data_ptr()
    return (
        whole.is_contiguous()
        and part.is_contiguous()
        and nbytes > 0
        and (offset == rank * nbytes or not -nbytes < offset < whole.nbytes)
    )


def checked_all_gather(
    communicator: Communicator,
    output: torch.Tensor | list[torch.Tensor],
    tensor: torch.Tensor,
    algorithm: str = "auto",
) -> PreparedCall:
    data = checks.source("tensor", tensor, communicator)
    key: Any = ("all_gather", algorithm, data.dtype, data.shape)
    record = output if isinstance(output, (list, tuple)) else (output,)
    whole = None
    if isinstance(output, torch.Tensor):
        whole = checks.target("output", output, communicator)
        key = (*key, whole.shape, whole.dtype)
        known = communicator.calls.get(key)
        if known is not None and algorithm == "auto" and _uncut(whole, data, communicator.rank):
            exchange = communicator.engine.exchange
            return functools.partial(exchange, known, (data,), whole, TO_ALL), record, known
    outputs = parts("output", output, "tensor", data, communicator, written=True)
    if whole is None:
        key = (*key, *[each.shape for each in outputs])
    if algorithm != "auto":
        stream_engine.check_algorithm(algorithm, data.dtype, communicator)
    call = communicator.calls.get(key)
    if call is None:
        terms = (
            ("dtype of tensor", data.dtype),
            *_shape_terms("output", outputs),
            ("algorithm", algorithm),
        )
        call = remember(communicator, key, Call("all_gather", terms))

    def start() -> Event | None:
        made, engine = contiguous(data), stream_engine.serving(communicator, algorithm)
        return fill_dense(
            communicator, outputs, lambda targets: engine.all_gather(call, targets, made)
        )

    return start, record, call


_all_gather = internal_form("all_gather", checked_all_gather, fills=True)


def all_gather(
    output: PerRank | None = None,
    tensor: torch.Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: CollectiveAlgorithm = "auto",
    tensor_list: list[torch.Tensor] | None = None,
    output_tensor: torch.Tensor | None = None,
    input_tensor: torch.Tensor | None = None,
) -> Work | None:
    """Gather every rank's ``tensor`` into ``output``. Any dtype.

    Parameters
    ----------
    output : a list with one tensor per rank, each of that rank's shape (shapes may differ); or one
        tensor, ``(world_size * n, ...)`` to concatenate along dim 0 or ``(world_size, n, ...)`` to stack.
        ``tensor`` may be this rank's part of it, which is then not copied.
    tensor : this rank's part, of any shape.
    algorithm : "auto", "kernel" (Triton), "copy" (copy engine), "multimem" (the switch sends to all ranks),
        "low_latency" (up to 64 KiB of equal shards in one shot).
    tensor_list, output_tensor, input_tensor : torch's names of ``output`` and ``tensor``.

    Returns None, or a :class:`Work` with ``async_op``. Semantics: ``torch.distributed.all_gather`` and
    ``all_gather_into_tensor``. Raises ValueError or TypeError before any data moves.

    >>> def gather():
    ...     out = torch.empty(2, dtype=torch.int64)
    ...     interlace.all_gather(out, torch.tensor([interlace.get_rank()]))
    ...     return out
    >>> interlace.run(gather, 2)
    [tensor([0, 1]), tensor([0, 1])]
    """
    communicator = resolve(group).on(tensor, input_tensor)
    with communicator.accepting("all_gather"):
        if tensor_list is not None:
            output = either("output", output, "tensor_list", tensor_list, "all_gather")
        output = either("output", output, "output_tensor", output_tensor, "all_gather")
        tensor = either("tensor", tensor, "input_tensor", input_tensor, "all_gather")
    return _all_gather(communicator, (output, tensor), (algorithm,), async_op)


all_gather_into_tensor = all_gather
all_gather_single = all_gather
_all_gather_base = all_gather


def checked_reduce_scatter(
    communicator: Communicator,
    output: torch.Tensor,
    input: torch.Tensor | list[torch.Tensor],
    op: Any = "sum",
    algorithm: str = "auto",
) -> PreparedCall:
    out = checks.target("output", output, communicator)
    name, factor = checks.reduce_op(op)
    if algorithm != "auto":
        stream_engine.check_algorithm(algorithm, out.dtype, communicator, name)
    key: Any = ("reduce_scatter", algorithm, name, out.dtype, out.shape)
    whole = None
    if isinstance(input, torch.Tensor):
        whole = checks.source("input", input, communicator)
        key = (*key, whole.shape, whole.dtype)
        known: Any = communicator.calls.get(key)
        as_it_is = known is not None and algorithm == "auto" and factor is None
        if as_it_is and _uncut(whole, out, communicator.rank):
            reduce = communicator.engine.reduce
            return functools.partial(reduce, known, whole, out, name, TO_EACH), (output,), known
    inputs = parts("input", input, "output", out, communicator, written=False)
    if factor is not None:
        for r, each in enumerate(inputs):
            words.check_factor(factor, f"input[{r}]", each)
    if whole is None:
        key = (*key, *[each.shape for each in inputs])
    call = communicator.calls.get(key)
    if call is None:
        words.check_dtype("reduce_scatter", name, "output", out.dtype)
        terms = (
            ("dtype of input", out.dtype),
            ("op", name),
            *_shape_terms("input", inputs),
            ("algorithm", algorithm),
        )
        call = remember(communicator, key, Call("reduce_scatter", terms))

    def start() -> Event | None:
        made = [words.dense(each, name, factor)[0] for each in inputs]
        engine, reducing = stream_engine.serving(communicator, algorithm), name
        if factor is not None:
            reducing = "sum"

        def run(targets: Sequence[torch.Tensor]) -> Event | None:
            return engine.reduce_scatter(call, targets[0], made, reducing)

        return fill_dense(communicator, [out], run)

    return start, (output,), call


_reduce_scatter = internal_form("reduce_scatter", checked_reduce_scatter, fills=True)


def reduce_scatter(
    output: torch.Tensor | None = None,
    input: PerRank | None = None,
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: CollectiveAlgorithm = "auto",
    input_list: list[torch.Tensor] | None = None,
) -> Work | None:
    """Reduce over ranks; rank r keeps part r in ``output``.

    Parameters
    ----------
    output : this rank's part. It may be this rank's part of ``input``.
    input : a list with one part per rank (shapes may differ, each equal to its owner's ``output``), or
        one tensor that is the parts concatenated along dim 0 or stacked. ``input_list`` is torch's name.
    op, algorithm : as for :func:`all_reduce`.

    Reduces in rank order, in fp32 for narrower floats. Returns None, or a :class:`Work`. Raises ValueError
    or TypeError before any data moves. Semantics: ``torch.distributed.reduce_scatter``, ``_tensor`` too.

    >>> def on_rank():
    ...     output = torch.empty(2)
    ...     interlace.reduce_scatter(output, torch.arange(4.0))
    ...     return output.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0, 2.0], [4.0, 6.0]]
    """
    communicator = resolve(group).on(output)
    with communicator.accepting("reduce_scatter"):
        output = either("output", output, "output", None, "reduce_scatter")
        input = either("input", input, "input_list", input_list, "reduce_scatter")
    return _reduce_scatter(communicator, (output, input), (op, algorithm), async_op)


reduce_scatter_tensor = reduce_scatter
reduce_scatter_single = reduce_scatter
_reduce_scatter_base = reduce_scatter

_BARRIER = Call("barrier")


def _barrier(
    communicator: Communicator, async_op: bool = False, timeout: timedelta | float | None = None
) -> Work | None:
    for other in communicator.on_all_devices():
        if other is not communicator:
            other.place.arrive()  # the work that was issued there must also finish

    bounded = timeout is not None and not async_op
    work: Work | None = communicator.run(
        "barrier", lambda: communicator.engine.barrier(_BARRIER), async_op=async_op or bounded
    )
    if bounded:
        assert work is not None
        work.wait(timeout)
    return work if async_op else None


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: timedelta | float | None = None,
) -> Work | None:
    """Return once every rank of the group has called it and all work that the callers issued has finished.

    Blocks the host, unless ``async_op``: then a :class:`Work`. ``timeout``, in seconds or a timedelta,
    bounds the blocking in ``shm``. The group's own timeout always does, and :func:`interlace.timeout` also
    bounds a Work. ``device_ids`` is torch's, a list of ints or None. Raises CollectiveTimeoutError.
    Semantics: ``torch.distributed.barrier``.

    >>> interlace.run(interlace.barrier, 2)
    [None, None]
    """
    communicator = resolve(group)
    if device_ids is not None or timeout is not None:
        with communicator.accepting("barrier"):
            if device_ids is not None and not isinstance(device_ids, list):
                raise TypeError(f"device_ids must be a list of ints, got {device_ids!r}")
            checks.seconds("timeout", timeout)
    return _barrier(communicator, async_op, timeout)


def _together(
    communicator: Communicator, name: str, prepared: Sequence[PreparedCall]
) -> PreparedCall:
    """Run ``prepared``, one after another, after all ranks have compared all of it."""
    calls = [call for *_, call in prepared if call is not None]
    key = (name, *[call.message for call in calls])
    whole = communicator.calls.get(key)
    if whole is None:
        terms: list[tuple[str, Any]] = [("number of tensors", len(calls))]
        for index, call in enumerate(calls):
            terms += [(f"{term}, of entry {index},", value) for term, value in call.terms]
        whole = remember(communicator, key, Call(name, tuple(terms)))

    def start() -> Any:
        communicator.engine.agree(whole)
        event = None
        for begin, *_ in prepared:
            event = begin()
        return event

    return start, [tensor for _, outputs, _ in prepared for tensor in outputs], whole


def _read_first(
    communicator: Communicator,
    prepared: PreparedCall,
    together: Callable[[list[torch.Tensor]], PreparedCall],
) -> PreparedCall:
    """Return ``prepared`` for tensors reduced in place; for copies if two share memory, as torch has it."""
    _, outputs, _ = prepared
    tensors = [checks.import_array("tensors", output) for output in outputs]
    if disjoint(tensors):
        return prepared
    copies = [torch.empty_like(each) for each in tensors]
    begin, _, call = together(copies)

    def start() -> Event | None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        event: Any = begin()
        return copied_back(communicator, tensors, copies, event)

    return start, outputs, call


def _of_lists(
    name: str, names: Sequence[str], checked: Callable[..., PreparedCall]
) -> Callable[..., Work | None]:
    """Return the internal form of ``name``: ``checked`` per entry of lists, named ``names`` in errors."""

    def check(communicator: Communicator, *arguments: Any) -> PreparedCall:
        lists, options = arguments[: len(names)], arguments[len(names) :]
        for each, value in zip(names, lists, strict=True):
            if not isinstance(value, (list, tuple)):
                raise TypeError(f"{name}: {each} must be a list, got {type(value).__name__}")
        if len(lists[0]) != len(lists[-1]):
            raise ValueError(
                f"{name}: {names[0]} has {len(lists[0])} entries, {names[-1]} has {len(lists[-1])}"
            )

        def together(*lists: Any) -> PreparedCall:
            entries = zip(*lists, strict=True)
            return _together(
                communicator, name, [checked(communicator, *entry, *options) for entry in entries]
            )

        prepared = together(*lists)
        return prepared if len(lists) > 1 else _read_first(communicator, prepared, together)

    return internal_form(name, check, names=(*names, "op"))


_all_reduce_coalesced = _of_lists("all_reduce_coalesced", ["tensors"], checked_all_reduce)
_all_gather_coalesced = _of_lists(
    "all_gather_coalesced", ["output_tensor_lists", "input_tensor_list"], checked_all_gather
)
_all_gather_into_tensor_coalesced = _of_lists(
    "all_gather_into_tensor_coalesced", ["outputs", "inputs"], checked_all_gather
)
_reduce_scatter_tensor_coalesced = _of_lists(
    "reduce_scatter_tensor_coalesced", ["outputs", "inputs"], checked_reduce_scatter
)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Run :func:`interlace.all_reduce` on each of ``tensors``, which may differ in shape and dtype.

    If two of ``tensors`` share memory, all are read before one is written. Returns None, or a
    :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before any data moves.
    Semantics: ``torch.distributed.all_reduce_coalesced``, which returns a Future.

    >>> def on_rank():
    ...     tensors = [torch.ones(1), torch.arange(2)]
    ...     interlace.all_reduce_coalesced(tensors)
    ...     return [tensor.tolist() for tensor in tensors]
    >>> interlace.run(on_rank, 2)[0]
    [[2.0], [0, 2]]
    """
    return _all_reduce_coalesced(resolve(group).on(tensors), (tensors,), (op,), async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[PerRank],
    input_tensor_list: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Run :func:`interlace.all_gather` on each tensor of ``input_tensor_list``, with one output for each.

    Tensors of a list may differ in shape and dtype. Each of ``output_tensor_lists`` is one tensor, in a
    shape that ``all_gather`` takes, or a list with a tensor per rank.
    Returns None, or a :class:`Work` with ``async_op``. Raises ValueError or TypeError on every rank before
    any data moves. Semantics: ``torch.distributed.all_gather_coalesced``, which returns a Future.

    >>> def on_rank():
    ...     mine = [torch.tensor([interlace.get_rank()]), torch.ones(1)]
    ...     outputs = [[torch.empty_like(each) for _ in range(2)] for each in mine]
    ...     interlace.all_gather_coalesced(outputs, mine)
    ...     return outputs[0]
    >>> interlace.run(on_rank, 2)[0]
    [tensor([0]), tensor([1])]
    """
    lists = output_tensor_lists, input_tensor_list
    return _all_gather_coalesced(resolve(group).on(input_tensor_list), lists, (), async_op)


def all_gather_into_tensor_coalesced(
    outputs: Sequence[PerRank],
    inputs: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Run :func:`all_gather_coalesced` under the name that backends of torch use.

    ``inputs`` and ``outputs`` may differ in shape and dtype. Raises what that does.

    >>> def on_rank():
    ...     outputs = [torch.empty(2), torch.empty(4)]
    ...     interlace.all_gather_into_tensor_coalesced(outputs, [torch.ones(1), torch.zeros(2)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)[0]
    [tensor([1., 1.]), tensor([0., 0., 0., 0.])]
    """
    communicator = resolve(group).on(inputs)
    return _all_gather_into_tensor_coalesced(communicator, (outputs, inputs), (), async_op)


def reduce_scatter_tensor_coalesced(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[PerRank],
    op: AnyReduceOp = "sum",
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Run :func:`interlace.reduce_scatter` from each of ``inputs``, in either form, to each of ``outputs``.

    Each of ``outputs`` has the shape of this rank's part. Returns None, or a :class:`Work` with
    ``async_op``. Raises ValueError or TypeError on every rank before any data moves. Semantics: the method
    ``reduce_scatter_tensor_coalesced`` of torch's backends.

    >>> def on_rank():
    ...     outputs = [torch.empty(1), torch.empty(2)]
    ...     interlace.reduce_scatter_tensor_coalesced(outputs, [torch.ones(2), torch.arange(4.0)])
    ...     return outputs
    >>> interlace.run(on_rank, 2)
    [[tensor([2.]), tensor([0., 2.])], [tensor([2.]), tensor([4., 6.])]]
    """
    communicator = resolve(group).on(outputs)
    return _reduce_scatter_tensor_coalesced(communicator, (outputs, inputs), (op,), async_op)
