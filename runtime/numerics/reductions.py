"""Elementwise reductions over ranks: one definition of every op for every dtype.

docs/reference/collectives.md says what each op is for each dtype. Complex numbers are reduced as pairs of
the real dtype, complex32 in complex64. The avg of integers is the sum in int64 (uint64: modulo 2**64),
divided.

The order is always from left to right, and in min and max NaN wins, as in torch. Equal ranges of equal
parts give equal bits. The position of an element in its range may decide the sign of a zero that min or max
finds among zeros of both signs, and the last bit of a complex product, because torch's loop over whole
registers and its loop over the rest differ there. So ranks that reduce the same data must cut it alike.

All is computed in the usual floating-point mode: to the nearest, with denormal numbers. Ranks that each sum
the same data get the same bits only in the same mode, and a user may set another mode on one of them
(``torch.set_flush_denormal``, C's ``fesetround``). The mode of torch's threads may differ. Therefore only
the calling thread computes what every rank computes for itself, which is little.

Two parts are the common case, and most dtypes have one torch operator for them. Several parts are reduced
in pieces that stay in the cache, so memory is read and written once.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
PIECE = 1 << 17  # elements per thread; smaller ones cost more calls than they save misses
ALONE = 1 << 14  # elements; with twice as many, torch uses several threads
EVERYWHERE = 256 << 10  # bytes, at most, that every rank computes for itself
DEVICE_PIECE = 1 << 24  # where a launch costs more than a pass through memory

Fold = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
Binary = Callable[..., torch.Tensor]
Finish = Callable[[torch.Tensor, int], Any]

_FLOATS = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
NARROW_FLOATS = (*_HALVES, *_FP8)  # their sums and products are in fp32
_COMPLEX = (torch.complex64, torch.complex128)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_LONGEST = 256  # bytes of an fenv_t: 32 on x86-64, 8 on AArch64
_USUAL = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_DENORMAL, _LITTLE, _one = 2.0**-1070, 2.0**-60, 1.0

_c: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def is_usual() -> bool:
    """Return whether the mode of this thread is the usual one.

    Asking C costs 1 us, as much as adding two small tensors. Four sums in Python show it in 0.1 us (Zen 4,
    Python 3.11, November 2026).
    """
    return (
        _DENORMAL * 0.5 > 0.0
        and _one + _LITTLE == 1.0
        and _one - _LITTLE == 1.0
        and -_one - _LITTLE == -1.0
    )


class UsualMode:
    """A context in which this thread computes in the usual mode. Afterwards it has its previous mode."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: ctypes.Array[ctypes.c_char] | None = None
        if not is_usual() and _c is not None:
            self._before = ctypes.create_string_buffer(_LONGEST)
            _c.fegetenv(self._before)
            _c.fesetenv(_USUAL)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _c.fesetenv(self._before)


def _pieces(
    parts: Sequence[torch.Tensor], output: torch.Tensor
) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
    """Yield equal ranges of all tensors, small enough for the cache."""
    threads = 1 if output.is_cuda else torch.get_num_threads()
    size = DEVICE_PIECE if output.is_cuda else PIECE * threads
    if threads > 1 and output.nbytes <= EVERYWHERE:
        size = ALONE
    tensors = (*parts, output)
    if output.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield parts, output
        return
    ranges = [torch.split(tensor.view(-1), size) for tensor in tensors]
    for *pieces, result in zip(*ranges, strict=True):
        yield pieces, result


def _nothing(total: torch.Tensor, count: int) -> None:
    pass


def _divide(total: torch.Tensor, count: int) -> None:
    total.div_(count)


def _divide_whole(total: torch.Tensor, count: int) -> None:
    torch.div(total, count, rounding_mode="trunc", out=total)


def _divide_unsigned(total: torch.Tensor, count: int) -> None:
    """Divide int64 that stands for uint64: torch has no such kernel.

    Half of the number is never negative. Twice its quotient is the quotient or one too small.
    """
    half = (total >> 1).bitwise_and_((1 << 63) - 1)
    quotient = torch.div(half, count, rounding_mode="trunc").mul_(2)
    rest = total.sub_(quotient * count)  # 0 <= rest < 2 * count
    torch.add(quotient, rest >= count, out=total)


def _direct(binary: Binary, finish: Finish = _nothing) -> Fold:
    """Fold in the dtype itself, in the output's memory."""

    def fold(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        address = output.data_ptr()
        late = any(part.data_ptr() == address for part in parts[2:])  # read after the first write
        for pieces, result in _pieces(parts, output):
            total = torch.empty_like(result) if late else result
            binary(pieces[0], pieces[1], out=total)
            for piece in pieces[2:]:
                binary(total, piece, out=total)
            finish(total, len(parts))
            if late:
                result.copy_(total)

    return fold


def _copy(scratch: torch.Tensor, part: torch.Tensor) -> None:
    scratch.copy_(part)


def _wide(
    dtype: torch.dtype,
    binary: Binary,
    finish: Finish = _nothing,
    load: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
) -> Fold:
    """Fold in a wider dtype, to which ``load`` or torch converts the parts; the output may have it."""

    def fold(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        scratch = None
        for pieces, result in _pieces(parts, output):
            if scratch is None or scratch.shape[1:] != result.shape:
                shape = (1 if load is None else 2, *result.shape)
                scratch = torch.empty(shape, dtype=dtype, device=output.device)
            total, other = scratch[0], scratch[-1]
            (load or _copy)(total, pieces[0])
            for piece in pieces[1:]:
                if load is None:
                    binary(total, piece, out=total)
                else:
                    load(other, piece)
                    binary(total, other, out=total)
            finish(total, len(parts))
            result.copy_(total)

    return fold


def _offset(dtype: torch.dtype, binary: Binary) -> Fold:
    """Fold min and max of unsigned numbers as signed: with the top bit inverted the order is the same."""
    top = torch.iinfo(dtype).min

    def load(scratch: torch.Tensor, part: torch.Tensor) -> None:
        torch.bitwise_xor(part, top, out=scratch)

    return _wide(dtype, binary, lambda total, count: total.bitwise_xor_(top), load)


def _fold_of_view(view: Callable[[torch.Tensor], torch.Tensor], inner: Fold) -> Fold:
    """Return a fold that calls ``inner`` on the same memory, viewed as another dtype."""

    def fold(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        inner([view(part) for part in parts], view(output))

    return fold


# -- the table ---------------------------------------------------------------------------------

_ARITHMETIC: dict[str, Binary] = {"sum": torch.add, "product": torch.mul}
_ORDER: dict[str, Binary] = {"min": torch.minimum, "max": torch.maximum}
_BITS: dict[str, Binary] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OF_BOOL: dict[str, Binary] = {
    **{op: torch.logical_or for op in ("sum", "max", "bor")},
    **{op: torch.logical_and for op in ("product", "min", "band", "avg")},
    "bxor": torch.logical_xor,
}

_FOLDS: dict[tuple[str, torch.dtype], Fold] = {}
_PAIRS: dict[tuple[str, torch.dtype], Binary] = {}
"""Functions that fold two parts in one call of torch, with the same bits as ``_FOLDS``."""


def _in_dtype(dtype: torch.dtype, binaries: dict[str, Binary]) -> None:
    for op, binary in binaries.items():
        _FOLDS[op, dtype] = _direct(binary)
        _PAIRS[op, dtype] = binary


def _fill() -> None:
    for dtype in _FLOATS:
        _in_dtype(dtype, {**_ARITHMETIC, **_ORDER})
        _FOLDS["avg", dtype] = _direct(torch.add, _divide)
    for dtype in _HALVES:
        for op, binary in _ARITHMETIC.items():
            _FOLDS[op, dtype] = _wide(torch.float32, binary)
        _FOLDS["avg", dtype] = _wide(torch.float32, torch.add, _divide)
        # fp32 has more than twice the bits and two. So an operator on two halves, which torch computes in
        # fp32, rounds correctly whatever its steps are.
        _PAIRS.update({(op, dtype): binary for op, binary in _ARITHMETIC.items()})
        _in_dtype(dtype, _ORDER)  # selects, never rounds
    for dtype in _FP8:
        for op, binary in {**_ARITHMETIC, **_ORDER}.items():
            _FOLDS[op, dtype] = _wide(torch.float32, binary, load=_copy)
        _FOLDS["avg", dtype] = _wide(torch.float32, torch.add, _divide, _copy)
    for op in ("sum", "avg"):
        halves = _FOLDS[op, torch.float16]
        _FOLDS[op, torch.complex32] = _fold_of_view(torch.view_as_real, halves)
    _FOLDS["product", torch.complex32] = _wide(torch.complex64, torch.mul)
    for dtype in _COMPLEX:
        _in_dtype(dtype, _ARITHMETIC)
        # torch divides complex numbers by complex numbers, which rounds more often
        _FOLDS["avg", dtype] = _fold_of_view(torch.view_as_real, _direct(torch.add, _divide))

    for dtype in (torch.uint8, *_SIGNED):
        _in_dtype(dtype, {**_ARITHMETIC, **_ORDER, **_BITS})
        _FOLDS["avg", dtype] = _wide(torch.int64, torch.add, _divide_whole)
    for dtype, signed in _AS_SIGNED.items():

        def view(tensor: torch.Tensor, signed: torch.dtype = signed) -> torch.Tensor:
            return tensor.view(signed)

        for op in (*_ARITHMETIC, *_BITS):
            _FOLDS[op, dtype] = _fold_of_view(view, _FOLDS[op, signed])
        for op, binary in _ORDER.items():
            _FOLDS[op, dtype] = _fold_of_view(view, _offset(signed, binary))
        if dtype == torch.uint64:
            _FOLDS["avg", dtype] = _fold_of_view(
                view, _wide(torch.int64, torch.add, _divide_unsigned)
            )
        else:
            _FOLDS["avg", dtype] = _wide(torch.int64, torch.add, _divide_whole, _copy)
    _in_dtype(torch.bool, _OF_BOOL)


_fill()

DTYPES = tuple(dict.fromkeys(dtype for _, dtype in _FOLDS))
"""Every dtype that some op can reduce."""


def check(op: str, dtype: torch.dtype) -> None:
    """Raise TypeError unless ``op`` is defined for ``dtype``, ValueError if there is no such op."""
    if (op, dtype) in _FOLDS:
        return
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")
    raise TypeError(f'op "{op}" is not defined for {dtype}')


def fold(op: str, parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Compute ``output = parts[0] op parts[1] op ...``, elementwise, from left to right.

    All tensors have one shape, dtype and device and are detached; ``op`` is defined for the dtype.
    ``output`` may be the same memory as one of the parts, but not overlap one partly. One part is its own
    reduction.
    """
    if output.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # torch's operators write such a tensor only in this mode
            fold(op, parts, output)
        return
    binary = _PAIRS.get((op, output.dtype)) if len(parts) == 2 else None
    if binary is None:
        fold_unrounded(op, parts, output)
        return
    with UsualMode():
        if output.numel() > ALONE and output.nbytes <= EVERYWHERE:
            for (left, right), result in _pieces(parts, output):
                binary(left, right, out=result)
        else:
            binary(parts[0], parts[1], out=output)


def fold_unrounded(op: str, parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Like :func:`fold`; sum and avg may also go to the accumulation dtype, before the one rounding."""
    if len(parts) == 1:
        if parts[0].data_ptr() != output.data_ptr():
            output.copy_(parts[0])
    else:
        with UsualMode():
            _FOLDS[op, parts[0].dtype](parts, output)


def divide(total: torch.Tensor, count: int) -> None:
    """Divide ``total / count`` in place: the last step of avg after a sum in the accumulation dtype."""
    if total.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            divide(total, count)
        return
    if total.is_complex() or total.is_floating_point():
        real = torch.view_as_real(total) if total.is_complex() else total
        with UsualMode():
            for _, piece in _pieces((), real):
                _divide(piece, count)
    elif total.dtype == torch.uint64:
        _divide_unsigned(total.view(torch.int64), count)
    else:
        _divide_whole(total, count)
