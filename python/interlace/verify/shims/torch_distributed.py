"""``torch.distributed`` on simulated ranks: each is in a default group from its first line on.

``dist.get_rank()``, ``dist.group.WORLD``, ``dist.all_reduce`` and so on are torch's functions, unchanged:
what they find is a process group of this project's backend, over the simulated group. There is nothing to
do for ``init_process_group``, and ``destroy_process_group`` leaves the group to the run.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from interlace import new_group as new_simulated_group
from interlace.groups import groups, rank_lists
from interlace.process_group.group import InterlaceProcessGroup
from interlace.runtime.compat import torch_groups
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.place import DEFAULT_TIMEOUT, Place

_c10d: Any = dist.distributed_c10d
_REAL = dist.ProcessGroup


class _AnyGroup(type(dist.ProcessGroup)):  # type: ignore[misc]
    """Takes every process group of torch, and every class of them, for one of ``SimulatedGroup``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, _REAL)
            if cls is SimulatedGroup
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, other: Any) -> bool:
        return (
            issubclass(other, _REAL) if cls is SimulatedGroup else super().__subclasscheck__(other)
        )


class SimulatedGroup(InterlaceProcessGroup, metaclass=_AnyGroup):
    """A process group of torch over simulated ranks, which stands for ``dist.ProcessGroup``.

    So it is made, and derived from, as that class: by a rank and a size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(InterlaceProcessGroup, self).__init__(*args, **kwargs)

    @classmethod
    def over(cls, place: Place, found: Callable[[], Communicator], name: str) -> "SimulatedGroup":
        """Of the ranks of ``place``. ``found``: their communicator, once it is needed."""
        group = cls(place.rank, place.world_size)
        group._found = found
        group._place, group._waits = place, SimpleNamespace(options=None)
        group._store = group._gloo = None
        group._timeout = timedelta(seconds=DEFAULT_TIMEOUT)
        group._group_name, group._group_description = name, "undefined"
        group._has_gpus = group._high_priority = False
        return group

    @property
    def interlace_communicator(self) -> Communicator:  # type: ignore[override]
        return self._found()  # type: ignore[no-any-return]

    def _own(self, tensors: Any) -> Any:
        """All of them: the dispatch modes of a check are no reason to go through torch's dispatcher."""
        return tensors


def join(place: Place) -> None:
    """Register the group of all ranks as torch's default group, for the rank of ``place``."""
    group = SimulatedGroup.over(place, groups.default_group, rank_lists.DEFAULT_NAME)
    _c10d._world.default_pg = _registered(group, range(place.world_size))


def _registered(group: SimulatedGroup, ranks: Sequence[int]) -> SimulatedGroup:
    world, name = _c10d._world, group.getGroupName()
    world.pg_map[group] = ("interlace", torch_groups.HashStore())
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    world.pg_backend_config[group] = "cpu:interlace,cuda:interlace"
    world.tags_to_pg.setdefault("", []).append(group)
    world.pg_to_tag[group] = ""
    return group


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """The group is there."""


def destroy_process_group(group: Any = None) -> None:
    """The group ends with the run."""


def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    """The group of ``ranks``, for its members. Collective over all ranks."""
    made = new_simulated_group(ranks)
    if not isinstance(made, Communicator):
        return made
    name = rank_lists.name_of(groups.default_group(), made)
    return _registered(SimulatedGroup.over(made.place, lambda: made, name), made.ranks)


def resolve_process_group(name: str) -> Any:
    """The calling rank's group of that name. RuntimeError, as torch's, if it has none."""
    for group, known in _c10d._world.pg_names.items():
        if known == name:
            return group
    raise RuntimeError(f"Could not resolve the process group registered under the name {name}")


REPLACED: dict[str, Any] = {
    **{each.__name__: each for each in (init_process_group, destroy_process_group, new_group)},
    "_resolve_process_group": resolve_process_group,
}
"""Names of ``torch.distributed`` and its ``distributed_c10d``, and what stands for them."""


def state() -> tuple[Any, ...]:
    """What torch keeps of groups, which each rank has for itself."""
    tables = (value for name, value in vars(_c10d).items() if name.startswith(("_pg_", "_tags_")))
    return vars(_c10d._world), *tables
