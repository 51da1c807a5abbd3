"""Formulas of a manifest: arithmetic that reaches nothing else, and comes to a number or to an error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import interlace.formulas
from interlace import aot


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "rows.__class__",
        "(lambda: 1)()",
        "10 ** 10",
        "open(rows)",
        "f'{rows}'",
    ],
)
def test_formulas_are_arithmetic(text: str) -> None:
    formulas = aot.Formulas({}, {"rows": "[1, 2]", "sum_of_rows": "sum(rows)"}, {})
    assert formulas.value("sum_of_rows", {}) == 3
    with pytest.raises(ValueError, match=r"a formula of the manifest has|values lack 'open'"):
        formulas.value(text, {})
    with pytest.raises(aot.BundleError, match="a formula of the manifest has"):
        aot.Formulas({"f": "def f(rows):\n    import os\n    return os"}, {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "for i in range(1000000000000):\n    len([])",
        "x = [0] * 1000000000000",
        "def f(x=[0] * 1000000000000):\n    return x",
        "def f(*, x=[0] * 1000000000000):\n    return x",
        "def f(x: [0] * 1000000000000):\n    return x",
        "def f() -> [0] * 1000000000000:\n    return 1",
        "def f():\n    return 1\nf()",
    ],
)
def test_loading_computes_nothing(text: str) -> None:
    with pytest.raises(aot.BundleError, match="no plain function"):
        aot.Formulas({"f": text}, {}, {})


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("again(1)", "comes to no number: RecursionError"),
        ("[0] * 1000000000000000000", "comes to no number of 64 bits: .*list"),
        ("len(range(1000000000000000000000))", "has Constant"),
        (
            "len(range(-9000000000000000000, 9000000000000000000))",
            "comes to no number: OverflowError",
        ),
        ("first", "says 'second' by itself"),
    ],
)
def test_formulas_that_come_to_no_number(formula: str, said: str) -> None:
    quantities = {"first": "second + 1", "second": "first - 1"}
    formulas = aot.Formulas({"again": "def again(n):\n    return again(n)"}, quantities, {})
    with pytest.raises(aot.BundleError, match=said):
        formulas.value(formula, {})


LONG = """
def twice(n):
    '''A docstring.'''
    n += n
    return n
def power(n):
    for i in range(10000000000):
        n = n * n + 1
    return n
def forever(n):
    items = [n]
    for item in items:
        items.append(item)
def doubled(n):
    for i in range(n):
        n = [n, n]
    return n
def copied(n):
    items = [n]
    for i in range(n):
        items = [*items, *items]
    return len(items)
def sliced(n):
    items = [n for i in range(1000)]
    return sum(len(items[1:]) for i in range(n))
def raised(n):
    for i in range(9):
        n *= n
    return 1 if n else 0
def same(n):
    items = [n for i in range(1000)]
    return sum(items == items for i in range(n))
def cyclic(n):
    items = [n]
    items.append(items)
    return items
def calls(n):
    return calls(n - 1) + calls(n - 1) if n else 1
"""
FUNCTIONS = {text.partition("(")[0]: f"def {text}" for text in LONG.split("\ndef ")[1:]}
FAR = {f"far{i}": f"far{i + 1} + more{i + 1}" for i in range(40)} | {"far40": "1", "more40": "1"}
FAR |= {f"more{i}": f"far{i + 1} - more{i + 1}" for i in range(40)}


@pytest.mark.parametrize(
    "text",
    [
        "power(3)",
        "raised(3)",
        "forever(1)",
        "doubled(60)",
        "copied(60)",
        "sliced(1000)",
        "same(10)",
        "cyclic(1)",
        "calls(60)",
        "far0",
        "sum(range(1000000000000))",
        "max(range(1000000000000))",
        "max([[1]])",
        "len([i for i in range(1000000000000)])",
        "[0, *range(1000000000000)]",
        "range(1000000000000)[1:]",
        "'x' * 1000000000000",
        "'%1000000000000d' % 1",
        "9000000000000000000 * 9000000000000000000",
        "9000000000000000000 + 9000000000000000000",
        "10 ** 10",
        "1 << 1",
    ],
)
def test_no_formula_takes_long(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interlace.formulas, "MOST_STEPS", 1 << 19)
    formulas = aot.Formulas(FUNCTIONS, FAR, {})
    assert formulas.value("twice(21) + calls(9) + far38", {}) == 42 + 512 + 2
    with pytest.raises(aot.BundleError):
        formulas.value(text, {})


@pytest.mark.parametrize(
    "text", ["def _f(n):\n    return 1", "def f(_n):\n    return 1", "def f(n):\n    n[0] = 1"]
)
def test_functions_name_and_store_nothing_hidden(text: str) -> None:
    with pytest.raises(aot.BundleError, match="a formula of the manifest has"):
        aot.Formulas({"f": text}, {}, {})


NUMBERS = st.integers(-9, 99).map(str) | st.sampled_from(
    ["rows", "rank", "absent", "_x", "", "((", "\0", "3037000500"]
)
FORMULAS = st.recursive(
    NUMBERS,
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["+", "-", "*", "//", "%", "<", "**", "@"]), part).map(
            " ".join
        ),
        st.lists(part, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(part, part).map(lambda parts: f"{parts[0]}[{parts[1]}]"),
        st.tuples(st.sampled_from(["sum", "len", "max", "range", "twice", "open"]), part).map(
            lambda parts: f"{parts[0]}({parts[1]})"
        ),
    ),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@settings(deadline=None, max_examples=300, derandomize=True)
@given(text=FORMULAS | st.text(max_size=40))
def test_whatever_a_formula_says_is_a_value_or_a_bundle_error(text: str) -> None:
    formulas = aot.Formulas({"twice": "def twice(n):\n    return n + n"}, {}, {})
    try:
        value = formulas.value(text, {"rows": [1, 2], "rank": 1})
        for one in value if isinstance(value, list) else [value]:
            assert all(
                abs(number) < 1 << 63 for number in (one if isinstance(one, list) else [one])
            )
    except ValueError as error:
        assert isinstance(error, aot.BundleError) or str(error).startswith("values lack")
