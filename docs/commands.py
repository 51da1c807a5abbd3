"""A page per command of ``python -m interlace``, made from its parser whenever the site is built.

A hook of mkdocs. Which other pages show a command in use is looked up in them.
"""

import argparse
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
FOLDER = "reference/commands"
EXIT_CODES = {
    0: "all is well",
    1: "it ran, and something is wrong: a result, a kernel, a place",
    2: "an argument or a file is wrong, or an op failed: stderr says why, with a traceback "
    "if `INTERLACE_TRACEBACK` is set",
    3: "of `check`: all that began has passed, and there was no time for the rest",
    130: "Ctrl-C",
    143: "SIGTERM",
}


def commands() -> dict[str, argparse.ArgumentParser]:
    from interlace.cli.main import parser

    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def page(name: str, parser: argparse.ArgumentParser) -> str:
    """The page of one command, in Markdown."""
    formatter = parser._get_formatter()
    parts = [f"# interlace {name}", _escaped(parser.description)]
    parts.append(f"```text\n{parser.format_usage().strip()}\n```")
    for action in parser._actions[1:]:  # all but --help
        value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
        shown = [f"{option} {value}".strip() for option in action.option_strings] or [value]
        text = f"\n:   {_escaped(formatter._expand_help(action))}" if action.help else ""
        parts.append(f"`{', '.join(shown)}`{text}")
    parts += [f"```text\n{parser.epilog}\n```"] if parser.epilog else []
    used = [f"[{title}](../../{file})" for file, title in _pages_with(name)]
    parts += [f"In use: {', '.join(used)}."] if used else []
    return "\n\n".join(parts) + "\n"


def _escaped(text: str | None) -> str:
    return re.sub(r"([*<\[\]])", r"\\\1", text or "")


def _pages_with(name: str) -> list[tuple[str, str]]:
    """(file, title) of the pages that run the command."""
    found = []
    for file in sorted(DOCS.rglob("*.md")):
        text = file.read_text()
        if re.search(rf"^(?:\$ )?(?:\w+=\S+ )*python -m interlace {name}\b", text, re.MULTILINE):
            found.append(
                (file.relative_to(DOCS).as_posix(), text.partition("# ")[2].partition("\n")[0])
            )
    return found


def overview(every: dict[str, argparse.ArgumentParser]) -> str:
    """The page of all commands."""
    said = {name: _escaped(each.description).partition("\n")[0] for name, each in every.items()}
    return "\n".join(
        [
            "# The command line",
            "",
            "`python -m interlace COMMAND`, or `interlace COMMAND` where the package is installed.",
            "`COMMAND --help` prints the text of the command's page.",
            "",
            "| command | |",
            "|---|---|",
            *(f"| [`{name}`]({name}.md) | {text} |" for name, text in said.items()),
            "",
            "| exit status | |",
            "|---|---|",
            *(f"| {code} | {text} |" for code, text in EXIT_CODES.items()),
            "",
        ]
    )


def on_config(config: Any) -> Any:
    """Put the pages at the end of the section "Reference" of the navigation."""
    section = next(each["Reference"] for each in config.nav if "Reference" in each)
    pages = [f"{FOLDER}/index.md", *({name: f"{FOLDER}/{name}.md"} for name in commands())]
    section.append({"Commands": pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages themselves, which are no files."""
    from mkdocs.structure.files import File

    every = commands()
    texts = {"index": overview(every)} | {name: page(name, each) for name, each in every.items()}
    for name, text in texts.items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))
    return files


on_files.mkdocs_priority = 50  # before that of the plugin of redirects, which looks for the pages
