"""Decoding: a few queries, the same on all ranks, and caches of keys and values that are spread over ranks.

``fused``    Triton kernels over the own keys; ranks' results by one exchange of words with flags, of many
             queries by a plain all-gather
``unfused``  torch, and a plain all-gather; any dtype. Where the host knows lengths, sequences that have the
             same together: no more of a cache is read than that, and nothing is copied to be masked

Caches are read where they are: ``[batches, tokens, heads, size]``, any strides but the last; or, with a
table of pages, ``[pages, tokens of a page, heads, size]``. Values, and so results, may be of another size.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from interlace.kernels import launch_formulas as formulas
from interlace.kernels.arguments import AttentionTiles, Heads, Pages, Partials
from interlace.kernels.attention import decode, forward
from interlace.ops.attention.problem import (
    LOG2E,
    attention_tiles,
    rows_argument,
    unit_rows,
)
from interlace.ops.attention.torch_blocks import attended, merged, wide_dtype
from interlace.ops.collectives.low_latency import MOST_PROGRAMS, run_words
from interlace.ops.matmul.operands import launch_options
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.stream import Event
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
OP = "distributed_decode"
MOST_PIECES = 32


@dataclass
class DecodeProblem:
    """``query`` ``[batches, tokens, heads, size]``; ``lengths``: int64 ``[batches, tokens]``, how many own
    keys each sees; ``pages``: int32 or int64 ``[batches, n]``, or None; ``counts``: ``lengths``, where the
    host knows them."""

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
        """How many own keys a sequence may have."""
        return self.key.shape[1] * (1 if self.pages is None else self.pages.shape[1])

    def row_lengths(self) -> Tensor:
        """``lengths`` of the rows of :meth:`by_key_head`: ``[batches, rows]``."""
        return self.lengths.repeat_interleave(self.query.shape[2] // self.key_heads, 1)

    def alike(self) -> Iterator[tuple[slice, int, bool]]:
        """Neighbouring sequences with the same lengths, the longest of these, whether others are shorter.

        All sequences, what a cache has room for, and True, where the host knows no lengths.
        """
        if self.counts is None:
            yield slice(None), self.most, True
            return
        begin = 0
        for lengths, same in itertools.groupby(self.counts):
            sequences = slice(begin, begin := begin + len(list(same)))
            yield sequences, max(lengths), min(lengths) < max(lengths)

    def first(self, cache: Tensor, sequences: slice, tokens: int) -> Tensor:
        """``[sequences, tokens, heads, size]``: a copy only of pages, or if the last stride is not 1."""
        if self.pages is None:
            return unit_rows(cache[sequences, :tokens])
        used = self.pages[sequences, : formulas.ceil_div(tokens, cache.shape[1])]
        # behind what is there a table may have anything
        valid = used.clamp(0, cache.shape[0] - 1).to(torch.int64)
        return unit_rows(cache[valid].flatten(1, 2)[:, :tokens])

    def by_key_head(self) -> Tensor:
        """Queries that see the same head of keys together: ``[batches, key heads, rows, size]``."""
        batches, tokens, heads, size = self.query.shape
        groups = self.query.view(batches, tokens, self.key_heads, heads // self.key_heads, size)
        together = groups.permute(0, 2, 1, 3, 4).contiguous()
        return together.flatten(2, 3)

    def from_key_heads(self, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """``[batches, tokens, heads, size]`` and ``[batches, heads, tokens]`` again."""
        (batches, tokens, heads, _), size = self.query.shape, output.shape[-1]
        shape = batches, self.key_heads, tokens, heads // self.key_heads
        output = output.view(*shape, size).permute(0, 2, 1, 3, 4)
        output = output.reshape(batches, tokens, heads, size)
        return output, lse.view(shape).transpose(2, 3).reshape(batches, heads, tokens)


def exchange_programs(rows: int, size: int) -> int:
    """Programs that exchange results of ``rows``."""
    width = min(decode.DECODE_LANES, max(16, 1 << (size - 1).bit_length()))
    each = decode.DECODE_LANES // width
    return formulas.ceil_div(rows, each) * formulas.ceil_div(size, width)


def fits_words(results: Tensor) -> bool:
    """Whether one low-latency exchange does for ``results``."""
    size = results.shape[-1]
    return exchange_programs(results.numel() // size, size) <= MOST_PROGRAMS


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
    """``output`` and ``lse``, ``[batches, key heads, rows(, size)]``, of ``count`` partial results."""
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
    """Launches that give the result over the own keys, and that: fp32, and natural logarithms."""
    query = problem.by_key_head()
    batches, heads, rows, _ = query.shape
    key, value = unit_rows(problem.key), unit_rows(problem.value)
    tokens, value_size = problem.most, value.shape[3]
    tiles = _tiles(problem, configuration)
    pieces = formulas.pieces_of(tokens, tiles.BLOCK_N, MOST_PIECES)
    piece = formulas.piece_rows(tokens, tiles.BLOCK_N, MOST_PIECES)
    made = query.new_empty(pieces, batches, heads, rows, value_size, dtype=torch.float32)
    partials = Partials(made, query.new_empty(made.shape[:-1], dtype=torch.float32), rows)
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
    kernel, options = decode.decode_attention_kernel, launch_options(configuration)
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
    """``output``, ``lse``: as of the queries by key head."""
    communicator, compute = problem.communicator, problem.communicator.compute
    launches, mine, sums = own_part(problem, configuration)
    with communicator.place.launching():
        compute.wait_event(communicator.place.record_current())
        for launch in launches:
            compute.launch(launch)
    rows, size = sums.numel(), mine.shape[-1]
    if fits_words(mine) and communicator.place.nodes is None:
        width = min(decode.DECODE_LANES, max(16, 1 << (size - 1).bit_length()))
        own = {
            "input_ptr": mine,
            "lse_ptr": sums,
            "output_ptr": output,
            "output_lse_ptr": lse,
            "rows": rows,
            "VALUE_DIM": size,
            "WIDTH": width,
        }
        programs = exchange_programs(rows, size)
        return run_words(communicator, OP, decode.decode_exchange_kernel, programs, own)
    # an engine begins with what the caller has issued, which this is then behind
    communicator.place.hold_current(compute.record(), f"the own part of {OP}")
    every, logs = _gathered(problem, mine, "results"), _gathered(problem, sums, "sums")
    compute.call(lambda: logs.mul_(LOG2E), "sums to base 2")
    partials = Partials(every, logs, mine.shape[2])
    compute.launch(_merge(problem, partials, output, lse, communicator.world_size, configuration))
    return compute.record()


def _gathered(problem: DecodeProblem, mine: Tensor, what: str) -> Tensor:
    """All ranks' ``mine``, by rank."""
    communicator = problem.communicator
    every = mine.new_empty(communicator.world_size, *mine.shape)
    if communicator.world_size == 1:
        every[0].copy_(mine)
        return every
    call = Call(f"{OP} of {what}", (("shape", tuple(mine.shape)), ("dtype", mine.dtype)))
    parts = [each.view(-1) for each in every]
    event = communicator.engine.all_gather(call, parts, mine.contiguous().view(-1))
    if event is not None:
        communicator.compute.wait_event(event)
    return every


def decode_unfused(problem: DecodeProblem, output: Tensor, lse: Tensor) -> Event:
    """By torch, whose partial results are gathered."""
    communicator = problem.communicator
    wide, query = wide_dtype(problem.query.dtype), problem.by_key_head()
    mine = query.new_zeros(*query.shape[:-1], problem.value.shape[3], dtype=wide)
    sums = mine.new_full(query.shape[:-1], float("-inf"))
    rows = problem.row_lengths().unsqueeze(2)
    for some, tokens, masked in problem.alike() if problem.key.numel() else ():
        if not tokens:
            continue
        key, value = (problem.first(each, some, tokens) for each in (problem.key, problem.value))
        there = torch.arange(tokens, device=query.device) < rows[some] if masked else None
        if there is not None and problem.counts is None:
            # what is not there may be no numbers, and 0 times that is none
            value = value.masked_fill(~there.any(1)[:, :, None, None], 0)
        key, value = (each.transpose(1, 2).to(wide) for each in (key, value))
        mask = None if there is None else there[:, None]
        found = attended(query[some].to(wide), key, value, mask, False, problem.scale)
        mine[some], sums[some] = found
    every = _gathered(problem, mine.contiguous(), "results")
    logs = _gathered(problem, sums.contiguous(), "sums")

    def finish() -> None:
        rows = slice(0, query.shape[2])
        parts = [(rows, *each) for each in zip(every, logs, strict=True)]
        total = torch.empty_like(every[0])
        lse.copy_(merged(parts, total))
        output.copy_(total)

    communicator.compute.call(finish, "merge")
    return communicator.compute.record()
