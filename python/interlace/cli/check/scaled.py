"""Cases of the fused matmuls of fp8 operands, with a scale for each row of the input and of the weight.

Operands are small whole numbers: sums of their products are exact in the 14 bits that tensor cores keep of
a sum of fp8 products, so that the bound of fp32 holds for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import interlace
from interlace import functional, reference
from interlace.cli.check.case import CheckCase

OUTPUT = torch.bfloat16
GATHER, REDUCE = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"


@dataclass
class ScaledCase(CheckCase):
    def _operands(
        self, seed: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input, weight, and their scales; the weight lies along K, and is the same where ranks gather."""
        (m, n, k), gathers = self.sizes, self.op == GATHER
        own = torch.Generator().manual_seed(1000 * seed + rank)
        of_weight = torch.Generator().manual_seed(1000 * seed + (99 if gathers else 50 + rank))
        rows = m // self.world_size if gathers else m
        input = torch.randint(-3, 4, (rows, k), generator=own)
        weight = torch.randint(-3, 4, (n, k), generator=of_weight)
        scales = torch.rand(rows, 1, generator=own), torch.rand(1, n, generator=of_weight)
        fp8 = (each.to(torch.float8_e4m3fn) for each in (input, weight))
        input, weight = fp8
        return input, weight.t(), scales[0] + 0.5, scales[1] + 0.5

    def on_rank(self, seed: int) -> torch.Tensor:
        operands = self._operands(seed, interlace.get_rank())
        op = getattr(functional, self.op)
        on_device = [each.to(interlace.device()) for each in operands]
        output = op(*on_device, out_dtype=OUTPUT, algorithm=self.variant)
        return functional.wait(output).cpu()

    def ratio(self, results: Sequence[torch.Tensor], seed: int) -> float:
        every = [self._operands(seed, rank) for rank in range(self.world_size)]
        products = [reference.scaled_matmul(*operands) for operands in every]
        if self.op == GATHER:
            value, bound = (torch.cat(each) for each in zip(*products, strict=True))
            expected = [(value, bound)] * self.world_size
        else:
            unit = reference.unit_roundoff(torch.float32)
            sums = reference.sum_of_rounded(products, OUTPUT, unit)
            parts = (reference.split(each, self.world_size) for each in sums)
            expected = list(zip(*parts, strict=True))
        return max(
            reference.worst_ratio(result, value, reference.rounded(bound, value, OUTPUT))
            for result, (value, bound) in zip(results, expected, strict=True)
        )


def scaled(device: str, world_size: int) -> Iterator[CheckCase]:
    sizes = (2048, 1024, 512) if device == "cuda" else (48, 32, 48)
    for op, kernel in (
        (GATHER, "all_gather_matmul_kernel"),
        (REDUCE, "matmul_reduce_scatter_kernel"),
    ):
        yield ScaledCase(op, "fused", world_size, sizes, "fp8", (kernel,), branch="fp8")
