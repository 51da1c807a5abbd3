"""Groups that are named by their ranks, by a device mesh or by a string, of one default group ``whole``.

A group of ranks is made when its members first use it, together: nobody else has to call. It is made once,
so lists with equal entries are one group. The position in the list is the rank in the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from interlace.runtime.communicator import Communicator

DEFAULT_NAME = "0"  # torch's name of its default group, too
FIRST_USE, ALONE = 0, -1  # generations below those that Communicator.split counts

_groups: weakref.WeakKeyDictionary[Communicator, dict[tuple[int, ...], Communicator]] = (
    weakref.WeakKeyDictionary()
)
_names: weakref.WeakKeyDictionary[Communicator, dict[str, Communicator]] = (
    weakref.WeakKeyDictionary()
)


def is_mesh(value: Any) -> bool:
    return isinstance(value, DeviceMesh)


def checked(ranks: Sequence[Any], whole: Communicator) -> tuple[int, ...]:
    """``ranks`` if they are distinct ranks of ``whole``; TypeError or ValueError otherwise."""
    members = list(ranks)
    for rank in members:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"ranks must be ints, got {members} on rank {whole.rank}")
    bad = [rank for rank in members if not 0 <= rank < whole.world_size]
    if bad or len(set(members)) != len(members) or not members:
        raise ValueError(
            f"ranks must be distinct and within 0..{whole.world_size - 1}, got {members} "
            f"on rank {whole.rank}"
        )
    return tuple(members)


def chosen(whole: Communicator, lists: Sequence[Any]) -> tuple[int, ...]:
    """``lists`` itself if it is ranks; of lists of ranks the one in which the caller is."""
    if not lists or not all(isinstance(each, (list, tuple)) for each in lists):
        return checked(lists, whole)
    rows = [checked(each, whole) for each in lists]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            f"group: group sizes must be identical, got {[len(row) for row in rows]} on rank {whole.rank}"
        )
    if len({rank for row in rows for rank in row}) != sum(map(len, rows)):
        raise ValueError(
            f"group: a rank is in two of {[list(r) for r in rows]}, on rank {whole.rank}"
        )
    mine = [row for row in rows if whole.rank in row]
    if not mine:
        raise ValueError(
            f"group: rank {whole.rank} is not a member of any of {[list(row) for row in rows]}"
        )
    return mine[0]


def group_of(whole: Communicator, ranks: tuple[int, ...]) -> Communicator:
    """The group of these ranks, made if this is its first use."""
    if ranks == tuple(range(whole.world_size)):
        return whole
    known = _groups.setdefault(whole, {})
    found = known.get(ranks)
    if found is None:
        found = known[ranks] = made(whole, ranks, FIRST_USE)
    return found


def made(whole: Communicator, ranks: tuple[int, ...], generation: int) -> Communicator:
    """A new group of these ranks; only they call."""
    if whole.rank not in ranks:
        raise ValueError(f"group: rank {whole.rank} is not a member of {list(ranks)}")
    place = whole.place.subgroup(ranks, generation)
    return Communicator(place, [whole.ranks[rank] for rank in ranks])


def of_mesh(mesh: DeviceMesh, dim: int | str | None, rank: int) -> tuple[int, ...]:
    """The ranks of the caller's row of ``mesh`` along ``dim``, which may be None for one dimension."""
    names = mesh.mesh_dim_names or ()
    if dim is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"group: a DeviceMesh of {mesh.ndim} dimensions needs one, (mesh, dim), on rank {rank}"
            )
        dim = 0
    if isinstance(dim, str):
        if dim not in names:
            raise ValueError(f"group: dim {dim!r} is not one of {list(names)}, on rank {rank}")
        dim = names.index(dim)
    if not -mesh.ndim <= dim < mesh.ndim:
        raise ValueError(
            f"group: dim must be within {-mesh.ndim}..{mesh.ndim - 1}, got {dim} on rank {rank}"
        )
    rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.mesh.shape[dim]).tolist()
    for row in rows:
        if rank in row:
            return tuple(row)
    raise ValueError(f"group: rank {rank} is not a member of the mesh {mesh.mesh.tolist()}")


def name(whole: Communicator, group_name: str, communicator: Communicator) -> None:
    """Let ``communicator`` be found by name; ValueError if another has it."""
    known = _names.setdefault(whole, {})
    if group_name == DEFAULT_NAME or group_name in known:
        raise ValueError(f"name: there is a group named {group_name!r} on rank {whole.rank}")
    known[group_name] = communicator


def named(whole: Communicator, group_name: str) -> Communicator | None:
    """The group of that name, if it is one of interlace's."""
    if group_name == DEFAULT_NAME:
        return whole
    return _names.get(whole, {}).get(group_name)


def close(whole: Communicator) -> None:
    """Close the groups that were made on first use."""
    for communicator in _groups.pop(whole, {}).values():
        communicator.close()
