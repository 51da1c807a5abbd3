"""The pages that people read, as programs: every fenced block of README.md, CONTRIBUTING.md and docs/.

A page runs from top to bottom in a new folder with links to the repository's folders, so that commands find
the files below them. The language of a block decides:

* ``python`` is a new file. Its name is in the paragraph before it (``Save ... as `mlp.py` ``) or in its
  first line (``# mlp.py``), and it runs as ``python mlp.py`` would: here, or where a later command of the
  page names it.
* ``diff`` makes another file out of an existing one, or out of one that the page says to have "a copy of".
* ``bash`` is run line by line; of ``console`` the lines after ``$``, each followed by its output.
  ``python -m interlace``, pytest and benchmarks run in a fork of a process that has imported torch,
  other lines in bash.
* ``text`` directly after one of these is its output, and is compared, except for numbers before "per
  second" and "s" and the numbers of lines in ``signal.py``.
* ``json`` is read. Blocks without a language are pictures. For commands in the text the form is checked.

A comment in the source, on a line before a block, changes this::

    <!-- needs: gpu -->           run only if the machine has this word of NEEDS; its form is checked
    <!-- tests add: --quick -->   every line is run with these words behind it
    <!-- run by: FILE -->         not run here: FILE does, a page, a test or a script; that is checked
    <!-- within: FILE.py -->      a fragment, which FILE.py runs with the names that the fragment needs
    <!-- continues -->            goes on in the file of the Python block before it
    <!-- varies -->               before a ``text`` block: an example of the output, not compared

The first three are for all lines of a block, or, with ``; in: TEXT`` at their end, for lines with TEXT. If
there are several marks of one kind, the last one counts.

``python tests/pages.py docs/tutorials/first-race.md`` writes today's output into a page.
"""

import itertools
import json
import multiprocessing
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from markdown_it import MarkdownIt

from documents import page_child, page_lines
from documents.page_lines import NEEDS, ROOT, Line, Mark

LINKED = ("examples", "benchmarks", "tests", "kernels", "runtime", "python")
COPIED = "docs"  # which a command of a page writes to
SHELLS = ("bash", "console")
INLINE = re.compile(
    r"([A-Z]+=\S+ )?(make \w|torchrun |pytest |python [\w/]+\.py|python -m (pytest|interlace \w+) )"
)
PLACEHOLDER = re.compile(r"\.\.\.|\bfile\.py\b|\b[A-Z]{3,}\b(?!=)")


@dataclass
class Block:
    """One fenced block. ``line`` counts from 1, ``output`` is None where the page shows none."""

    language: str
    text: str
    line: int
    file: str = ""
    marks: list[Mark] = field(default_factory=list)
    output: str | None = None
    varies: bool = False

    def said(self, kind: str) -> str:
        """Return the text of the mark of that kind, which belongs to the whole block."""
        return next((m.value for m in self.marks if m.kind == kind and not m.selects), "")

    @property
    def lines(self) -> list[Line]:
        """Return the lines of a block of bash; any other block is one line."""
        if self.language == "bash":
            return page_lines.lines(self.text, self.marks)
        return [Line(self.text, self.said("needs"), self.said("run by"))]


def pages() -> list[pathlib.Path]:
    every = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in every if page.exists())


def blocks(document: str) -> list[Block]:
    """Return the blocks of a page in order, with their outputs and continuations."""
    found: list[Block] = []
    marks: list[str] = []
    before, directly = "", False  # the last paragraph; whether only comments came since a block
    for token in MarkdownIt("commonmark").parse(document):
        if token.type == "html_block":
            marks += re.findall(r"<!--\s*(.*?)\s*-->", token.content)
        elif token.type == "inline":
            before, directly = " ".join(token.content.split()), False
            marks = []
        elif token.type == "fence":
            assert token.map is not None
            block = Block(token.info.strip(), token.content, token.map[0] + 1)
            block.marks = [one for comment in marks if (one := page_lines.mark(comment))]
            if block.language == "text" and directly and found:
                found[-1].output = (found[-1].output or "") + block.text
                found[-1].varies |= "varies" in marks
            elif "continues" in marks and found:
                assert found[-1].language == block.language == "python", f"line {block.line}"
                found[-1].text += "\n\n" + block.text
            else:
                block.file = _file_of(block, before)
                found.append(block)
            before, marks, directly = "", [], block.language != "text"
    return found


def _file_of(block: Block, paragraph: str) -> str:
    if block.language == "diff":
        named = re.search(r"^\+\+\+ (\w+\.py)$", block.text, re.MULTILINE)
    elif block.language == "python":
        named = re.match(r"# (\w+\.py)\n", block.text)
        named = named or re.search(r"\b[Ss]ave\b.*?\bas `(\w+\.py)`", paragraph)
    else:
        return ""
    return named[1] if named else f"block_at_line_{block.line}.py"


def inline_commands(document: str) -> list[Block]:
    """Commands in the text, such as `make test`, as blocks of bash, but for those with a placeholder."""
    found = []
    for token in MarkdownIt("commonmark").parse(document):
        for child in token.children or ():
            code = " ".join(child.content.split()) if child.type == "code_inline" else ""
            if INLINE.match(code) and not PLACEHOLDER.search(code):
                found.append(Block("bash", code, (token.map or [0])[0] + 1))
    return found


def commands(block: Block) -> list[list[str]]:
    """The commands of a bash or console block, in words, without assignments before them."""
    text = block.text
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        for separates, words in itertools.groupby(lexer, ("&&", "||", "|", ";").__contains__):
            command = list(words)
            while command and re.match(r"[A-Z_]+=", command[0]):
                command.pop(0)
            if command and not separates:
                found.append(command)
    return found


def faults(block: Block, here: pathlib.Path) -> list[str]:
    """Return faults in the form of a block without a run; ``here`` has the page's files."""
    needs = [m.value for m in block.marks if m.kind == "needs"]
    found = [f"unknown need {need!r}" for need in needs if need not in NEEDS]
    if block.language != "bash" and any(m.selects or m.kind == "tests add" for m in block.marks):
        found.append("such a mark is for lines of bash")
    if block.language == "python":
        try:
            compile(block.text, block.file, "exec")
        except SyntaxError as error:
            found.append(str(error))
    elif block.language == "json":
        try:
            json.loads(block.text)
        except ValueError as error:
            found.append(str(error))
    elif block.language in ("bash", "console"):
        every = commands(block)
        found += [] if every else ["no command"]
        if block.language == "bash":
            found += page_lines.faults(block.lines, block.marks)
            tested = "\n".join(line.tested for line in block.lines if line.adds)
            every += commands(Block("bash", tested, block.line))
        found += [fault for words in every if (fault := _command_fault(words, here))]
    elif block.language not in ("diff", "text", ""):
        found.append(f"language {block.language!r}")
    return found


def _command_fault(words: list[str], here: pathlib.Path) -> str:
    """Return the reason why a command is wrong: no such program, script, target, module or option."""
    program, *rest = words
    said = " ".join(words)
    if program == "torchrun":
        while rest and rest[0].startswith("--"):
            rest = rest[1 if "=" in rest[0] or rest[0] == "--standalone" else 2 :]
        program = "python"
    if program == "python" and rest[:1] == ["-m"]:
        program, rest = ("interlace", rest[2:]) if rest[1] == "interlace" else (rest[1], rest[2:])
    if program == "interlace":
        from interlace.cli.main import parser

        try:
            options = parser().parse_args(rest)
        except SystemExit:
            return f"{said}: these options do not parse"
        path, colons, _ = str(getattr(options, "target", "")).partition("::")
        return f"{said}: there is no {path}" if colons and not (here / path).exists() else ""
    if program == "make":
        targets = [word for word in rest if "=" not in word]
        rules = (ROOT / "Makefile").read_text()
        bad = [one for one in targets if not re.search(rf"^{one}:", rules, re.MULTILINE)]
        return f"{said}: the Makefile has no {bad}" if bad else ""
    if program in ("python", "pytest", "ruff"):
        path = [word for word in rest if "/" in word or word.endswith(".py")][:1]
        if path and not (here / path[0].partition("::")[0]).exists():
            return f"{said}: there is no {path[0]}"
        options_named = [word.partition("=")[0] for word in rest if word.startswith("--")]
        if program == "python" and path and options_named:
            source = (here / path[0]).read_text()
            bad = [one for one in options_named if f'"{one}"' not in source]
            return f"{said}: the script has no {bad}" if bad else ""
        return ""
    launchers = ("srun", "sbatch", "mpirun", "mpiexec")
    known = program in ("mypy", "pip", "cd", "mkdocs", *launchers) or shutil.which(program)
    return "" if known else f"{said}: what is {program}?"


def prepared(folder: pathlib.Path, document: str) -> None:
    """Fill a page's folder with the files that it assumes."""
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / COPIED, folder / COPIED)
    for name in re.findall(r"\bcopy of\s+`([\w/]+\.py)`", document):
        shutil.copy(ROOT / name, folder)
    programs = folder / ".bin"
    programs.mkdir()
    for name, module in (
        ("python", ""),
        ("torchrun", "-m torch.distributed.run"),
        ("interlace", "-m interlace"),
    ):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)


def patched(text: str, diff: str) -> str:
    """``text`` with the one hunk of ``diff`` applied."""
    _, _, hunk = diff.partition("@@\n")
    lines = [line or " " for line in hunk.splitlines()]
    old, new = ("\n".join(each[1:] for each in lines if each[0] in kinds) for kinds in (" -", " +"))
    assert text.count(old) == 1, f"the file does not have these lines once:\n{old}"
    return text.replace(old, new)


def save(block: Block, folder: pathlib.Path) -> None:
    """Write the file that a block is, if it is one."""
    if block.language == "python":
        (folder / block.file).write_text(block.text)
    elif block.language == "diff":
        (old,) = re.findall(r"^--- (\w+\.py)$", block.text, re.MULTILINE)
        (folder / block.file).write_text(patched((folder / old).read_text(), block.text))


def run_python(arguments: list[str], folder: pathlib.Path) -> str:
    """Return the output of ``python *arguments`` in a fork that has torch; AssertionError if it fails."""
    output, errors = folder / ".output", folder / ".errors"
    file = " ".join(arguments)
    process = multiprocessing.get_context("forkserver").Process(
        target=page_child.run_python,
        args=(str(folder), arguments, environment(folder), str(output), str(errors)),
    )
    process.start()
    try:
        process.join()
    finally:  # it takes too long: see guard.py
        process.kill()
    printed = output.read_text() if output.exists() else ""
    failure = errors.read_text()[-3000:] if errors.exists() else ""
    assert process.exitcode == 0, f"{file}: exit status {process.exitcode}\n{printed}\n{failure}"
    return printed


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Return additional variables for a page's commands."""
    return {
        "PATH": f"{folder / '.bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONIOENCODING": "ascii:replace",
        "COLUMNS": "110",
        "OMP_NUM_THREADS": "1",
        "INTERLACE_TUNE_CACHE": "off",
        "INTERLACE_CALIBRATION": "off",
    }


def run_line(line: Line, folder: pathlib.Path) -> str:
    """Return the output of a line of bash."""
    own = page_lines.own_command(line.tested)
    return run_bash(line.tested, folder) if own is None else run_python(own, folder)


def run_bash(text: str, folder: pathlib.Path) -> str:
    """Return the standard output of bash; AssertionError if a command fails."""
    variables = {**os.environ, **environment(folder)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )
    printed = f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"exit status {done.returncode} of\n{text}\n{printed}"
    return done.stdout


def run_console(text: str, folder: pathlib.Path) -> str:
    """Run the commands of a console block, and return the block with their output."""
    lines = []
    for line in text.splitlines():
        if line.startswith("$ "):
            lines += [line, *run_bash(line[2:], folder).splitlines()]
    return "\n".join(lines) + "\n"


def steady(text: str) -> str:
    """Remove parts that depend on the machine, and lines of device code that no page shows."""
    text = re.sub(r"\d+ per second", "N per second", text)
    text = re.sub(r"\bsignal\.py:\d+", "signal.py:N", text)
    text = re.sub(r"[\d.]+ s(?=:)", "N s", text)
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def worked_through(document: str, folder: pathlib.Path) -> Iterator[tuple[Block, str | None]]:
    """Return every block with its output in the page's order; None for a block that was not run."""
    prepared(folder, document)
    every = blocks(document)
    for number, block in enumerate(every):
        save(block, folder)
        shells = [later for later in every[number + 1 :] if later.language in SHELLS]
        there = [line for line in block.lines if line.runs]
        if not there or block.language in ("diff", "text", "json", ""):
            yield block, None
        elif block.language == "python":
            named = any(block.file in words for later in shells for words in commands(later))
            script = [within] if (within := block.said("within")) else []
            if named:
                yield block, None
            elif block.said("needs") in ("gpu", "gpus"):  # a fork may not begin with CUDA
                yield block, run_bash(f"python {block.file}", folder)
            else:
                yield block, run_python([*script, block.file], folder)
        elif block.language == "console":
            yield block, run_console(block.text, folder)
        else:
            yield block, "".join(run_line(line, folder) for line in there)


def not_there(line: Line, page: str) -> str:
    """Return why the target of ``line`` cannot run a block of ``page``; "" if it can.

    A page must have the same command and run it. A test that runs a block of Python names its page.
    """
    if line.run_by.endswith(".md") and (ROOT / line.run_by).is_file():
        theirs = [one for block in blocks((ROOT / line.run_by).read_text()) for one in block.lines]
        same = [one for one in theirs if one.command == line.command]
        there = any(not one.run_by and one.needs == line.needs for one in same)
        return "" if there else f"{line.run_by} does not run {line.command!r}"
    return page_lines.not_there(page if "\n" in line.command else line.command, line.run_by)


def renewed(document: str, folder: pathlib.Path) -> str:
    """Return ``document`` with today's outputs."""
    for block, printed in worked_through(document, folder):
        old = block.text if block.language == "console" else block.output
        if printed is not None and old and not block.varies:
            print(f"line {block.line}", file=sys.stderr)
            new = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n"
            if steady(old) != steady(new):
                assert document.count(old) == 1, f"the output at line {block.line} is there twice"
                document = document.replace(old, new)
    return document


if __name__ == "__main__":
    import tempfile

    for name in sys.argv[1:]:
        page = pathlib.Path(name)
        with tempfile.TemporaryDirectory() as home:
            page.write_text(renewed(page.read_text(), pathlib.Path(home)))
