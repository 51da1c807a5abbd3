"""The command line: its arguments, and which command they go to."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton

from interlace import __version__
from interlace.cli.bench import command as bench_command
from interlace.cli.bench import options as bench_options
from interlace.cli.bench.options import BenchOptions
from interlace.cli.commands import build, calibrate, check, doctor
from interlace.cli.commands.calibrate import CalibrateOptions
from interlace.cli.commands.verify import VerifyOptions, verify
from interlace.cli.demo.workload import DemoOptions
from interlace.cli.output.consoles import new_console
from interlace.cli.output.options import add_command, arches, from_arguments, positive_int
from interlace.cli.tune import command as tune_command
from interlace.cli.tune import options as tune_options
from interlace.cli.tune.options import TuneOptions
from interlace.runtime.core.errors import InterlaceError


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m interlace``."""
    top = argparse.ArgumentParser(
        prog="python -m interlace",
        description="Collectives that run inside the matmuls they feed.",
    )
    top.add_argument("--version", action="version", version=f"interlace {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    text = "run the fused ops on real input and draw what happened"
    add_command(commands, "demo", DemoOptions, help=text)

    command = commands.add_parser("doctor", help="what this machine offers and which places work")
    command.add_argument("--json", action="store_true")

    command = commands.add_parser("check", help="run every kernel against float64 references")
    command.add_argument("--device", choices=("cpu", "cuda"), default=None)
    command.add_argument("--seed", type=int, default=0)
    text = "only on so many ranks; may be repeated"
    command.add_argument("--ranks", type=positive_int, action="append", metavar="N", help=text)
    text = "begin no case after so many seconds; what is left out is counted"
    command.add_argument("--seconds", type=positive_int, default=None, metavar="S", help=text)
    command.add_argument("--json", action="store_true")

    command = commands.add_parser(
        "build", help="compile every kernel offline and show its resources"
    )
    command.add_argument("--arch", type=arches, default=[80, 90, 100], metavar="80,90,100")
    command.add_argument("--json", action="store_true")
    command.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this one, by the name that is printed; may be repeated",
    )
    command.add_argument("--nvshmem", metavar="FOLDER", help="where libnvshmem_device.bc is")
    build.add_bundle_options(command)

    text = "look for races, failing schedules and broken rules in kernels, without a GPU"
    add_command(commands, "verify", VerifyOptions, help=text)
    add_command(
        commands,
        "bench",
        BenchOptions,
        help="time an op or a kernel of one's own, and check it, against baselines",
        description=bench_options.DESCRIPTION,
        epilog=bench_options.UNITS,
    )
    add_command(
        commands,
        "tune",
        TuneOptions,
        help="measure which configuration of a fused op is fastest here, and remember it",
        description=tune_options.DESCRIPTION,
        epilog=tune_options.MEANING,
    )
    add_command(
        commands,
        "calibrate",
        CalibrateOptions,
        help="measure latency and bandwidth between ranks, for the cost model",
        description=calibrate.DESCRIPTION,
    )
    return top


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. Errors that a user can mend are one line on stderr."""
    options = parser().parse_args(arguments)
    console = new_console()
    try:
        with _terminable():
            return int(_dispatch(options, console, arguments))
    except (InterlaceError, OSError, ValueError, TypeError) as error:
        if os.environ.get("INTERLACE_TRACEBACK"):
            raise
        first, *rest = str(error).splitlines() or [""]
        new_console(stderr=True).print(f"[red]error:[/red] {first}")
        for line in rest[:20]:
            print(line, file=sys.stderr)
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


def _dispatch(options: argparse.Namespace, console: Any, arguments: list[str]) -> int:
    if options.command == "doctor":
        return doctor.doctor(console, as_json=options.json)
    if options.command == "build":
        if options.op is not None:
            return build.bundle(console, options, as_json=options.json)
        build.refuse_without_op(options)
        return build.build(
            console,
            options.arch,
            as_json=options.json,
            nvshmem=options.nvshmem,
            kernels=options.kernel,
        )
    if options.command == "verify":
        need_interpreter(True, arguments)
        return verify(console, from_arguments(VerifyOptions, options))
    if options.command == "bench":
        bench = from_arguments(BenchOptions, options)
        need_interpreter(bench_options.wants_interpreter(bench), arguments)
        return bench_command.bench(console, bench)
    if options.command == "tune":
        tune = from_arguments(TuneOptions, options)
        tune_options.check(tune)
        if not tune.dry_run:
            need_interpreter(tune_options.place_of(tune) != "cuda", arguments)
        return tune_command.tune(console, tune)
    if options.command == "calibrate":
        return calibrate.calibrate(console, from_arguments(CalibrateOptions, options))
    if options.command == "check":
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        need_interpreter(device == "cpu", arguments)
        return check.check(
            console,
            device,
            ranks=options.ranks or (),
            seconds=options.seconds,
            seed=options.seed,
            as_json=options.json,
        )
    from interlace.cli.demo.command import demo  # needs rich, and the other commands do not

    need_interpreter(options.place != "cuda", arguments)
    return demo(console, from_arguments(DemoOptions, options))


def need_interpreter(wanted: bool, arguments: list[str]) -> None:
    """Start this command again if kernels were loaded for the other way of running them.

    The choice falls when triton is imported, which was before the arguments were read.
    """
    if bool(triton.knobs.runtime.interpret) == wanted:
        return
    environment = dict(os.environ, TRITON_INTERPRET="1" if wanted else "0")
    if os.environ.get("INTERLACE_RESTARTED"):
        raise RuntimeError("TRITON_INTERPRET has no effect on this installation of triton")
    environment["INTERLACE_RESTARTED"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "interlace", *arguments], environment)
