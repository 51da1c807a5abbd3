"""matplotlib, which is not there for everybody."""

from __future__ import annotations

from typing import Any


def require_matplotlib() -> Any:
    """matplotlib's Figure. Raises ValueError saying how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install 'interlace[plot]'"
        ) from None
    return Figure
