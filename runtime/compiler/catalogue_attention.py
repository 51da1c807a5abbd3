"""Entries of the catalogue: the kernels of ``kernels/attention``.

Variants::

    bf16, fp16, fp32   dtype of all operands
    head 64            the size of heads: 64, 128, 256, or 96, which is no power of two
    copiers            programs of the kernel push the keys; without, the copy engine does
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from interlace.runtime.algorithms.attention import blocks, gather, travelling
from interlace.runtime.algorithms.attention.decode import DecodeProblem, decode_fused, own_part
from interlace.runtime.algorithms.attention.problem import AttentionProblem, AttentionResult
from interlace.runtime.algorithms.attention.shards import AttentionMask, TokenShards
from interlace.runtime.compiler.catalogue_group import RANKS, AbsentGroup, entry, launched, meta
from interlace.runtime.compiler.request import Entry
from interlace.runtime.tuning.attention import for_decoding, gpu_attention

_ROWS = 4096
_HEADS, _KEY_HEADS = 8, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention(arch: int) -> Iterator[Entry]:
    for size in (128, 64, 96, 256):
        yield from attention_kernels(arch, "bf16", size)
    yield from attention_kernels(arch, "fp16", 128)
    for size in (64, 128, 256):
        yield from attention_kernels(arch, "fp32", size)
    yield from decoding(arch)


def _problem(group: AbsentGroup, dtype: str, size: int, tokens: int = _ROWS) -> AttentionProblem:
    query, key, value = (
        meta(tokens, 1, heads, size, dtype=DTYPES[dtype])
        for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS)
    )
    shards, mask = TokenShards((_ROWS,) * RANKS, "zigzag"), AttentionMask(True)
    own: Any = group
    given = query, key, value, shards, mask, None, size**-0.5, _HEADS // _KEY_HEADS
    return AttentionProblem(own, "context_parallel_attention", *given)


def gathered_attention(arch: int, dtype: str, size: int, **overrides: int) -> list[Entry]:
    """Forward in one kernel that gathers keys, and the merge."""
    tiles = replace(gpu_attention(arch, DTYPES[dtype], size, backward=False), **overrides)  # type: ignore[arg-type]
    lse = meta(1, _HEADS, _ROWS, dtype=torch.float32)

    def run(group: AbsentGroup) -> None:
        problem = _problem(group, dtype, size)
        gather.all_gather_attention_fused(problem, problem.query, lse, tiles)

    return [entry(launch, f"{dtype} head {size}", arch) for launch in launched(run)]


def attention_kernels(arch: int, dtype: str, size: int) -> Iterator[Entry]:
    """Forward with copiers and without, keys one source at a time, the merge, and the backward."""
    group, tiles = AbsentGroup(), gpu_attention(arch, DTYPES[dtype], size, backward=False)
    problem = _problem(group, dtype, size)
    lse = meta(1, _HEADS, _ROWS, dtype=torch.float32)
    name, seen = f"{dtype} head {size}", set[str]()

    def forward(_: AbsentGroup) -> None:
        gather.all_gather_attention_fused(problem, problem.query, lse, tiles)
        without = replace(tiles, copiers=0)
        gather.all_gather_attention_fused(problem, problem.query, lse, without)
        travelling.attention_on_the_way(problem, "all_gather", problem.query, lse, tiles)

    def backward(_: AbsentGroup) -> None:
        blocks = gpu_attention(arch, DTYPES[dtype], size, backward=True)
        grads = problem.query, problem.key, problem.value
        result = AttentionResult(problem.query, problem.query, lse)
        travelling.attention_backward(problem, "all_gather", result, grads, blocks)

    launched(forward, group=group)
    launched(backward, group=group)
    for launch in group.launches:
        copies = launch.arguments.get("COPIES")
        variant = f"{name} copiers" if copies is not None and copies.COPIERS else name
        if (key := f"{launch.name} {variant}") not in seen:
            seen.add(key)
            yield entry(launch, variant, arch)


def heads_kernels(
    arch: int, dtype: str, size: int, *, backward: bool = False, **overrides: int
) -> list[Entry]:
    """Keys of all ranks at once, and the merge; or the gradients."""
    own: dict[str, Any] = dict(overrides)
    tiles = replace(gpu_attention(arch, DTYPES[dtype], size, backward=backward), **own)

    def run(group: AbsentGroup) -> None:
        problem = _problem(group, dtype, size, RANKS * _ROWS)
        problem = replace(problem, ranks=tuple(range(RANKS)))
        lse = meta(1, _HEADS, RANKS * _ROWS, dtype=torch.float32)
        query, key = problem.query, problem.key
        if backward:
            result = AttentionResult(query, query, lse)
            blocks.attention_of_heads_backward(problem, result, (query, key, key), tiles)
        else:
            blocks.attention_of_heads(problem, query, lse, tiles)

    return [entry(launch, f"{dtype} head {size}", arch) for launch in launched(run)]


def decoding(arch: int) -> Iterator[Entry]:
    """One token of a few sequences; the polls of its exchange are those of words (``catalogue.py``)."""
    for name, size in (("bf16", 128), ("bf16", 64), ("fp32", 128)):
        yield from decode_kernels(arch, name, size)
    yield from decode_kernels(arch, "bf16", 128, paged=True)


def decode_kernels(
    arch: int, name: str, size: int, *, paged: bool = False, **overrides: int
) -> Iterator[Entry]:
    """``paged``: the kernel that looks at a table of pages."""
    dtype = DTYPES[name]
    tiles = for_decoding(gpu_attention(arch, dtype, size, backward=False), dtype)
    own: dict[str, Any] = dict(overrides)
    tiles = replace(tiles, **own)
    query, key = (
        meta(4, 1, _HEADS, size, dtype=dtype),
        meta(4, _ROWS, _KEY_HEADS, size, dtype=dtype),
    )
    group: Any = AbsentGroup()
    problem = DecodeProblem(group, query, key, key, meta(4, 1), size**-0.5)
    grouped = problem.by_key_head()
    lse = meta(*grouped.shape[:-1], dtype=torch.float32)
    decode_fused(problem, grouped, lse, tiles)
    if paged:
        pages, cache = meta(4, _ROWS // 16, dtype=torch.int32), key.view(-1, 16, _KEY_HEADS, size)
        given = replace(problem, key=cache, value=cache, pages=pages)
        group.launches[:] = own_part(given, tiles)[0][:1]
    for launch in group.launches:
        merges = launch.name == "merge_attention_kernel"
        variant = f"{name} head {size} decoded" if merges else f"{name} head {size}"
        variant += " paged" if paged else ""
        yield entry(launch, variant, arch, ignore=() if merges else ("weak poll",))
