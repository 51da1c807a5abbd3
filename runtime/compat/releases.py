"""This release, those of Python, torch and Triton that it was tried with, and what it says of others.

The metadata of the package has no upper bounds. A newer release is tried, with one warning that names it;
if it lacks an internal that is needed, the import of that says so, and which releases have it.
"""

import contextlib
import functools
import importlib
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator

INTERLACE_VERSION = "0.1.0"
"""Of interlace, as pyproject.toml says it."""

Release = tuple[int, int]

TRIED: dict[str, tuple[Release, Release]] = {
    "Python": ((3, 10), (3, 14)),
    "torch": ((2, 11), (2, 15)),
    "Triton": ((3, 6), (3, 9)),
}
"""The oldest and the newest, which ``make matrix`` and docs/reference/compatibility.md are about."""

FREE_THREADED = " free-threaded"
"""After the version of a Python that can do without its lock, with which no place was tried."""

SAID = "INTERLACE_UNTRIED"
"""Set once the warning was given, which child processes need not give again."""


@functools.cache
def installed(name: str) -> str:
    """The release of Python, torch or Triton. Imports that one only: who compiles does without torch."""
    if name == "Python":
        free = sysconfig.get_config_var("Py_GIL_DISABLED")
        return platform.python_version() + FREE_THREADED * bool(free)
    return str(importlib.import_module(name.lower()).__version__)


def release(version: str) -> Release:
    """Its first two numbers: (2, 13) of "2.13.0+cpu"."""
    first, second = [*re.findall(r"\d+", version), 0, 0][:2]
    return int(first), int(second)


def untried() -> str:
    """What is installed and was not tried, nor what is older and newer, in words; "" if nothing is."""
    found = [
        f"{name} {installed(name)} (tried: {_words(name)})"
        for name in TRIED
        if not was_tried(name) or installed(name).endswith(FREE_THREADED)
    ]
    return ", ".join(found)


def _words(name: str) -> str:
    words = " to ".join(".".join(map(str, each)) for each in TRIED[name])
    return f"{words}, with a GIL" if name == "Python" else words


def warn_of_untried() -> None:
    """One warning, from the process that imports interlace first, which names all that is newer."""
    first = SAID not in os.environ and os.environ.get("RANK", "0") == "0"
    if first and (found := untried()):
        os.environ[SAID] = "1"
        warnings.warn(
            f"interlace was not tried with {found}. What hangs on internals may fail there; "
            "`interlace doctor` tries each place",
            stacklevel=3,
        )


def was_tried(name: str) -> bool:
    oldest, newest = TRIED[name]
    return oldest <= release(installed(name)) <= newest


@contextlib.contextmanager
def needed(name: str, what: str) -> Iterator[None]:
    """Around imports of internals of ``name``: what is missing is an ImportError that says who has it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"interlace needs {what}, of which {name} {installed(name)} lacks a part: {error}; "
            f"{name} {_words(name)} have it"
        ) from error
