"""Float formats that PTX converts and multiplies: those of 4 to 8 bits and tf32, besides fp16 and bf16.

``ue8m0`` is a scale, a power of two without a sign. tf32 stands in a register as the fp32 number it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from interlace.runtime.numerics.float_formats import (
    HALF,
    NARROW,
    STORED_AS_BITS,
    Format,
    encode,
    values_of,
)
from interlace.runtime.ptx.types import TYPES, Array

Rounding = Callable[[Array], Array]
"""Of numbers in units of the last place."""


def _away(units: Array) -> Array:
    return np.copysign(np.floor(np.abs(units) + 0.5), units)


ROUNDINGS: dict[str, Rounding] = {
    "rn": np.rint,
    "rna": _away,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}


@dataclass(frozen=True)
class NarrowFloat:
    """``bits`` of one among several in a register, ``form`` but for the scale."""

    name: str
    bits: int
    form: Format | None = None

    @property
    def raw(self) -> Any:
        return np.dtype(f"u{max(1, self.bits // 8)}")

    def decode(self, bits: Array) -> Array:
        """As fp32, which holds each of them."""
        if self.name == "tf32":  # tensor cores do not look at the last bits
            return (bits & np.uint32(0xFFFFE000)).view(np.float32)
        if self.bits == 16:
            return TYPES[self.name].decode(bits.astype(np.uint16))
        return _VALUES[self.name][bits]

    def encode(self, values: Array, rounding: Rounding, *, saturates: bool = False) -> Array:
        """``saturates``: what is too large becomes the largest number, not infinity."""
        if self.form is None:
            return _scale(values, rounding, 254 if saturates else 255)
        form = replace(self.form, overflow=self.form.largest) if saturates else self.form
        found = encode(values, form, rounding)
        return found << np.uint32(13) if self.name == "tf32" else found


def _scale(values: Array, rounding: Rounding, infinity: int) -> Array:
    """The exponent of magnitudes, up or down; 254 is the largest, and 255 a nan."""
    mantissa, exponent = np.frexp(np.abs(values.astype(np.float64)))
    above = (rounding is np.ceil) & (mantissa > 0.5)
    code = np.maximum(exponent + 126 + above, 0)
    code = np.where((code > 254) | np.isinf(values), infinity, code)
    return np.where(np.isnan(values), 255, np.where(values == 0, 0, code)).astype(np.uint8)


_VALUES = {
    name: values_of(form, 0x7C if name == "e5m2" else None)
    for name, form in NARROW.items()
    if form.bits <= 8
}
_VALUES["ue8m0"] = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)

_PLACES = {"e2m1": 4, "tf32": 32}  # the others have 8 bits each in a register
FORMATS = {n: NarrowFloat(n, _PLACES.get(n, 8), form) for n, form in NARROW.items()}
FORMATS |= {
    "ue8m0": NarrowFloat("ue8m0", 8),
    "f16": NarrowFloat("f16", 16, HALF),
    "bf16": NarrowFloat("bf16", 16, STORED_AS_BITS["bf16"]),
}
