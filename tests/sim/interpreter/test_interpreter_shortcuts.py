"""The shortcuts of interpreted arithmetic: what they make is what Triton's front end makes."""

import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from interlace.runtime.places.sim.interpreter import shortcuts as shortcut_functions
from interlace.runtime.places.sim.interpreter.session import session

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in (
        "add", "sub", "mul", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
        "lshift", "rshift",
    )
}  # fmt: skip
NUMBERS = {
    "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "int8": np.int8, "int1": np.bool_,
    "fp32": np.float32,
}  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (2, 4), (2, 1), (1, 4), (1, 2, 1)]
PLAIN = [0, 1, 3, -5, 2**31 - 1, -(2**31), 2**31, 2**40, True, 1.5]


def tensor(name: str, shape: tuple[int, ...]) -> tl.tensor:
    """Numbers of both signs, the largest and the smallest among them."""
    dtype = tl.dtype(name)
    count = int(np.prod(shape))
    line = np.arange(count) * 7 % 11 - 3
    data = (line % 2).astype(bool) if name == "int1" else line.astype(NUMBERS[name])
    if name in ("int32", "int64") and count > 2:
        limits = np.iinfo(data.dtype)
        data[0], data[-1] = limits.max, limits.min
    data = data.reshape(shape or (1,))
    return tl.tensor(
        TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype
    )


def pointer(name: str, shape: tuple[int, ...]) -> tl.tensor:
    kind = tl.pointer_type(tl.dtype(name))
    data = (np.arange(int(np.prod(shape))) * 64 + 4096).astype(np.uint64).reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


TENSORS = {
    f"{name} {shape}": tensor(name, shape)
    for name in NUMBERS
    for shape in (SHAPES if name in ("int32", "int64", "int1") else SHAPES[:3:2])
}
POINTERS = {
    f"*{name} {shape}": pointer(name, shape) for name in ("bf16", "int1") for shape in SHAPES[:4]
}
CONSTANTS: dict[str, Any] = {repr(value): value for value in PLAIN}
CONSTANTS |= {f"constexpr {value}": tl.constexpr(value) for value in (0, 3, -1, True, 2.5, 2**33)}
OPERANDS = TENSORS | POINTERS | CONSTANTS


def told(function: Callable[[], Any]) -> Any:
    """All there is to know of a result, or how it failed."""
    try:
        made = function()
    except Exception as error:
        return type(error).__name__
    if not isinstance(made, tl.tensor):
        return made
    if made.handle is None:  # of a store
        return str(made.type), str(made.dtype), list(made.shape), int(made.numel.value)
    data = made.handle.data
    return (
        data.shape, data.dtype, data.tobytes(), str(made.handle.dtype), str(made.type),
        str(made.dtype), [int(each.value) for each in made.shape], int(made.numel.value),
    )  # fmt: skip


def compare(cases: dict[str, Callable[[], Any]]) -> int:
    """How many cases gave a tensor; all must give the same with shortcuts and without."""
    results = []
    for shortcuts in (False, True):
        with session(mock.Mock(), shortcuts=shortcuts), np.errstate(all="ignore"):
            results.append({name: told(case) for name, case in cases.items()})
    stock, short = results
    for name in cases:
        assert short[name] == stock[name], name
    return sum(isinstance(found, tuple) for found in stock.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    """Every pair of operands, in both orders where one is no tensor."""
    op = OPERATORS[name]
    cases: dict[str, Callable[[], Any]] = {}
    for left_name, left in (TENSORS | POINTERS).items():
        for right_name, right in OPERANDS.items():
            cases[f"{left_name} {name} {right_name}"] = lambda x=left, y=right: op(x, y)
            if right_name in map(repr, PLAIN):
                cases[f"{right_name} {name} {left_name}"] = lambda x=left, y=right: op(y, x)
    assert compare(cases) > 300


def test_conversions() -> None:
    to_pointers = [tl.pointer_type(tl.float32), tl.pointer_type(tl.int64, 3)]
    plain = [tl.int64, tl.int32, tl.int8, tl.float32, tl.constexpr(tl.int64)]
    targets = [*plain, *to_pointers]
    cases: dict[str, Callable[[], Any]] = {
        f"{name} to {target}": lambda x=x, target=target: x.to(target)
        for name, x in (TENSORS | POINTERS).items()
        for target in targets
    }
    cases["bits"] = lambda: TENSORS["fp32 (4,)"].to(tl.int32, bitcast=True)
    cases["by name"] = lambda: TENSORS["int32 (4,)"].to(dtype=tl.int64)
    assert compare(cases) > 100


def test_axes() -> None:
    """Of all but scalars, which the front end makes blocks."""
    wheres: dict[str, Callable[[Any], Any]] = {
        "column": lambda x: x[:, None],
        "row": lambda x: x[None, :],
        "in a tuple of Triton's": lambda x: x[tl.tuple([tl.constexpr(None), slice(None)])],
        "by a constexpr": lambda x: x[:, tl.constexpr(None)],
        "all": lambda x: x[:, :],
        "one": lambda x: x[None],
        "none": lambda x: x[:],
        "more": lambda x: x[:, None, :],
        "two": lambda x: x[None, None],
        "part": lambda x: x[1:, None],
        "number": lambda x: x[0, None],
    }
    operands = (TENSORS | POINTERS).items()
    assert (
        compare({f"{n} {w}": lambda x=x, w=w: wheres[w](x) for n, x in operands for w in wheres})
        > 150
    )


def test_integers_do_not_go_through_the_front_end() -> None:
    """The control of the tests above: they compare two ways, and not one with itself."""
    asked: list[Any] = []
    kinds = tl.semantic.TritonSemantic
    check = kinds.binary_op_type_checking_impl

    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(arguments)
        return check(self, *arguments, **named)

    x, y = TENSORS["int32 (4,)"], TENSORS["int32 ()"]
    with mock.patch.object(kinds, "binary_op_type_checking_impl", noting):
        for shortcuts, times in ((True, 0), (False, 4)):
            asked.clear()
            with session(mock.Mock(), shortcuts=shortcuts), np.errstate(all="ignore"):
                _ = x + y, x * 3, x < tl.constexpr(2), POINTERS["*bf16 ()"] + x
            assert len(asked) == times


def test_a_shortcut_that_is_wrong_is_seen() -> None:
    wrong = shortcut_functions._ARITHMETIC | {"sub": np.add}
    x, y = TENSORS["int32 (4,)"], TENSORS["int32 ()"]
    with (
        mock.patch.object(shortcut_functions, "_ARITHMETIC", wrong),
        pytest.raises(AssertionError, match="difference"),
    ):
        compare({"difference": lambda: x - y})


def test_the_operators_are_put_back() -> None:
    before = dict(vars(tl.tensor))
    with session(mock.Mock()):
        assert vars(tl.tensor)["__add__"] is not before["__add__"]
    assert dict(vars(tl.tensor)) == before
