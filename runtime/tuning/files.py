"""Files of measurements on this machine, as JSON: found, read, and replaced under a lock.

Reading never fails, and writing keeps what other processes have written meanwhile: docs/how-to/gpu/tune.md
says what happens to files that cannot be read. The cache of ``interlace tune`` is such a file. JSON::

    {"format": "interlace tuning", "version": 1, "machines": [
        {"device": "NVIDIA H100 80GB HBM3", "place": "cuda", "triton": "3.7.1", "interlace": "0.1.0",
         "rows": [{"op": "all_gather_matmul", "dtype": "bfloat16", "extents": "even", "world": 8,
                   "rows": 1024, "columns": 4096, "inner": 8192, "algorithm": "fused",
                   "values": {"fused": {"block_m": 128, ...}}, "microseconds": {...}, ...}]}]}
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar, get_args

import torch

from interlace.runtime.compat.releases import INTERLACE_VERSION
from interlace.runtime.core import plain
from interlace.runtime.tuning.configuration import METHODS, check_values

OFF = ("off", "0", "")
MOST_BYTES = 64 << 20  # bytes of a file; a row has less than 2000
MOST_COUNT = 1 << 62
Content = TypeVar("Content")


class NotOursError(ValueError):
    """A file that this version of interlace has not written. The message names it and says why."""


def require(name: str, value: object, right: bool) -> None:
    """Raise ValueError with name and value unless ``right``."""
    if not right:
        raise ValueError(f"{name} is {str(value)[:100]!r}")


def is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_COUNT


def is_figure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


@dataclass(frozen=True)
class MeasuredFile(Generic[Content]):
    """The file that ``interlace COMMAND`` writes; ``title`` is its name in warnings.

    The environment's ``variable`` names it, or is "off". ``parse`` turns the JSON into the content. It
    raises NotOursError for a file of another machine, and any other error for a damaged one.
    """

    command: str
    title: str
    format: str
    version: int
    variable: str
    parse: Callable[[dict[str, object]], Content]

    def path(self, usual: Callable[[], str]) -> pathlib.Path | None:
        """Return the path, by default ``usual()`` in the user's cache folder; None if it is off."""
        named = os.environ.get(self.variable)
        if named is None:
            return _cache_folder() / "interlace" / usual()
        if named.strip().lower() in OFF:
            return None
        return pathlib.Path(os.path.expanduser(named))  # unchanged if there is no such user

    def content(self, file: pathlib.Path) -> Content:
        """Return the file's content. Raises NotOursError, FileNotFoundError and other OSErrors."""
        try:
            about = file.stat()  # before it is opened: reading a pipe may never end
            if not stat.S_ISREG(about.st_mode):
                raise NotOursError("is not a regular file")
            if about.st_size > MOST_BYTES:
                raise NotOursError(f"has {about.st_size} bytes, more than {MOST_BYTES}")
            whole = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(whole, dict) or whole.get("format") != self.format:
                raise NotOursError(f"is not a file of interlace {self.command}")
            if whole.get("version") != self.version:
                raise NotOursError(
                    f"has version {whole.get('version')!r} of the format, this interlace has {self.version}"
                )
            return self.parse(whole)
        except OSError:
            raise
        except NotOursError as error:
            raise NotOursError(f"{file}: {error}") from None
        except Exception as error:
            raise NotOursError(f"{file}: is damaged: {type(error).__name__}: {error}") from None

    def read(self, file: pathlib.Path) -> Content | None:
        """Return the file's content. If there is none, None; if it is invalid, None and a warning."""
        try:
            return self.content(file)
        except FileNotFoundError:
            return None
        except (NotOursError, OSError) as error:
            text = str(error) if isinstance(error, NotOursError) else f"{file}: {error}"
            warnings.warn(f"{self.title} not used: {text}", RuntimeWarning, stacklevel=3)
            return None

    def _to_change(self, file: pathlib.Path) -> Content | None:
        """Return the content to change, None if there is no file. NotOursError if it would be lost."""
        try:
            return self.content(file)
        except FileNotFoundError:
            return None
        except NotOursError as error:
            raise NotOursError(
                f"{error}; it is left as it is, name another with {self.variable}"
            ) from None

    def refuse_unwritable(self, file: pathlib.Path) -> None:
        """Make the folder. Raise NotOursError or OSError if :meth:`change` would."""
        self._to_change(file)
        target = _target(file)
        try:
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError("it is read-only")
            with _hold_lock(target):
                handle, name = _new_file(target)
                os.close(handle)
                os.unlink(name)
        except OSError as error:
            raise OSError(f"{file}: cannot be written: {error}") from None

    def change(
        self, file: pathlib.Path, changed: Callable[[Content | None], dict[str, object]]
    ) -> None:
        """Replace the file's content by ``changed(content)``; ``content`` is None if there is no file.

        Safe for several processes at once: each waits for the others, and no change is lost. Raises
        NotOursError if the file is something else, and OSError.
        """
        target = _target(file)
        with _hold_lock(target):
            whole = {"format": self.format, "version": self.version}
            whole.update(changed(self._to_change(file)))
            text = json.dumps(whole, indent=1)
            # atomic: a reader sees the old file or the new one
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


def _cache_folder() -> pathlib.Path:
    """Return the user's cache folder by the system's conventions. Torch does not depend on platformdirs."""
    if os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(os.environ["XDG_CACHE_HOME"])
    home = pathlib.Path(os.path.expanduser("~"))
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return home / ".cache"


def _target(file: pathlib.Path) -> pathlib.Path:
    """Follow links, so that a link stays and all names of the file share a lock."""
    return pathlib.Path(os.path.realpath(file))


@contextlib.contextmanager
def _hold_lock(target: pathlib.Path) -> Iterator[None]:
    """Hold the lock. It ends with its holder, so no process waits for one that has died.

    The lock's file is never opened through a link, and nothing is written into it: another user's link must
    not cause a different file to be emptied.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(target.with_name(target.name + ".lock"), flags, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _new_file(target: pathlib.Path) -> tuple[int, str]:
    """Open a new file beside ``target`` for writing, with its mode, or 0o666 less the umask."""
    name = f"{target.parent}/.{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with contextlib.suppress(FileNotFoundError):
        os.chmod(name, stat.S_IMODE(target.stat().st_mode))
    return handle, name


FORMAT, VERSION = "interlace tuning", 1
VARIABLE = "INTERLACE_TUNE_CACHE"
Algorithm = Literal["fused", "pipelined", "unfused"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
_BY_METHOD = tuple(f"{method} {way}" for way in ("fused", "pipelined") for method in METHODS)
BY_OP = {
    "all_reduce_norm": (*ALGORITHMS, "low_latency"),
    **{f"context_parallel_attention{way}": (*_BY_METHOD, "unfused") for way in ("", "_backward")},
    "distributed_decode": ("fused", "unfused"),
}
"""The algorithms that can be chosen besides those."""


@dataclass(frozen=True)
class TunedMachine:
    """The machine on which rows were measured. They are valid only there."""

    device: str
    place: str
    triton: str
    interlace: str


@plain.record
@dataclass(frozen=True)
class CacheRow:
    """One measurement. ``rows``, ``columns``, ``inner`` and ``world`` are powers of two, see ``tuning.py``.

    ``algorithm`` is the fastest. ``values`` are fields of the configuration, and ``microseconds`` the best
    time, both by algorithm. ``shape`` (m, n, k) and ``ranks`` describe the measurement.
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
        """Return the row's key in the cache. If rows have the same key, the last one counts."""
        return self.op, self.dtype, self.extents, self.world, self.rows, self.columns, self.inner


CacheRows = dict[TunedMachine, list[CacheRow]]


def machine(place: str, device: torch.device) -> TunedMachine:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return TunedMachine(name, place, str(triton.__version__), INTERLACE_VERSION)


@functools.cache
def _cpu_name() -> str:
    name = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        lines = (line.partition(":") for line in file)
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")
    return f"{name or sys.platform}, {os.cpu_count()} cores"


def _parse_rows(whole: dict[str, Any]) -> CacheRows:
    found: CacheRows = {}
    for each in whole["machines"]:
        rows = [_row(row) for row in each["rows"]]
        about = TunedMachine(**{one.name: each[one.name] for one in fields(TunedMachine)})
        for name, value in asdict(about).items():
            require(name, value, isinstance(value, str))
        found.setdefault(about, []).extend(rows)
    return found


FILE = MeasuredFile("tune", "tuning cache", FORMAT, VERSION, VARIABLE, _parse_rows)


def path() -> pathlib.Path | None:
    return FILE.path(lambda: "tune.json")


def _row(facts: dict[str, Any]) -> CacheRow:
    """Parse a row and check every field. Raises TypeError or ValueError."""
    row = CacheRow(**{**facts, "shape": tuple(facts.get("shape", ()))})
    for name in ("op", "dtype", "extents", "algorithm", "date"):
        require(name, getattr(row, name), isinstance(getattr(row, name), str))
    for name in ("world", "rows", "columns", "inner"):
        require(name, value := getattr(row, name), is_count(value) and value & (value - 1) == 0)
    require("shape", row.shape, all(map(is_count, row.shape)))
    require("ranks", row.ranks, row.ranks == 0 or is_count(row.ranks))
    known = BY_OP.get(row.op, ALGORITHMS)
    for name in ("values", "microseconds"):
        require(name, entry := getattr(row, name), isinstance(entry, dict))
        require(name, list(entry), set(entry) <= set(known))
    require("algorithm", row.algorithm, row.algorithm in known)
    for time in (row.default_us, *row.microseconds.values()):
        require("a time", time, is_figure(time))
    for values in row.values.values():
        check_values(values)
    return row


def rows_for(about: TunedMachine, file: pathlib.Path | None) -> tuple[CacheRow, ...]:
    """Return the rows of ``file`` for this machine. If it cannot be used, () and a warning."""
    found = None if file is None else FILE.read(file)
    if found is None:
        return ()
    if about in found:
        return tuple({row.key: row for row in found[about]}.values())
    for other in found:
        if (other.device, other.place) == (about.device, about.place):
            warnings.warn(
                f"tuning cache not used: {file} was measured with triton {other.triton} and interlace "
                f"{other.interlace}, here are {about.triton} and {about.interlace}; "
                "python -m interlace tune measures anew",
                RuntimeWarning,
                stacklevel=2,
            )
            break
    return ()


def digest(rows: Sequence[CacheRow]) -> str:
    """Return a digest that is equal for equal rows in any order; "" for no rows."""
    if not rows:
        return ""
    lines = sorted(json.dumps(asdict(row), sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def add(about: TunedMachine, rows: Sequence[CacheRow], file: pathlib.Path) -> None:
    """Merge ``rows`` into ``file``; they replace rows of the same key. Raises like ``change``."""

    def merge(content: CacheRows | None) -> dict[str, object]:
        found = content or {}
        found[about] = list({row.key: row for row in [*found.get(about, ()), *rows]}.values())
        machines = [
            {**asdict(each), "rows": [asdict(row) for row in rows_of_it]}
            for each, rows_of_it in found.items()
        ]
        return {"machines": machines}

    FILE.change(file, merge)
