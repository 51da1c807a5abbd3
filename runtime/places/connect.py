"""The place for a group of processes: ``shm`` if one host has them all, otherwise ``hosts``.

On GPUs, :func:`on_gpu` makes another place of it. There it is called ``processes``: it meets the other
ranks, and knows which of them live.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch

from interlace.runtime.compat.launchers import local_rank
from interlace.runtime.core import plain
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.core.place import Place, PlaceControl
from interlace.runtime.places.gpu.driver import gpu_problem, own_gpu
from interlace.runtime.places.hosts import host_map
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes import rendezvous
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.signed_store import sign as sign

if TYPE_CHECKING:
    from interlace.runtime.compat.torch_groups import Store
    from interlace.runtime.places.gpu.process_place import DeviceProcessPlace


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

    Finds out which ranks share a host. ``timeout``, in seconds, bounds joining and every later wait.
    ``generation`` distinguishes groups of the same name that are made one after another. ``host`` is the
    host's name; ranks that pass different names share no memory. Raises CollectiveTimeoutError, which names
    the missing ranks, and ValueError if ``rank`` is not a rank of the group.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be within 0..{world_size - 1}, world size {world_size}, got {rank}"
        )
    prefix = f"interlace/{name}/{generation}"
    if world_size == 1:
        return ShmPlace(HostGroup(None, rank, 1, timeout=timeout, prefix=prefix))
    if store is None:
        raise ValueError(f"store must not be None for world size {world_size}")
    store = sign(store)
    place: Place
    card = host_map.Card(host or host_map.this_host(), os.getpid(), host_map.store_address(store))
    own_card, key = plain.dumps(card), f"{prefix}/hosts"
    read = host_map.Card.unpack
    watch = functools.partial(card.check_living, f"joining group {prefix!r}")
    # Other ranks may still read the cards of a run that crashed, until rank 0 has joined this one.
    first = (watch,) if rank == 0 else ()
    cards, nonce = rendezvous.meet(
        store, rank, world_size, own_card, read, prefix, key, timeout, *first
    )
    if all(other.host == card.host for other in cards):
        meeting = StoreMeeting(store, lambda found: watch(dict(enumerate(cards))))
        place = ShmPlace(HostGroup(meeting, rank, world_size, timeout=timeout, prefix=prefix))
    else:
        from interlace.runtime.places.hosts.place import HostsPlace

        place = HostsPlace(store, rank, cards, timeout=timeout, prefix=f"{prefix}/{nonce}")
    try:
        rendezvous.forget(store, rank, key, nonce)  # all ranks have joined
        place.exchange(b"", f"joining group {prefix!r}")  # from now on no rank needs the store
    except BaseException:
        place.close()
        raise
    return place


def new_store(place: PlaceControl) -> Store:
    """Return a store for torch and the ranks of ``place``, served by rank 0. Collective."""
    from interlace.runtime.compat.torch_groups import HashStore, TCPStore

    if place.world_size == 1:
        return HashStore()
    server = (
        None if place.rank else TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    )
    endpoint = plain.dumps((place.address, 0 if server is None else server.port))
    address, port = plain.loads(place.exchange(endpoint, "making a store")[0])
    return server or TCPStore(address, port, is_master=False)


def on_gpu(
    processes: Place,
    device: torch.device | None = None,
    *,
    timeout: float,
    high_priority: bool = False,
) -> Place:
    """Return the place on GPUs of a group whose place without GPUs is ``processes``. Collective.

    The returned place owns ``processes``. ``device``: this rank's device, :func:`own_gpu` if None.
    ``high_priority``: for all its streams. Ranks of several hosts get the place "nvshmem", others "cuda".
    Raises PlaceUnavailableError on all ranks if one has no GPU, or lacks something that its place needs.
    """
    problem = gpu_problem()
    problems = processes.exchange(problem.encode(), "joining a group on GPUs")
    for rank, text in enumerate(problems):
        if text:
            raise PlaceUnavailableError(
                f'place "cuda" needs a GPU per rank: rank {rank}: {text.decode()}'
            )
    device = own_gpu() if device is None else device
    place: DeviceProcessPlace
    if processes.name == "hosts":
        from interlace.runtime.places.gpu.nvshmem import NvshmemPlace

        place = NvshmemPlace(processes, device, timeout=timeout)
    else:
        from interlace.runtime.places.gpu.process_place import CudaPlace

        place = CudaPlace(processes, device, timeout=timeout)
    place.high_priority = high_priority
    return place


def all_have_gpus(processes: PlaceControl) -> bool:
    """Return whether every rank of ``processes`` has a separate GPU for kernels. Collective."""
    usable = not gpu_problem() and (local_rank() or 0) < torch.cuda.device_count()
    answers = processes.exchange(b"1" if usable else b"", "joining a group")
    return processes.name == "shm" and all(answers)
