"""A PTX module as text: its kernels, its functions and the variables outside of them, by name.

Nothing in a body is looked at before a kernel that needs it is read, so a module may have much in it that
is not known here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from interlace.runtime.ptx.instruction import InlineAssemblyError, split
from interlace.runtime.ptx.text.variables import Variable, declared

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(  # code may stand behind it on its line
    r"(?<![\w%$.])\.(?:"
    r"loc[ \t]+\d+[ \t]+\d+[ \t]+\d+(?:[ \t]*,[ \t]*(?:function_name[^,;\n]+|inlined_at[ \t\d]+))*"
    r'|file[ \t]+\d+[ \t]+"[^"\n]*"?(?:[ \t]*,[ \t]*\d+)*'
    r"|version[ \t]+[\d.]+|target[ \t]+\w+(?:[ \t]*,[ \t]*\w+)*|address_size[ \t]+\d+)"
)
_FUNCTION = re.compile(
    r"\.(entry|func)\s*(?:\.attribute\s*\([^)]*\)\s*)?(?:\(([^)]*)\))?\s*([\w$%]+)\s*(?:\(([^)]*)\))?(.*)",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\.(global|const|shared)\b.*", re.DOTALL)
_ALIAS = re.compile(r"\.alias\s+([\w$%]+)\s*,\s*([\w$%]+)")
_WORDS = re.compile(r"[\w$%]+")
_TAKEN = re.compile(r"\bmov\.[bus]64\s+[^,;]+,\s*([\w$%]+)")


@dataclass(frozen=True)
class PtxFunction:
    """``body`` begins in ``line``; None of one that is only declared. ``directives`` stand before it."""

    name: str
    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    directives: str
    body: str | None
    line: int

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(_WORDS.findall(self.body or ""))


@dataclass(frozen=True)
class ModuleText:
    kernels: Mapping[str, PtxFunction]
    functions: Mapping[str, PtxFunction]
    variables: Mapping[str, Variable]

    def kernel(self, name: str | None) -> PtxFunction:
        """The kernel of that name; None: the only one. InlineAssemblyError lists what there is."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name in self.kernels:
            return self.kernels[name or ""]
        wanted = "one kernel of a text is run, which has to be named" if name is None else ""
        raise InlineAssemblyError(
            f"PTX: {wanted or f'there is no kernel {name!r}'}; there are: "
            f"{', '.join(self.kernels) or 'none'}"
        )

    def reached(self, kernel: PtxFunction) -> list[PtxFunction]:
        """``kernel`` and the functions that it may come to, also by addresses that variables have."""
        found = [kernel]
        for each in found:
            named = {*each.words, *self._in_values(each.words)}
            others = (self.functions[name] for name in sorted(named & self.functions.keys()))
            found += [other for other in others if other not in found]
        return found

    def named_by(self, functions: list[PtxFunction]) -> dict[str, Variable]:
        """The variables that ``functions`` name, and those that the values of these name."""
        words = frozenset().union(*(each.words for each in functions))
        names = {*words, *self._in_values(words)}
        return {name: each for name, each in self.variables.items() if name in names}

    def pointed_to(self, functions: list[PtxFunction]) -> set[str]:
        """The functions with an address that ``functions`` take, or that a variable has."""
        taken = {name for each in functions for name in _TAKEN.findall(each.body or "")}
        words = frozenset().union(*(each.words for each in functions))
        return (taken | self._in_values(words)) & self.functions.keys()

    def _in_values(self, words: frozenset[str]) -> set[str]:
        """What the initial values of variables among ``words`` name, and the values of those."""
        found = [name for name in self.variables if name in words]
        named: set[str] = set()
        for name in found:
            more = {*_WORDS.findall(" ".join(self.variables[name].initial))} - named
            named |= more
            found += [each for each in more if each in self.variables]
        return named


def read_text(ptx: str) -> ModuleText:
    kernels: dict[str, PtxFunction] = {}
    functions: dict[str, PtxFunction] = {}
    variables: dict[str, Variable] = {}
    text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n") or " ", ptx)
    for line, head, body in _statements(_DIRECTIVE.sub("", text)):
        if match := _FUNCTION.search(head):
            results, given = (_formals(each or "", line) for each in (match[2], match[4]))
            made = PtxFunction(match[3], results, given, match[5], body, line)
            if match[1] == "entry":
                kernels[made.name] = made
            elif body is not None or made.name not in functions:
                functions[made.name] = made
        elif match := _ALIAS.match(head):
            functions[match[1]] = functions[match[2]]
        elif match := _VARIABLE.search(head):
            for variable in _declared(match[0]):
                extern = head.startswith(".extern")
                if not extern or variable.name not in variables:
                    variables[variable.name] = replace(variable, extern=extern)
    return ModuleText(kernels, functions, variables)


def _statements(text: str) -> Iterator[tuple[int, str, str | None]]:
    """(line of the body, what stands before it, the body without its braces or None)."""
    at = 0
    while match := re.compile(r"[;{]").search(text, at):
        head, body, end = text[at : match.start()].strip(), None, match.end()
        if match[0] == "{" and "=" in head:
            end = text.find(";", end) + 1 or len(text)
            head = text[at : end - 1].strip()
        elif match[0] == "{":
            close = _closing(text, end)
            body, end = text[end:close], close + 1
        yield text.count("\n", 0, match.end()) + 1, head, body
        at = end


def _closing(text: str, at: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, at):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise InlineAssemblyError("PTX: a '{' is never closed")


def _formals(text: str, line: int) -> tuple[Variable, ...]:
    try:
        return tuple(variable for each in split(text) for variable in declared(each))
    except ValueError as error:
        raise InlineAssemblyError(f"PTX: {error}; line {line}") from None


def _declared(text: str) -> list[Variable]:
    """Nothing of those of an unknown type: who uses one is told that it is not declared."""
    try:
        return declared(text)
    except ValueError:
        return []
