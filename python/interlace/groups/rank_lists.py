"""Groups that are named by their ranks, by a device mesh or by a string, of one default group ``whole``.

A group of ranks is made when its members first use it, together: nobody else has to call. It is made once,
so lists with equal entries are one group. The position in the list is the rank in the group.
"""

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from interlace.arguments import checks
from interlace.runtime.core.communicator import Communicator

DEFAULT_NAME = "0"  # torch's name of its default group, too
FIRST_USE, ALONE = 0, -1  # generations below those that Communicator.split counts
FIRST_TAGGED = -(1 << 32)  # and below those that new_group counts down from ALONE
TAG_BYTES = 6

Known = weakref.WeakKeyDictionary[Communicator, dict[Any, Communicator]]  # of each default group
_groups: Known = weakref.WeakKeyDictionary()  # by ranks and tag
_names: Known = weakref.WeakKeyDictionary()


def checked(ranks: Sequence[Any], whole: Communicator) -> tuple[int, ...]:
    """``ranks`` if they are distinct ranks of ``whole``; TypeError or ValueError otherwise."""
    try:
        members = list(ranks)
    except TypeError:
        raise TypeError(f"ranks must be a list of ints, got {ranks!r}") from None
    for rank in members:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"ranks must be ints, got {members}")
    bad = [rank for rank in members if not 0 <= rank < whole.world_size]
    if bad or len(set(members)) != len(members) or not members:
        raise ValueError(f"ranks must be distinct, within 0..{whole.world_size - 1}, got {members}")
    return tuple(members)


def chosen(whole: Communicator, lists: Sequence[Any]) -> tuple[int, ...]:
    """``lists`` itself if it is ranks; of lists of ranks the one in which the caller is."""
    with whole.accepting():
        if not lists or not all(isinstance(each, (list, tuple)) for each in lists):
            return checked(lists, whole)
        rows = [checked(each, whole) for each in lists]
        sizes = [len(row) for row in rows]
        if len(set(sizes)) != 1:
            raise ValueError(f"group: group sizes must be identical, got {sizes}")
        if len({rank for row in rows for rank in row}) != sum(sizes):
            raise ValueError(f"group: a rank is in two of {[list(r) for r in rows]}")
    mine = [row for row in rows if whole.rank in row]
    if not mine:
        raise ValueError(
            f"group: rank {whole.rank} is not a member of any of {[list(row) for row in rows]}"
        )
    return mine[0]


def group_of(whole: Communicator, ranks: tuple[int, ...], tag: str = "") -> Communicator:
    """The group of these ranks, made if this is its first use. Another ``tag`` is another group."""
    if ranks == tuple(range(whole.world_size)) and not tag:
        return whole
    known = _groups.setdefault(whole, {})
    found = known.get((ranks, tag))
    if found is None:
        found = known[ranks, tag] = made(whole, ranks, _generation(tag))
    return found


def _generation(tag: str) -> int:
    if not tag:
        return FIRST_USE
    digest = hashlib.blake2b(tag.encode(), digest_size=TAG_BYTES).digest()
    return FIRST_TAGGED - int.from_bytes(digest, "big")


def made(whole: Communicator, ranks: tuple[int, ...], generation: int) -> Communicator:
    """A new group of these ranks; only they call."""
    if whole.rank not in ranks:
        raise ValueError(f"group: rank {whole.rank} is not a member of {list(ranks)}")
    place = whole.place.subgroup(ranks, generation)
    return Communicator(place, [whole.ranks[rank] for rank in ranks])


def mesh_dim(mesh: DeviceMesh, dim: int | str | None) -> int:
    """``dim`` of ``mesh`` as an index from 0; None is the dimension of a mesh of one."""
    names = mesh.mesh_dim_names or ()
    if dim is None:
        if mesh.ndim != 1:
            raise ValueError(f"group: a mesh of {mesh.ndim} dimensions needs one, (mesh, dim)")
        return 0
    if isinstance(dim, str):
        if dim not in names:
            raise ValueError(f"group: dim {dim!r} is not one of {list(names)}")
        return names.index(dim)
    return checks.index("group: dim", dim, mesh.ndim)


def rows(mesh: DeviceMesh, index: int) -> list[list[int]]:
    """The groups of ranks that ``mesh`` makes along one of its dimensions."""
    with _disable_current_modes():  # who traces need not see that a mesh is a tensor
        ranks = mesh.mesh
        lists: list[list[int]] = ranks.movedim(index, -1).reshape(-1, ranks.shape[index]).tolist()
    return lists


def all_rows(mesh: DeviceMesh, index: int) -> list[list[int]]:
    """The :func:`rows` of the mesh from which ``mesh`` was cut: also groups that the caller is not in."""
    whole = mesh._get_root_mesh()
    if whole is mesh:
        return rows(mesh, index)
    name = (mesh.mesh_dim_names or ())[index]
    names = whole.mesh_dim_names or ()
    if name not in names:
        raise ValueError(
            f"group: dim {name!r} is not one of {list(names)}, those of the mesh from which it comes; "
            "give the lists of ranks"
        )
    return rows(whole, names.index(name))


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


def name_of(whole: Communicator, communicator: Communicator) -> str:
    """A name that finds it among groups of ``whole``; equal on its members if these ask in one order."""
    if communicator is whole:
        return DEFAULT_NAME
    known = _names.setdefault(whole, {})
    for group_name, named_group in known.items():
        if named_group is communicator:
            return str(group_name)
    for (ranks, tag), named_group in _groups.get(whole, {}).items():
        if named_group is communicator:
            return "ranks:" + ",".join(map(str, ranks)) + ("#" + tag if tag else "")
    base = "ranks:" + ",".join(map(str, communicator.ranks))
    number = sum(group_name.startswith(base + "#new_group ") for group_name in known)
    known[f"{base}#new_group {number}"] = communicator
    return f"{base}#new_group {number}"


def close(whole: Communicator) -> None:
    """Close the groups that were made on first use."""
    for communicator in _groups.pop(whole, {}).values():
        communicator.close()
