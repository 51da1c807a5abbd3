"""Routing in a mixture of experts: from a rank's choice of experts to the results of a dispatch.

T tokens have k slots each; ``topk_idx[t, j]`` is the expert of slot j, below 0 for none. A *row* is a token
in a slot that has an expert. Home rows are sorted by expert, then by token and slot. ``capacity`` bounds
the rows that a rank sends to one expert; the slots of later rows count as empty.

On its expert's rank, rows are sorted by expert, then by source rank, then in the order of the source's
tokens: the order of the grouped matmuls (``grouped.py``). ``segments[e][s]`` describes the rows of expert e
from rank s: the first row, the number of rows, and the first row among the source's rows, sorted by expert.

An assignment is computed by torch operators on the device, and the host does not wait.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from interlace.arguments import checks
from interlace.kernels.experts.dispatch import COUNT_NUMBERS
from interlace.ops.op.op import Example, Setting, constant
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import comparing, current, with_context
from interlace.runtime.tuning import configuration, tuning
from interlace.runtime.tuning.tuning import MULTIPLIED_DTYPES

MOST = "most tokens of a rank"
DISPATCHES = "dispatches"
MOST_BACK = 32
"""Ranks compare numbers up to this one, and one number beyond: each number is one more message to learn."""
Tensor = torch.Tensor


class SentTokens(NamedTuple):
    """The input of a dispatch's kernels, from an assignment.

    ``facts``, int32 ``[T, 3 k]``: expert, position and the weight's bits, for each slot. ``tokens``, int64
    ``[W, T]``: the tokens for each rank first, in their order. ``lines``, int64 ``[W, 2 + E]``, by rank:
    tokens, the rows for ranks before it, rows by its experts.
    """

    facts: Tensor
    tokens: Tensor
    lines: Tensor


def by_expert(flat: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, by slot: the expert (``experts`` for none), the order by expert, the position in one."""
    # slots without an expert come last
    key = torch.where((flat < 0) | (flat >= experts), experts, flat)
    order = torch.argsort(key, stable=True)
    counts = flat.new_zeros(experts + 1).scatter_add_(0, key, torch.ones_like(flat))
    begins = counts.cumsum(0) - counts
    position = torch.empty_like(flat)
    position[order] = torch.arange(flat.numel(), device=flat.device)
    return key, order, position - begins[key]


@dataclass(frozen=True)
class Assignment:
    """``topk_idx`` ``[T, k]``, int64; ``experts`` of all ranks together; ``capacity`` 0: no bound."""

    topk_idx: Tensor
    experts: int
    world_size: int
    capacity: int = 0

    @property
    def per_rank(self) -> int:
        return self.experts // self.world_size

    @cached_property
    def _sort(self) -> tuple[Tensor, Tensor, Tensor]:
        return by_expert(self.topk_idx.reshape(-1), self.experts)

    @cached_property
    def position(self) -> Tensor:
        """``[T, k]``: the position among the rows for its expert, -1 for a slot without a row."""
        key, _, position = self._sort
        valid = key < self.experts
        if self.capacity:
            valid = valid & (position < self.capacity)
        return torch.where(valid, position, -1).view(self.topk_idx.shape)

    @cached_property
    def counts(self) -> Tensor:
        key, valid = self._sort[0], (self.position.view(-1) >= 0).to(torch.int64)
        return valid.new_zeros(self.experts + 1).scatter_add_(0, key, valid)[: self.experts]

    @cached_property
    def inverse(self) -> Tensor:
        """``[T, k]``: the home row of a slot, -1 if it has none."""
        begins = torch.nn.functional.pad(self.counts.cumsum(0) - self.counts, (0, 1))
        row = begins[self._sort[0]].view(self.topk_idx.shape) + self.position
        return torch.where(self.position < 0, -1, row)

    def slots(self, rows: int) -> Tensor:
        """Return ``token * k + slot`` of the ``rows`` home rows, in their order."""
        order = self._sort[1]
        return order[self.position.view(-1)[order] >= 0] if self.capacity else order[:rows]

    # -- for the kernels -------------------------------------------------------------------------------

    @cached_property
    def _on(self) -> Tensor:
        """Return ``[W, T]``: whether a token has a row on a rank."""
        ranks = torch.where(self.position < 0, -1, self.topk_idx // self.per_rank)
        numbers = torch.arange(self.world_size, device=ranks.device)
        return (ranks.unsqueeze(0) == numbers.view(-1, 1, 1)).any(-1)

    def sent(self, weights: Tensor | None) -> SentTokens:
        idx, position = self.topk_idx.to(torch.int32), self.position.to(torch.int32)
        bits = torch.zeros_like(idx) if weights is None else weights.view(torch.int32)
        counts = self.counts.view(self.world_size, self.per_rank)
        return SentTokens(
            torch.cat([idx, position, bits], 1).contiguous(),
            torch.argsort(~self._on, dim=1, stable=True),
            count_lines(self._on.sum(1), counts),
        )


def count_lines(tokens: Tensor, counts: Tensor) -> Tensor:
    """Return the kernels' lines per rank, from its tokens, ``[W]``, and its experts' rows, ``[W, E]``."""
    rows = counts.sum(1)
    head = torch.stack([tokens, rows.cumsum(0) - rows], 1)
    assert head.shape[1] == COUNT_NUMBERS
    return torch.cat([head, counts], 1).contiguous()


def known_segments(routes_counts: Tensor, rank: int, per_rank: int, expert_rows: int = 0) -> Tensor:
    """Return the kernels' int64 ``[E, W, 3]`` from ``[W, experts]``, all ranks' rows by expert."""
    own_counts = routes_counts[:, rank * per_rank : (rank + 1) * per_rank]
    begins = routes_counts.cumsum(1) - routes_counts
    count = own_counts.t().contiguous()
    first = (count.view(-1).cumsum(0) - count.view(-1)).view(count.shape)
    if expert_rows:
        experts = torch.arange(per_rank, device=count.device).unsqueeze(1)
        first = experts * expert_rows + count.cumsum(1) - count
    home = begins[:, rank * per_rank : (rank + 1) * per_rank].t()
    return torch.stack([first, count, home], 2).contiguous()


@dataclass(frozen=True)
class HostRoutes:
    """Routes of rows that the host knows. ``counts``: ``[W, experts]`` of all ranks, on the CPU."""

    assignment: Assignment
    counts: Tensor
    expert_rows: int

    def segments(self, rank: int) -> Tensor:
        return known_segments(self.counts, rank, self.assignment.per_rank, self.expert_rows)

    def sizes(self) -> Tensor:
        """``[W, W]``: rows from each rank to each."""
        world_size = self.assignment.world_size
        return self.counts.view(world_size, world_size, -1).sum(2)


@dataclass(frozen=True)
class Bounds:
    """Numbers that all ranks share: the most tokens of a rank; programs that send to one rank.

    ``expert_rows``: rows of the result from the first of one expert to the first of the next, 0 if they
    are contiguous.
    """

    most_tokens: int
    senders: int
    expert_rows: int


def next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class Received(NamedTuple):
    """The results of a dispatch: rows by expert, then by source rank, then in the source's order.

    Attributes
    ----------
    x : ``(rows, hidden)``; after a low-latency dispatch ``(experts, most rows, hidden)``.
    scales : a row for each row of ``x``, if it was sent with scales; otherwise None.
    topk_weights : float32 ``(rows,)``, if weights were passed; otherwise None.
    segments : int64 ``(experts of this rank, ranks, 3)``, on the device, for each expert and source rank:
        the first row, the number of rows, and the first row among that rank's rows, sorted by expert.

    >>> def on_rank():
    ...     received, _ = interlace.experts.dispatch(torch.ones(1, 4), torch.tensor([[0, 1]]), None, 2)
    ...     return received.x.shape[0], received.splits.tolist(), received.offsets.tolist()
    >>> interlace.run(on_rank, 2)
    [(2, [[1, 1]], [2]), (2, [[1, 1]], [2])]
    """

    x: Tensor
    scales: Tensor | None
    topk_weights: Tensor | None
    segments: Tensor

    @property
    def splits(self) -> Tensor:
        """Rows by expert and source rank, as the grouped matmuls take them."""
        return self.segments[..., 1]

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """Rows of each of this rank's experts."""
        return self.splits.sum(1)

    @property
    def offsets(self) -> Tensor:
        """int32 ends of each expert's rows: ``offs`` of ``torch._grouped_mm``; not for low latency."""
        return self.num_tokens_per_expert.cumsum(0).to(torch.int32)


class DispatchHandle(NamedTuple):
    """The input of a combine from its dispatch. ``group`` is the group that dispatched.

    ``number``: the number of the dispatch in its group; 0 if dispatches are not counted, as in graphs.
    ``inverse``, int64 ``(tokens, k)``: the row of each slot among the rows that this rank has sent, sorted
    by expert; -1 for a slot without an expert, or beyond the capacity.

    >>> def on_rank():
    ...     experts = torch.tensor([[1], [0], [-1]])
    ...     _, handle = interlace.experts.dispatch(torch.ones(3, 4), experts, None, 2)
    ...     return handle.inverse.flatten().tolist()
    >>> interlace.run(on_rank, 2)
    [[1, 0, -1], [1, 0, -1]]
    """

    segments: Tensor
    topk_idx: Tensor
    topk_weights: Tensor | None
    routing: "Routing"
    group: Any
    number: int = 0

    @property
    def inverse(self) -> Tensor:
        """int64 ``(tokens, k)``: the home row of each slot, or -1; computed again each time."""
        return self.routing.inverse(self.topk_idx)


def dispatch_number(communicator: Communicator) -> int:
    """Return the number of this dispatch. A refused dispatch also counts: all ranks learn of it."""
    number = communicator.numbers.get(DISPATCHES, 0) + 1
    communicator.numbers[DISPATCHES] = number
    return number


def by_handle(communicator: Communicator, handle: DispatchHandle) -> AbstractContextManager[None]:
    """Return a context in which ranks compare how many dispatches ago their handles were made.

    To compare the number itself, each call would need another message, and a GPU's host would wait for it.
    """
    if not handle.number:
        return nullcontext()
    back = communicator.numbers.get(DISPATCHES, 0) - handle.number
    return comparing(("the dispatch of the handle, counted back,", min(back, MOST_BACK)))


def choice(handle: DispatchHandle, topk_idx: Any, topk_weights: Any) -> tuple[Any, Any]:
    """Return the arguments; the arguments of the dispatch replace None."""
    return (
        handle.topk_idx if topk_idx is None else topk_idx,
        handle.topk_weights if topk_weights is None else topk_weights,
    )


def routing_for(handle: DispatchHandle, topk_idx: Any) -> "Routing":
    """Return the dispatch's routing; tokens with other numbers of slots get a bound of as many rows."""
    routing = handle.routing
    if not isinstance(topk_idx, Tensor) or topk_idx.dim() != 2 or not topk_idx.shape[1]:
        return routing  # the caller refuses such a topk_idx
    rows = routing.max_tokens * handle.topk_idx.shape[1]
    return routing._replace(max_tokens=-(-rows // topk_idx.shape[1]))


def flat(handle: DispatchHandle, name: str, rows: Any) -> Any:
    """Return ``rows`` of experts, the argument ``name``, as a matrix.

    With low latency each expert's rows begin at a fixed place, so another shape would mix experts.
    """
    if not handle.routing.packed or not isinstance(rows, Tensor):
        return rows
    experts, world_size, _ = handle.segments.shape
    expected = experts, handle.routing.expert_rows(world_size)
    if rows.dim() != 3 or tuple(rows.shape[:2]) != expected:
        raise ValueError(
            f"{name} has shape {tuple(rows.shape)}, rows of this low-latency dispatch have "
            f"({expected[0]}, {expected[1]}, n)"
        )
    return rows.flatten(0, 1)


class Routing(NamedTuple):
    """The options of a dispatch, which its combine also needs.

    ``capacity``: the most rows that a rank may send to one expert, 0 for no bound. ``max_tokens``: a bound
    of every rank's tokens, 0 for results of the exact length. ``packed``: each expert's rows begin where
    the most rows of the previous one would end.
    """

    num_experts: int
    capacity: int = 0
    max_tokens: int = 0
    packed: bool = False
    algorithm: str = "auto"

    def bound(self, topk: int, world_size: int) -> int:
        """Return the most rows that a rank can receive, from ``max_tokens``."""
        if self.packed:
            return self.num_experts // world_size * self.expert_rows(world_size)
        rows = self.max_tokens * topk
        if self.capacity:
            rows = min(rows, self.num_experts // world_size * self.capacity)
        return rows * world_size

    def expert_rows(self, world_size: int) -> int:
        return world_size * self.capacity if self.packed else 0

    def inverse(self, topk_idx: Tensor) -> Tensor:
        """Return the home row of each slot, or -1. It is computed again: this saves memory."""
        return Assignment(topk_idx.to(torch.int64), self.num_experts, 1, self.capacity).inverse


class RoutingArguments:
    """The arguments of an op from which a :class:`Routing` is made."""

    @property
    def routing(self) -> Routing:
        return Routing(*[getattr(self, name) for name in Routing._fields])


def routing_of(
    num_experts: Any,
    *,
    capacity: Any = None,
    num_max_dispatch_tokens_per_rank: Any,
    low_latency: bool = False,
    algorithm: str,
) -> Routing:
    """Return the options of a call, if they are valid. When packed no expert gets more than all tokens."""
    most = num_max_dispatch_tokens_per_rank
    for name, value in (("capacity", capacity), ("num_max_dispatch_tokens_per_rank", most)):
        wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
        if value is not None and wrong:
            raise ValueError(f"{name} must be a positive int or None, got {value!r}")
    if not isinstance(num_experts, torch.SymInt):
        num_experts = checks.integer("num_experts", num_experts)
        if num_experts < 1:
            raise ValueError(f"num_experts must be positive, got {num_experts}")
    if low_latency and most is None:
        raise ValueError("low_latency needs num_max_dispatch_tokens_per_rank")
    bound = (capacity or most) if low_latency else capacity
    return Routing(num_experts, bound or 0, most or 0, low_latency, algorithm)


def resolve_algorithm(communicator: Communicator, algorithm: str) -> str:
    """Return the algorithm, the same on all ranks, before a rank knows anything about the others."""
    place = communicator.place
    checks.one_node(algorithm, communicator)
    if algorithm != "auto":
        return algorithm
    fused = place.all_mapped and not place.direct_access
    return "fused" if fused else "unfused"


def on_device(
    communicator: Communicator, algorithm: str, weight: Tensor, dtype: torch.dtype
) -> str:
    """Return the algorithm of products with counts on the device; "auto" avoids waits of the host."""
    algorithm = resolve_algorithm(communicator, algorithm)
    fits = {weight.dtype, dtype} <= set(MULTIPLIED_DTYPES) and weight.shape[1] * weight.shape[2] > 0
    return algorithm if fits else "unfused"


def least_of_all(communicator: Communicator, op: str, name: str, number: int) -> int:
    """Return the least of all ranks' numbers ``name``, which never change. Collective the first time only.

    Call it after ranks have agreed on their configuration.
    """
    key = name, current().overrides
    if key not in communicator.numbers:
        communicator.numbers[key] = min(
            communicator.parts(Call(op, (("what", name),), part=number))
        )
    return communicator.numbers[key]


def measured_for(
    communicator: Communicator,
    op: str,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    algorithm: str = "auto",
) -> tuning.Measured:
    """Return what ``tune`` has measured for ``rows`` of the rank that sends most, if there are rows."""
    if not rows * columns:
        return tuning.UNMEASURED
    problem = tuning.Problem(op, dtype, rows, columns, 1, communicator.world_size)
    return tuning.measured_choice(communicator, problem, algorithm)


def senders_of(communicator: Communicator, op: str) -> int:
    """Return the number of programs that send to one rank, in a kernel that moves rows."""
    common = configuration.choose(communicator.place, torch.float32, 1, 1, 1)
    resident = min(communicator.place.program_limit, common.programs or 24)
    senders = max(1, resident // communicator.world_size)
    return least_of_all(communicator, op, "senders", senders)


def most_dispatched(communicator: Communicator) -> int:
    """Return the most tokens of a rank in a dispatch that exchanged numbers; 0 before the first."""
    return communicator.numbers.get(MOST, 0)


def agreed(
    communicator: Communicator,
    op: str,
    routing: Routing,
    shape: Sequence[int],
    terms: Terms,
    counts: Tensor | None = None,
) -> tuple[int, Tensor | None]:
    """Return the most tokens of a rank, or a bound, and all ranks' counts; raise on all ranks alike.

    ``shape``: the shape of ``topk_idx``. ``counts``: this rank's rows by expert, if the host needs all
    ranks' counts. Without them, and with a bound of tokens, a rank sends no data and waits for no other
    rank. The numbers that ranks exchanged in dispatches are also a bound for the rows that return.
    """
    known = routing.max_tokens or most_dispatched(communicator)
    terms = (
        *terms,
        ("k of topk_idx", shape[1]),
        ("num_experts", routing.num_experts),
        ("num_max_dispatch_tokens_per_rank", routing.max_tokens),
        ("capacity", routing.capacity),
        ("whether it is low latency", routing.packed),
        ("algorithm", routing.algorithm),
    )
    if counts is None and known:
        terms = (*terms, ("tokens of the rank with most", known))
        communicator.parts(communicator.call_of(op, terms, None))
        return known, None
    part = shape[0], None if counts is None else tuple(counts.tolist())
    parts = communicator.parts(Call(op, with_context(terms), part=part))
    most = max(tokens for tokens, _ in parts)
    communicator.numbers[MOST] = max(most, most_dispatched(communicator))
    most = routing.max_tokens or most
    return most, None if counts is None else torch.tensor([each for _, each in parts])


def assignment_of(
    communicator: Communicator, routing: Routing, topk_idx: Any, tokens: int | None
) -> Assignment:
    """Return the choice of experts, checked. ``tokens``: of the input, None if there is no input."""
    world_size, read = communicator.world_size, communicator.place.interpreted
    check_spread(routing, world_size)
    idx = checks.tensor("topk_idx", topk_idx, communicator)
    return assign(routing, idx, tokens, world_size, read=read)


def check_spread(routing: Routing, world_size: int) -> None:
    if routing.num_experts % world_size:
        raise ValueError(
            f"num_experts must be a multiple of the world size {world_size}, got {routing.num_experts}"
        )


def assign(
    routing: Routing, idx: Tensor, tokens: int | None, world_size: int, *, read: bool
) -> Assignment:
    """Return an assignment, see :func:`assignment_of`; ``read``: whether to read and check the experts."""
    if idx.is_floating_point() or idx.is_complex() or idx.dtype is torch.bool:
        raise TypeError(f"topk_idx must be a tensor of integers, got {idx.dtype}")
    if idx.dim() != 2 or not idx.shape[1]:
        raise ValueError(f"topk_idx must have 2 dimensions (tokens, k), got {tuple(idx.shape)}")
    if tokens is not None and idx.shape[0] != tokens:
        raise ValueError(f"topk_idx has {idx.shape[0]} rows, x has {tokens}")
    if routing.max_tokens and idx.shape[0] > routing.max_tokens:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {routing.max_tokens}, topk_idx has {idx.shape[0]} rows"
        )
    if read:
        check_experts(idx, routing.num_experts)
        ordered = idx.sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
        if bool(twice.any()):
            token = int(twice.nonzero()[0])
            raise ValueError(
                f"topk_idx names an expert twice for token {token}: {idx[token].tolist()}"
            )
    return Assignment(idx.to(torch.int64), routing.num_experts, world_size, routing.capacity)


def check_experts(topk_idx: Tensor, experts: int) -> None:
    """Raise for a number that is neither an expert nor -1; the host of a GPU would wait for it."""
    if not topk_idx.numel():
        return
    least, most = int(topk_idx.min()), int(topk_idx.max())
    if most >= experts:
        raise ValueError(f"topk_idx has expert {most}, there are {experts}")
    if least < -1:
        raise ValueError(f"topk_idx has {least}; a slot without an expert must be -1")


def check_same_choice(communicator: Communicator, sent: Tensor, record: Any) -> None:
    """Raise if ``record`` differs from the ``topk_idx`` of the dispatch, as far as that needs no wait."""
    record = checks.tensor("topk_idx", record, communicator)
    if record.shape != sent.shape:
        raise ValueError(
            f"topk_idx has shape {tuple(record.shape)}, the dispatch's {tuple(sent.shape)}"
        )
    if communicator.place.interpreted and bool((record != sent).any()):
        token = int((record != sent).any(1).nonzero()[0])
        raise ValueError(
            f"topk_idx of token {token} is {record[token].tolist()}, in the dispatch it was "
            f"{sent[token].tolist()}"
        )


def weights_of(communicator: Communicator, topk_weights: Any, like: Tensor) -> Tensor | None:
    if topk_weights is None:
        return None
    weights = checks.tensor("topk_weights", topk_weights, communicator)
    if weights.shape != like.shape:
        raise ValueError(
            f"topk_weights has shape {tuple(weights.shape)}, topk_idx {tuple(like.shape)}"
        )
    if not weights.is_floating_point():
        raise TypeError(f"topk_weights must be a tensor of floats, got {weights.dtype}")
    return weights.to(torch.float32).contiguous()


# -- examples of arguments -------------------------------------------------------------------------

SLOTS, EXPERTS = 2, 2  # per token, per rank


def example_choice(setting: Setting) -> Tensor:
    """Return the experts of a rank's tokens; some tokens have two on one rank."""
    experts = EXPERTS * setting.size
    first = 3 * torch.arange(setting.own).unsqueeze(1) + setting.rank + setting.call
    step = 1 + setting.call % (experts - 1)
    return (first + step * torch.arange(SLOTS)) % experts


def example_counts(setting: Setting) -> Tensor:
    """Return the rows of all ranks, by rank and by expert of the group."""
    chosen = [example_choice(each).reshape(-1) for each in setting.everyone()]
    return torch.stack([each.bincount(minlength=EXPERTS * setting.size) for each in chosen])


def example_segments(setting: Setting) -> Tensor:
    return known_segments(example_counts(setting), setting.rank, EXPERTS)


def example_rows(setting: Setting) -> Tensor:
    """Return the rows that a rank's experts receive."""
    return setting.numbers(int(example_segments(setting)[..., 1].sum()), setting.width)


EXAMPLES: dict[str, Example] = {
    "input": example_rows,
    "weight": lambda setting: setting.numbers(EXPERTS, setting.width, setting.width),
    "bias": lambda setting: setting.numbers(EXPERTS, setting.width),
    "scales": constant(None),
    "topk_idx": example_choice,
    "topk_weights": lambda setting: setting.numbers(setting.own, SLOTS).float() / 2,
    "num_experts": lambda setting: EXPERTS * setting.size,
    "capacity": constant(0),
    "max_tokens": lambda setting: max(1, *setting.rows),
    "packed": constant(False),
    "segments": example_segments,
    "splits": lambda setting: example_segments(setting)[..., 1].flatten().tolist(),
    "home_splits": lambda setting: example_counts(setting)[setting.rank].tolist(),
}
