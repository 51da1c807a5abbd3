"""``interlace new``: write files to start from. As written, they pass their own tests and ``verify``."""

import importlib.util
import keyword
import pathlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from interlace.arguments.paths import refuse_empty, refuse_unwritable
from interlace.output.consoles import write
from interlace.output.options import CommandOptions, option

FILES = {"{}.py": "new_kernel.txt", "test_{}.py": "new_kernel_test.txt"}


@dataclass(frozen=True)
class NewOptions(CommandOptions):
    """Write a small fused kernel, its launch function, its tests, and a function for verify."""

    what: str = option(positional=True, choices=("kernel",), metavar="kernel", help="what to write")
    name: str = option(positional=True, metavar="NAME", help="name of the kernel and of its file")
    folder: str = option(
        ".",
        metavar="FOLDER",
        help="folder for NAME.py and test_NAME.py; created if it does not exist",
    )


def new(console: Any, options: NewOptions) -> int:
    """Write the files. Raise ValueError if one exists, or if the name cannot be used."""
    refuse_empty("--folder", options.folder)
    name, folder = options.name, pathlib.Path(options.folder)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r}: the name of a kernel is lower-case letters, digits and _, and not a Python "
            "keyword, such as my_kernel"
        )
    if name.startswith("test_") or name.endswith("_test"):
        raise ValueError(
            f"{name}: pytest takes a file of that name for tests; use a name without test"
        )
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ValueError(f"--folder {folder}: cannot be made: {error}") from None
    data = resources.files("interlace") / "data"
    texts = {folder / f.format(name): (data / t).read_text("ascii") for f, t in FILES.items()}
    for path in texts:
        if path.exists():
            raise ValueError(f"{path}: exists already, and new does not overwrite it")
        refuse_unwritable("new kernel", str(path))
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name}: is the name of a module that this file would hide")
    if any(re.search(rf"\b{name}\b", text) for text in texts.values()):
        raise ValueError(f"{name}: the files use this name for something else")
    for path, text in texts.items():
        title = "".join(part.capitalize() for part in name.split("_"))
        path.write_text(text.replace("@NAME@", name).replace("@CLASS@", title), encoding="ascii")
        write(console, f"written: {path}")
    kernel, test = texts
    write(console, f"run it:    python {kernel}")
    write(console, f"test it:   pytest {test}")
    write(console, f"check it:  python -m interlace verify {kernel}::two_rounds")
    return 0
