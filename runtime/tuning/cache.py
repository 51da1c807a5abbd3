"""The file that ``interlace tune`` writes and the fused ops read: measured rows, by machine.

``INTERLACE_TUNE_CACHE`` names the file, or is "off"; else it is ``interlace/tune.json`` in the user's cache
folder. JSON::

    {"format": "interlace tuning", "version": 1, "machines": [
        {"device": "NVIDIA H100 80GB HBM3", "place": "cuda", "triton": "3.7.1", "interlace": "0.1.0",
         "rows": [{"op": "all_gather_matmul", "dtype": "bfloat16", "extents": "even", "world": 8,
                   "rows": 1024, "columns": 4096, "inner": 8192, "algorithm": "fused",
                   "values": {"fused": {"block_m": 128, ...}}, "microseconds": {...}, ...}]}]}

``files.py`` says how it is read and written.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from interlace.runtime.compat.releases import INTERLACE_VERSION
from interlace.runtime.core import plain
from interlace.runtime.tuning.configuration import METHODS, check_values
from interlace.runtime.tuning.files import MeasuredFile, is_count, is_figure, require

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
"""Where others can be chosen than those."""


@dataclass(frozen=True)
class TunedMachine:
    """The machine that rows were measured on; they hold nowhere else."""

    device: str
    place: str
    triton: str
    interlace: str


@plain.record
@dataclass(frozen=True)
class CacheRow:
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
        """A row's place in the cache: of rows with the same key the last one counts."""
        return self.op, self.dtype, self.extents, self.world, self.rows, self.columns, self.inner


CacheRows = dict[TunedMachine, list[CacheRow]]


def machine(place: str, device: torch.device) -> TunedMachine:
    """The one that ``device`` is of."""
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


def _parsed(whole: dict[str, Any]) -> CacheRows:
    """All rows, by machine."""
    found: CacheRows = {}
    for each in whole["machines"]:
        rows = [_row(row) for row in each["rows"]]
        about = TunedMachine(**{one.name: each[one.name] for one in fields(TunedMachine)})
        for name, value in asdict(about).items():
            require(name, value, isinstance(value, str))
        found.setdefault(about, []).extend(rows)
    return found


FILE = MeasuredFile("tune", "tuning cache", FORMAT, VERSION, VARIABLE, _parsed)


def path() -> pathlib.Path | None:
    """The file; None if the user wants none."""
    return FILE.path(lambda: "tune.json")


def _row(facts: dict[str, Any]) -> CacheRow:
    """Checked in every field. Raises TypeError or ValueError."""
    row = CacheRow(**{**facts, "shape": tuple(facts.get("shape", ()))})
    for name in ("op", "dtype", "extents", "algorithm", "date"):
        require(name, getattr(row, name), isinstance(getattr(row, name), str))
    for name in ("world", "rows", "columns", "inner"):
        require(name, value := getattr(row, name), is_count(value) and value & (value - 1) == 0)
    require("shape", row.shape, all(map(is_count, row.shape)))
    require("ranks", row.ranks, row.ranks == 0 or is_count(row.ranks))
    known = BY_OP.get(row.op, ALGORITHMS)
    for name in ("values", "microseconds"):
        require(name, given := getattr(row, name), isinstance(given, dict))
        require(name, list(given), set(given) <= set(known))
    require("algorithm", row.algorithm, row.algorithm in known)
    for time in (row.default_us, *row.microseconds.values()):
        require("a time", time, is_figure(time))
    for values in row.values.values():
        check_values(values)
    return row


def rows_for(about: TunedMachine, file: pathlib.Path | None) -> tuple[CacheRow, ...]:
    """The rows of ``file`` that were measured on this machine; () and a warning if it cannot be used."""
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
    """Equal for equal rows, whatever their order; "" for none."""
    if not rows:
        return ""
    lines = sorted(json.dumps(asdict(row), sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def add(about: TunedMachine, rows: Sequence[CacheRow], file: pathlib.Path) -> None:
    """Merge ``rows`` into ``file``, over those of the same key and machine. Raises as ``change``."""

    def merged(content: CacheRows | None) -> dict[str, Any]:
        found = content or {}
        found[about] = list({row.key: row for row in [*found.get(about, ()), *rows]}.values())
        machines = [
            {**asdict(each), "rows": [asdict(row) for row in own]} for each, own in found.items()
        ]
        return {"machines": machines}

    FILE.change(file, merged)
