"""The shortcuts of interpreted functions: what they make, and hooks see, is what the front end makes."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from interlace.runtime.places.sim.interpreter import shortcuts as shortcut_functions
from interlace.runtime.places.sim.interpreter.session import session
from sim.interpreter.test_interpreter_shortcuts import TENSORS, tensor, told

FILLED = np.arange(256, dtype=np.uint8) * 37 % 251
MEMORY = FILLED.copy()
ELEMENTS = ["int8", "int1", "uint8", "int32", "int64", "bf16", "fp16", "fp32", "fp64", "fp8e5"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (2, 4)]


class Watching:
    """Hooks that do what is asked, and keep what they were told."""

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


def pointers(element: str, shape: tuple[int, ...]) -> tl.tensor:
    kind = tl.pointer_type(tl.dtype(element))
    count = int(np.prod(shape))
    data = (MEMORY.ctypes.data + np.arange(count) * 8).astype(np.uint64).reshape(shape or (1,))
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def bits(shape: tuple[int, ...]) -> tl.tensor:
    data = (np.arange(int(np.prod(shape))) % 3 > 0).reshape(shape or (1,))
    return tl.tensor(
        TensorHandle(data, tl.int1), tl.block_type(tl.int1, list(shape)) if shape else tl.int1
    )


def results(
    cases: dict[str, Callable[[], Any]], *, shortcuts: bool
) -> dict[str, tuple[Any, list[Any]]]:
    """What came out of each case, and what its hooks saw."""
    found = {}
    hooks = Watching()
    with session(hooks, shortcuts=shortcuts), np.errstate(all="ignore"):  # type: ignore[arg-type]
        for name, case in cases.items():
            hooks.seen = []
            MEMORY[:] = FILLED
            found[name] = told(case), [*hooks.seen, MEMORY.tobytes()]
    return found


def compare(cases: dict[str, Callable[[], Any]]) -> int:
    """How many cases gave a tensor; twice with shortcuts, because some are learned."""
    stock = results(cases, shortcuts=False)
    for _ in range(2):
        short = results(cases, shortcuts=True)
        for name in cases:
            assert short[name] == stock[name], name
    return sum(isinstance(found, tuple) for found, _ in stock.values())


def loads() -> dict[str, Callable[[], Any]]:
    masks: dict[str, Any] = {f"bits {shape}": bits(shape) for shape in SHAPES}
    masks |= {"none": None, "constexpr none": tl.constexpr(None), "true": True, "a number": 3}
    masks["integers"] = tensor("int32", (4,))
    others: list[Any] = [None, 0, 0.0, -0.0, 1, 2.5, True, tl.constexpr(0), tl.constexpr(-2)]
    others += [tensor("fp32", ()), tensor("int32", (4,))]
    cases: dict[str, Callable[[], Any]] = {}
    for element in ELEMENTS:
        for shape in SHAPES:
            at = pointers(element, shape)
            for mask_name, mask in masks.items():
                for number, other in enumerate(others):
                    cases[f"{element} {shape} {mask_name} {number}"] = (
                        lambda at=at, mask=mask, other=other: tl.load(at, mask=mask, other=other)
                    )
    plain, some = pointers("fp32", (4,)), bits((4,))
    cases["positional"] = lambda: tl.load(plain, some, 0)
    cases["volatile"] = lambda: tl.load(plain, some, volatile=True)
    cases["cached"] = lambda: tl.load(plain, cache_modifier=".cg")
    cases["unknown option"] = lambda: tl.load(plain, cache_modifier=".no")
    cases["no pointer"] = lambda: tl.load(TENSORS["int64 (4,)"])
    cases["number"] = lambda: tl.load(4096)
    return cases


@pytest.mark.filterwarnings("ignore")
def test_loads() -> None:
    assert compare(loads()) > 1000


def stores() -> dict[str, Callable[[], Any]]:
    masks: dict[str, Any] = {f"bits {shape}": bits(shape) for shape in SHAPES}
    masks |= {"none": None, "constexpr none": tl.constexpr(None), "true": True}
    masks["integers"] = tensor("int32", (4,))
    values: dict[str, Any] = {
        name: TENSORS[name] for name in TENSORS if name.endswith(("()", "(4,)"))
    }
    values |= {"fp32 (2, 4)": tensor("fp32", (2, 4)), "1": 1, "2.5": tl.constexpr(2.5)}
    cases: dict[str, Callable[[], Any]] = {}
    for element in ELEMENTS:
        for shape in SHAPES:
            at = pointers(element, shape)
            for mask_name, mask in masks.items():
                for value_name, value in values.items():
                    cases[f"{element} {shape} {mask_name} {value_name}"] = (
                        lambda at=at, mask=mask, value=value: tl.store(at, value, mask=mask)
                    )
    plain, some, value = pointers("fp32", (4,)), bits((4,)), tensor("fp32", (4,))
    kind = tl.pointer_type(tl.float32, const=True)
    const = tl.tensor(TensorHandle(plain.handle.data, kind), tl.block_type(kind, [4]))
    cases["to a constant"] = lambda: tl.store(const, value)
    cases["positional"] = lambda: tl.store(plain, value, some)
    cases["cached"] = lambda: tl.store(plain, value, cache_modifier=".wt")
    cases["unknown option"] = lambda: tl.store(plain, value, eviction_policy="no")
    return cases


@pytest.mark.filterwarnings("ignore")
def test_stores() -> None:
    assert compare(stores()) > 1000


ATOMICS = ["atomic_add", "atomic_xchg", "atomic_and", "atomic_or", "atomic_xor", "atomic_max"]


def atomics() -> dict[str, Callable[[], Any]]:
    values: dict[str, Any] = {
        name: TENSORS[name] for name in TENSORS if name.endswith(("()", "(1,)", "(4,)"))
    }
    values |= {repr(each): each for each in (0, 1, -5, 2**31 - 1, 2**31, 2**40, True, 1.5)}
    values["constexpr"] = tl.constexpr(7)
    hows: list[Any] = [(), ("relaxed",), ("release", "sys"), (tl.constexpr("acquire"), "cta")]
    hows += [("no",), ("acq_rel", "no"), (3,)]
    cases: dict[str, Callable[[], Any]] = {}
    for element in ("int32", "int64", "uint32", "int8", "fp32"):
        for shape in SHAPES:
            at = pointers(element, shape)
            for value_name, value in values.items():
                for op in ATOMICS:
                    for number, how in enumerate(hows if op == "atomic_add" else hows[:1]):
                        cases[f"{element} {shape} {value_name} {op} {number}"] = (
                            lambda at=at, value=value, op=op, how=how: getattr(tl, op)(
                                at, value, None, *how
                            )
                        )
                for other in (TENSORS["int32 ()"], 5):
                    cases[f"{element} {shape} {value_name} cas {other!r}"] = (
                        lambda at=at, value=value, other=other: tl.atomic_cas(at, value, other)
                    )
    plain, some = pointers("int32", (4,)), bits((4,))
    cases["masked"] = lambda: tl.atomic_add(plain, 1, mask=some)
    cases["by name"] = lambda: tl.atomic_add(plain, 1, sem="acquire", scope="sys")
    kind = tl.pointer_type(tl.int32, const=True)
    const = tl.tensor(TensorHandle(plain.handle.data, kind), tl.block_type(kind, [4]))
    cases["of constants"] = lambda: tl.atomic_add(const, 1)
    return cases


@pytest.mark.filterwarnings("ignore")
def test_atomics() -> None:
    assert compare(atomics()) > 400


def test_ranges() -> None:
    ends: list[Any] = [0, 1, 4, 6, -4, 2**31, 1.0, True, tl.constexpr(8), TENSORS["int32 ()"]]
    cases: dict[str, Callable[[], Any]] = {
        f"{start} {end}": lambda start=start, end=end: tl.arange(start, end)
        for start in ends
        for end in ends
    }
    cases["by name"] = lambda: tl.arange(start=0, end=4)
    assert compare(cases) == 8


def test_ranges_share_no_memory() -> None:
    with session(mock.Mock()):
        first, second = tl.arange(0, 4), tl.arange(0, 4)
        first.handle.data[:] = 9
        assert second.handle.data.tolist() == tl.arange(0, 4).handle.data.tolist() == [0, 1, 2, 3]


def test_shapes_and_elements_of_tensors() -> None:
    """Of what the front end makes itself, by broadcasts and other types."""
    cases: dict[str, Callable[[], Any]] = {}
    for name, x in TENSORS.items():
        cases[f"{name} as fp32"] = lambda x=x: (x.to(tl.float32) * 2).to(tl.bfloat16)
        cases[f"{name} with an axis"] = lambda x=x: x[:, None] + TENSORS["int32 (1, 4)"]
        cases[f"{name} or 0"] = lambda x=x: tl.where(x > 0, x, 0)
    assert compare(cases) > 40


def test_loads_and_stores_do_not_go_through_the_front_end() -> None:
    """The control of the tests above: they compare two ways, and not one with itself."""
    asked: list[Any] = []
    kinds = tl.semantic.TritonSemantic

    def noting(stock: Any) -> Any:
        def noted(self: Any, *arguments: Any) -> Any:
            asked.append(arguments)
            return stock(self, *arguments)

        return noted

    numbers, value = pointers("fp32", (4,)), tensor("fp32", (4,))
    words = pointers("int32", (4,))
    at, scalar, mask = pointers("bf16", (4,)), pointers("int64", ()), bits((4,))
    with (
        mock.patch.object(kinds, "load", noting(kinds.load)),
        mock.patch.object(kinds, "store", noting(kinds.store)),
        mock.patch.object(kinds, "atomic_add", noting(kinds.atomic_add)),
        mock.patch.object(kinds, "atomic_cas", noting(kinds.atomic_cas)),
    ):
        for shortcuts, times in ((True, 4), (False, 11)):
            asked.clear()
            with session(Watching(), shortcuts=shortcuts):  # type: ignore[arg-type]
                tl.load(at), tl.load(at, mask=mask, other=0.0), tl.load(scalar)
                tl.load(at, mask=mask, other=1.0)
                tl.store(scalar, TENSORS["int64 ()"]), tl.store(numbers, value, mask=mask)
                tl.store(at, value)
                tl.atomic_add(words, 1), tl.atomic_add(scalar, 1, sem="relaxed")
                tl.atomic_add(words, 1, mask=mask), tl.atomic_cas(scalar, 1, 2)
            assert len(asked) == times


@pytest.mark.filterwarnings("ignore")
def test_a_shortcut_that_is_wrong_is_seen() -> None:
    with (
        mock.patch.object(shortcut_functions, "_is_zero", lambda other: other == 1),
        pytest.raises(AssertionError, match=r"int8 \(\) bits \(\) 4"),
    ):
        compare(loads())


def test_everything_is_put_back() -> None:
    def state() -> list[dict[str, Any]]:
        return [dict(vars(each)) for each in (tl, tl.tensor, tl.block_type)]

    before = state()
    with session(mock.Mock()):
        assert state() != before
    assert state() == before
