"""Loads the package ``interlace_verify`` when a program first needs it."""

import functools
import importlib
from typing import Any

from interlace.runtime.core.errors import PlaceUnavailableError

PACKAGE = "interlace_verify"


@functools.cache
def laboratory(module: str = "") -> Any:
    """Return the package, or a ``module`` of it. PlaceUnavailableError if it is not installed."""
    try:
        return importlib.import_module(f"{PACKAGE}.{module}" if module else PACKAGE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PACKAGE):
            raise
        raise PlaceUnavailableError(
            f"compiled PTX, inline PTX and checks of kernels need the package {PACKAGE}, which comes with "
            "interlace and is not installed: pip install interlace"
        ) from None
