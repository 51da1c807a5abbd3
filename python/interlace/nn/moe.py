"""A mixture of experts and its router: a feed-forward block where two fused ops move tokens to experts.

The router runs in fp32, with torch ops, on this rank's tokens alone. Legend: T tokens, E experts, K experts
for each token.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.types import Device

from interlace.arguments import checks
from interlace.arguments.words import BlockFormatName, FusedAlgorithm, Group
from interlace.kernels.epilogue import Activation
from interlace.nn.linear import check_features
from interlace.nn.regions import copy_to_group
from interlace.nn.sharding import ShardedModule, divisible, positive
from interlace.ops.collectives.rootless import _all_reduce
from interlace.ops.experts import functional
from interlace.ops.experts.api import (
    all_to_all_grouped_matmul,
    dispatch,
    grouped_matmul_combine,
    permute,
)
from interlace.ops.experts.products import multiply
from interlace.ops.experts.routing import by_expert
from interlace.ops.matmul.formats import format_named
from interlace.runtime.core.call import Terms
from interlace.runtime.core.context import comparing
from interlace.runtime.numerics.norms import activate

Tensor = torch.Tensor
SMALLEST = 1e-20  # added to a sum of scores, as sigmoids may add up to 0
BEST = 2  # a group is chosen by its 2 best experts


class Routed(NamedTuple):
    """The router's result: ``chosen`` and ``weights`` are ``[T, K]``.

    ``kept`` is ``chosen`` with -1 for dropped rows. ``share`` ``[T, E]``: scores that add up to 1 per
    token.
    """

    chosen: Tensor
    weights: Tensor
    kept: Tensor
    share: Tensor


class Router(NamedTuple):
    """The options of a router; see :class:`interlace.nn.MoE`."""

    num_experts: int
    topk: int
    scoring: str
    normalize: bool
    scale: float
    groups: int
    topk_groups: int
    capacity_factor: float | None
    drop: str

    def __call__(self, logits: Tensor, bias: Tensor | None) -> Routed:
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        ranked = scores.detach() if bias is None else scores.detach() + bias
        chosen = self._in_best_groups(ranked).topk(self.topk).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
        share = scores
        if self.scoring != "softmax":
            share = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
        return Routed(chosen, weights * self.scale, self._kept(chosen, weights.detach()), share)

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        if self.topk_groups == self.groups:
            return ranked
        by_group = ranked.view(-1, self.groups, self.num_experts // self.groups)
        best = by_group.topk(min(BEST, by_group.shape[-1])).values.sum(-1).topk(self.topk_groups)
        taken = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best.indices, True)
        return by_group.masked_fill(~taken.unsqueeze(-1), -torch.inf).view(ranked.shape)

    def _kept(self, chosen: Tensor, weights: Tensor) -> Tensor:
        if self.capacity_factor is None or not chosen.numel():
            return chosen
        capacity = math.ceil(chosen.numel() / self.num_experts * self.capacity_factor)
        flat = chosen.view(-1)
        order = torch.arange(flat.numel(), device=flat.device)
        if self.drop == "probs":
            order = weights.reshape(-1).argsort(descending=True, stable=True)
        _, _, position = by_expert(flat[order], self.num_experts)
        dropped = torch.empty_like(flat, dtype=torch.bool)
        dropped[order] = position >= capacity
        return flat.masked_fill(dropped, -1).view(chosen.shape)


WHOLE = "router", "shared_up", "shared_down"
"""Parameters that every rank holds whole."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class LoadBalance(NamedTuple):
    """Statistics over the group: how evenly the last forward's tokens were distributed over the experts.

    Attributes
    ----------
    tokens_per_expert : int64 ``(num_experts,)``: how often each expert was chosen, dropped rows included.
    loss : this rank's share of the balance loss. The sum over ranks is ``num_experts * sum(f * p)``, where
        ``f`` is an expert's share of all rows and ``p`` its mean probability; it is 1 if both are even.

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
    """Experts that are spread over a group, a router, and optionally an expert that all tokens share.

    Parameters
    ----------
    hidden_size : features of input and output.
    intermediate_size : intermediate features of each expert.
    num_experts : experts on all ranks, a multiple of the group's size; rank r has the r-th part.
    topk : how many experts a token goes to.
    activation : "relu", "gelu", "gelu_tanh" or "silu".
    gated : compute ``down(activation(gate(x)) * up(x))``; ``up`` holds ``gate``'s rows before its own.
    shared_size : intermediate features of the shared expert, 0 for no shared expert. Every rank holds it
    whole.
    scoring : "softmax" or "sigmoid" of the router's products, in fp32.
    normalize : divide a token's weights by their sum.
    scale : a factor for all weights.
    groups, topk_groups : choose experts only from ``topk_groups`` of ``groups`` groups of neighbours: the
        groups whose two best experts have the largest sum.
    expert_bias : choose experts by scores plus a bias; weights are scores without it. The bias is a buffer
        ``expert_bias`` ``(num_experts,)``, which stays in fp32; :meth:`update_expert_bias` changes it.
    capacity_factor : an expert gets at most ``capacity_factor`` times the mean of this rank's rows, rounded
        up. Other rows are dropped and count as 0 in a token's sum. None: dropless.
    num_max_dispatch_tokens_per_rank : the most tokens of any rank. Rows are then dispatched and multiplied
        by :func:`interlace.experts.multiply`, and the host waits for counts only where that function does.
        Intermediate results have their largest possible size. None: two fused ops; the host reads counts.
    drop : the rows that stay: those with the largest weights ("probs") or of the first tokens ("position").
    sequence_parallel : ranks have different tokens, so gradients of the router and the shared expert are
        summed over the group. Otherwise all ranks have all tokens, and gradients are already complete.
    algorithm : the algorithm of both fused ops.
    format : multiply by ``up`` and ``down`` in a block-scaled format, such as "mxfp8", forward and
        backward. The router and the shared expert are not in the format.

    Forward: ``input`` ``(..., hidden)``, this rank's tokens; the output has the same shape. Numbers of
    tokens may differ between ranks. :meth:`load_balance` returns statistics. The compiled forward is one
    graph, in which rows are dispatched.

    Parameters are ``router`` ``(num_experts, hidden)``, ``up`` ``(num_experts, intermediate, hidden)`` and
    ``down`` ``(num_experts, hidden, intermediate)``, then ``shared_up`` and ``shared_down``. A rank holds
    its experts' part of ``up`` and ``down``. They are stacked ``nn.Linear`` weights, initialised as such,
    in this order. A state dict has this rank's part, :func:`interlace.nn.full_state_dict` has all; both
    load.

    Raises ValueError or TypeError naming the argument, the values and the rank. The sums are the same as in
    torchtitan's ``MoE`` and Megatron-core's ``MoELayer``; docs/how-to/migrate/experts.md maps the weights.
    torchtitan's ``route_norm``, ``route_scale``, ``num_expert_groups`` and ``num_limited_groups`` are
    ``normalize``, ``scale``, ``groups`` and ``topk_groups``. Megatron-core has
    ``moe_expert_capacity_factor`` and ``moe_token_drop_policy``. Groups, bias and scale are DeepSeek-V3's.

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
        scale: float = 1.0,
        groups: int = 1,
        topk_groups: int | None = None,
        expert_bias: bool = False,
        capacity_factor: float | None = None,
        drop: str = "probs",
        num_max_dispatch_tokens_per_rank: int | None = None,
        group: Group = None,
        sequence_parallel: bool = True,
        algorithm: FusedAlgorithm = "auto",
        format: BlockFormatName | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        with self.group.accepting("MoE"):
            positive(hidden_size=hidden_size, intermediate_size=intermediate_size, topk=topk)
            divisible("num_experts", num_experts, self.group)
            if topk > num_experts:
                raise ValueError(f"topk is {topk}, it must be at most num_experts, {num_experts}")
            if shared_size:
                positive(shared_size=shared_size)
            self.activation = checks.activation("activation", activation)
            checks.one_of("algorithm", algorithm, checks.ALGORITHMS)
            if format is not None:
                widths = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
                format_named(format).check_widths(**widths)
            for name, flag in (
                ("gated", gated),
                ("normalize", normalize),
                ("expert_bias", expert_bias),
                ("sequence_parallel", sequence_parallel),
            ):
                checks.flag(name, flag)
            chosen_groups = groups if topk_groups is None else topk_groups
            _check_groups(num_experts, topk, groups, chosen_groups)
            if num_max_dispatch_tokens_per_rank is not None:
                positive(num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank)
            if not _is_number(scale):
                raise TypeError(f"scale must be a number, got {scale!r}")
            fits = _is_number(capacity_factor) and capacity_factor > 0  # type: ignore[operator]
            if capacity_factor is not None and not fits:
                raise ValueError(
                    f"capacity_factor must be positive or None, got {capacity_factor!r}"
                )
            self.router_options = Router(
                num_experts,
                topk,
                checks.one_of("scoring", scoring, ("softmax", "sigmoid")),
                normalize,
                scale,
                groups,
                chosen_groups,
                capacity_factor,
                checks.one_of("drop", drop, ("probs", "position")),
            )
        about = {
            "activation": self.activation,
            "gated": gated,
            "expert_bias": expert_bias,
            "sequence_parallel": sequence_parallel,
            "intermediate_size": intermediate_size,
            "shared_size": shared_size,
            "format": format,
            **self.router_options._asdict(),
        }
        self._terms = tuple((f"{name} of MoE", value) for name, value in about.items())
        self.hidden_size, self.num_experts, self.topk = hidden_size, num_experts, topk
        self.gated, self.algorithm, self.format = gated, algorithm, format
        self.most_tokens = num_max_dispatch_tokens_per_rank
        self.sequence_parallel = sequence_parallel
        first, shared = (2 if gated else 1) * intermediate_size, (2 if gated else 1) * shared_size
        kind: Any = {"device": device, "dtype": dtype}
        self._add_parameter("router", (num_experts, hidden_size), None, **kind)
        self._add_parameter("up", (num_experts, first, hidden_size), 0, **kind)
        self._add_parameter("down", (num_experts, hidden_size, intermediate_size), 0, **kind)
        if shared_size:
            self._add_parameter("shared_up", (shared, hidden_size), None, **kind)
            self._add_parameter("shared_down", (hidden_size, shared_size), None, **kind)
        self._routed: tuple[Tensor, Tensor] | None = None
        self.expert_bias: Tensor | None
        self._chosen: Tensor | None  # counts since the bias was last changed
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = None if bias is None else torch.empty_like(bias, dtype=torch.int64)
        self.register_buffer("_chosen", counts, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        for buffer in (self.expert_bias, self._chosen):
            if buffer is not None:
                buffer.zero_()

    def _apply(self, fn: object, recurse: bool = True) -> Any:
        before: Tensor | None = self.expert_bias
        result = super()._apply(fn, recurse)
        after: Tensor | None = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)  # other dtypes are too coarse for its steps
        return result

    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, object]]:
        for name, sharding in self._shardings.items():
            local = self._parameters[name]
            assert local is not None
            shape = sharding.full_shape(tuple(local.shape))
            bound = 1 / math.sqrt(shape[-1])
            yield name, torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)

    def __getstate__(self) -> dict[str, object]:
        return {
            **super().__getstate__(),
            "_routed": None,
        }  # a copy does not need these, and torch does not copy them

    def _between(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return activate(hidden, self.activation)
        gate, up = hidden.chunk(2, -1)
        return activate(gate, self.activation) * up

    def _routing(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts, -1 for a dropped row, and their weights, both ``(t, topk)``."""
        with torch.autocast(x.device.type, enabled=False):
            routed = self.router_options(F.linear(x.float(), router.float()), self.expert_bias)
        self._routed = routed.chosen, routed.share
        if self._chosen is not None and self.training:
            self._chosen += _count_choices(routed.chosen, self.num_experts)
        return routed.kept, routed.weights

    def _compared(self) -> Terms:
        """Return values that must be equal on all ranks; otherwise results or gradients would be wrong."""
        summed = WHOLE if self.sequence_parallel and torch.is_grad_enabled() else ()
        parameters = [(name, self._parameters.get(name)) for name in summed]
        learnt = [name for name, each in parameters if each is not None and each.requires_grad]
        return (
            *self._terms,
            ("list of MoE parameters with gradients", " and ".join(learnt) or None),
        )

    def forward(self, input: Tensor) -> Tensor:
        with self.group.accepting("MoE"):
            if not isinstance(input, Tensor):
                raise TypeError(f"input must be a tensor, got {type(input).__name__}")
            if not input.dim():
                raise ValueError(f"input must have {self.hidden_size} features, got a scalar")
        up = self._parameters["up"]
        check_features(self, input, self.hidden_size, "hidden_size", up, "up")
        if not torch.compiler.is_compiling():
            self._check_alike(self.group, *WHOLE)
        return self._on_all_ranks(self._routed_to_experts, input)

    def _routed_to_experts(self, input: Tensor) -> Tensor:
        whole: Any = [self._parameters.get(name) for name in WHOLE]
        if self.sequence_parallel:
            whole = copy_to_group(*whole, group=self.group)
        router, shared_up, shared_down = whole
        x = input.reshape(-1, self.hidden_size)
        chosen, weights = self._routing(x, router)
        up, down = (self._parameters[name] for name in ("up", "down"))
        assert up is not None and down is not None
        operands = x, chosen, weights, up.transpose(1, 2), down.transpose(1, 2)
        if torch.compiler.is_compiling():
            output = self._by_experts(*operands)
        else:
            with comparing(*self._compared()):
                output = self._by_experts(*operands)
        if shared_up is not None:
            output = output + F.linear(self._between(F.linear(x, shared_up)), shared_down)
        return output.view(input.shape)  # type: ignore[no-any-return]

    def _by_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor
    ) -> Any:
        options: Any = {"group": self.group, "algorithm": self.algorithm}
        traced = torch.compiler.is_compiling()  # a graph does not know splits
        if traced or self.most_tokens is not None:
            options["num_max_dispatch_tokens_per_rank"] = self.most_tokens
            send: Any = functional.dispatch if traced else dispatch
            home: Any = functional.grouped_matmul_combine if traced else grouped_matmul_combine
            received, handle = send(x, chosen, weights, self.num_experts, **options)
            hidden = self._between(multiply(received, up, format=self.format))
            return home(hidden, down, handle, algorithm=self.algorithm, format=self.format)
        activation: Any = None if self.gated else self.activation
        options["format"] = self.format
        rows, sent = permute(x, chosen, self.num_experts)
        up_projected: Any = all_to_all_grouped_matmul(
            rows, up, sent, activation=activation, **options
        )
        hidden, splits = up_projected
        if self.gated:
            hidden = self._between(hidden)
        return grouped_matmul_combine(hidden, down, splits, chosen, weights, **options)

    def load_balance(self) -> LoadBalance:
        """Return the statistics of the last forward over the group. Collective.

        Raises RuntimeError before the first forward.
        """
        if self._routed is None:
            raise RuntimeError("load_balance: there was no forward yet; call the layer first")
        chosen, share = self._routed
        counts = F.pad(_count_choices(chosen, self.num_experts), (0, 1), value=chosen.shape[0])
        _all_reduce(self.group.on(counts), (counts,))
        rows, tokens = counts[:-1], counts[-1].clamp(min=1)
        even = rows.to(share.dtype) / (tokens * self.topk)
        return LoadBalance(rows, self.num_experts * (even * share.sum(0) / tokens).sum())

    @torch.no_grad()
    def update_expert_bias(self, rate: float = 1e-3) -> None:
        """Raise the bias of experts that were chosen less often than the mean by ``rate``; lower the
        others.

        The counts are from all training forwards since the last call, over the group. The mean of the step
        is then subtracted. Call this once per optimizer step on every rank. Collective. Raises RuntimeError
        for a layer without ``expert_bias``. Raises TypeError or ValueError on every rank if the rate is not
        a finite number on one rank. Semantics: DeepSeek-V3's balance without a loss; torchtitan's
        ``load_balance_coeff``.

        >>> def on_rank():
        ...     torch.manual_seed(0)
        ...     layer = nn.MoE(4, 8, 2, 1, expert_bias=True)
        ...     layer(torch.ones(3, 4))
        ...     layer.update_expert_bias(0.5)
        ...     return sorted(layer.expert_bias.tolist())
        >>> interlace.run(on_rank, 2)
        [[-0.5, 0.5], [-0.5, 0.5]]
        """
        if self.expert_bias is None or self._chosen is None:
            raise RuntimeError(
                "update_expert_bias: the layer has no expert_bias; make it with expert_bias=True"
            )
        communicator = self.group.on(self._chosen)
        with communicator.accepting("update_expert_bias"):
            if isinstance(rate, bool) or not isinstance(rate, (int, float)):
                raise TypeError(f"rate must be a number, got {rate!r}")
            if not math.isfinite(rate):
                raise ValueError(f"rate must be finite, got {rate}")
        _all_reduce(communicator, (self._chosen,))
        missing = self._chosen.sum() - self.num_experts * self._chosen
        step = rate * missing.sign().to(self.expert_bias.dtype)
        self.expert_bias += step - step.mean()
        self._chosen.zero_()

    def extra_repr(self) -> str:
        experts = f"{self.num_experts} experts, topk={self.topk}, {self.activation or 'linear'}"
        return f"{self.hidden_size}, {experts}, world_size={self.group.world_size}"


def _count_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen. The host does not wait for the result."""
    flat = chosen.reshape(-1)
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def _check_groups(experts: int, topk: int, groups: int, topk_groups: int) -> None:
    positive(groups=groups, topk_groups=topk_groups)
    if experts % groups:
        raise ValueError(f"num_experts {experts} must be a multiple of groups, got {groups}")
    if topk_groups > groups or topk > topk_groups * (experts // groups):
        raise ValueError(
            f"topk is {topk}, topk_groups is {topk_groups} of {groups} groups, each of "
            f"{experts // groups} experts"
        )
