"""Names in the code of a kernel and of what it calls: the values that they stand for."""

import dis
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any


def named(value: Any, beyond: re.Pattern[str]) -> Iterator[Any]:
    """Constants, values, modules, classes, functions, jitted ones as they are: each before what it names.

    Of modules that ``beyond`` matches a function or a class is among them, if it is named by itself.
    """
    return _named(value, beyond, set())


def _named(value: Any, beyond: re.Pattern[str], seen: set[int]) -> Iterator[Any]:
    found = value
    while hasattr(value, "fn"):  # under triton.jit, an autotuner, heuristics
        found, value = value, value.fn
    if not isinstance(value, type) and hasattr(value, "value"):  # a constant
        yield from _named(value.value, beyond, seen)
    elif isinstance(value, dict):
        yield from _named(tuple(value.values()), beyond, seen)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _named(each, beyond, seen)
    elif not isinstance(value, (type, types.FunctionType)):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        yield found
        if not beyond.match(str(value.__module__)):
            for each in (
                _of_class(value) if isinstance(value, type) else _of_function(value, beyond)
            ):
                yield from _named(each, beyond, seen)


def _of_class(value: type) -> Iterator[Any]:
    if hasattr(value, "hash_attrs"):  # an aggregate of Triton's, made of the class that was written
        value = inspect.getclosurevars(value.__new__).nonlocals["cls"]
    for member in vars(value).values():
        plain = isinstance(member, (types.FunctionType, int, float, str))
        if plain or hasattr(member, "fn"):
            yield member


def _of_function(function: types.FunctionType, beyond: re.Pattern[str]) -> Iterator[Any]:
    """What its code names: constants, and what is around it or in modules there; and its defaults."""
    yield from (function.__defaults__, function.__kwdefaults__)
    around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        value: Any = None
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
                value = around.get(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(
                value, types.ModuleType
            ):
                other = beyond.match(value.__name__)
                value = vars(value).get(step.argval)
                if other and not isinstance(value, types.ModuleType):
                    value = None
            elif step.opname != "PUSH_NULL":
                value = None
            if value is not None:
                yield value
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            elif constant != function.__doc__:
                yield constant


def wrap_with_statements(wrapper: Callable[[Any], Any]) -> None:
    """Let ``wrapper`` stand around what Triton's compiler does with a ``with`` statement, from now on."""
    from triton.compiler.code_generator import CodeGenerator  # few need it

    CodeGenerator.visit_With = wrapper(CodeGenerator.visit_With)
