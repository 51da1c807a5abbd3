"""The definition of products in a block-scaled format, in plain torch, and the bound of their errors."""

import torch

from interlace.ops.matmul.formats import FORMATS

Tensor = torch.Tensor
PLAIN = ("mxfp8", "fp8_block128")
"""Formats of training, that are written anew here."""


def in_blocks(x: Tensor, name: str, across: int) -> tuple[Tensor, Tensor]:
    """Values and their scales, each of the shape of ``x``, for blocks of 32 or of ``across`` x 128."""
    block = 32 if name == "mxfp8" else 128
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % block, 0, -rows % across))
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, across))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448.0
    if name == "mxfp8":
        fraction, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    scales = scale.expand_as(tiles).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return (x / scales).to(torch.float8_e4m3fn).double(), scales


def product(x: Tensor, w: Tensor, name: str, *, weight: bool = False) -> Tensor:
    """Return ``x @ w.T``: sums of 128 products, each rounded once and added in fp32."""
    across = 128 if weight and name == "fp8_block128" else 1
    (a, of_a), (b, of_b) = in_blocks(x, name, 1), in_blocks(w, name, across)
    total = torch.zeros(len(x), len(w))
    for first in range(0, x.shape[1], 128):
        step = slice(first, first + 128)
        if name == "mxfp8":
            total += ((a * of_a)[:, step] @ (b * of_b)[:, step].T).float()
        else:
            total += (a[:, step] @ b[:, step].T).float() * (of_a[:, first, None] * of_b[:, first])
    return total


def close(found: Tensor, left: Tensor, right: Tensor, name: str) -> None:
    """Compare with ``left @ right`` in float64, to half a step of the format in either factor."""
    a, b = left.double(), right.double()
    step = {"mxfp8": 2.0**-4, "fp8_block128": 2.0**-4, "mxfp8_e5m2": 2.0**-3}.get(name, 0.3125)
    # The second bound of quantize: of numbers that are small beside the largest of their block.
    least = step / 4 if FORMATS[name].packed > 1 else 2.0**-18
    sides = [step * each.abs() + least * each.abs().max() for each in (a, b)]
    bound = sides[0] @ b.abs() + a.abs() @ sides[1] + sides[0] @ sides[1]
    assert torch.all((found.double() - a @ b).abs() <= bound * (1 + 2.0**-20))
