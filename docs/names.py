"""The alphabetical index of the API: a hook of mkdocs makes it whenever the site is built.

The names are the ones that ``tests/documents/test_public_names.py`` keeps.
"""

import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
LIST = DOCS.parent / "tests/documents/public_names.txt"
PAGE = "reference/names.md"
INTRODUCTION = """# Index of names

For everybody who knows a name: find the modules that have it, and its description. A name in a module
without a link has no page. These are device functions (`interlace.kernels`), references that tests compare
with (`interlace.reference`), second names of functions, and [ops of torch's
dispatcher](api/functional.md#schemas).

Formats are values of arguments: `"mxfp8"`, `"mxfp8_e5m2"`, `"mxfp4"`, `"nvfp4"` and `"fp8_block128"`.
[Block-scaled formats](../how-to/train/formats.md) describes them.
"""


def names_with_pages(names: Iterable[str]) -> set[str]:
    """Return the names that a page below ``reference/api`` describes, by name or with the whole module."""
    pages = (DOCS / "reference/api").glob("*.md")
    on_pages = {
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    }
    return {name for name in names if on_pages & {name, name.rpartition(".")[0]}}


def index(names: Iterable[str]) -> str:
    """Return the page: a section for each letter, and a line for each name with its modules."""
    public = [name for name in names if not name.rpartition(".")[2].startswith("_")]
    linked = names_with_pages(public)

    def letter(name: str) -> str:
        return name.rpartition(".")[2][0].upper()

    def key(name: str) -> tuple[str, str, str]:
        module, _, last = name.rpartition(".")
        return last.lower(), last, module

    lines = [INTRODUCTION]
    for first, begins in groupby(sorted(public, key=key), letter):
        lines += [f"## {first}", ""]
        for last, same in groupby(begins, lambda name: name.rpartition(".")[2]):
            modules = [
                f"[`{module}`][{name}]" if name in linked else f"`{module}`"
                for name in same
                for module in [name.rpartition(".")[0]]
            ]
            lines.append(f"- `{last}`: {', '.join(modules)}")
        lines.append("")
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Add the page, which is not a file."""
    from mkdocs.structure.files import File

    names = LIST.read_text().split()
    files.append(File.generated(config, PAGE, content=index(names)))
    return files
