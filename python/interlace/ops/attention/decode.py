"""The op of decoding: arguments checked and agreed on, an algorithm chosen."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.attention.context_parallel import scale_of, without_gradient
from interlace.ops.attention.launch_decode import (
    OP,
    DecodeProblem,
    decode_fused,
    decode_unfused,
)
from interlace.ops.attention.torch_blocks import wide_dtype
from interlace.ops.op.op import Op
from interlace.ops.op.pending import Started
from interlace.runtime.core.call import PreparedCall
from interlace.runtime.core.communicator import Communicator, internal_form
from interlace.runtime.core.context import name_algorithm
from interlace.runtime.core.stream import Outcome
from interlace.runtime.tuning import tuning
from interlace.runtime.tuning.attention import LARGEST_HEAD, choose_attention
from interlace.runtime.tuning.auto import FUSED_DTYPES

Tensor = torch.Tensor
ALGORITHMS = ("auto", "fused", "unfused")


@dataclass
class DecodeArguments:
    """``key`` and ``value``: the tensors of ``kv_cache``; all else as for :func:`distributed_decode`."""

    q: Tensor
    key: Tensor
    value: Tensor
    lengths: Tensor | None
    block_table: Tensor | None
    scale: float | None
    algorithm: str


def prepared_decode(
    communicator: Communicator, given: DecodeArguments, return_lse: bool
) -> PreparedCall:
    """Checked on this rank."""
    algorithm = checks.one_of("algorithm", given.algorithm, ALGORITHMS)
    query = checks.tensor("q", given.q, communicator)
    checks.float_dtype("q", query.dtype)
    if query.dim() not in (3, 4):
        raise ValueError(
            "q must be (batch, heads, size) or (batch, tokens, heads, size), got shape "
            f"{tuple(query.shape)}"
        )
    shape, single = tuple(query.shape), query.dim() == 3
    query = (query.unsqueeze(1) if single else query).contiguous()
    key, value = (
        checks.tensor("kv_cache[0]", given.key, communicator),
        checks.tensor("kv_cache[1]", given.value, communicator),
    )
    batches, _, heads, size = query.shape
    if not size:
        raise ValueError(f"q has heads of size 0 (shape {shape})")
    for name, each in (("kv_cache[0]", key), ("kv_cache[1]", value)):
        checks.same_dtype(name, each.dtype, "q", query.dtype)
        if each.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, tokens, heads, size), got shape {tuple(each.shape)}"
            )
        paged = given.block_table is not None
        other_size = each is key and each.shape[3] != size
        if other_size or not (paged or each.shape[0] == batches):
            what = "the size of heads" if paged else "batches and the size of heads"
            raise ValueError(
                f"{name} has shape {tuple(each.shape)}, q has {shape}; {what} must be equal"
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
    if given.block_table is not None:
        pages = _pages(communicator, given.block_table, batches)
    most = key.shape[1] * (1 if pages is None else pages.shape[1])
    seen = _lengths(communicator, given.lengths, query, most)
    counts = [[most] * query.shape[1]] * batches if given.lengths is None else None
    if seen.is_cpu:  # numbers on a GPU are not waited for
        counts = seen.tolist()
    if pages is not None:
        _check_pages(pages, seen, key.shape[0], key.shape[1])
    scale = scale_of(given.scale, size)
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
        made = grouped.new_empty(*grouped.shape[:-1], value_size)
        lse = made.new_empty(grouped.shape[:-1], dtype=wide_dtype(query.dtype))
        chosen = algorithm
        if algorithm == "auto":
            kernels = query.dtype in FUSED_DTYPES and largest <= LARGEST_HEAD
            kernels = kernels and place.mapped and not place.direct_access
            chosen = "fused" if kernels else "unfused"
            if kernels and place.nodes is None:
                chosen = tuning.measured(communicator, named).algorithm or chosen
        name_algorithm(chosen)
        event = None
        if math.prod(grouped.shape):
            if chosen == "fused":
                rows = grouped.shape[2]
                tiles = choose_attention(place, query.dtype, largest, rows, keys=most, decode=True)
                tiles = tuning.measured(communicator, named, chosen).over(tiles)
                event = decode_fused(problem, made, lse, tiles)
            else:
                event = decode_unfused(problem, made, lse)
        if event is not None and query.shape[1] > 1:
            place.hold_current(event, f"the end of {OP}")  # what follows is the caller's
        output, sums = problem.from_key_heads(made, lse)
        output, sums = (output.squeeze(1), sums.squeeze(2)) if single else (output, sums)
        return Outcome((output, sums) if return_lse else output, event)

    return start, (), None


def _lengths(communicator: Communicator, lengths: Any, query: Tensor, most: int) -> Tensor:
    """int64 ``[batches, tokens]``: how many of this rank's keys a token sees, at most ``most``."""
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
    made: Tensor = of_tokens.to(torch.int64).contiguous()
    return made


def _pages(communicator: Communicator, table: Any, batches: int) -> Tensor:
    table = checks.tensor("block_table", table, communicator)
    if table.dtype not in (torch.int32, torch.int64) or table.dim() != 2 or len(table) != batches:
        raise ValueError(
            f"block_table must be int32 or int64 of shape ({batches}, pages of a sequence), got "
            f"{table.dtype} of shape {tuple(table.shape)}"
        )
    return table if table.stride(1) == 1 else table.contiguous()  # type: ignore[no-any-return]


def _check_pages(table: Tensor, lengths: Tensor, pages: int, size: int) -> None:
    """Raise for a page that is none and would be read; numbers on a GPU are not waited for."""
    if not (table.is_cpu and lengths.numel()):
        return
    used = torch.arange(table.shape[1]) * size < lengths.amax(1, keepdim=True)
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        number = int(table[wrong][0])
        raise ValueError(f"block_table has page {number}, kv_cache has pages 0..{pages - 1}")


decode = internal_form(OP, prepared_decode)


def _outputs(given: DecodeArguments, size: Any) -> list[Tensor]:
    """The output and the logarithms of the sums, empty."""
    query = given.q
    batches, *tokens, heads, _ = query.shape
    output = query.new_empty([*query.shape[:-1], given.value.shape[-1]])
    return [output, query.new_empty([batches, heads, *tokens], dtype=wide_dtype(query.dtype))]


def _start(communicator: Communicator, given: DecodeArguments) -> Started:
    """Done, or ordered before what the caller does next, when it returns: tokens wait for each other."""
    made: Any = decode(communicator, (given, True))
    return Started([each.contiguous() for each in made], None)


DISTRIBUTED_DECODE = Op(
    OP, DecodeArguments, _start, _outputs, without_gradient(OP), communicates={}, several=True
)
