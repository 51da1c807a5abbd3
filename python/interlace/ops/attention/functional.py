"""Attention as functions; a graph has one op for each: over a sequence, decoding, exchange of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from interlace.arguments import checks
from interlace.arguments.words import FunctionalGroup, FusedAlgorithm, Group, ScaledAlgorithm
from interlace.groups.groups import resolve
from interlace.ops.attention.context_parallel import (
    FORWARD,
    HEADS,
    AttentionArguments,
    AttentionOptions,
    checked_options,
)
from interlace.ops.attention.problem import BALANCES, TokenShards
from interlace.ops.op.async_tensor import wait
from interlace.ops.op.calls import check, flag, ints, keeps, number, refuse, run, run_record
from interlace.runtime.core.communicator import Communicator

Tensor = torch.Tensor


def distributed_decode(
    q: Tensor,
    kv_cache: Sequence[Tensor],
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: ScaledAlgorithm = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend from new tokens to the caches of all ranks, like :func:`interlace.distributed_decode`.

    ``q``, ``kv_cache``, ``lengths``, ``block_table``, ``scale`` and ``algorithm`` as for that function.
    Returns the output, of the shape of ``q`` with the head size of the values, and the natural logarithms
    of the sums of exponentials, ``[batch, heads]`` or ``[batch, heads, tokens]``. A graph has one op for
    it. It has no gradients: a backward raises RuntimeError.

    Raises ValueError or TypeError on every rank, before any data moves. Semantics:
    ``torch.nn.functional.scaled_dot_product_attention`` of the whole cache.

    >>> def decoded():
    ...     keys, values = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1, 4), 1.0 + interlace.get_rank())
    ...     return functional.distributed_decode(torch.zeros(1, 2, 4), (keys, values))[0][0, 0].tolist()
    >>> interlace.run(decoded, 2)
    [[1.5, 1.5, 1.5, 1.5], [1.5, 1.5, 1.5, 1.5]]
    """
    op = "distributed_decode"
    try:
        key, value = checks.keys_and_values(kv_cache)
    except TypeError as error:
        refuse(op, group, tag, error)
    check(op, group, tag, None, q=q, **{"kv_cache[0]": key, "kv_cache[1]": value})
    number(op, group, tag, "scale", scale)
    record = (q, key, value, lengths, block_table, scale, algorithm)
    output, lse = run(op, group, tag, *record)
    return output, lse


def matmul_all_to_all(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    length: int | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """Compute ``input @ weight + bias`` for all ranks' rows and return this rank's part of the columns.

    This is the projection before an attention over heads. A rank has some tokens of all heads, and gets all
    tokens of some heads.

    Parameters
    ----------
    input : this rank's rows, ``[m, ..., k]``. If ranks have different ``m``, also 0, pass ``length``.
    weight : ``(k, n)``, the same on all ranks; any strides. The number of ranks W divides ``n``. Rank r
        gets the columns from ``r * n / W`` on.
    bias : ``(n,)``, the same on all ranks.
    length : the length of the result along dimension 0, the sum of all ``m``; by default ``W * m``.
    algorithm : "fused" (one Triton kernel stores each tile where it is needed), "pipelined" (torch, a
        product per receiver), "unfused" (torch, then a plain all-to-all), "auto".

    Returns ``[length, ..., n / W]``, by rank. Differentiable: the gradient of the input is
    :func:`all_to_all_matmul` with the transposed weight. The gradients of weight and bias are sums over
    this rank's rows.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Semantics: a matmul, then ``torch.distributed.all_to_all_single`` of its columns. The result
    equals :func:`all_gather_matmul` with this rank's columns of the weight, but products travel.

    >>> def projected():
    ...     y = functional.matmul_all_to_all(torch.ones(1, 2), torch.arange(4.0).expand(2, 4))
    ...     return y.tolist()
    >>> interlace.run(projected, 2)
    [[[0.0, 2.0], [0.0, 2.0]], [[4.0, 6.0], [4.0, 6.0]]]
    """
    op = "matmul_all_to_all"
    check(op, group, tag, _ints(length), input=input, weight=weight, bias=bias)
    return run(op, group, tag, input, weight, bias, length, algorithm)  # type: ignore[no-any-return]


def all_to_all_matmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    length: int | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """Exchange all ranks' columns for this rank's rows, then multiply by ``weight`` and add ``bias``.

    This is the projection after an attention over heads. A rank has all tokens of some heads, and gets some
    tokens of all heads.

    Parameters
    ----------
    input : all rows, by rank, of this rank's columns: ``[m, ..., k / W]``.
    weight : ``(k, n)``, the same on all ranks; any strides. Rank r's columns are multiplied by its rows
        from ``r * k / W`` on.
    bias : ``(n,)``, the same on all ranks, added once.
    length : this rank's part of dimension 0, by default ``m / W``; the sum over ranks is ``m``.
    algorithm : "fused" (one Triton kernel multiplies each rank's columns when they have arrived),
        "pipelined" (torch, after pushes), "unfused" (a plain all-to-all, then torch), "auto".

    Returns ``[length, ..., n]``. "fused" sums over ranks in fp32 in their order, so the bits are the same
    in every run. Differentiable: the gradient of the input is :func:`matmul_all_to_all` with the transposed
    weight. The gradients of weight and bias are sums over this rank's rows.

    Raises ValueError or TypeError naming the argument, both values and the rank, on every rank, before any
    data moves. Semantics: ``torch.distributed.all_to_all_single``, then a matmul. The result equals
    :func:`matmul_reduce_scatter` with this rank's rows of the weight, but its inputs travel.

    >>> def projected():
    ...     return functional.all_to_all_matmul(torch.ones(2, 1), torch.tensor([[1.0], [2.0]])).tolist()
    >>> interlace.run(projected, 2)
    [[[3.0]], [[3.0]]]
    """
    op = "all_to_all_matmul"
    check(op, group, tag, _ints(length), input=input, weight=weight, bias=bias)
    record = (input, weight, bias, length, keeps([weight]), algorithm)
    return run(op, group, tag, *record)[0]  # type: ignore[no-any-return]


def _ints(length: Any) -> dict[str, Any]:
    return {} if length is None else {"length": length}


AttentionMethod = Literal["auto", "all_gather", "ring", "ulysses"]
Balance = Literal["zigzag", "contiguous"]
SequenceLayout = Literal["bshd", "sbhd"]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: AttentionMethod = "auto",
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    layout: SequenceLayout = "bshd",
    balance: Balance = "zigzag",
    algorithm: FusedAlgorithm = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention of this rank's queries to the keys of all ranks, while keys arrive.

    Parameters
    ----------
    q : this rank's queries, ``[batch, tokens, heads, size]`` ("bshd") or ``[tokens, batch, heads, size]``
        ("sbhd"). Any strides. Ranks may have different numbers of tokens, also 0.
    k, v : keys and values of the same tokens. Their number of heads divides the number of ``q`` (grouped
        queries). Heads of ``k`` have the size of the heads of ``q``; heads of ``v`` have any size, the same
        on all ranks.
    method : how keys reach queries. "all_gather": each rank gets the keys of all ranks. "ring": keys go
        from rank to rank, with memory for two ranks' keys. "ulysses": an all-to-all gives each rank all
        tokens of some heads. "auto" uses the method that moves the least data.
    causal : a token sees itself and the tokens before it in the sequence.
    scale : the factor of the scores, by default ``1 / sqrt(size)``.
    window : ``(before, after)``: how many tokens before and after itself a token sees, -1 for all.
    cu_seqlens : int32 or int64 ``[n + 1]``, the same on all ranks: where n packed sequences begin in the
        whole sequence, and the end of the last. A token sees only tokens of the same sequence. Tokens after
        the end see nothing, and their output is 0.
    balance : which tokens a rank has. "contiguous": rank 0 has the first tokens, rank 1 the next ...
        "zigzag": of 2 W chunks rank r has r and 2 W - 1 - r. Under a causal mask all ranks then have the
        same work. A rank's first chunk is the longer half of its tokens. See :func:`shard_sequence`.
    algorithm : "auto" or one of these. "fused": Triton kernels, for head sizes of at most 256. "pipelined":
        torch, on the keys of a rank as soon as they arrive. "unfused": torch, after a plain all-gather, for
        every method.
    return_lse : also return the natural logarithms of the sums of exponentials, ``[batch, heads, tokens]``.

    Returns
    -------
    The output of this rank's tokens, of the shape of ``q`` with the head size of ``v``, or
    ``(output, lse)``.

    The results for the keys of each rank are kept apart in fp32 and merged in the order of the ranks. So a
    result has the same bits in every run and schedule, and with every method of "fused". Differentiable.
    Gradients of keys are summed in fp32. The order of this sum depends on the method: by ranks, from this
    rank on with "ring", and over all queries at once with "ulysses".

    Raises ValueError or TypeError naming the argument, both values and the rank, on all ranks, before any
    data moves.

    Semantics: ``torch.nn.functional.scaled_dot_product_attention`` of the whole sequence. The methods are
    the ``cp_comm_type`` "all_gather", "p2p" and "a2a" of Megatron-core and TransformerEngine. These cut
    each packed sequence into 2 W chunks; here the whole is cut.

    >>> def attended():
    ...     rank = interlace.get_rank()
    ...     q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    ...     v = torch.full((1, 2, 1, 4), float(rank))
    ...     y = nn.functional.context_parallel_attention(q, k, v, causal=True, balance="contiguous")
    ...     return y[0, :, 0, 0].tolist()
    >>> [[round(each, 4) for each in row] for row in interlace.run(attended, 2)]
    [[0.0, 0.0], [0.3333, 0.5]]
    """
    flag(FORWARD, group, tag, "return_lse", return_lse)
    output, lse = _run(
        group, tag, query=q, key=k, value=v, cu_seqlens=cu_seqlens, method=method, causal=causal,
        scale=scale, window=window, layout=layout, balance=balance, algorithm=algorithm,
    )  # fmt: skip
    return (output, lse) if return_lse else output


def _run(group: FunctionalGroup, tag: str, **arguments: Any) -> list[Tensor]:
    """Return the output and the logarithms of the sums. Refuse values that torch's schema would convert."""
    record = AttentionArguments(**arguments)
    check(FORWARD, group, tag, _ints(record.length), q=record.query, k=record.key, v=record.value)
    if record.window is not None:
        record.window = ints(FORWARD, group, tag, "window", record.window)
    number(FORWARD, group, tag, "scale", record.scale)
    if not isinstance(record.causal, int):  # a bool is an int
        error = TypeError(f"causal must be a bool, got {record.causal!r}")
        refuse(FORWARD, group, tag, error)
    record.causal = bool(record.causal)
    return run_record(FORWARD, group, tag, record)  # type: ignore[no-any-return]


def check_options(layer: str, group: Communicator, *options: Any) -> None:
    """Refuse, on all ranks of ``group``, the :class:`AttentionOptions` that no call accepts."""
    with group.accepting(layer):
        checked_options(AttentionOptions(*options))


def attention_of_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    group: FunctionalGroup = None,
    tag: str = "",
    layout: SequenceLayout = "bshd",
    balance: Balance = "zigzag",
    algorithm: FusedAlgorithm = "auto",
) -> Tensor:
    """Compute softmax attention over all ranks' tokens for the heads of this rank; no tokens travel.

    Use it between :func:`interlace.functional.matmul_all_to_all`, which brings all tokens of this rank's
    heads, and :func:`interlace.functional.all_to_all_matmul`. Apply rotary embeddings before it.

    Parameters
    ----------
    q, k, v : as for :func:`context_parallel_attention`, with all ranks' tokens in the order of the ranks
        and the heads of this rank. Every rank has equally many heads.
    length : how many of the tokens are this rank's; by default all ranks have equally many.
    cu_seqlens : where packed sequences begin, ``[n + 1]``, as for :func:`context_parallel_attention`.
    other parameters : as for :func:`context_parallel_attention`; ``balance`` says which tokens of the
        sequence a rank has.

    Returns the output, of the shape of ``q`` with the head size of ``v``. Differentiable. Raises ValueError
    or TypeError naming the argument, both values and the rank, on all ranks.

    Semantics: ``torch.nn.functional.scaled_dot_product_attention`` of the whole sequence, in its order.

    >>> def attended():
    ...     q, v = torch.zeros(1, 4, 1, 4), torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 4)
    ...     return nn.functional.attention_of_heads(q, q, v, causal=True)[0, :, 0, 0].tolist()
    >>> interlace.run(attended, 2)[0]  # in the order of the sequence the tokens are 0, 2, 3, 1
    [0.0, 1.5, 1.0, 1.6666666269302368]
    """
    return _run(
        group, tag, query=q, key=k, value=v, cu_seqlens=cu_seqlens, method=HEADS, causal=causal,
        scale=scale, window=window, layout=layout, balance=balance, algorithm=algorithm, length=length,
    )[0]  # fmt: skip


def positions_of_ranks(lengths: Sequence[int], *, balance: Balance = "zigzag") -> Tensor:
    """Return the positions (int64) in the sequence of all ranks' tokens, in the order of the ranks.

    ``lengths``: the number of tokens of each rank; ``balance`` as for :func:`context_parallel_attention`.
    No communication. Raises ValueError for an unknown ``balance`` or a negative length.

    >>> nn.functional.positions_of_ranks([2, 2]).tolist()
    [0, 3, 1, 2]
    """
    counts = tuple(checks.integer("lengths", length) for length in lengths)
    if min(counts, default=0) < 0:
        raise ValueError(f"lengths must not be negative, got {list(counts)}")
    shards = TokenShards(counts, checks.one_of("balance", balance, BALANCES))
    return shards.places(range(shards.world_size), None)


def shard_sequence(
    tensor: Tensor, dim: int = 1, *, group: Group = None, balance: Balance = "zigzag"
) -> Tensor:
    """Return this rank's part of the tokens of a whole sequence, for :func:`context_parallel_attention`.

    Parameters
    ----------
    tensor : the whole, the same on all ranks. Cut positions, targets and masks in the same way.
    dim : its dimension of n tokens. The first ``n % W`` ranks get one token more than the others.

    Returns a copy; the gradient of ``tensor`` is 0 outside this rank's part. Raises ValueError for an
    unknown ``balance`` or a wrong ``dim``, TypeError if ``tensor`` is not a tensor. No communication.

    >>> def part():
    ...     return nn.functional.shard_sequence(torch.arange(8), 0).tolist()
    >>> interlace.run(part, 2)
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    communicator = resolve(group)
    dim = _checked_dim(communicator, "", tensor, dim, balance)
    each, more = divmod(tensor.shape[dim], communicator.world_size)
    lengths = tuple(each + (rank < more) for rank in range(communicator.world_size))
    shards = TokenShards(lengths, balance)
    return tensor.index_select(dim, shards.places([communicator.rank], tensor.device))


def unshard_sequence(
    tensor: Tensor, dim: int = 1, *, group: Group = None, balance: Balance = "zigzag"
) -> Tensor:
    """Return, on all ranks, the whole sequence from the parts that :func:`shard_sequence` made.

    ``tensor``: this rank's part, with the length that ``shard_sequence`` gives this rank; ``dim`` as for
    that function. Not differentiable. Raises ValueError or TypeError, on all ranks.

    >>> def whole():
    ...     part = nn.functional.shard_sequence(torch.arange(5), 0)
    ...     return nn.functional.unshard_sequence(part, 0).tolist()
    >>> interlace.run(whole, 2)
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    from interlace.ops.collectives.all_to_all import all_gather_v

    communicator = resolve(group)
    dim = _checked_dim(communicator, "unshard_sequence", tensor, dim, balance)
    part = wait(tensor).detach().movedim(dim, 0).contiguous()
    lengths = tuple(communicator.agree("unshard_sequence", part.shape[0]))
    shards = TokenShards(lengths, balance)
    gathered = part.new_empty(shards.total, *part.shape[1:])
    all_gather_v(gathered, part, lengths, group=communicator)
    whole = torch.empty_like(gathered)
    whole[shards.places(range(shards.world_size), part.device)] = gathered
    return whole.movedim(0, dim)


def _checked_dim(
    communicator: Communicator, op: str, tensor: object, dim: int, balance: str
) -> int:
    with communicator.accepting(op):
        checks.one_of("balance", balance, BALANCES)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensor must be a tensor, got {checks.describe(tensor)}")
        return checks.index("dim", dim, tensor.dim())
