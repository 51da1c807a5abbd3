"""Cases of the fused matmuls and of plain collectives, on shards of different lengths.

Inputs are random, the same on every device and in every place; the host judges the results.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import interlace
from interlace import reference
from interlace.cli.check.case import DTYPES, CheckCase, Sizes
from interlace.ops.collectives.low_latency import MOST_BYTES
from interlace.ops.matmul.reduce import ONE_SHOT_BYTES

Variant = tuple[str, dict[str, Any], dict[str, int | bool]]  # name, arguments, configuration
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
OF_STREAMS = ("wait_credits_kernel", "finish_kernel")
"""What streams of a GPU launch around copies; those of ``sim`` need none."""
ROLES: dict[str, int | bool] = {"warp_roles": True, "copiers": 0}


@dataclass
class DenseCase(CheckCase):
    """``arguments``: of the op, besides tensors. ``sizes``: m, n, k, or the elements of a collective."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def _random(self, seed: int, rank: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randn(*shape, generator=generator).to(DTYPES[self.dtype])

    def _inputs(self, seed: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, weight) of a rank; shards are uneven, weights of an all-gather are the same."""
        if self.op in COLLECTIVES:
            return self._random(seed, rank, *self.sizes), torch.empty(0)
        m, n, k = self.sizes
        if self.op == "all_gather_matmul":
            shard = self._random(seed, rank, m // self.world_size + (3 * rank) % 7, k)
            return shard, self._random(seed, 99, n, k).t()
        return self._random(seed, rank, m, k), self._random(seed, 50 + rank, k, n)

    def _bias(self, seed: int) -> torch.Tensor | None:
        return self._random(seed, 77, self.sizes[1]) if self.arguments.get("bias") else None

    def on_rank(self, seed: int) -> torch.Tensor:
        device, rank = interlace.device(), interlace.get_rank()
        input, weight = (tensor.to(device) for tensor in self._inputs(seed, rank))
        if self.op in COLLECTIVES:
            return self._collective(input, rank).cpu()
        bias = self._bias(seed)
        arguments = {**self.arguments, "bias": None if bias is None else bias.to(device)}
        result: torch.Tensor = getattr(interlace, self.op)(input, weight, **arguments)
        return result.cpu()

    def _collective(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        op = getattr(interlace, self.op)
        if self.op == "all_reduce":
            op(x, **self.arguments)
            return x
        if self.op == "all_gather":
            source: Any = x
            count = self.world_size * x.numel()
        else:
            source = [part.contiguous() for part in reference.split(x, self.world_size)]
            count = source[rank].numel()
        output = torch.full((count,), torch.nan, dtype=x.dtype, device=x.device)
        op(output, source, **self.arguments)
        return output

    def _expected(self, seed: int) -> list[reference.Bounded]:
        """(reference, bound) by rank."""
        every = (self._inputs(seed, rank) for rank in range(self.world_size))
        inputs, weights = zip(*every, strict=True)
        dtype, bias = DTYPES[self.dtype], self._bias(seed)
        reduce_op = self.arguments.get("reduce_op", "sum")
        if self.op == "all_gather_matmul":
            found = reference.all_gather_matmul(inputs, weights[0], dtype, bias=bias, roundings=2)
            return [found] * self.world_size
        if self.op == "all_gather":
            whole = torch.cat(inputs).double()
            return [(whole, torch.zeros_like(whole))] * self.world_size
        if self.op in COLLECTIVES:
            value, bound = reference.reduce(inputs, reduce_op)
        else:
            value, bound = reference.matmul_all_reduce(inputs, weights, dtype, bias, reduce_op)
        if "scatter" not in self.op:
            return [(value, bound)] * self.world_size
        values = reference.split(value, self.world_size)
        return list(zip(values, reference.split(bound, self.world_size), strict=True))

    def ratio(self, results: Sequence[torch.Tensor], seed: int) -> float:
        judged = zip(results, self._expected(seed), strict=True)
        return max(reference.worst_ratio(result, *expected) for result, expected in judged)


def _fused() -> dict[str, list[Variant]]:
    plain: list[Variant] = [(name, {"algorithm": name}, {}) for name in ("pipelined", "unfused")]
    fused = {"algorithm": "fused"}
    average = {**fused, "reduce_op": "avg"}
    reduce: list[Variant] = [
        ("fused", {**fused, "bias": True}, {}),
        ("fused, pointers, avg", average, {"descriptors": False}),
        *plain,
    ]
    return {
        "all_gather_matmul": [
            ("fused, copiers", fused, {}),
            ("fused, copy engine", {**fused, "bias": True}, {"copiers": 0}),
            ("fused, pointers", fused, {"descriptors": False}),
            ("fused, by switch", fused, {"multimem": True}),
            *plain,
        ],
        "matmul_reduce_scatter": reduce,
        "matmul_all_reduce": reduce,
    }


def _kernels(
    op: str, algorithm: str, sizes: Sizes, dtype: str, of_streams: tuple[str, ...]
) -> tuple[str, ...]:
    if algorithm in ("fused", "kernel"):
        large = op == "matmul_all_reduce" and (
            sizes[0] * sizes[1] * DTYPES[dtype].itemsize > ONE_SHOT_BYTES
        )
        return ("matmul_reduce_scatter_kernel" if large else f"{op}_kernel",)
    if algorithm == "low_latency":
        return (f"low_latency_{op}_kernel",)
    return () if algorithm == "unfused" else of_streams


def roles(world_size: int, sizes: Sizes, dtype: str) -> Iterator[CheckCase]:
    """For 9.x: warps that load, multiply or store."""
    for op, more in (("all_gather_matmul", ()), ("matmul_reduce_scatter", ("sum_tiles_kernel",))):
        kernels = (f"{op}_roles_kernel", *more)
        about = op, "fused, roles", world_size, sizes, dtype, kernels
        yield DenseCase(*about, overrides=ROLES, arguments={"algorithm": "fused"})


def signals(world_size: int) -> Iterator[CheckCase]:
    """A copy whose arrival a kernel tells, as where the driver has no words of streams."""
    about = "all_gather", "copy, signals by kernels", world_size, (14336,), "bf16"
    how = {"algorithm": "copy"}
    kernels = "publish_kernel", "wait_kernel", *OF_STREAMS
    yield DenseCase(*about, kernels, by_kernels=True, arguments=how)


def dense(device: str, world_size: int) -> Iterator[CheckCase]:
    """On a GPU the shapes are large enough for several waves of tiles."""
    shapes = [(96, 80, 64), (61, 45, 37)]
    if device == "cuda":
        shapes = [(2048, 1024, 512), (256, 512, 512), (1000, 520, 264), (61, 45, 37)]
    of_streams: tuple[str, ...] = ()
    if device == "cuda":
        of_streams = (*("wait_kernel",) * (world_size > 1), *OF_STREAMS)
    names = ("bf16", "fp32", "fp16")
    for number, sizes in enumerate(shapes):
        main_tile = device == "cuda" and number == 0  # others take turns
        for dtype in names if main_tile else (names[(number + world_size) % 3],):
            for op, variants in _fused().items():
                for variant, arguments, overrides in variants:
                    yield DenseCase(
                        *(op, variant, world_size, sizes, dtype),
                        _kernels(op, arguments["algorithm"], sizes, dtype, of_streams),
                        overrides=overrides,
                        by_switch="multimem" in overrides,
                        arguments=arguments,
                    )
            elements = 7 * sizes[0]
            for op, algorithm in itertools.product(COLLECTIVES, ("kernel", "copy", "low_latency")):
                fits = op != "reduce_scatter" and 4 * elements <= MOST_BYTES
                if fits or algorithm != "low_latency":
                    kernels = _kernels(op, algorithm, (elements,), dtype, of_streams)
                    about = op, algorithm, world_size, (elements,), dtype, kernels
                    yield DenseCase(*about, arguments={"algorithm": algorithm})
