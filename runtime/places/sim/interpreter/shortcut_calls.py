"""Shortcuts through Triton's front end for what kernels call most: loads, stores, ranges, making tensors.

As those of operators (``shortcut_arithmetic.py``), they do what they list and leave all else to the front
end, and what comes out has its types, shapes and bits; test_interpreter_calls.py compares::

    tl.load      of pointers to numbers, of at least 8 bits; mask: none, or of the shape of the pointers;
                 other: none, or 0 (not of fp8, to which Triton converts no integer); no options
    tl.store     of numbers of the pointers' own type and shape, with a mask as above, or none; no options
    tl.atomic_*  add, xchg, and, or, xor of int32 and int64, by a number of the pointers' own type and
                 shape, or one within int32; no mask; cas of one int32
    tl.arange    of two Python numbers or constexprs that it has been called with before
    tl.tensor    the shape and the number of elements are made once for every shape
    block_type   ... of another element type is made once for every type of numbers

A masked load took 46 us and takes 8, a store 35 and 4, a range 16 and 2, an atomic 40 and 10, without what
hooks do (one core of a shared machine, Triton 3.7.1).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.compat.attributes import Replacement
from interlace.runtime.compat.triton_interpreter import NO_POLICY, everywhere, ir, unchecked
from interlace.runtime.places.sim.interpreter.shortcut_arithmetic import block_of, lengths, within

_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_ranges: dict[tuple[int, int], Any] = {}
_WORDS: dict[str, Any] = {"int32": np.int32, "int64": np.int64}
_ORDERS: dict[Any, Any] = {
    None: ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
    "relaxed": ir.MEM_SEMANTIC.RELAXED,
    "acquire": ir.MEM_SEMANTIC.ACQUIRE,
    "release": ir.MEM_SEMANTIC.RELEASE,
    "acq_rel": ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
_REACHES: dict[Any, Any] = {
    None: ir.MEM_SYNC_SCOPE.GPU,
    "cta": ir.MEM_SYNC_SCOPE.CTA,
    "gpu": ir.MEM_SYNC_SCOPE.GPU,
    "sys": ir.MEM_SYNC_SCOPE.SYSTEM,
}


def _is_zero(other: Any) -> bool:
    """A number that stands for zero bits, which is what a load without ``other`` has for it."""
    return other.__class__ in (int, float) and other == 0 and math.copysign(1.0, other) > 0


def _numbers(pointer: Any) -> Any:
    """The type of what a pointer, or a block of pointers, points to, if this is a case for a shortcut."""
    kind: Any = pointer.dtype if pointer.__class__ is tl.tensor else None
    element: Any = kind.element_ty if kind.__class__ is tl.pointer_type else None
    return element if element.__class__ is tl.dtype and element.name != "int1" else None


def _same_shape(left: Any, right: Any) -> bool:
    """Whether ``right`` is a tensor of the shape of ``left``."""
    return (
        right.__class__ is tl.tensor
        and left.handle.data.shape == right.handle.data.shape
        and (left.type.__class__ is tl.block_type) == (right.type.__class__ is tl.block_type)
    )


def _load(stock: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    def load(pointer: Any, mask: Any = None, other: Any = None, *more: Any, **named: Any) -> Any:
        element = _numbers(pointer)
        if element is None or more or named:
            return stock(pointer, mask, other, *more, **named)
        if mask is None:
            if other is not None:
                return stock(pointer, mask, other)
            mask = everywhere(pointer.handle.data.shape)
            handle = builder.create_masked_load(pointer.handle, mask, None, *NO_POLICY, False)
        else:
            value = other.value if other.__class__ is tl.constexpr else other
            if (
                not _same_shape(pointer, mask)
                or mask.dtype.name != "int1"
                or not (value is None or (_is_zero(value) and not element.is_fp8()))
            ):
                return stock(pointer, mask, other)
            handle = builder.create_masked_load(
                pointer.handle, mask.handle, None, *NO_POLICY, False
            )
        whole = pointer.type.__class__ is tl.block_type
        return tl.tensor(handle, pointer.type.with_element_ty(element) if whole else element)

    return load


def _store(stock: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    def store(pointer: Any, value: Any, mask: Any = None, *more: Any, **named: Any) -> Any:
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


def _word(value: Any, pointer: Any, element: Any) -> Any:
    """The handle of ``value`` for each element of ``pointer``, of numbers of type ``element``; or None."""
    if value.__class__ is tl.constexpr:
        value = value.value
    shape = pointer.handle.data.shape
    if value.__class__ is int and within(value):
        return unchecked(np.full(shape, value, _WORDS[element.name]), element)
    if _same_shape(pointer, value) and value.dtype.name == element.name:
        return value.handle
    return None


def _words(pointer: Any, sem: Any, scope: Any) -> Any:
    """The type of the words, if this is a case for a shortcut, and the order and scope of Triton's."""
    element = _numbers(pointer)
    if element is None or element.name not in _WORDS or pointer.dtype.is_const():
        return None
    sem = sem.value if sem.__class__ is tl.constexpr else sem
    scope = scope.value if scope.__class__ is tl.constexpr else scope
    order, reach = _ORDERS.get(sem), _REACHES.get(scope)
    return None if order is None or reach is None else (element, order, reach)


def _atomic(stock: Callable[..., Any], op: Any, builder: Any) -> Callable[..., Any]:
    def atomic(
        pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None, **named: Any
    ) -> Any:
        words = None if mask is not None or named else _words(pointer, sem, scope)
        value = None if words is None else _word(val, pointer, words[0])
        if words is None or value is None:
            return stock(pointer, val, mask, sem, scope, **named)
        element, order, reach = words
        mask = everywhere(pointer.handle.data.shape)
        made = builder.create_atomic_rmw(op, pointer.handle, value, mask, order, reach)
        whole = pointer.type.__class__ is tl.block_type
        return tl.tensor(made, pointer.type.with_element_ty(element) if whole else element)

    return atomic


def _compare_and_swap(stock: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    def atomic_cas(
        pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None, **named: Any
    ) -> Any:
        words = None if named else _words(pointer, sem, scope)
        if words is None or pointer.type.__class__ is tl.block_type or words[0].name != "int32":
            return stock(pointer, cmp, val, sem, scope, **named)
        element, order, reach = words
        expected, value = _word(cmp, pointer, element), _word(val, pointer, element)
        if expected is None or value is None:
            return stock(pointer, cmp, val, sem, scope)
        made = builder.create_atomic_cas(pointer.handle, expected, value, order, reach)
        return tl.tensor(made, element)

    return atomic_cas


def _arange(stock: Callable[..., Any]) -> Callable[..., Any]:
    def arange(start: Any, end: Any, **named: Any) -> Any:
        first = start.value if start.__class__ is tl.constexpr else start
        last = end.value if end.__class__ is tl.constexpr else end
        if named or first.__class__ is not int or last.__class__ is not int:
            return stock(start, end, **named)
        kind = _ranges.get((first, last))
        if kind is None:  # the front end says what ranges there are
            made = stock(start, end)
            _ranges[first, last] = made.type
            return made
        handle = unchecked(np.arange(first, last, dtype=np.int32), tl.int32)
        return tl.tensor(handle, kind)

    return arange


def _constructor(stock: Callable[..., None]) -> Callable[..., None]:
    def constructor(self: Any, handle: Any, type: Any) -> None:
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


def _other_element(stock: Callable[..., Any]) -> Callable[..., Any]:
    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        known = scalar_ty.__class__ is tl.dtype
        return block_of(scalar_ty, self) if known else stock(self, scalar_ty)

    return with_element_ty


def shortcuts(builder: Any) -> list[Replacement]:
    """The replacements inside a session, which has patched the language and the builder already."""
    atomics = [
        (tl, name, _atomic(getattr(tl, name), getattr(ir.ATOMIC_OP, op), builder))
        for op in ("ADD", "XCHG", "AND", "OR", "XOR")
        for name in [f"atomic_{op.lower()}"]
    ]
    return [
        *atomics,
        (tl, "atomic_cas", _compare_and_swap(vars(tl)["atomic_cas"], builder)),
        (tl, "load", _load(tl.load, builder)),
        (tl, "store", _store(tl.store, builder)),
        (tl, "arange", _arange(tl.arange)),
        (tl.tensor, "__init__", _constructor(vars(tl.tensor)["__init__"])),
        (tl.block_type, "with_element_ty", _other_element(vars(tl.block_type)["with_element_ty"])),
    ]
