"""Notebooks are made from pages, and run: ``python tests/documents/test_notebooks.py`` writes them anew.

A notebook has the name of its page. A file that the page saves is a cell with ``%%writefile``, a command is
a cell with ``!``, and the text after a command is the output of its cell.
"""

import json
import pathlib
import sys
from typing import Any

import pytest
from markdown_it import MarkdownIt

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for the command

import pages
from tiers import few

NOTEBOOKS = {path.stem: path for path in sorted((pages.ROOT / "docs").rglob("*.ipynb"))}
BEGIN = """This notebook is the page [{name}.md]({name}.md). Start it in a copy of the repository:

- `pip install . jupyterlab`
- `jupyter lab {folder}/{name}.ipynb`
"""
PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells(document: str) -> list[dict[str, Any]]:
    """Turn the text and the blocks of a page into the cells of a notebook."""
    lines = document.splitlines(keepends=True)
    files = iter(pages.blocks(document))
    found: list[dict[str, Any]] = []
    begin = 0  # the first line that is in no cell yet
    for token in MarkdownIt("commonmark").parse(document):
        if token.type == "fence":
            assert token.map is not None
            add_text(found, "".join(lines[begin : token.map[0]]))
            begin = token.map[1]
            if token.info == "text":
                found[-1]["outputs"] = [stream(token.content)]
                continue
            block = next(files)
            first = f"%%writefile {block.file}\n" if block.file else "!"
            found.append(cell("code", first + block.text.strip("\n"), len(found)))
    add_text(found, "".join(lines[begin:]))
    return found


def add_text(found: list[dict[str, Any]], text: str) -> None:
    """Append a cell of Markdown, if there is a text."""
    if text.strip():
        found.append(cell("markdown", text.strip(), len(found)))


def cell(kind: str, source: str, number: int) -> dict[str, Any]:
    """Return the cell with that number, without outputs."""
    empty = {"execution_count": None, "outputs": []} if kind == "code" else {}
    lines = source.splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines, **empty}


def stream(text: str) -> dict[str, Any]:
    """Return the output of a cell that printed ``text``."""
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def notebook(page: pathlib.Path) -> str:
    """Return the notebook of a page, as a file has it."""
    metadata = {"kernelspec": PYTHON, "language_info": {"name": "python"}}
    name, folder = page.stem, page.parent.relative_to(pages.ROOT)
    document = page.read_text().replace(f"; [a notebook]({name}.ipynb) has both as cells.", ".")
    assert f"{name}.ipynb" not in document, "the notebook would lead to itself"
    title, _, rest = document.partition("\n")
    begin = BEGIN.format(name=name, folder=folder)
    whole = {"cells": cells(f"{title}\n\n{begin}\n{rest}"), "metadata": metadata}
    whole |= {"nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def run(code: str, folder: pathlib.Path) -> str:
    """Return what a cell prints in ``folder``."""
    first, _, rest = code.partition("\n")
    if first.startswith("%%writefile "):
        (folder / first.split()[1]).write_text(rest)
        return ""
    assert first.startswith("!") and not rest, code
    return pages.run_bash(first[1:], folder)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_the_one_of_its_page(name: str) -> None:
    path = NOTEBOOKS[name]
    expected = notebook(path.with_suffix(".md"))
    assert path.read_text() == expected, f"python {__file__} writes it"


@pytest.mark.parametrize("name", few(NOTEBOOKS))
def test_a_notebook_prints_what_it_shows(name: str, tmp_path: pathlib.Path) -> None:
    pages.prepared(tmp_path, "")
    for part in json.loads(NOTEBOOKS[name].read_text())["cells"]:
        if part["cell_type"] == "code":
            text = "".join(line for output in part["outputs"] for line in output["text"])
            assert run("".join(part["source"]), tmp_path) == text


if __name__ == "__main__":
    for path in NOTEBOOKS.values():
        path.write_text(notebook(path.with_suffix(".md")))
