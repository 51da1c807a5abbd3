"""The place for a group of processes: shared memory if one host has them all, else ``hosts``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from interlace.runtime import hosts
from interlace.runtime.place import Place
from interlace.runtime.place_hosts import HostsPlace
from interlace.runtime.place_shm import ShmPlace

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def connect_place(
    store: Store | None,
    rank: int,
    world_size: int,
    *,
    timeout: float,
    name: str,
    generation: int = 0,
    host: str | None = None,
) -> Place:
    """Join the group ``name``. Collective; ``store`` may be None for a group of one.

    Finds out which ranks share a host. ``timeout``, in seconds, bounds joining and every later wait;
    ``generation`` tells groups of the same name apart that are made one after another. ``host`` says
    what the host is to be known as; ranks that give different ones share nothing. Raises
    CollectiveTimeoutError that names the ranks which did not come.
    """
    if world_size == 1:
        return ShmPlace.connect(
            store, rank, world_size, timeout=timeout, name=name, generation=generation
        )
    if store is None:
        raise ValueError(f"store must not be None for world size {world_size}")
    prefix = f"interlace/{name}/{generation}"
    card = hosts.Card(host or hosts.this_host(), os.getpid(), hosts.store_address(store))
    cards, nonce = hosts.meet(store, rank, world_size, card, prefix=prefix, timeout=timeout)
    place: Place
    if all(other.host == card.host for other in cards):
        place = ShmPlace.connect(
            store, rank, world_size, timeout=timeout, name=name, generation=generation
        )
    else:
        place = HostsPlace(store, rank, cards, timeout=timeout, prefix=f"{prefix}/{nonce}")
    hosts.forget(store, rank, prefix=prefix, nonce=nonce)  # joining has waited for everybody
    return place
