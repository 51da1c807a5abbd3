"""fp8 with a scale for each token and 128 channels: what experts' rows may travel as."""

import torch

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 1e-4  # of what is taken for the largest of a block, so that a block of zeros has a scale
Tensor = torch.Tensor


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as float8_e4m3fn, and float32 scales: ``x ~= values * scales``, a scale per 128 channels.

    ``x`` ``(..., hidden)``, ``hidden`` a multiple of 128; scales are ``(..., hidden / 128)``. A scale is
    the largest magnitude of its channels / 448. Not differentiable. Raises ValueError for another
    ``hidden``. Semantics: DeepEP's ``use_fp8``, its ``per_token_cast_to_fp8``.

    >>> values, scales = interlace.experts.quantize(torch.full((1, 128), 7.0))
    >>> values.dtype, values[0, 0].item(), round(448 * scales.item(), 4)
    (torch.float8_e4m3fn, 448.0, 7.0)
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"hidden must be a multiple of {BLOCK}, got x of shape {tuple(x.shape)}")
    blocks = (
        x.detach().to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    )
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    values = (blocks / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers that ``x`` in fp8 ``(..., hidden)`` and its ``scales`` stand for, as ``dtype``.

    Raises ValueError unless there is a scale per 128 channels. Semantics: the inverse of :func:`quantize`.

    >>> interlace.experts.dequantize(*interlace.experts.quantize(torch.full((1, 128), 7.0)))[0, 0].item()
    7.0
    """
    if x.shape[-1] != BLOCK * scales.shape[-1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} needs a scale per {BLOCK} channels, got {tuple(scales.shape)}"
        )
    blocks = x.to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return (blocks * scales.unsqueeze(-1)).flatten(-2).to(dtype)
