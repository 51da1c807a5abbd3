"""A group without ranks: ops run on it up to their launches, which become entries of the catalogue.

So no part of a launch is written down twice. Tensors are torch's "meta" ones, with a dtype, a shape and
address 0, a multiple of 16 like nearly every address. Copies and signals are ignored.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from interlace.kernels.signal import HEADER_WORDS
from interlace.runtime.compiler.request import Entry
from interlace.runtime.core.launch import KernelLaunch, specialised
from interlace.runtime.core.memory import WORD, Layout, SymmetricBuffer, Workspace
from interlace.runtime.core.place import Nodes

RANKS = 16
MULTICAST = 1 << 40
_BYTES = 1 << 40
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


class Passed:
    """A stream or a place, as far as algorithms use it: unknown calls are ignored."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **named: None


class AbsentGroup:
    """A compiled ``Communicator`` on a GPU that lists ``launches``; on two nodes if ``put`` says how."""

    rank = 0

    def __init__(self, world_size: int = RANKS, *, multicast: bool = False, put: str = "") -> None:
        self.world_size = world_size
        self.nodes = Nodes(tuple(2 * r // world_size for r in range(world_size)), put or "stores")
        self.launches: list[KernelLaunch] = []
        self.derived: dict[Any, Any] = {}
        self.compute = self.copying = Passed(launch=self.launches.append)
        self.place = Passed(
            nodes=self.nodes if put else None,
            recorder=None,
            interpreted=False,
            compiled=True,
            descriptors=True,
            direct_access=False,
            program_limit=1 << 16,
            launching=contextlib.nullcontext,
        )
        memory = [meta(_BYTES, dtype=torch.uint8)] * world_size
        address = MULTICAST if multicast else 0
        self.buffer = SymmetricBuffer(0, _BYTES, meta(world_size), memory, address)
        offsets = {"epochs_offset": HEADER_WORDS * WORD, "words_offset": 2 * HEADER_WORDS * WORD}
        words = SimpleNamespace(buffer=self.buffer, blocks=1 << 16, **offsets)
        self.arena = SimpleNamespace(words=words)

    def workspace(self, op: str = "") -> Workspace:
        return Workspace(0, self.buffer, HEADER_WORDS * WORD, 1 << 20, self.world_size, op)

    def enqueue(self, op: str, layout: Layout, body: Callable[[Workspace], None]) -> None:
        body(self.workspace(op))

    def table(self, key: Any, rows: Any, *, passing: bool = False) -> torch.Tensor:
        return meta(1)


def launched(
    op: Callable[..., object], *values: Any, group: AbsentGroup | None = None, **named: Any
) -> list[KernelLaunch]:
    group = group or AbsentGroup()
    op(group, *values, **named)
    return group.launches


def entry(launch: KernelLaunch, variant: str, arch: int, **more: Any) -> Entry:
    """The compilation that ``launch`` needs on ``arch``; ``more`` are fields of the entry."""
    function = launch.kernel.fn.__module__, launch.name, "", arch
    values = specialised(launch.kernel, launch.arguments)
    more |= {"variant": variant, "max_registers": launch.options.get("maxnreg", 0)}
    return Entry(*function, *values, launch.num_warps, launch.num_stages, **more)
