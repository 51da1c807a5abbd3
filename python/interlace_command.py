"""The command line's arguments, if this process is one: the package asks when it is imported.

Help needs no torch, whose import takes seconds. This is a separate module, because ``import
interlace.x`` imports ``interlace`` first.
"""

import sys

_script: list[str] | None = None


def main() -> int:
    """The console script, ``interlace ...``, and ``python -m interlace``."""
    global _script
    _script = sys.argv[1:]
    from interlace.cli.main import run

    return run(_script)


def arguments() -> list[str] | None:
    """Return the arguments of ``interlace ...`` or ``python -m interlace ...``; None in another program."""
    if sys.argv[:1] != ["-m"]:  # which stands there until the module is found
        return _script
    module, *given = sys.orig_argv[-len(sys.argv) :]
    return given if module in ("interlace", "-minterlace") else None
