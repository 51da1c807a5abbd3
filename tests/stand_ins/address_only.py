"""Kernels run by address only: nothing is allocated, every address is checked.

Programs run in the interpreter. Loads give zeros, stores go nowhere, and waits end at once. Each address
must lie in the right tensor or workspace, and no int32 sum or product may wrap. Loop variables have the
types that the compiler gives them, and long loops do their first and last steps only.
"""

import builtins
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from interlace.kernels import products as matmul, signal, transfer
from interlace.kernels.collectives import reduction
from interlace.kernels.matmul import (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_reduce_scatter as matmul_all_reduce,
)
from interlace.runtime.core.accesses import Atomic
from interlace.runtime.core.launch import KernelLaunch, outside
from interlace.runtime.places.sim.interpreter.session import program_function, session
from stand_ins.replaced import replaced

MODULES = (
    all_gather_matmul,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduction,
    signal,
    transfer,
)
SPACING = 1 << 42


@dataclass
class Fake:
    """A tensor with all that a kernel argument needs."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Memory:
    """The permitted memory: (first byte, last byte + 1) of fake tensors and of real tables."""

    extents: list[tuple[int, int]] = field(default_factory=list)
    real: list[tuple[int, int]] = field(default_factory=list)

    def fake(self, nbytes: int) -> int:
        address = (len(self.extents) + 2) * SPACING
        self.extents.append((address, address + nbytes))
        return address

    def holds(self, addresses: np.ndarray, ranges: list[tuple[int, int]], size: int) -> np.ndarray:
        inside = np.zeros(addresses.shape, bool)
        for first, end in ranges:
            inside |= (addresses >= first) & (addresses + size <= end)
        return inside


class Checker:
    """Interpreter hooks that check addresses and access no memory."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.bad, self.touched = memory, [], 0

    def _check(self, what: str, pointers: Any, mask: Any) -> bool:
        """Return whether this access is to a real table and has to be done."""
        addresses = pointers.data.astype(np.int64).ravel()
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, pointers.data.shape).ravel()]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        if addresses.size and self.memory.holds(addresses, self.memory.real, size).all():
            return True
        inside = self.memory.holds(addresses, self.memory.extents, size)
        self.touched = max([self.touched, *(addresses % SPACING).tolist()])
        if not inside.all():
            self.bad.append(f"{what} at {hex(int(addresses[~inside][0]))}")
        return False

    def load(self, pointers: Any, mask: Any, perform: Callable[[], Any]) -> Any:
        if self._check("load", pointers, mask):
            return perform()
        kind = pointers.get_element_ty()
        zeros = np.zeros(pointers.data.shape, interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(zeros, kind)

    def store(self, pointers: Any, value: Any, mask: Any, perform: Callable[[], Any]) -> None:
        if self._check("store", pointers, mask):
            perform()

    def atomic(self, atomic: Atomic, perform: Callable[[], Any]) -> Any:
        self._check("signal", atomic.pointers, atomic.mask)
        served = np.full(atomic.pointers.data.shape, 1 << 40, np.int64)
        return interpreter.TensorHandle(served, tl.int64)

    def origin(self, address: int) -> None: ...

    def barrier(self) -> None: ...

    def fence(self, sem: str, scope: str) -> None: ...

    def pause(self) -> None: ...

    def launch(self, *arguments: Any) -> None:
        raise AssertionError("a program cannot launch")

    def wrapping(self, binary_op: Callable[..., Any]) -> Callable[..., Any]:
        def checked(lhs: Any, rhs: Any, op: Any) -> Any:
            out = binary_op(lhs, rhs, op)
            narrow = lhs.data.dtype == rhs.data.dtype == np.int32
            if narrow and op in (np.add, np.subtract, np.multiply):
                exact = op(lhs.data.astype(np.int64), rhs.data.astype(np.int64))
                if (exact != out.data).any():
                    self.bad.append(f"int32 {op.__name__} wraps: {int(exact.ravel()[-1])}")
            return out

        return checked


def typed_range(*bounds: Any, **hints: Any) -> Iterator[Any]:
    """``range`` with the compiler's types: int32 unless a bound is int64."""
    values, wide = [], False
    for bound in bounds:
        bound = getattr(bound, "value", bound)
        handle = getattr(bound, "handle", None)
        values.append(int(bound if handle is None else handle.data.ravel()[0]))
        wide |= handle is not None and handle.data.dtype.itemsize == 8
        wide |= handle is None and abs(values[-1]) >= 1 << 31
    numpy_type, kind = (np.int64, tl.int64) if wide else (np.int32, tl.int32)
    steps = builtins.range(*values)
    chosen = steps if len(steps) <= 6 else [*steps[:2], *steps[-2:]]
    for value in chosen:
        yield tl.tensor(interpreter.TensorHandle(np.array([value], numpy_type), kind), kind)


def run_programs(memory: Memory, launch: KernelLaunch, tiles: int) -> Checker:
    """Run the first and the last few of ``tiles`` programs, each with about one tile."""
    checker, arguments = Checker(memory), dict(launch.arguments)
    kept = {}

    def faked(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(faked, value))
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            nbytes = sum((e - 1) * s for e, s in zip(value.shape, value.stride(), strict=True)) + 1
            key = id(value)
            kept.setdefault(key, Fake(memory.fake(nbytes * value.element_size()), value.dtype))
            return kept[key]
        if isinstance(value, torch.Tensor):
            memory.real.append((value.data_ptr(), value.data_ptr() + value.nbytes))
        return value

    arguments = {name: faked(value) for name, value in arguments.items()}
    programs = tiles + outside(arguments).get("COPIERS", 0)
    ranges = [(vars(module), "range", typed_range) for module in (*MODULES, tl)]
    with replaced(*ranges[:-1]), session(checker, shortcuts=False) as builder:
        wrapped = checker.wrapping(builder.binary_op)
        with replaced(ranges[-1], (builder, "binary_op", wrapped)):
            body = program_function(launch.kernel, arguments)
            for program in sorted({0, 1, programs // 2, programs - 2, programs - 1}):
                builder.grid_dim, builder.grid_idx = (programs, 1, 1), (program, 0, 0)
                body()
    return checker
