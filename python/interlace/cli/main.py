"""The command line: its arguments, and the command that each call runs.

A command is imported when it is called. So are torch and Triton, which take seconds to import: help and
`inspect` run without them.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from interlace.output.consoles import new_console, write
from interlace.output.options import CommandOptions, CommandParser, add_command, from_arguments
from interlace.runtime.compat.releases import INTERLACE_VERSION
from interlace.runtime.core.errors import InterlaceError, RankError
from interlace.runtime.core.laboratory import laboratory

COMMANDS = {
    "demo": "Run the fused ops on real input and draw what happened",
    "inspect": "Show where every rank of a job is, and which ranks the others wait for",
    "doctor": "Show what this machine offers and which places work",
    "check": "Run every kernel against float64 references, the most informative cases first",
    "build": "Compile every kernel for the named architectures, without a GPU, and check the result",
    "verify": "Look for races, failing schedules and broken rules in kernels, without a GPU",
    "new": "Write a small fused kernel, its launch function, its tests, and a function for verify",
    "bench": "Time an op of interlace, or your own kernel, against baselines, and check every result",
    "tune": "Measure which configuration of a fused op is fastest here, and save it",
    "calibrate": "Measure latency and bandwidth of collectives on this machine, along each dimension of "
    "a mesh",
}
"""The help line of each command. Its file in ``cli/commands`` has its options and a function of its
name."""


def _attribute(command: str, name: str) -> Any:
    if command == "verify":
        return getattr(laboratory("command.verify"), name)
    return getattr(importlib.import_module(f"interlace.cli.commands.{command}"), name)


def options_of(command: str) -> type[CommandOptions]:
    kind: type[CommandOptions] = _attribute(command, f"{command.capitalize()}Options")
    return kind


def _command_of(arguments: list[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def needs_torch(arguments: list[str]) -> bool:
    """Return whether these arguments name a command that works with tensors."""
    return _command_of(arguments) in COMMANDS.keys() - {"inspect"}


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m interlace``. ``only``: the command whose arguments it must know."""
    top = argparse.ArgumentParser(
        prog="python -m interlace", description="Collectives that run inside the matmuls they feed."
    )
    top.add_argument("--version", action="version", version=f"interlace {INTERLACE_VERSION}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, line in COMMANDS.items():
        if only in (None, name):
            add_command(commands, name, line, options_of(name))
        else:
            commands.add_parser(name, help=line)
    return top


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Errors that a user can fix are one line on stderr."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's first lines
        signal.signal(signal.SIGINT, signal.default_int_handler)
    called = _command_of(arguments)
    try:
        top = parser(called)
        parsed = top.parse_args(arguments)
        if parsed.command is None:
            top.print_help()
            return 0
        options = from_arguments(options_of(called), parsed)
        with _terminable():
            wanted = options.interprets()
            if wanted is not None:
                need_interpreter(wanted, arguments)
            code: int = _attribute(called, called)(new_console(), options)
            return code
    except (InterlaceError, OSError, ValueError, TypeError) as error:
        if os.environ.get("INTERLACE_TRACEBACK"):
            raise
        # the last lines of a traceback say most
        most = None if isinstance(error, RankError) else 21
        first, *rest = str(error).splitlines()[:most] or [""]
        write(new_console(stderr=True), "\n".join([f"error: {first}", *rest]), "red")
        return 2
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 130


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM arrives. Ranks in this process let it pass, as they do with Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that temporary files and processes are removed."""

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not disturb the cleanup
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def need_interpreter(wanted: bool, arguments: list[str]) -> None:
    """Restart this command if triton was imported, before the arguments were read, for the other mode."""
    import triton

    if bool(triton.knobs.runtime.interpret) == wanted:
        return
    environment = dict(os.environ, TRITON_INTERPRET="1" if wanted else "0")
    if os.environ.get("INTERLACE_RESTARTED"):
        raise RuntimeError("TRITON_INTERPRET has no effect on this installation of triton")
    environment["INTERLACE_RESTARTED"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "interlace", *arguments], environment)
