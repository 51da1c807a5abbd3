"""Entries of the catalogue: the kernels of ``kernels/attention``.

Variants::

    bf16, fp16, fp32   dtype of all operands
    head 64            the size of heads: 64, 128, 256, or 96, which is no power of two
    head 192 128       192 of queries and keys, 128 of values and results
    copiers            programs of the kernel push the keys; without, the copy engine does
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from interlace.ops.attention import blocks, key_transport
from interlace.ops.attention.decode import DecodeProblem, decode_fused, own_part
from interlace.ops.attention.problem import (
    AttentionMask,
    AttentionProblem,
    AttentionResult,
    TokenShards,
)
from interlace.runtime.compiler.request import Entry
from interlace.runtime.tuning.configuration import for_decoding, gpu_attention
from interlace.tools.catalogue.absent_group import DTYPES, RANKS, AbsentGroup, entry, launched, meta

_ROWS = 4096
_HEADS, _KEY_HEADS = 8, 2


def attention(arch: int) -> Iterator[Entry]:
    for size in (128, 64, 96, 256):
        yield from attention_kernels(arch, "bf16", size)
    yield from attention_kernels(arch, "bf16", 192, value_size=128)
    yield from attention_kernels(arch, "fp16", 128)
    for size in (64, 128, 256):
        yield from attention_kernels(arch, "fp32", size)
    yield from decoding(arch)


def _sizes(size: int, value_size: int | None) -> tuple[int, int, str]:
    """Of keys, of values, and what a variant with them is called."""
    if value_size in (None, size):
        return size, size, str(size)
    return size, value_size, f"{size} {value_size}"


def _problem(
    group: AbsentGroup, dtype: str, sizes: tuple[int, int, str], tokens: int = _ROWS
) -> tuple[AttentionProblem, torch.Tensor]:
    """And the result."""
    size, value_size, _ = sizes
    query, key, value, output = (
        meta(tokens, 1, heads, each, dtype=DTYPES[dtype])
        for heads, each in (
            (_HEADS, size),
            (_KEY_HEADS, size),
            (_KEY_HEADS, value_size),
            (_HEADS, value_size),
        )
    )
    shards, mask = TokenShards((_ROWS,) * RANKS, "zigzag"), AttentionMask(True)
    own: Any = group
    given = query, key, value, shards, mask, None, size**-0.5, _HEADS // _KEY_HEADS
    return AttentionProblem(own, "context_parallel_attention", *given), output


def gathered_attention(
    arch: int, dtype: str, size: int, *, value_size: int | None = None, **overrides: int
) -> list[Entry]:
    """Forward in one kernel that gathers keys, and the merge."""
    sizes = _sizes(size, value_size)
    own: dict[str, Any] = dict(overrides)
    tiles = replace(gpu_attention(arch, DTYPES[dtype], max(sizes[:2]), backward=False), **own)
    lse = meta(1, _HEADS, _ROWS, dtype=torch.float32)

    def run(group: AbsentGroup) -> None:
        problem, output = _problem(group, dtype, sizes)
        key_transport.all_gather_attention_fused(problem, output, lse, tiles)

    return [entry(launch, f"{dtype} head {sizes[2]}", arch) for launch in launched(run)]


def attention_kernels(
    arch: int, dtype: str, size: int, *, value_size: int | None = None
) -> Iterator[Entry]:
    """Forward with copiers and without, keys one source at a time, the merge, and the backward."""
    sizes = _sizes(size, value_size)
    largest = max(sizes[:2])
    group, tiles = AbsentGroup(), gpu_attention(arch, DTYPES[dtype], largest, backward=False)
    problem, output = _problem(group, dtype, sizes)
    lse = meta(1, _HEADS, _ROWS, dtype=torch.float32)
    name, seen = f"{dtype} head {sizes[2]}", set[str]()

    def forward(_: AbsentGroup) -> None:
        key_transport.all_gather_attention_fused(problem, output, lse, tiles)
        without = replace(tiles, copiers=0)
        key_transport.all_gather_attention_fused(problem, output, lse, without)
        key_transport.attention_on_the_way(problem, "all_gather", output, lse, tiles)

    def backward(_: AbsentGroup) -> None:
        blocks = gpu_attention(arch, DTYPES[dtype], largest, backward=True)
        grads = problem.query, problem.key, problem.value
        result = AttentionResult(output, output, lse)
        key_transport.attention_backward(problem, "all_gather", result, grads, blocks)

    launched(forward, group=group)
    launched(backward, group=group)
    for launch in group.launches:
        copies = launch.arguments.get("COPIES")
        variant = f"{name} copiers" if copies is not None and copies.COPIERS else name
        if (key := f"{launch.name} {variant}") not in seen:
            seen.add(key)
            yield entry(launch, variant, arch)


def heads_kernels(
    arch: int,
    dtype: str,
    size: int,
    *,
    backward: bool = False,
    value_size: int | None = None,
    **overrides: int,
) -> list[Entry]:
    """Keys of all ranks at once, and the merge; or the gradients."""
    sizes = _sizes(size, value_size)
    own: dict[str, Any] = dict(overrides)
    tiles = replace(gpu_attention(arch, DTYPES[dtype], max(sizes[:2]), backward=backward), **own)

    def run(group: AbsentGroup) -> None:
        problem, output = _problem(group, dtype, sizes, RANKS * _ROWS)
        problem = replace(problem, ranks=tuple(range(RANKS)))
        lse = meta(1, _HEADS, RANKS * _ROWS, dtype=torch.float32)
        if backward:
            result = AttentionResult(output, output, lse)
            grads = problem.query, problem.key, problem.value
            blocks.attention_to_all_backward(problem, result, grads, tiles, gather=False)
        else:
            blocks.attention_to_all(problem, output, lse, tiles, gather=False)

    return [entry(launch, f"{dtype} head {sizes[2]}", arch) for launch in launched(run)]


def decoding(arch: int) -> Iterator[Entry]:
    """One token of a few sequences; the polls of its exchange are those of words (``catalogue.py``)."""
    for name, size in (("bf16", 128), ("bf16", 64), ("fp32", 128)):
        yield from decode_kernels(arch, name, size)
    yield from decode_kernels(arch, "bf16", 128, paged=True)
    yield from decode_kernels(arch, "bf16", 192, value_size=128)


def decode_kernels(
    arch: int,
    name: str,
    size: int,
    *,
    value_size: int | None = None,
    paged: bool = False,
    **overrides: int,
) -> Iterator[Entry]:
    """``paged``: the kernel that looks at a table of pages."""
    dtype, (_, of_values, heads) = DTYPES[name], _sizes(size, value_size)
    largest = max(size, of_values)
    tiles = for_decoding(gpu_attention(arch, dtype, largest, backward=False), dtype)
    own: dict[str, Any] = dict(overrides)
    tiles = replace(tiles, **own)
    query = meta(4, 1, _HEADS, size, dtype=dtype)
    key, value = (meta(4, _ROWS, _KEY_HEADS, each, dtype=dtype) for each in (size, of_values))
    group: Any = AbsentGroup()
    problem = DecodeProblem(group, query, key, value, meta(4, 1), size**-0.5)
    rows = problem.by_key_head().shape[:-1]
    lse = meta(*rows, dtype=torch.float32)
    decode_fused(problem, meta(*rows, of_values, dtype=dtype), lse, tiles)
    if paged:
        pages = meta(4, _ROWS // 16, dtype=torch.int32)
        caches = [each.view(-1, 16, _KEY_HEADS, each.shape[3]) for each in (key, value)]
        given = replace(problem, key=caches[0], value=caches[1], pages=pages)
        group.launches[:] = own_part(given, tiles)[0][:1]
    for launch in group.launches:
        merges = launch.name == "merge_attention_kernel"
        variant = f"{name} head {heads} decoded" if merges else f"{name} head {heads}"
        variant += " paged" if paged else ""
        yield entry(launch, variant, arch, ignore=() if merges else ("weak poll",))
