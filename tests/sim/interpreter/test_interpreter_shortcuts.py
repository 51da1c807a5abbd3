"""Shortcuts of interpreted functions: what they make, and hooks see, is what Triton's front end makes."""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from interlace.runtime.places.sim.interpreter import shortcuts as shortcut_functions
from interlace.runtime.places.sim.interpreter.session import session

OPERATORS = (
    "add", "sub", "mul", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
NUMBERS = {
    "int32": np.int32, "int64": np.int64, "uint32": np.uint32, "int8": np.int8, "int1": np.bool_,
    "fp32": np.float32,
}  # fmt: skip
Shape = tuple[int, ...]
SHAPES: list[Shape] = [(), (1,), (4,), (2, 4), (2, 1), (1, 4), (1, 2, 1)]
MEMORY_SHAPES: list[Shape] = [(), (1,), (4,), (2, 4)]
PLAIN = [0, 1, 3, -5, 2**31 - 1, -(2**31), 2**31, 2**40, True, 1.5]
FILLED = np.arange(256, dtype=np.uint8) * 37 % 251
MEMORY = FILLED.copy()
ELEMENTS = ["int8", "int1", "int32", "int64", "bf16", "fp32", "fp8e5"]


def made(data: Any, dtype: Any, shape: Shape) -> tl.tensor:
    handle = TensorHandle(data.reshape(shape or (1,)), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def tensor(name: str, shape: Shape) -> tl.tensor:
    """Return numbers of both signs, with the largest and the smallest among them."""
    count = int(np.prod(shape))
    line = np.arange(count) * 7 % 11 - 3
    data = (line % 2).astype(bool) if name == "int1" else line.astype(NUMBERS[name])
    if name in ("int32", "int64") and count > 2:
        limits = np.iinfo(data.dtype)
        data[0], data[-1] = limits.max, limits.min
    return made(data, tl.dtype(name), shape)


def pointers(
    name: str, shape: Shape, first: int = MEMORY.ctypes.data, *, const: bool = False, step: int = 8
) -> tl.tensor:
    data = (first + np.arange(int(np.prod(shape))) * step).astype(np.uint64)
    return made(data, tl.pointer_type(tl.dtype(name), const=const), shape)


def bits(shape: Shape) -> tl.tensor:
    return made(np.arange(int(np.prod(shape))) % 3 > 0, tl.int1, shape)


TENSORS = {
    f"{name} {shape}": tensor(name, shape)
    for name in NUMBERS
    for shape in (SHAPES if name in ("int32", "int64", "int1") else SHAPES[:3:2])
}
POINTERS = {
    f"*{name} {shape}": pointers(name, shape, 4096, step=64)
    for name in ("bf16", "int1")
    for shape in SHAPES[:4]
}
CONSTANTS: dict[str, Any] = {repr(value): value for value in PLAIN}
CONSTANTS |= {f"constexpr {value}": tl.constexpr(value) for value in (0, 3, -1, True, 2.5, 2**33)}
Cases = dict[str, Callable[[], Any]]


class Watching:
    """Hooks that do their task and keep their arguments."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def load(self, pointers: Any, mask: Any, perform: Any) -> Any:
        self.seen.append((pointers.data.tolist(), str(pointers.dtype), mask.data.tolist()))
        return perform()

    def store(self, pointers: Any, value: Any, mask: Any, perform: Any) -> Any:
        what = (value.data.tobytes(), str(value.dtype), value.data.shape)
        self.seen.append((pointers.data.tolist(), str(pointers.dtype), what, mask.data.tolist()))
        perform()

    def atomic(self, atomic: Any, perform: Any) -> Any:
        how = atomic.kind, atomic.sem, atomic.scope, atomic.reads_only
        mask = None if atomic.mask is None else atomic.mask.data.tolist()
        self.seen.append((atomic.pointers.data.tolist(), how, mask))
        return perform()

    def __getattr__(self, name: str) -> Any:
        return mock.Mock()


def told(function: Callable[[], Any]) -> Any:
    """Return all properties of a result, or its error."""
    try:
        made = function()
    except Exception as error:
        return type(error).__name__
    if not isinstance(made, tl.tensor):
        return made
    if made.handle is None:  # the result of a store
        return str(made.type), str(made.dtype), list(made.shape), int(made.numel.value)
    data = made.handle.data
    return (
        data.shape, data.dtype, data.tobytes(), str(made.handle.dtype), str(made.type),
        str(made.dtype), [int(each.value) for each in made.shape], int(made.numel.value),
    )  # fmt: skip


def results(cases: Cases, *, shortcuts: bool) -> dict[str, tuple[Any, list[Any]]]:
    """Return the result of each case and the calls of its hooks."""
    found = {}
    hooks = Watching()
    with session(hooks, shortcuts=shortcuts), np.errstate(all="ignore"):  # type: ignore[arg-type]
        for name, case in cases.items():
            hooks.seen = []
            MEMORY[:] = FILLED
            found[name] = told(case), [*hooks.seen, MEMORY.tobytes()]
    return found


def compare(cases: Cases, times: int = 2) -> int:
    """Return the number of cases with a tensor; shortcuts run twice, because some are learned."""
    stock = results(cases, shortcuts=False)
    for _ in range(times):
        short = results(cases, shortcuts=True)
        for name in cases:
            assert short[name] == stock[name], name
    return sum(isinstance(found, tuple) for found, _ in stock.values())


def combined(call: Callable[..., Any], *choices: dict[str, Any]) -> Cases:
    """Make a call with each combination of values, by their names."""
    return {
        " ".join(name for name, _ in chosen): partial(call, *(value for _, value in chosen))
        for chosen in itertools.product(*(choice.items() for choice in choices))
    }


def called(calls: list[Callable[[Any], Any]], values: dict[str, Any]) -> Cases:
    named = {str(number): call for number, call in enumerate(calls)}
    return combined(lambda call, value: call(value), named, values)


def in_memory(*elements: str) -> dict[str, tl.tensor]:
    return {
        f"{element} {shape}": pointers(element, shape)
        for element in elements
        for shape in MEMORY_SHAPES
    }


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    op = getattr(operator, name)
    plain = {repr(value): value for value in PLAIN}
    cases = combined(op, TENSORS | POINTERS, TENSORS | POINTERS | CONSTANTS)
    assert compare(cases | combined(op, plain, TENSORS | POINTERS), times=1) > 300


def test_conversions() -> None:
    plain = [tl.int64, tl.int32, tl.int8, tl.float32, tl.constexpr(tl.int64)]
    targets = [*plain, tl.pointer_type(tl.float32), tl.pointer_type(tl.int64, 3)]
    cases = combined(
        lambda x, target: x.to(target), TENSORS | POINTERS, {str(each): each for each in targets}
    )
    cases["bits"] = lambda: TENSORS["fp32 (4,)"].to(tl.int32, bitcast=True)
    cases["by name"] = lambda: TENSORS["int32 (4,)"].to(dtype=tl.int64)
    assert compare(cases) > 100


def test_axes() -> None:
    none = tl.constexpr(None)
    calls: list[Callable[[Any], Any]] = [
        lambda x: x[:, None],
        lambda x: x[None, :],
        lambda x: x[tl.tuple([none, slice(None)])],
        lambda x: x[:, none],
        lambda x: x[:, :],
        lambda x: x[None],
        lambda x: x[:],
        lambda x: x[:, None, :],
        lambda x: x[None, None],
        lambda x: x[1:, None],
        lambda x: x[0, None],
    ]
    assert compare(called(calls, TENSORS | POINTERS)) > 150


def test_shapes_and_elements_of_tensors() -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda x: (x.to(tl.float32) * 2).to(tl.bfloat16),
        lambda x: x[:, None] + TENSORS["int32 (1, 4)"],
        lambda x: tl.where(x > 0, x, 0),
    ]
    assert compare(called(calls, TENSORS)) > 40


def test_ranges() -> None:
    ends: list[Any] = [0, 1, 4, 6, -4, 2**31, 1.0, True, tl.constexpr(8), TENSORS["int32 ()"]]
    named = {str(end): end for end in ends}
    cases = combined(lambda start, end: tl.arange(start, end), named, named)
    cases["by name"] = lambda: tl.arange(start=0, end=4)
    assert compare(cases) == 8


def test_ranges_share_no_memory() -> None:
    with session(mock.Mock()):
        first, second = tl.arange(0, 4), tl.arange(0, 4)
        first.handle.data[:] = 9
        assert second.handle.data.tolist() == tl.arange(0, 4).handle.data.tolist() == [0, 1, 2, 3]


# -- memory ----------------------------------------------------------------------------------------

MASKS: dict[str, Any] = {f"bits {shape}": bits(shape) for shape in MEMORY_SHAPES}
MASKS |= {"none": None, "constexpr none": tl.constexpr(None), "true": True}
MASKS["integers"] = tensor("int32", (4,))
WORDS, SOME = pointers("fp32", (4,)), bits((4,))


def loads() -> Cases:
    others: list[Any] = [None, 0, 0.0, -0.0, 1, 2.5, True, tl.constexpr(0), tl.constexpr(-2)]
    others += [tensor("fp32", ()), tensor("int32", (4,))]
    return combined(
        lambda at, mask, other: tl.load(at, mask=mask, other=other),
        in_memory(*ELEMENTS),
        MASKS | {"a number": 3},
        {str(number): other for number, other in enumerate(others)},
    ) | {
        "positional": lambda: tl.load(WORDS, SOME, 0),
        "volatile": lambda: tl.load(WORDS, SOME, volatile=True),
        "cached": lambda: tl.load(WORDS, cache_modifier=".cg"),
        "unknown option": lambda: tl.load(WORDS, cache_modifier=".no"),
        "no pointer": lambda: tl.load(TENSORS["int64 (4,)"]),
        "number": lambda: tl.load(4096),
    }


def stores() -> Cases:
    values: dict[str, Any] = {
        name: TENSORS[name] for name in TENSORS if name.endswith(("()", "(4,)"))
    }
    values |= {"fp32 (2, 4)": tensor("fp32", (2, 4)), "1": 1, "2.5": tl.constexpr(2.5)}
    value, const = tensor("fp32", (4,)), pointers("fp32", (4,), const=True)
    return combined(
        lambda at, mask, value: tl.store(at, value, mask=mask), in_memory(*ELEMENTS), MASKS, values
    ) | {
        "to a constant": lambda: tl.store(const, value),
        "positional": lambda: tl.store(WORDS, value, SOME),
        "cached": lambda: tl.store(WORDS, value, cache_modifier=".wt"),
        "unknown option": lambda: tl.store(WORDS, value, eviction_policy="no"),
    }


ATOMICS = ["atomic_add", "atomic_xchg", "atomic_and", "atomic_or", "atomic_xor", "atomic_max"]


def atomics() -> Cases:
    values: dict[str, Any] = {
        name: TENSORS[name] for name in TENSORS if name.endswith(("()", "(1,)", "(4,)"))
    }
    values |= {repr(each): each for each in (0, 1, -5, 2**31 - 1, 2**31, 2**40, True, 1.5)}
    values["constexpr"] = tl.constexpr(7)
    hows: list[Any] = [(), ("relaxed",), ("release", "sys"), (tl.constexpr("acquire"), "cta")]
    hows += [("no",), ("acq_rel", "no"), (3,)]
    words = in_memory("int32", "int64", "uint32", "int8", "fp32")
    plain, const = pointers("int32", (4,)), pointers("int32", (4,), const=True)
    return (
        combined(
            lambda op, at, value: getattr(tl, op)(at, value, None),
            {op: op for op in ATOMICS},
            words,
            values,
        )
        | combined(
            lambda at, value, how: tl.atomic_add(at, value, None, *how),
            words,
            values,
            {str(how): how for how in hows},
        )
        | {
            "masked": lambda: tl.atomic_add(plain, 1, mask=SOME),
            "by name": lambda: tl.atomic_add(plain, 1, sem="acquire", scope="sys"),
            "of constants": lambda: tl.atomic_add(const, 1),
        }
    )


@pytest.mark.filterwarnings("ignore")
def test_loads() -> None:
    assert compare(loads()) > 1000


@pytest.mark.filterwarnings("ignore")
def test_stores() -> None:
    assert compare(stores()) > 1000


@pytest.mark.filterwarnings("ignore")
def test_atomics() -> None:
    assert compare(atomics()) > 400


# -- controls --------------------------------------------------------------------------------------


def test_shortcuts_do_not_go_through_the_front_end() -> None:
    """So the tests above compare two implementations."""
    front_end = ("binary_op_type_checking_impl", "load", "store", "atomic_add")
    absent = {name: mock.Mock(side_effect=AssertionError(name)) for name in front_end}
    x, words, hooks = TENSORS["int32 (4,)"], pointers("int32", (4,)), Watching()
    calls: list[Callable[[], Any]] = [
        lambda: x + x,
        lambda: tl.load(words),
        lambda: tl.store(words, x),
        lambda: tl.atomic_add(words, 1),
    ]
    others: list[Callable[[], Any]] = [
        lambda: x < tl.constexpr(2),
        lambda: tl.load(words, mask=SOME, other=0),
        lambda: tl.store(words, x, mask=SOME),
        lambda: tl.atomic_add(words, 1, sem="relaxed"),
    ]
    with mock.patch.multiple(tl.semantic.TritonSemantic, **absent):
        with session(hooks, shortcuts=True):  # type: ignore[arg-type]
            for call in calls + others:
                call()
        for name, call in zip(front_end, calls, strict=True):
            with session(hooks, shortcuts=False), pytest.raises(AssertionError, match=name):  # type: ignore[arg-type]
                call()


def test_an_operator_that_is_wrong_is_seen() -> None:
    wrong = shortcut_functions._ARITHMETIC | {"sub": np.add}
    x, y = TENSORS["int32 (4,)"], TENSORS["int32 ()"]
    with (
        mock.patch.object(shortcut_functions, "_ARITHMETIC", wrong),
        pytest.raises(AssertionError, match="difference"),
    ):
        compare({"difference": lambda: x - y})


def test_everything_is_put_back() -> None:
    def state() -> list[dict[str, Any]]:
        return [dict(vars(each)) for each in (tl, tl.tensor, tl.block_type)]

    before = state()
    with session(mock.Mock()):
        assert all(one != other for one, other in zip(state(), before, strict=True))
    assert state() == before
