"""``torch.nn.Embedding`` whose rows, the vocabulary, are split over a group."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.nn.functions import regions
from interlace.nn.layers.linear import InitMethod
from interlace.nn.parameters.sharded_module import ShardedModule
from interlace.nn.parameters.sharding import positive
from interlace.runtime.compat.torch_modes import disable

Tensor = torch.Tensor


class VocabParallelEmbedding(ShardedModule):
    """``torch.nn.Embedding`` whose rows are split over the group; the ranks' findings are summed.

    Parameters
    ----------
    num_embeddings : size of the vocabulary, any: rows are split as ``torch.chunk`` does, so the last ranks
        may have fewer or none. Nothing is padded, and state dicts are those of ``nn.Embedding``.
    embedding_dim, padding_idx : as for ``torch.nn.Embedding``.
    sequence_parallel : the output is this rank's shard of the sequence, whose length the group's size
        divides; else the whole, on all ranks.
    batch_first : indices are ``[b, s]``, the output ``[b, s, h]``, instead of ``[s, b]`` and ``[s, b, h]``.
    init_method : called on the unsharded weight in place of ``nn.Embedding``'s own initialisation.

    Forward: ``[s, b] -> [s / world size, b, h]``; ``input`` are int indices of the whole sequence, the same
    on all ranks. The weight's gradient is this rank's alone, and complete. Semantics:
    ``torch.nn.functional.embedding``, Megatron-core's ``VocabParallelEmbedding``. Raises ValueError or
    TypeError on every rank, IndexError for indices outside the vocabulary; on a GPU these are not looked
    for, and give zeros.

    >>> def forward():
    ...     torch.manual_seed(0)
    ...     layer = nn.VocabParallelEmbedding(5, 2, sequence_parallel=False)
    ...     whole = layer.weight.sharding.full(layer.weight)
    ...     return torch.equal(layer(torch.tensor([4, 0])), whole[[4, 0]])
    >>> with torch.no_grad():
    ...     interlace.run(forward, 2)
    [True, True]
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        init_method: InitMethod | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(group)
        with self.group.accepting(type(self).__name__):
            positive(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
            if padding_idx is not None:
                padding_idx = checks.index("padding_idx", padding_idx, num_embeddings)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.init_method = padding_idx, init_method
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        shape = (num_embeddings, embedding_dim)
        self._add_parameter("weight", shape, 0, device=device, dtype=dtype)
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Any]]:
        shape = (self.num_embeddings, self.embedding_dim)
        if self.init_method is None:
            made = torch.nn.Embedding(*shape, self.padding_idx, device=device, dtype=dtype)
            return [("weight", made.weight)]
        weight = torch.empty(shape, device=device, dtype=dtype)
        self.init_method(weight)
        return [("weight", weight)]

    @disable
    def forward(self, input: Tensor) -> Tensor:
        with self.group.on(self.weight).accepting("VocabParallelEmbedding"):
            self._check(input)
        self._check_alike(self.group)
        output = self._found(input)
        if self.group.world_size == 1:
            return output
        if not self.sequence_parallel:
            return regions.reduce_from_group(output, group=self.group)
        dim = regions.sequence_dim(output, self.batch_first)
        return regions.reduce_scatter_to_sequence(output, dim, group=self.group)

    def _check(self, input: Any) -> None:
        if not isinstance(input, Tensor) or input.dtype not in (torch.int64, torch.int32):
            found = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(f"input must be an int32 or int64 tensor, got {found}")
        if input.is_cpu and input.numel():
            low, high = int(input.min()), int(input.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"input must be within 0..{self.num_embeddings - 1}, got {low}..{high}"
                )

    def _found(self, input: Tensor) -> Tensor:
        """Rows that this rank has, zeros for the others."""
        first, count = self._shardings["weight"].part()
        if not count:  # the graph still has this rank in it, as it has the others
            return self.weight.sum() + self.weight.new_zeros(*input.shape, self.embedding_dim)
        own = (input >= first) & (input < first + count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < count:
            padding = None
        rows = F.embedding(torch.where(own, input - first, 0), self.weight, padding)
        return rows.masked_fill(~own.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, world_size={self.group.world_size}"
