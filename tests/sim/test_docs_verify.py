"""docs/verify.md stays true: its Python runs as written, prints what it says, and its tables are whole.

What is run: every ``python`` block, as a file of its own, in one folder with the recipe. One that begins
with ``# name.py`` is that file, for the others to import; a ``diff`` block makes another file out of the
recipe. A ``text`` block that follows directly is what it prints. Blocks without a language are pictures.

After a change of the tools: ``cd tests && python -m sim.test_docs_verify`` writes the outputs anew, those
of commands too, and the table of rules. The table of mutants is ``tests/mutant_table.py``'s.
"""

from __future__ import annotations

import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from unittest import mock

import pytest

from interlace import verify
from interlace.cli.main import parser
from interlace.verify.suite import PROTOCOLS, load_function
from interlace.verify.targets import TARGETS
from protocol_mutants import CASES

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "verify.md"
RECIPE = ROOT / "docs" / "examples" / "one_shot_all_reduce.py"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m interlace ([^`#\n]+)")
RULES_BEGIN, RULES_END = "<!-- rules -->\n", "<!-- end of rules -->"


@dataclass(frozen=True)
class Block:
    """``line`` counts from 1; ``output`` is what the document says it prints, None if nothing."""

    language: str
    text: str
    line: int
    output: str | None

    @property
    def file(self) -> str:
        """What it is saved as."""
        named = re.match(r"# (\w+\.py)\n", self.text) or re.search(
            r"^\+\+\+ (\w+\.py)$", self.text, re.MULTILINE
        )
        return named[1] if named else f"block_at_line_{self.line}.py"

    def save(self, folder: pathlib.Path) -> None:
        text = patched(RECIPE.read_text(), self.text) if self.language == "diff" else self.text
        (folder / self.file).write_text(text)


def blocks(document: str) -> list[Block]:
    """All fenced blocks but outputs."""
    found = list(FENCE.finditer(document))
    result = []
    for match, after in zip(found, [*found[1:], None], strict=True):
        between = "-" if after is None else document[match.end() : after.start()]
        printed = after[2] if after and after[1] == "text" and not between.strip() else None
        line = document.count("\n", 0, match.start()) + 1
        if match[1] != "text":
            result.append(Block(match[1], match[2], line, printed))
    return result


def patched(text: str, diff: str) -> str:
    """``text`` with the one hunk of ``diff`` applied."""
    _, _, hunk = diff.partition("@@\n")
    lines = [line or " " for line in hunk.splitlines()]
    old, new = ("\n".join(each[1:] for each in lines if each[0] in kinds) for kinds in (" -", " +"))
    assert text.count(old) == 1, f"the recipe does not have these lines once:\n{old}"
    return text.replace(old, new)


@contextmanager
def prepared(folder: pathlib.Path, every: list[Block]) -> Iterator[None]:
    """All files are there and can be imported, until the end."""
    (folder / RECIPE.name).write_text(RECIPE.read_text())
    for block in every:
        if block.language in ("python", "diff"):
            block.save(folder)
    names = {file.stem for file in folder.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    # Triton's cache would give lint what was compiled from the same text in another folder.
    environment = {"TRITON_CACHE_DIR": str(folder / "cache")}
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def printed_by(block: Block, folder: pathlib.Path) -> str:
    """What a block of Python prints."""
    with redirect_stdout(io.StringIO()) as output:
        code = compile(block.text, str(folder / block.file), "exec")
        exec(code, {"__name__": "__main__"})
    return output.getvalue()


def steady(text: str) -> str:
    """Without what depends on the machine."""
    text = re.sub(r"\d+ per second", "N per second", text)
    text = re.sub(r"[\d.]+ s(?=:)", "N s", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def rules_table() -> str:
    lines = ["| rule | what it means |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {rule} | {text} |" for rule, text in verify.RULES.items()), ""])


def mutant_rows() -> dict[str, list[str]]:
    """The cells of the checks, by mutant."""
    rows = re.findall(r"^\| ([^|]+) \| [\w/]+\.py \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


ALL = blocks(DOCUMENT.read_text())
PYTHON = [block for block in ALL if block.language == "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    path = tmp_path_factory.mktemp("verify")
    with prepared(path, ALL):
        yield path


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.file)
def test_python_runs_as_written_and_prints_this(block: Block, folder: pathlib.Path) -> None:
    assert steady(printed_by(block, folder)) == steady(block.output or "")


def test_blocks_are_what_is_run() -> None:
    assert {block.language for block in ALL} == {"python", "diff", "bash", ""}
    assert len(PYTHON) > 8


@pytest.mark.parametrize("document", ["docs/verify.md", "README.md"])
def test_commands_parse_and_name_what_is_there(document: str) -> None:
    commands = COMMAND.findall((ROOT / document).read_text())
    assert any(command.startswith("verify ") for command in commands)
    for command in commands:
        options = parser().parse_args(shlex.split(command))
        if options.command == "verify" and "::" in options.target:
            path, _, function = options.target.partition("::")
            assert callable(load_function(f"{ROOT / path}::{function}"))
        elif options.command == "verify":
            assert options.target in ("all", PROTOCOLS, *TARGETS)


def test_names_and_rules_are_those_of_the_module() -> None:
    text = DOCUMENT.read_text()
    for name in set(re.findall(r"\bverify\.(\w+)", text)):
        assert hasattr(verify, name), name
    assert RULES_BEGIN + rules_table() + RULES_END in text


def test_every_mutant_has_a_row_and_a_check() -> None:
    rows = mutant_rows()
    assert list(rows) == [case.mutant.name for case in CASES]
    for name, cells in rows.items():
        assert len(cells) == 4 and set(cells) - {"-", "does not run"}, name
    columns = ("races", "schedules", "late stores", "lint")
    for case in CASES:
        assert rows[case.mutant.name][columns.index(case.check)] != "-", case.mutant.name
    assert f"{len(CASES)} kernels with one fault each" in " ".join(DOCUMENT.read_text().split())


def test_lines_are_short_enough() -> None:
    for block in FENCE.finditer(text := DOCUMENT.read_text()):
        text = text.replace(block[0], "")
    assert not [line for line in text.splitlines() if len(line) > 110 and line[:1] != "|"]


def renewed(document: str, folder: pathlib.Path) -> str:
    """``document`` with the outputs that there are now, and the rules."""
    every = blocks(document)
    with prepared(folder, every):
        for block in every:
            if block.output is None:
                continue
            print(f"line {block.line}", file=sys.stderr)
            if block.language == "bash":
                arguments = [sys.executable, *shlex.split(block.text)[1:]]
                plain = {"COLUMNS": "110", "PYTHONIOENCODING": "ascii"}
                environment = {**os.environ, **plain}
                done = subprocess.run(
                    arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
                )
                lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
                output = "\n".join(lines).strip("\n") + "\n"
            else:
                output = printed_by(block, folder)
            begin = f"```{block.language}\n{block.text}```\n\n```text\n"
            assert document.count(begin) == 1
            document = document.replace(f"{begin}{block.output}```", f"{begin}{output}```")
    before, _, rest = document.partition(RULES_BEGIN)
    return before + RULES_BEGIN + rules_table() + RULES_END + rest.partition(RULES_END)[2]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        DOCUMENT.write_text(renewed(DOCUMENT.read_text(), pathlib.Path(home)))
