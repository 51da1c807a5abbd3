"""Docstrings as the project writes them, for mkdocstrings: a griffe extension that mkdocs.yml names.

In the source a docstring is plain text, made to be read there and by ``help()``::

    Parameters                             Args:
    ----------                    ->           timeout: in seconds
    timeout : in seconds

What follows the colon is a description, with shapes and dtypes in words, where numpydoc has a type; types
are in the signature. So sections become those of Google's style, ``Returns`` a paragraph; roles such as
``:func:`` become code; an example and a paragraph's indented block become fenced blocks. Every parameter
that can be given has a row, with its type and default; what a sentence says of it is not said again there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import griffe

SECTIONS = {"Parameters": "Args", "Attributes": "Attributes", "Raises": "Raises"}
ENTRY = re.compile(r"([\w*.]+(?:, [\w*.]+)*) : (.*)")
AS_TORCH = ("tag", "backend", "pg_options", "group_desc", "device_id", "device", "dtype")
COMMON = dict.fromkeys(AS_TORCH, "as torch has it") | {
    "group": "who takes part: None for all, a group, a mesh and a dimension, a list of ranks",
    "async_op": "return a `Work` at once, and do not wait",
    "group_src": "the rank in the group, in place of `src`",
    "group_dst": "the rank in the group, in place of `dst`",
    "num_warps": "of the launch",
    "num_stages": "of the launch",
}
ABOVE = "see above"
ROLE = re.compile(r":(?:py:)?[a-z]+:`~?([^`]+)`")


def markdown(text: str, parameters: Sequence[str] = ()) -> str:
    """A docstring in the form that griffe's parser takes; ``parameters`` are those of a function."""
    lines = ROLE.sub(r"`\1`", text).expandtabs().split("\n")
    if parameters and "Parameters" not in lines:
        ends = (
            n for n, line in enumerate(lines) if line.startswith((*SECTIONS, "Returns", ">>> "))
        )
        end = next(ends, len(lines))
        lines[end:end] = ["", "Parameters", "----------", ""]
    done: list[str] = []
    number = 0
    while number < len(lines):
        line = lines[number]
        underlined = number + 1 < len(lines) and set(lines[number + 1].strip()) == {"-"}
        if underlined and line in SECTIONS:
            entries, number = _entries(lines, number + 2)
            if line == "Parameters":
                known = [name.lstrip("*") for name, _ in entries]
                others = [name for name in parameters if name not in known]
                entries += [(name, COMMON.get(name, ABOVE)) for name in others]
            done += [
                "",
                f"{SECTIONS[line]}:",
                *(f"    {name}: {text}" for name, text in entries),
                "",
            ]
            continue
        if underlined:
            done += ["", f"**{line}.**"]
            number += 2
            continue
        if line.startswith(">>> "):
            end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
            done += ["", "```pycon", *lines[number:end], "```", ""]
            number = end
            continue
        if line.endswith("::") and not line.startswith(" "):
            end = number + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            block = "\n".join(lines[number + 1 : end]).strip("\n").split("\n")
            least = min(len(each) - len(each.lstrip()) for each in block if each.strip())
            done += [line[:-1], "", "```text", *(each[least:] for each in block), "```", ""]
            number = end
            continue
        done.append(line)
        number += 1
    return "\n".join(done)


def _entries(lines: list[str], number: int) -> tuple[list[tuple[str, str]], int]:
    """The entries of a section that begin at ``number``, and where it ends."""
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
    """Every docstring through :func:`markdown`, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            called = obj.is_function or (obj.is_class and "\nParameters\n" in text)
            given = list(obj.parameters) if called else []
            # these are those of a TypedDict, which griffe's own extension puts into the signature
            own = [each.name for each in given if not str(each.annotation).startswith("Unpack[")]
            parameters = [name for name in own if name not in ("self", "cls")]
            obj.docstring.value = markdown(text, parameters)
