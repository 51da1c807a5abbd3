"""Kernels that are built, and their PTX."""

import pathlib
from collections.abc import Iterable

from interlace.tools.catalogue.build import BuildReport, build
from interlace.tools.catalogue.catalogue import Entry


def compiled(entries: Iterable[Entry], folder: pathlib.Path) -> tuple[list[BuildReport], list[str]]:
    wanted = list(entries)
    stems = [str(folder / str(number)) for number in range(len(wanted))]
    reports = build(wanted, artifacts=stems)
    files = [pathlib.Path(f"{stem}.ptx") for stem in stems]
    return reports, [file.read_text() if file.exists() else "" for file in files]
