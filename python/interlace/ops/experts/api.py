"""The grouped matmuls as they are called: rows meet the weights of their experts, and go home."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import (
    FusedAlgorithm,
    Group,
    Splits,
)
from interlace.groups.groups import check_group, resolve
from interlace.kernels.epilogue import Activation
from interlace.ops.experts import counted, grouped, grouped_combine
from interlace.ops.experts.grouped import GroupedArguments
from interlace.ops.experts.grouped_combine import (
    OP,
    GroupedCombineArguments,
    RoutedCombineArguments,
)
from interlace.ops.experts.routing import (
    DispatchHandle,
    by_handle,
    choice,
    dispatch_number,
    flat,
    routing_for,
)
from interlace.ops.matmul.api import requires_gradients
from interlace.ops.op import eager as recorded
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.work import Work
from interlace.runtime.numerics.activations import activate

if TYPE_CHECKING:
    pass

Tensor = torch.Tensor


def all_gather_grouped_matmul(
    input: Tensor,
    weight: Tensor,
    input_splits: Splits,
    output_splits: Splits | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    group: Group = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...] | Work:
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
    splits: Any = input_splits, output_splits
    about: Any = return_received, algorithm, out_dtype, activation, 0, grouped.GATHER
    call = GroupedArguments(input, weight, bias, *splits, *about)
    return _grouped_matmul(call, group, async_op)  # type: ignore[no-any-return]


def all_to_all_grouped_matmul(
    input: Tensor,
    weight: Tensor,
    input_splits: Splits,
    output_splits: Splits | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    group: Group = None,
    return_received: bool = False,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
    num_max_rows_per_rank: int | None = None,
) -> tuple[Tensor, ...] | tuple[Tensor, DispatchHandle] | Work:
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

    With ``num_max_rows_per_rank``, a bound of every rank's rows, counts stay on the device.
    ``input_splits`` is a tensor there, which may add up to less than ``t``: rows behind go nowhere.
    ``output`` is as long as it can get, ``(W * num_max_rows_per_rank, n)``, zero where nothing came, and in
    place of ``splits`` there is a handle, as that of a dispatch of the rows, for
    :func:`grouped_matmul_combine`. By the fused algorithm, which "auto" is there on GPUs of one node, no
    host waits for its GPU, nor, in a call whose like was made before, for another rank. To record gradients
    it does. ``n`` is the same on all ranks; neither ``output_splits`` nor ``return_received`` go with it.

    >>> def layer():
    ...     rank = interlace.get_rank()
    ...     weight = torch.full((1, 4, 1), 10.0 ** rank)  # one expert per rank
    ...     rows = torch.full((3, 4), 1.0 + rank)
    ...     output, splits = interlace.all_to_all_grouped_matmul(rows, weight, [2, 1])
    ...     return output.flatten().tolist(), splits.tolist()
    >>> interlace.run(layer, 2)
    [([4.0, 4.0, 8.0, 8.0], [[2, 2]]), ([40.0, 80.0], [[1, 1]])]
    """
    splits: Any = input_splits, output_splits
    about: Any = return_received, algorithm, out_dtype, activation, 0, grouped.EXCHANGE
    call = GroupedArguments(input, weight, bias, *splits, *about)
    communicator = resolve(group).on(input)
    number = dispatch_number(communicator)  # without a bound, too: on another rank there may be one
    if num_max_rows_per_rank is not None:
        with communicator.accepting(call.op):
            call.max_rows = counted.checked_bound(num_max_rows_per_rank, call)
    return _grouped_matmul(call, group, async_op, number)  # type: ignore[no-any-return]


def grouped_matmul_combine(
    input: Tensor,
    weight: Tensor,
    splits: Splits | DispatchHandle,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    group: Group = None,
    async_op: bool = False,
    algorithm: FusedAlgorithm = "auto",
    out_dtype: torch.dtype | None = None,
) -> Tensor | Work:
    """Multiply every row by its expert's weight, send it home, and sum over its token's experts.

    The other half of :func:`all_to_all_grouped_matmul`: with it a mixture-of-experts MLP is two fused ops.
    Rows are stored where their tokens are as they are computed.

    Parameters
    ----------
    input : ``(r, k)``, rows by expert, then by source rank, as that op returns them; after a low-latency
        dispatch ``(E / W, most rows, k)``. Any strides.
    weight : ``(E / W, k, n)``, this rank's experts, with any strides.
    splits : rows by expert and source rank, E / W * W of them: what that op returns. They add up to ``r``.
        Or the handle of a dispatch, whose ``received.x``, row by row, has become ``input``. If the dispatch
        had a bound of tokens, no host of a GPU waits for anything, as counts stay on the device.
    topk_idx : integers ``(t, K)``: the experts of this rank's tokens, -1 for none. The rows that it has
        sent were sorted by expert, then by token and slot, as :func:`interlace.experts.permute` does it.
        None with a handle, which has them.
    topk_weights : ``(t, K)``, by which rows are multiplied, in fp32 and where their tokens are; None: those
        of the handle, or a sum.
    bias : ``(E / W, n)``, added to every row before it is weighted.
    algorithm, out_dtype : as for :func:`interlace.all_gather_matmul`.
    group : that of the handle, if there is one.

    Returns ``(t, n)``, or with ``async_op`` a :class:`Work` whose ``wait()`` returns it: the sum over slots
    0, 1, 2 ... in fp32 of rows that were rounded to the output's dtype. It does not depend on timing, nor
    on where experts are. A token without experts is 0.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Gradients go to ``input``, ``weight``, ``bias`` and ``topk_weights``; the rows' gradients
    travel and are multiplied by :func:`all_to_all_grouped_matmul`.

    Compared with DeepEP's ``combine`` after ``torch._grouped_mm``, which are two kernels, and
    Megatron-core's all-to-all dispatcher (``token_unpermutation``): the same sums. Triton-distributed fuses
    the same two, and adds by arrival.

    >>> def layer():
    ...     rank = interlace.get_rank()
    ...     experts = torch.tensor([[0, 1], [1, 0]])  # of this rank's two tokens
    ...     rows, sent = interlace.experts.permute(torch.ones(2, 4), experts, 2)
    ...     up, down = torch.ones(1, 4, 3), torch.full((1, 3, 1), 1.0 + rank)
    ...     hidden, splits = interlace.all_to_all_grouped_matmul(rows, up, sent)
    ...     weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    ...     return interlace.grouped_matmul_combine(hidden, down, splits, experts, weights).tolist()
    >>> interlace.run(layer, 2)
    [[[12.0], [18.0]], [[12.0], [18.0]]]
    """
    how: Any = {"algorithm": algorithm, "out_dtype": out_dtype}
    operands: Any = (input, weight, bias, topk_idx, topk_weights)
    if isinstance(splits, DispatchHandle):
        communicator = resolve(splits.group).on(input)
        with communicator.accepting(OP):
            check_group(group, splits.group)
        with by_handle(communicator, splits):
            return _with_handle(operands, splits, how, async_op)  # type: ignore[no-any-return]
    communicator = resolve(group).on(input)
    about: Any = topk_idx, topk_weights, [], splits, False
    given = GroupedCombineArguments(input, weight, bias, *about, **how)
    if requires_gradients(*operands):
        if not modes_active():
            with communicator.accepting(OP):
                call = grouped_combine.checked(communicator, given)
                received = grouped_combine.checked_splits(communicator, call, splits)

            def agree() -> Any:
                return grouped_combine.agree(communicator, call, received, recorded.FIRST)

            counts = recorded.agreed(communicator, OP, (input, weight, bias), agree)
            how |= {"home_splits": counts[communicator.rank].tolist(), "group": group}
            operands = (input, weight, received, topk_idx, topk_weights)
            return recorded.started(OP, async_op, operands, bias=bias, **how)  # type: ignore[no-any-return]
        checks.warn_without_gradients(OP, stacklevel=3)
    return grouped_combine.grouped_matmul_combine(communicator, (given, None), (), async_op)  # type: ignore[no-any-return]


def _with_handle(
    operands: tuple[Any, ...], handle: DispatchHandle, how: dict[str, Any], async_op: bool
) -> Any:
    input, weight, bias, topk_idx, topk_weights = operands
    if requires_gradients(*operands, handle.topk_weights):
        operands = (input, weight, handle, topk_idx, topk_weights)
        return recorded.started(OP, async_op, operands, bias=bias, **how)
    topk_idx, topk_weights = choice(handle, topk_idx, topk_weights)
    routing = routing_for(handle, topk_idx)._replace(algorithm=how["algorithm"])
    communicator = resolve(handle.group).on(input)
    with communicator.accepting(OP):
        rows = flat(handle, "input", input)
    given = RoutedCombineArguments(
        rows, weight, bias, handle.segments, topk_idx, topk_weights, False, *routing,
        how["out_dtype"],
    )  # fmt: skip
    return grouped_combine.grouped_matmul_combine(communicator, (given, None), (), async_op)


def _grouped_matmul(given: GroupedArguments, group: Group, async_op: bool, number: int = 0) -> Any:
    op, communicator = given.op, resolve(group).on(given.input)

    def on_device(made: list[Tensor]) -> tuple[Tensor, DispatchHandle]:
        return made[0], counted.handle_of(communicator, given, made[1], number)

    tensors = given.input, given.weight, given.bias
    if requires_gradients(*tensors):
        if not modes_active():
            with communicator.accepting(op):
                known = counted.with_counts(communicator, given) if given.max_rows else given
                call = grouped.checked(communicator, known)

            def agree() -> Any:
                return grouped.agree(communicator, call, recorded.FIRST)

            routes, _ = recorded.agreed(communicator, op, tensors, agree)
            if op == grouped.EXCHANGE or len({sum(each) for each in routes.counts}) == 1:
                splits = routes.splits()

                def finish(made: Any) -> Any:
                    received, output = made if given.return_received else (None, made)
                    output = activate(output, call.activation)
                    if given.max_rows:
                        return on_device(counted.padded(output, routes, given))
                    return grouped.result(received, output, splits)

                how: Any = {"bias": given.bias, "return_received": given.return_received}
                how |= {"algorithm": given.algorithm, "out_dtype": given.out_dtype, "group": group}
                counts = call.input_splits, [n for each in splits for n in each]
                operands = (known.input, given.weight, *counts)
                return recorded.started(op, async_op, operands, finish, **how)
        checks.warn_without_gradients(op, stacklevel=4)
    if given.max_rows:
        made = counted.counted_grouped_matmul(communicator, (given,), (), async_op)
        if async_op:
            return recorded.RecordedWork(op, None, [made], lambda _: on_device(made.wait()))
        return on_device(made)
    return grouped.FORMS[op](communicator, (given,), (), async_op)
