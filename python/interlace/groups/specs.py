"""Groups as traced ops name them: a string and a size, which need no process group until they run.

Names are::

    "0"                 all ranks
    "tp"                a GroupSpec that was bound, a name passed to new_group, a torch group's name
    "ranks:0,2"         these ranks of the default group, made on first use
    "ranks:0,2|1,3"     the list with the caller's rank
    "ranks:0,2#fast"    another group over the same ranks: a tag
"""

import ctypes
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from interlace.groups import groups, groups as rank_lists
from interlace.runtime.compat.torch_modes import assume_constant_result
from interlace.runtime.core.communicator import Communicator

RANKS = "ranks:"

_bound: rank_lists.Known = weakref.WeakKeyDictionary()
_found: rank_lists.Known = weakref.WeakKeyDictionary()  # by name and size


@dataclass(frozen=True)
class GroupSpec:
    """A group that need not exist yet: tracing, compiling and exporting take its name and size.

    When an op runs, the name stands for the group of :meth:`bind`. Without one, it stands for the group to
    which :func:`interlace.new_group` or torch.distributed gave the name. ``size`` is the number of ranks.
    Raises TypeError or ValueError for a wrong name or size.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> group = interlace.GroupSpec("tp", 4)
    >>> def double(x):
    ...     return interlace.functional.all_gather(x, group=group) * 2
    >>> graph = make_fx(double, tracing_mode="fake")(torch.ones(2)).graph
    >>> [str(node.target) for node in graph.nodes if node.op == "call_function"]
    ['interlace.all_gather.default', '_c10d_functional.wait_tensor.default', 'aten.mul.Tensor']

    Without a size, a traced or exported graph fits groups of any size: it reads the size when it runs.

    Bind the name to a group when there are ranks:

    >>> def bound():
    ...     group.bind(None)  # all ranks
    ...     return interlace.functional.all_gather(torch.ones(1), group=group).tolist()
    >>> interlace.run(bound, 4)[0]
    [1.0, 1.0, 1.0, 1.0]
    """

    name: str
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"GroupSpec: name must be a non-empty string, got {self.name!r}")
        if self.name.startswith(RANKS):
            raise ValueError(f"GroupSpec: name must not begin with {RANKS!r}, got {self.name!r}")
        if self.size is None:
            return
        if isinstance(self.size, bool) or not isinstance(self.size, (int, torch.SymInt)):
            raise TypeError(f"GroupSpec: size must be an int or None, got {self.size!r}")
        if isinstance(self.size, int) and self.size < 1:
            raise ValueError(f"GroupSpec: size must be at least 1, got {self.size}")

    def bind(self, group: object) -> None:
        """Make the name stand for ``group`` from now on, on the calling rank.

        Raises ValueError if the group has another size.
        """
        communicator = groups.resolve(group)
        if self.size is not None and communicator.world_size != self.size:
            raise ValueError(
                f"GroupSpec {self.name!r} has size {self.size}, the group has {communicator.world_size}, "
                f"on rank {communicator.rank}"
            )
        whole = groups.default_group()
        _bound.setdefault(whole, {})[self.name] = communicator
        _found.pop(whole, None)


def describe(group: object, tag: str = "") -> tuple[str, int]:
    """Return name and size of ``group``, in any form of :func:`interlace.groups.resolve`, or a GroupSpec.

    ``tag`` distinguishes groups over the same list of ranks. Only None and names need a live group; its
    size is then a constant of a compiled graph. Raises ValueError or TypeError for other forms.
    """
    if isinstance(group, GroupSpec):
        size = torch.ops.interlace.group_size(group.name) if group.size is None else group.size
        named = group.name, size
    elif isinstance(group, (Communicator, groups.OnInterlace)):
        named = _of_object(id(group))
    elif group is None:
        named = _of_default()
    elif isinstance(group, str):
        named = _of_name(group)
    elif isinstance(group, dist.ProcessGroup):
        named = group.group_name, group.size()
    elif isinstance(group, DeviceMesh):
        named = _of_mesh(group, None)
    elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        dim = group[1]  # Dynamo may have made it a symbol
        named = _of_mesh(
            group[0], dim if dim is None or isinstance(dim, str) else operator.index(dim)
        )
    elif isinstance(group, (list, tuple)):
        return _of_ranks(group, tag)
    else:
        raise TypeError(
            "group must be None, a GroupSpec, a group from interlace.new_group, a torch ProcessGroup, a "
            f"DeviceMesh, (DeviceMesh, dim), ranks, or a name, got {type(group).__name__}"
        )
    if tag:
        raise ValueError(f"tag {tag!r} goes with a list of ranks, not with {type(group).__name__}")
    return named


def _of_ranks(group: Sequence[Any], tag: str) -> tuple[str, int]:
    rows = group if len(group) and isinstance(group[0], (list, tuple)) else [group]
    seen = []
    for row in rows:
        if not isinstance(row, (list, tuple)) or not row:
            raise TypeError(f"group: {group!r} must be ranks or lists of ranks")
        for rank in row:
            if isinstance(rank, bool) or not isinstance(rank, (int, torch.SymInt)):
                raise TypeError(f"group: ranks must be ints, got {rank!r}")
            rank = operator.index(rank)  # Dynamo may have made it a symbol
            if rank < 0 or rank in seen:
                raise ValueError(f"group: ranks must be distinct and not negative, got {group!r}")
            seen.append(rank)
    sizes = [len(row) for row in rows]
    if min(sizes) != max(sizes):
        raise ValueError(f"group: all groups must have the same size, got sizes {sizes}")
    if not isinstance(tag, str) or "#" in tag:
        raise ValueError(f"tag must be a string without '#', got {tag!r}")
    text = "|".join([",".join([str(operator.index(rank)) for rank in row]) for row in rows])
    return RANKS + text + ("#" + tag if tag else ""), sizes[0]


# Dynamo cannot trace the following values, so they are read once, while it traces.


@assume_constant_result
def _of_default() -> tuple[str, int]:
    return rank_lists.DEFAULT_NAME, groups.world_size_of(rank_lists.DEFAULT_NAME)


@assume_constant_result
def _of_name(name: str) -> tuple[str, int]:
    whole = groups.joined_group()
    found = None if whole is None else _bound.get(whole, {}).get(name)
    return name, groups.world_size_of(name) if found is None else found.world_size


@assume_constant_result
def _of_object(address: int) -> tuple[str, int]:
    """Return name and size of the group at that address: Dynamo guards ``id`` and passes constants."""
    group = ctypes.cast(address, ctypes.py_object).value
    if isinstance(group, Communicator):
        return rank_lists.name_of(groups.default_group(), group), group.world_size
    return group.group_name, group.size()


@assume_constant_result
def _of_mesh(mesh: Any, dim: int | str | None) -> tuple[str, int]:
    index = rank_lists.mesh_dim(mesh, dim)
    if groups.simulated_ranks():
        return _of_ranks(rank_lists.all_rows(mesh, index), "")
    if dist.is_initialized():
        torch_group = mesh.get_group(index)
        return torch_group.group_name, torch_group.size()
    return _of_ranks(rank_lists.rows(mesh, index), "")


@assume_constant_result
def rank_in(name: str, size: int) -> int | None:
    """Return the caller's rank in a traced ``(name, size)``, or None if it cannot be known yet."""
    whole = groups.joined_group()
    if whole is None or groups.simulated_ranks():
        return None
    try:
        if name.startswith(RANKS):
            return rank_lists.chosen(whole, rows_of(name)).index(whole.rank)
        return bind(name, size).rank
    except ValueError:
        return None  # the name stands for no group here


def size_of(name: str) -> int:
    return _find(groups.default_group(), name).world_size


def bind(name: str, size: int) -> Communicator:
    """Return the caller's communicator of a traced ``(name, size)``; raise ValueError without one."""
    if groups.simulated_ranks():
        raise TypeError(
            f"group {name!r}: interlace supports LocalTensorMode, but no class derived from it, because an "
            "op would run for each simulated rank without the others; use LocalTensorMode itself"
        )
    whole = groups.default_group()
    if name == rank_lists.DEFAULT_NAME and size == whole.world_size:
        return whole
    known = _found.setdefault(whole, {})
    communicator = known.get((name, size))
    if communicator is None or communicator.closed:
        communicator = _find(whole, name)
        if communicator.world_size != size:
            raise ValueError(
                f"group {name!r} has {communicator.world_size} ranks, but the op was traced for {size}, "
                f"on rank {whole.rank}"
            )
        if communicator is not whole:  # a key that is also a value would never be freed
            known[name, size] = communicator
    return communicator


def _find(whole: Communicator, name: str) -> Communicator:
    found = _bound.get(whole, {}).get(name) or rank_lists.group_named(whole, name)
    if found is not None:
        return found
    if not name.startswith(RANKS):
        return groups.resolve(name)
    tag = name.partition("#")[2]
    return rank_lists.group_of(whole, rank_lists.chosen(whole, rows_of(name)), tag)


def rows_of(name: str) -> list[list[int]]:
    lists = name.removeprefix(RANKS).partition("#")[0]
    return [[operator.index(int(rank)) for rank in row.split(",")] for row in lists.split("|")]


def bound(group: object, tag: str = "") -> Communicator:
    """Return ``bind(*describe(group, tag))``, for eager calls."""
    if isinstance(group, GroupSpec) or tag:
        return bind(*describe(group, tag))
    if isinstance(group, str):
        return _find(groups.default_group(), group)
    return groups.resolve(group)
