"""Make groups: new_group, new_subgroups, split_group; shrink and rebuild after a rank has died.

``backend``, ``pg_options`` and ``device_id`` are torch's and have no effect: a group of interlace uses the
place of its ranks.
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

_OUTSIDE = cast(Communicator, dist.GroupMember.NON_GROUP_MEMBER)  # as torch returns it
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
    """Make a group of some ranks of ``group``, by default of all ranks.

    Collective over ``group``: every rank calls it with the same ``ranks``, as with
    ``torch.distributed.new_group``; with ``use_local_synchronization`` only its members call it. The
    position in ``ranks`` is the rank in the new group, unless ``sort_ranks``. Ranks outside it get
    ``GroupMember.NON_GROUP_MEMBER``, as from torch; every op raises ValueError for it.

    ``timeout``, in seconds or a timedelta, limits the waits of the group; the default is the parent's.
    ``name`` names it: a later op takes ``group=name``.

    Raises ValueError or TypeError for ranks that do not exist, and if ranks request different groups. Every
    rank of the parent raises it, unless ``use_local_synchronization``.

    >>> def on_rank():
    ...     group = interlace.new_group([2, 1], name="pair", timeout=60)
    ...     return interlace.get_rank(group) if interlace.get_rank() else None
    >>> interlace.run(on_rank, 3)
    [None, 1, 0]
    """
    parent = resolve(group)
    with parent.accepting("" if use_local_synchronization else "new_group"):
        members = rank_lists.check_ranks(
            range(parent.world_size) if ranks is None else ranks, parent
        )
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
        communicator = rank_lists.make_group(parent, members, rank_lists.ALONE - count[members])
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
    """Make groups of ``group_size`` consecutive ranks of ``group``; return the caller's and all of them.

    Groups without the caller are ``NON_GROUP_MEMBER``. ``timeout``: seconds or a timedelta.
    Raises ValueError on every rank if ``group_size`` does not divide the world size, TypeError if it is not
    an int. Semantics: ``torch.distributed.new_subgroups``.

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
    """Make a group for every list of ranks; return the caller's group (or None) and all of them.

    ``timeout``: seconds or a timedelta. Raises ValueError on every rank if a rank is in two lists,
    TypeError if the argument is not a list of lists. Semantics:
    ``torch.distributed.new_subgroups_by_enumeration``.

    >>> interlace.run(lambda: interlace.new_subgroups_by_enumeration([[0, 2], [1]])[0].ranks, 3)
    [(0, 2), (1,), (0, 2)]
    """
    return _by_enumeration("ranks_per_subgroup_list", ranks_per_subgroup_list, timeout, None)


def _by_enumeration(
    name: str, lists: Any, timeout: timedelta | float | None, group: Group
) -> tuple[Any, list[Any]]:
    """Make the groups after all checks, so that the other ranks see one refusal or none."""
    parent = resolve(group)
    with parent.accepting("new_group"):
        if not isinstance(lists, Sequence) or isinstance(lists, str):
            raise TypeError(f"{name} must be a list of lists of ranks, got {lists!r}")
        if not lists:
            raise ValueError(f"{name} must not be empty, got {lists!r}")
        rows = [rank_lists.check_ranks(each, parent) for each in lists]
        if timeout is not None:
            positive_seconds("timeout", timeout)
        count = Counter(each for row in rows for each in row)
        twice = [each for each, times in count.items() if times > 1]
        if twice:
            raise ValueError(f"rank {twice[0]} is in two of {[list(row) for row in rows]}")
    groups = [new_group(row, timeout, group=group) for row in rows]
    of_rank = [each for row, each in zip(rows, groups, strict=True) if parent.rank in row]
    return (of_rank[0] if of_rank else None), groups


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: object = None,
) -> Any:
    """Return the caller's group among ``split_ranks``, lists of ranks of the parent; None if it has none.

    Collective over the parent. ``timeout``: seconds or a timedelta. Raises ValueError or TypeError on every
    rank if a rank does not exist or is in two lists. Semantics: ``torch.distributed.split_group``.

    >>> interlace.run(lambda: interlace.split_group(split_ranks=[[0, 1]]) is None, 3)
    [False, False, True]
    """
    return _by_enumeration("split_ranks", split_ranks, timeout, parent_pg)[0]


# -- continuing after a rank has died ----------------------------------------------------------


def shrink(group: object = None) -> Any:
    """Make a group of the ranks of ``group`` that still live, in their order; this ends ``group``.

    Every living rank calls it within the group's timeout, usually after an error that names the dead ranks.
    Ranks that end during the call are left out as well, and all get the same group. If ``group`` is the
    default group, the result is the next default group, with ranks from 0. If ``group`` is torch's default
    group with backend interlace, the result becomes torch's default group, as if the process had just
    called ``init_process_group``; make groups, meshes and models again. For another group of
    ``torch.distributed`` the result is one more such group, with the same global ranks.

    Works, workspaces and symmetric tensors of the old group raise :class:`InterlaceError`. A rank that
    lives but does not call within a timeout of the group is left out. If it calls later, it raises
    :class:`InterlaceError`. Raises ``PlaceUnavailableError`` where ranks cannot outlive each other
    (``sim``, ``nvshmem``). Semantics: ``ncclCommShrink`` with abort, ULFM's ``MPI_Comm_shrink``.

    >>> import interlace, torch.distributed as dist
    >>> dist.init_process_group("interlace", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_world_size(interlace.shrink())
    1
    >>> dist.destroy_process_group()
    """
    return _reunite(group, None)


def rebuild(group: object, ranks: Sequence[int]) -> Any:
    """Do as :func:`shrink`, but with exactly ``ranks`` of ``group``, even if other ranks live.

    Raises the errors of :func:`shrink`, ``PeerDiedError`` if one of ``ranks`` is dead, and
    ``CollectiveTimeoutError`` that names living ``ranks`` that do not call. Raises ValueError if the caller
    is not in ``ranks``, or if another rank passes other ranks or another order. Semantics:
    ``torch.distributed.shrink_group``.

    >>> import interlace, torch.distributed as dist
    >>> dist.init_process_group("interlace", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_world_size(interlace.rebuild(None, [0]))
    1
    >>> dist.destroy_process_group()
    """
    whole = _known_group(group)
    with whole.accepting():
        members = rank_lists.check_ranks(ranks, whole)
        if whole.rank not in members:
            raise ValueError(f"rank {whole.rank} is not one of ranks {list(members)}")
    return _reunite(group, members)


def _known_group(group: object) -> Communicator:
    if group is None and groups.joined_group() is None:
        raise InterlaceError("there is no group to continue from: no default group has been made")
    return resolve(group)


def _reunite(group: object, ranks: Sequence[int] | None) -> Any:
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
