"""Going on after a rank has died, without restarting the others: shrink and rebuild."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from interlace.groups import groups, rank_lists
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError


def shrink(group: Any = None) -> Any:
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


def rebuild(group: Any, ranks: Sequence[int]) -> Any:
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
    whole = _made(group)
    with whole.accepting():
        members = rank_lists.checked(ranks, whole)
        if whole.rank not in members:
            raise ValueError(f"rank {whole.rank} is not one of ranks {list(members)}")
    return _reunited(group, members)


def _made(group: Any) -> Communicator:
    """The communicator of ``group``, which has been made."""
    if group is None and groups.joined() is None:
        raise InterlaceError("there is no group to go on from: no default group has been made")
    return groups.resolve(group)


def _reunited(group: Any, ranks: Sequence[int] | None) -> Any:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, groups.OnInterlace):
        return group.reunited(ranks)
    old = _made(group)
    whole = old is groups.default_group()
    place, left = old.reunited(ranks)
    rank_lists.close(old)
    new = Communicator(place, range(len(left)) if whole else [old.ranks[rank] for rank in left])
    groups.replace(old, new)
    return new
