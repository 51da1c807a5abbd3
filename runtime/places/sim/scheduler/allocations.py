"""Allocations by address: the memory of interpreted programs, and its names.

Symmetric memory is known from its beginning. A tensor is known from the first launch that has it as an
argument, or when code asks for its address, for example for a table. Any other tensor is looked for among
the living objects when a program first uses its address as a number.
"""

import contextlib
import functools
import gc
import sys
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from interlace.runtime.core import launch
from interlace.runtime.core.accesses import Numbers
from interlace.runtime.core.memory import RED_ZONE


@dataclass(eq=False)
class MemoryRange:
    """Memory from ``base`` to before ``end``; ``freed`` means that nothing refers to it any more.

    ``owners``: for a tensor's memory, the storages that keep it. ``read_only``: why nothing may be stored
    there, through any pointer, or "". ``parts``: kernels' names for tensors in it, by first byte, end, and
    size of an element.
    """

    base: int
    end: int
    name: str
    freed: bool = False
    owners: list[weakref.ref[torch.UntypedStorage]] | None = None
    read_only: str = ""
    parts: dict[tuple[int, int, int], str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.end - self.base

    def free(self) -> None:
        self.freed = True

    def is_gone(self) -> bool:
        if self.owners is not None:
            for owner in self.owners:
                if owner() is not None:
                    self.freed = False
                    return False
            self.freed = True
        return self.freed

    def has(self, low: int, high: int) -> bool:
        return self.base <= low and high <= self.end

    def call(self, tensor: torch.Tensor, name: str) -> None:
        """Note the ``name`` of ``tensor``, in this memory, in a kernel; the first name stays."""
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        low, size = tensor.data_ptr() - self.base, tensor.element_size()
        high = low + (last + 1) * size
        if tensor.numel() and high - low < self.nbytes:
            self.parts.setdefault((low, high, size), name)

    def part(self, offset: int) -> str:
        """Return the element at a byte, in the smallest such tensor, as "inbox[3]"; otherwise ""."""
        around = [each for each in self.parts if each[0] <= offset < each[1]]
        if not around:
            return ""
        low, high, size = min(around, key=lambda each: each[1] - each[0])
        return f"{self.parts[low, high, size]}[{(offset - low) // size}]"


def byte_of(memory: str, offset: int, part: str) -> str:
    return f"{memory}, byte {offset}" + (f" ({part})" if part else "")


@dataclass(frozen=True)
class Origin:
    """The origin of a pointer: its allocation, and the address at which it began.

    ``argument`` names the kernel's argument; it is empty for a number that became a pointer. ``read_only``:
    why nothing may be stored there, or "".
    """

    allocation: MemoryRange
    start: int
    argument: str = ""
    read_only: str = ""


@dataclass
class Allocations:
    """All known memory. ``complete``: an address in no allocation and no tensor belongs to no memory.

    ``nobodys``: addresses for which this was found, until user code may have made other tensors.
    """

    complete: bool = True
    nobodys: list[range] = field(default_factory=list)
    _bases: list[int] = field(default_factory=list)
    _by_base: dict[int, MemoryRange] = field(default_factory=dict)
    _counts: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, rank: int, base: int, nbytes: int, kind: str = "symmetric buffer") -> MemoryRange:
        """Add memory by the name "symmetric buffer 0 of rank 1", and return it."""
        name = f"{kind} {self._counts[rank, kind]} of rank {rank}"
        self._counts[rank, kind] += 1
        return self.put(base, nbytes, name)

    def put(self, base: int, nbytes: int, name: str) -> MemoryRange:
        """Add memory that has a name already; forget the old memory at these addresses."""
        memory = MemoryRange(base, base + nbytes, name)
        if nbytes > 0:
            first = max(0, bisect_right(self._bases, base) - 1)
            for other in self._bases[first : bisect_left(self._bases, memory.end)]:
                if self._by_base[other].end > base:
                    self._bases.remove(other)
                    self._by_base.pop(other).free()
            insort(self._bases, base)
            self._by_base[base] = memory
        return memory

    def at(self, address: int) -> MemoryRange | None:
        position = bisect_right(self._bases, address) - 1
        found = self._by_base[self._bases[position]] if position >= 0 else None
        return found if found is not None and address < found.end else None

    def has_all(self, addresses: Iterable[int], size: int) -> bool:
        """Return whether elements of ``size`` bytes exist at all of them, aligned, and not read-only."""
        for address in addresses:
            found = self.at(address)
            if address % size or found is None or address + size > found.end:
                return False
            if found.is_gone() or found.read_only:
                return False
        return True

    def find(self, address: int) -> str | None:
        """Return an address's name, as "symmetric buffer 0 of rank 1, byte 64"; None for other memory."""
        found = self.at(address)
        if found is None:
            return None
        offset = address - found.base
        return byte_of(found.name, offset, found.part(offset))

    def part(self, name: str, offset: int) -> str:
        return next((e.part(offset) for e in self._by_base.values() if e.name == name), "")

    def name(self, address: int) -> str:
        return self.find(address) or f"address {address:#x}"

    def near(self, address: int) -> MemoryRange | None:
        """Return the allocation that most likely ends before ``address``, or begins after it."""
        position = bisect_right(self._bases, address)
        around = [self._by_base[base] for base in self._bases[max(0, position - 1) : position + 1]]
        found = min(around, key=lambda each: _distance(each, address), default=None)
        return found if found is not None and _distance(found, address) <= RED_ZONE else None

    def of_tensor(self, tensor: torch.Tensor, rank: int) -> MemoryRange:
        """Return the memory of ``tensor``; a view of it may extend to the end of the storage."""
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._of_storage(tensor.untyped_storage(), f"{dtype} tensor of {shape}", rank)

    def _of_storage(self, storage: torch.UntypedStorage, kind: str, rank: int) -> MemoryRange:
        base = storage.data_ptr()
        end = base + storage.nbytes() if base else 0  # a meta tensor has no memory
        found = self.at(base)
        known = found is not None and (found.owners is not None or not found.freed)
        if found is None or not known or not found.has(base, end):
            found = self.put(base, end - base, f"a {kind} on rank {rank}")
            found.owners = []
        if found.owners is not None and not any(owner() is storage for owner in found.owners):
            found.owners = [owner for owner in found.owners if owner() is not None]
            found.owners.append(weakref.ref(storage))
        return found

    def taken(self, asked: torch.Tensor | torch.UntypedStorage, rank: int) -> None:
        """Note that code has asked for the address of ``asked``, and may use it after the tensor's end."""
        found = self.at(asked.data_ptr())
        if found is not None and not found.is_gone():
            return
        if isinstance(asked, torch.Tensor):
            base = asked._base  # the values of a sparse tensor have a base without storage
            whole = asked if base is None or base.layout is not torch.strided else base
            self.of_tensor(whole, rank)
        else:
            self._of_storage(asked, f"storage of {asked.nbytes()} bytes", rank)

    def of_argument(self, kernel: object, rank: int, path: str, tensor: object) -> Origin | None:
        tensor = getattr(tensor, "base", tensor)  # Triton reinterprets one by a wrapper
        if not isinstance(tensor, torch.Tensor):
            return None
        read_only = ""
        if path in launch.read_only(kernel):
            read_only = "the kernel declares it const"
        elif torch._debug_has_internal_overlap(tensor) == 1:
            read_only = "the tensor is expanded, several of its elements share memory"
        return Origin(self.of_tensor(tensor, rank), tensor.data_ptr(), path, read_only)

    def of_number(self, address: int, rank: int) -> MemoryRange | None:
        """Return the allocation that a program means by ``address``; a freed one if that was there."""
        found = self.at(address)
        nobodys = any(address in nobody for nobody in self.nobodys)
        if (found is None or found.is_gone()) and self.complete and not nobodys:
            tensors, around = _tensors_with(address)
            if not tensors:  # it may be the first of many wrong addresses of a loop
                self.nobodys.append(around)
            for tensor in tensors:
                found = self.of_tensor(tensor, rank)
        return found

    def known(self, addresses: Numbers, size: int) -> Any:
        """Return for each of ``addresses`` whether the element of ``size`` bytes is in existing memory."""
        if not self._bases:
            return np.zeros(addresses.shape, bool)
        ranges = [self._by_base[base] for base in self._bases]
        bases = np.array(self._bases, np.uint64)
        ends = np.array([0 if range_.is_gone() else range_.end for range_ in ranges], np.uint64)
        places = np.searchsorted(bases, addresses, "right").astype(np.int64) - 1
        return (places >= 0) & (addresses + np.uint64(size) <= ends[places])


@contextlib.contextmanager
def addresses_told(taken: Callable[[torch.Tensor | torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``taken`` with each object whose address or array other code asks for."""
    with contextlib.ExitStack() as leaving:
        for kind, name in _TELL:
            asked = getattr(kind, name)
            if name in vars(kind):  # it belongs to an enclosing run
                leaving.callback(setattr, kind, name, asked)
            else:
                leaving.callback(delattr, kind, name)
            setattr(kind, name, _telling(asked, taken))
        yield


_TELL = ((torch.Tensor, "data_ptr"), (torch.Tensor, "numpy"), (torch.UntypedStorage, "data_ptr"))


def _telling(asked: Callable[..., object], taken: Callable[[Any], None]) -> Callable[..., object]:
    @functools.wraps(asked)
    def tell(whose: object, *args: object, **named: object) -> Any:
        found = asked(whose, *args, **named)
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if not asking.startswith(("interlace.", "interlace_verify.")):
            taken(whose)
        return found

    return tell


def together(names: Iterable[str]) -> str:
    """Return words by their names: both of two; of more, the first and the number of the others."""
    first, *more = dict.fromkeys(names)
    if len(more) > 1:
        return f"{first} and {len(more)} more words"
    for memory, _, byte in (each.rpartition(", ") for each in more):
        return f"{first} and {byte if memory == first.rpartition(', ')[0] else more[0]}"
    return first


def _distance(allocation: MemoryRange, address: int) -> int:
    return max(allocation.base - address, address - allocation.end, 0)


def _tensors_with(address: int) -> tuple[list[torch.Tensor], range]:
    """Return the tensors with storage at this address, from the youngest generation that has any.

    If there are none, also return the addresses around it that no tensor has.
    """
    kinds, new = {torch.Tensor}, [torch.Tensor]
    while new:
        new = [kind for each in new for kind in each.__subclasses__() if kind not in kinds]
        kinds.update(new)
    begin, end = 0, 1 << 64
    for generation in range(3):
        tensors = [each for each in gc.get_objects(generation) if type(each) in kinds]
        spans = [_span(tensor) for tensor in tensors]
        if found := [each for each, at in zip(tensors, spans, strict=True) if address in at]:
            return found, range(0)
        begin = max([begin, *(at.stop for at in spans if at.stop <= address)])
        end = min([end, *(at.start for at in spans if at.start > address)])
    return [], range(begin, end)


def _span(tensor: torch.Tensor) -> range:
    """Return the addresses of its storage; none if it has no memory of this process."""
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        return range(begin, begin + storage.nbytes() if tensor.device.type == "cpu" else begin)
    except (RuntimeError, NotImplementedError):
        return range(0)
