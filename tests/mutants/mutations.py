"""Faults on demand: kernels with their source rewritten, in place of the real ones.

A mutant is a list of replacements in one file. A mutant of ``kernels/`` is a package with all files of that
folder, so that kernels call the mutated device functions. The kernels that the algorithms launch are
replaced during a ``with`` block. Lint compiles the same files. A mutant of another file, one with a
function that runs the kernel, is a single module.
"""

import importlib
import importlib.util
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
FILES = sorted(file.relative_to(KERNELS) for file in KERNELS.rglob("*.py"))
EXTERNS = pathlib.Path("node_puts.py")
ORIGINAL = """
import sys
from interlace.kernels import node_puts as nvshmem
sys.modules[__name__] = nvshmem
"""


@dataclass(frozen=True)
class Edit:
    """A replacement of the text ``old``, which must exist, by ``new``."""

    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """``edits`` of ``file``, a path in the repository."""

    name: str
    file: str
    edits: tuple[Edit, ...]

    @property
    def package(self) -> str:
        """A module's name; other edits have another name."""
        what = zlib.crc32(repr((self.file, self.edits)).encode())
        return "mutant_" + "".join(c if c.isalnum() else "_" for c in self.name) + f"_{what:08x}"

    @property
    def of_kernels(self) -> bool:
        return self.file.startswith("kernels/")

    def source(self) -> str:
        text = (ROOT / self.file).read_text()
        for edit in self.edits:
            assert edit.old in text, f"{self.name}: {self.file} has no {edit.old!r}"
            text = text.replace(edit.old, edit.new)
        return text

    def write(self, folder: pathlib.Path) -> None:
        """Write the mutated source into a package or a file in ``folder``."""
        assert (ROOT / self.file).is_file(), self.file
        if not self.of_kernels:
            (folder / f"{self.package}.py").write_text(self.source())
            return
        for file in FILES:
            mutated = self.file == f"kernels/{file}"
            text = self.source() if mutated else (KERNELS / file).read_text()
            copy = folder / self.package / file
            text = text.replace("interlace.kernels", self.package)
            if file == EXTERNS and not mutated:
                text = ORIGINAL  # kernels that name copies of externs would be compiled
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


@dataclass(frozen=True)
class Case:
    """A mutant, and the ``check`` that must catch it in every test run.

    ``target`` names what is run, as "op algorithm" of ``interlace.tools.targets`` or a function of
    the mutated file; lint compiles ``kernel`` of the catalogue.
    """

    mutant: Mutant
    check: str  # "races", "schedules", "late stores" or "lint"
    target: str
    kernel: str = ""


def mutant_of(file: str, name: str, *edits: tuple[str, str]) -> Mutant:
    """``edits`` are pairs of old and new text."""
    return Mutant(name, file, tuple(Edit(*edit) for edit in edits))


@contextmanager
def importable(folder: pathlib.Path) -> Iterator[None]:
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield


@contextmanager
def mutated(mutant: Mutant, folder: pathlib.Path) -> Iterator[None]:
    """Take every kernel of interlace from the mutated files."""
    mutant.write(folder)
    with ExitStack() as stack:
        stack.enter_context(importable(folder))
        for file in FILES:
            module = ".".join(file.with_suffix("").parts).removesuffix("__init__").rstrip(".")
            if not module:
                continue
            changed = importlib.import_module(f"{mutant.package}.{module}")
            original = importlib.import_module(f"interlace.kernels.{module}")
            for name in [name for name in vars(changed) if name.endswith("_kernel")]:
                stack.enter_context(mock.patch.object(original, name, getattr(changed, name)))
        yield


def mutated_function(mutant: Mutant, function: str, folder: pathlib.Path) -> Callable[[], Any]:
    """Return ``function`` of a mutant of one file."""
    mutant.write(folder)
    with importable(folder):
        importlib.invalidate_caches()
        found: Callable[[], Any] = getattr(importlib.import_module(mutant.package), function)
    return found
