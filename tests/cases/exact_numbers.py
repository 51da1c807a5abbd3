"""Numbers that ask everything of a float format, and the oracles that arithmetic tests share."""

import numpy as np
import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NARROW = [BF16, F16, E4M3, E5M2]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bit for bit; any nan equals any nan."""
    assert got.dtype == want.dtype
    nan = torch.isnan(want.double())
    bits = BITS[got.element_size()]
    equal = (got.view(bits) == want.view(bits)) | nan
    return bool(equal.all()) and bool((torch.isnan(got.double()) == nan).all())


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` (fp32) in ``dtype``: torch's rounding, with the saturation of the GPU's fp8 cvt."""
    if dtype in LARGEST:
        x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.to(dtype)


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern of ``dtype``."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


def rounding_cases(dtype: torch.dtype) -> torch.Tensor:
    """fp32 values: each value of ``dtype``, each tie, and the fp32 neighbours of the ties."""
    value = every(dtype).float().double()
    value = value[torch.isfinite(value)].sort().values
    tie = ((value[1:] + value[:-1]) / 2).float()
    up = torch.nextafter(tie, torch.tensor(torch.inf))
    down = torch.nextafter(tie, torch.tensor(-torch.inf))
    cases = torch.cat([value.float(), tie, up, down])
    size = 1 << (cases.numel() - 1).bit_length()
    return torch.cat([cases, cases[: size - cases.numel()]])


def any_bits(count: int, seed: int) -> torch.Tensor:
    """fp32 of random bit patterns: denormals, infinities and nans among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    bits[:6] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1]
    return torch.from_numpy(bits.view(np.float32))


def pair(dtype: torch.dtype, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (rounded(torch.randn(count, generator=generator) * 8, dtype) for _ in range(2))
    special = torch.tensor([0.0, 1.0, -2.0, torch.nan, LARGEST.get(dtype, torch.inf)])
    x[:25] = special.repeat(5).to(dtype)
    y[:25] = special.repeat_interleave(5).to(dtype)
    return x, y
