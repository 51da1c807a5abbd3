"""Arguments of the command line, and which command they go to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from interlace import __version__
from interlace.cli.bench import options as bench_options
from interlace.cli.commands import bundle, calibrate
from interlace.cli.output.consoles import new_console
from interlace.cli.tune import options as tune_options


def parser() -> argparse.ArgumentParser:
    """The parser of ``python -m interlace``."""
    top = argparse.ArgumentParser(
        prog="python -m interlace",
        description="Collectives that run inside the matmuls they feed.",
    )
    top.add_argument("--version", action="version", version=f"interlace {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="run the fused ops on real input and draw what happened"
    )
    demo.add_argument("--ranks", type=positive_int, default=None, help="world size (default 4)")
    demo.add_argument("--place", choices=("sim", "shm", "cuda"), default="sim")
    for name, meaning in (
        ("m", "rows of the whole activations (tokens)"),
        ("n", "hidden features of the MLP"),
        ("k", "features of the activations"),
    ):
        demo.add_argument(f"--{name}", type=positive_int, default=None, help=meaning)
    demo.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    demo.add_argument("--seed", type=int, default=0, help="schedule, embedding and weights")
    source = demo.add_mutually_exclusive_group()
    source.add_argument("--text", metavar="FILE", help="text to take the tokens from")
    source.add_argument("--input", metavar="FILE", help="activations and weights, .npy or .pt")
    demo.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    demo.add_argument("--plot", metavar="FILE", help="write the timeline as PNG")

    doctor = commands.add_parser("doctor", help="what this machine offers and which places work")
    doctor.add_argument("--json", action="store_true")

    check = commands.add_parser("check", help="run every kernel against float64 references")
    check.add_argument("--device", choices=("cpu", "cuda"), default=None)
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--json", action="store_true")

    build = commands.add_parser("build", help="compile every kernel offline and show its resources")
    build.add_argument("--arch", type=_arches, default=[80, 90, 100], metavar="80,90,100")
    build.add_argument("--json", action="store_true")
    build.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help="only this one, by the name that is printed; may be repeated",
    )
    build.add_argument("--nvshmem", metavar="FOLDER", help="where libnvshmem_device.bc is")
    bundle.add_options(build)

    verify = commands.add_parser(
        "verify",
        help="look for races, failing schedules and broken rules in kernels, without a GPU",
    )
    verify.add_argument(
        "target",
        nargs="?",
        default="all",
        metavar="all|OP|FILE.py::FUNCTION",
        help="everything, one op of interlace, or a function of one's own that every rank runs",
    )
    verify.add_argument("--ranks", type=_world_sizes, default=None, metavar="2,3,4,8")
    verify.add_argument("--seeds", type=positive_int, default=None, help="schedules for races")
    verify.add_argument(
        "--schedules", type=positive_int, default=None, help="schedules that are run to their end"
    )
    verify.add_argument("--arch", type=_arches, default=None, metavar="80,90,100")
    verify.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="RULE",
        help="a rule of lint that does not apply to the kernels of FILE.py; may be repeated",
    )
    verify.add_argument("--quick", action="store_true", help="less of everything: under a minute")
    verify.add_argument("--json", action="store_true")

    bench_options.add_command(commands)
    tune_options.add_command(commands)
    calibrate.add_command(commands)
    return top


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def _world_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 2,3,4,8, got {text!r}") from None
    for size in sizes:
        if not 1 <= size <= 64:
            raise argparse.ArgumentTypeError(f"must be within 1..64, got {size}")
    return sizes


def _arches(text: str) -> list[int]:
    try:
        arches = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 80,90,100, got {text!r}") from None
    unknown = [arch for arch in arches if arch not in (80, 90, 100)]
    if unknown:
        raise argparse.ArgumentTypeError(f"known are 80, 90 and 100, got {unknown[0]}")
    return arches


def run(arguments: list[str]) -> int:
    """Run one command; its exit code. Errors that a user can mend are one line on stderr."""
    from interlace.runtime.core.errors import InterlaceError

    options = parser().parse_args(arguments)
    console = new_console()
    try:
        with _terminable():
            return int(_dispatch(options, console, arguments))
    except (InterlaceError, OSError, ValueError, TypeError) as error:
        if os.environ.get("INTERLACE_TRACEBACK"):
            raise
        first, *rest = str(error).splitlines() or [""]
        new_console(stderr=True).print(f"[red]error:[/red] {first}", highlight=False)
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
        from interlace.cli.commands.doctor import doctor

        return doctor(console, as_json=options.json)
    if options.command == "build":
        if options.op is not None:
            return bundle.bundle(console, options, as_json=options.json)
        from interlace.cli.commands.build import build

        bundle.refuse_without_op(options)
        return build(
            console,
            options.arch,
            as_json=options.json,
            nvshmem=options.nvshmem,
            kernels=options.kernel,
        )
    if options.command == "verify":
        from interlace.cli.commands.verify import VerifyOptions, verify

        need_interpreter(True, arguments)
        given = {name: getattr(options, name) for name in VerifyOptions.__dataclass_fields__}
        given["ignore"] = tuple(options.ignore)
        given["arch"] = tuple(options.arch) if options.arch else None
        return verify(console, VerifyOptions(**given))
    if options.command == "bench":
        from interlace.cli.bench.command import bench

        chosen = bench_options.options_of(options)
        need_interpreter(bench_options.wants_interpreter(chosen), arguments)
        return bench(console, chosen)
    if options.command == "tune":
        from interlace.cli.tune.command import tune

        asked = tune_options.options_of(options)
        tune_options.check(asked)
        if not asked.dry_run:
            need_interpreter(tune_options.place_of(asked) != "cuda", arguments)
        return tune(console, asked)
    if options.command == "calibrate":
        return calibrate.calibrate(console, calibrate.options_of(options))
    if options.command == "check":
        from interlace.cli.commands.check import check

        device = options.device or _default_device()
        need_interpreter(device == "cpu", arguments)
        return check(console, device, seed=options.seed, as_json=options.json)
    from interlace.cli.demo.command import DemoOptions, demo

    need_interpreter(options.place != "cuda", arguments)
    known = {field.name for field in fields(DemoOptions)}
    given = {k: v for k, v in vars(options).items() if k in known and v is not None}
    return demo(console, DemoOptions(**given))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def need_interpreter(wanted: bool, arguments: list[str]) -> None:
    """Start this command again if kernels were loaded for the other way of running them.

    The choice falls when triton is imported, which was before the arguments were read.
    """
    import triton

    if bool(triton.knobs.runtime.interpret) == wanted:
        return
    environment = dict(os.environ, TRITON_INTERPRET="1" if wanted else "0")
    if os.environ.get("INTERLACE_RESTARTED"):
        raise RuntimeError("TRITON_INTERPRET has no effect on this installation of triton")
    environment["INTERLACE_RESTARTED"] = "1"
    os.execve(sys.executable, [sys.executable, "-m", "interlace", *arguments], environment)
