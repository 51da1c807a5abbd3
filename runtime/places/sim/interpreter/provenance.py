"""Where pointers come from: an attribute, ``origin``, of the type in a pointer's handle.

Whatever computes with pointers, shifts, broadcasts or reshapes them, keeps the handle's type, and so the
origin. It begins where a tensor becomes an argument, and where one number becomes a pointer: there the
hooks are asked what memory the number means. A block of numbers, such as the addresses of all ranks, has no
origin; nor has what was chosen between pointers of different origins. Their accesses are looked up one by
one.

Tensor descriptors that TMA cannot use are refused here in words, with their origins: the interpreter
only asserts.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from interlace.runtime.compat.stand_ins import Replacement
from interlace.runtime.compat.triton_interpreter import TensorHandle
from interlace.runtime.core.accesses import Hooks, origin_of, with_origin

Asked = Callable[[str, Any], Any]
"""(path of an argument, tensor) -> its origin."""


def mark(path: str, given: Any, made: Any, ask: Asked) -> None:
    """Give pointers in ``made``, which stands for the argument ``given``, their origins."""
    if isinstance(given, tuple):
        for index, (each, part) in enumerate(zip(given, made, strict=True)):
            name = getattr(given, "_fields", range(len(given)))[index]
            mark(f"{path}.{name}", each, part, ask)
    elif hasattr(given, "block_shape"):  # a descriptor
        mark(path, given.base, made.handle.base, ask)
    elif hasattr(given, "data_ptr"):
        handle = getattr(made, "handle", made)
        handle.dtype = with_origin(handle.dtype, ask(path, given))


def overrides(builder: Any, hooks: Hooks) -> list[Replacement]:
    """Methods of the builder by which pointers come about, or several become one."""
    stock_bitcast = builder.create_bitcast

    def create_bitcast(source: Any, kind: Any) -> Any:
        made = stock_bitcast(source, kind)
        if made.dtype.is_ptr():
            if source.dtype.is_ptr():
                origin = origin_of(source)
            else:
                origin = hooks.origin(int(made.data.item())) if made.data.size == 1 else None
            made.dtype = with_origin(made.dtype, origin)
        return made

    def merged(stock: Callable[..., Any], first: int) -> Callable[..., Any]:
        def merge(*handles: Any) -> Any:
            made = stock(*handles)
            if made.dtype.is_ptr():
                one, other = map(origin_of, handles[first : first + 2])
                made.dtype = with_origin(made.dtype, one if one is other else None)
            return made

        return merge

    def create_int_to_ptr(source: Any, kind: Any) -> Any:
        # An argument below 2**31 is an int32, and some processes have memory there.
        wide = source.data.view(f"u{source.data.itemsize}").astype(np.uint64)
        return create_bitcast(TensorHandle(wide, tl.uint64), kind)

    return [
        (builder, "create_bitcast", create_bitcast),
        (builder, "create_int_to_ptr", create_int_to_ptr),
        (builder, "create_select", merged(builder.create_select, 1)),
        (builder, "create_cat", merged(builder.create_cat, 0)),
        (builder, "create_join", merged(builder.create_join, 0)),
    ]


ALIGNMENT = 16  # bytes


def checked_descriptor(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``create_make_tensor_descriptor`` that raises ValueError for what a GPU would refuse, naming it."""

    def make(base: Any, shape: Any, strides: Any, *rest: Any, **named: Any) -> Any:
        size = base.dtype.element_ty.primitive_bitwidth // 8
        argument = getattr(origin_of(base), "argument", "")
        of = f"a tensor descriptor{f' of {argument}' if argument else ''}"
        address, steps = int(base.data.item()), [int(each.data.item()) for each in strides]
        if address % ALIGNMENT:
            raise ValueError(
                f"{of}: its base, address {address:#x}, is not a multiple of {ALIGNMENT} bytes"
            )
        for dim, step in enumerate(steps[:-1]):
            if step * size % ALIGNMENT:
                raise ValueError(
                    f"{of}: stride {dim} is {step} elements, {step * size} bytes, and not a multiple of "
                    f"{ALIGNMENT} bytes"
                )
        if steps[-1] != 1:
            raise ValueError(f"{of}: its last stride must be 1, got {steps[-1]}")
        return stock(base, shape, strides, *rest, **named)

    return make
