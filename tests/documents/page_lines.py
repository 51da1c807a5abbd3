"""The lines of a block of commands, and which of them run: pages.py says what the marks are.

Every line runs on its own, one after the other in the page's folder, so a failure names its line.
"""

import importlib.util
import pathlib
import re
import shlex
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEEDS = {
    "gpu": "a CUDA device",
    "gpus": "several CUDA devices",
    "hosts": "several hosts",
    "megatron-core": "the package, which is among the test requirements where it has wheels",
}
KINDS = ("needs", "tests add", "run by", "within")
MARK = re.compile(rf"({'|'.join(KINDS)}): (.*?)(?:; in: (.*))?")
COMMENT = re.compile(r"(.*?)(\s+#.*)?", re.DOTALL)
OWN = re.compile(r"python (-m (interlace|pytest)|benchmarks/\w+\.py) ")


@dataclass(frozen=True)
class Mark:
    """A comment before a block: ``kind``: of KINDS. ``selects``: a text in the lines that it is for."""

    kind: str
    value: str
    selects: str = ""


@dataclass(frozen=True)
class Line:
    """One command line: ``text`` as the page has it, ``adds`` what tests append."""

    text: str
    needs: str = ""
    run_by: str = ""
    adds: str = ""

    @property
    def command(self) -> str:
        """Without the comment behind it."""
        return bare(self.text)

    @property
    def tested(self) -> str:
        """What runs."""
        return f"{self.command} {self.adds}".rstrip()

    @property
    def runs(self) -> bool:
        """Whether it runs where it stands, on this machine."""
        return not self.run_by and met(self.needs)


def mark(comment: str) -> Mark | None:
    """What a comment says of the block behind it; None if it is of another kind."""
    found = MARK.fullmatch(comment)
    return Mark(found[1], found[2].strip(), (found[3] or "").strip()) if found else None


def bare(text: str) -> str:
    """A command line without its comment."""
    found = COMMENT.fullmatch(text)
    assert found is not None
    return found[1].strip()


def met(need: str) -> bool:
    """Whether there is here what is needed."""
    if need in ("gpu", "gpus"):
        import torch

        return torch.cuda.device_count() > (need == "gpus")
    return not need or (
        need == "megatron-core" and importlib.util.find_spec("megatron") is not None
    )


def lines(text: str, marks: list[Mark]) -> list[Line]:
    """The lines of a block of bash with what its marks say of each."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if bare(line):
            of = {m.kind: m.value for m in marks if m.selects in line}
            needs, by = of.get("needs", ""), of.get("run by", "")
            found.append(Line(line, needs, by, of.get("tests add", "")))
    return found


def faults(block_lines: list[Line], marks: list[Mark]) -> list[str]:
    """What is wrong with marks, and with lines that cannot run on their own."""
    found = []
    for each in marks:
        if not any(each.selects in line.text for line in block_lines):
            found.append(f"no line has {each.selects!r}, which a mark is for")
    for line in block_lines:
        if re.match(r"(cd|export|source|\.) |\w+=\S*$", line.command):
            found.append(f"{line.command}: lasts for this line only")
        if line.adds and re.search(r"[|;&<>]", line.command):
            found.append(f"{line.command}: options cannot be added behind this")
    return found


def own_command(text: str) -> list[str] | None:
    """What a line gives to Python, if it is interlace's command line, pytest or a benchmark alone."""
    found = OWN.match(text + " ")
    if found is None or re.search(r"[|;&<>$`*]", text):
        return None
    words = shlex.split(text)
    return words[1:]


def not_there(command: str, place: str) -> str:
    """Why ``place``, a file of the repository, cannot be what runs ``command``; empty if it may be.

    A script has it as a line, a test as a text in quotes. Pages: see ``pages.not_there``.
    """
    path = ROOT / place
    if not path.is_file():
        return f"there is no {place}"
    source = path.read_text()
    if path.suffix == ".py":
        there = f'"{command}"' in source
    else:
        there = command in map(str.strip, source.splitlines())
    return "" if there else f"{place} has no {command!r}"
