"""Measured times of collectives on this machine, as lines over bytes, by mesh, dimension and op.

``python -m interlace calibrate`` writes them (docs/how-to/train/tensor.md). ``tuning.py``,
``interlace.compile.calibrated`` and the costs of ``interlace.tensor`` read them. XXXXXXXX in the file's
name is a digest of the machine's name. JSON::

    {"format": "interlace calibration", "version": 1, "device": "Intel(R) Xeon(R) Processor, 2 cores",
     "meshes": [{"backend": "interlace", "mesh": [2], "date": "2026-11-22", "torch": "2.13.0",
                 "interlace": "0.1.0", "processes": "shm", "links": [
                    {"dim": 0, "ranks": 2, "op": "all_gather", "protocols": [
                        {"from_bytes": 0, "latency_us": 31.0, "gb_per_s": 1.9},
                        {"from_bytes": 262144, "latency_us": 60.0, "gb_per_s": 4.2}]}, ...]}]}

Bytes are the bytes of the whole tensor: after a gather, before a scatter, the reduced tensor, or all that a
rank sends. ``files.py`` reads and writes the file.
"""

import functools
import hashlib
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from interlace.runtime.core import plain
from interlace.runtime.tuning import files
from interlace.runtime.tuning.files import MeasuredFile, NotOursError, is_count, is_figure, require

FORMAT, VERSION = "interlace calibration", 1
VARIABLE = "INTERLACE_CALIBRATION"
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
LEAST_RATE = 1e-9  # GB/s, which is one byte per second; smaller values are invalid
OWN = "interlace"  # the backend's name if the ranks need no process group of torch


@plain.record
@dataclass(frozen=True)
class LinkProtocol:
    """A line from ``from_bytes`` on: ``latency_us``, and bytes at ``gb_per_s`` (10**9 bytes/s)."""

    from_bytes: int
    latency_us: float
    gb_per_s: float

    def us(self, size: float) -> float:
        return self.latency_us + size / (self.gb_per_s * 1e3)


@plain.record
@dataclass(frozen=True)
class Link:
    """One op along dimension ``dim`` of a mesh, among its ``ranks`` ranks, with one line per size range.

    >>> link = Link(0, 2, "all_gather", (LinkProtocol(0, 10.0, 1.0), LinkProtocol(65536, 30.0, 4.0)))
    >>> link.us(1000.0), link.us(4e6)
    (11.0, 1030.0)
    """

    dim: int
    ranks: int
    op: str
    protocols: tuple[LinkProtocol, ...]

    def us(self, size: float) -> float:
        """Return the time for ``size`` bytes, by the last protocol that begins at or below that size."""
        fitting = [protocol for protocol in self.protocols if protocol.from_bytes <= size]
        return (fitting or self.protocols)[-1 if fitting else 0].us(size)

    @property
    def received_gbs(self) -> float:
        """Return the GB/s that a rank receives in large messages: the whole tensor without its own part."""
        return self.protocols[-1].gb_per_s * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class MeasuredMesh:
    """A mesh with ``mesh`` ranks per dimension, on ``backend``. ``processes`` is the place of its ranks."""

    backend: str
    mesh: tuple[int, ...]
    date: str
    torch: str
    interlace: str
    processes: str
    links: tuple[Link, ...]

    def link(self, dim: int, op: str) -> Link:
        """Return the link of ``op`` along ``dim``. KeyError if there is none."""
        for each in self.links:
            if (each.dim, each.op) == (dim, op):
                return each
        raise KeyError(f"{op} along dimension {dim}")


def device_name(device_type: str) -> str:
    """Return the name of the machine whose devices of ``device_type`` hold the ranks' tensors."""
    return files.machine("", torch.device(device_type)).device


def file_of(device_type: str) -> MeasuredFile[list[MeasuredMesh]]:
    """Return this machine's file. A file of another machine raises NotOursError."""

    def parse(whole: dict[str, Any]) -> list[MeasuredMesh]:
        meshes, here = [_check_fields(each) for each in whole["meshes"]], device_name(device_type)
        if whole["device"] != here:
            raise NotOursError(f"was measured on {whole['device']!r}, this is {here!r}")
        return meshes

    return MeasuredFile("calibrate", "calibration", FORMAT, VERSION, VARIABLE, parse)


def path(device_type: str = "cpu") -> pathlib.Path | None:
    """Return the path of this machine's file, or None if calibration is off."""

    def usual() -> str:
        digest = hashlib.sha256(device_name(device_type).encode()).hexdigest()
        return f"calibration-{digest[:8]}.json"

    return file_of(device_type).path(usual)


def _check_fields(facts: dict[str, Any]) -> MeasuredMesh:
    links = []
    for fact in facts["links"]:
        protocols = tuple(LinkProtocol(**one) for one in fact["protocols"])
        links.append(Link(**{**fact, "protocols": protocols}))
    measured = MeasuredMesh(**{**facts, "mesh": tuple(facts["mesh"]), "links": tuple(links)})
    for name in ("backend", "date", "torch", "interlace", "processes"):
        require(name, getattr(measured, name), isinstance(getattr(measured, name), str))
    require("mesh", measured.mesh, bool(measured.mesh) and all(map(is_count, measured.mesh)))
    for link in links:
        require("dim", link.dim, type(link.dim) is int and 0 <= link.dim < len(measured.mesh))
        fits = link.op in OPS and link.ranks == measured.mesh[link.dim]
        require("a link", link, fits and bool(link.protocols))
        for one in link.protocols:
            require("from_bytes", one.from_bytes, one.from_bytes == 0 or is_count(one.from_bytes))
            require("latency_us", one.latency_us, is_figure(one.latency_us))
            fast = is_figure(one.gb_per_s) and one.gb_per_s >= LEAST_RATE
            require("gb_per_s", one.gb_per_s, fast)
    for dim in range(len(measured.mesh)):
        for op in OPS:
            measured.link(dim, op)
    return measured


@functools.lru_cache(maxsize=16)
def _read(file: pathlib.Path, device_type: str, changed: int) -> tuple[MeasuredMesh, ...]:
    return tuple(file_of(device_type).read(file) or ())


def read(device_type: str = "cpu", file: pathlib.Path | None = None) -> tuple[MeasuredMesh, ...]:
    """Return the meshes in this machine's file. If there is none, (); if it is invalid, also a warning."""
    file = path(device_type) if file is None else file
    if file is None:
        return ()
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return ()
    return _read(file, device_type, changed)


def find(meshes: Sequence[MeasuredMesh], backend: str, mesh: Sequence[int]) -> MeasuredMesh | None:
    wanted = backend, tuple(mesh)
    return next((each for each in meshes if (each.backend, each.mesh) == wanted), None)


def add(measured: MeasuredMesh, file: pathlib.Path, device_type: str = "cpu") -> None:
    """Put ``measured`` into ``file``, in place of one of its mesh and backend. Raises like ``change``."""

    def change(content: list[MeasuredMesh] | None) -> dict[str, object]:
        key = measured.backend, measured.mesh
        kept = [each for each in content or () if (each.backend, each.mesh) != key]
        meshes = [asdict(each) for each in [*kept, measured]]
        return {"device": device_name(device_type), "meshes": meshes}

    file_of(device_type).change(file, change)
    _read.cache_clear()
