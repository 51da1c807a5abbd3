"""Matrix products, sums, minima and maxima of numpy arrays, with the same bits on every processor.

The order in which a BLAS adds depends on the processor, on the number of threads, and on the shape of the
product: a row may get other bits when it is multiplied alone. The simulator computes by this definition::

    matrix_product   fp32 and narrower: products are exact in fp64, are added in fp64 in the order of k, and
                     the sum is rounded once, to fp32. fp64: each product and each sum is rounded to fp64.
    reduce           halves are combined until one element is left: ((x0 + x4) + (x2 + x6)) + ...
    larger, smaller  the number, if the other is nan; +0 is larger than -0

A sum that is zero is +0, and a nan of a product has the bits of ``np.nan``. So an element of a product
depends on its row and its column alone.

A loop over k in numpy is slow, so a BLAS computes the product in fp64 first. Two orders of the same K
additions differ by at most ``(2 K + 4) 2**-53 |row| |column|``. If all numbers within that distance of the
BLAS' result round to one fp32 number, then this is also the rounded sum in the order of k. The other
elements are added in the order of k: one of some 100,000 random ones, and those that cancel.
"""

from collections.abc import Callable

import numpy as np

from interlace.runtime.numerics.float_formats import Array

_UNIT = 2.0**-53


def matrix_product(left: Array, right: Array) -> Array:
    """``left @ right`` of floats, ``(..., M, K)`` and ``(..., K, N)``: fp64 if both are fp64, else fp32.

    The caller has numpy ignore infinities and nans, here and in :func:`reduce`: they are results.
    """
    if left.dtype == right.dtype == np.float64:
        batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        result = np.zeros((*batch, left.shape[-2], right.shape[-1]))
        for k in range(left.shape[-1]):
            result += left[..., :, k, None] * right[..., None, k, :]
        result[np.isnan(result)] = np.nan
        return result
    a, b = left.astype(np.float64), right.astype(np.float64)
    near = a @ b
    ones = np.ones(a.shape[-1])  # products are faster than np.einsum, and np.vecdot wants numpy 2
    of_rows = np.sqrt((a * a) @ ones)
    of_columns = np.sqrt(ones @ (b * b)) * ((2 * len(ones) + 4) * _UNIT)
    margin = of_rows[..., :, None] * of_columns[..., None, :]
    result = (near - margin).astype(np.float32)
    margin += near
    sure = result == margin.astype(np.float32)
    if not sure.all():
        special = ~np.isfinite(near)  # in every order: sums of fp32 products do not overflow
        result[special] = np.where(np.isnan(near), np.nan, near)[special]
        unsure = np.nonzero(~(sure | special))
        batch = near.shape[:-2]
        row, column = (*unsure[:-2], unsure[-2]), (*unsure[:-2], unsure[-1])
        rows = np.broadcast_to(a, (*batch, *a.shape[-2:]))[row]
        columns = np.broadcast_to(b, (*batch, *b.shape[-2:])).swapaxes(-1, -2)[column]
        result[unsure] = np.add.accumulate(rows * columns, axis=-1)[:, -1]
    result += np.float32(0)  # of -0 it makes +0
    return result


def reduce(combine: Callable[[Array, Array], Array], values: Array, axis: int) -> Array:
    """``values`` combined along ``axis``: halves with each other, until one element is left."""
    left = np.moveaxis(values, axis, 0)
    while (count := len(left)) > 1:
        half = count // 2
        pairs = combine(left[:half], left[half : 2 * half])
        left = np.concatenate([pairs, left[2 * half :]]) if count % 2 else pairs
    return left[0]


def larger(x: Array, y: Array) -> Array:
    """The number if only one is; +0 is larger than -0."""
    if x.dtype.kind in "iu":
        return np.maximum(x, y)
    equal = np.where(np.signbit(x), y, x)  # of zeros, numpy may return either
    return np.where(x == y, equal, np.fmax(x, y))


def smaller(x: Array, y: Array) -> Array:
    """The number if only one is; -0 is smaller than +0."""
    return np.minimum(x, y) if x.dtype.kind in "iu" else -larger(-x, -y)
