"""Block-scaled formats: numbers of 8 or 4 bits, with one scale for each block of numbers along k.

``k`` is the dimension along which a matmul sums. A last block may be shorter. docs/how-to/train/formats.md
has a table of the formats. Sources: OCP Microscaling Formats (MX) Specification v1.0, cuBLAS, "Block
Scaling Factors Layout", and the weights of DeepSeek-V3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch.nn.functional import pad

from interlace.arguments.checks import check_layout, has_memory
from interlace.arguments.words import BlockFormatName
from interlace.kernels.block_scales import INNER
from interlace.runtime.numerics.exact import matrix_product
from interlace.runtime.tuning.configuration import Configuration

Tensor = torch.Tensor
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP4 = torch.float4_e2m1fn_x2
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = {E4M3: 448.0, E5M2: 57344.0, FP4: 6.0}
"""The largest number of each dtype of values."""
LARGEST_PRODUCTS = {E4M3: 1.875 * 2.0**127, E5M2: 1.75 * 2.0**127, FP4: 1.5 * 2.0**127}
"""The largest float32 number that is one of those values times a power of two."""
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The e2m1 numbers by their three low bits. The fourth bit is the sign."""
KERNEL_NAMES = {E4M3: "e4m3", E5M2: "e5m2", FP4: "e2m1", E8M0: "e8m0", torch.float32: "fp32"}
"""The name of each dtype in ``kernels/block_scales.py``."""
ROW_ALIGNMENT = 16
"""A packed row is a multiple of this many bytes, which one instruction moves."""
SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4
"""The size of a tile of scales in the layout SWIZZLE_32_4_4."""


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled format.

    Attributes
    ----------
    block : the numbers along k that share a scale; ``across``: for a weight, the numbers across k.
    packed : the numbers in one element of the values.
    whole : whether one more float32 scales the whole tensor.
    weight_values : the dtype of a weight's values, if it differs.
    """

    name: str
    values: torch.dtype
    scale: torch.dtype
    block: int
    across: int = 1
    packed: int = 1
    whole: bool = False
    weight_values: torch.dtype | None = None

    @property
    def of_weight(self) -> BlockFormat:
        """The format of a weight beside an input in this format."""
        return replace(self, values=self.weight_values or self.values)

    @property
    def of_transposed(self) -> BlockFormat:
        """The format of the transposed product, whose first factor is the weight."""
        of_input = None if self.weight_values is None else self.values
        return replace(self.of_weight, weight_values=of_input)

    @property
    def step_bytes(self) -> tuple[int, int]:
        """The bytes of 128 numbers in a packed row: for their values, and for their scales."""
        return INNER // self.packed, INNER // self.block * self.scale.itemsize

    @property
    def kernel_constants(self) -> dict[str, Any]:
        names = {"VALUES": KERNEL_NAMES[self.values], "SCALE": KERNEL_NAMES[self.scale]}
        if self.weight_values is not None:
            names["WEIGHT_VALUES"] = KERNEL_NAMES[self.weight_values]
        return {**names, "BLOCK": self.block}

    def row_bytes(self, numbers: int) -> int:
        """Return the length of a packed row with so many numbers. Even 0 numbers need bytes (padding)."""
        used = _blocks(numbers, INNER) * sum(self.step_bytes) + 4 * self.whole
        return _blocks(max(1, used), ROW_ALIGNMENT) * ROW_ALIGNMENT

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise a ValueError that begins with ``name`` if rows of that shape cannot have this format."""
        if len(shape) < 2:
            raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(shape)}")
        if shape[-1] % self.packed:
            raise ValueError(
                f"{self.name} has two numbers in a byte: the last dimension of {name} must be even, got "
                f"{tuple(shape)}"
            )

    def check_widths(self, **widths: int) -> None:
        """Raise a ValueError if a layer with these widths on this rank cannot train in the format."""
        for name, width in widths.items():
            if width % self.packed:
                raise ValueError(
                    f"{self.name} has two numbers in a byte: {name} must be even on each rank, got {width}"
                )

    def whole_of(self, most: Tensor) -> Tensor:
        """Return the scale of the whole tensor for numbers whose largest absolute value is ``most``."""
        return (most / (LARGEST[self.values] * LARGEST[E4M3])).clamp(min=SMALLEST)

    def packed_rows(self, rows: Tensor, whole: float = 1.0) -> Tensor:
        """Quantise and pack ``[..., rows, k]``; ``whole`` is the scale of the tensor, if there is one."""
        of_all = rows.new_full((), whole, dtype=torch.float32) if self.whole else None
        return packed_rows(quantize(rows, self.name, whole=of_all))  # type: ignore[arg-type]

    @property
    def fast_accum(self) -> bool:
        """Whether tensor cores sum all of k; otherwise sums of 128 numbers are added outside them."""
        return self.scale != torch.float32

    def native_kind(self, configuration: Configuration) -> str:
        """Return ``NATIVE`` of ``kernels/block_scales.py``."""
        if configuration.native_scales and self.scale != torch.float32:
            return "scales"
        return "values" if configuration.native_values else ""

    def loads_by_descriptor(self, configuration: Configuration) -> bool:
        """Return whether kernels may load values by TMA. On 10.0 fp32 scales need the sums' registers."""
        return self.scale != torch.float32 or not configuration.native_scales

    def steps(self, row_bytes: int) -> int:
        """Return the number of steps of 128 numbers in a packed row of that length."""
        return row_bytes // sum(self.step_bytes)


FORMATS = {
    each.name: each
    for each in (
        BlockFormat("fp8_block128", E4M3, torch.float32, 128, across=128),
        BlockFormat("mxfp8", E4M3, E8M0, 32),
        BlockFormat("mxfp8_e5m2", E5M2, E8M0, 32),
        BlockFormat("mxfp4", FP4, E8M0, 32, packed=2),
        BlockFormat("nvfp4", FP4, E4M3, 16, packed=2, whole=True),
    )
}


def operand_format(input: str, weight: str) -> str:
    return input if input == weight else f"{input} x {weight}"


def _pair(input: str, weight: str) -> BlockFormat:
    name, of_weight = operand_format(input, weight), FORMATS[weight].values
    return replace(FORMATS[input], name=name, weight_values=of_weight)


_PAIRS = _pair("mxfp8", "mxfp8_e5m2"), _pair("mxfp8_e5m2", "mxfp8")
OPERAND_FORMATS = {**FORMATS, **{pair.name: pair for pair in _PAIRS}}
"""The formats of an input and a weight, which are the same, or named in this order."""


def length_along_k(name: str, length: int, format: str) -> tuple[str, int]:
    """Return a term for ranks to compare: the length of rows. Packed rows count numbers and padding."""
    numbers = OPERAND_FORMATS[format].steps(length) * INNER
    return f"{name} (k is a number of values, padded to {INNER})", numbers


def format_term(format: str) -> tuple[str, str]:
    """Return a term for ranks to compare: the format of the operands, or that they are tensors."""
    return "format of the operands", format or "None (plain tensors)"


def format_named(name: object, formats: Mapping[str, BlockFormat] = FORMATS) -> BlockFormat:
    if not isinstance(name, str) or name not in formats:
        raise ValueError(
            f"format must be one of {', '.join(get_args(BlockFormatName))}, got {name!r}"
        )
    return formats[name]


@dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix, or several, in a block-scaled format: each number is its value times its block's scale.

    Parameters
    ----------
    values : ``[..., rows, k]``. A 4-bit format has two numbers in an element, the first in the low bits:
        ``[..., rows, k / 2]``; uint8 is accepted for it.
    scales : ``[..., rows, ceil(k / block)]``; for ``fp8_block128`` also ``[..., ceil(rows / 128),
        ceil(k / 128)]``, as DeepSeek's ``weight_scale_inv``. uint8 is accepted for float8_e8m0fnu. For the
        MX formats and nvfp4 they may also be in the layout SWIZZLE_32_4_4 of torch and cuBLAS, flat or
        ``[32 * ceil(rows / 128), 16 * ceil(blocks / 4)]``.
    format : "fp8_block128", "mxfp8", "mxfp8_e5m2", "mxfp4" or "nvfp4". "mxfp8" with float8_e5m2 values is
        "mxfp8_e5m2".
    whole : for nvfp4, a float32 factor of all numbers, one element or one for each row, ``[..., rows, 1]``;
        None is 1.
    inner : the dimension k, -1 or -2. :meth:`t` exchanges both, for a weight, which is ``(k, n)``.

    Raises ValueError or TypeError that names the value that was passed and the format's requirement, on
    this rank only: nothing is communicated.

    Only the same object is equal to it; to compare numbers, compare the results of :meth:`dequantize`. It
    can be pickled, copied, and stored by ``torch.save``; ``torch.load`` reads it as it reads tensors.

    >>> weight = interlace.quantize(torch.ones(4, 64), "mxfp8").t()
    >>> tuple(weight.values.shape), tuple(weight.scales.shape)
    ((64, 4), (2, 4))
    >>> weight.check_scales()
    >>> weight.dequantize(torch.bfloat16).sum()
    tensor(256., dtype=torch.bfloat16)
    """

    values: Tensor
    scales: Tensor
    format: str
    whole: Tensor | None = None
    inner: int = -1

    def __post_init__(self) -> None:
        kind = format_named(self.format)
        if kind.name == "mxfp8" and getattr(self.values, "dtype", None) == E5M2:
            kind = FORMATS["mxfp8_e5m2"]
            object.__setattr__(self, "format", kind.name)
        if self.inner not in (-1, -2):
            raise ValueError(f"inner must be -1 or -2, got {self.inner!r}")
        alternatives = [E5M2] if kind.name == "mxfp8" else []
        values = _of_dtype("values", self.values, kind.name, kind.values, *alternatives)
        if values.dim() < 2:
            raise ValueError(f"values must have at least 2 dimensions, got {tuple(values.shape)}")
        scales = _of_dtype("scales", self.scales, kind.name, kind.scale)
        if scales.device != values.device:
            raise ValueError(f"scales are on {scales.device}, values on {values.device}")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scales", self._plain(kind, scales))
        if self.whole is not None:
            whole = _whole(kind, self.whole, values.shape, self.inner)
            object.__setattr__(self, "whole", whole)

    def _plain(self, kind: BlockFormat, scales: Tensor) -> Tensor:
        """Return the scales by row and block, whatever their layout is."""
        *leading, rows, length = self.values.shape if self.inner == -1 else self.values.mT.shape
        blocks = _blocks(length * kind.packed, kind.block)
        shapes = [(*leading, rows, blocks)]
        if kind.across > 1:
            shapes.append((*leading, _blocks(rows, kind.across), blocks))
        shapes = [shape if self.inner == -1 else (*leading, *shape[:-3:-1]) for shape in shapes]
        if tuple(scales.shape) in shapes:
            return scales
        flat = (_swizzled_size(rows, blocks),)
        as_matrix = _blocks(rows, 128) * 32, _blocks(blocks, 4) * 16
        if kind.scale.itemsize == 1 and not leading and scales.shape in (flat, as_matrix):
            plain = unswizzle(scales, rows, blocks)
            return plain if self.inner == -1 else plain.t()
        wanted = " or ".join(map(str, shapes))
        if kind.scale.itemsize == 1 and not leading:
            wanted += f", or in the layout SWIZZLE_32_4_4 {flat} or {as_matrix}"
        raise ValueError(
            f"scales of {kind.name} must be {wanted}, for values of shape {tuple(self.values.shape)} and "
            f"blocks of {kind.block} numbers along dimension {self.inner}; got {tuple(scales.shape)}"
        )

    @property
    def kind(self) -> BlockFormat:
        """The record of the format."""
        return FORMATS[self.format]

    @property
    def shape(self) -> torch.Size:
        """The shape, counted in numbers."""
        shape = list(self.values.shape)
        shape[self.inner] *= self.kind.packed
        return torch.Size(shape)

    def t(self) -> Scaled:
        """Return the same numbers with the last two dimensions exchanged. Nothing is copied."""
        whole = self.whole if self.whole is None or self.whole.numel() == 1 else self.whole.mT
        transposed = Scaled(self.values.mT, self.scales.mT, self.format, whole, -3 - self.inner)
        return transposed if self._rows is None else transposed._of_rows(self._rows.mT)

    def narrow(self, dim: int, start: int, length: int) -> Scaled:
        """Return ``length`` indices from ``start`` on, along one of the last two dimensions.

        As ``torch.narrow``. Along k, only at borders of blocks; across k anywhere. If scales are for 128 x
        128 numbers, the result has one scale for each row. Raises ValueError for another dimension, and for
        a range that divides a block.

        >>> weight = interlace.quantize(torch.ones(4, 64), "mxfp8")
        >>> tuple(weight.narrow(0, 2, 2).shape), tuple(weight.narrow(1, 32, 32).shape)
        ((2, 64), (4, 32))
        """
        dim = dim - self.values.dim() if dim >= 0 else dim
        if dim not in (-1, -2):
            raise ValueError(f"dim must be one of the last two of {tuple(self.shape)}, got {dim}")
        if self.inner == -2:
            return self.t().narrow(-3 - dim, start, length).t()
        kind, (rows, numbers), end = self.kind, self.shape[-2:], start + length
        values, scales, whole = self.values, self.scales, self.whole
        if not 0 <= start <= end <= (numbers if dim == -1 else rows):
            raise ValueError(
                f"{start} to {end} is outside of dimension {dim} of shape {tuple(self.shape)}"
            )
        if dim == -1:
            if start % kind.block or (end % kind.block and end != numbers):
                raise ValueError(
                    f"{kind.name} has blocks of {kind.block} numbers along k, but {start} to {end} is not "
                    "a range of whole blocks"
                )
            values = values.narrow(-1, start // kind.packed, length // kind.packed)
            scales = scales.narrow(-1, start // kind.block, _blocks(length, kind.block))
        else:
            values = values.narrow(-2, start, length)
            scales = self._scales_of_rows().narrow(-2, start, length)
            if whole is not None and whole.numel() > 1:
                whole = whole.narrow(-2, start, length)
        return Scaled(values, scales, kind.name, whole)

    def _scales_of_rows(self) -> Tensor:
        """Return the scales with one for each row, blocks along the last dimension."""
        rows = self.values.shape[-2]
        if self.scales.shape[-2] == rows:
            return self.scales
        return self.scales.repeat_interleave(self.kind.across, -2)[..., :rows, :]

    @property
    def advice(self) -> str:
        """The text that an error adds to this class' name if only a tensor is accepted."""
        return (
            f" in {self.format}, which only dispatches accept, and matmuls whose input and weights all are "
            "Scaled; pass dequantize()'s result, or its values and scales one after the other"
        )

    def to(self, device: torch.device | str | int) -> Scaled:
        """Return the same numbers on ``device``, packed if they are. Raises TypeError for a dtype.

        >>> interlace.quantize(torch.ones(1, 32), "mxfp8").to("cpu").dequantize().sum()
        tensor(32.)
        """
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"the dtypes of a Scaled belong to its format, {self.format}; "
                f"dequantize({device}) returns the numbers in another one"
            )
        restore, parts = self.__reduce__()
        return restore(*(part.to(device) if isinstance(part, Tensor) else part for part in parts))

    def __reduce__(self) -> tuple[Callable[..., Scaled], tuple[Any, ...]]:
        """Reduce to bytes for pickle, copy and torch.save: pickle does not have all dtypes of formats.

        Packed operands stay packed.
        """
        if self._rows is not None:
            rows = self._rows if self.inner == -1 else self._rows.mT
            return _of_packed, (rows, self.format, self.shape[self.inner], self.inner)
        values, scales = (
            each if each.dtype == torch.float32 else each.view(torch.uint8)
            for each in (self.values, self.scales)
        )
        return _of_bytes, (values, scales, self.format, self.whole, self.inner)

    @property
    def _rows(self) -> Tensor | None:
        """Return the packed rows if values and scales are views of them, otherwise None."""
        rows: Tensor | None = self.__dict__.get("rows")
        return rows

    def _of_rows(self, rows: Tensor) -> Scaled:
        object.__setattr__(self, "rows", rows)
        return self

    def packed(self) -> Scaled:
        """Return the same numbers in the memory layout that ops use: a call with them copies nothing.

        Do this once with a weight. Values and scales are then views of that memory. If scales are for 128 x
        128 numbers, the result has one scale for each row.
        """
        if self.inner == -2:
            return self.t().packed().t()
        return unpacked_rows(packed_rows(self), self.kind, self.shape[-1])

    def check_scales(self) -> None:
        """Check that every scale is finite and above 0, or 0 with values of 0. Waits for the device.

        Raises ValueError that names the first wrong scale.
        """
        rows_first = self if self.inner == -1 else self.t()
        values, scales, whole = rows_first.values, rows_first.scales.float(), rows_first.whole
        checks_of = [("scales", scales, self.kind.block)]
        if whole is not None:
            checks_of.append(
                ("whole", whole.expand(1, 1) if whole.dim() == 0 else whole, self.shape[self.inner])
            )
        for name, found, block in checks_of:
            wrong = ~((found > 0) & found.isfinite())
            if not bool(wrong.any()):
                continue
            rows = values.shape[-2]
            across = (
                1 if found.shape[-2] == rows else self.kind.across if name == "scales" else rows
            )
            tiles = _tiles(_numbers(values, self.kind).abs(), max(1, block), max(1, across))
            wrong = wrong & ((found != 0) | (tiles.amax((-3, -1)) > 0))
            if bool(wrong.any()):
                at = wrong.nonzero()[0].tolist()
                scale = found.expand_as(wrong)[tuple(at)].item()
                at = at if self.inner == -1 else [*at[:-2], at[-1], at[-2]]
                raise ValueError(
                    f"{name} of {self.format} must be finite and greater than 0, got {scale} at {tuple(at)}"
                )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers, computed in float32 and rounded once to ``dtype``."""
        rows_first = self if self.inner == -1 else self.t()
        kind, scales = self.kind, rows_first._scales_of_rows().float()
        numbers = _numbers(rows_first.values, kind)
        length = numbers.shape[-1]
        product = numbers * scales.repeat_interleave(kind.block, -1)[..., :length]
        product = product if rows_first.whole is None else product * rows_first.whole
        return (product if self.inner == -1 else product.mT).to(dtype)


def _of_dtype(
    name: str, tensor: object, of: str, dtype: torch.dtype, *alternatives: torch.dtype
) -> Tensor:
    """Return ``tensor``, whose dtype is that one, uint8 for its bits, or one of the ``alternatives``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    check_layout(name, tensor)
    accepted = (dtype, torch.uint8) if dtype in (FP4, E8M0) else (dtype, *alternatives)
    if tensor.dtype not in accepted:
        names = " or ".join(map(str, accepted))
        raise TypeError(f"{name} of {of} must be {names}, got {tensor.dtype}")
    return tensor.view(dtype) if tensor.dtype == torch.uint8 else tensor


def _whole(kind: BlockFormat, whole: object, shape: Sequence[int], inner: int) -> Tensor:
    """Return ``whole`` as :class:`Scaled` keeps it for values of that shape: a scalar, or by row."""
    if not kind.whole:
        raise ValueError(f"{kind.name} has no scale for the whole tensor, got whole={whole!r}")
    taken = _of_dtype("whole", whole, kind.name, torch.float32)
    of_rows = list(shape)
    of_rows[inner] = 1
    if list(taken.shape) == of_rows:
        return taken
    if taken.numel() != 1:
        raise ValueError(
            f"whole must have one element, or one for each row, {tuple(of_rows)}; got shape "
            f"{tuple(taken.shape)}"
        )
    return taken.reshape(())


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


NormedScaled = tuple[Scaled, Tensor]
"""The normed rows, and the sum with the residual."""


def quantize(
    x: Tensor, format: BlockFormatName, *, weight: bool = False, whole: Tensor | None = None
) -> Scaled:
    """Return ``x`` in a block-scaled format, each block scaled by its largest absolute value.

    Parameters
    ----------
    x : ``[..., rows, k]``, float32, float16, bfloat16 or float64; blocks are along k. A weight ``(n, k)``
        becomes the operand of a matmul by :meth:`Scaled.t`.
    weight : for fp8_block128, one scale for 128 x 128 numbers instead of 1 x 128.
    whole : for nvfp4, one float32 that is known before. Numbers beyond 6 * 448 times it saturate.

    The scale of fp8_block128 is the largest number of the block divided by 448. For the MX formats it is
    the least power of two with which no number is larger than the largest value. For nvfp4 it is the
    largest number divided by 6, relative to ``whole``, whose default is the largest of all numbers divided
    by 6 * 448. A block of zeros has the least possible scale. Values are rounded to nearest, ties to even.
    No value saturates, with two exceptions. A scale of nvfp4 is itself rounded to nearest. So the largest
    number of a block may lose 1 part in 16, or 1 in 3 if it is less than 2**-14 of the largest of all. And
    a number does not become infinite: if the nearest number of the format is beyond float32's largest, it
    is rounded toward zero. NaN and infinity make all numbers of their block NaN; for nvfp4, of the tensor.
    A float64 number beyond float32's largest is infinity.

    Raises ValueError or TypeError naming the argument, and RuntimeError for a tensor that requires a
    gradient, on this rank only: nothing is communicated. Source: OCP MX Specification v1.0, section 6.3.
    The specification and torchao's default round the exponent of a scale down, so that the largest numbers
    saturate. NVIDIA's Transformer Engine and torchao's ``ScaleCalculationMode.RCEIL`` round it up, as here.

    >>> interlace.quantize(torch.tensor([[1.0, -3.0]]), "mxfp4").dequantize()
    tensor([[ 1., -3.]])
    """
    kind = format_named(format)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype.itemsize < 2:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of float16, bfloat16, float32 or float64, got {got}")
    check_layout("x", x)
    kind.check_shape("x", x.shape)
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("quantize has no gradient; call it under torch.no_grad()")
    if whole is not None:
        whole = _whole(kind, whole, x.shape, -1)
        if whole.is_cpu and has_memory(whole) and bool((whole <= 0).any()):
            raise ValueError(
                f"whole of {kind.name} must be greater than 0, got {float(whole.min())}"
            )
    across = kind.across if weight else 1
    numbers, (rows, length) = x.float(), x.shape[-2:]
    tiles = _tiles(numbers, kind.block, across)
    largest = tiles.abs().amax((-3, -1))  # [..., bands, blocks]
    if kind.whole and whole is None:
        whole = kind.whole_of(largest.amax() if largest.numel() else largest.new_zeros(()))
    if whole is not None:
        largest = largest / whole
    # Divide by a tensor: for a number, torch on a GPU multiplies with its reciprocal.
    wanted = largest / largest.new_full((), LARGEST[kind.values])
    scales = _scales(wanted, kind.scale)
    if whole is not None:  # with the next lower scale, the product of the largest value is finite
        infinite = (scales.float() * LARGEST[kind.values] * whole).isinf()
        scales = (scales.view(torch.uint8) - infinite.to(torch.uint8)).view(kind.scale)
    factor = scales.float() if whole is None else scales.float() * whole
    if kind.scale == E8M0:
        tiles = tiles.clamp(-LARGEST_PRODUCTS[kind.values], LARGEST_PRODUCTS[kind.values])
    scaled = (tiles / factor.unsqueeze(-2).unsqueeze(-1)).flatten(-4, -3).flatten(-2)
    scaled = scaled[..., :rows, :length]
    values = pairs(scaled) if kind.packed > 1 else scaled.to(kind.values)
    return Scaled(values, scales, kind.name, whole)


def _tiles(numbers: Tensor, block: int, across: int) -> Tensor:
    """Return ``[..., rows, k]`` as ``[..., bands, across, blocks, block]``, with zeros at the ends."""
    *leading, rows, length = numbers.shape
    blocks, bands = _blocks(length, block), _blocks(rows, across)
    padded = pad(numbers, (0, blocks * block - length, 0, bands * across - rows))
    return padded.reshape(*leading, bands, across, blocks, block)


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales that are at least ``wanted``, in float32."""
    if dtype == torch.float32:
        return wanted.clamp(min=SMALLEST)
    if dtype == E8M0:
        bits = wanted.contiguous().view(torch.int32)
        exact = torch.where(bits < 0x800000, 0x400000, 0)  # 2**-127 has no exponent in float32
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > exact)  # rounded up
        return exponent.clamp(0, 255).to(torch.uint8).view(E8M0)
    return wanted.clamp(2.0**-9, LARGEST[E4M3]).to(dtype)


def pairs(numbers: Tensor) -> Tensor:
    """Return numbers of at most 6 as e2m1, two in a byte: ``[..., k]`` to ``[..., k / 2]``."""
    size = numbers.abs()
    bits = torch.zeros_like(size, dtype=torch.uint8)
    for low, high in itertools.pairwise(FP4_NUMBERS):
        middle = (low + high) / 2
        odd = FP4_NUMBERS.index(low) % 2  # a tie goes to the number whose last bit is 0
        bits += ~(size < middle) if odd else ~(size <= middle)  # nan becomes 6, as on a GPU
    bits |= numbers.signbit().to(torch.uint8) << 3
    return (bits[..., ::2] | bits[..., 1::2] << 4).view(FP4)


def unpair(values: Tensor) -> Tensor:
    """Return the numbers of packed e2m1 as float32: ``[..., k / 2]`` to ``[..., k]``."""
    both = values.view(torch.uint8)
    bits = torch.stack([both & 15, both >> 4], -1).flatten(-2).long()
    sizes = torch.tensor(FP4_NUMBERS, dtype=torch.float32, device=values.device)
    return torch.cat([sizes, -sizes])[bits]


def _swizzled_size(rows: int, blocks: int) -> int:
    """Return the number of scales in the swizzled layout of ``rows x blocks``, with its padding."""
    return (
        _blocks(rows, SWIZZLE_ROWS)
        * SWIZZLE_ROWS
        * _blocks(blocks, SWIZZLE_COLUMNS)
        * SWIZZLE_COLUMNS
    )


def swizzled(scales: Tensor) -> Tensor:
    """Return ``[rows, blocks]`` one-byte scales in the layout SWIZZLE_32_4_4, flat, padded with zeros.

    Tiles of 128 x 4 follow each other by row, with row ``32 a + b`` and column ``c`` at ``16 b + 4 a + c``.
    """
    rows, blocks = scales.shape
    bands, groups = _blocks(rows, SWIZZLE_ROWS), _blocks(blocks, SWIZZLE_COLUMNS)
    right, below = groups * SWIZZLE_COLUMNS - blocks, bands * SWIZZLE_ROWS - rows
    whole = pad(scales.view(torch.uint8), (0, right, 0, below))
    tiles = whole.view(bands, 4, 32, groups, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def unswizzle(scales: Tensor, rows: int, blocks: int) -> Tensor:
    bands, groups = _blocks(rows, SWIZZLE_ROWS), _blocks(blocks, SWIZZLE_COLUMNS)
    tiles = scales.contiguous().view(torch.uint8).view(bands, groups, 32, 4, 4)
    whole = tiles.permute(0, 3, 2, 1, 4).reshape(bands * SWIZZLE_ROWS, groups * SWIZZLE_COLUMNS)
    return whole[:rows, :blocks].contiguous().view(scales.dtype)


# -- packed rows, see kernels/block_scales.py --------------------------------------------------------


def packed_rows(scaled: Scaled) -> Tensor:
    """Return each row's values and scales as bytes: ``[..., rows, row_bytes]``, contiguous.

    A weight ``(..., k, n)`` becomes ``(..., row_bytes, n)``, with packed columns.
    """
    if scaled._rows is not None:
        return scaled._rows
    if scaled.inner == -2:
        return packed_rows(scaled.t()).mT
    kind, (*leading, rows, numbers) = scaled.kind, scaled.shape
    packed = scaled.values.new_zeros((*leading, rows, kind.row_bytes(numbers)), dtype=torch.uint8)
    values, scales, whole = _views(packed, kind)
    values[..., : scaled.values.shape[-1]] = scaled.values.view(torch.uint8)
    of_rows = scaled._scales_of_rows()
    bits = torch.uint8 if kind.scale.itemsize == 1 else kind.scale  # Inductor copies no part of fp8
    scales.view(bits)[..., : of_rows.shape[-1]] = of_rows.view(bits)
    if whole is not None:
        whole.copy_(whole.new_ones(()) if scaled.whole is None else scaled.whole)
    return packed


def unpacked_rows(rows: Tensor, kind: BlockFormat, numbers: int) -> Scaled:
    """Return the matrix with these packed rows of ``numbers`` numbers; an op accepts it without a copy."""
    values, scales, whole = _views(rows, kind)
    values = values[..., : numbers // kind.packed].view(kind.values)
    scaled = Scaled(values, scales[..., : _blocks(numbers, kind.block)], kind.name, whole)
    return scaled._of_rows(rows)


def _of_packed(rows: Tensor, format: str, numbers: int, inner: int) -> Scaled:
    scaled = unpacked_rows(rows, format_named(format), numbers)
    return scaled if inner == -1 else scaled.t()


def _of_bytes(
    values: Tensor, scales: Tensor, format: str, whole: Tensor | None, inner: int
) -> Scaled:
    kind = format_named(format)
    return Scaled(values.view(kind.values), scales.view(kind.scale), format, whole, inner)


torch.serialization.add_safe_globals([_of_packed, _of_bytes])


def _views(rows: Tensor, kind: BlockFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the values as bytes, the scales, and the scale of the whole tensor of packed rows."""
    of_values, of_scales = kind.step_bytes
    steps = kind.steps(rows.shape[-1])
    first, end = steps * of_values, steps * (of_values + of_scales)
    whole = rows[..., end : end + 4].view(torch.float32) if kind.whole else None
    return rows[..., :first], rows[..., first:end].view(kind.scale), whole


def multiply_packed(left: Tensor, right: Tensor, kind: BlockFormat) -> Tensor:
    """Return ``left @ right`` of packed matrices, ``(m, row_bytes)`` and ``(row_bytes, n)``, in float32.

    On the CPU the bits are as in kernels: for each 128 numbers along k, products are summed exactly,
    rounded once, and added in float32. On a GPU torch multiplies float32 numbers.
    """
    sides = [_views(each.contiguous(), kind) for each in (left, right.mT)]
    wholes = [whole for *_, whole in sides]
    if left.is_cuda:
        numbers = [
            _numbers(values, side) * scales.float().repeat_interleave(kind.block, 1)
            for (values, scales, _), side in zip(sides, (kind, kind.of_weight), strict=True)
        ]
        total = numbers[0] @ numbers[1].T
    else:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float32)
        for step in range(kind.steps(left.shape[1])):
            total += _product_of_step(sides, step, kind)
    if wholes[0] is not None and wholes[1] is not None:
        of_rows, of_columns = wholes[0], wholes[1].T
        # In the order of kernels, see block_scales.multiply_packed.
        apart = (of_rows > 1.0) != (of_columns > 1.0)
        total = torch.where(apart, total * (of_rows * of_columns), total * of_rows * of_columns)
    return total


def _product_of_step(sides: Sequence[Any], step: int, kind: BlockFormat) -> Tensor:
    factors, of_rows = [], []
    for (values, scales, _), side in zip(sides, (kind, kind.of_weight), strict=True):
        own_scales = scales[
            :, step * INNER // kind.block : (step + 1) * INNER // kind.block
        ].float()
        numbers = _numbers(
            values[:, step * INNER // kind.packed : (step + 1) * INNER // kind.packed], side
        )
        if kind.scale != torch.float32:
            numbers = (numbers * own_scales.repeat_interleave(kind.block, 1)).bfloat16().float()
        factors.append(numbers.numpy())
        of_rows.append(own_scales)
    with np.errstate(all="ignore"):  # infinities and nans are valid results
        product = torch.from_numpy(matrix_product(factors[0], factors[1].T))
    return product * (of_rows[0] * of_rows[1].T) if kind.scale == torch.float32 else product


def _numbers(values: Tensor, kind: BlockFormat) -> Tensor:
    """Return the numbers for these bytes in float32, without their scales."""
    return unpair(values) if kind.packed > 1 else values.view(kind.values).float()
