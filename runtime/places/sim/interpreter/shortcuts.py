"""Shortcuts through Triton's front end for the frequent work of interpreted kernels: arithmetic, calls.

Triton's interpreter runs every operation through the front end of the compiler. Types are promoted,
constants become tensors, shapes are broadcast by rule, and each step makes new types and tensors. An
addition of two numbers takes 20 us that way, and 3 us here (one core of a shared machine, Triton 3.7.1).
Kernels that move data mostly compute indices, so this decides how long they take.

Inside :func:`arithmetic_shortcuts` the operators of ``tl.tensor`` handle the following cases themselves,
and call the previous operator in all other cases::

    both int32 or int64; or the right one a Python        + - * // % & | ^   the wider one's type
    number or constexpr within int32                      << >>, by a number the left one's type
                                                          within 0..31
                                                          < <= > >= == !=    int1
    both int1                                             & | ^              int1
    a pointer and such an integer                         + -                the pointer's type
    int32 or int64                                        .to(int32, int64)  the new type
    a pointer; int64                                      .to(int64); of a   int64; the pointer's type
                                                          pointer's type
    anything                                              .to(its type)      itself
    a line of numbers                                     [:, None] [None, :]  a column, a row

Shapes have equally many dimensions, of equal lengths or 1, or one of the two is a scalar: then numpy
broadcasts as Triton does. The result has the type, the shape and the bits that the front end would have
given it; test_interpreter_shortcuts.py compares. Integers wrap around, without a check for overflow, which
the session omits anyway.

Inside :func:`call_shortcuts` loads, stores, ranges and the creation of tensors handle these cases and leave
all others to the front end. Results have its types, shapes, bits, which the same tests compare::

    tl.load      of pointers to numbers, of at least 8 bits; mask: none, or of the shape of the pointers;
                 other: none, or 0 (not for fp8: Triton converts no integer to it); no options
    tl.store     of numbers of the pointers' element type and shape, mask as above, or none; no options
    tl.atomic_*  add, xchg, and, or, xor of int32 and int64, by a number of the pointers' element type and
                 shape, or one within int32; no mask
    tl.arange    of two Python numbers or constexprs that it has been called with before
    tl.tensor    the shape and the number of elements are made once for every shape
    block_type   ... of another element type is made once for every type of numbers
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.compat.stand_ins import Replacement
from interlace.runtime.compat.triton_interpreter import (
    NO_POLICY,
    builder,
    everywhere,
    ir,
    unchecked_handle,
)
from interlace.runtime.core.accesses import Numbers

Method = Callable[..., Any]

_SCALAR = (1,)  # the shape of a scalar's data
_INTEGERS = {"int32": np.int32, "int64": np.int64}
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
_widths: dict[str, np.uint64] = {}
_blocks: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
_models: dict[tuple[int, ...], tl.tensor] = {}
_joint: dict[tuple[tuple[int, ...], tuple[int, ...]], tl.tensor | None] = {}
_ALL = slice(None)


def _divide(left: Numbers, right: Numbers) -> Any:
    return (left - np.fmod(left, right)) // right


_ARITHMETIC: dict[str, Method] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_DIVISIONS: dict[str, Method] = {"floordiv": _divide, "mod": np.fmod}
_COMPARISONS: dict[str, Method] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_SHIFTS: dict[str, Method] = {"lshift": np.left_shift, "rshift": np.right_shift}
_LOGIC: dict[str, Method] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _new_tensor(
    model: object, data: object, dtype: object, kind: object, of: object = None
) -> tl.tensor:
    """Return a tensor of ``model``'s shape, without the checks of the constructors.

    ``of``: for pointers, the type in the handle, which has their origin (``session.py``).
    """
    tensor = object.__new__(tl.tensor)
    tensor.__dict__.update(model.__dict__)
    tensor.handle, tensor.dtype, tensor.type = unchecked_handle(data, of or dtype), dtype, kind
    return tensor


def lengths(kind: tl.block_type) -> tuple[int, ...]:
    """Return a block type's lengths as numbers: a dictionary compares these without Triton's code."""
    shape = kind.shape
    return tuple(shape.values if shape.__class__ is tl.tuple else shape)


def block_of(dtype: tl.dtype, kind: tl.block_type) -> tl.block_type:
    """Return the block type of elements of ``dtype`` in the shape of ``kind``, made once."""
    key = dtype.name, lengths(kind)
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = tl.block_type(dtype, kind.shape)
    return found


def _type_in_shape(dtype: tl.dtype, model: tl.tensor) -> tl.dtype:
    kind = model.type
    if kind.__class__ is not tl.block_type:
        return dtype
    if model.dtype is dtype:
        return kind
    return block_of(dtype, kind)


def _of_shape(shape: tuple[int, ...]) -> tl.tensor:
    """Return a block of that shape, without data, made once."""
    found = _models.get(shape)
    if found is None:
        found = _models[shape] = tl.tensor(None, tl.block_type(tl.int32, list(shape)))
    return found


def _together(shape: tuple[int, ...], theirs: tuple[int, ...]) -> tl.tensor | None:
    """Return a block of the broadcast shape; None if shapes do not broadcast or differ in dimensions."""
    if (shape, theirs) not in _joint:
        pairs = list(zip(shape, theirs, strict=False))
        fit = len(shape) == len(theirs) and all(a == b or 1 in (a, b) for a, b in pairs)
        _joint[shape, theirs] = _of_shape(tuple(map(max, pairs))) if fit else None
    return _joint[shape, theirs]


def _model(left: tl.tensor, right: tl.tensor) -> tl.tensor | None:
    """Return a tensor of the result's shape; None if there is none, or if scalars have another shape."""
    shape, theirs = left.handle.data.shape, right.handle.data.shape
    if left.type.__class__ is tl.block_type:
        if right.type.__class__ is tl.block_type:
            return left if shape == theirs else _together(shape, theirs)
        return left if theirs == _SCALAR else None
    if shape != _SCALAR:
        return None
    return right if right.type.__class__ is tl.block_type or theirs == _SCALAR else None


def within(number: int) -> bool:
    """Return whether the number is within int32, the type that the front end gives it."""
    return _LEAST <= number <= _MOST


def _integers(left: tl.tensor, right: Any) -> tuple[tl.tensor, tl.dtype, Numbers, Numbers] | None:
    """Return the model and type of the result and the data of both; None if a shortcut is not possible."""
    dtype, data = left.dtype, left.handle.data
    numpy_type = _INTEGERS.get(dtype.name)
    if numpy_type is None or data.dtype.type is not numpy_type:
        return None
    if right.__class__ is tl.constexpr:
        right = right.value
    if right.__class__ is int:
        whole = left.type.__class__ is tl.block_type or data.shape == _SCALAR
        if whole and within(right):
            return left, dtype, data, numpy_type(right)
        return None
    if right.__class__ is tl.tensor:
        model, theirs = _model(left, right), right.handle.data
        other_type = _INTEGERS.get(right.dtype.name)
        if model is not None and theirs.dtype.type is other_type:
            # numpy widens as Triton does: int32 and int64 give int64
            return model, dtype if numpy_type is np.int64 else right.dtype, data, theirs
    return None


def _is_shift(by: Numbers) -> bool:
    """Return whether every type has that many bits: numpy warns of larger shifts."""
    return bool(by.ndim == 0 and 0 <= by < 32)


def _of_integers(
    stock: Method,
    op: Method,
    *,
    reverse: bool = False,
    result: tl.dtype | None = None,
    if_right: Callable[[Numbers], object] | None = None,
) -> Method:
    """``result``: its type, if not the integers' type. ``if_right``: a condition on the right data."""

    def method(self: tl.tensor, other: object) -> tl.tensor:
        case = _integers(self, other)
        if case is None or (if_right is not None and not if_right(case[3])):
            return stock(self, other)
        model, dtype, first, theirs = case
        data = op(theirs, first) if reverse else op(first, theirs)
        dtype = result or dtype
        return _new_tensor(model, data, dtype, _type_in_shape(dtype, model))

    return method


def _logic(stock: Method, op: Method) -> Method:
    integers = _of_integers(stock, op)

    def method(self: tl.tensor, other: Any) -> tl.tensor:
        if self.dtype.name in _INTEGERS:
            return integers(self, other)
        if other.__class__ is tl.tensor and self.dtype.name == other.dtype.name == "int1":
            first, theirs = self.handle.data, other.handle.data
            model = _model(self, other)
            if model is not None and first.dtype == theirs.dtype == bool:
                return _new_tensor(
                    model, op(first, theirs), self.dtype, _type_in_shape(self.dtype, model)
                )
        return stock(self, other)

    return method


def _width(pointer: tl.tensor) -> np.uint64:
    element = pointer.dtype.element_ty
    if element.__class__ is not tl.dtype:
        element = pointer.handle.get_element_ty()
    found = _widths.get(element.name)
    if found is None:
        found = _widths[element.name] = np.uint64(max(1, element.primitive_bitwidth // 8))
    return found


def _steps(stock: Method, op: Method, *, down: bool = False) -> Method:
    """Return the sum or difference of integers, or of a pointer on the left and a number of elements."""
    integers = _of_integers(stock, op)

    def method(self: tl.tensor, other: Any) -> tl.tensor:
        if self.dtype.__class__ is not tl.pointer_type:
            return integers(self, other)
        offset = other.value if other.__class__ is tl.constexpr else other
        if offset.__class__ is int and within(offset):
            model, number = _model(self, self), np.array([offset], np.int32)
        elif offset.__class__ is tl.tensor and offset.dtype.name in _INTEGERS:
            model, number = _model(self, offset), offset.handle.data
        else:
            return stock(self, other)
        if model is None:
            return stock(self, other)
        if down:
            number = np.negative(number)  # in its type, as the front end does
        data = self.handle.data + _width(self) * number.astype(np.uint64)  # wraps around
        return _new_tensor(
            model, data, self.dtype, _type_in_shape(self.dtype, model), self.handle.dtype
        )

    return method


def _conversion(stock: Method) -> Method:
    def method(self: tl.tensor, dtype: tl.dtype, *options: object, **named: object) -> tl.tensor:
        target = dtype.value if dtype.__class__ is tl.constexpr else dtype
        if not options and not named and target.__class__ is tl.dtype:
            name = self.dtype.name
            if target.name == name:
                return self
            numpy_type = _INTEGERS.get(target.name)
            if numpy_type is not None and name in _INTEGERS:
                data = self.handle.data.astype(numpy_type)
                return _new_tensor(self, data, target, _type_in_shape(target, self))
            if target.name == "int64" and self.dtype.__class__ is tl.pointer_type:
                return _new_tensor(
                    self, self.handle.data.view(np.int64), target, _type_in_shape(target, self)
                )
        of_pointers = target.__class__ is tl.pointer_type and target.address_space == 1
        if of_pointers and self.dtype.name == "int64" and not options and not named:
            handle = builder.create_int_to_ptr(self.handle, target)
            return _new_tensor(
                self, handle.data, target, _type_in_shape(target, self), handle.dtype
            )
        return stock(self, dtype, *options, **named)

    return method


def _axis(stock: Method) -> Method:
    def method(self: tl.tensor, slices: Any) -> tl.tensor:
        where = slices.values if slices.__class__ is tl.tuple else slices
        data = self.handle.data
        line = self.type.__class__ is tl.block_type and data.ndim == 1
        two = where.__class__ in (tuple, list) and len(where) == 2
        if line and two and self.dtype.__class__ is tl.dtype:
            first, second = where
            if second is None and first == _ALL:
                data = data[:, None]
            elif first is None and second == _ALL:
                data = data[None, :]
            if data.ndim == 2:
                model = _of_shape(data.shape)
                return _new_tensor(
                    model, data, self.dtype, _type_in_shape(self.dtype, model), self.handle.dtype
                )
        return stock(self, slices)

    return method


def arithmetic_shortcuts() -> list[Replacement]:
    """Return the replacements inside an interpreter session, which has already patched the language."""
    stock = vars(tl.tensor)
    found: dict[str, Method] = {}
    for operators, options in (
        (_ARITHMETIC, {}),
        (_DIVISIONS, {"if_right": np.all}),  # a division by zero is left to the front end
        (_SHIFTS, {"if_right": _is_shift}),
        (_COMPARISONS, {"result": tl.int1}),
    ):
        for name, op in operators.items():
            found[f"__{name}__"] = _of_integers(stock[f"__{name}__"], op, **options)
    for name, op in _ARITHMETIC.items():
        found[f"__r{name}__"] = _of_integers(stock[f"__r{name}__"], op, reverse=True)
    for name, op in _LOGIC.items():
        found[f"__{name}__"] = _logic(stock[f"__{name}__"], op)
    found["__add__"] = _steps(stock["__add__"], _ARITHMETIC["add"])
    found["__sub__"] = _steps(stock["__sub__"], _ARITHMETIC["sub"], down=True)
    found["to"] = _conversion(stock["to"])
    found["__getitem__"] = _axis(stock["__getitem__"])
    return [(tl.tensor, name, method) for name, method in found.items()]


_shapes: dict[tuple[int, ...], tuple[object, object]] = {}
_ranges: dict[tuple[int, int], tl.block_type] = {}
_ORDERS: dict[object, object] = {
    None: ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
    "relaxed": ir.MEM_SEMANTIC.RELAXED,
    "acquire": ir.MEM_SEMANTIC.ACQUIRE,
    "release": ir.MEM_SEMANTIC.RELEASE,
    "acq_rel": ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
_REACHES: dict[object, object] = {
    None: ir.MEM_SYNC_SCOPE.GPU,
    "cta": ir.MEM_SYNC_SCOPE.CTA,
    "gpu": ir.MEM_SYNC_SCOPE.GPU,
    "sys": ir.MEM_SYNC_SCOPE.SYSTEM,
}


def _is_zero(other: object) -> bool:
    """Return whether ``other`` stands for zero bits, which a load without ``other`` uses."""
    return other.__class__ in (int, float) and other == 0 and math.copysign(1.0, other) > 0


def _numbers(pointer: tl.tensor) -> tl.dtype | None:
    """Return the element type of a pointer or a block of pointers; None if a shortcut is not possible."""
    kind: Any = pointer.dtype if pointer.__class__ is tl.tensor else None
    element: Any = kind.element_ty if kind.__class__ is tl.pointer_type else None
    return element if element.__class__ is tl.dtype and element.name != "int1" else None


def _same_shape(left: tl.tensor, right: tl.tensor) -> bool:
    return (
        right.__class__ is tl.tensor
        and left.handle.data.shape == right.handle.data.shape
        and (left.type.__class__ is tl.block_type) == (right.type.__class__ is tl.block_type)
    )


def _load(stock: Method, builder: Any) -> Method:
    def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **named: object) -> Any:
        element = _numbers(pointer)
        if element is None or more or named:
            return stock(pointer, mask, other, *more, **named)
        if mask is None:
            if other is not None:
                return stock(pointer, mask, other)
            chosen = everywhere(pointer.handle.data.shape)
        else:
            value = other.value if other.__class__ is tl.constexpr else other
            if (
                not _same_shape(pointer, mask)
                or mask.dtype.name != "int1"
                or not (value is None or (_is_zero(value) and not element.is_fp8()))
            ):
                return stock(pointer, mask, other)
            chosen = mask.handle
        handle = builder.create_masked_load(pointer.handle, chosen, None, *NO_POLICY, False)
        whole = pointer.type.__class__ is tl.block_type
        return tl.tensor(handle, pointer.type.with_element_ty(element) if whole else element)

    return load


def _store(stock: Method, builder: Any) -> Method:
    def store(pointer: Any, value: Any, mask: Any = None, *more: object, **named: object) -> Any:
        element = _numbers(pointer)
        if (
            element is None
            or more
            or named
            or pointer.dtype.is_const()
            or not _same_shape(pointer, value)
            or value.dtype.name != element.name
            or not (mask is None or (_same_shape(pointer, mask) and mask.dtype.name == "int1"))
        ):
            return stock(pointer, value, mask, *more, **named)
        chosen = everywhere(pointer.handle.data.shape) if mask is None else mask.handle
        done = builder.create_masked_store(pointer.handle, value.handle, chosen, *NO_POLICY)
        return tl.tensor(done, tl.void)

    return store


def _word(value: Any, pointer: tl.tensor, element: tl.dtype) -> Any:
    """Return the handle of ``value``, of type ``element``, for each element of ``pointer``; or None."""
    if value.__class__ is tl.constexpr:
        value = value.value
    shape = pointer.handle.data.shape
    if value.__class__ is int and within(value):
        return unchecked_handle(np.full(shape, value, _INTEGERS[element.name]), element)
    if _same_shape(pointer, value) and value.dtype.name == element.name:
        return value.handle
    return None


def _words(pointer: tl.tensor, sem: Any, scope: Any) -> tuple[tl.dtype, object, object] | None:
    """Return the words' type and Triton's order and scope; None if a shortcut is not possible."""
    element = _numbers(pointer)
    if element is None or element.name not in _INTEGERS or pointer.dtype.is_const():
        return None
    sem = sem.value if sem.__class__ is tl.constexpr else sem
    scope = scope.value if scope.__class__ is tl.constexpr else scope
    order, reach = _ORDERS.get(sem), _REACHES.get(scope)
    return None if order is None or reach is None else (element, order, reach)


def _atomic(stock: Method, op: Any, builder: Any) -> Method:
    def atomic(
        pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None, **named: Any
    ) -> Any:
        words = None if mask is not None or named else _words(pointer, sem, scope)
        value = None if words is None else _word(val, pointer, words[0])
        if words is None or value is None:
            return stock(pointer, val, mask, sem, scope, **named)
        element, order, reach = words
        mask = everywhere(pointer.handle.data.shape)
        handle = builder.create_atomic_rmw(op, pointer.handle, value, mask, order, reach)
        whole = pointer.type.__class__ is tl.block_type
        return tl.tensor(handle, pointer.type.with_element_ty(element) if whole else element)

    return atomic


def _arange(stock: Method) -> Method:
    def arange(start: Any, end: Any, **named: object) -> tl.tensor:
        first = start.value if start.__class__ is tl.constexpr else start
        last = end.value if end.__class__ is tl.constexpr else end
        if named or first.__class__ is not int or last.__class__ is not int:
            return stock(start, end, **named)
        kind = _ranges.get((first, last))
        if kind is None:  # the front end decides which ranges are valid
            block = stock(start, end)
            _ranges[first, last] = block.type
            return block
        handle = unchecked_handle(np.arange(first, last, dtype=np.int32), tl.int32)
        return tl.tensor(handle, kind)

    return arange


def _constructor(stock: Callable[..., None]) -> Callable[..., None]:
    def constructor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        kind = type.__class__
        if kind is tl.block_type:
            key, dtype = lengths(type), type.element_ty
        elif kind is tl.dtype or kind is tl.pointer_type:
            key, dtype = (), type
        else:
            stock(self, handle, type)
            return
        known = _shapes.get(key)
        if known is None:
            stock(self, handle, type)
            _shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, dtype
        self.shape, self.numel = known

    return constructor


def _other_element(stock: Method) -> Method:
    def with_element_ty(self: tl.block_type, scalar_ty: tl.dtype) -> tl.block_type:
        known = scalar_ty.__class__ is tl.dtype
        return block_of(scalar_ty, self) if known else stock(self, scalar_ty)

    return with_element_ty


def call_shortcuts(builder: object) -> list[Replacement]:
    """Return the replacements inside a session, which has already patched the language and the builder."""
    atomics = [
        (tl, name, _atomic(getattr(tl, name), getattr(ir.ATOMIC_OP, op), builder))
        for op in ("ADD", "XCHG", "AND", "OR", "XOR")
        for name in [f"atomic_{op.lower()}"]
    ]
    return [
        *atomics,
        (tl, "load", _load(tl.load, builder)),
        (tl, "store", _store(tl.store, builder)),
        (tl, "arange", _arange(tl.arange)),
        (tl.tensor, "__init__", _constructor(vars(tl.tensor)["__init__"])),
        (tl.block_type, "with_element_ty", _other_element(vars(tl.block_type)["with_element_ty"])),
    ]
