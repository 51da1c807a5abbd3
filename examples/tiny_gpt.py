"""A small GPT over bytes, twice: with layers of torch.nn, and split over ranks with layers of interlace.nn.

Both are made in the same order, so the same seed gives both the same weights, and their state dicts have
the same keys. Activations are sequence first, ``[s, b, h]``: positions, sequences of the batch, features.
Each of the ``W`` ranks of a group has these parts of the sharded model:

    between the blocks     its part of the sequence          [s / W, b, h]
    inside a block         its heads, its part of the MLP    [s, b, h / W], [s, b, 4 * h / W]
    after the head         its part of the vocabulary        [s, b, vocabulary / W]

All communication is inside the layers, with their matmuls. In the code below only the number of heads in
``attend`` depends on the ranks.
"""

import functools
import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from interlace import nn

Tensor = torch.Tensor
VOCABULARY = 128  # ASCII


@dataclass(frozen=True)
class Shape:
    """``length`` is the length of a sequence; ``heads`` divides ``hidden``, the ranks divide ``heads``.

    With ``experts`` the feed-forward block is a mixture of that many experts, two of them for each token.
    """

    hidden: int = 128
    heads: int = 4
    layers: int = 2
    length: int = 128
    experts: int = 0


@functools.cache
def text() -> Tensor:
    """Return the reference manual of Python as bytes; help("lambda") shows it, and every Python has it."""
    topics = pydoc_data.topics.topics
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(whole.encode("ascii", "ignore")))


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int, context: Any = None) -> Tensor:
    """Compute causal attention of this rank's heads, all in ``[s, b, heads * head_dim]``.

    In a ``context`` group each rank has its part of the sequence.
    """
    if context is not None:
        heads = [x.unflatten(-1, (-1, head_dim)) for x in (q, k, v)]
        how = {"causal": True, "layout": "sbhd", "group": context}
        return nn.functional.context_parallel_attention(*heads, **how).flatten(2)
    heads = [x.unflatten(-1, (-1, head_dim)).permute(1, 2, 0, 3) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class GPT(torch.nn.Module):
    """The unsharded model: from tokens and targets ``[s, b]`` to the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, shape.hidden)
        self.positions = torch.nn.Embedding(shape.length, shape.hidden)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = torch.nn.RMSNorm(shape.hidden)
        self.head = torch.nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(len(tokens)).unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(torch.nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.head_dim = hidden // shape.heads
        self.before_attention = torch.nn.RMSNorm(hidden)
        self.qkv = torch.nn.ModuleDict({name: torch.nn.Linear(hidden, hidden) for name in "qkv"})
        self.projection = torch.nn.Linear(hidden, hidden)
        self.before_mlp = torch.nn.LayerNorm(hidden)
        if shape.experts:
            self.mlp = Experts(hidden, shape.experts)
            return
        up, down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)
        self.mlp = torch.nn.ModuleDict({"up": up, "down": down})

    def forward(self, x: Tensor) -> Tensor:
        y = self.before_attention(x)
        q, k, v = (self.qkv[name](y) for name in "qkv")
        x = x + self.projection(attend(q, k, v, self.head_dim))
        y = self.before_mlp(x)
        if isinstance(self.mlp, Experts):
            return x + self.mlp(y)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](y)))


class Experts(torch.nn.Module):
    """A mixture of ``experts`` feed-forward blocks, the best two for each token."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        made = {"router": (hidden,), "up": (4 * hidden, hidden), "down": (hidden, 4 * hidden)}
        for name, shape in made.items():
            bound = shape[-1] ** -0.5
            whole = torch.empty(experts, *shape).uniform_(-bound, bound)
            self.register_parameter(name, torch.nn.Parameter(whole))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, self.router).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for expert in range(len(self.up)):
            y = F.linear(F.gelu(F.linear(x, self.up[expert])), self.down[expert])
            output = output + y * (weights * (chosen == expert)).sum(-1, keepdim=True)
        return output


class ShardedGPT(torch.nn.Module):
    """The same on a group of ranks: from all tokens and targets ``[s, b]``, on all ranks, to the mean loss.

    In a ``context`` group each rank works on its part of the tokens, and returns the loss of that part.
    """

    def __init__(self, shape: Shape, group: Any, context: Any = None) -> None:
        super().__init__()
        self.context = context
        hidden = shape.hidden
        self.tokens = nn.VocabParallelEmbedding(VOCABULARY, hidden, group=group)
        self.positions = nn.VocabParallelEmbedding(shape.length, hidden, group=group)
        self.blocks = torch.nn.ModuleList(
            ShardedBlock(shape, group, context) for _ in range(shape.layers)
        )
        self.norm = nn.RMSNorm(hidden, group=group)
        self.head = nn.ColumnParallelLinear(hidden, VOCABULARY, bias=False, group=group)
        self.loss = nn.VocabParallelCrossEntropy(group=group)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(len(tokens)).unsqueeze(1)
        if self.context is not None:
            tokens, targets, places = (
                nn.functional.shard_sequence(each, 0, group=self.context)
                for each in (tokens, targets, places)
            )
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), targets)


class ShardedBlock(torch.nn.Module):
    def __init__(self, shape: Shape, group: Any, context: Any) -> None:
        super().__init__()
        self.context = context
        hidden = shape.hidden
        self.head_dim = hidden // shape.heads
        self.before_attention = nn.RMSNorm(hidden, group=group)
        self.qkv = nn.QKVParallelLinear(hidden, shape.heads, group=group)
        self.projection = nn.RowParallelLinear(hidden, hidden, group=group)
        self.before_mlp = nn.LayerNorm(hidden, group=group)
        if shape.experts:
            self.mlp = nn.MoE(hidden, 4 * hidden, shape.experts, 2, "gelu", group=group)
        else:
            self.mlp = nn.SequenceParallelMLP(hidden, 4 * hidden, "gelu", group=group)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x))
        x = x + self.projection(attend(q, k, v, self.head_dim, self.context))
        return x + self.mlp(self.before_mlp(x))
