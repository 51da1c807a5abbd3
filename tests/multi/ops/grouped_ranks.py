"""Ranks of test_grouped_matmul.py. A module of its own, because new processes import it."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace import functional

INNER, COLUMNS = 24, 19
GATHER, EXCHANGE = "all_gather_grouped_matmul", "all_to_all_grouped_matmul"


def experts_of(op: str, experts: int, world_size: int) -> int:
    """How many experts the group has if a rank's weight holds ``experts``."""
    return experts * world_size if op == EXCHANGE else experts


def splits(op: str, experts: int, rank: int, world_size: int, *, equal: bool = False) -> list[int]:
    """Uneven, with zeros. ``equal``: the same number of rows on every rank."""
    sizes = [
        (5 * rank + 7 * e * e) % 23 * (e % 3 > 0)
        for e in range(experts_of(op, experts, world_size))
    ]
    if equal:
        sizes = [(rank + e) % 4 for e in range(len(sizes))]
        sizes[rank % len(sizes)] += 40 - sum(sizes)
    return sizes


def rows(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(count, INNER, generator=generator).to(dtype)


def weights(op: str, experts: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Stacked as ``nn.Linear`` has them, read in place. Gathered rows meet another slice on every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(experts, COLUMNS, INNER, generator=generator).to(dtype).transpose(1, 2)


def order(
    op: str, sizes: list[list[int]], experts: int, rank: int
) -> list[tuple[int, int, int, int]]:
    """(expert of the rank, source, first row of the source, rows), as the result has them."""
    base = rank * experts if op == EXCHANGE else 0
    return [
        (e, source, sum(each[: base + e]), each[base + e])
        for e in range(experts)
        for source, each in enumerate(sizes)
    ]


def reference(
    op: str, xs: list[torch.Tensor], weight: torch.Tensor, sizes: list[list[int]], rank: int
) -> torch.Tensor:
    """What the op returns on ``rank``, with gradients, by plain torch."""
    return torch.cat(
        [
            xs[source][first : first + count] @ weight[e]
            for e, source, first, count in order(op, sizes, weight.shape[0], rank)
        ]
    )


def moved(op: str, xs: list[torch.Tensor], sizes: list[list[int]], experts: int, rank: int) -> Any:
    """The rows that ``rank`` multiplies."""
    lines = order(op, sizes, experts, rank)
    return torch.cat([xs[source][first : first + count] for _, source, first, count in lines])


def results(op: str) -> list[str]:
    """What is wrong on this rank, by every algorithm."""
    wrong = []
    for algorithm, dtype in (
        ("auto", torch.float16),
        ("fused", torch.bfloat16),
        ("pipelined", torch.float32),
        ("unfused", torch.float32),
    ):
        found = two_calls(op, algorithm, dtype, algorithm == "pipelined")
        wrong += [f"{algorithm}: {what}" for what in found]
    return wrong


def two_calls(op: str, algorithm: str, dtype: torch.dtype, async_op: bool) -> list[str]:
    """Of other numbers of experts."""
    rank, world_size, experts = interlace.get_rank(), interlace.get_world_size(), 2
    wrong = []
    for call in range(2):
        sizes = [splits(op, experts + call, r, world_size) for r in range(world_size)]
        xs = [rows(r, sum(each), dtype) for r, each in enumerate(sizes)]
        weight = weights(op, experts + call, rank, dtype)
        made = getattr(interlace, op)(
            xs[rank],
            weight,
            torch.tensor(sizes[rank]) if call else sizes[rank],
            algorithm=algorithm,
            async_op=async_op,
            return_received=True,
        )
        received, output, counts = made.wait() if async_op else made
        expected = [count for *_, count in order(op, sizes, experts + call, rank)]
        if counts.flatten().tolist() != expected or counts.shape != (experts + call, world_size):
            wrong.append(f"splits of call {call}: {counts.tolist()}")
        if not torch.equal(received, moved(op, xs, sizes, experts + call, rank)):
            wrong.append(f"received rows of call {call}")
        exact = reference(op, [x.double() for x in xs], weight.double(), sizes, rank)
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        if output.dtype != dtype or (output.double() - exact).abs().max() > bound * 24:
            wrong.append(f"output of call {call}")
    return wrong


def like_torch() -> list[str]:
    """``all_to_all_single``, rows sorted by expert, ``torch.mm`` by expert; and the way back."""
    rank, world_size, experts = interlace.get_rank(), interlace.get_world_size(), 2
    topk, tokens = 2, rows(rank, 9, torch.float32)
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.stack(
        [torch.randperm(world_size * experts, generator=generator)[:topk] for _ in tokens]
    )
    permutation = chosen.flatten().argsort(stable=True)
    x = tokens[permutation // topk]
    sent = torch.bincount(chosen.flatten(), minlength=world_size * experts)
    weight = weights(EXCHANGE, experts, rank, torch.float32)
    output, counts = interlace.all_to_all_grouped_matmul(x, weight, sent, algorithm="pipelined")

    per_source = counts.sum(0).tolist()
    per_rank = sent.view(world_size, experts).sum(1).tolist()
    arrived = torch.empty(sum(per_source), INNER)
    interlace.all_to_all_single(arrived, x, per_source, per_rank)
    parts = arrived.split(counts.t().flatten().tolist())
    by_expert = [torch.cat(parts[e::experts]) for e in range(experts)]
    expected = torch.cat([torch.mm(part, weight[e]) for e, part in enumerate(by_expert)])
    wrong = [] if torch.allclose(output, expected, atol=1e-5) else ["output"]

    parts = output.split(counts.flatten().tolist())
    by_source = torch.cat([part for s in range(world_size) for part in parts[s::world_size]])
    home = torch.empty(x.shape[0], COLUMNS)
    interlace.all_to_all_single(home, by_source, per_rank, per_source)
    everyone = [torch.empty(experts, INNER, COLUMNS) for _ in range(world_size)]
    interlace.all_gather(everyone, weight.contiguous())
    experts_of_rows = chosen.flatten()[permutation]
    exact = torch.stack(
        [row @ torch.cat(everyone)[e] for row, e in zip(x, experts_of_rows, strict=True)]
    )
    return wrong + ([] if torch.allclose(home, exact, atol=1e-5) else ["way back"])


def gradients(op: str) -> list[str]:
    """What is wrong on this rank, in every way to call."""
    hows = ("eager", "functional", "compiled")
    return [f"{how}: {what}" for how in hows for what in _gradients(op, how)]


def _gradients(op: str, how: str) -> list[str]:
    """Against autograd of all ranks' computation in one process."""
    rank, world_size, experts = interlace.get_rank(), interlace.get_world_size(), 2
    sizes = [splits(op, experts, r, world_size, equal=op == GATHER) for r in range(world_size)]
    xs = [rows(r, sum(each), torch.float64).requires_grad_() for r, each in enumerate(sizes)]
    ws = [
        weights(op, experts, r, torch.float64).detach().requires_grad_() for r in range(world_size)
    ]
    bias = torch.ones(experts, COLUMNS, dtype=torch.float64).requires_grad_()
    x, w = (each.detach().clone().requires_grad_() for each in (xs[rank], ws[rank]))
    expected = [count for *_, count in order(op, sizes, experts, rank)]
    run: Callable[..., Any] = getattr(functional, op)
    if how == "eager":
        output = getattr(interlace, op)(x, w, sizes[rank], bias=bias, activation="silu")[0]
    elif how == "functional":
        made = run(x, w, sizes[rank], expected, bias=bias)
        output = torch.nn.functional.silu(made)
    else:
        layer = torch.compile(
            lambda x, w: torch.nn.functional.silu(run(x, w, sizes[rank], expected, bias=bias)),
            fullgraph=True,
            backend="aot_eager",
        )
        output = layer(x, w)
    (output * output).sum().backward()
    total = torch.zeros((), dtype=torch.float64)
    for r in range(world_size):
        z = torch.nn.functional.silu(reference(op, xs, ws[r], sizes, r) + 1)
        total = total + (z * z).sum()
        if r == rank and not torch.allclose(output, z):
            return ["output"]
    total.backward()
    found = {"input": (x.grad, xs[rank].grad), "weight": (w.grad, ws[rank].grad)}
    wrong = [
        name for name, (mine, exact) in found.items()
        if mine is None or exact is None or not torch.allclose(mine, exact)
    ]  # fmt: skip
    if bias.grad is None or not bias.grad.any():
        wrong.append("bias")
    return wrong


def refused() -> list[str]:
    """The messages of calls that do not fit together, on this rank."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    x, w = torch.ones(4, 8), torch.ones(1, 8, 3)
    even = [4 // world_size] * world_size
    first = rank == 0

    calls: list[Callable[[], Any]] = [
        lambda: interlace.all_to_all_grouped_matmul(x, w, [5, -1] if first else [2, 2]),
        lambda: interlace.all_to_all_grouped_matmul(x, w, [2, 1] if first else [2, 2]),
        lambda: interlace.all_to_all_grouped_matmul(x, w, [2, 1, 1] if first else [2, 2]),
        lambda: interlace.all_to_all_grouped_matmul(x, w, [1] * 4 if first else [2, 2]),
        lambda: interlace.all_to_all_grouped_matmul(x, w, even, [2, 2] if first else [2, 1]),
        lambda: interlace.all_to_all_grouped_matmul(x, w, even, [2, 2, 2] if first else None),
        lambda: interlace.all_to_all_grouped_matmul(x, w[:, :7] if first else w, even),
        lambda: interlace.all_to_all_grouped_matmul(x, w[0] if first else w, even),
        lambda: interlace.all_to_all_grouped_matmul(
            x, w, even, algorithm="fused" if first else "unfused"
        ),
        lambda: interlace.all_to_all_grouped_matmul(
            x, w, torch.tensor([2.0, 2.0]) if first else even
        ),
        lambda: interlace.all_gather_grouped_matmul(x, w, [4] if first else [3]),
        lambda: interlace.all_gather_grouped_matmul(
            x, w, [4], bias=torch.ones(3) if first else None
        ),
        lambda: interlace.all_gather_grouped_matmul(
            x, w if first else torch.ones(2, 8, 3), [4] if first else [2, 2]
        ),
        lambda: interlace.all_gather_grouped_matmul(
            x.bfloat16() if first else x, w.bfloat16() if first else w, [4]
        ),
        lambda: interlace.all_to_all_grouped_matmul(x, w.clone().requires_grad_(first), even),
        lambda: interlace.all_gather_grouped_matmul(x.clone().requires_grad_(not first), w, [4]),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    output, _ = interlace.all_to_all_grouped_matmul(x, w, even)  # the group goes on
    return [*said, str(output.sum().item())]


def in_a_subgroup() -> list[float]:
    """The two upper ranks alone."""
    group = interlace.new_group([1, 2])
    if interlace.get_rank() == 0:
        return []
    rank = interlace.get_rank()
    output, _ = interlace.all_to_all_grouped_matmul(
        torch.full((3, 2), float(rank)), torch.ones(1, 2, 1), [1, 2], group=group
    )
    return output.flatten().tolist()


def faked() -> list[tuple[int, ...]]:
    """Shapes on fake tensors, from a group that is only a name."""
    spec = interlace.GroupSpec("pretended", 4)
    with FakeTensorMode():
        x, w = torch.empty(6, 8), torch.empty(2, 8, 3)
        y = functional.all_to_all_grouped_matmul(
            x, w, [1, 2, 0, 0, 0, 3, 0, 0], [1] * 8, group=spec
        )
        z = functional.all_gather_grouped_matmul(x, w, [2, 4], [3] * 8, group=spec)
        return [tuple(y.shape), tuple(z.shape)]
