"""Float formats that PTX converts and multiplies, and does not calculate with: of 4 to 8 bits, and tf32.

``ue8m0`` is a scale, a power of two without a sign. tf32 stands in a register as the fp32 number it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from interlace.runtime.numerics.float_formats import NARROW, encode, values_of
from interlace.runtime.ptx.types import Array

Rounding = Callable[[Array], Array]
"""Of numbers in units of the last place."""


@dataclass(frozen=True)
class NarrowFloat:
    """``bits`` in a register; fewer than 8 come two to a byte."""

    name: str
    bits: int

    @property
    def raw(self) -> Any:
        return np.dtype("u4" if self.bits == 32 else "u1")

    def decode(self, bits: Array) -> Array:
        """As fp32, which holds each of them."""
        if self.name == "tf32":  # tensor cores do not look at the last bits
            return (bits & np.uint32(0xFFFFE000)).view(np.float32)
        return _VALUES[self.name][bits]

    def encode(self, values: Array, rounding: Rounding) -> Array:
        if self.name == "tf32":
            return encode(values, NARROW["tf32"], rounding) << np.uint32(13)
        if self.name == "ue8m0":
            return _scale(values, rounding)
        return encode(values, NARROW[self.name], rounding)


def _scale(values: Array, rounding: Rounding) -> Array:
    """The exponent of magnitudes, up or down; 254 is the largest, and 255 a nan."""
    mantissa, exponent = np.frexp(np.abs(values.astype(np.float64)))
    above = (rounding is np.ceil) & (mantissa > 0.5)
    code = np.clip(exponent + 126 + above, 0, 254)
    code = np.where(values == 0, 0, np.where(np.isinf(values), 254, code))
    return np.where(np.isnan(values), 255, code).astype(np.uint8)


_VALUES = {
    name: values_of(form, 0x7C if name == "e5m2" else None)
    for name, form in NARROW.items()
    if form.bits <= 8
}
_VALUES["ue8m0"] = np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)

FORMATS = {name: NarrowFloat(name, form.bits) for name, form in NARROW.items()}
FORMATS["tf32"] = NarrowFloat("tf32", 32)
FORMATS["ue8m0"] = NarrowFloat("ue8m0", 8)
