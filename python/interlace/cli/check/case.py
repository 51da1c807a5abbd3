"""One case of ``interlace check``: a call on every rank, and the judgement of what came of it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

import interlace
from interlace.arguments.words import RunPlace
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu import driver
from interlace.runtime.tuning import configuration

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Sizes = tuple[int, ...]


@dataclass
class CheckCase(ABC):
    """``kernels``: those of the catalogue that it runs. ``overrides``: values of the configuration.

    ``branch``: what they do only if they are asked to, with tiles or instructions of its own.

    ``by_switch``: it needs a multicast address. ``by_kernels``: streams of a GPU signal by kernels, and
    not by words that the driver writes.
    """

    op: str
    variant: str
    world_size: int
    sizes: Sizes
    dtype: str
    kernels: tuple[str, ...]
    _: KW_ONLY
    overrides: dict[str, int | bool] = field(default_factory=dict)
    branch: str = ""
    by_switch: bool = False
    by_kernels: bool = False

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.sizes)) + " elements" * (len(self.sizes) == 1)

    @property
    def title(self) -> str:
        return f"{self.op}, {self.variant}, {self.world_size} ranks, {self.shape}, {self.dtype}"

    @contextmanager
    def circumstances(self) -> Iterator[None]:
        """What holds while the case runs."""
        stream_words = driver.stream_words
        if self.by_kernels:
            driver.stream_words = lambda device: None  # type: ignore[assignment]
        try:
            with configuration.override(**self.overrides):
                yield
        finally:
            driver.stream_words = stream_words

    @abstractmethod
    def on_rank(self, seed: int) -> Any:
        """Call the op on the calling rank."""

    def ratio(self, results: Sequence[Any], seed: int) -> float:
        """The worst error over its bound, from what :meth:`on_rank` returned on every rank; here that."""
        return float(max(results))


@dataclass
class Verdict:
    """``ratio``: worst error over its bound; ``error``: what was raised; ``skipped``: why it is left."""

    case: CheckCase
    ratio: float
    seconds: float
    error: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        return not self.error and self.ratio <= 1


def _on_rank(case: CheckCase, seed: int) -> Any:
    """None where the case needs a switch and there is none."""
    if case.by_switch and not default_group().arena.multicast():
        return None
    return case.on_rank(seed)


def run_case(case: CheckCase, device: str, seed: int) -> Verdict:
    start = time.perf_counter()
    place: RunPlace = "cuda" if device == "cuda" else "sim"
    try:
        with case.circumstances():
            results = interlace.run(_on_rank, case.world_size, case, seed, place=place, seed=seed)
        if results[0] is None:
            return Verdict(case, 0.0, 0.0, skipped="memory has no multicast address here")
        elapsed = time.perf_counter() - start
        return Verdict(case, case.ratio(results, seed), elapsed)
    except Exception as error:
        elapsed = time.perf_counter() - start
        return Verdict(case, float("inf"), elapsed, f"{type(error).__name__}: {error}")
