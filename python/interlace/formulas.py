"""Formulas of a bundle's manifest: arithmetic on whole numbers and lists of them, in bounded time.

No formula is run as it is, but compiled from a tree that counts the nodes that are evaluated and the items
that are passed on, and whose numbers fit 64 bits. This file needs the standard library alone; the loader in
a bundle has it within.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST_STEPS = 1 << 26  # of an evaluation, which so ends within seconds: nodes that are evaluated
_ITEM = 8  # steps: an item that is passed on is as much time, or memory
MOST_NAMES = 64  # of formulas that are evaluated for one another
_ARITHMETIC = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul}
_ARITHMETIC |= {"FloorDiv": operator.floordiv, "Mod": operator.mod}
_NODES = """
Module Expression FunctionDef arguments arg Return Assign AugAssign For If Expr Name Load Store Constant
List Tuple Starred ListComp GeneratorExp comprehension Subscript Slice Call keyword BinOp UnaryOp BoolOp
Compare IfExp Add Sub Mult FloorDiv Mod USub Not And Or Eq NotEq Lt LtE Gt GtE
"""
_ALLOWED = frozenset(_NODES.split())


class BundleError(ValueError):
    """A directory is no bundle, or not as it was built."""


class Formulas:
    """Named expressions over whole numbers, and the functions that they call, from a manifest."""

    def __init__(
        self, functions: Mapping[str, str], expressions: Mapping[str, str], constants: Any
    ) -> None:
        self._expressions, self._constants = dict(expressions), dict(constants)
        self._budget = threading.local()
        self._scope: dict[str, Any] = {
            "__builtins__": {},
            "len": len,
            "range": range,
            "sum": lambda items: _number64(sum(self._numbers(items))),
            **{each.__name__: self._extreme(each) for each in (max, min)},
            ".spend": self._spend,
            ".each": self._each,
            ".number": _number64,
            ".arithmetic": lambda kind, *two: _number64(_ARITHMETIC[kind](*map(_number64, two))),
        }
        for text in functions.values():
            with _blaming(text):
                tree = ast.parse(text)
                if not _only_defines(tree):
                    raise BundleError(f"the manifest has no plain function but {text[:80]!r}")
                exec(_compiled(tree), self._scope)

    def inputs(self, text: str) -> set[str]:
        """Names of the numbers and lists that an expression is over."""
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        return {node.id for node in nodes} - stored - self._scope.keys()

    def knows(self, name: str, values: Mapping[str, Any]) -> bool:
        return name in values or name in self._constants or name in self._expressions

    def value(self, text: str, values: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
        """A named expression, or any, at ``values``. Raises ValueError for a value that is missing."""
        if text in values:
            return whole(text, values[text])
        if not within:
            self._budget.left = MOST_STEPS
        if text in self._constants:
            with _blaming(text):
                return self._plain(self._constants[text])
        text = self._expressions.get(text, text)
        with _blaming(text):
            tree = ast.parse(text, mode="eval")
            self._spend(300 * _size(tree) + len(self._scope))  # to compile a node takes that long
            code, scope, needed = _compiled(tree), dict(self._scope), self.inputs(text)
        for name in needed:
            if not self.knows(name, values):
                raise ValueError(f"values lack {name!r}, which {text!r} needs")
            if name in within or len(within) == MOST_NAMES:
                raise BundleError(
                    f"the manifest says {name!r} by itself, or too far on: {text[:80]!r}"
                )
            scope[name] = self.value(name, values, (*within, name))
        with _blaming(text):
            return self._plain(eval(code, scope))

    def _spend(self, steps: int) -> None:
        self._budget.left -= steps
        if self._budget.left < 0:
            raise BundleError(f"a formula of the manifest takes more than {MOST_STEPS} steps")

    def _each(self, items: Iterable[Any], steps: int) -> Iterator[Any]:
        for item in items:
            self._spend(steps)
            yield item

    def _numbers(self, items: Iterable[Any]) -> Iterator[int]:
        return map(_number64, self._each(items, _ITEM))

    def _extreme(self, of: Any) -> Any:
        """max or min, of numbers only."""
        return lambda *all, **default: of(
            self._numbers(all[0] if len(all) == 1 else all), **default
        )

    def _plain(self, value: Any, depth: int = 2) -> Any:
        """A number, a list of these or a list of lines; copied, so nothing is in it twice."""
        if depth and isinstance(value, (list, tuple)):
            return [self._plain(one, depth - 1) for one in self._each(value, _ITEM)]
        return _number64(value)


class _Counting(ast.NodeTransformer):
    """Makes a tree count its steps and check its numbers, if it is arithmetic, loops and calls by name.

    The only method is append of a list. What is put in has names with a dot, which no formula can say.
    """

    def visit(self, node: Any) -> Any:
        kind, value = type(node).__name__, getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(value, ast.Constant):
            return ast.Pass()  # the docstring of a function
        name = getattr(node, "id", "") or getattr(node, "name", "") or getattr(node, "arg", "")
        wrong = kind not in _ALLOWED and not (kind == "Attribute" and node.attr == "append")
        wrong |= kind == "Constant" and not (isinstance(value, int) and value < 1 << 63)
        stores = isinstance(getattr(node, "ctx", None), ast.Store)
        if wrong or (name or "").startswith("_") or (stores and kind not in ("Name", "Tuple")):
            raise BundleError(f"a formula of the manifest has {kind}: {ast.unparse(node)}")
        return super().visit(node)

    def _loop(self, node: Any) -> Any:
        steps = ast.Constant(_size(node))
        for part in getattr(node, "generators", [node]):
            part.iter = _call(".each", part.iter, steps)
        return self.generic_visit(node)

    visit_For = visit_ListComp = visit_GeneratorExp = _loop

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.body.insert(0, ast.Expr(_call(".spend", ast.Constant(_size(node)))))
        return self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        node.value = _call(".each", node.value, ast.Constant(_ITEM))
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """Of a slice a copy that is counted: ``[*a[b:c]]``."""
        self.generic_visit(node)
        each = _call(".each", node, ast.Constant(_ITEM))
        slices = isinstance(node.slice, ast.Slice)
        return ast.List([ast.Starred(each, ast.Load())], ast.Load()) if slices else node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        kind = ast.Constant(type(node.op).__name__)
        return _call(".arithmetic", kind, node.left, node.right)

    def visit_AugAssign(self, node: Any) -> Any:
        changed = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit(ast.Assign([node.target], changed))

    def visit_Compare(self, node: ast.Compare) -> Any:
        node.left = _call(".number", node.left)
        node.comparators = [_call(".number", each) for each in node.comparators]
        return self.generic_visit(node)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _size(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def _compiled(tree: Any) -> Any:
    counting = ast.fix_missing_locations(_Counting().visit(tree))
    return compile(counting, "<manifest>", "eval" if isinstance(tree, ast.Expression) else "exec")


def _number64(value: Any) -> int:
    if not isinstance(value, int) or not -1 << 63 <= value < 1 << 63:
        raise BundleError(f"a formula of the manifest comes to no number of 64 bits: {type(value)}")
    return value


@contextlib.contextmanager
def _blaming(text: str) -> Iterator[None]:
    """Whatever goes wrong with ``text`` is wrong with the bundle: too deep, too large, no formula."""
    try:
        yield
    except Exception as error:
        said = BundleError(f"{text[:80]!r} comes to no number: {type(error).__name__}")
        raise (error if isinstance(error, BundleError) else said) from None


def _only_defines(tree: ast.Module) -> bool:
    """Whether it is one function, of whose definition nothing is computed before a formula calls it."""
    match tree.body:
        case [ast.FunctionDef(args=given, decorator_list=[], returns=None)]:
            plain = ast.arguments([], given.args, None, [], [], None, [])
            simple = ast.dump(given) == ast.dump(plain)
            return simple and not any(each.annotation for each in given.args)
    return False


def whole(name: str, value: Any) -> Any:
    """A whole number or a list of them."""
    try:
        if isinstance(value, Iterable):
            return [operator.index(one) for one in value]
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, not a whole number or a list of them") from None
