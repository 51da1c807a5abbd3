"""Docstrings as the project writes them, for mkdocstrings: a griffe extension that mkdocs.yml names.

In the source a docstring is plain text, for readers of the source and of ``help()``::

    Parameters                             Args:
    ----------                    ->           timeout: in seconds
    timeout : in seconds

After the colon is a description, with shapes and dtypes in words; numpydoc would have a type there, but
types are in the signature. Sections become sections of Google's style, and ``Returns`` a paragraph. Roles
such as ``:func:`` become code. An example, and a block that is indented below a paragraph, become fenced
blocks. Every parameter has a row, with its type and default. A row without a description says "see above":
a sentence of the docstring describes the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import griffe

SECTIONS = {"Parameters": "Args", "Attributes": "Attributes", "Raises": "Raises"}
ENTRY = re.compile(r"([\w*.]+(?:, [\w*.]+)*) : (.*)")
AS_TORCH = ("tag", "backend", "pg_options", "group_desc", "device_id", "device", "dtype")
COMMON = dict.fromkeys(AS_TORCH, "as in torch") | {
    "group": "the ranks that take part: None for all, a group, a mesh and a dimension, a list of ranks",
    "async_op": "return a `Work` at once instead of waiting",
    "group_src": "the rank in the group, instead of `src`",
    "group_dst": "the rank in the group, instead of `dst`",
    "num_warps": "of the launch",
    "num_stages": "of the launch",
}
ABOVE = "see above"
ROLE = re.compile(r":(?:py:)?[a-z]+:`~?([^`]+)`")


def markdown(text: str, parameters: Sequence[str] = ()) -> str:
    """Return a docstring in the form that griffe's parser reads; ``parameters``: names of a function's."""
    lines = ROLE.sub(r"`\1`", text).expandtabs().split("\n")
    if parameters and "Parameters" not in lines:
        sections = (
            n for n, line in enumerate(lines) if line.startswith((*SECTIONS, "Returns", ">>> "))
        )
        end = next(sections, len(lines))
        lines[end:end] = ["", "Parameters", "----------", ""]
    output: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        underlined = number + 1 < len(lines) and set(lines[number + 1].strip()) == {"-"}
        if underlined and line in SECTIONS:
            entries, number = _entries(lines, number + 2)
            if line == "Parameters":
                described = [name.lstrip("*") for name, _ in entries]
                missing = [name for name in parameters if name not in described]
                entries += [(name, COMMON.get(name, ABOVE)) for name in missing]
            output += [
                "",
                f"{SECTIONS[line]}:",
                *(f"    {name}: {text}" for name, text in entries),
                "",
            ]
            continue
        if underlined:
            output += ["", f"**{line}.**"]
            number += 2
            continue
        if line.startswith(">>> "):
            end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
            output += ["", "```pycon", *lines[number:end], "```", ""]
            number = end
            continue
        if line.endswith("::") and not line.startswith(" "):
            end = number + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            block = "\n".join(lines[number + 1 : end]).strip("\n").split("\n")
            indent = min(len(line) - len(line.lstrip()) for line in block if line.strip())
            output += [line[:-1], "", "```text", *(line[indent:] for line in block), "```", ""]
            number = end
            continue
        output.append(line)
        number += 1
    return "\n".join(output)


def _entries(lines: list[str], number: int) -> tuple[list[tuple[str, str]], int]:
    """Return the entries of the section that begins at line ``number``, and the line where it ends."""
    found: list[tuple[list[str], str]] = []
    while number < len(lines):
        line = lines[number]
        if entry := ENTRY.fullmatch(line):
            found.append((entry[1].split(", "), entry[2]))
        elif line.startswith(" ") and found:
            names, text = found[-1]
            found[-1] = names, f"{text} {line.strip()}"
        else:
            break
        number += 1
    return [(name, text) for names, text in found for name in names], number


class PlainDocstrings(griffe.Extension):
    """Pass every docstring through :func:`markdown` before griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            described = obj.is_function or (obj.is_class and "\nParameters\n" in text)
            names = [
                parameter.name
                for parameter in (obj.parameters if described else ())
                # griffe's extension puts the entries of a TypedDict into the signature
                if parameter.name not in ("self", "cls")
                and not str(parameter.annotation).startswith("Unpack[")
            ]
            obj.docstring.value = markdown(text, names)
