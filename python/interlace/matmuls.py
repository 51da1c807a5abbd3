"""The fused ops as they are called: on tensors whose gradients are recorded, or on plain ones."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace import recorded
from interlace.arguments import checks
from interlace.fused import gather, grouped, reduce
from interlace.groups.groups import resolve
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import internal_form
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics.activations import activate


def all_gather_matmul(
    input: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    activation: str | Sequence[str | None] | None = None,
    group: Any = None,
    return_gathered: bool = False,
    async_op: bool = False,
    algorithm: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``torch.cat(shards of all ranks, gather_dim) @ weight + bias``, gathering inside the matmul.

    Parameters
    ----------
    input : this rank's shard, ``[..., k]``, 2-D or more. Shards may differ in length along
        ``gather_dim``; all other lengths agree. Any strides.
    weight : ``(k, n)`` with any strides (a transposed ``nn.Linear.weight`` is read in place), or a
        sequence of weights that share the gather. ``n`` may differ between ranks.
    gather_dim : dimension of ``input`` that is sharded; the last one too.
    bias : ``(n,)``; for several weights a sequence with one entry (or None) each.
    activation : "relu", "gelu", "gelu_tanh" (gelu's approximation) or "silu" of the output, taken before
        it is rounded; for several weights also a sequence with one entry (or None) each.
    return_gathered : also return the gathered input, contiguous along ``gather_dim``.
    algorithm : "fused" (Triton kernel), "pipelined" (torch matmuls as chunks arrive), "unfused", "auto".
    out_dtype : dtype of the output, default the input's. float64 only by "unfused" or "auto".

    Returns
    -------
    The output ``[..., n]`` (a list for several weights), or ``(gathered, output)`` with
    ``return_gathered``; with ``async_op`` a :class:`Work` whose ``wait()`` returns it. For
    ``gather_dim`` other than 0 the output is a permuted view, as in torch's fused ops.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded if the shards are equal, and if all ranks' tensors require them alike; the
    activation is then torch's, after the op, because its gradient needs what it was taken of.

    Semantics: ``torch.ops.symm_mem.fused_all_gather_matmul``.

    >>> interlace.run(lambda: interlace.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 4)).sum(), 2)
    [tensor(128.), tensor(128.)]
    """
    options = gather.GatherMatmulOptions(
        gather_dim, return_gathered, algorithm, out_dtype, activation
    )
    if _requires_gradients(input, weight, bias):
        if _matrices(input) and recorded.equal_shards(group, input, gather_dim):
            several = not isinstance(weight, torch.Tensor)
            count = len(weight) if several else 1
            with resolve(group).accepting(gather.OP):
                names = checks.activations(activation, count, several)
            return recorded.run(
                gather.OP,
                async_op,
                (input, weight, gather_dim),
                lambda result: _activated(result, names, several, return_gathered),
                options,
                bias=bias,
                group=group,
                return_gathered=return_gathered,
            )
        checks.warn_without_gradients(gather.OP)
    tensors = (input, weight, bias, (), None)
    communicator = resolve(group).on(input)
    return gather.gather_matmul(communicator, tensors, (options,), async_op)


def _activated(result: Any, names: list[str], several: bool, with_gathered: bool) -> Any:
    """The op's result with the activations done."""
    outputs = result[1] if with_gathered else result
    outputs = outputs if several else [outputs]
    done: Any = [activate(output, name) for output, name in zip(outputs, names, strict=True)]
    done = done if several else done[0]
    return (result[0], done) if with_gathered else done


def matmul_reduce_scatter(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    reduce_op: str = "sum",
    scatter_dim: int = 0,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    group: Any = None,
    async_op: bool = False,
    algorithm: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """This rank's part of ``sum over ranks of (input @ weight)``, scattered as it is computed.

    Parameters
    ----------
    input : ``[..., k]``, 2-D or more, any strides; ``k`` may differ between ranks.
    weight : ``(k, n)`` with any strides.
    reduce_op : "sum" or "avg" (sum divided by the world size).
    scatter_dim : dimension of the output that is split over ranks as ``torch.chunk`` does: parts of
        ``ceil(length / world size)``, trailing ranks get what is left, which may be nothing.
    bias : ``(n,)``, added once to the reduced output.
    activation : as for :func:`all_gather_matmul`, of the reduced output and the bias.
    algorithm, out_dtype : as for :func:`all_gather_matmul`. Partial products travel in ``out_dtype``.

    Returns
    -------
    The own part, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it. Sums are taken in
    fp32 in rank order, so results are bit-identical from run to run. For ``scatter_dim`` other than 0
    the output is a permuted view, as in torch's fused ops.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded where all parts are equal, as by :func:`all_gather_matmul`.

    Semantics: ``torch.ops.symm_mem.fused_matmul_reduce_scatter``.

    >>> interlace.run(lambda: interlace.matmul_reduce_scatter(torch.ones(4, 8), torch.ones(8, 1)), 2)
    [tensor([[16.],
            [16.]]), tensor([[16.],
            [16.]])]
    """
    options = reduce.MatmulReduceOptions(reduce_op, scatter_dim, algorithm, out_dtype, activation)
    return _matmul_reduce((input, weight, bias), options, group, async_op)


def matmul_all_reduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    group: Any = None,
    async_op: bool = False,
    algorithm: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``sum over ranks of (input @ weight) + bias`` on every rank, bitwise equal on all of them.

    ``input``: ``[..., k]``, ``weight``: ``(k, n)``, and the rest as for :func:`matmul_reduce_scatter`, but
    ``bias`` must be the same on all ranks, of which each adds it to a part of the rows. Small outputs go
    one-shot, in one kernel that sends every tile to every rank; larger ones as matmul + reduce-scatter and
    an all-gather of the parts.

    Raises ValueError or TypeError naming the argument, both values and the rank. Semantics:
    ``torch.matmul``, then ``torch.distributed.all_reduce``.

    >>> interlace.run(lambda: interlace.matmul_all_reduce(torch.ones(1, 8), torch.ones(8, 1)), 2)
    [tensor([[16.]]), tensor([[16.]])]
    """
    given = (reduce_op, None, algorithm, out_dtype, activation)
    options = reduce.MatmulReduceOptions(*given, op=reduce.ALL_REDUCE)
    return _matmul_reduce((input, weight, bias), options, group, async_op)


def _matmul_reduce(
    tensors: tuple[Any, ...], options: reduce.MatmulReduceOptions, group: Any, async_op: bool
) -> Any:
    """Either op that reduces; recorded for backward if autograd can and is to know of it."""
    op, (input, weight, bias) = options.op, tensors
    if _requires_gradients(*tensors):
        dims: tuple[Any, ...] = (options.scatter_dim,) if op == reduce.SCATTER else ()
        if _matrices(input, weight) and all(
            recorded.equal_parts(group, input, weight, dim) for dim in dims
        ):
            with resolve(group).accepting(op):
                name = checks.activation("activation", options.activation)
            operands = (input, weight, options.reduce_op, *dims)
            then = functools.partial(activate, name=name)
            return recorded.run(op, async_op, operands, then, options, bias=bias, group=group)
        checks.warn_without_gradients(op, stacklevel=4)
    communicator, tensors = resolve(group).on(input), (*tensors, None)
    return reduce.FORMS[op](communicator, tensors, (options,), async_op)


def _matrices(*tensors: Any) -> bool:
    """Whether a call with these is one that autograd can know of."""
    return not modes_active() and all(
        isinstance(each, torch.Tensor) and each.dim() > 1 for each in tensors
    )


def _requires_gradients(*tensors: Any) -> bool:
    """Whether autograd is to know of a call with these tensors and lists of tensors."""
    if not torch.is_grad_enabled():
        return False
    for each in tensors:
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return True
        elif isinstance(each, (list, tuple)) and _requires_gradients(*each):
            return True
    return False


def all_gather_grouped_matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_splits: Sequence[int] | torch.Tensor,
    output_splits: Sequence[int] | torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    group: Any = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Every rank multiplies the rows of all ranks, each by its expert's weight, as they arrive.

    For experts of which every rank has a slice (tensor parallel): ``weight`` holds all E experts.

    Parameters
    ----------
    input : this rank's rows, ``(t, k)``, sorted by expert. ``t`` may differ between ranks. Any strides.
    weight : ``(E, k, n)`` with any strides; the ``(E, n, k)`` of stacked ``nn.Linear`` weights is read in
        place as ``weight.transpose(1, 2)``. ``n`` may differ between ranks.
    input_splits : rows for each of the E experts: ints, or a tensor of integers (one on a GPU is waited
        for). They add up to ``t``.
    output_splits : what the caller expects in the result, E * W ints by expert and source rank; compared
        with what the ranks have. None: not compared.
    bias : ``(E, n)``.
    activation, algorithm, out_dtype : as for :func:`interlace.all_gather_matmul`.
    return_received : also return the rows as they were multiplied.

    Returns
    -------
    ``(output, splits)``, or ``(received, output, splits)`` with ``return_received``; with ``async_op`` a
    :class:`Work` whose ``wait()`` returns it. ``output`` is ``(r, n)``, rows by expert, then by source
    rank, then as the source had them; ``splits`` is int64 ``(E, W)``, on the CPU.

    Raises ValueError or TypeError naming the argument, both values and the rank.

    Gradients are recorded where all ranks have equally many rows, as by :func:`all_gather_matmul`.

    >>> def layer():
    ...     rank, weight = interlace.get_rank(), torch.stack([torch.ones(4, 1), 2 * torch.ones(4, 1)])
    ...     rows = torch.full((3, 4), float(1 + rank))
    ...     output, splits = interlace.all_gather_grouped_matmul(rows, weight, [1 + rank, 2 - rank])
    ...     return output.flatten().tolist(), splits.tolist()
    >>> interlace.run(layer, 2)[0]
    ([4.0, 8.0, 8.0, 8.0, 8.0, 16.0], [[1, 2], [2, 1]])
    """
    given = (input_splits, output_splits, return_received, algorithm, out_dtype, activation)
    options = grouped.GroupedOptions(grouped.GATHER, *given)
    return _grouped_matmul((input, weight, bias), options, group, async_op)


def all_to_all_grouped_matmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_splits: Sequence[int] | torch.Tensor,
    output_splits: Sequence[int] | torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    group: Any = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Every row goes to the rank that has its expert, and is multiplied by its weight when it arrives.

    For experts that are spread over ranks (expert parallel): of E experts rank r has those from
    ``r * E / W`` on, and ``weight`` is theirs, ``(E / W, k, n)``. ``input_splits`` still has all E, so the
    rows for one rank lie together, as for ``torch.distributed.all_to_all_single``. Splits may be as uneven
    as they like, zeros included.

    ``bias`` is ``(E / W, n)``, ``output_splits`` has E / W * W ints and ``splits`` is ``(E / W, W)``.
    Everything else is as for :func:`all_gather_grouped_matmul`; gradients need no equal numbers of rows.
    Raises what that does.

    The way back: ``output`` in the order of sources, then experts (``splits.T``), and an
    ``all_to_all_single`` with the sizes exchanged, brings each row to where it was in ``input``.

    >>> def layer():
    ...     rank = interlace.get_rank()
    ...     weight = torch.full((1, 4, 1), 10.0 ** rank)  # one expert per rank
    ...     rows = torch.full((3, 4), 1.0 + rank)
    ...     output, splits = interlace.all_to_all_grouped_matmul(rows, weight, [2, 1])
    ...     return output.flatten().tolist(), splits.tolist()
    >>> interlace.run(layer, 2)
    [([4.0, 4.0, 8.0, 8.0], [[2, 2]]), ([40.0, 80.0], [[1, 1]])]
    """
    given = (input_splits, output_splits, return_received, algorithm, out_dtype, activation)
    options = grouped.GroupedOptions(grouped.EXCHANGE, *given)
    return _grouped_matmul((input, weight, bias), options, group, async_op)


def _grouped_matmul(
    tensors: tuple[Any, ...], options: grouped.GroupedOptions, group: Any, async_op: bool
) -> Any:
    input, weight, bias = tensors
    op, communicator = options.op, resolve(group).on(input)
    if _requires_gradients(*tensors):
        if not modes_active():
            with communicator.accepting(op):
                call = grouped.checked(communicator, input, weight, bias, options)
            first = f"{op} of tensors that require gradients"  # on all ranks, then
            routes = communicator.run(
                first,
                lambda: Outcome(grouped.agree(communicator, options, call, first), None),
                async_op=False,
            )
            if op == grouped.EXCHANGE or len({sum(each) for each in routes.counts}) == 1:
                splits = routes.splits()

                def finish(made: Any) -> Any:
                    received, output = made if options.return_received else (None, made)
                    output = activate(output, call.activation)
                    return grouped.result(received, output, splits)

                return recorded.run(
                    op,
                    async_op,
                    (input, weight, call.input_splits, [n for each in splits for n in each]),
                    finish,
                    options,
                    bias=bias,
                    group=group,
                    return_received=options.return_received,
                )
        checks.warn_without_gradients(op, stacklevel=4)
    tensors = (*tensors, None, None)
    run = internal_form(op, grouped.grouped_matmul)
    return run(communicator, tensors, (options,), async_op)
