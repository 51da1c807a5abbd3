"""Exact arithmetic for Triton's interpreter: bf16, fp8 and fp16 give what a compiled kernel gives.

The interpreter keeps bf16 and fp8 tiles as unsigned integers and then computes on those integers,
so a bf16 sum is silently wrong. Here every operation widens its operands to fp32 (exactly),
computes, and rounds once to nearest even. That is what the GPU does: fp32 has more than twice the
digits of these types, so +, -, * and / are as if rounded once from the exact value.

    stored bits --widen--> fp32 numpy --operation--> fp32 or fp64 --narrow--> stored bits

Results follow the hardware and not torch in three cases. Conversions to fp8 saturate (`cvt.satfinite`: 500
becomes 448 in e4m3, and nan in torch). Integers and fp64 round once on the way to bf16 (torch goes through
fp32). And min, max and clamp return the number if one operand is nan.

Results may differ from the GPU in these cases:
- `tl.dot` and reductions add in the order of `numerics/exact.py`, which is the same on every processor, but
  not the order of a tensor core. fp32 operands are not rounded to tf32.
- `tl.sum` of bf16, fp16 and fp8 adds in fp32 and rounds once; compiled code rounds every addition.
- fp64 `tl.fma` rounds twice; float to integer out of range is undefined, here and on a GPU.

Triton itself is not edited: instance attributes shadow builder methods. `tl.reduce` and
`tl.associative_scan` do not reach the builder, so their one method is replaced.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.compat.stand_ins import Replacement
from interlace.runtime.compat.triton_interpreter import (
    TensorHandle,
    atomics,
    bare,
    ir,
    triton_interpreter,
)
from interlace.runtime.core.accesses import Handle
from interlace.runtime.numerics import exact as formats
from interlace.runtime.numerics.exact import larger, matrix_product, reduce, smaller

UNSUPPORTED = ("fp8e4b15", "fp8e4b8", "fp8e5b16")  # not in OCP formats, nor in NVIDIA hardware


def _number(handle: Handle) -> formats.Array:
    return formats.widen(handle.data, handle.dtype.scalar)


def _is_stored(handle: Handle) -> bool:
    return handle.dtype.scalar.name in formats.STORED_AS_BITS


def _refuse(*dtypes: Any) -> None:
    for dtype in dtypes:
        if dtype.name in UNSUPPORTED:
            raise NotImplementedError(f"{dtype} is not available; use tl.float8e4nv or tl.float8e5")


def exact_overrides(builder: Any) -> dict[str, Callable[..., Any]]:
    """Map attributes of ``builder`` to functions for exact arithmetic; earlier hooks in it still work."""
    make = TensorHandle
    stock_binary, stock_unary, stock_cast = builder.binary_op, builder.unary_op, builder.cast_impl
    stock_fp_to_fp, stock_dot = builder.create_fp_to_fp, builder.create_dot
    stock_fma, stock_rmw = builder.create_fma, builder.create_atomic_rmw
    stock_descriptor_load = builder.create_descriptor_load
    stock_pointer_load: Any = getattr(builder, "create_tensor_pointer_load", None)

    def like(values: formats.Array, handle: Handle) -> TensorHandle:
        dtype = handle.dtype.scalar
        if dtype.name in formats.STORED_AS_BITS:
            return make(formats.narrow(values, dtype), dtype)
        return make(values.astype(triton_interpreter._get_np_dtype(dtype)), dtype)

    def binary_op(lhs: Handle, rhs: Handle, op: Callable[..., formats.Array]) -> TensorHandle:
        # Infinity and nan are results here, not numpy warnings. Set per operation, because every
        # greenlet has its own context and so its own numpy error state.
        with np.errstate(all="ignore"):
            if _is_stored(lhs) or _is_stored(rhs):
                out = op(_number(lhs), _number(rhs))
                return make(out, tl.int1) if out.dtype == bool else like(out, lhs)
            result = stock_binary(lhs, rhs, op)
        # Stock Triton tags a comparison with its operands' type, and a later cast trusts this type.
        return make(result.data, tl.int1) if result.data.dtype == bool else result

    def unary_op(arg: Handle, op: Callable[..., formats.Array]) -> TensorHandle:
        with np.errstate(all="ignore"):
            return like(op(_number(arg)), arg) if _is_stored(arg) else stock_unary(arg, op)

    def cast_impl(src: Handle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        _refuse(source, target)
        with np.errstate(all="ignore"):
            if target.name in formats.STORED_AS_BITS:
                return make(formats.narrow(_number(src), target), target)
            if _is_stored(src):
                return make(_number(src).astype(triton_interpreter._get_np_dtype(target)), target)
            return stock_cast(src, dst_type)

    def create_fp_to_fp(src: Handle, dst_type: Any, rounding_mode: object) -> TensorHandle:
        target = dst_type.scalar
        _refuse(src.dtype.scalar, target)
        form = formats.HALF if target.name == "fp16" else formats.STORED_AS_BITS.get(target.name)
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            if form is None:
                return stock_fp_to_fp(src, dst_type, rounding_mode)
            with np.errstate(all="ignore"):
                bits = formats.encode(_number(src), form, np.trunc)
            return make(bits.view(triton_interpreter._get_np_dtype(target)), target)
        return cast_impl(src, dst_type)

    def create_dot(a: Handle, b: Handle, d: Handle, precision: Any, imprecise: Any) -> TensorHandle:
        if not d.dtype.scalar.is_floating():
            return stock_dot(a, b, d, precision, imprecise)
        # A narrow accumulator is rounded once at the end, and not at every addition.
        with np.errstate(all="ignore"):
            return like(matrix_product(_number(a), _number(b)) + _number(d), d)

    def create_fma(x: Handle, y: Handle, z: Handle) -> TensorHandle:
        if z.data.dtype == np.float64 or not z.dtype.scalar.is_floating():
            return stock_fma(x, y, z)
        with np.errstate(all="ignore"):
            return like(formats.fused_multiply_add(_number(x), _number(y), _number(z)), z)

    def create_clampf(x: Handle, low: Handle, high: Handle, propagate: object) -> TensorHandle:
        number, least, most = _number(x), _number(low), _number(high)
        with np.errstate(all="ignore"):
            if propagate == tl.PropagateNan.ALL:
                return like(np.minimum(np.maximum(number, least), most), x)
            return like(smaller(larger(number, least), most), x)

    def constant(dtype: object) -> Callable[[float], Handle]:
        return lambda value: make(formats.narrow(np.array([value], dtype=np.float64), dtype), dtype)

    def pads_with_nan(element: Any, padding: Any) -> bool:
        nan = ir.PADDING_OPTION.PAD_NAN
        return bool(padding == nan and element.name in formats.STORED_AS_BITS)

    def padded_load(access: tuple[Any, Any], *policy: Any) -> TensorHandle:
        ptrs, mask = access
        dtype = ptrs.get_element_ty()
        form = formats.STORED_AS_BITS[dtype.name]
        nan = make(np.full(ptrs.data.shape, form.nan, form.storage), dtype)
        return builder.create_masked_load(ptrs, make(bare(mask), tl.int1), nan, *policy)

    def create_descriptor_load(desc: Any, indices: Any, *policy: Any) -> TensorHandle:
        if not pads_with_nan(desc.base.dtype.element_ty, desc.padding):
            return stock_descriptor_load(desc, indices, *policy)
        return padded_load(desc.materialize_pointers(indices), *policy, False)

    def create_tensor_pointer_load(
        ptr: Any, boundary_check: Any, padding: Any, *policy: Any
    ) -> TensorHandle:
        if not pads_with_nan(ptr.base.get_element_ty(), padding):
            return stock_pointer_load(ptr, boundary_check, padding, *policy)
        return padded_load(ptr.materialize_pointers(boundary_check), *policy)

    def create_atomic_rmw(op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if not _is_stored(val):
            return stock_rmw(op, ptr, val, mask, sem, scope)
        before = np.zeros(ptr.data.shape, val.data.dtype)
        order = builder.ir_sem_to_interpreter_sem[sem]
        values, chosen = (np.broadcast_to(bare(x), before.shape) for x in (_number(val), mask))
        for place in np.argwhere(chosen).tolist():  # as sums: these types have no other operation
            at, seen = (*place, None), np.zeros(1, before.dtype)
            while True:
                total = formats.narrow(formats.widen(seen, val.dtype) + values[at], val.dtype)
                found = atomics.atomic_cas(ptr.data[at], seen, total, order)
                if found[0] == seen[0]:
                    break
                seen = found
            before[at] = seen
        return make(before, val.dtype)

    functions = (
        *(binary_op, unary_op, cast_impl, create_fp_to_fp, create_dot, create_fma, create_clampf),
        *(create_descriptor_load, create_atomic_rmw),
        *((create_tensor_pointer_load,) if stock_pointer_load else ()),
    )
    return {
        **{function.__name__: function for function in functions},
        "create_minnumf": lambda lhs, rhs: binary_op(lhs, rhs, smaller),
        "create_maxnumf": lambda lhs, rhs: binary_op(lhs, rhs, larger),
        "create_rsqrt": lambda arg: unary_op(arg, lambda x: 1 / np.sqrt(x)),
        "create_umulhi": _high_product,
        "get_bf16": constant(tl.bfloat16),
        "get_fp8e4nv": constant(tl.float8e4nv),
        "get_fp8e5": constant(tl.float8e5),
    }


def _high_product(lhs: Handle, rhs: Handle) -> TensorHandle:
    """Return the high half of an unsigned product; Triton's function extends the sign."""
    bits = 8 * lhs.data.itemsize
    wide = np.uint64 if bits == 32 else object
    x, y = (each.data.view(f"u{bits // 8}").astype(wide) for each in (lhs, rhs))
    high = (x * y >> bits).astype(f"u{bits // 8}")
    return TensorHandle(high.view(lhs.data.dtype), lhs.dtype.scalar)


def _tensor(data: object, dtype: object, model: Any) -> Any:
    shape = model.type.get_block_shapes() if model.type.is_block() else None
    kind = tl.block_type(dtype, shape) if shape else dtype
    return tl.tensor(TensorHandle(data, dtype), kind)


def _narrow(tensor: Any, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        data = tensor.handle.data
        data = data.astype(np.float16) if dtype.name == "fp16" else formats.narrow(data, dtype)
    return _tensor(data, dtype, tensor)


def exact_reduction(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``apply_impl`` of a reduction or scan of floats, in the order of ``numerics/exact.py``.

    bf16, fp8 and fp16 are computed in fp32 and rounded once. Triton's own method calls numpy on the stored
    data, which for bf16 and fp8 are bits, and the order of numpy's sums depends on the layout. A user's
    combine function runs element by element through the builder, and is already exact.
    """
    standard = tl.standard  # by identity: where Triton compiles, a hash reads the called functions
    in_halves: dict[int, Callable[[Any, Any], Any]] = {
        id(standard._sum_combine): np.add,
        id(standard._elementwise_max): larger,
        id(standard._elementwise_min): smaller,
    }
    first_index = {
        id(standard._argmax_combine_tie_break_left): np.argmax,
        id(standard._argmin_combine_tie_break_left): np.argmin,
    }
    native = {
        id(standard._prod_combine),
        id(standard._argmax_combine_tie_break_fast),
        id(standard._argmin_combine_tie_break_fast),
    }

    def reduce_all(self: Any, first: Any) -> list[Any]:
        data, axis = first.handle.data, self.axis
        axis = axis if axis is None else axis % data.ndim
        lines = data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0)
        if id(self.combine_fn) in in_halves:
            parts = [reduce(in_halves[id(self.combine_fn)], lines, 0)]
        else:
            index = first_index[id(self.combine_fn)](lines, axis=0)
            parts = [np.take_along_axis(lines, index[None], 0)[0], index]
        if self.keep_dims:
            kept = [1 if axis in (None, at) else n for at, n in enumerate(data.shape)]
            parts = [part.reshape(kept) for part in parts]
        return [self.to_tensor(*each) for each in zip(parts, (first.dtype, tl.int32), strict=False)]

    def apply_impl(self: Any, tensors: tuple[Any, ...]) -> Any:
        first, combine = tensors[0], id(self.combine_fn)
        dtype, is_exact = first.dtype, combine in in_halves or combine in first_index
        if not dtype.is_floating() or not (is_exact or combine in native):
            return stock(self, tensors)
        narrowed = dtype.name in formats.STORED_AS_BITS or dtype.name == "fp16"
        if narrowed:
            first = _tensor(_number(first.handle).astype(np.float32), tl.float32, first)
        with np.errstate(all="ignore"):
            if is_exact and isinstance(self, triton_interpreter.ReduceOps):
                found = reduce_all(self, first)
            else:
                found = stock(self, (first, *tensors[1:]))
                found = list(found) if isinstance(found, (list, tuple)) else [found]
        # A result that is not fp32 is an index of argmax or argmin.
        return [_narrow(f, dtype) if narrowed and f.dtype == tl.float32 else f for f in found]

    return apply_impl


def exact_arithmetic() -> list[Replacement]:
    """Return replacements that make interpreted kernels exact in all threads, which share one builder."""
    builder = triton_interpreter.interpreter_builder
    kinds = (triton_interpreter.ReduceOps, triton_interpreter.ScanOps)
    return [
        *((builder, *override) for override in exact_overrides(builder).items()),
        *((kind, "apply_impl", exact_reduction(kind.apply_impl)) for kind in kinds),
    ]
