"""Write the type stubs of the public modules: ``python tests/stubs.py``.

A stub repeats the imports of its module. A function whose result depends on its arguments has overloads
there. They come from its signature and a rule: :data:`RULES` has one for each type of result.

``run`` and the checks of ``interlace.verify`` have arguments, and take the arguments of the function that
they run. A call with only arguments of the function is checked against its parameters. So is a call with
positional ones of the function and keyword arguments of the check. No type exists for both kinds of keyword
arguments in one call: pass the function's arguments by ``functools.partial``.
"""

import ast
import builtins
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
FACES = tuple(
    ROOT / "python" / name
    for name in (
        "interlace/__init__.py",
        "interlace/experts/__init__.py",
        "interlace/functional/__init__.py",
        "interlace/nn/functional/__init__.py",
        "interlace/tensor/__init__.py",
        "interlace_verify/__init__.py",
    )
)
HEAD = "# Written by tests/stubs.py from the signatures of the functions.\n"
WIDTH = 100
VARIABLES = {"_P": "ParamSpec", "_Ts": "TypeVarTuple"}
HOMES = {
    **dict.fromkeys(("Any", "Literal", "overload"), "typing"),
    **dict.fromkeys(("ParamSpec", "TypeVarTuple", "Unpack"), "typing_extensions"),
    **dict.fromkeys(("Callable", "Sequence"), "collections.abc"),
    **dict.fromkeys(("Tensor", "dtype"), "torch"),
}
NO, YES = "Literal[False] = ...", "Literal[True]"
Case = tuple[str, Mapping[str, str]]
"""A type of result, and for which types of arguments: "" is an argument that such a call does not have.

Arguments that are not named are as in the signature, and names that it has not are for other functions.
"""


def now(cases: Sequence[Case]) -> list[Case]:
    """Return ``cases`` of a call that waits for its result."""
    return [(result, {**arguments, "async_op": NO}) for result, arguments in cases]


LATER: Case = ("Work", {"async_op": YES})
TENSOR: Case = ("Tensor", {})
RECEIVED: list[Case] = [
    ("tuple[Tensor, Tensor]", {"return_received": NO}),
    ("tuple[Tensor, Tensor, Tensor]", {"return_received": YES}),
]
BOUNDED = {"input_splits": "Tensor", "output_splits": "", "return_received": ""}
HANDLE: Case = ("tuple[Tensor, DispatchHandle]", {**BOUNDED, "num_max_rows_per_rank": "int"})
WEIGHTS: list[Case] = [
    ("Tensor", {"weight": "Tensor", "return_gathered": NO}),
    ("tuple[Tensor, Tensor]", {"weight": "Tensor", "return_gathered": YES}),
    ("list[Tensor]", {"weight": "Sequence[Tensor]", "return_gathered": NO}),
    ("tuple[Tensor, list[Tensor]]", {"weight": "Sequence[Tensor]", "return_gathered": YES}),
]
NORMED: list[Case] = [
    ("Normed", {"norm": "RowNorm", "quantize": "Unscaled | None = ..."}),
    ("Quantized", {"norm": "RowNorm", "quantize": "FP8"}),
    ("NormedScaled", {"norm": "RowNorm", "quantize": "BlockFormatName"}),
]
WITHOUT_NORM = {"norm": "None = ...", "quantize": "", "gather_normed": ""}
GATHERED = "Tensor | list[Tensor] | tuple[Tensor, Tensor | list[Tensor]]"
RULES: dict[str, list[Case]] = {
    "Work | None": [LATER, ("Work | None", {})],
    "Tensor | Work": [*now([TENSOR]), LATER, ("Tensor | Work", {})],
    "Tensor | tuple[Tensor, Tensor]": [
        ("Tensor", {"return_lse": NO, "return_received": NO}),
        ("tuple[Tensor, Tensor]", {"return_lse": YES, "return_received": YES}),
        ("Any", {"return_lse": "bool", "return_received": "bool"}),
    ],
    "tuple[Tensor, ...] | Work": [*now(RECEIVED), LATER, ("tuple[Tensor, ...] | Work", {})],
    "tuple[Tensor, ...] | tuple[Tensor, DispatchHandle] | Work": [
        *[
            (result, {**arguments, "num_max_rows_per_rank": ""})
            for result, arguments in [*now(RECEIVED), LATER, ("tuple[Tensor, ...] | Work", {})]
        ],
        *now([HANDLE]),
        ("Work", {**HANDLE[1], "async_op": YES}),
    ],
    "tuple[Received, DispatchHandle] | Work": [
        *now([("tuple[Received, DispatchHandle]", {})]),
        LATER,
    ],
    GATHERED: [*WEIGHTS, ("Any", {"return_gathered": "bool"})],
    f"{GATHERED} | Work": [*now(WEIGHTS), LATER, (f"{GATHERED} | Work", {})],
    "Normed | Quantized | NormedScaled": NORMED,
    "Normed | Quantized | NormedScaled | Work": [*now(NORMED), LATER],
    "Tensor | Normed | Quantized | NormedScaled": [("Tensor", WITHOUT_NORM), *NORMED],
    "Tensor | Normed | Quantized | NormedScaled | Work": [
        *now([("Tensor", {**WITHOUT_NORM, "residual": ""}), *NORMED]),
        LATER,
        ("Tensor | Work", {**WITHOUT_NORM, "residual": "", "async_op": "bool"}),
    ],
}


class Parameter(NamedTuple):
    """A parameter in the text of a signature; stars belong to ``name``."""

    name: str
    annotation: str
    default: str = ""
    keyword: bool = False


Overload = tuple[Sequence[Parameter], str]
"""Parameters, and the type of the result."""


def constant(default: ast.expr | None) -> str:
    """The text of a default, "..." where it is not a constant."""
    if isinstance(default, ast.Constant):
        return json.dumps(default.value) if isinstance(default.value, str) else repr(default.value)
    return "..." if default else ""


def parameters_of(function: ast.FunctionDef) -> list[Parameter]:
    """The parameters of a function; a default that is not a constant becomes "..."."""
    of = function.args
    missing = [None] * (len(of.args) - len(of.defaults))
    named = [
        *((each, value, False) for each, value in zip(of.args, missing + of.defaults, strict=True)),
        *((each, value, True) for each, value in zip(of.kwonlyargs, of.kw_defaults, strict=True)),
    ]
    found = [
        Parameter(each.arg, ast.unparse(each.annotation), constant(value), keyword)
        for each, value, keyword in named
    ]
    if of.vararg:
        found.insert(len(of.args), Parameter(f"*{of.vararg.arg}", "Any"))
    if of.kwarg:
        found.append(Parameter(f"**{of.kwarg.arg}", "Any"))
    return found


def called(parameters: Sequence[Parameter], arguments: Mapping[str, str]) -> list[Parameter]:
    found: list[Parameter] = []
    optional = keyword = False
    for each in parameters:
        annotation, default = each.annotation, each.default
        if each.name in arguments:
            annotation, _, default = arguments[each.name].partition(" = ")
        if annotation:
            # behind an optional parameter, a required one is passed by name
            keyword = keyword or each.keyword or (optional and not default)
            optional = optional or bool(default)
            found.append(Parameter(each.name, annotation, default and each.default, keyword))
    return found


def overloads(function: ast.FunctionDef) -> list[Overload]:
    """The overloads of a function; none where its signature says everything."""
    parameters = parameters_of(function)
    result = ast.unparse(function.returns) if function.returns else ""
    if [each.name for each in parameters[:3]] == ["fn", "world_size", "*args"]:
        fn, size, args, *own, kwargs = parameters
        yields = fn.annotation.removeprefix("Callable[..., ")
        its = args._replace(annotation="_P.args"), kwargs._replace(annotation="_P.kwargs")
        some = args._replace(annotation="Unpack[_Ts]")
        return [
            ([fn._replace(annotation=f"Callable[_P, {yields}"), size, *its], result),
            (
                [fn._replace(annotation=f"Callable[[Unpack[_Ts]], {yields}"), size, some, *own],
                result,
            ),
        ]
    cases = RULES.get(result, [])
    if not any(each.name in arguments for _, arguments in cases for each in parameters):
        return []
    return [(called(parameters, arguments), result) for result, arguments in cases]


@functools.cache
def source(module: str) -> ast.Module:
    """The source of a module of interlace."""
    path = ROOT / "python" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.alias]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from imports(node)


class Stub:
    """The stub of a public module.

    ``names``: imported local names, with module and name. ``public``: the ones that users import from here.
    ``variables``, ``functions``: other declarations as text.
    """

    def __init__(self, face: pathlib.Path) -> None:
        self.names: dict[str, tuple[str, str]] = {}
        self.variables: set[str] = set()
        self.functions: list[str] = []
        tree = ast.parse(face.read_text())
        assigned = {
            ast.unparse(e.targets[0]): e.value for e in tree.body if isinstance(e, ast.Assign)
        }
        if "__version__" in assigned:
            self.variables.add("__version__: str\n")
        exported = ast.literal_eval(assigned["__all__"])
        self.variables.add(f"__all__ = [\n{filled([json.dumps(name) for name in exported])}\n]\n")
        found = [
            (alias.asname or alias.name, module, alias.name)
            for module, alias in imports(tree)
            if alias.asname == alias.name or (alias.asname or alias.name) in exported
        ]
        self.public = {local for local, *_ in found}
        overloaded = []
        for local, module, name in sorted(found):
            functions = [
                each
                for each in source(module).body
                if isinstance(each, ast.FunctionDef) and each.name == name and overloads(each)
            ]
            overloaded += [(module, each) for each in functions]
            if not functions:
                self.names[local] = module, name
        for module, function in overloaded:
            for parameters, result in overloads(function):
                self.functions.append(self.overload(module, function.name, parameters, result))

    def overload(self, module: str, name: str, parameters: Sequence[Parameter], result: str) -> str:
        words = []
        starred = False
        for each in parameters:
            if each.keyword and not starred:
                words.append("*")
            starred = starred or each.keyword or each.name.startswith("*")
            default = f" = {each.default}" if each.default else ""
            words.append(f"{each.name}: {self.known(module, each.annotation)}{default}")
        result = self.known(module, result)
        line = f"def {name}({', '.join(words)}) -> {result}: ..."
        if len(line) > WIDTH:
            line = f"def {name}(\n{filled(words)}\n) -> {result}: ..."
        return f"@{self.local(module, 'overload')}\n{line}\n"

    def known(self, module: str, annotation: str) -> str:
        """Return ``annotation`` of a function of ``module``, in names that the stub imports."""
        tree = ast.parse(annotation.replace("torch.", ""), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                node.id = self.local(module, node.id)
        return ast.unparse(tree)

    def local(self, module: str, name: str) -> str:
        """The name that the stub has for ``name`` of ``module``."""
        if name in VARIABLES:
            kind = self.local(module, VARIABLES[name])
            self.variables.add(f'{name} = {kind}("{name}")\n')
            return name
        home = HOMES.get(name)
        if home is None:
            homes = {alias.asname or alias.name: home for home, alias in imports(source(module))}
            home = homes.get(name, module)
        local = name
        if local in self.public and self.names.get(local) != (home, name):
            local = f"_{name}"
        self.names[local] = home, name
        return local

    def __str__(self) -> str:
        words: dict[str, list[str]] = {}
        for local, (module, name) in sorted(self.names.items(), key=lambda each: each[1]):
            again = f" as {local}" if local in self.public or local != name else ""
            words.setdefault(module, []).append(f"{name}{again}")
        lines = [f"from {module} import (\n{filled(each)}\n)\n" for module, each in words.items()]
        return HEAD + "".join((*lines, "\n", *sorted(self.variables), *self.functions))


def filled(words: Sequence[str]) -> str:
    """Put words of a signature into as few lines as possible; no word is broken."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}," if lines[-1] else f"    {word},"
    return "\n".join(lines)


def stubs() -> dict[pathlib.Path, str]:
    """The text of every stub, by its file."""
    return {face.with_suffix(".pyi"): str(Stub(face)) for face in FACES}


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
