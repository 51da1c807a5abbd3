"""The file that ``interlace tune`` writes and the fused ops read: measured rows, by machine.

``INTERLACE_TUNE_CACHE`` names the file, or is "off"; else it is ``interlace/tune.json`` in the user's cache
folder. JSON::

    {"format": "interlace tuning", "version": 1, "machines": [
        {"device": "NVIDIA H100 80GB HBM3", "place": "cuda", "triton": "3.7.1", "interlace": "0.1.0",
         "rows": [{"op": "all_gather_matmul", "dtype": "bfloat16", "extents": "even", "world": 8,
                   "rows": 1024, "columns": 4096, "inner": 8192, "algorithm": "fused",
                   "values": {"fused": {"block_m": 128, ...}}, "microseconds": {...}, ...}]}]}

Reading never fails: what is not such a file, or is none that this version wrote, is left alone with one
warning that names it. Writing replaces the file at once, under a lock, with what others have written
meanwhile kept; a file that is somebody else's is an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from interlace.runtime.configuration import Configuration

FORMAT, VERSION = "interlace tuning", 1
VARIABLE = "INTERLACE_TUNE_CACHE"
OFF = ("off", "0", "")
ALGORITHMS = ("fused", "pipelined", "unfused")
_KINDS = {each.name: type(each.default) for each in fields(Configuration)}


@dataclass(frozen=True)
class Machine:
    """What rows were measured on; they hold nowhere else."""

    device: str
    place: str
    triton: str
    interlace: str


@dataclass(frozen=True)
class Row:
    """One measurement. ``rows``, ``columns``, ``inner`` and ``world`` are powers of two, see ``tuning.py``.

    ``algorithm``: the fastest. ``values``: by algorithm, fields of the configuration. ``microseconds``: by
    algorithm, its best. ``shape``: m, n, k as measured; ``ranks``: as measured.
    """

    op: str
    dtype: str
    extents: str
    world: int
    rows: int
    columns: int
    inner: int
    algorithm: str
    values: dict[str, dict[str, int | bool]]
    microseconds: dict[str, float] = field(default_factory=dict)
    default_us: float = 0.0
    shape: tuple[int, ...] = ()
    ranks: int = 0
    date: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Of rows with the same key the last one counts."""
        return self.op, self.dtype, self.extents, self.world, self.rows, self.columns, self.inner


def path() -> pathlib.Path | None:
    """The file; None if the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return None if named.strip().lower() in OFF else pathlib.Path(named).expanduser()
    return cache_folder() / "interlace" / "tune.json"


def cache_folder() -> pathlib.Path:
    """The user's, by the conventions of the system."""
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"])
    home = pathlib.Path("~").expanduser()
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    if sys.platform == "win32":
        return pathlib.Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    return home / ".cache"


# -- which machine this is -------------------------------------------------------------------------


def machine(place: str, device: torch.device) -> Machine:
    """The one that ``device`` is of."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    # the package that this one is a part of; it is there, whatever floor it is on
    version = getattr(sys.modules[__name__.partition(".")[0]], "__version__", "")
    return Machine(name, place, str(triton.__version__), str(version))


@functools.cache
def _cpu_name() -> str:
    name = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = (line.partition(":") for line in file)
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")
    return f"{name or sys.platform}, {os.cpu_count()} cores"


# -- reading ---------------------------------------------------------------------------------------


class NotOursError(ValueError):
    """A file that this version of interlace has not written. The message says why, and names it."""


def parse(text: str, file: object) -> dict[Machine, list[Row]]:
    """All rows, by machine. Raises NotOursError."""
    try:
        whole = json.loads(text)
    except ValueError as error:
        raise NotOursError(f"{file}: is no JSON: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise NotOursError(f"{file}: is no file of interlace tune")
    if whole.get("version") != VERSION:
        raise NotOursError(
            f"{file}: has version {whole.get('version')!r} of the format, this interlace has {VERSION}"
        )
    found: dict[Machine, list[Row]] = {}
    try:
        for each in whole["machines"]:
            rows = [_row(row) for row in each["rows"]]
            about = Machine(**{name.name: str(each[name.name]) for name in fields(Machine)})
            found.setdefault(about, []).extend(rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotOursError(f"{file}: is damaged: {type(error).__name__}: {error}") from None
    return found


def _row(facts: dict[str, Any]) -> Row:
    """Checked as far as a launch depends on it."""
    row = Row(**{**facts, "shape": tuple(facts.get("shape", ()))})
    for name in ("world", "rows", "columns", "inner"):
        value = getattr(row, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}")
    if row.algorithm not in ALGORITHMS or not set(row.values) <= set(ALGORITHMS):
        raise ValueError(f"algorithm is {row.algorithm!r}, with values for {list(row.values)}")
    for values in row.values.values():
        for name, given in values.items():
            if type(given) is not _KINDS.get(name) or given < 0:
                raise ValueError(f"{name} is {given!r}")
    return row


def rows_for(about: Machine, file: pathlib.Path | None) -> tuple[Row, ...]:
    """The rows of ``file`` that were measured on this machine; () and a warning if it cannot be used."""
    if file is None:
        return ()
    try:
        found = parse(file.read_text(encoding="utf-8"), file)
    except FileNotFoundError:
        return ()
    except (NotOursError, OSError, UnicodeDecodeError) as error:
        said = str(error) if isinstance(error, NotOursError) else f"{file}: {error}"
        warnings.warn(f"tuning cache not used: {said}", RuntimeWarning, stacklevel=2)
        return ()
    rows = {row.key: row for row in found.get(about, ())}
    if not rows:
        for other in found:
            if (other.device, other.place) == (about.device, about.place):
                warnings.warn(
                    f"tuning cache not used: {file} was measured with triton {other.triton} and "
                    f"interlace {other.interlace}, here are {about.triton} and {about.interlace}; "
                    "python -m interlace tune measures anew",
                    RuntimeWarning,
                    stacklevel=2,
                )
                break
    return tuple(rows.values())


def digest(rows: Sequence[Row]) -> str:
    """Equal for equal rows, whatever their order; "" for none."""
    if not rows:
        return ""
    lines = sorted(json.dumps(asdict(row), sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# -- writing ---------------------------------------------------------------------------------------


def refuse_foreign(file: pathlib.Path) -> None:
    """Raise NotOursError if ``file`` is there and is not a tuning cache: it would be lost."""
    with contextlib.suppress(FileNotFoundError):
        text = file.read_text(encoding="utf-8", errors="replace")
        try:
            parse(text, file)
        except NotOursError as error:
            if f'"{FORMAT}"' not in text:
                raise NotOursError(
                    f"{error}; it is left as it is, name another with {VARIABLE}"
                ) from None


def add(about: Machine, rows: Sequence[Row], file: pathlib.Path) -> None:
    """Merge ``rows`` into ``file``; those of the same key and machine are replaced.

    Several processes may do so at once: each waits for the others, and none loses what another wrote.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file.with_name(file.name + ".lock")):
        refuse_foreign(file)
        found: dict[Machine, list[Row]] = {}
        with contextlib.suppress(FileNotFoundError, NotOursError):
            found = parse(file.read_text(encoding="utf-8"), file)
        merged = {row.key: row for row in [*found.get(about, ()), *rows]}
        found[about] = list(merged.values())
        _replace(file, _text(found))


def _text(found: dict[Machine, list[Row]]) -> str:
    machines = [
        {**asdict(about), "rows": [asdict(row) for row in rows]} for about, rows in found.items()
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "machines": machines}, indent=1)


def _replace(file: pathlib.Path, text: str) -> None:
    """All of it or nothing: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(file: pathlib.Path) -> Iterator[None]:
    """One process at a time. The lock ends with its holder, so nobody waits for one that died."""
    with open(file, "w", encoding="ascii") as held:
        try:
            import fcntl
        except ImportError:  # not on this system: the last writer wins
            yield
            return
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
