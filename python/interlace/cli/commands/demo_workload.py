"""Options and input of the demo: activations ``[m, k]``, two weights of an MLP, from a text or a file.

A text is cut into words and punctuation; a word becomes a vector by a fixed table, chosen by the
word's checksum, and gets its position added, so that no two rows of the activations are equal. Table
and weights are drawn from the seed. A file holds activations of one's own, and weights if there are any.
"""

import pathlib
import re
import zipfile
import zlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch

from interlace.launcher import PLACES
from interlace.output.machine import refuse_matmul
from interlace.output.options import (
    CommandOptions,
    option,
    positive_int,
    seed_number,
    world_size,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEFAULT_M, DEFAULT_N, DEFAULT_K = 512, 512, 256
VOCABULARY = 4096
SHIPPED_TEXT = "overlap.txt"
KEYS = ("activations", "weight1", "weight2")


@dataclass(frozen=True)
class DemoOptions(CommandOptions):
    """Run the fused ops on real input and draw what happened."""

    ranks: int = option(4, type=world_size, also="--world-size", help="world size (default 4)")
    place: str = option("sim", choices=PLACES, help="where ranks run (default sim)")
    m: int | None = option(None, type=positive_int, help="rows of the whole activations (tokens)")
    n: int | None = option(None, type=positive_int, help="hidden features of the MLP")
    k: int | None = option(None, type=positive_int, help="features of the activations")
    dtype: str = option("bfloat16", choices=DTYPES, help="of everything (default bfloat16)")
    seed: int = option(0, type=seed_number, help="schedule, embedding and weights")
    text: str | None = option(None, metavar="FILE", help="text to take the tokens from")
    input: str | None = option(None, metavar="FILE", help="activations and weights, .npy or .pt")
    trace: str | None = option(None, metavar="FILE", help="write a Chrome/Perfetto trace (JSON)")
    plot: str | None = option(None, metavar="FILE", help="draw the timeline (needs matplotlib)")
    html: str | None = option(None, metavar="FILE", help="write a page to look at what happened")

    def interprets(self) -> bool:
        return self.place != "cuda"


@dataclass(frozen=True)
class Workload:
    """``activations`` [m, k], ``weight1`` [k, n], ``weight2`` [n, k], of one dtype; where they are from."""

    activations: torch.Tensor
    weight1: torch.Tensor
    weight2: torch.Tensor
    origin: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """m, n, k."""
        return (*self.activations.shape[:1], self.weight1.shape[1], self.activations.shape[1])


def from_text(
    path: str | None, dtype: torch.dtype, seed: int, m: int | None, n: int | None, k: int | None
) -> Workload:
    """The first ``m`` tokens of a text, from its beginning again if it is shorter."""
    m, n, k = m or DEFAULT_M, n or DEFAULT_N, k or DEFAULT_K
    if path is None:
        text = (resources.files("interlace") / "data" / SHIPPED_TEXT).read_text("utf-8")
        name = f"{SHIPPED_TEXT}, which ships with interlace"
    else:
        try:
            text = pathlib.Path(path).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {path}: not a text in UTF-8 ({error.reason})") from None
        name = path
    words = re.findall(r"\w+|[^\w\s]", text)
    if not words:
        raise ValueError(f"--text {path}: no words in it")
    refuse_matmul((m, n, k), 8, 1, "sim")
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, k, generator=generator)
    tokens = torch.tensor([zlib.crc32(words[i % len(words)].lower().encode()) for i in range(m)])
    frequency = 10000.0 ** (-torch.arange(k) / k)  # of its position, another in each column
    positions = torch.sin(torch.arange(m)[:, None] * frequency + torch.arange(k))
    activations = embedding[tokens % VOCABULARY] + positions
    weight1, weight2 = _weights(k, n, generator)
    again = f" (its {len(words)}, repeated)" if m > len(words) else ""
    origin = f"{m} tokens{again} of {name}"
    return Workload(activations.to(dtype), weight1.to(dtype), weight2.to(dtype), origin)


def from_file(
    path: str, dtype: torch.dtype, seed: int, m: int | None, n: int | None, k: int | None
) -> Workload:
    """Activations and weights of the user's own. ``m`` takes the first rows; n and k must agree.

    ``.npy``: activations ``[m, k]``. ``.pt``: a tensor, or a dict with "activations" and perhaps
    "weight1" ``[k, n]`` and "weight2" ``[n, k]``. What is missing is drawn from the seed.
    """
    where = f"--input {path}"
    found = _read(path, where)
    activations = _matrix(f"{where}: activations", found["activations"], dtype)
    if m is not None and m > activations.shape[0]:
        raise ValueError(f"{where}: --m {m}, but activations have {activations.shape[0]} rows")
    activations = activations[: m or activations.shape[0]]
    inner = activations.shape[1]
    if k is not None and k != inner:
        raise ValueError(f"{where}: --k {k}, but activations have {inner} columns")
    weights = {
        key: _matrix(f"{where}: {key}", found[key], dtype) for key in KEYS[1:] if key in found
    }
    drawn = [key for key in KEYS[1:] if key not in weights]
    if "weight1" in weights:
        hidden = weights["weight1"].shape[1]
    else:
        hidden = weights["weight2"].shape[0] if "weight2" in weights else n or DEFAULT_N
    if n is not None and n != hidden:
        raise ValueError(f"{where}: --n {n}, but the weights have n = {hidden}")
    refuse_matmul((activations.shape[0], hidden, inner), 8, 1, "sim")
    generated = _weights(inner, hidden, torch.Generator().manual_seed(seed))
    shapes = (("(k, n)", (inner, hidden)), ("(n, k)", (hidden, inner)))
    for key, weight, (form, shape) in zip(KEYS[1:], generated, shapes, strict=True):
        given = tuple(weights.setdefault(key, weight.to(dtype)).shape)
        if given != shape:
            raise ValueError(f"{where}: {key} has shape {given}, must be {form} = {shape}")
    origin = path + (f", {' and '.join(drawn)} drawn from the seed" if drawn else "")
    return Workload(activations, weights["weight1"], weights["weight2"], origin)


def _weights(k: int, n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights that keep the size of what passes through."""
    first = torch.randn(k, n, generator=generator) / k**0.5
    return first, torch.randn(n, k, generator=generator) / n**0.5


def _read(path: str, where: str) -> dict[str, Any]:
    """The contents of the file, by the names in ``KEYS``."""
    suffix = pathlib.Path(path).suffix
    if suffix not in (".npy", ".pt"):
        raise ValueError(f"{where}: must be a .npy or a .pt file")
    if suffix == ".npy":
        try:
            return {"activations": np.load(path, allow_pickle=False)}
        except (ValueError, EOFError) as error:
            raise ValueError(f"{where}: not an array in .npy format ({error})") from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{where}: not a file of torch.save ({_first_line(error)})") from None
    except Exception as error:  # pickle.UnpicklingError: objects other than tensors
        raise ValueError(
            f"{where}: holds more than tensors, or is not a file of torch.save ({_first_line(error)})"
        ) from None
    if isinstance(content, torch.Tensor):
        return {"activations": content}
    if not isinstance(content, dict):
        raise TypeError(f"{where}: must hold a tensor or a dict, got {type(content).__name__}")
    unknown = [str(key) for key in content if key not in KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    if "activations" not in content:
        raise ValueError(f'{where}: the dict has no "activations"')
    return content


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]


def _matrix(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """``value`` as a finite, non-empty matrix of ``dtype``."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            raise TypeError(f"{name}: must be floating point, got {value.dtype}")
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name}: must be floating point, got {value.dtype}")
    if value.dim() != 2 or not value.numel():
        raise ValueError(f"{name}: must be a non-empty matrix, got shape {tuple(value.shape)}")
    if not bool(torch.isfinite(value.float()).all()):
        raise ValueError(f"{name}: has values that are not finite")
    converted = value.detach().to(dtype).contiguous()
    if not bool(torch.isfinite(converted).all()):
        largest = float(value.abs().max())
        raise ValueError(f"{name}: {largest:g} is more than {dtype} can hold")
    return converted
