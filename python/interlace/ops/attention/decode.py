"""Decoding: a few queries, the same on all ranks, and caches of keys and values that are spread over ranks.

In "fused" ranks exchange results as words with flags; for many queries by a plain all-gather. "unfused"
computes sequences of equal length together if the host knows lengths. Then no more of a cache is read than
needed, and nothing is copied to be masked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group, ScaledAlgorithm
from interlace.groups.groups import resolve
from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import AttentionTiles, Heads, Pages, Partials
from interlace.kernels.attention import decode as kernels, forward
from interlace.ops.attention.blocks import attended, merged
from interlace.ops.attention.context_parallel import scale_of
from interlace.ops.attention.problem import (
    EXAMPLES,
    HEAD,
    HEADS,
    LOG2E,
    attention_tiles,
    rows_argument,
    unit_rows,
    wide_dtype,
)
from interlace.ops.collectives import records as by_rank
from interlace.ops.collectives.launch import MOST_PROGRAMS, run_words
from interlace.ops.matmul.operands import launch_options
from interlace.ops.op.op import Op, Started, without_gradient
from interlace.ops.op.recording import run_recorded
from interlace.runtime.core.call import Call, PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.stream import Event, Outcome
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.configuration import LARGEST_HEAD, Configuration, choose_attention
from interlace.runtime.tuning.tuning import FUSED_DTYPES

Tensor = torch.Tensor
OP = "distributed_decode"
MOST_PIECES = 32
ALGORITHMS = ("auto", "fused", "unfused")


@dataclass
class DecodeArguments:
    """``key`` and ``value``: the tensors of ``kv_cache``; the others as for :func:`distributed_decode`."""

    q: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor | None
    block_table: Tensor | None
    scale: float | None
    algorithm: str


@dataclass
class DecodeProblem:
    """A checked call. ``query`` ``[batches, tokens, heads, size]``; ``lengths``: int64 ``[batches,
    tokens]``, the number of this rank's keys that each token sees; ``pages``: int32 or int64 ``[batches,
    n]``, or None; ``counts``: ``lengths``, if the host knows them."""

    communicator: Communicator
    query: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor
    scale: float
    pages: Tensor | None = None
    counts: list[list[int]] | None = None

    @property
    def key_heads(self) -> int:
        return self.key.shape[2]

    @property
    def most(self) -> int:
        """The most keys that a sequence may have on this rank."""
        return self.key.shape[1] * (1 if self.pages is None else self.pages.shape[1])

    def row_lengths(self) -> Tensor:
        """Return ``lengths`` of the rows of :meth:`by_key_head`: ``[batches, rows]``."""
        return self.lengths.repeat_interleave(self.query.shape[2] // self.key_heads, 1)

    def alike(self) -> Iterator[tuple[slice, int, bool]]:
        """Yield neighbouring sequences of equal lengths, the longest length, whether others are shorter.

        If the host does not know lengths: all sequences, the capacity of a cache, and True.
        """
        if self.counts is None:
            yield slice(None), self.most, True
            return
        begin = 0
        for lengths, same in itertools.groupby(self.counts):
            sequences = slice(begin, begin := begin + len(list(same)))
            yield sequences, max(lengths), min(lengths) < max(lengths)

    def first(self, cache: Tensor, sequences: slice, tokens: int) -> Tensor:
        """Return ``[sequences, tokens, heads, size]``; copy pages, or if the last dimension has gaps."""
        if self.pages is None:
            return unit_rows(cache[sequences, :tokens])
        used = self.pages[sequences, : formulas.ceil_div(tokens, cache.shape[1])]
        # entries of a table beyond the sequence's length may be anything
        valid = used.clamp(0, cache.shape[0] - 1).to(torch.int64)
        return unit_rows(cache[valid].flatten(1, 2)[:, :tokens])

    def by_key_head(self) -> Tensor:
        """Group queries that see the same head of keys: ``[batches, key heads, rows, size]``."""
        batches, tokens, heads, size = self.query.shape
        groups = self.query.view(batches, tokens, self.key_heads, heads // self.key_heads, size)
        together = groups.permute(0, 2, 1, 3, 4).contiguous()
        return together.flatten(2, 3)

    def from_key_heads(self, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return to ``[batches, tokens, heads, size]`` and ``[batches, heads, tokens]``."""
        (batches, tokens, heads, _), size = self.query.shape, output.shape[-1]
        shape = batches, self.key_heads, tokens, heads // self.key_heads
        output = output.view(*shape, size).permute(0, 2, 1, 3, 4)
        output = output.reshape(batches, tokens, heads, size)
        return output, lse.view(shape).transpose(2, 3).reshape(batches, heads, tokens)


def _tiles(problem: DecodeProblem, configuration: Configuration) -> AttentionTiles:
    sizes, dtype = (problem.query.shape[3], problem.value.shape[3]), problem.query.dtype
    return attention_tiles(problem.communicator, configuration, *sizes, dtype, packed=False)


def _merge(
    problem: DecodeProblem,
    partials: Partials,
    output: Tensor,
    lse: Tensor,
    count: int,
    configuration: Configuration,
) -> KernelLaunch:
    """Merge ``count`` partial results into ``output``, ``lse``: ``[batches, key heads, rows(, size)]``."""
    batches, heads, rows, _ = output.shape
    tiles = _tiles(problem, configuration)._replace(BLOCK_M=16)
    arguments = {
        "partials": partials,
        "output": rows_argument(output.permute(2, 0, 1, 3)),
        "lse_ptr": lse,
        "heads": Heads(batches, heads, heads, 1, 0),
        "count": count,
        "TILES": tiles,
    }
    grid = formulas.ceil_div(rows, tiles.BLOCK_M) * batches * heads
    return KernelLaunch(forward.merge_attention_kernel, grid, arguments, OP)


def own_part(
    problem: DecodeProblem, configuration: Configuration
) -> tuple[list[KernelLaunch], Tensor, Tensor]:
    """Return launches for the result over this rank's keys, the result (fp32) and natural logarithms."""
    query = problem.by_key_head()
    batches, heads, rows, _ = query.shape
    key, value = unit_rows(problem.key), unit_rows(problem.value)
    tokens, value_size = problem.most, value.shape[3]
    tiles = _tiles(problem, configuration)
    pieces = formulas.pieces_of(tokens, tiles.BLOCK_N, MOST_PIECES)
    piece = formulas.piece_rows(tokens, tiles.BLOCK_N, MOST_PIECES)
    sums = query.new_empty(pieces, batches, heads, rows, value_size, dtype=torch.float32)
    partials = Partials(sums, query.new_empty(sums.shape[:-1], dtype=torch.float32), rows)
    arguments = {
        "keys": rows_argument(key.transpose(0, 1)),
        "value": rows_argument(value.transpose(0, 1)),
        "queries": rows_argument(query.permute(2, 0, 1, 3)),
        "lengths_ptr": problem.row_lengths(),
        "partials": partials,
        "heads": Heads(batches, heads, heads, 1, 0),
        "pages": Pages(problem.lengths, 0, 0)
        if problem.pages is None
        else Pages(problem.pages, problem.pages.stride(0), key.shape[1]),
        "most": tokens,
        "piece": piece,
        "scale": problem.scale * LOG2E,
        "PAGED": problem.pages is not None,
        "TILES": tiles,
    }
    grid = formulas.ceil_div(rows, tiles.BLOCK_M), batches * heads, pieces
    kernel, options = kernels.decode_attention_kernel, launch_options(configuration)
    output = query.new_empty(batches, heads, rows, value_size, dtype=torch.float32)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    launches = [
        KernelLaunch(kernel, grid, arguments, OP, **options),
        _merge(problem, partials, output, lse, pieces, configuration),
    ]
    return launches, output, lse


def decode_fused(
    problem: DecodeProblem, output: Tensor, lse: Tensor, configuration: Configuration
) -> Event:
    """Decode with kernels. ``output`` and ``lse`` are grouped by key head."""
    communicator, compute = problem.communicator, problem.communicator.compute
    launches, results, sums = own_part(problem, configuration)
    with communicator.place.launching():
        compute.wait_event(communicator.place.record_current())
        for launch in launches:
            compute.launch(launch)
    rows, size = sums.numel(), results.shape[-1]
    width = min(kernels.DECODE_LANES, max(16, 1 << (size - 1).bit_length()))
    programs = formulas.ceil_div(rows, kernels.DECODE_LANES // width)
    programs *= formulas.ceil_div(size, width)
    if programs <= MOST_PROGRAMS and communicator.place.nodes is None:
        values = {
            "input_ptr": results,
            "lse_ptr": sums,
            "output_ptr": output,
            "output_lse_ptr": lse,
            "rows": rows,
            "VALUE_DIM": size,
            "WIDTH": width,
        }
        return run_words(communicator, OP, kernels.decode_exchange_kernel, programs, values)
    # an engine waits for the work that the caller has issued; now this is part of it
    communicator.place.hold_current(compute.record(), f"the own part of {OP}")
    gathered, logs = _gather(problem, results, "results"), _gather(problem, sums, "sums")
    compute.call(lambda: logs.mul_(LOG2E), "sums to base 2")
    partials = Partials(gathered, logs, results.shape[2])
    compute.launch(_merge(problem, partials, output, lse, communicator.world_size, configuration))
    return compute.record()


def _gather(problem: DecodeProblem, part: Tensor, name: str) -> Tensor:
    communicator = problem.communicator
    gathered = part.new_empty(communicator.world_size, *part.shape)
    if communicator.world_size == 1:
        gathered[0].copy_(part)
        return gathered
    call = Call(f"{OP} of {name}", (("shape", tuple(part.shape)), ("dtype", part.dtype)))
    parts = [each.view(-1) for each in gathered]
    event = communicator.engine.all_gather(call, parts, part.contiguous().view(-1))
    if event is not None:
        communicator.compute.wait_event(event)
    return gathered


def decode_unfused(problem: DecodeProblem, output: Tensor, lse: Tensor) -> Event:
    """Decode with torch, and gather the partial results."""
    communicator = problem.communicator
    wide, query = wide_dtype(problem.query.dtype), problem.by_key_head()
    results = query.new_zeros(*query.shape[:-1], problem.value.shape[3], dtype=wide)
    sums = results.new_full(query.shape[:-1], float("-inf"))
    rows = problem.row_lengths().unsqueeze(2)
    for some, tokens, masked in problem.alike() if problem.key.numel() else ():
        if not tokens:
            continue
        key, value = (problem.first(each, some, tokens) for each in (problem.key, problem.value))
        present = torch.arange(tokens, device=query.device) < rows[some] if masked else None
        if present is not None and problem.counts is None:
            # an unwritten value may be NaN, and 0 times NaN is NaN
            value = value.masked_fill(~present.any(1)[:, :, None, None], 0)
        key, value = (each.transpose(1, 2).to(wide) for each in (key, value))
        mask = None if present is None else present[:, None]
        found = attended(query[some].to(wide), key, value, mask, False, problem.scale)
        results[some], sums[some] = found
    gathered = _gather(problem, results.contiguous(), "results")
    logs = _gather(problem, sums.contiguous(), "sums")

    def finish() -> None:
        rows = slice(0, query.shape[2])
        parts = [(rows, *each) for each in zip(gathered, logs, strict=True)]
        total = torch.empty_like(gathered[0])
        lse.copy_(merged(parts, total))
        output.copy_(total)

    communicator.compute.call(finish, "merge")
    return communicator.compute.record()


def prepared_decode(communicator: Communicator, record: DecodeArguments) -> PreparedCall:
    """Check the arguments on this rank. The results are the output and the logarithms of the sums."""
    algorithm = checks.one_of("algorithm", record.algorithm, ALGORITHMS)
    query = checks.tensor("q", record.q, communicator)
    checks.float_dtype("q", query.dtype)
    if query.dim() not in (3, 4):
        raise ValueError(
            "q must be (batch, heads, size) or (batch, tokens, heads, size), got shape "
            f"{tuple(query.shape)}"
        )
    shape, single = tuple(query.shape), query.dim() == 3
    query = (query.unsqueeze(1) if single else query).contiguous()
    key = checks.tensor("kv_cache[0]", record.key, communicator)
    value = checks.tensor("kv_cache[1]", record.value, communicator)
    batches, _, heads, size = query.shape
    if not size:
        raise ValueError(f"q has heads of size 0 (shape {shape})")
    for name, each in (("kv_cache[0]", key), ("kv_cache[1]", value)):
        checks.same_dtype(name, each.dtype, "q", query.dtype)
        if each.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, tokens, heads, size), got shape {tuple(each.shape)}"
            )
        paged = record.block_table is not None
        other_size = each is key and each.shape[3] != size
        if other_size or not (paged or each.shape[0] == batches):
            lengths = "the size of heads" if paged else "batches and the size of heads"
            raise ValueError(
                f"{name} has shape {tuple(each.shape)}, q has {shape}; {lengths} must be equal"
            )
        if each.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"{name} has shape {tuple(each.shape)}, kv_cache[0] has {tuple(key.shape)}; "
                "all but the last dimension must be equal"
            )
        if not each.shape[3]:
            raise ValueError(f"{name} has heads of size 0 (shape {tuple(each.shape)})")
    if not key.shape[2] or heads % key.shape[2]:
        raise ValueError(f"kv_cache has {key.shape[2]} heads, which does not divide q's {heads}")
    value_size = value.shape[3]
    largest = max(size, value_size)
    if algorithm == "fused" and (query.dtype not in FUSED_DTYPES or largest > LARGEST_HEAD):
        raise ValueError(
            'algorithm="fused" takes float32, float16 and bfloat16 and heads of at most '
            f'{LARGEST_HEAD}, got {query.dtype} and {largest}; use "unfused" or "auto"'
        )
    pages = None
    if record.block_table is not None:
        pages = _pages(communicator, record.block_table, batches)
    most = key.shape[1] * (1 if pages is None else pages.shape[1])
    seen = _lengths(communicator, record.lengths, query, most)
    counts = [[most] * query.shape[1]] * batches if record.lengths is None else None
    if seen.is_cpu:  # the host does not wait for numbers on a GPU
        counts = seen.tolist()
    if pages is not None:
        _check_pages(pages, seen, key.shape[0], key.shape[1])
    scale = scale_of(record.scale, size)
    problem = DecodeProblem(communicator, query, key, value, seen, scale, pages, counts)

    def start() -> Outcome:
        terms = (
            ("dtype of q", query.dtype),
            ("the shape of q", shape),
            ("heads of kv_cache", key.shape[2]),
            ("the size of heads of kv_cache[1]", value_size),
            ("scale", scale),
            ("algorithm", algorithm),
        )
        communicator.parts(communicator.call_of(OP, terms, None))
        queries, world_size = query.shape[0] * query.shape[1], communicator.world_size
        named = tuning.Problem(OP, query.dtype, queries, heads, largest, world_size)
        place, grouped = communicator.place, problem.by_key_head()
        attended = grouped.new_empty(*grouped.shape[:-1], value_size)
        lse = attended.new_empty(grouped.shape[:-1], dtype=wide_dtype(query.dtype))
        chosen = algorithm
        if algorithm == "auto":
            kernels = query.dtype in FUSED_DTYPES and largest <= LARGEST_HEAD
            kernels = kernels and place.mapped and not place.direct_access
            chosen = "fused" if kernels else "unfused"
            if kernels and place.nodes is None:
                chosen = tuning.measured_choice(communicator, named).algorithm or chosen
        name_algorithm(chosen)
        event = None
        if math.prod(grouped.shape):
            if chosen == "fused":
                rows = grouped.shape[2]
                tiles = choose_attention(place, query.dtype, largest, rows, keys=most, decode=True)
                tiles = tuning.measured_choice(communicator, named, chosen).over(tiles)
                event = decode_fused(problem, attended, lse, tiles)
            else:
                event = decode_unfused(problem, attended, lse)
        if event is not None and query.shape[1] > 1:
            place.hold_current(event, f"the end of {OP}")  # the caller's next work comes after it
        output, sums = problem.from_key_heads(attended, lse)
        return Outcome((output.squeeze(1), sums.squeeze(2)) if single else (output, sums), event)

    return start, (), None


def _lengths(communicator: Communicator, lengths: Any, query: Tensor, most: int) -> Tensor:
    """Return int64 ``[batches, tokens]``: how many of this rank's keys a token sees, at most ``most``."""
    batches, tokens = query.shape[:2]
    if lengths is None:
        return torch.full((batches, tokens), most, dtype=torch.int64, device=query.device)
    lengths = checks.tensor("lengths", lengths, communicator)
    shapes = (batches,), (batches, tokens)
    if lengths.dtype not in (torch.int32, torch.int64) or lengths.shape not in shapes:
        raise ValueError(
            f"lengths must be int32 or int64 of shape {shapes[0]} or {shapes[1]}, got {lengths.dtype} of "
            f"shape {tuple(lengths.shape)}"
        )
    known = lengths.is_cpu and lengths.numel()
    if known and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(
            f"lengths must be within 0..{most}, the tokens of kv_cache, got {lengths.tolist()}"
        )
    of_tokens = lengths if lengths.dim() == 2 else lengths.unsqueeze(1).expand(batches, tokens)
    counts: Tensor = of_tokens.to(torch.int64).contiguous()
    return counts


def _pages(communicator: Communicator, table: Any, batches: int) -> Tensor:
    table = checks.tensor("block_table", table, communicator)
    if table.dtype not in (torch.int32, torch.int64) or table.dim() != 2 or len(table) != batches:
        raise ValueError(
            f"block_table must be int32 or int64 of shape ({batches}, pages of a sequence), got "
            f"{table.dtype} of shape {tuple(table.shape)}"
        )
    return table if table.stride(1) == 1 else table.contiguous()  # type: ignore[no-any-return]


def _check_pages(table: Tensor, lengths: Tensor, pages: int, size: int) -> None:
    """Raise for a used page that does not exist. The host does not wait for numbers on a GPU."""
    if not (table.is_cpu and lengths.numel()):
        return
    used = torch.arange(table.shape[1]) * size < lengths.amax(1, keepdim=True)
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        number = int(table[wrong][0])
        raise ValueError(f"block_table has page {number}, kv_cache has pages 0..{pages - 1}")


decode = internal_form(OP, prepared_decode)


def _outputs(record: DecodeArguments, size: Any) -> list[Tensor]:
    query = record.q
    batches, *tokens, heads, _ = query.shape
    output = query.new_empty([*query.shape[:-1], record.value.shape[-1]])
    return [output, query.new_empty([batches, heads, *tokens], dtype=wide_dtype(query.dtype))]


def _start(communicator: Communicator, record: DecodeArguments) -> Started:
    """Run the op; it is done, or ordered before the caller's next work: tokens wait for each other."""
    results: Any = decode(communicator, (record,))
    return Started([result.contiguous() for result in results], None)


def _own_keys(record: DecodeArguments, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's ``[batches, heads, keys, size]``, and which keys each of ``tokens`` tokens sees."""
    key, value, lengths = record.key, record.value, record.lengths
    if record.block_table is not None:
        # entries of a table beyond the sequence's length may be anything
        pages = record.block_table.clamp(0, key.shape[0] - 1).to(torch.int64)
        key, value = key[pages].flatten(1, 2), value[pages].flatten(1, 2)
    batches, most = record.q.shape[0], key.shape[1]
    if lengths is None:
        lengths = torch.full((batches,), most, device=key.device)
    of_tokens = lengths.view(batches, -1, 1).expand(batches, tokens, 1)
    seen = torch.arange(most, device=key.device) < of_tokens
    # an unwritten key or value may be NaN, and 0 times NaN is NaN
    unseen = ~seen.any(1)[:, :, None, None]
    key, value = (each.masked_fill(unseen, 0).transpose(1, 2) for each in (key, value))
    return key, value, seen


def reference(ranks: Sequence[DecodeArguments], size: int) -> list[list[Tensor]]:
    results, first = [_outputs(rank, size) for rank in ranks], ranks[0]
    by_rank.alike(OP, "q", [rank.q for rank in ranks])
    query = first.q.unsqueeze(1) if first.q.dim() == 3 else first.q
    keys_of = [_own_keys(rank, query.shape[1]) for rank in ranks]
    key, value, seen = (torch.cat(each, 2) for each in zip(*keys_of, strict=True))
    wide, scale = wide_dtype(query.dtype), scale_of(first.scale, query.shape[3])
    query, key, value = (each.to(wide) for each in (query.transpose(1, 2), key, value))
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    sums = query.new_full(query.shape[:3], -math.inf)
    if query.numel() and key.numel():
        output, sums = attended(query, key, value, seen.unsqueeze(1), False, scale)
    for to, lse in results:
        to.copy_(output.transpose(1, 2).reshape(to.shape))
        lse.copy_(sums.reshape(lse.shape))
    return results


DISTRIBUTED_DECODE = Op(
    OP,
    DecodeArguments,
    _start,
    _outputs,
    without_gradient(OP),
    communicates={},
    several=True,
    reference=reference,
    algorithms={
        "fused": ("decode_attention_kernel", "merge_attention_kernel", "decode_exchange_kernel"),
        "unfused": (),
    },
    examples={**EXAMPLES, "q": lambda setting: setting.numbers(1, HEADS, HEAD, same=True)},
)


def distributed_decode(
    q: Tensor,
    kv_cache: Sequence[Tensor],
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    group: Group = None,
    algorithm: ScaledAlgorithm = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from new tokens, the same on all ranks, to keys and values that are spread over the ranks.

    Parameters
    ----------
    q : queries, ``[batch, heads, size]``, or ``[batch, tokens, heads, size]`` for several tokens (guessed
        tokens, for instance). The same on all ranks.
    kv_cache : keys and values of this rank's part of the sequences, each ``[batch, tokens, heads, size]``,
        read in place. Algorithms on torch widen 16 bits and copy pages together, as far as ``lengths`` say.
        Tokens may differ between ranks; the number of heads divides the number of ``q``. Heads of keys have
        the size of the heads of ``q``, heads of values any size. With ``block_table`` each is ``[pages,
        tokens of a page, heads, size]``.
    lengths : int32 or int64 ``[batch]``, or ``[batch, tokens]``, for every token of ``q``: how many of this
        rank's keys it sees; by default all. 0 is allowed. Keys beyond the longest length of a sequence are
        not read (torch on a GPU reads them, without an effect). If n new tokens have the last of this
        rank's L keys, pass ``L - n + 1 + i`` for the i-th.
    block_table : int32 or int64 ``[batch, n]``: the pages of this rank that have a sequence's keys, in its
        order, like in vLLM and FlashInfer. Entries beyond ``lengths`` may have any number.
    scale : the factor of the scores, by default ``1 / sqrt(size)``.
    algorithm : "fused" (Triton kernels over this rank's keys, and one low-latency exchange of partial
        results and their logarithms; above 64 KiB a plain all-gather), "unfused" (torch), "auto".
    return_lse : also return the natural logarithms of the sums of exponentials, ``[batch, heads]`` or
        ``[batch, heads, tokens]``.

    Returns
    -------
    The output, of the shape of ``q`` with the head size of the values. Results are merged in the order of
    the ranks, in fp32, so all ranks get the same bits. The output is 0 if no rank has a key. No gradients:
    a backward raises RuntimeError.

    Raises ValueError or TypeError naming the argument, both values and the rank, on all ranks, before any
    data moves.

    Semantics: ``torch.nn.functional.scaled_dot_product_attention`` of the whole cache.

    >>> def decoded():
    ...     keys, values = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1, 4), 1.0 + interlace.get_rank())
    ...     return interlace.distributed_decode(torch.zeros(1, 2, 4), (keys, values))[0, :, 0].tolist()
    >>> interlace.run(decoded, 2)
    [[1.5, 1.5], [1.5, 1.5]]
    """
    communicator = resolve(group).on(q)
    with communicator.accepting(OP):
        key, value = checks.keys_and_values(kv_cache)
        checks.flag("return_lse", return_lse)
    tensors = q, key, value, lengths, block_table
    given = DecodeArguments(*tensors, scale, algorithm)

    def run(record: DecodeArguments, async_op: bool = False) -> Any:
        return decode(communicator, (record,), (), async_op)

    if torch.is_grad_enabled() and any(
        getattr(tensor, "requires_grad", False) for tensor in tensors
    ):
        # its backward raises: there are no gradients
        output, lse = run_recorded(
            DISTRIBUTED_DECODE, communicator, given, run, lambda outputs, _: outputs, False
        )
    else:
        output, lse = run(given)
    return (output, lse) if return_lse else output
