"""Arguments of every op, for tests and tools: made by name for one rank of a group that is nowhere.

An op has an example without being named here, if its arguments have defaults or the names of other ops';
those that are others stand in its record, as ``Op.examples``. An example is a function of a
:class:`Setting`, so each rank can make the arguments of all. Numbers are small and whole: sums are exact in
every dtype and order.

=============  ===================================================================================
legend
=============  ===================================================================================
rows           by rank: how many rows of the whole are a rank's; the others' are before and behind
width          of all matrices, k and n alike; groups of 2 and of 3 ranks share 6 evenly
=============  ===================================================================================
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Setting:
    """What the arguments of a rank are made for; no two calls have the same numbers."""

    rank: int
    size: int
    dtype: torch.dtype = torch.float32
    call: int = 0
    rows: tuple[int, ...] = ()
    width: int = 6
    argument: str = ""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def uneven(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def total(self) -> int:
        return sum(self.rows)

    def numbers(self, *shape: int, same: bool = False) -> Tensor:
        """Whole ones from -2 to 2; of ``same`` ones all ranks have the same."""
        seed = zlib.crc32(self.argument.encode()) + 1000 * self.call + (0 if same else self.rank)
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(-2, 3, shape, generator=generator)
        if self.dtype.is_complex:
            return torch.complex(made.float(), made.flip(0).float()).to(self.dtype)
        return made.to(self.dtype)

    def of(self, rank: int) -> "Setting":
        return replace(self, rank=rank)

    def everyone(self) -> list["Setting"]:
        return [self.of(rank) for rank in range(self.size)]


Example = Callable[[Setting], Any]
"""Makes an argument of a rank."""


def constant(value: Any) -> Example:
    return lambda setting: value


def own_rows(setting: Setting) -> Tensor:
    return setting.numbers(setting.own, setting.width)


def _square(setting: Setting) -> Tensor:
    return setting.numbers(setting.width, setting.width)


def _vector(setting: Setting) -> Tensor:
    return setting.numbers(setting.width, same=True)


def _wide_vector(setting: Setting) -> Tensor:
    wide = max(setting.dtype, torch.float32, key=lambda each: each.itemsize)
    return _vector(replace(setting, dtype=wide))


EXAMPLES: Mapping[str, Example] = {
    "input": lambda setting: setting.numbers(setting.total, setting.width),
    "weight": _square,
    "weights": lambda setting: [_square(setting), _square(setting).flip(0)],
    "bias": _vector,
    "biases": lambda setting: [_vector(setting), torch.zeros_like(_vector(setting))],
    "norm_weight": _wide_vector,
    "residual": lambda setting: setting.numbers(setting.total, setting.width, same=True),
    "reduce_op": constant("sum"),
    "gather_dim": constant(0),
    "scatter_dim": constant(0),
    "src": constant(1),
    "dst": constant(1),
    "src_dst": lambda setting: [(rank + 1) % setting.size for rank in range(setting.size)],
    "length": lambda setting: setting.own if setting.uneven else None,
    "algorithm": constant("auto"),
    "out_dtype": constant(None),
    "eps": constant(0.5),
    "return_gathered": constant(True),
    "return_received": constant(True),
    "return_rows": constant(True),
}
"""By the name of an argument; a new op with these arguments needs no others."""
