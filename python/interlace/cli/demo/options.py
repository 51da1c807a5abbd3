"""The options of ``interlace demo``."""

from __future__ import annotations

from dataclasses import dataclass

from interlace.cli.output.options import option, positive_int

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class DemoOptions:
    """Arguments of the command; None takes the default, or the size of the input file."""

    ranks: int = option(4, type=positive_int, help="world size (default 4)")
    place: str = option("sim", choices=("sim", "shm", "cuda"))
    m: int | None = option(None, type=positive_int, help="rows of the whole activations (tokens)")
    n: int | None = option(None, type=positive_int, help="hidden features of the MLP")
    k: int | None = option(None, type=positive_int, help="features of the activations")
    dtype: str = option("bfloat16", choices=DTYPES)
    seed: int = option(0, type=int, help="schedule, embedding and weights")
    text: str | None = option(None, metavar="FILE", help="text to take the tokens from")
    input: str | None = option(None, metavar="FILE", help="activations and weights, .npy or .pt")
    trace: str | None = option(None, metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    plot: str | None = option(None, metavar="FILE", help="write the timeline as PNG")
