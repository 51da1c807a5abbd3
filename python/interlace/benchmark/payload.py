"""Payloads that every rank can compute for every rank, and the error of a result that was made of them.

Element i of rank r in call c is one of 128 values that float16, bfloat16 and all wider dtypes hold exactly:
whole numbers from -64 to 63 for integers, these over 32 for floats. Large results are compared a piece at
a time, so that a check needs little memory besides.
"""

import torch

from interlace import reference

PIECE = 1 << 22
_MIX = -7046029254386353131  # 2**64 / golden ratio, as a signed word
_MIX_AGAIN = -4658895280553007687
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values(index: torch.Tensor, rank: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of the elements ``index`` (int64, any shape) of a vector of ``rank`` in ``call``."""
    mixed = (index + (rank + 1) * 1_000_003 + (call + 1) * 7_368_787_331) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _MIX_AGAIN
    small = ((mixed >> 33) & 127) - 64
    return (small / 32).to(dtype) if dtype.is_floating_point else small.to(dtype)


def vector(
    first: int, count: int, rank: int, call: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Elements ``first`` to ``first + count``."""
    output = torch.empty(count, dtype=dtype, device=device)
    for begin in range(0, count, PIECE):
        end = min(count, begin + PIECE)
        index = torch.arange(first + begin, first + end, device=device)
        output[begin:end] = values(index, rank, call, dtype)
    return output


def some_rows(
    rows: torch.Tensor, columns: int, rank: int, call: int, dtype: torch.dtype
) -> torch.Tensor:
    """These rows of a matrix that has the elements of a vector, row by row."""
    index = rows[:, None] * columns + torch.arange(columns, device=rows.device)
    return values(index, rank, call, dtype)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no right result has: nan, or a number beyond the payload. In place."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 99)


def error_of_copy(result: torch.Tensor, first: int, rank: int, call: int) -> float:
    """0 if ``result`` is the payload of ``rank`` from element ``first`` on, else inf."""
    flat = result.reshape(-1)
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        right = vector(first + begin, piece.numel(), rank, call, piece.dtype, piece.device)
        if not torch.equal(piece, right):
            return float("inf")
    return 0.0


def error_of_sum(
    result: torch.Tensor, first: int, world_size: int, call: int, *, rounds_often: bool
) -> float:
    """The largest error of a sum over ranks, in bounds; ``rounds_often``: partial sums are rounded, too."""
    flat, worst = result.reshape(-1), 0.0
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        parts = [
            vector(first + begin, piece.numel(), rank, call, piece.dtype, piece.device)
            for rank in range(world_size)
        ]
        if not piece.dtype.is_floating_point:
            right = torch.stack(parts).sum(0, dtype=torch.int64).to(piece.dtype)
            worst = max(worst, 0.0 if torch.equal(piece, right) else float("inf"))
            continue
        value, bound = reference.reduce(parts)
        if rounds_often:
            bound = bound + often_rounded(parts, piece.dtype)
        worst = max(worst, reference.worst_ratio(piece, value, bound))
    return worst


def often_rounded(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A bound on a sum's error from rounding each partial sum of ``parts`` to ``dtype``."""
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    return reference.gamma(len(parts) + 1, reference.unit_roundoff(dtype)) * magnitude
