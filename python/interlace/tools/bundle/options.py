"""The description of a bundle: options that its kernels are built with, and the form of an op."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch

from interlace.kernels.signal import MAX_WORLD_SIZE
from interlace.ops.collectives.low_latency import EPOCHS_OFFSET, WORDS_OFFSET
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default
from interlace.tools.catalogue import catalogue
from interlace.tools.catalogue.catalogue import (
    DTYPES,
    MANY_ROWS,
    Entry,
    ExpertsVariant,
    MatmulVariant,
    NormVariant,
)

# Not of one build: which path is an option, and how many programs is said at the launch.
_NOT_OVERRIDDEN = ("descriptors", "programs", "warp_roles")


RANKS = (f"0 < world_size <= {MAX_WORLD_SIZE}", "0 <= rank < world_size")
ROWS = ("len(rows) == world_size", "min(rows) >= 0", "max(rows) > 0")
WORDS = {"epochs_offset": str(EPOCHS_OFFSET), "words_offset": str(WORDS_OFFSET)}


@dataclass(frozen=True)
class KernelOptions:
    """Options that specialise the kernels of a bundle. The world size does not.

    ``dtype`` by Triton's name. ``weight`` is "kn" (contiguous along N) or "nk" (along K), ``bias`` "",
    "n" or "m", ``path`` "auto", "tma" or "pointers", ``norm`` "rms" or "layer", of rows that get a residual
    and, with ``quantize``, "fp8" or "fp8_static", are made fp8; ``gather`` "none", or which of them all
    ranks get, "normed" or "both" with the sums. ``head_dim`` is of an attention, ``value_dim`` of its
    values, 0 for the same; ``topk`` are slots of a token, ``experts`` those of a rank. For ``rows`` per
    rank, ``columns`` and ``inner`` the tiles are chosen; where the last two are multiples of 16, so they
    must be at every launch. ``overrides`` are values of the configuration.
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
    head_dim: int = 128
    value_dim: int = 0
    topk: int = catalogue.TOPK
    experts: int = catalogue.EXPERTS
    overrides: dict[str, int] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def configuration(self, arch: int) -> Configuration:
        """The default one of ``arch`` with the overrides."""
        default = gpu_default(arch, self.torch_dtype, self.rows, self.columns, self.inner)
        return replace(default, **self.overrides)  # type: ignore[arg-type]

    @property
    def variant(self) -> NormVariant:
        return NormVariant(self.norm, self.quantize, "" if self.gather == "none" else self.gather)

    @property
    def routed(self) -> ExpertsVariant:
        return ExpertsVariant(self.topk, self.experts)

    def operands(self, arch: int) -> MatmulVariant:
        possible = gpu_default(arch, self.torch_dtype, self.rows).descriptors
        possible = possible and self.columns % 16 == 0 and self.inner % 16 == 0
        if self.path == "tma" and not possible:
            raise ValueError(
                f"path is 'tma': sm_{arch} does not have it for {self.torch_dtype} with "
                f"{self.columns} columns and inner dimension {self.inner}"
            )
        return MatmulVariant(
            self.dtype,
            self.weight,
            possible and self.path != "pointers",
            self.columns,
            self.inner,
            self.bias,
            self.rows,
            self.overrides,
        )


@dataclass(frozen=True)
class BundleOp:
    """One op of a bundle: ``entries`` are its kernels, ``grids`` by kernel how many programs are launched.

    They are launched in this order; finish_kernel follows on the stream, but where the memory is that of
    ``words`` that carry their flags. Those of ``apart`` wait for nothing; if all are, there is no
    workspace. ``tables`` name the quantity that an argument points to; ``options`` are those that apply.
    ``names``: of a kernel's arguments those that mean something else there than in the others, and what
    they are called.
    """

    entries: Callable[[int, KernelOptions], list[Entry]]
    options: tuple[str, ...]
    grids: dict[str, str]
    quantities: dict[str, str]
    tables: dict[str, str] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    words: bool = False
    names: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def workspace(self) -> bool:
        return self.grids.keys() != set(self.apart)

    @property
    def finished(self) -> bool:
        """Whether finish_kernel follows."""
        return self.workspace and not self.words

    def checked(self, name: str, options: KernelOptions) -> None:
        """Raises ValueError for an option that ``name`` does not have, or that has no such value."""
        for one in fields(KernelOptions):
            changed = getattr(options, one.name) != getattr(KernelOptions(), one.name)
            if changed and one.name not in (*self.options, "dtype", "rows", "overrides"):
                raise ValueError(f"{one.name} is no option of {name}")
        known = {f.name for f in fields(Configuration)} - set(_NOT_OVERRIDDEN)
        for key, value in options.overrides.items():
            if key not in known:
                raise ValueError(f"{key} is not in the configuration: {', '.join(sorted(known))}")
            check_values({key: value})
            if value == 0 and not isinstance(value, bool):
                raise ValueError(f"{key} must be positive, got {value}")


Make = Callable[[int, KernelOptions], list[Entry]]
