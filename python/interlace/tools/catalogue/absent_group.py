"""Options of kernels, and a group without ranks on which ops run up to their launches, for the catalogue.

Tensors are torch's "meta" ones, with a dtype, a shape and address 0, a multiple of 16 like nearly every
address. Copies and signals are ignored.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from interlace.kernels.signal import HEADER_WORDS
from interlace.runtime.compiler.request import Entry
from interlace.runtime.core.launch import KernelLaunch, specialise
from interlace.runtime.core.memory import WORD, Layout, SymmetricBuffer, Workspace
from interlace.runtime.core.place import Nodes
from interlace.runtime.tuning.configuration import Configuration, gpu_default

RANKS = 16
MULTICAST = 1 << 40
_BYTES = 1 << 40
MANY_ROWS = 4096
EXPERTS = 2
TOPK = 8  # slots of a token
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class KernelOptions:
    """Options that specialise the kernels of a bundle. The world size does not.

    ``dtype`` by Triton's name. ``weight`` is "kn" (contiguous along N) or "nk" (along K), ``bias`` "", "n"
    or "m", ``path`` "auto", "tma" or "pointers". ``norm`` is "rms" or "layer", for rows that get a
    residual. ``quantize`` "fp8" or "fp8_static" makes the normed rows fp8. With the name of a block-scaled
    format it makes packed rows, which are not gathered. ``gather``: "none", or the rows that all ranks get,
    "normed" or "both" with the sums. ``format`` is the block-scaled operands', with packed rows
    (``kernels/block_scales.py``). Then ``inner`` counts numbers, K of a launch is the bytes of a row, and
    ``dtype`` the output's. ``head_dim`` is an attention's, ``value_dim`` its values' (0: the same);
    ``topk`` are a token's slots, ``experts`` a rank's. The tiles are chosen for ``rows`` per rank,
    ``columns`` and ``inner``. If the last two are multiples of 16, they must be at every launch.
    ``overrides`` are values of the configuration.
    """

    dtype: str = "bf16"
    weight: str = "kn"
    bias: str = ""
    average: bool = False
    path: str = "auto"
    rows: int = MANY_ROWS
    columns: int = 4096
    inner: int = 4096
    norm: str = "rms"
    quantize: str = ""
    gather: str = "none"
    format: str = ""
    head_dim: int = 128
    value_dim: int = 0
    topk: int = TOPK
    experts: int = EXPERTS
    overrides: dict[str, int] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def configuration(self, arch: int) -> Configuration:
        default = gpu_default(arch, self.torch_dtype, self.rows, self.columns, self.inner)
        return replace(default, **self.overrides)  # type: ignore[arg-type]


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


def launches_of(
    op: Callable[..., object], *values: Any, group: AbsentGroup | None = None, **named: Any
) -> list[KernelLaunch]:
    group = group or AbsentGroup()
    op(group, *values, **named)
    return group.launches


def entry(launch: KernelLaunch, variant: str, arch: int, **more: Any) -> Entry:
    """The compilation that ``launch`` needs on ``arch``; ``more`` are fields of the entry."""
    function = launch.kernel.fn.__module__, launch.name, "", arch
    values = specialise(launch.kernel, launch.arguments)
    more |= {"variant": variant, "max_registers": launch.options.get("maxnreg", 0)}
    return Entry(*function, *values, launch.num_warps, launch.num_stages, **more)
