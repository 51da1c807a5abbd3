"""Shared memory segments. Each is one memfd: sealed, allocated before it is mapped, without a name.

=====================  ===========================================================================
memfd                  has no name in /dev/shm: SIGKILL leaves nothing behind, and the next job finds
                       nothing stale
posix_fallocate        pages are allocated before they are mapped; a full memory is an error here, not
                       a SIGBUS at a later store
F_SEAL_SHRINK, _GROW   no process can truncate the file under the others (also a SIGBUS)
header page            magic, layout version, nonce, rank, world size, size; every process that maps the
                       segment checks them before first use
=====================  ===========================================================================

``mmap.mmap`` is not used: until Python 3.13 it keeps a duplicate of the descriptor per mapping, and its
``close`` unmaps under a tensor that was made by ``torch.frombuffer``. A :class:`Mapping` is unmapped when
the last array or tensor over it is gone, and not before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from interlace.runtime.core.errors import InterlaceError, PlaceUnavailableError

if TYPE_CHECKING:  # `inspect` reads segments without torch
    import numpy.typing as npt

    from interlace.runtime.core.memory import Array

MAGIC = b"ilace\x00\x00\x01"
LAYOUT_VERSION = 1
PAGE = 4096
NONCE_BYTES = 16
_HEADER = struct.Struct(f"<8sQ{NONCE_BYTES}sQQQ")
HEADER_BYTES = _HEADER.size

_PIECE = 64 << 20
# By cgroup version (2, 1): the files with limit and use, the statistic of droppable memory, the folder.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file", ""),
    "memory": (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory"),
}  # fmt: skip

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED = 0x01
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_address, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = (_address, _size, _number, _number, _number, ctypes.c_longlong)
_libc.munmap.argtypes = (_address, _size)


class Identity(NamedTuple):
    """The contents of a segment's header. ``nbytes`` excludes the header page."""

    nonce: bytes
    rank: int
    world_size: int
    nbytes: int

    @classmethod
    def unpack(cls, header: bytes) -> Identity:
        if len(header) < _HEADER.size:
            raise InterlaceError(f"{len(header)} bytes are not a header of shared memory")
        return cls(*_HEADER.unpack(header[: _HEADER.size])[2:])

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, LAYOUT_VERSION, *self)

    def check(self, header: bytes, memory: str) -> None:
        """Raise unless ``header`` has the same contents; the error names the first field that differs."""
        if header[: len(MAGIC)] != MAGIC:
            raise InterlaceError(
                f"{memory}: not memory of interlace (magic {header[: len(MAGIC)]!r}, not {MAGIC!r})"
            )
        names = ("magic", "layout version", "nonce", "rank", "world size", "size in bytes")
        compare(memory, names, _HEADER.unpack(header[: _HEADER.size]), _HEADER.unpack(self.pack()))


def compare(
    subject: str, names: Iterable[str], found: Iterable[object], expected: Iterable[object]
) -> None:
    """Raise InterlaceError that names the first differing field."""
    for name, has, wants in zip(names, found, expected, strict=True):
        if has != wants:
            has, wants = (v.hex() if isinstance(v, bytes) else v for v in (has, wants))
            raise InterlaceError(f"{subject}: {name} is {has}, expected {wants}")


def agreed_identities(answers: Sequence[bytes], names: Sequence[int]) -> list[Identity]:
    """Parse the headers that ranks, by ``names``, have sent, each with an error text. Raises if a rank had
    an error or if sizes differ."""
    identities = [Identity.unpack(answer) for answer in answers]
    first = identities[0].nbytes
    for name, other in zip(names, identities, strict=True):
        if other.nbytes != first:
            raise ValueError(
                f"nbytes differs: rank {names[0]} allocates {first} bytes, rank {name} {other.nbytes}"
            )
    for name, answer in zip(names, answers, strict=True):
        if text := answer[HEADER_BYTES:].decode():
            raise InterlaceError(f"rank {name}: {text}")
    return identities


class Mapping:
    """A shared mapping of a whole file. The address range stays mapped while a view of it exists."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise InterlaceError(f"cannot map {nbytes} bytes: {os.strerror(code)}")
        self.address: int = address
        self.nbytes = nbytes
        # Not at interpreter exit: other exit handlers and daemon threads may still touch the memory.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False

    @property
    def __array_interface__(self) -> dict[str, object]:
        data = self.address, False
        return {"data": data, "shape": (self.nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes after the header page. The array and its views keep the mapping alive."""
        whole: npt.NDArray[np.uint8] = np.asarray(self)
        return whole[PAGE:]

    @property
    def data_address(self) -> int:
        return self.address + PAGE

    def header(self) -> bytes:
        return ctypes.string_at(self.address, _HEADER.size)


class SharedSegment:
    """A segment that this process has created, and its descriptor for the peers, until it is closed.

    The memory of its last ``later`` bytes is allocated only when :meth:`reserve` is called.
    """

    def __init__(self, identity: Identity, later: int = 0) -> None:
        self.identity = identity
        self.descriptor = create_segment(identity, later)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        try:
            self.mapping = map_segment(self.descriptor, identity)
        except BaseException:
            self.close()
            raise

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate ``nbytes`` of the data at ``offset``. InterlaceError if memory is short."""
        with _allocating(nbytes):
            _allocate(self.descriptor, PAGE + offset, nbytes)


def create_segment(identity: Identity, later: int = 0) -> int:
    """Create a zeroed, sealed memfd and write its header. The caller owns the descriptor."""
    nbytes = PAGE + identity.nbytes
    try:
        descriptor = os.memfd_create("interlace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise PlaceUnavailableError(f"place 'shm' needs Linux memfd_create: {error}") from error
    try:
        with _allocating(nbytes):
            os.ftruncate(descriptor, nbytes)
            _allocate(descriptor, 0, nbytes - later)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.pwrite(descriptor, identity.pack(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int, start: int, nbytes: int) -> None:
    for offset in range(0, nbytes, _PIECE):
        piece = min(_PIECE, nbytes - offset)
        # A memfd has no quota: the kernel would not refuse, and its OOM killer would kill some process.
        # All ranks allocate at once, so the free memory is read again before every piece.
        left = available_memory()
        if nbytes - offset > left:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {left} bytes left")
        os.posix_fallocate(descriptor, start + offset, piece)


@contextlib.contextmanager
def _allocating(nbytes: int) -> Iterator[None]:
    """Turn an OSError for lack of memory into an InterlaceError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EINVAL):
            raise
        raise InterlaceError(
            f"cannot allocate {nbytes} bytes of shared memory: {error.strerror or 'no space'}"
        ) from error


def map_segment(descriptor: int, identity: Identity) -> Mapping:
    """Map a segment, which a peer may have created, after checking that it is the right one."""
    subject = f"shared segment of rank {identity.rank}"
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InterlaceError(f"{subject}: not a memfd ({error})") from error
    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & needed != needed:
        raise InterlaceError(f"{subject}: not sealed (seals {seals:#x}); its size could change")
    # Read the header from the file first: mapping a file of the wrong size would end in SIGBUS.
    identity.check(os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0"), subject)
    size = os.fstat(descriptor).st_size
    if size != PAGE + identity.nbytes:
        raise InterlaceError(f"{subject}: file has {size} bytes, expected {PAGE + identity.nbytes}")
    return Mapping(descriptor, size)


def available_memory() -> int:
    """Return the bytes that can be allocated now, as the kernel and this process's control groups say."""
    amounts = [1 << 62]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    groups = Path("/proc/self/cgroup").read_text()
    return min(*amounts, *left_in_groups(groups, Path("/sys/fs/cgroup")))


def left_in_groups(groups: str, top: Path) -> Iterator[int]:
    """Yield the bytes left in each of these control groups, as the kernel lists them, and in their parents.

    Cached files that are not in use count as free: the kernel drops them when memory is short.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):  # version 2 has one hierarchy, which has no name
            continue
        limit, used, cache, name = _GROUP_FILES[controllers]
        for folder in (top / name / path.lstrip("/") / "x").parents:
            if folder.is_relative_to(top / name):
                with contextlib.suppress(OSError, ValueError):  # the group does not exist, or "max"
                    left = int((folder / limit).read_text()) - int((folder / used).read_text())
                    stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                    yield left + int(stat.get(cache, 0))


class SharedRanges(dict[int, "tuple[int, int, list[Array]]"]):
    """The arrays of callers that a group shares, with the same number on all ranks while they exist here.

    ``interlace.symmetric_memory`` shares them. A collective on a tensor inside one needs no staging,
    because the peers read it in place. An entry has the address and size of this rank's array, which must
    not be kept alive here, and the arrays of all other ranks.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._count = 0

    def add(self, arrays: Sequence[Array]) -> None:
        """Add one array per rank, of equal sizes. Called in the same order on all ranks."""
        self._count = number = self._count + 1
        own_array = arrays[self._rank]
        if own_array.nbytes:
            other_arrays = [a for r, a in enumerate(arrays) if r != self._rank]
            self[number] = own_array.ctypes.data, own_array.nbytes, other_arrays
            weakref.finalize(own_array, self.pop, number, None)

    def find(self, address: int, nbytes: int) -> tuple[int, int]:
        """Return the number of the range that holds these bytes, and their offset; number 0 for none."""
        for number, (start, size, _) in list(self.items()):
            if start <= address and address + nbytes <= start + size:
                return number, address - start
        return 0, 0

    def array(self, number: int, rank: int) -> Array:
        return self[number][2][rank - (rank > self._rank)]
