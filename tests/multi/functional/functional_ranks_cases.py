"""Every functional op as a call on one rank's inputs, and as what single-process torch makes of all ranks'.

``reference`` takes the inputs of all ranks and gives the outputs of all: its gradients are those that the
ranks must get. Modules of their own are imported by new processes.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import interlace
from interlace import functional
from interlace.groups.specs import describe
from interlace.reference import split

Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """``inputs`` are made for a rank and a world size; ``call`` gives a tensor or several."""

    name: str
    inputs: Callable[[int, int], Tensors]
    call: Callable[..., Any]
    reference: Callable[[list[Tensors]], list[Any]]


def numbers(rank: int, *shape: int, seed: int = 0, dtype: Any = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def integers(rank: int, *shape: int) -> torch.Tensor:
    """Small ones with ties between ranks and zeros, for max, min and product."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1, 3, shape, generator=generator).double()


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}


def reduced(op: str, xs: list[Tensors]) -> torch.Tensor:
    return REDUCTIONS[op](torch.stack([x[0] for x in xs]))


def catted(xs: list[Tensors], dim: int) -> torch.Tensor:
    return torch.cat([x[0] for x in xs], dim)


def _reductions() -> list[Case]:
    found = []
    for op in REDUCTIONS:
        found.append(
            Case(
                f"all_reduce {op}",
                lambda rank, size: [integers(rank, 3, 4)],
                lambda group, x, op=op: functional.all_reduce(x, op, group=group),
                lambda xs, op=op: [reduced(op, xs)] * len(xs),
            )
        )
    for op in REDUCTIONS:
        for dim in (0, 1, -1):
            found.append(
                Case(
                    f"reduce_scatter {op} {dim}",
                    lambda rank, size: [integers(rank, 2 * size, size, 3 * size)],
                    lambda group, x, op=op, dim=dim: functional.reduce_scatter(
                        x, op, dim, group=group
                    ),
                    lambda xs, op=op, dim=dim: split(reduced(op, xs), len(xs), dim),
                )
            )
    for op in ("sum", "avg"):
        found.append(
            Case(
                f"reduce {op}",
                lambda rank, size: [numbers(rank, 3, 4)],
                lambda group, x, op=op: functional.reduce(x, op, 1, group=group),
                lambda xs, op=op: [
                    reduced(op, xs) if rank == 1 else xs[rank][0] * 0 for rank in range(len(xs))
                ],
            )
        )
    return found


def _uneven(rank: int, size: int) -> list[int]:
    """How many rows ``rank`` sends to each."""
    return [(rank + 2 * other) % 3 for other in range(size)]


def _exchanged(xs: list[Tensors]) -> Tensors:
    size = len(xs)
    parts = [x[0].split(_uneven(rank, size)) for rank, x in enumerate(xs)]
    return [torch.cat([parts[other][rank] for other in range(size)]) for rank in range(size)]


def _uneven_call(group: Any, x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    received = [_uneven(other, size)[rank] for other in range(size)]
    return functional.all_to_all(x, received, _uneven(rank, size), group=group)


def _moves() -> list[Case]:
    found = [
        Case(
            f"all_gather {dim}",
            lambda rank, size: [numbers(rank, 2, 3, 4)],
            lambda group, x, dim=dim: functional.all_gather(x, dim, group=group),
            lambda xs, dim=dim: [catted(xs, dim)] * len(xs),
        )
        for dim in (0, 1, -1)
    ]
    found += [
        Case(
            f"gather {dim}",
            lambda rank, size: [numbers(rank, 2, 3)],
            lambda group, x, dim=dim: functional.gather(x, 1, dim, group=group),
            lambda xs, dim=dim: [catted(xs, dim) * float(rank == 1) for rank in range(len(xs))],
        )
        for dim in (0, -1)
    ]
    found += [
        Case(
            f"scatter {dim}",
            lambda rank, size: [numbers(rank, 2 * size, 3 * size)],
            lambda group, x, dim=dim: functional.scatter(x, 1, dim, group=group),
            lambda xs, dim=dim: split(xs[1][0], len(xs), dim),
        )
        for dim in (0, 1)
    ]
    return [
        *found,
        Case(
            "all_gather 0-dim",
            lambda rank, size: [numbers(rank)],
            lambda group, x: functional.all_gather(x, group=group),
            lambda xs: [torch.stack([x[0] for x in xs])] * len(xs),
        ),
        Case(
            "gather 0-dim",
            lambda rank, size: [numbers(rank)],
            lambda group, x: functional.gather(x, 0, group=group),
            lambda xs: [
                torch.stack([x[0] for x in xs]) * float(rank == 0) for rank in range(len(xs))
            ],
        ),
        Case(
            "all_reduce 0-dim",
            lambda rank, size: [numbers(rank)],
            lambda group, x: functional.all_reduce(x, group=group),
            lambda xs: [reduced("sum", xs)] * len(xs),
        ),
        Case(
            "all_to_all",
            lambda rank, size: [numbers(rank, 2 * size, 3)],
            lambda group, x: functional.all_to_all(x, group=group),
            lambda xs: [
                torch.cat([x[0].chunk(len(xs))[rank] for x in xs]) for rank in range(len(xs))
            ],
        ),
        Case(
            "broadcast",
            lambda rank, size: [numbers(rank, 3, 2)],
            lambda group, x: functional.broadcast(x, 1, group=group),
            lambda xs: [xs[1][0]] * len(xs),
        ),
        Case(
            "permute",
            lambda rank, size: [numbers(rank, 3, 2)],
            lambda group, x: functional.permute(x, shifted(group), group=group),
            lambda xs: [xs[(rank - 1) % len(xs)][0] for rank in range(len(xs))],
        ),
    ]


def shifted(group: Any) -> list[int]:
    """Every rank to the next."""
    size = describe(group)[1]
    return [(rank + 1) % size for rank in range(size)]


def _gather_matmuls() -> list[Case]:
    found = []
    for dim in (0, 1, -1):

        def inputs(rank: int, size: int, dim: int = dim) -> Tensors:
            k = 4 * size if dim == -1 else 4
            return [numbers(rank, 2, 3, 4), numbers(rank, k, 5, seed=1), numbers(rank, 5, seed=2)]

        found.append(
            Case(
                f"all_gather_matmul {dim}",
                inputs,
                lambda group, x, w, b, dim=dim: functional.all_gather_matmul(
                    x, w, dim, bias=b, group=group
                ),
                lambda xs, dim=dim: [catted(xs, dim) @ w + b for _, w, b in xs],
            )
        )
        for save in (False, True):
            found.append(
                Case(
                    f"all_gather_matmul {dim} save_gathered={save}, no bias",
                    lambda rank, size, inputs=inputs: inputs(rank, size)[:2],
                    lambda group, x, w, dim=dim, save=save: functional.all_gather_matmul(
                        x, w, dim, save_gathered=save, group=group
                    ),
                    lambda xs, dim=dim: [catted(xs, dim) @ w for _, w in xs],
                )
            )
        found.append(
            Case(
                f"all_gather_matmul {dim} several",
                lambda rank, size, inputs=inputs: [
                    *inputs(rank, size),
                    numbers(rank, 4 * size if inputs(rank, size)[1].shape[0] > 4 else 4, 2, seed=3),
                ],
                lambda group, x, w, b, v, dim=dim: functional.all_gather_matmul(
                    x, [w, v], dim, bias=[b, None], return_gathered=True, group=group
                ),
                lambda xs, dim=dim: [
                    (catted(xs, dim), [catted(xs, dim) @ w + b, catted(xs, dim) @ v])
                    for _, w, b, v in xs
                ],
            )
        )
    return found


def _matmul_reduces() -> list[Case]:
    found = []
    for op in ("sum", "avg"):
        for dim in (0, 1, -1):

            def summed(xs: list[Tensors], op: str = op, dim: int = dim) -> Tensors:
                whole = REDUCTIONS[op](torch.stack([x @ w for x, w, _ in xs]))
                parts = split(whole, len(xs), dim)
                biases = [x[2] for x in xs]
                if dim == -1:
                    biases = [split(b, len(xs))[rank] for rank, b in enumerate(biases)]
                return [part + b for part, b in zip(parts, biases, strict=True)]

            for less in (0, 1):  # one less, and nobody's part is whole, or the last rank has none
                found.append(
                    Case(
                        f"matmul_reduce_scatter {op} {dim}{' uneven' * less}",
                        lambda rank, size, less=less: [
                            numbers(rank, 2 * size - less, size - less, 3),
                            numbers(rank, 3, 2 * size - less, seed=1),
                            numbers(rank, 2 * size - less, seed=2),
                        ],
                        lambda group, x, w, b, op=op, dim=dim: functional.matmul_reduce_scatter(
                            x, w, op, dim, bias=b, group=group
                        ),
                        summed,
                    )
                )
        found.append(
            Case(
                f"matmul_all_reduce {op}",
                lambda rank, size: [
                    numbers(rank, 2, 3, 4),
                    numbers(rank, 4, 5, seed=1),
                    numbers(0, 5, seed=2),  # the same everywhere
                ],
                lambda group, x, w, b, op=op: functional.matmul_all_reduce(
                    x, w, op, bias=b, group=group
                ),
                lambda xs, op=op: [
                    REDUCTIONS[op](torch.stack([x @ w for x, w, _ in xs])) + b for _, _, b in xs
                ],
            )
        )
    return found


def _normed() -> list[Case]:
    """Reductions whose rows are normed, of x, a matmul's weight, a residual, a norm's weight and bias."""

    def norm_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return (
            interlace.RMSNorm(weight, 0.1)
            if bias is None
            else interlace.LayerNorm(weight, bias, 0.1)
        )

    def normed(h: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
        if len(vectors) == 1:
            return torch.nn.functional.rms_norm(h, h.shape[-1:], *vectors, 0.1)
        return torch.nn.functional.layer_norm(h, h.shape[-1:], *vectors, 0.1)

    def whole(xs: list[Tensors], dim: int) -> list[Any]:
        parts = split(torch.stack([x[0] @ x[1] for x in xs]).mean(0), len(xs), dim)
        sums = [part + x[2] for part, x in zip(parts, xs, strict=True)]
        return [[normed(h, *x[3:]), h] for h, x in zip(sums, xs, strict=True)]

    def gathered(xs: list[Tensors], dim: int) -> list[Any]:
        made = whole(xs, dim)
        return [[torch.cat([y for y, _ in made], dim), h] for _, h in made]

    def vectors(rank: int, kind: str) -> Tensors:
        return [numbers(rank, 5, seed=3), numbers(rank, 5, seed=4)][: 2 if kind == "layer" else 1]

    def residual(rank: int, size: int, rows: int, dim: int) -> torch.Tensor:
        own = len(split(torch.empty(rows), size)[rank])
        return numbers(rank, *(2, own)[:: -1 if dim == 0 else 1], 5, seed=2)

    found = []
    for kind, gather, less in itertools.product(("rms", "layer"), (False, True), (0, 1)):
        dim = int(gather)
        found.append(
                Case(
                    f"matmul_reduce_scatter_norm {kind} {'gathered' if gather else 'own'}"
                    + " uneven" * less,
                    lambda rank, size, kind=kind, dim=dim, less=less: [
                        numbers(rank, *(2, 2 * size - less)[:: -1 if dim == 0 else 1], 4),
                        numbers(rank, 4, 5, seed=1),
                        residual(rank, size, 2 * size - less, dim),
                        *vectors(rank, kind),
                    ],
                    lambda group, x, w, h, *v, dim=dim, gather=gather: (
                        functional.matmul_reduce_scatter(
                            x, w, "avg", dim, residual=h, norm=norm_of(*v), gather_normed=gather,
                            group=group,
                        )
                    ),
                    lambda xs, dim=dim, gather=gather: (gathered if gather else whole)(xs, dim),
                )
            )  # fmt: skip
    for op in ("matmul_all_reduce", "all_reduce_norm"):
        product = op.startswith("matmul")
        found.append(
            Case(
                f"{op} normed",
                lambda rank, size, product=product: [
                    numbers(rank, 2, 3, 4 if product else 5),
                    *([numbers(rank, 4, 5, seed=1)] if product else []),
                    numbers(0, 2, 3, 5, seed=2),  # these are the same everywhere
                    numbers(0, 5, seed=3),
                    numbers(0, 5, seed=4),
                ],
                lambda group, x, *rest, op=op: getattr(functional, op)(
                    x, *rest[:-3], residual=rest[-3], norm=norm_of(*rest[-2:]), group=group
                ),
                lambda xs, product=product: [
                    [normed(h, *own[-2:]), h]
                    for total in [sum(x[0] @ x[1] if product else x[0] for x in xs)]
                    for own in xs
                    for h in [total + own[-3]]
                ],
            )
        )
    found += [
        Case(
            f"reduce_scatter_norm of {rows} rows",
            lambda rank, size, rows=rows: [numbers(rank, rows, 5), numbers(rank, 5, seed=1)],
            lambda group, x, w: functional.reduce_scatter_norm(
                x, norm=norm_of(w), gather_normed=True, group=group
            ),
            lambda xs: [
                [torch.cat([normed(h, x[1]) for h, x in zip(parts, xs, strict=True)]), parts[rank]]
                for rank in range(len(xs))
                for parts in [split(reduced("sum", xs), len(xs), 0)]
            ],
        )
        for rows in (1, 6)
    ]
    return found


CASES = {
    case.name: case
    for case in (
        *_reductions(), *_moves(), *_gather_matmuls(), *_matmul_reduces(), *_normed(),
    )
}  # fmt: skip


def flat(result: Any) -> Tensors:
    """All tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for each in result for tensor in flat(each)]


def expected(
    case: Case, rank: int, size: int, wanted: Callable[[int], bool] = lambda index: True
) -> tuple[Tensors, list[torch.Tensor | None], Tensors]:
    """Outputs of ``rank``, the gradients of its inputs, and the output gradients that give them."""
    xs = [
        [each.requires_grad_(wanted(i)) for i, each in enumerate(case.inputs(r, size))]
        for r in range(size)
    ]
    outputs = [flat(result) for result in case.reference(xs)]
    weights = [cotangents(outs, r) for r, outs in enumerate(outputs)]
    loss = sum(
        (out * weight).sum()
        for outs, ws in zip(outputs, weights, strict=True)
        for out, weight in zip(outs, ws, strict=True)
    )
    assert isinstance(loss, torch.Tensor)
    leaves = [each for x in xs for each in x if each.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    by_leaf = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}
    own = [by_leaf.get(id(each)) for each in xs[rank]]
    return [out.detach() for out in outputs[rank]], own, weights[rank]


def cotangents(outputs: Tensors, rank: int) -> Tensors:
    return [numbers(rank, *out.shape, seed=7 + i) for i, out in enumerate(outputs)]
