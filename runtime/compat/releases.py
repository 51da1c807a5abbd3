"""This release, the releases of Python, torch and Triton it was tried with, and warnings about others.

The metadata of the package has no upper bounds; a newer release gets one warning. If it lacks an internal
that interlace needs, the import error names the internal and the releases that have it.
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
"""The release of interlace, equal to the one in pyproject.toml."""

Release = tuple[int, int]

TRIED: dict[str, tuple[Release, Release]] = {
    "Python": ((3, 10), (3, 14)),
    "torch": ((2, 11), (2, 15)),
    "Triton": ((3, 6), (3, 9)),
}
"""The oldest and the newest tried release; see ``make matrix`` and docs/reference/compatibility.md."""

FREE_THREADED = " free-threaded"
"""This follows the version of a free-threaded Python. No place was tried with one."""

SAID = "INTERLACE_UNTRIED"
"""Set once the warning was given, so that child processes do not repeat it."""


@functools.cache
def installed_release(name: str) -> str:
    """Return the release of Python, torch or Triton. Imports only that one: compilers run without torch."""
    if name == "Python":
        free = sysconfig.get_config_var("Py_GIL_DISABLED")
        return platform.python_version() + FREE_THREADED * bool(free)
    return str(importlib.import_module(name.lower()).__version__)


def release(version: str) -> Release:
    """Return its first two numbers: (2, 13) for "2.13.0+cpu"."""
    first, second = [*re.findall(r"\d+", version), 0, 0][:2]
    return int(first), int(second)


def untried_releases() -> str:
    """Return the installed releases outside the tried range, in words; "" if there are none."""
    found = [
        f"{name} {installed_release(name)} (tried: {_words(name)})"
        for name in TRIED
        if not was_tried(name) or installed_release(name).endswith(FREE_THREADED)
    ]
    return ", ".join(found)


def _words(name: str) -> str:
    words = " to ".join(".".join(map(str, each)) for each in TRIED[name])
    return f"{words}, with a GIL" if name == "Python" else words


def warn_of_untried() -> None:
    """Warn once, in the process that imports interlace first, and name all newer releases."""
    first = SAID not in os.environ and os.environ.get("RANK", "0") == "0"
    if first and (found := untried_releases()):
        os.environ[SAID] = "1"
        warnings.warn(
            f"interlace was not tried with {found}. Features that depend on internals may fail; "
            "`interlace doctor` tries each place",
            stacklevel=3,
        )


def was_tried(name: str) -> bool:
    oldest, newest = TRIED[name]
    return oldest <= release(installed_release(name)) <= newest


@contextlib.contextmanager
def requiring(name: str, subject: str) -> Iterator[None]:
    """Wrap imports of internals of ``name``: an ImportError says what is missing and who has it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"interlace needs {subject}, of which {name} {installed_release(name)} lacks a part: {error}; "
            f"{name} {_words(name)} have it"
        ) from error
