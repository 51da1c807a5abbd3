"""Tensor descriptors that TMA cannot use, refused in words: the interpreter only asserts."""

from collections.abc import Callable
from typing import Any

from interlace.runtime.places.sim.interpreter.provenance import origin_of

ALIGNMENT = 16  # bytes


def checked(stock: Callable[..., Any]) -> Callable[..., Any]:
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
