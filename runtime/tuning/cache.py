"""The file that ``interlace tune`` writes and the fused ops read: measured rows, by machine.

``INTERLACE_TUNE_CACHE`` names the file, or is "off"; else it is ``interlace/tune.json`` in the user's cache
folder. JSON::

    {"format": "interlace tuning", "version": 1, "machines": [
        {"device": "NVIDIA H100 80GB HBM3", "place": "cuda", "triton": "3.7.1", "interlace": "0.1.0",
         "rows": [{"op": "all_gather_matmul", "dtype": "bfloat16", "extents": "even", "world": 8,
                   "rows": 1024, "columns": 4096, "inner": 8192, "algorithm": "fused",
                   "values": {"fused": {"block_m": 128, ...}}, "microseconds": {...}, ...}]}]}

Reading never fails: what is not such a file, or is none that this version wrote, is left alone with one
warning that names it. Writing replaces the file at once, under a lock (``FILE.lock``, which stays), with
what others have written meanwhile kept; a file that cannot be read as such a cache is an error, and stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import secrets
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from interlace.runtime.tuning.configuration import check_values

FORMAT, VERSION = "interlace tuning", 1
VARIABLE = "INTERLACE_TUNE_CACHE"
OFF = ("off", "0", "")
ALGORITHMS = ("fused", "pipelined", "unfused")
MOST_BYTES = 64 << 20  # of a file; a row has less than 2000
MOST_EXTENT = 1 << 62


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
        if named.strip().lower() in OFF:
            return None
        return pathlib.Path(os.path.expanduser(named))  # as it is, where there is no such user
    return cache_folder() / "interlace" / "tune.json"


def cache_folder() -> pathlib.Path:
    """The user's, by the conventions of the system."""
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"])
    home = pathlib.Path(os.path.expanduser("~"))
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


def opened(text: str, file: object, command: str, form: str, version: int) -> dict[str, Any]:
    """What a file that ``interlace command`` writes has, in this form and version. Raises NotOursError."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotOursError(f"{file}: is no JSON: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != form:
        raise NotOursError(f"{file}: is no file of interlace {command}")
    if whole.get("version") != version:
        raise NotOursError(
            f"{file}: has version {whole.get('version')!r} of the format, this interlace has {version}"
        )
    return whole


def parse(text: str, file: object) -> dict[Machine, list[Row]]:
    """All rows, by machine. Raises NotOursError."""
    whole = opened(text, file, "tune", FORMAT, VERSION)
    found: dict[Machine, list[Row]] = {}
    try:
        for each in whole["machines"]:
            rows = [_row(row) for row in each["rows"]]
            about = Machine(**{one.name: each[one.name] for one in fields(Machine)})
            for name, value in asdict(about).items():
                _require(name, value, isinstance(value, str))
            found.setdefault(about, []).extend(rows)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NotOursError(f"{file}: is damaged: {type(error).__name__}: {error}") from None
    return found


def _require(name: str, value: object, right: bool) -> None:
    if not right:
        raise ValueError(f"{name} is {str(value)[:100]!r}")


def _row(facts: dict[str, Any]) -> Row:
    """Checked in every field. Raises TypeError or ValueError."""
    row = Row(**{**facts, "shape": tuple(facts.get("shape", ()))})
    for name in ("op", "dtype", "extents", "algorithm", "date"):
        _require(name, getattr(row, name), isinstance(getattr(row, name), str))
    for name in ("world", "rows", "columns", "inner"):
        _require(name, value := getattr(row, name), _is_count(value) and value & (value - 1) == 0)
    _require("shape", row.shape, all(map(_is_count, row.shape)))
    _require("ranks", row.ranks, row.ranks == 0 or _is_count(row.ranks))
    for name in ("values", "microseconds"):
        _require(name, given := getattr(row, name), isinstance(given, dict))
        _require(name, list(given), set(given) <= set(ALGORITHMS))
    _require("algorithm", row.algorithm, row.algorithm in ALGORITHMS)
    for time in (row.default_us, *row.microseconds.values()):
        _require("a time", time, type(time) in (int, float) and 0 <= time < float("inf"))
    for values in row.values.values():
        check_values(values)
    return row


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_EXTENT


def _text_of(file: pathlib.Path) -> str:
    """All of it. Raises NotOursError for what is no text, FileNotFoundError and other OSErrors."""
    about = file.stat()  # before it is opened: that of a pipe may never end
    if not stat.S_ISREG(about.st_mode):
        raise NotOursError(f"{file}: is no regular file")
    if about.st_size > MOST_BYTES:
        raise NotOursError(f"{file}: has {about.st_size} bytes, more than {MOST_BYTES}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise NotOursError(f"{file}: is no text: {error}") from None


def rows_for(about: Machine, file: pathlib.Path | None) -> tuple[Row, ...]:
    """The rows of ``file`` that were measured on this machine; () and a warning if it cannot be used."""
    if file is None:
        return ()
    try:
        found = parse(_text_of(file), file)
    except FileNotFoundError:
        return ()
    except (NotOursError, OSError) as error:
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


def refuse_unwritable(file: pathlib.Path) -> None:
    """Raise NotOursError or OSError if :func:`add` would: what is there is no cache, or nothing can be
    written there. Makes the folder.
    """
    target = _target(file)
    _content(target, file)
    try:
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError("it is read-only")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            handle, name = _new_file(target)
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise OSError(f"{file}: cannot be written: {error}") from None


def add(about: Machine, rows: Sequence[Row], file: pathlib.Path) -> None:
    """Merge ``rows`` into ``file``; those of the same key and machine are replaced.

    Several processes may do so at once: each waits for the others, and none loses what another wrote.
    Raises NotOursError if there is something else, and OSError.
    """
    target = _target(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        found = _content(target, file)
        merged = {row.key: row for row in [*found.get(about, ()), *rows]}
        found[about] = list(merged.values())
        _replace(target, _text(found))


def _target(file: pathlib.Path) -> pathlib.Path:
    """Where links lead, so that the link stays and all its names share a lock."""
    return pathlib.Path(os.path.realpath(file))


def _content(target: pathlib.Path, file: pathlib.Path) -> dict[Machine, list[Row]]:
    """Of a cache; {} if there is nothing. Raises NotOursError for anything else, which would be lost."""
    try:
        return parse(_text_of(target), file)
    except FileNotFoundError:
        return {}
    except NotOursError as error:
        raise NotOursError(f"{error}; it is left as it is, name another with {VARIABLE}") from None


def _text(found: dict[Machine, list[Row]]) -> str:
    machines = [
        {**asdict(about), "rows": [asdict(row) for row in rows]} for about, rows in found.items()
    ]
    return json.dumps({"format": FORMAT, "version": VERSION, "machines": machines}, indent=1)


def _new_file(target: pathlib.Path) -> tuple[int, str]:
    """Beside it, open for writing; its mode is that of ``target``, or what the umask leaves of 0o666."""
    name = f"{target.parent}/.{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with contextlib.suppress(FileNotFoundError):
        os.chmod(name, stat.S_IMODE(target.stat().st_mode))
    return handle, name


def _replace(target: pathlib.Path, text: str) -> None:
    """All of it or nothing: a reader sees the old file or the new one."""
    handle, name = _new_file(target)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    """One process at a time. The lock ends with its holder, so nobody waits for one that died."""
    with open(target.with_name(target.name + ".lock"), "w", encoding="ascii") as held:
        try:
            import fcntl
        except ImportError:  # not on this system: the last writer wins
            yield
            return
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
