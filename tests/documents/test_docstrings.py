"""Every public name says what it is, for what shapes, what it raises, whence it comes, with an example.

Public is what docs/reference/api shows, and the public methods of its classes; a name's aliases are one.
The rules are those of :func:`faults`; examples are run by tests/sim/cli/test_doctests.py.
"""

import builtins
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.tensor._collective_utils as mesh_utils

import interlace
import pages

# Results, which callers do not make, by the function whose example makes them.
MAKERS = {
    "verify.races": "verify.Access verify.Finding verify.RaceReport",
    "verify.schedules": "verify.Failure verify.ScheduleReport",
    "verify.lint": "verify.Fault verify.LintReport",
    "verify.explore": "verify.Exploration verify.Counterexample",
    "compile.Pattern": "compile.Collective",
    "compile.explain": "compile.Explanation compile.Candidate compile.Report",
    "compile.predict": "compile.Prediction",
    "integrations.megatron.patch": "integrations.megatron.Patched",
    "aot.load": "aot.Bundle aot.Kernel",
}
RESULTS = {
    f"interlace.{name}": f"interlace.{maker}"
    for maker, names in MAKERS.items()
    for name in names.split()
}
# What needs a bundle and CuPy, Megatron-core, or Ray has its example on a page, whose code is run as well.
ON_PAGES = {
    "interlace.aot.load": "how-to/compile/aot.md",
    "interlace.integrations.megatron.patch": "how-to/train/megatron.md",
    "interlace.integrations.ray.join": "how-to/run/launching.md",
    "interlace.integrations.ray.meeting": "how-to/run/launching.md",
    "interlace.integrations.ray.run": "how-to/run/launching.md",
}
# Methods that have the docstring of what they override, or the class's.
OVERRIDES = {"forward", "extra_repr"}
# torch's own class under our name.
FOREIGN = {"interlace.ReduceOp"}
# Of these classes these methods are for callers. The rest, which the ops call, or that a program calls
# which has a bundle, is described, without the rest of the rules.
FOR_CALLERS = {
    "interlace.Group": {"barrier", "close", "split"},
    "interlace.nn.DeferredWeightGradients": {"run"},
    "interlace.aot.Bundle": set(),
    "interlace.aot.Kernel": set(),
}

# Where the names of ours that have a model have it, and what a docstring that names a source has in it.
MODELS = {"interlace": dist, "interlace.tensor": mesh_utils, "interlace.symmetric_memory": symm_mem}
BY_MODEL = ("interlace.functional", "interlace.nn", "interlace.integrations.megatron")
SOURCE = re.compile(r"\btorch\b|\bMegatron\b|\bDTensor\b|\barXiv\b|\bNCCL\b")
SHAPE = re.compile(
    r"``\[[^`]*\]``|``\([^`]*,[^`]*\)``|\b(shapes?|lengths?|[0-9]-D|0-dim|elements?|size|parts?)\b"
)
RAISES = re.compile(
    r"\bRaises\s+(?:-+\s+)?(?:(?::class:)?`*~?[\w.]*(?:Error|Exception)\b|(?:what|the|as)\s)"
)
ERROR = re.compile(r"\b(?:[\w.]+\.)?(\w+Error)\b")
SECONDS = re.compile(r"\bseconds?\b|\btimedelta\b|\bms\b")


@dataclasses.dataclass(frozen=True)
class Public:
    """A name that the rules are for: ``owner`` is the class of a method."""

    name: str
    value: Any
    owner: Any = None

    @functools.cached_property
    def function(self) -> Any:
        """What is called: of a property the getter, of a layer ``forward``."""
        value = self.value.fget if isinstance(self.value, property) else self.value
        return getattr(value, "__func__", value)

    @functools.cached_property
    def text(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    @functools.cached_property
    def source(self) -> str:
        try:
            return textwrap.dedent(inspect.getsource(self.function))
        except (OSError, TypeError):
            return ""

    def parameters(self) -> dict[str, str]:
        """The names of the parameters, and their annotations."""
        functions = [self.function]
        if inspect.isclass(self.value):
            functions = [vars(self.value).get(name) for name in ("__init__", "forward")]
        found: dict[str, str] = {}
        for function in functions:
            if inspect.isfunction(function):
                given = inspect.signature(function).parameters.values()
                found |= {each.name: str(each.annotation) for each in given}
        found.pop("self", None)
        return found


def names() -> list[str]:
    """What docs/reference/api shows, modules replaced by what is public in them."""
    found: list[str] = []
    for page in sorted((pages.ROOT / "docs/reference/api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            value = of(name)
            if inspect.ismodule(value):
                found += [f"{name}.{member}" for member in value.__all__]
            else:
                found.append(name)
    return found


def of(name: str) -> Any:
    """The value of a dotted name; ``interlace.all_to_all`` is the function, not the file."""
    place, _, last = name.rpartition(".")
    module = importlib.import_module(place)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(name)


def public() -> Iterator[Public]:
    seen: set[int] = set()
    for name in names():
        value = of(name)
        if id(value) in seen or name in FOREIGN:
            continue
        seen.add(id(value))
        if not (inspect.isclass(value) or callable(value)) or isinstance(value, (dict, tuple)):
            continue
        if not hasattr(value, "__name__"):  # an instance, such as a Machine: its class is there too
            continue
        yield Public(name, value)
        for member, inner in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(inner, "fget", None) or getattr(inner, "__func__", inner)
            if member.startswith("_") or member in OVERRIDES or not inspect.isfunction(function):
                continue
            if function.__name__ != member:  # the default of a field
                continue
            inherited = any(hasattr(base, member) for base in value.__mro__[1:])
            if function.__module__.startswith("interlace") and (function.__doc__ or not inherited):
                yield Public(f"{name}.{member}", inner, value)


def _examples(*texts: str | None) -> str:
    lines = [line.strip() for text in texts for line in (text or "").split("\n")]
    return "\n".join(line for line in lines if line.startswith((">>> ", "... ")))


def faults(each: Public) -> list[str]:
    """What the docstring of a name lacks."""
    text = each.text
    if not text:
        return ["has no docstring"]
    found = []
    if not text.split("\n\n")[0].rstrip().endswith((".", ":")):
        found.append("begins with no sentence")
    place, _, last = each.name.rpartition(".")
    if last not in FOR_CALLERS.get(place, {last}):
        return found
    error = inspect.isclass(each.value) and issubclass(each.value, BaseException)
    parameters = each.parameters()
    if each.owner is None:
        elsewhere = each.name in RESULTS or each.name in ON_PAGES
        if not error and not elsewhere and ">>> " not in text:
            found.append("has no example")
    elif parameters and not re.search(rf"\.{last}\(", _examples(text, each.owner.__doc__)):
        found.append("is in no example")
    given = parameters.items()
    tensors = [name for name, kind in given if "Tensor" in kind and "Callable" not in kind]
    for name in tensors:
        if not re.search(rf"``{name}\b|^\s*(?:\w+, )*{name}(?:, \w+)* : ", text, re.MULTILINE):
            found.append(f"does not name the tensor {name}")
    if tensors and not SHAPE.search(text):
        found.append("gives no shape")
    raising = inspect.isfunction(each.function) and re.search(r"^\s+raise\b", each.source, re.M)
    if (tensors or raising or "group" in parameters) and not RAISES.search(text):
        found.append("does not say what it raises")
    if "timeout" in parameters and not SECONDS.search(text):
        found.append("does not give the unit of timeout")
    module = inspect.getmodule(each.function)
    for name in ERROR.findall(text):
        if not any(hasattr(place, name) for place in (builtins, interlace, module, torch)):
            found.append(f"names {name}, which is nowhere")
    model = getattr(MODELS.get(place), last, None)  # a module of that name is none
    by_model = place in BY_MODEL or callable(model)
    if by_model and not error and not SOURCE.search(text):
        found.append("does not say where its semantics come from")
    return found


ALL = list(public())


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_a_docstring_says_it_all(each: Public) -> None:
    assert not faults(each)


def test_the_rules_are_for_what_there_is() -> None:
    found = {each.name for each in ALL}
    assert len(found) > 250
    for name in {*RESULTS, *FOR_CALLERS}:
        assert name in found, name
    for made_by in RESULTS.values():
        assert ">>> " in (of(made_by).__doc__ or "") or made_by in ON_PAGES, made_by
    for name, page in ON_PAGES.items():
        blocks = pages.blocks((pages.ROOT / "docs" / page).read_text())
        calls = re.compile(rf"\b{name.rpartition('.')[2]}\(")
        assert any(calls.search(block.text) for block in blocks if block.language == "python"), name
    for name in FOREIGN:
        assert of(name).__module__.startswith("torch"), name


def test_doctest_finds_every_example() -> None:
    """In the module that has it: what it does not find there would never be run."""
    shown = [each for each in ALL if ">>> " in each.text]
    modules = {inspect.getmodule(each.function) for each in shown}
    finder = doctest.DocTestFinder()
    found = {
        inspect.cleandoc(test.docstring or "")
        for module in modules
        for test in finder.find(module, module.__name__)  # type: ignore[union-attr]
    }
    assert not [each.name for each in shown if each.text not in found]


def good(input: torch.Tensor, timeout: float, group: Any = None) -> torch.Tensor:
    """As ``torch.clone`` of ``input``, of any shape, within ``timeout`` seconds.

    Raises ValueError for a timeout below 0.

    >>> 1 + 1
    2
    """
    return input


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("As ``torch.clone`` of", ""), "does not say where its semantics come from"),
        (("``input``", ""), "does not name the tensor input"),
        (("of any shape", ""), "gives no shape"),
        (("seconds", ""), "does not give the unit of timeout"),
        (("Raises ValueError", ""), "does not say what it raises"),
        ((">>> 1 + 1", ""), "has no example"),
        (("seconds.", "seconds"), "begins with no sentence"),
        (("ValueError", "NoSuchError"), "names NoSuchError, which is nowhere"),
        ((None, ""), "has no docstring"),
    ],
)
def test_a_fault_is_seen(change: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = good.__doc__ or ""
    assert not faults(Public("interlace.functional.good", good))
    monkeypatch.setattr(good, "__doc__", text.replace(*change) if change[0] else None)
    assert faults(Public("interlace.functional.good", good)) == [fault]


def test_methods_are_looked_at() -> None:
    class Thing:
        """A thing.

        >>> Thing().told(1)
        """

        def told(self, one: int) -> None:
            """Used above."""

        def silent(self, one: int) -> None:
            """Used nowhere."""

        def refusing(self) -> None:
            """Says not what."""
            raise ValueError

    def of_method(name: str) -> list[str]:
        return faults(Public(f"interlace.Thing.{name}", vars(Thing)[name], Thing))

    assert of_method("told") == []
    assert of_method("silent") == ["is in no example"]
    assert of_method("refusing") == ["does not say what it raises"]
