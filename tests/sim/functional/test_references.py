"""``Op.reference``, of which LocalTensors are made, and ``interlace.reference``, which has other formulas.

What is common to both is the activation alone, which is torch's. So each says whether the other is right.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from interlace import reference
from interlace.ops.library import BY_NAME
from interlace.reference import Bounded
from interlace.runtime.numerics.norms import RowNorm
from ops import contracts
from ops.contracts import EXPERTS, SLOTS, WIDTH, Routes, Setting

SIZE, ROWS, INNER, COLUMNS = 3, 6, 10, 9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
OUTPUT = torch.bfloat16  # of fp8
Given = Sequence[dict[str, Any]]


class Compared(NamedTuple):
    """``arguments`` of a rank besides the group, without any those of the contract matrix; ``right`` the
    first of all ranks' results."""

    op: str
    arguments: dict[str, Any]
    right: Callable[[Given, torch.dtype], list[Bounded]]


def noise(*shape: int) -> Callable[[int, torch.dtype], torch.Tensor]:
    """A tensor that is another on every rank."""

    def made(rank: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank + sum(shape))
        return torch.randn(*shape, generator=generator).to(dtype)

    return made


def same(*shape: int) -> Callable[[int, torch.dtype], torch.Tensor]:
    return lambda rank, dtype: noise(*shape)(0, dtype)


def of_all(every: Given, name: str) -> list[Any]:
    return [each[name] for each in every]


def on_all(whole: Bounded) -> list[Bounded]:
    return [whole] * SIZE


def shared(whole: Bounded, dim: int = 0) -> list[Bounded]:
    parts = (reference.split(each, SIZE, dim) for each in whole)
    return list(zip(*parts, strict=True))


def moved(tensors: Sequence[torch.Tensor]) -> list[Bounded]:
    return [(each.double(), torch.zeros_like(each).double()) for each in tensors]


def gathered(every: Given, dtype: torch.dtype) -> list[Bounded]:
    shards, first = of_all(every, "input"), every[0]
    return [
        reference.all_gather_matmul(
            shards,
            each["weights"][0],
            dtype,
            first["gather_dim"],
            bias=each["biases"][0],
            roundings=2,
        )
        for each in every
    ]


def reduced(every: Given, dtype: torch.dtype) -> Bounded:
    """Of products or of rows that are there; a residual is added before the sum is rounded."""
    inputs, first = of_all(every, "input"), every[0]
    if "weight" not in first:
        return reference.reduce(inputs, first["reduce_op"])
    weights = of_all(every, "weight")
    return reference.matmul_all_reduce(inputs, weights, dtype, first["bias"], first["reduce_op"])


def normed(every: Given, dtype: torch.dtype) -> list[Bounded]:
    """Of the sums as they are rounded, so that bounds are those of a norm of them."""
    first, scatters = every[0], "scatter_dim" in every[0]
    sums = [each[1] for each in own_results(BY_NAME[first["op"]], every)]
    right = shared(reduced(every, dtype)) if scatters else on_all(reduced(every, dtype))
    for total, expected, each in zip(sums, right, every, strict=True):
        value, bound = reference.with_residual(expected, each["residual"], dtype)
        assert reference.worst_ratio(total, value, bound) <= 1
    kind = RowNorm(first["kind"], first["eps"], first["norm_weight"], first["norm_bias"])
    found = [reference.norm(total, kind, dtype) for total in sums]
    if first.get("gather_normed"):
        return on_all((torch.cat([v for v, _ in found]), torch.cat([b for _, b in found])))
    return found


def scaled(every: Given, dtype: torch.dtype) -> list[Bounded]:
    gathers = "weights" in every[0]
    products = [
        reference.scaled_matmul(
            each["input"],
            each["weights"][0] if gathers else each["weight"],
            each["input_scale"],
            each["weight_scales"][0] if gathers else each["weight_scale"],
        )
        for each in every
    ]
    if gathers:
        whole = tuple(torch.cat(each) for each in zip(*products, strict=True))
        return on_all((whole[0], reference.rounded(whole[1], whole[0], OUTPUT)))
    unit = reference.unit_roundoff(torch.float32)
    value, bound = reference.sum_of_rounded(products, OUTPUT, unit)
    return shared((value, reference.rounded(bound, value, OUTPUT)))


def multiplied_by_experts(every: Given, dtype: torch.dtype) -> list[Bounded]:
    """Of rows that are by expert, and then by source."""
    sent = [each["input"].split(each["input_splits"]) for each in every]
    found = []
    for rank, each in enumerate(every):
        first = rank * EXPERTS if each["op"] == "all_to_all_grouped_matmul" else 0
        products = [
            reference.matmul(
                torch.cat([parts[first + expert] for parts in sent]),
                each["weight"][expert],
                dtype,
                bias=each["bias"][expert],
                roundings=2,
            )
            for expert in range(EXPERTS)
        ]
        found.append(behind(products))
    return found


def behind(parts: Sequence[Bounded], dim: int = 0) -> Bounded:
    values, bounds = zip(*parts, strict=True)
    return torch.cat(values, dim), torch.cat(bounds, dim)


def given_to_heads(every: Given, dtype: torch.dtype) -> list[Bounded]:
    products = [
        shared(
            reference.matmul(each["input"], each["weight"], dtype, bias=each["bias"], roundings=2),
            1,
        )
        for each in every
    ]
    return [behind(parts) for parts in zip(*products, strict=True)]


def taken_from_heads(every: Given, dtype: torch.dtype) -> list[Bounded]:
    sent = [each["input"].chunk(SIZE) for each in every]
    return [
        reference.matmul(
            torch.cat([parts[rank] for parts in sent], 1),
            each["weight"],
            dtype,
            bias=each["bias"],
            roundings=2,
        )
        for rank, each in enumerate(every)
    ]


def dispatched(every: Given, dtype: torch.dtype) -> list[Bounded]:
    known, found = Routes(of_all(every, "topk_idx")), []
    for rank, each in enumerate(every):
        arriving = known.arriving(rank)
        rows = torch.cat([every[s]["input"][slots // SLOTS] for s, slots in arriving])
        bound = each["max_tokens"] * SLOTS * SIZE
        found.append(torch.nn.functional.pad(rows, (0, 0, 0, bound - len(rows))))
    return moved(found)


def combined(every: Given, dtype: torch.dtype) -> list[Bounded]:
    """Rows of experts, or their products, of each token."""
    known = Routes(of_all(every, "topk_idx"))
    home = [
        (torch.zeros(len(chosen), WIDTH).double(), torch.zeros(len(chosen), WIDTH).double())
        for chosen in known.chosen
    ]
    for rank, each in enumerate(every):
        parts = each["input"].split(known.splits(rank))
        for number, ((source, slots), rows) in enumerate(
            zip(known.arriving(rank), parts, strict=True)
        ):
            made = moved([rows])[0]
            if "weight" in each:
                weight, bias = each["weight"][number // SIZE], each["bias"][number // SIZE]
                made = reference.matmul(rows, weight, dtype, bias=bias, roundings=2)
            for to, part in zip(home[source], made, strict=True):
                to[slots] = part
    return [
        reference.combine(
            (value.view(-1, SLOTS, WIDTH), bound.view(-1, SLOTS, WIDTH)),
            each["topk_weights"],
            dtype,
        )
        for (value, bound), each in zip(home, every, strict=True)
    ]


ROWS_OF = {"input": noise(ROWS, COLUMNS), "reduce_op": "sum"}
PRODUCT = {"input": noise(ROWS, INNER), "weight": noise(INNER, COLUMNS), "bias": None}
HOW = {"algorithm": "auto", "out_dtype": None}
NORM = {
    "residual": same(ROWS, COLUMNS),
    "norm_weight": same(COLUMNS),
    "norm_bias": None,
    "kind": "rms",
    "eps": 1e-5,
    "quantize": "",
}
LAYER = {"norm_bias": same(COLUMNS), "kind": "layer"}
OWN = {
    "residual": same(ROWS // SIZE, COLUMNS),
    "scatter_dim": 0,
    "length": None,
    "gather_normed": False,
}
CASES = (
    Compared("all_reduce", ROWS_OF, lambda every, dtype: on_all(reduced(every, dtype))),
    Compared(
        "all_reduce",
        ROWS_OF | {"reduce_op": "avg"},
        lambda every, dtype: on_all(reduced(every, dtype)),
    ),
    Compared(
        "reduce_scatter",
        ROWS_OF | {"scatter_dim": 1},
        lambda every, dtype: shared(reduced(every, dtype), 1),
    ),
    Compared(
        "all_gather",
        {"input": noise(ROWS, COLUMNS), "gather_dim": 1},
        lambda every, dtype: moved([torch.cat(of_all(every, "input"), 1)] * SIZE),
    ),
    Compared(
        "all_to_all",
        {"input": noise(ROWS, 2), "output_split_sizes": None, "input_split_sizes": None},
        lambda every, dtype: moved(
            [
                torch.cat([x.chunk(SIZE)[rank] for x in of_all(every, "input")])
                for rank in range(SIZE)
            ]
        ),
    ),
    Compared(
        "broadcast",
        {"input": noise(ROWS), "src": 1},
        lambda every, dtype: moved([every[1]["input"]] * SIZE),
    ),
    *(
        Compared(
            "all_gather_matmul",
            {
                "input": noise(ROWS, INNER),
                "weights": [noise(inner, COLUMNS)],
                "biases": [bias],
                "gather_dim": dim,
                "return_gathered": True,
                **HOW,
            },
            gathered,
        )
        for dim, inner, bias in (
            (0, INNER, None),
            (0, INNER, noise(COLUMNS)),
            (1, SIZE * INNER, noise(COLUMNS)),
        )
    ),
    *(
        Compared(
            "matmul_all_reduce",
            PRODUCT | HOW | {"reduce_op": word, "bias": bias},
            lambda every, dtype: on_all(reduced(every, dtype)),
        )
        for word, bias in (("sum", None), ("avg", same(COLUMNS)))
    ),
    Compared(
        "matmul_reduce_scatter",
        PRODUCT | HOW | {"reduce_op": "sum", "scatter_dim": 0, "length": None},
        lambda every, dtype: shared(reduced(every, dtype)),
    ),
    Compared("all_reduce_norm", ROWS_OF | NORM | {"bias": None, "algorithm": "auto"}, normed),
    Compared(
        "reduce_scatter_norm", ROWS_OF | NORM | OWN | {"bias": None, "algorithm": "auto"}, normed
    ),
    *(
        Compared(
            "reduce_scatter_norm",
            ROWS_OF | NORM | LAYER | OWN | {"bias": None, "algorithm": "auto", **variant.options},
            normed,
        )
        for variant in BY_NAME["reduce_scatter_norm"].variants
    ),
    Compared("matmul_all_reduce_norm", PRODUCT | HOW | NORM | {"reduce_op": "sum"}, normed),
    Compared(
        "matmul_reduce_scatter_norm",
        PRODUCT | HOW | NORM | LAYER | OWN | {"reduce_op": "sum"},
        normed,
    ),
    Compared("all_gather_grouped_matmul", {}, multiplied_by_experts),
    Compared("all_to_all_grouped_matmul", {}, multiplied_by_experts),
    Compared("matmul_all_to_all", {}, given_to_heads),
    Compared("all_to_all_matmul", {}, taken_from_heads),
    Compared("dispatch", {}, dispatched),
    Compared("combine", {}, combined),
    Compared("grouped_matmul_combine", {}, combined),
    Compared("routed_matmul_combine", {}, combined),
)


class NoisySetting(Setting):
    """With numbers that are not whole, so that sums are rounded."""

    def numbers(self, *shape: int, same: bool = False) -> torch.Tensor:
        seed = zlib.crc32(self.argument.encode()) + (0 if same else self.rank)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


def arguments(compared: Compared, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    def of_rank(value: Any) -> Any:
        if isinstance(value, list):
            return [of_rank(each) for each in value]
        return value(rank, dtype) if callable(value) else value

    if not compared.arguments:
        setting = NoisySetting(rank, SIZE, dtype, rows=(ROWS // SIZE,) * SIZE)
        return contracts.arguments(BY_NAME[compared.op], setting)
    return {name: of_rank(value) for name, value in compared.arguments.items()}


def own_results(op: Any, every: Given) -> list[list[torch.Tensor]]:
    given = [op.arguments(**{n: v for n, v in each.items() if n != "op"}) for each in every]
    found: list[list[torch.Tensor]] = op.reference(given, SIZE)
    return found


@pytest.mark.parametrize(("number", "dtype"), list(itertools.product(range(len(CASES)), DTYPES)))
def test_both_references_agree(number: int, dtype: str) -> None:
    compared, kind = CASES[number], DTYPES[dtype]
    every = [arguments(compared, rank, kind) for rank in range(SIZE)]
    results = own_results(BY_NAME[compared.op], every)
    right = compared.right([{**each, "op": compared.op} for each in every], kind)
    for (result, *_), (value, bound) in zip(results, right, strict=True):
        assert reference.worst_ratio(result, value, bound) <= 1
        off = result.double() + bound.max() + 0.1
        assert reference.worst_ratio(off, value, bound) > 1, "the control"


@pytest.mark.parametrize("op", ["all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"])
def test_both_references_agree_on_fp8(op: str) -> None:
    """Of small whole numbers, whose sums are exact in as many bits as tensor cores keep."""
    gathers = op.startswith("all_gather")

    def fp8(rank: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-3, 4, shape, generator=generator).to(torch.float8_e4m3fn)

    every = []
    for rank in range(SIZE):
        weight, scale = fp8(7, 16, 16).t(), torch.rand(1, 16) + 0.5
        rows = torch.rand(ROWS, 1) + 0.5
        about = {"input": fp8(rank, ROWS, 16), "input_scale": rows, "out_dtype": OUTPUT}
        how = {"use_fast_accum": False, "algorithm": "auto"}
        more: dict[str, Any] = {
            "weight": weight, "weight_scale": scale, "bias": None, "reduce_op": "sum",
            "scatter_dim": 0,
        }  # fmt: skip
        if gathers:
            more = {
                "weights": [weight], "weight_scales": [torch.ones(1, 16)], "biases": [None],
                "gather_dim": 0, "return_gathered": False,
            }  # fmt: skip
        every.append(about | how | more)
    for (result, *_), (value, bound) in zip(
        own_results(BY_NAME[op], every), scaled(every, OUTPUT), strict=True
    ):
        assert reference.worst_ratio(result, value, bound) <= 1


def test_every_reference_is_compared() -> None:
    """But those of ops that only move what the root has, or bring it to the root.

    What stands in for a reference in the contract matrix is compared there.
    """
    by_scale = {"all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"}
    moving = {"reduce", "gather", "scatter", "permute", "rank"}
    compared = {compared.op for compared in CASES} | by_scale
    assert BY_NAME.keys() - moving == compared | contracts.REFERENCES.keys()
