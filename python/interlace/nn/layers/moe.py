"""A mixture of experts: the feed-forward block of which every token takes a few parts, by two fused ops."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from interlace.arguments import checks
from interlace.arguments.words import FusedAlgorithm, Group
from interlace.collectives.rootless import _all_reduce
from interlace.experts.rows import permute
from interlace.grouped_matmuls import all_to_all_grouped_matmul, grouped_matmul_combine
from interlace.kernels.epilogue import Activation
from interlace.nn.functions.regions import copy_to_group
from interlace.nn.layers.linear import check_features
from interlace.nn.parameters.sharded_module import ShardedModule
from interlace.nn.parameters.sharding import divisible, positive
from interlace.runtime.numerics.activations import activate

Tensor = torch.Tensor


class LoadBalance(NamedTuple):
    """How evenly the tokens of the last forward went to experts, of all ranks of the group.

    Attributes
    ----------
    tokens_per_expert : int64 ``(num_experts,)``: rows of each expert.
    loss : this rank's share of the balance loss; the sum over ranks is ``num_experts * sum(f * p)``, where
        ``f`` is an expert's share of all rows and ``p`` the mean of its probability: 1 if both are even.

    >>> def on_rank():
    ...     layer = nn.MoE(4, 8, 2, 1)
    ...     layer(torch.ones(3, 4))
    ...     return layer.load_balance().tokens_per_expert.sum().item()
    >>> interlace.run(on_rank, 2)
    [6, 6]
    """

    tokens_per_expert: Tensor
    loss: Tensor


class MoE(ShardedModule):
    """Experts that are spread over a group, a router, and an expert that all tokens share, if asked for.

    Parameters
    ----------
    hidden_size : features of input and output.
    intermediate_size : features between, of each expert.
    num_experts : of all ranks, a multiple of the group's size; rank r has the r-th part of them.
    topk : how many experts a token goes to.
    activation : "relu", "gelu", "gelu_tanh" or "silu".
    gated : ``down(activation(gate(x)) * up(x))``: ``up`` has the rows of ``gate`` before its own.
    shared_size : features between of the shared expert, 0 for none. Every rank has it all.
    scoring : "softmax" or "sigmoid" of the router's products, in fp32.
    normalize : a token's weights are divided by their sum.
    sequence_parallel : ranks have different tokens, so gradients of the router and the shared expert are
        summed over the group; else all ranks have all tokens, and the sum already.
    algorithm : of both fused ops.

    Forward: ``input`` ``(..., hidden)``, this rank's tokens, gives the same shape; the numbers of tokens
    may differ between ranks. Dropless. :meth:`load_balance` has the statistics.

    Parameters are ``router`` ``(num_experts, hidden)``, ``up`` ``(num_experts, intermediate, hidden)`` and
    ``down`` ``(num_experts, hidden, intermediate)``, of which a rank has its experts', ``shared_up`` and
    ``shared_down``: stacked ``nn.Linear`` weights, initialised as such, in this order. State dicts are
    those of a module that has them whole.

    Raises ValueError or TypeError naming the argument, the values and the rank. Compared with torchtitan's
    ``MoE`` (``w1``, ``w3`` are the halves of ``up``, ``w2`` is ``down``) and Megatron-core's ``MoELayer``
    (``linear_fc1``, ``linear_fc2`` of its grouped MLP): the same sums, without token permutation,
    dispatcher and buffers; no expert bias, no token dropping.

    >>> def forward():
    ...     torch.manual_seed(0)  # the same on all ranks
    ...     layer = nn.MoE(4, 8, num_experts=4, topk=2, gated=True)
    ...     return tuple(layer(torch.ones(3, 1, 4)).shape), tuple(layer.up.shape)
    >>> interlace.run(forward, 2)
    [((3, 1, 4), (2, 16, 4)), ((3, 1, 4), (2, 16, 4))]
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        topk: int,
        activation: Activation = "silu",
        *,
        gated: bool = False,
        shared_size: int = 0,
        scoring: str = "softmax",
        normalize: bool = True,
        group: Group = None,
        sequence_parallel: bool = True,
        algorithm: FusedAlgorithm = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(group)
        with self.group.accepting("MoE"):
            positive(hidden_size=hidden_size, intermediate_size=intermediate_size, topk=topk)
            divisible("num_experts", num_experts, self.group)
            if topk > num_experts:
                raise ValueError(f"topk is {topk}, there are {num_experts} experts")
            if shared_size:
                positive(shared_size=shared_size)
            self.activation = checks.activation("activation", activation)
            self.scoring = checks.one_of("scoring", scoring, ("softmax", "sigmoid"))
        self.hidden_size, self.num_experts, self.topk = hidden_size, num_experts, topk
        self.gated, self.normalize, self.algorithm = gated, normalize, algorithm
        self.sequence_parallel = sequence_parallel
        first, shared = (2 if gated else 1) * intermediate_size, (2 if gated else 1) * shared_size
        made = {"device": device, "dtype": dtype}
        self._add_parameter("router", (num_experts, hidden_size), None, **made)
        self._add_parameter("up", (num_experts, first, hidden_size), 0, **made)
        self._add_parameter("down", (num_experts, hidden_size, intermediate_size), 0, **made)
        if shared_size:
            self._add_parameter("shared_up", (shared, hidden_size), None, **made)
            self._add_parameter("shared_down", (hidden_size, shared_size), None, **made)
        self._routed: tuple[Tensor, Tensor] | None = None
        self.reset_parameters()

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Any]]:
        for name, sharding in self._shardings.items():
            local = self._parameters[name]
            assert local is not None
            shape = sharding.full_shape(tuple(local.shape))
            bound = 1 / math.sqrt(shape[-1])
            yield name, torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_routed": None,
        }  # what a copy has no use for, and torch does not copy

    def _between(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return activate(hidden, self.activation)
        gate, up = hidden.chunk(2, -1)
        return activate(gate, self.activation) * up

    def _routing(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights of each token, ``(t, topk)``."""
        logits = F.linear(x.float(), router.float())
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        weights, chosen = scores.topk(self.topk)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        share = scores if self.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        self._routed = chosen, share
        return chosen, weights

    def forward(self, input: Tensor) -> Tensor:
        check_features(self, input, self.hidden_size, "hidden_size")
        names = ("router", "shared_up", "shared_down")
        whole: Any = [self._parameters.get(name) for name in names]
        if self.sequence_parallel:
            whole = copy_to_group(*whole, group=self.group)
        router, shared_up, shared_down = whole
        x = input.reshape(-1, self.hidden_size)
        chosen, weights = self._routing(x, router)
        up, down = (self._parameters[name] for name in ("up", "down"))
        assert up is not None and down is not None
        how: Any = {"group": self.group, "algorithm": self.algorithm}
        rows, sent = permute(x, chosen, self.num_experts)
        hidden, splits = all_to_all_grouped_matmul(rows, up.transpose(1, 2), sent, **how)
        output: Any = grouped_matmul_combine(
            self._between(hidden), down.transpose(1, 2), splits, chosen, weights, **how
        )
        if shared_up is not None:
            output = output + F.linear(self._between(F.linear(x, shared_up)), shared_down)
        return output.view(input.shape)  # type: ignore[no-any-return]

    def load_balance(self) -> LoadBalance:
        """Of the last forward, over the group. Collective. Raises RuntimeError before the first."""
        if self._routed is None:
            raise RuntimeError("load_balance: there was no forward yet")
        chosen, share = self._routed
        counts = chosen.new_zeros(self.num_experts + 1)
        counts.scatter_add_(0, chosen.reshape(-1), torch.ones_like(chosen).reshape(-1))
        counts[-1] = chosen.shape[0]
        _all_reduce(self.group.on(counts), (counts,))
        rows, tokens = counts[:-1], counts[-1].clamp(min=1)
        even = rows.to(share.dtype) / (tokens * self.topk)
        return LoadBalance(rows, self.num_experts * (even * share.sum(0) / tokens).sum())

    def extra_repr(self) -> str:
        experts = f"{self.num_experts} experts, topk={self.topk}, {self.activation or 'linear'}"
        return f"{self.hidden_size}, {experts}, world_size={self.group.world_size}"
