"""Entries of the catalogue: collectives by the switch, and those whose words carry flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from interlace.runtime.algorithms import low_latency as small
from interlace.runtime.algorithms import multimem as switch
from interlace.runtime.compiler.catalogue_group import RANKS, AbsentGroup, entry, launched, meta
from interlace.runtime.compiler.entry import Entry
from interlace.runtime.tuning.configuration import Configuration

ELEMENTS = 1 << 20  # of a shard
UNITS = {torch.int32: "", torch.int16: "by 2 bytes", torch.int8: "by bytes"}
"""What the units of a low-latency kernel are called in the name of an entry."""


def by_the_switch(
    arch: int, name: str, dtype: torch.dtype, configuration: Configuration
) -> Iterator[Entry]:
    """The kernels of ``kernels/collectives/multimem.py`` for ``dtype``, from 9.0 on."""
    if arch < 90:
        return
    whole, lengths = meta(RANKS * ELEMENTS, dtype=dtype), [ELEMENTS] * RANKS
    part = whole[:ELEMENTS]

    def run(group: Any) -> None:
        switch.all_gather(group, part, whole, lengths, configuration)
        switch.reduce_scatter(group, whole, part, lengths, configuration)
        switch.all_reduce(group, part, part, configuration)

    for launch in launched(run, AbsentGroup(multicast=True)):
        yield entry(launch, name, arch)


def low_latency(arch: int, dtypes: Mapping[str, torch.dtype]) -> Iterator[Entry]:
    """The kernels of ``kernels/collectives/low_latency.py``.

    Their polls are relaxed, because what they look at is the data itself: nothing has to be acquired.
    """

    def made(variant: str, run: Callable[[Any], object]) -> Entry:
        (launch,) = launched(run)
        return entry(launch, variant, arch, ignore=("weak poll",))

    for unit, word in UNITS.items():
        # behind the first unit, so that no larger ones do
        data = meta(65, dtype=unit)[0 if unit is torch.int32 else 1 :]
        yield made(word, lambda group, data=data: small.all_gather(group, data, data))  # type: ignore[misc]
        yield made(word, lambda group, data=data: small.broadcast(group, data, 0))  # type: ignore[misc]
    for name, dtype in dtypes.items():
        data = meta(64, dtype=dtype)
        yield made(name, lambda group, data=data: small.all_reduce(group, data, average=False))  # type: ignore[misc]
    data = meta(65, dtype=torch.bfloat16)
    yield made("bf16 average", lambda group: small.all_reduce(group, data[:64], average=True))
    yield made("bf16 by 2 bytes", lambda group: small.all_reduce(group, data[1:], average=False))
