"""What collectives take on this machine: measured lines of time over bytes, by mesh, dimension and op.

``python -m interlace calibrate`` writes them, ``interlace.tensor``'s cost model and ``tuning.py`` read
them. One file per machine: ``INTERLACE_CALIBRATION`` names it, or is "off"; else it is
``interlace/calibration-XXXXXXXX.json`` in the user's cache folder, with a digest of the machine's name.
JSON::

    {"format": "interlace calibration", "version": 1, "device": "Intel(R) Xeon(R) Processor, 2 cores",
     "meshes": [{"backend": "interlace", "mesh": [2], "date": "2026-11-22", "torch": "2.13.0",
                 "interlace": "0.1.0", "processes": "shm", "links": [
                    {"dim": 0, "ranks": 2, "op": "all_gather", "protocols": [
                        {"from_bytes": 0, "latency_us": 31.0, "gb_per_s": 1.9},
                        {"from_bytes": 262144, "latency_us": 60.0, "gb_per_s": 4.2}]}, ...]}]}

Bytes are those of the whole tensor: gathered, before it is scattered, reduced, or all that a rank sends.
Reading never fails: what is no such file is left alone with one warning that names it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pathlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from interlace.runtime.tuning import cache
from interlace.runtime.tuning.cache import NotOursError

FORMAT, VERSION = "interlace calibration", 1
VARIABLE = "INTERLACE_CALIBRATION"
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
LEAST_RATE = 1e-9  # GB/s, a byte per second: times of less are no numbers
OWN = "interlace"  # the backend's name where ranks need no process group of torch


@dataclass(frozen=True)
class Protocol:
    """A straight line: ``latency_us`` and bytes at ``gb_per_s`` (10**9 bytes/s), from ``from_bytes`` on."""

    from_bytes: int
    latency_us: float
    gb_per_s: float

    def us(self, size: float) -> float:
        """Of ``size`` bytes."""
        return self.latency_us + size / (self.gb_per_s * 1e3)


@dataclass(frozen=True)
class Link:
    """One op along dimension ``dim`` of a mesh, among its ``ranks`` ranks; ``protocols`` by size.

    >>> link = Link(0, 2, "all_gather", (Protocol(0, 10.0, 1.0), Protocol(65536, 30.0, 4.0)))
    >>> link.us(1000.0), link.us(4e6)
    (11.0, 1030.0)
    """

    dim: int
    ranks: int
    op: str
    protocols: tuple[Protocol, ...]

    def us(self, size: float) -> float:
        """Of ``size`` bytes, by the last protocol that begins at or below."""
        fitting = [each for each in self.protocols if each.from_bytes <= size]
        return (fitting or self.protocols)[-1 if fitting else 0].us(size)


@dataclass(frozen=True)
class Measured:
    """A mesh of ``mesh`` ranks per dimension, on ``backend``, whose ranks were ``processes``."""

    backend: str
    mesh: tuple[int, ...]
    date: str
    torch: str
    interlace: str
    processes: str
    links: tuple[Link, ...]

    def link(self, dim: int, op: str) -> Link:
        """Of ``op`` along ``dim``; KeyError if there is none."""
        for each in self.links:
            if (each.dim, each.op) == (dim, op):
                return each
        raise KeyError(f"{op} along dimension {dim}")


def device_name(device_type: str) -> str:
    """Of the machine whose ranks have their tensors there."""
    return cache.machine("", torch.device(device_type)).device


def path(device_type: str = "cpu") -> pathlib.Path | None:
    """This machine's file; None if the user wants none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        if named.strip().lower() in cache.OFF:
            return None
        return pathlib.Path(os.path.expanduser(named))  # as it is, where there is no such user
    digest = hashlib.sha256(device_name(device_type).encode()).hexdigest()[:8]
    return cache.cache_folder() / "interlace" / f"calibration-{digest}.json"


# -- reading ---------------------------------------------------------------------------------------


def parse(text: str, file: object) -> tuple[str, list[Measured]]:
    """The machine's name, and its meshes. Raises NotOursError."""
    whole = cache.opened(text, file, "calibrate", FORMAT, VERSION)
    try:
        meshes = [_measured(each) for each in whole["meshes"]]
        device = whole["device"]
        if not isinstance(device, str):
            raise TypeError(f"device is {device!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotOursError(f"{file}: is damaged: {type(error).__name__}: {error}") from None
    return device, meshes


def _measured(facts: dict[str, object]) -> Measured:
    """Checked in every field. Raises TypeError, ValueError or KeyError."""
    made = Measured(**{**facts, "mesh": tuple(facts["mesh"]), "links": ()})  # type: ignore[arg-type]
    links = []
    for each in facts["links"]:  # type: ignore[attr-defined]
        protocols = tuple(Protocol(**one) for one in each["protocols"])
        links.append(Link(**{**each, "protocols": protocols}))
    for name in ("backend", "date", "torch", "interlace", "processes"):
        if not isinstance(getattr(made, name), str):
            raise TypeError(f"{name} is {getattr(made, name)!r}")
    if not made.mesh or any(type(each) is not int or each < 1 for each in made.mesh):
        raise ValueError(f"mesh is {made.mesh}")
    for link in links:
        if type(link.dim) is not int or not 0 <= link.dim < len(made.mesh):
            raise ValueError(f"dim is {link.dim!r}")
        if link.op not in OPS or link.ranks != made.mesh[link.dim] or not link.protocols:
            raise ValueError(f"a link is {link}")
        for one in link.protocols:
            if type(one.from_bytes) is not int or one.from_bytes < 0:
                raise ValueError(f"from_bytes is {one.from_bytes!r}")
            for figure in (one.latency_us, one.gb_per_s):
                if type(figure) not in (int, float) or not 0 <= figure < math.inf:
                    raise ValueError(f"a figure is {figure!r}")
            if one.gb_per_s < LEAST_RATE:
                raise ValueError(f"gb_per_s is {one.gb_per_s!r}")
    made = Measured(**{**asdict(made), "links": tuple(links)})
    for dim in range(len(made.mesh)):
        for op in OPS:
            made.link(dim, op)
    return made


@functools.lru_cache(maxsize=16)
def _read(file: pathlib.Path, device: str, changed: int) -> tuple[Measured, ...]:
    try:
        name, meshes = parse(cache._text_of(file), file)
        if name != device:
            raise NotOursError(f"{file}: was measured on {name!r}, this is {device!r}")
    except FileNotFoundError:
        return ()
    except (NotOursError, OSError) as error:
        said = str(error) if isinstance(error, NotOursError) else f"{file}: {error}"
        warnings.warn(f"calibration not used: {said}", RuntimeWarning, stacklevel=3)
        return ()
    return tuple(meshes)


def read(device_type: str = "cpu", file: pathlib.Path | None = None) -> tuple[Measured, ...]:
    """What this machine's file has; () if there is none, with a warning if it cannot be used."""
    file = path(device_type) if file is None else file
    if file is None:
        return ()
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return ()
    return _read(file, device_name(device_type), changed)


def find(meshes: Sequence[Measured], backend: str, mesh: Sequence[int]) -> Measured | None:
    """The measurement of just such a mesh, if there is one."""
    for each in meshes:
        if (each.backend, each.mesh) == (backend, tuple(mesh)):
            return each
    return None


# -- writing ---------------------------------------------------------------------------------------


def add(measured: Measured, file: pathlib.Path, device_type: str = "cpu") -> None:
    """Put ``measured`` into ``file``, in place of an older one of the same mesh and backend.

    Several processes may do so at once. Raises NotOursError if there is something else, and OSError.
    """
    target = cache._target(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with cache._locked(target):
        kept = [
            each for each in _content(target, file, device_type) if _key(each) != _key(measured)
        ]
        whole = {
            "format": FORMAT,
            "version": VERSION,
            "device": device_name(device_type),
            "meshes": [asdict(each) for each in [*kept, measured]],
        }
        cache._replace(target, json.dumps(whole, indent=1))
    _read.cache_clear()


def _key(measured: Measured) -> tuple[str, tuple[int, ...]]:
    return measured.backend, measured.mesh


def _content(target: pathlib.Path, file: pathlib.Path, device_type: str) -> list[Measured]:
    try:
        name, meshes = parse(cache._text_of(target), file)
    except FileNotFoundError:
        return []
    except NotOursError as error:
        raise NotOursError(f"{error}; it is left as it is, name another with {VARIABLE}") from None
    if name != device_name(device_type):
        raise NotOursError(
            f"{file}: was measured on {name!r}; it is left as it is, name another with {VARIABLE}"
        )
    return meshes


def refuse_unwritable(file: pathlib.Path, device_type: str = "cpu") -> None:
    """Raise NotOursError or OSError if :func:`add` would. Makes the folder."""
    target = cache._target(file)
    _content(target, file, device_type)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise PermissionError(f"{file}: cannot be written")
