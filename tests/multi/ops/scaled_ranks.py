"""Ranks of the tests of fused ops on scaled operands.

A module of its own, because new processes import it.
"""

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
from interlace import functional
from interlace.functional import GroupSpec

FP8, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def of(rank: int, *shape: int, dtype: torch.dtype = FP8, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, other ones on each rank: sums of products of them are exact."""
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def scales(rank: int, *shape: int) -> torch.Tensor:
    """Powers of two, other ones on each rank."""
    return of(rank, *shape, dtype=torch.float32, seed=7).add(1).exp2()


def gathering(rank: int) -> list[Case]:
    w, w2 = of(9, 16, 5), of(9, 3, 16, dtype=WIDE).t()
    half, bias = torch.tensor(0.5), of(9, 5, dtype=torch.float32)
    two = [w, w2], [scales(9, 1, 5), torch.tensor(2.0)]
    full = {"out_dtype": torch.float32}
    x = of(rank, 2, 16)
    return [
        ("tensor-wise", (x, w, half, half), full),
        ("by row", (x, w, scales(rank, 2, 1), scales(9, 1, 5)), full),
        ("rows only", (x, w, scales(rank, 2, 1), half), full),
        ("columns only", (x, w, half, scales(9, 1, 5)), full),
        ("bias", (x, w, half, half), {**full, "bias": bias}),
        ("halves", (x, w, half, half), {}),
        ("two, 3-D", (of(rank, 3, 2, 16), two[0], scales(rank, 3, 2, 1), two[1], 1), full),
        ("strided", (of(rank, 16, 4).t(), w, scales(rank, 4, 1), half), {**full, "bias": bias}),
        ("no rows", (x[:0], w, scales(rank, 0, 1), scales(9, 1, 5)), {**full, "bias": bias}),
        ("one row", (x[:1], w, scales(rank, 1, 1), half), full),
        ("no rows", (x[:0], w, half, half), full),
    ]


def reducing(rank: int, size: int) -> list[Case]:
    n = 2 * size
    w = of(rank, 16, n, seed=1)
    half, bias = torch.tensor(0.5), of(9, n, dtype=torch.float32)
    full = {"out_dtype": torch.float32}
    x, x3 = of(rank, n, 16), of(rank, 3, n, 16)
    return [
        ("tensor-wise", (x, w, half * (rank + 1), half), full),
        ("by row", (x, w, scales(rank, n, 1), scales(rank, 1, n)), full),
        ("bias", (x, w, half, half), {**full, "bias": bias}),
        ("average", (x, w, half, half, "avg"), {**full, "bias": bias}),
        ("3-D", (x3, w, scales(rank, 3, n, 1), half, "sum", 1), full),
        ("columns", (x3, w, half, half, "sum", -1), {**full, "bias": bias}),
        ("halves", (x, w, half, half), {}),
    ]


def scaled(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return tensor.double() * scale.double()


def waited(made: Any) -> list[torch.Tensor]:
    return [functional.wait(each) for each in (made if isinstance(made, list) else [made])]


def expected_of_gathering(case: int, size: int) -> list[torch.Tensor]:
    """In float64, from all ranks' arguments."""
    calls = [gathering(rank)[case] for rank in range(size)]
    _, (_, weight, _, weight_scale, *rest), options = calls[0]
    dim = rest[0] if rest else 0
    whole = torch.cat([scaled(args[0], args[2]) for _, args, _ in calls], dim)
    weights = weight if isinstance(weight, list) else [weight]
    of_weights = weight_scale if isinstance(weight_scale, list) else [weight_scale]
    bias = options.get("bias", torch.zeros(()))
    return [whole @ scaled(w, s) + bias for w, s in zip(weights, of_weights, strict=True)]


def expected_of_reducing(case: int, size: int, rank: int) -> list[torch.Tensor]:
    calls = [reducing(other, size)[case] for other in range(size)]
    _, (_, _, _, _, *rest), options = calls[0]
    products = [scaled(x, a) @ scaled(w, b) for _, (x, w, a, b, *_), _ in calls]
    total = torch.stack(products).sum(0)
    if rest and rest[0] == "avg":
        total = total / size
    total = total + options.get("bias", torch.zeros(()))
    return [total.chunk(size, rest[1] if len(rest) > 1 else 0)[rank]]


def wrong(got: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> list[str]:
    found = []
    for mine, right in zip(got, expected, strict=True):
        if mine.dtype != dtype or mine.shape != right.shape:
            found.append(f"{mine.dtype} {tuple(mine.shape)} for {dtype} {tuple(right.shape)}")
            continue
        # fp32 is exact but for a division by 3; bfloat16 rounds each product, and then their sum
        if not right.numel():
            continue
        tolerance = 2 ** (-22 if dtype == torch.float32 else -6) * float(right.abs().max())
        if float((mine.double() - right).abs().max()) > tolerance:
            found.append(f"{mine} instead of {right}")
    return found


def results(traced: bool) -> dict[str, list[str]]:
    """By case, what is wrong: eagerly, and ``traced`` by ``make_fx`` with fake tensors."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    found = {}
    spec = GroupSpec("everyone", size)
    spec.bind(None)
    for op, cases, expect in (
        (functional.all_gather_scaled_matmul, gathering(rank), expected_of_gathering),
        (
            functional.scaled_matmul_reduce_scatter,
            reducing(rank, size),
            lambda case, size: expected_of_reducing(case, size, rank),
        ),
    ):
        for number, (title, args, options) in enumerate(cases):
            right = expect(number, size)
            dtype = options.get("out_dtype", torch.bfloat16)
            eager = waited(op(*args, **options))
            title = f"{op.__name__} {title}"
            found[title] = wrong(eager, right, dtype)

            if not traced:
                continue
            plain = {key: value for key, value in options.items() if key != "bias"}

            def called(
                bias: Any, *args: Any, op: Any = op, plain: dict[str, Any] = plain
            ) -> list[torch.Tensor]:
                return waited(op(*args, **plain, bias=bias, group=spec))

            inputs = (options.get("bias"), *args)
            graph = make_fx(called, tracing_mode="fake")(*inputs)
            found[f"{title}, traced"] = wrong(graph(*inputs), right, dtype)
            for mine, node in zip(eager, graph.graph.output_node().args[0], strict=True):
                if mine.stride() != node.meta["val"].stride():
                    found[title].append(f"strides {mine.stride()}, {node.meta['val'].stride()}")
    return found


def compiled() -> list[bool]:
    """Both, one behind the other, under ``torch.compile``; the gathered input too."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    half, w, w2 = torch.tensor(0.5), of(9, 16, 4 * size), of(rank, 4 * size, 6)

    def layers(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole, h = functional.all_gather_scaled_matmul(x, w, s, half, return_gathered=True)
        h = (h / 64).to(FP8)
        y = functional.scaled_matmul_reduce_scatter(h, w2, half, half, out_dtype=torch.float32)
        return whole.float() * 1, y + 0

    args = of(rank, 4, 16), scales(rank, 4, 1)
    made = torch.compile(layers, backend="aot_eager", fullgraph=True)(*args)
    return [torch.equal(a, b) for a, b in zip(made, layers(*args), strict=True)]


def refused() -> list[str]:
    """Misuse on rank 0 alone, which all ranks get to know."""
    alone = interlace.get_rank() == 0
    x, w, one = of(0, 2, 16), of(0, 16, 6), torch.tensor(1.0)
    gather: Any = functional.all_gather_scaled_matmul
    reduce: Any = functional.scaled_matmul_reduce_scatter
    said = []
    for call, right, bad in (
        (gather, (x, w, one, one), (x.float(), w, one, one)),
        (gather, (x, w, one, one), (x, w, torch.ones(3, 1), one)),
        (gather, (x, w, one, one), (x, w, one, torch.ones(6))),
        (gather, (x, w, one, one), (x, w, one, one, 1)),
        (gather, (x, w, one, one), (x, w, torch.ones(2, 1), one)),
        (reduce, (x, w, one, one), (x, w, one.double(), one)),
        (reduce, (x, w, one, one), (x, w, one, one, "max")),
    ):
        try:
            said.append(f"no error: {waited(call(*(bad if alone else right)))}")
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
