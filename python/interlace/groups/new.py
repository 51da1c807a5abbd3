"""Groups made on purpose: new_group, new_subgroups, split_group; shrink and rebuild after a rank has died.

``backend``, ``pg_options`` and ``device_id`` are torch's and have no effect: a group of interlace's is in
the place of the ranks it is made of.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from types import NoneType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups, groups as rank_lists
from interlace.groups.groups import default_group, resolve
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.place import positive_seconds

_OUTSIDE = cast(Communicator, dist.GroupMember.NON_GROUP_MEMBER)  # as from torch
_made_locally: WeakKeyDictionary[Communicator, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: object = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = False,
    *,
    group: Group = None,
    name: str | None = None,
) -> Communicator:
    """A group of some ranks of ``group``, by default of all ranks.

    Collective over ``group``: every rank calls it with the same ``ranks``, as with
    ``torch.distributed.new_group``; with ``use_local_synchronization`` its members only. Position in
    ``ranks`` is the rank in the new group, unless ``sort_ranks``. Ranks outside it get
    ``GroupMember.NON_GROUP_MEMBER``, as from torch, with which every op raises ValueError.

    ``timeout``, in seconds or a timedelta, bounds the waits of the group, by default as its parent's.
    ``name`` names it: a later op takes ``group=name``.

    Raises ValueError or TypeError, on every rank of the parent unless ``use_local_synchronization``, for
    ranks that are not there, and where ranks ask for different groups.

    >>> def on_rank():
    ...     group = interlace.new_group([2, 1], name="pair", timeout=60)
    ...     return interlace.get_rank(group) if interlace.get_rank() else None
    >>> interlace.run(on_rank, 3)
    [None, 1, 0]
    """
    parent = resolve(group)
    with parent.accepting("" if use_local_synchronization else "new_group"):
        members = rank_lists.checked(range(parent.world_size) if ranks is None else ranks, parent)
        seconds = None if timeout is None else positive_seconds("timeout", timeout)
        if not isinstance(name, (str, NoneType)):
            raise TypeError(f"name must be a str or None, got {name!r}")
    if sort_ranks:
        members = tuple(sorted(members))
    communicator: Communicator | None
    if use_local_synchronization:
        if parent.rank not in members:
            return _OUTSIDE
        count = _made_locally.setdefault(parent, Counter())
        count[members] += 1
        communicator = rank_lists.made(parent, members, rank_lists.ALONE - count[members])
    else:
        communicator = parent.split(members)
    if communicator is None:
        return _OUTSIDE
    if seconds is not None:
        communicator.place.set_timeout(seconds)
    if name is not None:
        rank_lists.name(default_group(), name, communicator)
    return communicator


def new_subgroups(
    group_size: int,
    group: Group = None,
    timeout: timedelta | float | None = None,
    backend: object = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """Groups of ``group_size`` consecutive ranks of ``group``; the caller's, and all of them.

    Groups of which the caller is no member are ``NON_GROUP_MEMBER``. ``timeout``: seconds or a timedelta.
    Raises ValueError on every rank if ``group_size`` does not divide the world size, TypeError if it is no
    int. Semantics: ``torch.distributed.new_subgroups``.

    >>> interlace.run(lambda: interlace.new_subgroups(2)[0].ranks, 4)
    [(0, 1), (0, 1), (2, 3), (2, 3)]
    """
    parent = resolve(group)
    world_size = parent.world_size
    with parent.accepting("new_group"):
        group_size = checks.integer("group_size", group_size)
        if group_size <= 0 or world_size % group_size:
            raise ValueError(
                f"group_size must be positive and divide world size {world_size}, got {group_size}"
            )
    lists = [list(range(at, at + group_size)) for at in range(0, world_size, group_size)]
    return _by_enumeration("group_size", lists, timeout, group)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: object = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[Any, list[Any]]:
    """A group for every list of ranks; the caller's, None if there is none, and all of them.

    ``timeout``: seconds or a timedelta. Raises ValueError on every rank if a rank is in two lists,
    TypeError for no lists. Semantics: ``torch.distributed.new_subgroups_by_enumeration``.

    >>> interlace.run(lambda: interlace.new_subgroups_by_enumeration([[0, 2], [1]])[0].ranks, 3)
    [(0, 2), (1,), (0, 2)]
    """
    return _by_enumeration("ranks_per_subgroup_list", ranks_per_subgroup_list, timeout, None)


def _by_enumeration(
    name: str, lists: Any, timeout: timedelta | float | None, group: Group
) -> tuple[Any, list[Any]]:
    """All is checked before the first group is made: the other ranks see one refusal, or none."""
    parent = resolve(group)
    with parent.accepting("new_group"):
        if not isinstance(lists, Sequence) or isinstance(lists, str):
            raise TypeError(f"{name} must be a list of lists of ranks, got {lists!r}")
        if not lists:
            raise ValueError(f"{name} must not be empty, got {lists!r}")
        rows = [rank_lists.checked(each, parent) for each in lists]
        if timeout is not None:
            positive_seconds("timeout", timeout)
        count = Counter(each for row in rows for each in row)
        twice = [each for each, times in count.items() if times > 1]
        if twice:
            raise ValueError(f"rank {twice[0]} is in two of {[list(row) for row in rows]}")
    groups = [new_group(row, timeout, group=group) for row in rows]
    mine = [each for row, each in zip(rows, groups, strict=True) if parent.rank in row]
    return (mine[0] if mine else None), groups


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: object = None,
) -> Any:
    """The caller's group of those that ``split_ranks``, ranks of the parent, says; None if it has none.

    Collective over the parent. ``timeout``: seconds or a timedelta. Raises ValueError or TypeError on every
    rank if a rank is not there, or in two lists. Semantics: ``torch.distributed.split_group``.

    >>> interlace.run(lambda: interlace.split_group(split_ranks=[[0, 1]]) is None, 3)
    [False, False, True]
    """
    return _by_enumeration("split_ranks", split_ranks, timeout, parent_pg)[0]


# -- going on after a rank has died ------------------------------------------------------------


def shrink(group: object = None) -> Any:
    """A group of those ranks of ``group`` that still live, in their order; ``group`` is over.

    Every one of them calls it, mostly after an error that said who has died; within the group's timeout.
    Ranks that end meanwhile are left out too, and all get the same group. Of the default group the result
    is the next default group, with ranks from 0; of torch's, whose backend is interlace,
    ``torch.distributed``'s next one, as if the process had just called ``init_process_group``: groups,
    meshes and models are made again. Of another group of ``torch.distributed`` it is one more such group,
    with the same global ranks.

    Works, workspaces and symmetric tensors of the old group raise :class:`InterlaceError`. A rank that
    lives and does not come for a whole timeout of the group is left out, too; if it comes later, it
    raises :class:`InterlaceError`. Raises ``PlaceUnavailableError`` where ranks cannot outlive each other
    (``sim``, ``nvshmem``). Semantics: ``ncclCommShrink`` with abort, ULFM's ``MPI_Comm_shrink``.

    >>> import interlace, torch.distributed as dist
    >>> dist.init_process_group("interlace", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_world_size(interlace.shrink())
    1
    >>> dist.destroy_process_group()
    """
    return _reunited(group, None)


def rebuild(group: object, ranks: Sequence[int]) -> Any:
    """As :func:`shrink`, but of exactly ``ranks`` of ``group``, whatever the others do.

    Raises what :func:`shrink` does, ``PeerDiedError`` if one of ``ranks`` does not live,
    ``CollectiveTimeoutError`` that names those which live and do not come, ValueError if the caller is none
    of them, or if one that comes names other ranks, or another order. Semantics:
    ``torch.distributed.shrink_group``.

    >>> import interlace, torch.distributed as dist
    >>> dist.init_process_group("interlace", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_world_size(interlace.rebuild(None, [0]))
    1
    >>> dist.destroy_process_group()
    """
    whole = _known_group(group)
    with whole.accepting():
        members = rank_lists.checked(ranks, whole)
        if whole.rank not in members:
            raise ValueError(f"rank {whole.rank} is not one of ranks {list(members)}")
    return _reunited(group, members)


def _known_group(group: object) -> Communicator:
    """The communicator of ``group``, which has been made."""
    if group is None and groups.joined() is None:
        raise InterlaceError("there is no group to go on from: no default group has been made")
    return resolve(group)


def _reunited(group: object, ranks: Sequence[int] | None) -> Any:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, groups.OnInterlace):
        return group.reunited(ranks)
    old = _known_group(group)
    whole = old is default_group()
    place, left = old.reunited(ranks)
    rank_lists.close(old)
    new = Communicator(place, range(len(left)) if whole else [old.ranks[rank] for rank in left])
    groups.replace(old, new)
    return new
