"""Attention over a sharded sequence, and its backward: two ops.

The message in which ranks compare a call also carries every rank's number of tokens. The results are the
output and the logarithm of every row's sum of exponentials, ``[batch, heads, tokens]``, fp32 or wider; both
have gradients. The backward computes scores again, from keys that travel again.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.ops.attention import blocks, key_transport, ulysses
from interlace.ops.attention.problem import (
    BALANCES,
    EXAMPLES,
    NO_LIMIT,
    AttentionMask,
    AttentionProblem,
    AttentionResult,
    TokenShards,
    example_queries,
    unit_rows,
    wide_dtype,
)
from interlace.ops.collectives import records as by_rank
from interlace.ops.op.op import Op, OpGradient, Setting, Started, constant, wait, without_gradient
from interlace.ops.op.recording import Ops
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import configuration as configurations, tuning
from interlace.runtime.tuning.configuration import LARGEST_HEAD, Configuration, choose_attention
from interlace.runtime.tuning.table import threshold
from interlace.runtime.tuning.tuning import FUSED_DTYPES

FORWARD, BACKWARD = "context_parallel_attention", "context_parallel_attention_backward"
METHODS = ("auto", *configurations.METHODS)
HEADS = "heads"
"""In place of a method: a rank already has all ranks' tokens, for its heads."""
LAYOUTS = ("bshd", "sbhd")
BACKWARD_KERNELS = ("attention_queries_backward_kernel", "attention_keys_backward_kernel")
RING_BYTES = threshold("ring_attention_bytes")
Tensor = torch.Tensor
_ops: Any = Ops()


@dataclass
class AttentionOptions:
    """The arguments that are not tensors; see ``nn.functional.context_parallel_attention``.

    ``length``: with ``HEADS``, how many of the tokens are this rank's; by default all ranks have as many.
    """

    method: str = "auto"
    causal: bool = False
    scale: float | None = None
    window: list[int] | None = None
    layout: str = "bshd"
    balance: str = "zigzag"
    algorithm: str = "auto"
    length: torch.SymInt | None = None


@dataclass
class _AttentionTensors:
    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor | None


@dataclass
class _AttentionBackwardTensors:
    grad: Tensor
    lse_grad: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
    cu_seqlens: Tensor | None


@dataclass
class AttentionArguments(AttentionOptions, _AttentionTensors):
    """The arguments of the op: its tensors, then its options."""


@dataclass
class AttentionBackwardArguments(AttentionOptions, _AttentionBackwardTensors):
    """The arguments of the backward: its tensors, then the options of the op."""


class CheckedAttention(NamedTuple):
    """The tensors of a call as ``[tokens, batches, heads, size]``, checked on this rank."""

    query: Tensor
    key: Tensor
    value: Tensor
    documents: Tensor | None
    mask: AttentionMask
    scale: float
    method: str
    algorithm: str

    @property
    def size(self) -> int:
        """The size of the largest heads, of keys or of values."""
        return max(self.query.shape[3], self.value.shape[3])


def tokens_first(tensor: Tensor, layout: str) -> Tensor:
    """Convert either layout to ``[tokens, batches, heads, size]``, or back."""
    return tensor.transpose(0, 1) if layout == "bshd" else tensor


def checked_options(options: AttentionOptions) -> tuple[str, str, str, AttentionMask]:
    """Check the options, whatever the tensors, and return layout, method, algorithm and mask."""
    layout = checks.one_of("layout", options.layout, LAYOUTS)
    checks.one_of("balance", options.balance, BALANCES)
    method = options.method
    if method != HEADS:
        method = checks.one_of("method", method, METHODS)
    algorithm = checks.one_of("algorithm", options.algorithm, checks.ALGORITHMS)
    if not isinstance(options.causal, int):  # a bool is an int
        raise TypeError(f"causal must be a bool, got {options.causal!r}")
    scale_of(options.scale, 1)
    return layout, method, algorithm, AttentionMask(bool(options.causal), _window(options.window))


def _require_heads(name: str, tensor: Tensor, layout: str) -> None:
    if tensor.dim() != 4:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must have 4 dimensions ({layout}), got shape {shape}")


def check(
    communicator: Communicator, record: AttentionArguments | AttentionBackwardArguments
) -> CheckedAttention:
    checked_options(record)
    named = (("q", record.query), ("k", record.key), ("v", record.value))
    query, key, value = (checks.tensor(name, each, communicator) for name, each in named)
    documents = record.cu_seqlens
    if documents is not None:
        documents = checks.tensor("cu_seqlens", documents, communicator)
    checked_call = replace(record, query=query, key=key, value=value, cu_seqlens=documents)
    return fitting(checked_call, communicator.world_size)


def fitting(
    record: AttentionArguments | AttentionBackwardArguments, world_size: int
) -> CheckedAttention:
    """Return the arguments if they fit together; their tensors are on the right device."""
    layout, method, algorithm, mask = checked_options(record)
    query, key, value = record.query, record.key, record.value
    for name, each in (("q", query), ("k", key), ("v", value)):
        checks.float_dtype(name, each.dtype)
        checks.same_dtype(name, each.dtype, "q", query.dtype)
        _require_heads(name, each, layout)
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(value.shape)}, k has {tuple(key.shape)}; "
            "all but the last dimension must be equal"
        )
    for dim, quantity in ((0, layout[0]), (1, layout[1]), (3, "d")):
        if key.shape[dim] != query.shape[dim]:
            raise ValueError(
                f"k has {quantity} = {key.shape[dim]} (shape {tuple(key.shape)}), q has {quantity} = "
                f"{query.shape[dim]} (shape {tuple(query.shape)})"
            )
    heads, key_heads, size = query.shape[2], key.shape[2], query.shape[3]
    if (heads % key_heads) if key_heads else heads:
        raise ValueError(f"k has {key_heads} heads, which does not divide q's {heads}")
    for name, each in (("q", query), ("v", value)):
        if not each.shape[3]:
            raise ValueError(f"{name} has heads of size 0 (shape {tuple(each.shape)})")
    checks.fused_dtype(algorithm, "q", query.dtype)
    if algorithm == "fused" and (largest := max(size, value.shape[3])) > LARGEST_HEAD:
        raise ValueError(
            f'algorithm="fused" takes heads of at most {LARGEST_HEAD}, got {largest}; '
            'use "unfused" or "auto"'
        )
    scale, documents = scale_of(record.scale, size), record.cu_seqlens
    if documents is not None:
        if documents.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be int32 or int64, got {documents.dtype}")
        if documents.dim() != 1 or not documents.numel():
            raise ValueError(
                f"cu_seqlens must have 1 dimension and an entry, got shape {tuple(documents.shape)}"
            )
        if documents.is_cpu and (documents[0] != 0 or bool((documents.diff() < 0).any())):
            raise ValueError(f"cu_seqlens must begin with 0 and not fall, got {documents.tolist()}")
    query, key, value = (tokens_first(each, layout) for each in (query, key, value))
    if record.length is not None and record.length < 0:
        raise ValueError(f"length must be None or not negative, got {record.length}")
    if method == HEADS and record.length is None and query.shape[0] % world_size:
        raise ValueError(
            f"q has {query.shape[0]} tokens, which world size {world_size} does not divide; give length"
        )
    return CheckedAttention(query, key, value, documents, mask, scale, method, algorithm)


def scale_of(value: Any, size: int) -> float:
    if value is None:
        return 1 / math.sqrt(size)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"scale must be a number or None, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite, got {value}")
    return float(value)


def _window(value: Any) -> tuple[int, int]:
    if value is None:
        return NO_LIMIT, NO_LIMIT
    if isinstance(value, Tensor) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"window must be None or two ints (before, after), got {value!r}")
    pair = checks.integer("window[0]", value[0]), checks.integer("window[1]", value[1])
    if min(pair) < NO_LIMIT:
        raise ValueError(f"window must be two numbers of keys, -1 for all, got {list(value)}")
    return pair


def _agree(
    communicator: Communicator, op: str, call: CheckedAttention, options: AttentionOptions
) -> AttentionProblem:
    """Return the problem, with every rank's tokens; raise the same error on all ranks."""
    rows, batches, heads, size = call.query.shape
    documents: Any = None
    if call.documents is not None:
        # the host does not wait for numbers on a GPU
        on_cpu = call.documents.is_cpu
        documents = tuple(call.documents.tolist()) if on_cpu else call.documents.shape[0]
    terms = (
        ("dtype of q", call.query.dtype),
        ("batches of q", batches),
        ("heads of q", heads),
        ("heads of key", call.key.shape[2]),
        ("the size of heads", size),
        ("the size of v's heads", call.value.shape[3]),
        ("method", call.method),
        ("causal", call.mask.causal),
        ("scale", call.scale),
        ("window", call.mask.window),
        ("layout", options.layout),
        ("balance", options.balance),
        ("algorithm", call.algorithm),
        ("cu_seqlens", documents),
    )
    ranks: Any = None
    own_length: Any = rows
    if call.method == HEADS:
        ranks = tuple(range(communicator.world_size))
        own_length = rows // len(ranks) if options.length is None else options.length
    parts = communicator.parts(communicator.call_of(op, terms, (own_length, rows)))
    totals = [total for _, total in parts] if ranks else ()
    shards = _shards(op, [length for length, _ in parts], options.balance, totals, documents)
    per_key = heads // call.key.shape[2] if heads else 1
    return AttentionProblem(
        communicator, op, call.query, call.key, call.value, shards, call.mask, call.documents,
        call.scale, per_key, ranks=ranks,
    )  # fmt: skip


def _shards(
    op: str, lengths: Sequence[int], balance: str, totals: Sequence[int], documents: Any
) -> TokenShards:
    shards = TokenShards(tuple(lengths), balance)
    known = f"the ranks have {shards.total}"
    for rank, total in enumerate(totals):
        if total != shards.total:
            raise ValueError(
                f"{op}: q has {total} tokens on rank {rank}, {known} ({list(lengths)} by rank)"
            )
    if isinstance(documents, tuple) and documents[-1] > shards.total:
        raise ValueError(
            f"{op}: cu_seqlens ends at {documents[-1]}, {known} tokens ({list(lengths)} by rank)"
        )
    return shards


def _chosen(
    problem: AttentionProblem, call: CheckedAttention, *, backward: bool = False
) -> tuple[str, str, Configuration | None]:
    """Return method, algorithm, and the launch configuration of kernels, from facts that ranks share."""
    place, shards = problem.communicator.place, problem.shards
    size, dtype = call.size, call.query.dtype
    algorithm = call.algorithm
    if algorithm == "auto":
        if dtype not in FUSED_DTYPES or size > LARGEST_HEAD:
            algorithm = "pipelined"
        else:
            algorithm = "pipelined" if place.direct_access else "fused"
        if not place.all_mapped and call.method != HEADS:
            algorithm = "unfused"
    if call.method != HEADS:
        checks.one_node(algorithm, problem.communicator)
    method = call.method
    if method == "auto":
        method = "all_gather"
        heads, key_heads, world = call.query.shape[2], call.key.shape[2], shards.world_size
        row = problem.row_elements * dtype.itemsize
        if not place.direct_access:
            # per token, what a rank receives if it gathers keys and values, or exchanges heads
            gathered, exchanged = 2 * key_heads, 2 * (heads + key_heads) / world
            if not (heads % world or key_heads % world) and exchanged < gathered:
                method = "ulysses"
            elif shards.total * row > RING_BYTES:
                method = "ring"
    measured = tuning.UNMEASURED
    if method != HEADS:
        heads = call.query.shape[1] * call.query.shape[2]
        about = max(shards.lengths), heads, size, shards.world_size
        named = tuning.Problem(problem.op, dtype, *about)
        if place.nodes is None and "auto" in (call.method, call.algorithm):
            found = tuning.measured_choice(problem.communicator, named).algorithm
            method, algorithm = _faster(call, found, method, algorithm, shards.world_size)
        name = algorithm if algorithm == "unfused" else f"{method} {algorithm}"
        measured = tuning.measured_choice(problem.communicator, named, name)
    name_algorithm(f"{method} {algorithm}")
    tiles = None
    if algorithm == "fused":
        rows = shards.total if method == HEADS else max(shards.lengths)
        tiles = measured.over(choose_attention(place, dtype, size, rows, backward=backward))
    return method, algorithm, tiles


def _faster(
    call: CheckedAttention, found: str, method: str, algorithm: str, world_size: int
) -> tuple[str, str]:
    """Return the method and algorithm ``found`` to be fastest, if they support and fit this call."""
    if not found:
        return method, algorithm
    *named, by = found.split()
    way = named[0] if named else method
    heads, key_heads = call.query.shape[2], call.key.shape[2]
    asked = call.method in ("auto", way) and call.algorithm in ("auto", by)
    kernels = by != "fused" or (call.query.dtype in FUSED_DTYPES and call.size <= LARGEST_HEAD)
    even = way != "ulysses" or not (heads % world_size or key_heads % world_size)
    return (way, by) if asked and kernels and even else (method, algorithm)


def prepare(
    communicator: Communicator, record: AttentionArguments, results: Sequence[Tensor]
) -> PreparedCall:
    """Check the arguments on this rank; ``results``, output and lse, are filled."""
    call, (output, lse) = check(communicator, record), results

    def start() -> Outcome:
        problem = _agree(communicator, FORWARD, call, record)
        return Outcome(None, _forward(problem, call, tokens_first(output, record.layout), lse))

    return start, (), None


def _forward(
    problem: AttentionProblem, call: CheckedAttention, output: Tensor, lse: Tensor
) -> Event | None:
    if not problem.shards.total * math.prod(call.query.shape[1:]):
        return None  # no rank has any data
    method, algorithm, tiles = _chosen(problem, call)
    if method == "ulysses":
        by_engine = algorithm == "unfused"
        return ulysses.exchanged_attention(problem, output, lse, tiles, by_engine=by_engine)
    if method == HEADS or algorithm == "unfused":
        return blocks.attention_to_all(problem, output, lse, tiles, gather=method != HEADS)
    if method == "all_gather" and tiles is not None:
        return key_transport.all_gather_attention_fused(problem, output, lse, tiles)
    return key_transport.attention_on_the_way(problem, method, output, lse, tiles)


attention = internal_form(FORWARD, prepare)


def prepared_backward(
    communicator: Communicator, record: AttentionBackwardArguments, grads: Sequence[Tensor]
) -> PreparedCall:
    """Check the arguments on this rank; ``grads``, of query, key and value, get the results."""
    call = check(communicator, record)

    def start() -> Outcome:
        problem = _agree(communicator, BACKWARD, call, record)
        if not problem.shards.total * math.prod(call.query.shape[1:]):
            return Outcome(None, None)
        method, algorithm, tiles = _chosen(problem, call, backward=True)
        # autograd may record the operators of a backward, but not the work on streams
        of_output = tokens_first(record.grad.detach(), record.layout)
        output = unit_rows(tokens_first(record.output.detach(), record.layout))
        of_lse = None if record.lse_grad is None else record.lse_grad.detach()
        result = AttentionResult(unit_rows(of_output), output, record.lse.detach(), of_lse)
        of_query, of_key, of_value = (tokens_first(grad, record.layout) for grad in grads)
        into = of_query, of_key, of_value
        unfused = algorithm == "unfused"
        if method == "ulysses":
            event = ulysses.exchanged_backward(problem, result, into, tiles, by_engine=unfused)
        elif method == HEADS or unfused:
            about = problem, result, into, tiles
            event = blocks.attention_to_all_backward(*about, gather=method != HEADS)
        else:
            event = key_transport.attention_backward(problem, method, result, into, tiles)
        return Outcome(None, event)

    return start, (), None


attention_backward = internal_form(BACKWARD, prepared_backward)


def outputs(record: AttentionArguments, size: Any) -> list[Tensor]:
    query, value = record.query, record.value
    _require_heads("q", query, record.layout)
    _require_heads("v", value, record.layout)
    tokens, batches, heads, _ = tokens_first(query, record.layout).shape
    output = query.new_empty([*query.shape[:3], value.shape[3]])
    return [output, query.new_empty([batches, heads, tokens], dtype=wide_dtype(query.dtype))]


def backward_outputs(record: AttentionBackwardArguments, size: Any) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (record.query, record.key, record.value)]


def _start(
    op: str,
    form: Callable[..., Any],
    results: Callable[..., list[Tensor]],
    communicator: Communicator,
    record: Any,
) -> Started:
    """Start asynchronously, except on a CPU, whose cores have nothing else to do meanwhile.

    On a rank without tokens nobody waits for a result, so this rank waits here for its part to end.
    """
    with communicator.accepting(op):
        tensors = results(record, communicator.world_size)
    if communicator.place.direct_access:
        form(communicator, (record, tensors))
        return Started(tensors, None)
    work = form(communicator, (record, tensors), async_op=True)
    if tensors[0].numel():
        return Started(tensors, work)
    work.wait()
    return Started(tensors, None)


def _save(ctx: Any, record: AttentionArguments, output: Sequence[Tensor]) -> None:
    ctx.options = {field.name: getattr(record, field.name) for field in fields(AttentionOptions)}
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(record.query, record.key, record.value, record.cu_seqlens, *output)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    query, key, value, cu_seqlens, output, lse = ctx.saved_tensors
    grad, lse_grad = grads
    if grad is None and lse_grad is None:
        return {}
    if grad is None:
        grad = torch.zeros_like(output)
    output, lse = wait(output), wait(lse)
    record = AttentionBackwardArguments(
        grad.to(query.dtype), lse_grad, query, key, value, output, lse, cu_seqlens, **ctx.options
    )
    gradients = _ops.context_parallel_attention_backward(*vars(record).values(), ctx.size, ctx.name)
    return dict(zip(("query", "key", "value"), map(wait, gradients), strict=True))


class _Sequence(NamedTuple):
    """Tokens of ``ranks``, in rank order: ``[batch, heads, tokens, size]``, in fp32 or wider.

    ``mask``: ``[tokens, tokens]``, what a query sees.
    """

    ranks: list[Any]
    results: list[list[Tensor]]
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    scale: float

    def whole(self, name: str) -> Tensor:
        return _heads_first([tokens_first(getattr(e, name), e.layout) for e in self.ranks])

    def give(self, number: int, whole: Tensor) -> None:
        """Copy each rank's tokens of ``whole`` to its result ``number``."""
        rows = whole.permute(2, 0, 1, 3)
        to = [
            tokens_first(result[number], each.layout)
            for each, result in zip(self.ranks, self.results, strict=True)
        ]
        for place, part in zip(to, torch.split(rows, [len(each) for each in to]), strict=True):
            place.copy_(part)


def _heads_first(parts: Sequence[Tensor]) -> Tensor:
    whole = torch.cat(list(parts)).permute(1, 2, 0, 3)
    return whole.to(wide_dtype(whole.dtype))


def _sequences(
    op: str, ranks: Sequence[Any], results: list[list[Tensor]], size: int
) -> list[_Sequence]:
    """Return one sequence of all ranks, or with ``HEADS`` one per rank; skip those without tokens."""
    calls = [fitting(rank, size) for rank in ranks]
    first, tokens = calls[0], [each.query.shape[0] for each in calls]
    for name in ("query", "key", "value"):
        by_rank.alike(op, name, [getattr(each, name) for each in calls], but=0)
    lengths, alone = tokens, first.method == HEADS
    if alone:
        lengths = [tokens[0] // size if rank.length is None else rank.length for rank in ranks]
    documents = None if first.documents is None else tuple(first.documents.tolist())
    shards = _shards(op, lengths, ranks[0].balance, tokens if alone else (), documents)
    if not shards.total * math.prod(first.query.shape[1:]):
        return []
    spans = shards.spans(range(size), first.mask, first.documents)
    places = shards.places(range(size), spans.device)
    mask = (spans[:, :1] <= places) & (places < spans[:, 1:])
    found = []
    for some in [slice(r, r + 1) for r in range(size)] if alone else [slice(None)]:
        query, key, value = (
            _heads_first([getattr(each, name) for each in calls[some]])
            for name in ("query", "key", "value")
        )
        about = query, key, value, mask, first.scale
        found.append(_Sequence(list(ranks[some]), results[some], *about))
    return found


def reference(ranks: Sequence[AttentionArguments], size: int) -> list[list[Tensor]]:
    results = [outputs(rank, size) for rank in ranks]
    for sequence in _sequences(FORWARD, ranks, results, size):
        tensors = sequence.query, sequence.key, sequence.value
        output, sums = blocks.attended(*tensors, sequence.mask, False, sequence.scale)
        sequence.give(0, output)
        logs = [lse for _, lse in sequence.results]
        parts = torch.split(sums, [lse.shape[2] for lse in logs], 2)
        for lse, part in zip(logs, parts, strict=True):
            lse.copy_(part)
    return results


def backward_reference(
    ranks: Sequence[AttentionBackwardArguments], size: int
) -> list[list[Tensor]]:
    results = [backward_outputs(rank, size) for rank in ranks]
    for sequence in _sequences(BACKWARD, ranks, results, size):
        grad, output = sequence.whole("grad"), sequence.whole("output")
        lse = torch.cat([record.lse for record in sequence.ranks], 2).to(grad.dtype)
        of_lse = [record.lse_grad for record in sequence.ranks if record.lse_grad is not None]
        delta = (grad * output).sum(-1) - torch.cat(of_lse, 2) if of_lse else None
        of = grad, output, lse.masked_fill(lse == -math.inf, math.inf)
        tensors = sequence.query, sequence.key, sequence.value
        found = blocks.differentiated(*tensors, of, delta, sequence.mask, False, sequence.scale)
        for number, whole in enumerate(found):
            batches, _, tokens, dim = whole.shape
            # by the head of queries, or already by the head of keys
            by_head = whole.reshape(batches, tensors[number].shape[1], -1, tokens, dim)
            sequence.give(number, by_head.sum(2))
    return results


def _algorithms(gathered: Sequence[str], otherwise: Sequence[str]) -> dict[str, Sequence[str]]:
    """Map each method's algorithms to kernels: ``gathered`` for "all_gather fused", else ``otherwise``."""
    fused = {f"{method} fused": otherwise for method in METHODS[1:]}
    pipelined = {f"{method} pipelined": () for method in METHODS[1:]}
    return {**fused, "all_gather fused": gathered, **pipelined, "unfused": ()}


def _example_results(setting: Setting) -> list[Tensor]:
    return reference(OPS[0].example_records(setting), setting.size)[setting.rank]


OPS: tuple[Op, ...] = (
    Op(
        FORWARD,
        AttentionArguments,
        functools.partial(_start, FORWARD, attention, outputs),
        outputs,
        OpGradient(_save, _gradients),
        {"q, k or v": ("query", "key", "value")},
        several=True,
        reference=reference,
        algorithms=_algorithms(
            ("all_gather_attention_kernel", "merge_attention_kernel"),
            ("attention_kernel", "merge_attention_kernel"),
        ),
        examples=EXAMPLES,
    ),
    Op(
        BACKWARD,
        AttentionBackwardArguments,
        functools.partial(_start, BACKWARD, attention_backward, backward_outputs),
        backward_outputs,
        without_gradient(BACKWARD),
        {},
        several=True,
        reference=backward_reference,
        algorithms=_algorithms(BACKWARD_KERNELS, BACKWARD_KERNELS),
        examples={
            **EXAMPLES,
            "grad": example_queries,
            "lse_grad": constant(None),
            "output": lambda setting: _example_results(setting)[0],
            "lse": lambda setting: _example_results(setting)[1],
        },
    ),
)
