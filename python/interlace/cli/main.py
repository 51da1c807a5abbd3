"""The command line: its arguments, and which command they go to."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton

from interlace import __version__
from interlace.cli.bench.command import bench
from interlace.cli.bench.options import BenchOptions
from interlace.cli.commands import build, calibrate, check, doctor, inspect, new, verify
from interlace.cli.demo.workload import DemoOptions
from interlace.cli.output.consoles import new_console, write
from interlace.cli.output.options import (
    CommandOptions,
    CommandParser,
    add_command,
    from_arguments,
)
from interlace.cli.tune.command import tune
from interlace.cli.tune.options import TuneOptions
from interlace.runtime.core.errors import InterlaceError, RankError


def _demo(console: Any, options: DemoOptions) -> int:
    from interlace.cli.demo.command import demo  # needs rich, and the other commands do not

    return demo(console, options)


COMMANDS: dict[str, tuple[type[CommandOptions], Callable[[Any, Any], int]]] = {
    "demo": (DemoOptions, _demo),
    "inspect": (inspect.InspectOptions, inspect.inspect),
    "doctor": (doctor.DoctorOptions, doctor.doctor),
    "check": (check.CheckOptions, check.check),
    "build": (build.BuildOptions, build.build),
    "verify": (verify.VerifyOptions, verify.verify),
    "new": (new.NewOptions, new.new),
    "bench": (BenchOptions, bench),
    "tune": (TuneOptions, tune),
    "calibrate": (calibrate.CalibrateOptions, calibrate.calibrate),
}


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m interlace``."""
    top = argparse.ArgumentParser(
        prog="python -m interlace", description="Collectives that run inside the matmuls they feed."
    )
    top.add_argument("--version", action="version", version=f"interlace {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, (kind, _) in COMMANDS.items():
        add_command(commands, name, kind)
    return top


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. Errors that a user can mend are one line on stderr."""
    given = parser().parse_args(arguments)
    if given.command is None:
        parser().print_help()
        return 0
    kind, command = COMMANDS[given.command]
    options = from_arguments(kind, given)
    try:
        with _terminable():
            wanted = options.interprets()
            if wanted is not None:
                need_interpreter(wanted, arguments)
            return command(new_console(), options)
    except (InterlaceError, OSError, ValueError, TypeError) as error:
        if os.environ.get("INTERLACE_TRACEBACK"):
            raise
        most = None if isinstance(error, RankError) else 21  # a traceback's last lines say most
        first, *rest = str(error).splitlines()[:most] or [""]
        write(new_console(stderr=True), "\n".join([f"error: {first}", *rest]), "red")
        return 2
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 130


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. Ranks in this process let it through, as they do Ctrl-C."""


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that temporary files and processes go."""

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one may not disturb that
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
    """Start this command again if triton was imported, before arguments were read, for the other way."""
    if bool(triton.knobs.runtime.interpret) == wanted:
        return
    environment = dict(os.environ, TRITON_INTERPRET="1" if wanted else "0")
    if os.environ.get("INTERLACE_RESTARTED"):
        raise RuntimeError("TRITON_INTERPRET has no effect on this installation of triton")
    environment["INTERLACE_RESTARTED"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "interlace", *arguments], environment)
