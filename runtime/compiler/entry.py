"""One compilation of the catalogue, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from interlace.runtime.core.kernel_arguments import outside

Constant = int | str | bool


@dataclass(frozen=True)
class Entry:
    """One kernel variant for one architecture.

    ``module`` and ``kernel`` name the function. ``types`` are Triton's names of all arguments ("*bf16",
    "i32"), by path (``kernel_arguments.py``); "constexpr" stands for those fixed at compile time, whose
    values are ``constants``. ``divisible`` lists the arguments that are multiples of 16 (pointers: 16-byte
    aligned). ``default`` is False for what a call gets only with an override, or with operands whose
    strides and bases rule TMA out. ``libraries`` are (name, path) of bitcode that it is linked with.
    ``ignore`` names rules of lint that do not apply to the kernel, ``max_registers`` is what a thread may
    have (0: as many as ptxas thinks right).
    """

    module: str
    kernel: str
    variant: str
    arch: int
    types: dict[str, str]
    constants: dict[str, Constant] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    default: bool = True
    libraries: tuple[tuple[str, str], ...] = ()
    ignore: tuple[str, ...] = ()
    max_registers: int = 0

    @property
    def name(self) -> str:
        return f"{self.kernel.removesuffix('_kernel')} {self.variant}".rstrip()

    @property
    def fixed(self) -> dict[str, Constant]:
        """``constants`` by the names that they have outside: ``BLOCK_M``."""
        return outside(self.constants)

    @property
    def multiplies(self) -> bool:
        """Whether the kernel contains a matmul."""
        return "BLOCK_K" in self.fixed
