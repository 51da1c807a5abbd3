"""Garbage in every message and every file that interlace reads: refused, in little memory, no crash."""

import json
import pickle
import random
import shutil
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from cases.bundles import OPTIONS
from cases.damage import damaged, damaged_json
from faults.crew import folder
from faults.rows import Clock, Plan, Row, Trial
from interlace import aot
from interlace.cli.commands.inspect import InspectOptions, inspect
from interlace.output.consoles import PlainConsole
from interlace.runtime.core.plain import UnreadableError
from interlace.runtime.processes.recorder import PastOp, RankRecord, foot
from interlace.runtime.tuning import calibration, files
from interlace.tools.bundle import BundleTarget, build_bundles
from sim.core import test_plain
from sim.tuning import test_tune
from sim.tuning.test_tune import FOREIGN

MOST_BYTES = 32 << 20
"""That a file of a few KiB may take while it is read."""

Reading = Callable[[Path], Any]


def messages(plan: Plan) -> Iterator[Trial]:
    """Send damaged messages to the decoders of ranks. The control unpickles them."""
    chance, decoders = random.Random(4), dict(test_plain.DECODERS)
    if plan.broken:
        test_plain.DECODERS["pickle"] = pickle.loads
    tracemalloc.start()
    try:
        for number in range(plan.trials):
            valid = test_plain.VALID[-1 - number % len(test_plain.VALID)]
            data = valid if number < len(test_plain.VALID) else damaged(valid, chance)
            try:
                with Clock() as clock:
                    test_plain.tried(data)
                yield Trial(True, [clock.ms])
            except Exception as error:
                yield Trial(False, said=f"{data!r:.200}: {type(error).__name__}: {error}")
    finally:
        tracemalloc.stop()
        test_plain.DECODERS.clear()
        test_plain.DECODERS.update(decoders)


# -- files -----------------------------------------------------------------------------------------


def tuned(file: Path) -> Reading:
    files.add(test_tune.HERE, [test_tune.ROW], file)
    return lambda path: files.rows_for(test_tune.HERE, path)


def calibrated(file: Path) -> Reading:
    test_tune.add_calibration(file)
    return lambda path: calibration.read("cpu", path)


def unguarded(path: Path) -> Any:
    """The control: every existing file counts as correct."""
    return json.loads(path.read_text())["machines"][0]


def of_measurements(make: Callable[[Path], Reading], plan: Plan) -> Iterator[Trial]:
    """Damage files of ``tune`` and ``calibrate``: an unusable file is left alone, with a warning."""
    chance = random.Random(5)
    with folder() as name:
        file = Path(name, "file.json")
        read, whole = make(file), file.read_bytes()
        foreign = [text.encode(errors="surrogateescape") for text in FOREIGN.values()]
        for number in range(plan.trials):
            known = number < len(foreign)
            file.write_bytes(foreign[number] if known else damaged_json(whole, chance))
            yield tried(unguarded if plan.broken else read, file, ())


def of_bundles(plan: Plan) -> Iterator[Trial]:
    """Damage bundles: each of them must raise BundleError. The control expects no error."""
    chance = random.Random(6)
    with folder() as name:
        built, path = Path(name, "built"), Path(name, "bundle")
        reports = build_bundles([BundleTarget("all_gather", OPTIONS["all_gather"], [90], built)])
        assert not any(report.problems() for report in reports)
        files = [file.name for file in built.iterdir() if file.suffix in (".json", ".cubin")]
        for number in range(plan.trials):
            shutil.copytree(built, path)
            file = path / ("manifest.json" if number % 4 else chance.choice(files))
            change = damaged_json if file.suffix == ".json" else damaged
            file.write_bytes(change(file.read_bytes(), chance))
            yield tried(partial(aot.load, arch=90), path, () if plan.broken else (ValueError,))
            shutil.rmtree(path)


def of_records(plan: Plan) -> Iterator[Trial]:
    """Damage files of ``interlace inspect``, and show their contents. The control expects no error."""
    chance = random.Random(7)
    about = "a group", 0, (4, 5), (11, 12), ()
    terms = ("shape", (4,)), ("dtype", "torch.float32"), ("reduce op", "sum")
    ops = [PastOp(n, "all_reduce", terms, ("f", "file.py", n), n, 2 * n) for n in range(1, 9)]
    sent = PastOp(9, "send", None, None, 9, 0, 1, 7)
    record = RankRecord(*about, 1, 0.0, "", ops, [sent], 10, 20)
    with folder() as name:
        file = Path(name, "file")
        whole = b"the pickle for torch, which nobody reads" + foot([record])
        for number in range(plan.trials):
            file.write_bytes(damaged(whole, chance) if number else whole)
            yield tried(inspected, file, () if plan.broken else (UnreadableError,))


def inspected(path: Path) -> Any:
    with redirect_stdout(StringIO()) as printed:
        inspect(PlainConsole(), InspectOptions((str(path),)))
    assert printed.getvalue().replace("\n", "").isprintable(), "what could steer a terminal"


def tried(read: Reading, path: Path, allowed: tuple[type[Exception], ...]) -> Trial:
    """Return whether a read raises no exception except ``allowed``, and takes little memory."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), Clock() as clock:
            warnings.simplefilter("ignore")
            read(path)
    except allowed:
        pass
    except BaseException as error:
        return Trial(False, said=f"{type(error).__name__}: {error}")
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return Trial(most < MOST_BYTES, [clock.ms], f"it took {most} bytes")


def rows() -> list[Row]:
    return [
        Row("garbage in a message", "-", messages, 10_000, 500),
        Row("garbage in a file of tune", "-", partial(of_measurements, tuned), 2_000, 50),
        Row("garbage in a calibration", "-", partial(of_measurements, calibrated), 2_000, 50),
        Row("garbage in a bundle", "-", of_bundles, 1_000, 50),
        Row("garbage in a record", "-", of_records, 2_000, 50),
    ]
