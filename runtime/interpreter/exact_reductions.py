"""Exact sums, products, minima and maxima over an axis, for Triton's interpreter.

`tl.reduce` and `tl.associative_scan` do not reach the interpreter's builder: for the combine
functions of triton.language.standard they call numpy on the raw data, which for bf16 and fp8 is
bits, and for fp16 adds in fp16 along some axes and in fp32 along others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from interlace.runtime.numerics.float_formats import STORED_AS_BITS, narrow, widen


def _tensor(data: Any, dtype: Any, model: Any) -> Any:
    """``data`` as a tensor of ``dtype`` and of the shape of ``model``."""
    shape = model.type.get_block_shapes() if model.type.is_block() else None
    kind = tl.block_type(dtype, shape) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data, dtype), kind)


def _narrowed(tensor: Any, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        data = tensor.handle.data
        data = data.astype(np.float16) if dtype.name == "fp16" else narrow(data, dtype)
    return _tensor(data, dtype, tensor)


def exact_reduction(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_impl`` of a reduction or scan, made right for bf16, fp8 and fp16.

    Sums, products, minima and maxima are numpy calls on the raw data: these get fp32. A combine
    function of the user's runs element by element through the builder, and is exact already.
    """
    standard = tl.standard
    on_raw_data = (
        standard._sum_combine,
        standard._prod_combine,
        standard._elementwise_max,
        standard._elementwise_min,
        standard._argmax_combine_tie_break_left,
        standard._argmin_combine_tie_break_left,
    )

    def apply_impl(self: Any, tensors: tuple[Any, ...]) -> Any:
        dtype = tensors[0].dtype
        narrowed = dtype.name in STORED_AS_BITS or dtype.name == "fp16"
        if not narrowed or self.combine_fn not in on_raw_data:
            return stock(self, tensors)
        first = tensors[0]
        wide = widen(first.handle.data, dtype).astype(np.float32)
        with np.errstate(all="ignore"):
            found = stock(self, (_tensor(wide, tl.float32, first), *tensors[1:]))
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        # A result that is not fp32 is an index of argmax or argmin.
        return [_narrowed(f, dtype) if f.dtype == tl.float32 else f for f in found]

    return apply_impl
