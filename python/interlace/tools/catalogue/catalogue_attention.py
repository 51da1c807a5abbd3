"""Entries of the catalogue: the kernels of ``kernels/attention``.

Variants::

    bf16, fp16, fp32   dtype of all operands
    head 64            the size of heads: 64, 128, 256, or 96, which is not a power of two
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
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.tuning.configuration import Configuration, for_decoding, gpu_attention
from interlace.tools.catalogue.absent_group import (
    DTYPES,
    RANKS,
    AbsentGroup,
    KernelOptions,
    entry,
    launches_of,
    meta,
)

_ROWS = 4096
_HEADS, _KEY_HEADS = 8, 2


class HeadsVariant(KernelOptions):
    """Heads of attention; ``overrides`` are values of the tiles."""

    @property
    def of_values(self) -> int:
        return self.value_dim or self.head_dim

    def tiles(self, arch: int, *, backward: bool = False, decodes: bool = False) -> Configuration:
        dtype, of_variant = DTYPES[self.dtype], dict[str, Any](self.overrides)
        found = gpu_attention(arch, dtype, max(self.head_dim, self.of_values), backward=backward)
        return replace(for_decoding(found, dtype) if decodes else found, **of_variant)

    def problem(self, group: Any, tokens: int = _ROWS) -> tuple[AttentionProblem, AttentionResult]:
        """Return the problem, and tensors for the result, with gradients."""
        query, key, value, output = (
            meta(tokens, 1, heads, size, dtype=DTYPES[self.dtype])
            for heads, size in (
                (_HEADS, self.head_dim),
                (_KEY_HEADS, self.head_dim),
                (_KEY_HEADS, self.of_values),
                (_HEADS, self.of_values),
            )
        )
        shards, mask = TokenShards((_ROWS,) * RANKS, "zigzag"), AttentionMask(True)
        operands = query, key, value, shards, mask, None, self.head_dim**-0.5, _HEADS // _KEY_HEADS
        lse = meta(1, _HEADS, tokens, dtype=torch.float32)
        problem = AttentionProblem(group, "context_parallel_attention", *operands)
        return problem, AttentionResult(output, output, lse)

    def entry(self, launch: KernelLaunch, arch: int, *words: str, **more: Any) -> Entry:
        sizes = dict.fromkeys((self.head_dim, self.of_values))
        variant = " ".join([self.dtype, "head", *map(str, sizes), *words])
        return entry(launch, variant, arch, **more)


def attention(arch: int) -> Iterator[Entry]:
    for heads in (
        *(HeadsVariant(head_dim=size) for size in (128, 64, 96, 256)),
        HeadsVariant(head_dim=192, value_dim=128),
        HeadsVariant("fp16"),
        *(HeadsVariant("fp32", head_dim=size) for size in (64, 128, 256)),
    ):
        yield from attention_kernels(arch, heads)
    yield from decoding(arch)


def gathered_attention(arch: int, heads: HeadsVariant) -> list[Entry]:
    def run(group: AbsentGroup) -> None:
        problem, (output, _, lse, *_) = heads.problem(group)
        key_transport.all_gather_attention_fused(problem, output, lse, heads.tiles(arch))

    return [heads.entry(launch, arch) for launch in launches_of(run)]


def attention_kernels(arch: int, heads: HeadsVariant) -> Iterator[Entry]:
    """Yield forward with copiers and without, keys one source at a time, the merge, and the backward."""
    tiles, seen = heads.tiles(arch), set[str]()

    def run(group: AbsentGroup) -> None:
        problem, result = heads.problem(group)
        operands = problem, result.output, result.lse
        key_transport.all_gather_attention_fused(*operands, tiles)
        key_transport.all_gather_attention_fused(*operands, replace(tiles, copiers=0))
        key_transport.attention_on_the_way(problem, "all_gather", *operands[1:], tiles)
        grads = problem.query, problem.key, problem.value
        blocks = heads.tiles(arch, backward=True)
        key_transport.attention_backward(problem, "all_gather", result, grads, blocks)

    for launch in launches_of(run):
        copies = launch.arguments.get("COPIES")
        words = ("copiers",) if copies is not None and copies.COPIERS else ()
        operands = heads.entry(launch, arch, *words)
        if operands.name not in seen:
            seen.add(operands.name)
            yield operands


def heads_kernels(arch: int, heads: HeadsVariant, *, backward: bool = False) -> list[Entry]:
    """Return kernels for keys of all ranks at once, and the merge; or the gradients."""
    tiles = heads.tiles(arch, backward=backward)

    def run(group: AbsentGroup) -> None:
        problem, result = heads.problem(group, RANKS * _ROWS)
        problem = replace(problem, ranks=tuple(range(RANKS)))
        if backward:
            grads = problem.query, problem.key, problem.value
            blocks.attention_to_all_backward(problem, result, grads, tiles, gather=False)
        else:
            blocks.attention_to_all(problem, result.output, result.lse, tiles, gather=False)

    return [heads.entry(launch, arch) for launch in launches_of(run)]


def decoding(arch: int) -> Iterator[Entry]:
    """Yield kernels for one token of a few sequences; the exchange polls words (``catalogue.py``)."""
    for dtype, size in (("bf16", 128), ("bf16", 64), ("fp32", 128)):
        yield from decode_kernels(arch, HeadsVariant(dtype, head_dim=size))
    yield from decode_kernels(arch, HeadsVariant(), paged=True)
    yield from decode_kernels(arch, HeadsVariant(head_dim=192, value_dim=128))


def decode_kernels(arch: int, heads: HeadsVariant, *, paged: bool = False) -> Iterator[Entry]:
    """Yield decode kernels. ``paged``: the kernel that reads a table of pages."""
    dtype, tiles = DTYPES[heads.dtype], heads.tiles(arch, decodes=True)
    query = meta(4, 1, _HEADS, heads.head_dim, dtype=dtype)
    key, value = (
        meta(4, _ROWS, _KEY_HEADS, size, dtype=dtype) for size in (heads.head_dim, heads.of_values)
    )
    group: Any = AbsentGroup()
    problem = DecodeProblem(group, query, key, value, meta(4, 1), heads.head_dim**-0.5)
    rows = problem.by_key_head().shape[:-1]
    lse = meta(*rows, dtype=torch.float32)
    decode_fused(problem, meta(*rows, heads.of_values, dtype=dtype), lse, tiles)
    if paged:
        pages = meta(4, _ROWS // 16, dtype=torch.int32)
        caches = [each.view(-1, 16, _KEY_HEADS, each.shape[3]) for each in (key, value)]
        given = replace(problem, key=caches[0], value=caches[1], pages=pages)
        group.launches[:] = own_part(given, tiles)[0][:1]
    for launch in group.launches:
        merges = launch.name == "merge_attention_kernel"
        words = [word for word, holds in (("decoded", merges), ("paged", paged)) if holds]
        yield heads.entry(launch, arch, *words, ignore=() if merges else ("weak poll",))
