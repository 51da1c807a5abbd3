"""Targets of ``interlace verify``: every op with every algorithm, and the kernels that streams use.

Ops whose name begins with "nodes." are those of ranks on several nodes, two to a node, with puts that
store at once or as late as may be.

A target is an SPMD function that has a few ops in flight, so that workspaces and slots are used again
while some rank may be far behind, with small tiles, so that a few elements make several tiles, programs
and chunks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import interlace
from interlace.groups.groups import default_group
from interlace.kernels import signal, slots
from interlace.kernels.tiling import split_rows
from interlace.ops.attention.context_parallel import (
    AttentionArguments,
    AttentionBackwardArguments,
    attention,
    attention_backward,
)
from interlace.ops.attention.decode import DecodeArguments, decode
from interlace.ops.attention.head_exchange import FORMS, FromHeadsArguments, ToHeadsArguments
from interlace.ops.matmul.norms import GATHERED_ROWS, kernel_makes_fp8
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import peers_of
from interlace.runtime.places.sim.place import separate_nodes
from interlace.runtime.tuning import configuration

CALLS = 4
SMALL_TILES: dict[str, int | bool] = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "block_elements": 16,
    "programs": 2,
    "copy_rows": 4,
}
INNER = 8
NORMED = 24  # columns of a norm: two tiles, or blocks, the second of which is not full
MANY = 300  # more words than a program of kernels/collectives/low_latency.py takes


@dataclass(frozen=True)
class VerifyTarget:
    """``variants`` by algorithm, ``quick`` (None: all) those of a quick check; ``kernels`` to lint."""

    variants: dict[str, Callable[[], Any]]
    kernels: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None

    def checked(self, quick: bool) -> dict[str, Callable[[], Any]]:
        if not quick or self.quick is None:
            return self.variants
        return {name: self.variants[name] for name in self.quick}


def _numbers(rank: int, call: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, different on every rank and in every call: sums are exact."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 + 10 * rank + call).float()


def _all(world_size: int, call: int, *shape: int) -> list[torch.Tensor]:
    return [_numbers(rank, call, *shape) for rank in range(world_size)]


StartedOp = tuple[Any, Callable[[Any], torch.Tensor], torch.Tensor]
Start = Callable[..., StartedOp]


def _in_flight(group: Communicator, start: Start, calls: int, algorithm: str) -> None:
    """``calls`` ops in flight: ``start`` gives a Work, what to take of its result, and what is right."""
    how = {"group": group, "algorithm": algorithm, "async_op": True}
    started = []
    for call in range(calls):
        started.append(start(group.rank, group.world_size, call, **how))
        # An op in which only rank 0 waits for data: nobody else learns how far the others are.
        one = torch.ones(1, 4), torch.ones(4, 1)
        interlace.matmul_reduce_scatter(*one, group=group, algorithm="fused", async_op=True)
    for call, (work, taken, expected) in enumerate(started):
        if not torch.equal(taken(work.wait()), expected):
            raise AssertionError(f"wrong result on rank {group.rank} in call {call}")


def _algorithms(start: Start, *names: str) -> dict[str, Callable[[], Any]]:
    """Variants of a target, one for each of these algorithms."""

    def variant(algorithm: str) -> Callable[[], Any]:
        def on_rank() -> None:
            with configuration.override(**SMALL_TILES):
                _in_flight(default_group(), start, CALLS, algorithm)

        return on_rank

    return {name: variant(name) for name in names}


def _over_nodes(start: Start, algorithm: str = "auto") -> dict[str, Callable[[], Any]]:
    """Variants of a target as if every two ranks were a node; puts store at once, or late."""

    def variant(put: str) -> Callable[[], Any]:
        def on_rank() -> None:
            world_size = interlace.get_world_size()
            each = 2 if world_size > 2 else 1
            ranks = tuple(range(world_size))
            place = default_group().place.subgroup(ranks, 1)
            group = Communicator(separate_nodes(place, [r // each for r in ranks], put), ranks)
            with configuration.override(**SMALL_TILES, copiers=2, chunks=2):
                _in_flight(group, start, CALLS - 1, algorithm)

        return on_rank

    return {f"{put} puts": variant(put) for put in ("stores", "late")}


def _itself(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result


def _all_gather_matmul(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """The algorithm "switch" is the kernel with copiers that send to all ranks at once."""
    shards = _all(world_size, call, 20, INNER)
    by_switch = how["algorithm"] == "switch"
    if by_switch:
        how["algorithm"] = "fused"
    with configuration.override(multimem=by_switch, output_descriptors=by_switch):
        work = interlace.all_gather_matmul(shards[rank], torch.eye(INNER), **how)
    return work, _itself, torch.cat(shards)


def _grouped(collective: str) -> Start:
    """Two experts on every rank, one of which some rank has no row for; now and then with a bound."""
    op, exchange = f"{collective}_grouped_matmul", collective == "all_to_all"

    def start(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
        experts = 2 * world_size if exchange else 2
        counts = [[(7 * e + 9 * r + call) % 20 for e in range(experts)] for r in range(world_size)]
        inputs = [_numbers(r, call, sum(each), INNER) for r, each in enumerate(counts)]
        first = 2 * rank if exchange else 0
        weight = torch.stack([torch.eye(INNER), 2 * torch.eye(INNER)])
        if exchange and call % 2:
            how["num_max_rows_per_rank"] = 19 * experts
        work = getattr(interlace, op)(inputs[rank], weight, torch.tensor(counts[rank]), **how)
        parts = [torch.split(x, each) for x, each in zip(inputs, counts, strict=True)]
        right = torch.cat([(1 + e) * each[first + e] for e in range(2) for each in parts])
        return work, lambda result: _itself(result[0])[: len(right)], right

    return start


def _chosen(world_size: int, call: int) -> list[torch.Tensor]:
    """Two experts of each token, by rank; ranks have other numbers of tokens, one of them maybe none."""
    experts, found = 2 * world_size, []
    for rank in range(world_size):
        tokens = (5 * rank + 3 * call) % 8
        first = torch.arange(tokens) * 3 + rank + call
        found.append(torch.stack([first, first + 1 + call % (experts - 1)], 1) % experts)
    return found


def _dispatch(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """A token's row is told by its first number, and goes to its experts' ranks in their order."""
    chosen = _chosen(world_size, call)
    inputs = [_numbers(r, call, len(each), INNER) for r, each in enumerate(chosen)]
    with configuration.override(programs=2 * world_size):  # two of them send to each rank
        work = interlace.experts.dispatch(inputs[rank], chosen[rank], None, 2 * world_size, **how)
    expected = [
        x[(idx == expert).any(1)]
        for expert in (2 * rank, 2 * rank + 1)
        for x, idx in zip(inputs, chosen, strict=True)
    ]
    return work, lambda result: _itself(result[0].x), torch.cat(expected)


def _combine(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """Rows as they have been dispatched, times the number of their expert, from 1."""
    chosen = _chosen(world_size, call)
    inputs = [_numbers(r, call, len(each), INNER) for r, each in enumerate(chosen)]
    group = how["group"]
    received, handle = interlace.experts.dispatch(
        inputs[rank], chosen[rank], None, 2 * world_size, group=group, algorithm="unfused"
    )
    counts = received.num_tokens_per_expert
    factors = torch.arange(2 * rank + 1, 2 * rank + 3).repeat_interleave(counts)
    del how["group"]
    with configuration.override(programs=2 * world_size):
        work = interlace.experts.combine(received.x * factors.unsqueeze(1), handle, **how)
    return work, _itself, inputs[rank] * (chosen[rank] + 1).sum(1, keepdim=True)


def _grouped_matmul_combine(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """As :func:`_combine`, the numbers being those of the experts' weights; now and then by a handle."""
    chosen = _chosen(world_size, call)
    inputs = [_numbers(r, call, len(each), INNER) for r, each in enumerate(chosen)]
    expected = inputs[rank] * (chosen[rank] + 1).sum(1, keepdim=True)
    weight = torch.stack([(2 * rank + 1 + e) * torch.eye(INNER) for e in range(2)])
    if call % 2:
        given = {"num_max_dispatch_tokens_per_rank": 8, "group": how["group"]}
        received, handle = interlace.experts.dispatch(
            inputs[rank], chosen[rank], None, 2 * world_size, algorithm="unfused", **given
        )
        return (
            interlace.grouped_matmul_combine(received.x, weight, handle, **how),
            _itself,
            expected,
        )
    rows = [
        [x[(idx == expert).any(1)] for x, idx in zip(inputs, chosen, strict=True)]
        for expert in (2 * rank, 2 * rank + 1)
    ]
    splits = [len(part) for each in rows for part in each]
    arrived = torch.cat([part for each in rows for part in each])
    work = interlace.grouped_matmul_combine(arrived, weight, splits, chosen[rank], **how)
    return work, _itself, expected


def _causal(algorithm: str) -> dict[str, Any]:
    """Options of an attention; the last word of ``algorithm`` is one, those before it are a method."""
    *method, word = algorithm.split()
    return {"method": "_".join(method), "causal": True, "balance": "contiguous", "algorithm": word}


def _attention(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """Keys are 0, so all weights of a row are equal: the output is the mean of the values that it sees."""
    rows = 17
    values = [_numbers(r, call, 1, rows, 1, INNER) for r in range(world_size)]
    query, key = torch.ones(1, rows, 2, INNER), torch.zeros(1, rows, 1, INNER)
    output, sums = torch.empty_like(query), torch.empty(1, 2, rows)
    given = AttentionArguments(query, key, values[rank], None, **_causal(how["algorithm"]))
    work = attention(how["group"], (given, output, sums), async_op=True)
    seen = torch.arange(1, world_size * rows + 1).view(world_size, 1, rows, 1, 1)
    expected = (torch.cat(values, 1).cumsum(1).view(world_size, 1, rows, 1, INNER))[rank]
    return work, lambda _: (output * seen[rank]).round(), expected.expand(output.shape)


def _attention_backward(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """As :func:`_attention`; the gradient of a value is the sum of weights of the queries that see it."""
    rows, group = 17, how["group"]
    total = world_size * rows
    query, key = torch.ones(1, rows, 2, INNER), torch.zeros(1, rows, 1, INNER)
    output = torch.zeros_like(query)
    seen = torch.arange(1, total + 1).float()
    mine = slice(rank * rows, (rank + 1) * rows)
    sums = seen[mine].log().expand(1, 2, rows)
    # times what each row sees, so that every query gives a whole number to every key that it sees
    numbers = _numbers(0, call, total) + 1
    grad = (seen * numbers)[mine].view(1, rows, 1, 1).expand(query.shape)
    grads = [torch.empty_like(each) for each in (query, key, key)]
    tensors = grad, None, query, key, key, output, sums, None
    given = AttentionBackwardArguments(*tensors, **_causal(how["algorithm"]))
    work = attention_backward(group, (given, grads), async_op=True)
    right = 2 * numbers.flip(0).cumsum(0).flip(0)[mine]
    return work, lambda _: grads[2].round(), right.view(1, rows, 1, 1).expand(key.shape)


def _decode(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """Two sequences, the second without a token on rank 0; weights are equal, as in :func:`_attention`."""
    values = [_numbers(r, call, 2, 20, 2, INNER) for r in range(world_size)]
    lengths = torch.tensor([20, 20 if rank else 0])
    query, key = torch.ones(2, 2, INNER), torch.zeros(2, 20, 2, INNER)
    given = DecodeArguments(query, key, values[rank], lengths, None, None, how["algorithm"])
    work = decode(how["group"], (given,), async_op=True)
    seen = torch.tensor([20 * world_size, 20 * (world_size - 1)]).view(2, 1, 1)
    expected = torch.cat(values, 1)
    expected[1, :20] = 0
    return work, lambda result: (result[0] * seen).round(), expected.sum(1)


def _head_exchange(op: str, rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """Rank r has 17 tokens and r more, and a head of all; the weight turns columns around."""
    lengths = [17 + r for r in range(world_size)]
    to_heads, columns = op == "matmul_all_to_all", world_size * INNER
    tokens = [_numbers(r, call, lengths[r], columns) for r in range(world_size)]
    turned = torch.eye(columns).flip(0)
    head = slice(rank * INNER, rank * INNER + INNER)
    heads = torch.cat(tokens)[:, head].contiguous()
    input, expected = tokens[rank], torch.cat(tokens).flip(1)[:, head]
    if not to_heads:
        input, expected = heads, tokens[rank].flip(1)
    output, received = torch.empty_like(expected), None
    own: Any = expected.shape[0]
    given: Any = ToHeadsArguments(input, turned, None, own, how["algorithm"])
    if not to_heads:
        received = torch.empty(world_size, lengths[rank], INNER)
        given = FromHeadsArguments(input, turned, None, own, True, how["algorithm"])
    with configuration.override(chunks=2):
        work = FORMS[op](how["group"], (given, output, received), async_op=True)

    def taken(_: Any) -> torch.Tensor:
        if received is None:
            return output
        return torch.cat([output, received.transpose(0, 1).reshape(-1, columns)])

    whole = expected if to_heads else torch.cat([expected, tokens[rank]])
    return work, taken, whole


def _matmul_reduce_scatter(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    inputs = _all(world_size, call, 17 * world_size, INNER)
    work = interlace.matmul_reduce_scatter(inputs[rank], torch.eye(INNER), **how)
    return work, _itself, sum(inputs[1:], inputs[0])[17 * rank : 17 * rank + 17]


def _matmul_all_reduce(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    inputs = _all(world_size, call, 18, INNER)
    work = interlace.matmul_all_reduce(inputs[rank], torch.eye(INNER), **how)
    return work, _itself, sum(inputs[1:], inputs[0])


def _normed(op: str, rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """Rows of powers of two with alternating signs, which a residual makes of a sum: norms are exact."""
    scattered, matmul = "scatter" in op, op.startswith("matmul")
    rows, kind = 3 * world_size + 1 if scattered else 5, call % 2
    rows, columns = (1, MANY) if how["algorithm"] == "low_latency" else (rows, NORMED)
    inputs = _all(world_size, call, rows, columns)
    signs = 1 - 2 * (torch.arange(rows * columns).reshape(rows, columns) % 2)
    target = 2.0 ** (torch.arange(rows) % 3 + call)[:, None] * signs
    residual = target - sum(inputs[1:], inputs[0])
    first, count = split_rows(rows, world_size)[rank]
    own = slice(first, first + count) if scattered else slice(None)
    weight, bias = torch.full((columns,), 4.0), torch.ones(columns)
    norm = interlace.LayerNorm(weight, bias, eps=0.0) if kind else interlace.RMSNorm(weight, 0.0)
    expected = 4.0 * signs + kind
    if scattered and call != 1:  # after a gather all have read what they were sent, credit or none
        how |= GATHERED_ROWS.options
    elif scattered:
        expected = expected[own]
    product = (torch.eye(columns),) if matmul else ()
    if call == 2 and kernel_makes_fp8(default_group()):  # numbers that fp8 has
        how["quantize"] = "fp8_static"
    # from the third call on a part is one tile: there are programs that norm its rows and send nothing
    with configuration.override(block_n=16 if call < 2 else 32):
        work = getattr(interlace, op)(
            inputs[rank], *product, residual=residual[own], norm=norm, **how
        )
    right = torch.cat([expected, target[own]])
    return work, lambda result: torch.cat([result[0].float(), result[1]]), right


def _all_gather(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    count = {"low_latency": MANY, "auto": 40}.get(how["algorithm"], 20)
    shards, output = _all(world_size, call, count), torch.empty(world_size * count)
    return interlace.all_gather(output, shards[rank], **how), lambda _: output, torch.cat(shards)


def _reduce_scatter(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    inputs, output = _all(world_size, call, world_size, 20), torch.empty(20)
    work = interlace.reduce_scatter(output, inputs[rank], **how)
    return work, lambda _: output, sum(inputs[1:], inputs[0])[rank]


def _all_reduce(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    inputs = _all(world_size, call, MANY if how["algorithm"] == "low_latency" else 20)
    result = inputs[rank].clone()
    return interlace.all_reduce(result, **how), lambda _: result, sum(inputs[1:], inputs[0])


def _broadcast(rank: int, world_size: int, call: int, **how: Any) -> StartedOp:
    """One root, which is ahead of everybody."""
    inputs = _all(world_size, call, MANY)
    result = inputs[rank].clone()
    return interlace.broadcast(result, world_size - 1, **how), lambda _: result, inputs[-1]


def _all_to_all(rank: int, world_size: int, call: int, *, algorithm: str, **how: Any) -> StartedOp:
    inputs, output = _all(world_size, call, world_size, 20), torch.empty(world_size, 20)
    work = interlace.all_to_all_single(output, inputs[rank], **how)
    return work, lambda _: output, torch.stack([each[rank] for each in inputs])


def _signals() -> None:
    """The four kernels that streams on a GPU use, around torch copies into peers' memory."""
    place = default_group().place
    rank, world_size = place.rank, place.world_size
    words = signal.HEADER_WORDS + world_size
    buffer = place.allocate(words * 8 + world_size * 64)
    buffer.view(rank, 8 * signal.SPIN_LIMIT_WORD, (1,), torch.int64).fill_(place.poll_limit())
    peers = peers_of(buffer, world_size)
    place.allocate(8)  # the words are set on every rank before any kernel of a peer runs
    for call in range(CALLS):
        slots.wait_credits_kernel[(1,)](peers)
        for peer in range(world_size):
            theirs = buffer.view(peer, words * 8 + rank * 64, (16,), torch.float32)
            theirs.copy_(_numbers(rank, call, 16))
            slot_byte = 8 * (signal.HEADER_WORDS + rank)
            signal.publish_kernel[(1,)](peers, peer, slot_byte)
        for source, expected in enumerate(_all(world_size, call, 16)):
            slot_byte = 8 * (signal.HEADER_WORDS + source)
            signal.wait_kernel[(1,)](peers, source, slot_byte)
            mine = buffer.view(rank, words * 8 + source * 64, (16,), torch.float32)
            if not torch.equal(mine, expected):
                raise AssertionError(f"wrong data on rank {rank} in call {call}")
        slots.finish_kernel[(1,)](peers)


def _target(op: str, start: Start, names: tuple[str, ...], *more: str) -> VerifyTarget:
    """An op with these algorithms; its plain kernel, and those of ``more`` algorithms."""
    kernels = (f"{op}_kernel", *(f"{name}_{op}_kernel" for name in more))
    return VerifyTarget(_algorithms(start, *names), kernels)


_MATMULS = ("fused", "pipelined", "unfused")
_METHODS = ("all_gather fused", "ring fused", "ulysses fused")
_COLLECTIVES = ("kernel", "copy", "multimem")
_WORDS = "low_latency"
_LATE = ("late puts",)  # finds more than those that store at once
TARGETS = {
    "signal": VerifyTarget(
        {"kernels": _signals},
        ("publish_kernel", "wait_kernel", "wait_credits_kernel", "finish_kernel"),
    ),
    "all_gather_matmul": _target("all_gather_matmul", _all_gather_matmul, (*_MATMULS, "switch")),
    "all_gather_grouped_matmul": _target("grouped_matmul", _grouped("all_gather"), _MATMULS),
    "all_to_all_grouped_matmul": _target(
        "grouped_matmul", _grouped("all_to_all"), _MATMULS, "counted"
    ),
    "dispatch": VerifyTarget(
        _algorithms(_dispatch, *_MATMULS), ("dispatch_send_kernel", "dispatch_receive_kernel")
    ),
    "combine": _target("combine", _combine, _MATMULS),
    "grouped_matmul_combine": _target("grouped_matmul_combine", _grouped_matmul_combine, _MATMULS),
    "attention": VerifyTarget(
        _algorithms(
            _attention,
            *_METHODS,
            "all_gather pipelined",
            "ring pipelined",
            "auto unfused",
            "ulysses unfused",
        ),
        ("all_gather_attention_kernel", "attention_kernel", "merge_attention_kernel"),
        ("all_gather fused", "ring fused"),
    ),
    "attention_backward": VerifyTarget(
        _algorithms(
            _attention_backward,
            "all_gather fused",
            "ring fused",
            "ulysses fused",
            "all_gather pipelined",
            "auto unfused",
        ),
        ("attention_queries_backward_kernel", "attention_keys_backward_kernel"),
        ("all_gather fused",),
    ),
    "decode": VerifyTarget(
        _algorithms(_decode, "fused"), ("decode_attention_kernel", "decode_exchange_kernel")
    ),
    **{
        op: _target(op, functools.partial(_head_exchange, op), _MATMULS)
        for op in ("matmul_all_to_all", "all_to_all_matmul")
    },
    "matmul_reduce_scatter": _target("matmul_reduce_scatter", _matmul_reduce_scatter, _MATMULS),
    "matmul_all_reduce": _target("matmul_all_reduce", _matmul_all_reduce, _MATMULS),
    **{
        f"{op}{'' if op.endswith('norm') else '_norm'}": VerifyTarget(
            _algorithms(functools.partial(_normed, op), *_MATMULS, *more), kernels
        )
        for op, kernels, *more in (
            ("matmul_reduce_scatter", ("matmul_reduce_scatter_norm_kernel",)),
            ("matmul_all_reduce", ("matmul_all_reduce_norm_kernel",)),
            ("all_reduce_norm", ("reduce_norm_kernel", "low_latency_norm_kernel"), _WORDS),
            ("reduce_scatter_norm", ("reduce_norm_kernel",)),
        )
    },
    "all_gather": _target("all_gather", _all_gather, (*_COLLECTIVES, _WORDS), "multimem", _WORDS),
    "reduce_scatter": _target("reduce_scatter", _reduce_scatter, _COLLECTIVES, "multimem"),
    "all_reduce": _target("all_reduce", _all_reduce, (*_COLLECTIVES, _WORDS), "multimem", _WORDS),
    "broadcast": VerifyTarget(
        _algorithms(_broadcast, "copy", "low_latency"), ("low_latency_broadcast_kernel",)
    ),
    "nodes.all_gather": VerifyTarget(
        _over_nodes(_all_gather), ("move_kernel", "quiet_kernel"), _LATE
    ),
    "nodes.reduce_scatter": VerifyTarget(
        _over_nodes(_reduce_scatter), ("node_reduce_scatter_kernel", "put_credits_kernel"), _LATE
    ),
    # the moves are those of nodes.all_gather
    "nodes.all_to_all": VerifyTarget(_over_nodes(_all_to_all), quick=()),
    **{
        f"nodes.{op}": VerifyTarget(_over_nodes(start), quick=())
        for op, start in (
            ("dispatch", _dispatch),
            ("combine", _combine),
            ("grouped_matmul_combine", _grouped_matmul_combine),
        )
    },
    "nodes.all_gather_matmul": VerifyTarget(_over_nodes(_all_gather_matmul, "fused"), quick=()),
    "nodes.matmul_reduce_scatter": VerifyTarget(
        _over_nodes(_matmul_reduce_scatter, "fused"),
        ("matmul_node_reduce_scatter_kernel", "node_sums_kernel"),
        _LATE,
    ),
}
