"""One attention: its tensors in the form that the algorithms take, and what they may launch with.

Tensors are ``[tokens, batches, heads, head size]`` here, whatever the caller's layout, with any strides but
the last; values, results and their gradients may have another head size than queries and keys. Keys and
values of a rank travel together, *packed*: ``[tokens, elements]``, of a token all keys and then all values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from interlace.kernels.arguments import AttentionTiles, Queries
from interlace.ops.attention.shards import AttentionMask, TokenShards
from interlace.ops.matmul.operands import DESCRIPTOR_ALIGNMENT, input_precision
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import Workspace
from interlace.runtime.tuning.configuration import Configuration

LOG2E = 1.0 / math.log(2.0)
POINTER_KEYS = 64
"""The most keys of a tile without TMA: the addresses of 128 rows of 128 spill on 9.0 (16 bytes)."""


class AttentionResult(NamedTuple):
    """What a forward has made, with gradients: all that a backward needs beside the problem.

    ``output`` and its ``grad`` are ``[tokens, b, h, v]``, the gradient contiguous along the last; ``lse``,
    the natural logarithm of the sums of exponentials, and its gradient, if it has one, ``[b, h, tokens]``.
    """

    grad: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    lse_grad: torch.Tensor | None = None

    def delta(self) -> torch.Tensor:
        """fp32 or wider ``[b, h, tokens]``: what gradients of scores are taken relative to."""
        wide = torch.float64 if self.grad.dtype == torch.float64 else torch.float32
        made = (self.grad.to(wide) * self.output.to(wide)).sum(-1).permute(1, 2, 0)
        return (made if self.lse_grad is None else made - self.lse_grad).contiguous()


@dataclass
class AttentionProblem:
    """What every method works on. ``first_head``: see ``kernels/arguments.py``; ``per_key``, too.

    ``ranks``: whose tokens all tensors have, one after another; None: the query this rank's, and so the key
    until it travels. ``heads_first``: packed keys lie in memory as torch's products read them, all keys
    ``[b, h, tokens, d]`` and then all values.
    """

    communicator: Communicator
    op: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    shards: TokenShards
    mask: AttentionMask
    documents: torch.Tensor | None
    scale: float
    per_key: int
    first_head: int = 0
    ranks: tuple[int, ...] | None = None
    heads_first: bool = False

    @property
    def whose(self) -> tuple[int, ...]:
        """The ranks whose queries these are."""
        return (self.rank,) if self.ranks is None else self.ranks

    @property
    def wide(self) -> torch.dtype:
        """Of partial results."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def row_elements(self) -> int:
        """Of a packed row."""
        return sum(math.prod(each.shape[1:]) for each in (self.key, self.value))

    def packed(self) -> torch.Tensor:
        """Keys and values of this rank, as they travel."""
        made = self.key.new_empty(self.key.shape[0], self.row_elements)
        for to, each in zip(self.keys_and_values(made), (self.key, self.value), strict=True):
            to.copy_(each)
        return made

    def packed_in(self, workspace: Workspace, owner: int, offset: int, rows: int) -> torch.Tensor:
        """So many packed keys in the workspace of ``owner``."""
        return workspace.data(owner, offset, (rows, self.row_elements), self.key.dtype)

    def keys_and_values(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of what travels: ``[tokens, batches, heads, size]`` each."""
        if not self.heads_first:
            return self.parts_of_rows(packed)
        shapes = [(*each.shape[1:3], len(packed), each.shape[3]) for each in (self.key, self.value)]
        key, value = torch.split(packed.view(-1), [math.prod(shape) for shape in shapes])
        return key.view(shapes[0]).permute(2, 0, 1, 3), value.view(shapes[1]).permute(2, 0, 1, 3)

    def parts_of_rows(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`keys_and_values`, of packed rows whatever ``heads_first`` says: so gradients lie."""
        shapes = [each.shape[1:] for each in (self.key, self.value)]
        key, value = torch.split(packed, [math.prod(shape) for shape in shapes], 1)
        return key.view(len(packed), *shapes[0]), value.view(len(packed), *shapes[1])

    def sources(self) -> list[int]:
        """The ranks whose keys are seen, in their order."""
        return sorted({s for rank in self.whose for s in self.shards.sources(rank, self.mask)})

    def after_the_caller(self) -> None:
        """The compute stream goes on behind what the caller has issued until now."""
        self.communicator.compute.wait_event(self.communicator.place.record_current())

    def give(self, total: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """``grads`` of keys and of values = packed sums, on the compute stream."""

        def copied() -> None:
            for grad, part in zip(grads, self.parts_of_rows(total), strict=True):
                grad.copy_(part)

        self.communicator.compute.call(copied, "gradients of the own keys")

    def spans(self) -> torch.Tensor:
        """What each query sees."""
        who = self.whose
        if self.documents is not None:
            return self.shards.spans(who, self.mask, self.documents)
        key = ("attention spans", self.shards, self.mask, who)
        table = self.communicator.table(
            key, lambda: self.shards.spans(who, self.mask, None).tolist(), passing=True
        )
        return table.view(-1, 2) if table.numel() > 1 else table.new_empty(0, 2)

    def arrivals(self) -> list[int]:
        """The sources in the order in which their keys come: the own first, then as peers send."""
        world, needed = self.shards.world_size, set(self.sources())
        order = [(self.rank - step) % world for step in range(world)]
        return [source for source in order if source in needed]

    def readers(self) -> list[int]:
        """The other ranks that need this one's keys, the next one first."""
        world = self.shards.world_size
        order = [(self.rank + step) % world for step in range(1, world)]
        return [r for r in order if self.shards.sees(r, self.rank, self.mask)]


def rows_argument(tensor: torch.Tensor) -> Queries:
    """``[tokens, batches, heads, size]`` as a kernel takes it."""
    return Queries(tensor, *tensor.stride()[:3])


def attention_tiles(
    communicator: Communicator,
    configuration: Configuration,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    packed: bool = True,
) -> AttentionTiles:
    """``head_dim``: of queries and keys; ``value_dim``: of values and results; ``packed``: so keys lie."""
    sizes, place = (head_dim, value_dim), communicator.place
    aligned = all(size * dtype.itemsize % DESCRIPTOR_ALIGNMENT == 0 for size in sizes)
    descriptors = packed and aligned and configuration.descriptors and place.descriptors
    block_n = configuration.block_n if descriptors else min(configuration.block_n, POINTER_KEYS)
    block_d, block_v = (max(16, 1 << (size - 1).bit_length()) for size in sizes)
    blocks = configuration.block_m, block_n, block_d, block_v
    return AttentionTiles(*blocks, *sizes, input_precision(dtype), descriptors, place.compiled)


def unit_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its last dimension contiguous; a copy only if it is not."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


class Blocks(Protocol):
    """What is computed of the keys of one source after another: by kernels, or by torch.

    ``source`` is None of packed keys of all ranks, one's after another's. All but ``begin`` goes to the
    compute stream.
    """

    def begin(self, query: torch.Tensor) -> None: ...

    def attend(self, source: int | None, packed: torch.Tensor) -> None: ...

    def merge(self, output: torch.Tensor, lse: torch.Tensor) -> None: ...

    def begin_backward(self, result: AttentionResult) -> None: ...

    def differentiate(
        self, source: int | None, packed: torch.Tensor, contribution: torch.Tensor
    ) -> None: ...

    def query_gradient(self, output: torch.Tensor) -> None: ...
