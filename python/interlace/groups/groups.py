"""The group of an op: the caller's default group, and every way to name another group.

A group of ranks is made when its members first use it together; other ranks do not take part. It is made
once, so lists with equal entries are one group. The position in the list is the rank in the group.
"""

import contextlib
import contextvars
import hashlib
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from interlace.arguments import checks
from interlace.runtime.compat import torch_groups
from interlace.runtime.compat.launchers import launched, local_rank
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.core.place import DEFAULT_TIMEOUT, Place, positive_seconds
from interlace.runtime.places import connect
from interlace.runtime.places.connect import connect_place

DEFAULT_NAME = "0"  # also torch's name of its default group
FIRST_USE, ALONE = 0, -1  # generations below the ones that Communicator.split counts
FIRST_TAGGED = -(1 << 32)  # and below the ones that new_group counts down from ALONE
TAG_BYTES = 6

Known = weakref.WeakKeyDictionary[Communicator, dict[Any, Communicator]]  # by default group
_groups: Known = weakref.WeakKeyDictionary()  # by ranks and tag
_names: Known = weakref.WeakKeyDictionary()


def check_ranks(ranks: Sequence[Any], whole: Communicator) -> tuple[int, ...]:
    """Return ``ranks`` if they are distinct ranks of ``whole``; raise TypeError or ValueError otherwise."""
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
    """Return ``lists`` if it is a list of ranks, otherwise the list in it that has the caller's rank."""
    with whole.accepting():
        if not lists or not all(isinstance(each, (list, tuple)) for each in lists):
            return check_ranks(lists, whole)
        rows = [check_ranks(each, whole) for each in lists]
        sizes = [len(row) for row in rows]
        if len(set(sizes)) != 1:
            raise ValueError(f"group: all groups must have the same size, got sizes {sizes}")
        if len({rank for row in rows for rank in row}) != sum(sizes):
            raise ValueError(f"group: a rank is in two of {[list(r) for r in rows]}")
    of_rank = [row for row in rows if whole.rank in row]
    if not of_rank:
        raise ValueError(f"group: rank {whole.rank} is not in any of {[list(row) for row in rows]}")
    return of_rank[0]


def group_of(whole: Communicator, ranks: tuple[int, ...], tag: str = "") -> Communicator:
    """Return the group of these ranks; make it on first use. Each ``tag`` stands for its own group."""
    if ranks == tuple(range(whole.world_size)) and not tag:
        return whole
    known = _groups.setdefault(whole, {})
    found = known.get((ranks, tag))
    if found is None:
        found = known[ranks, tag] = make_group(whole, ranks, _generation(tag))
    return found


def _generation(tag: str) -> int:
    if not tag:
        return FIRST_USE
    digest = hashlib.blake2b(tag.encode(), digest_size=TAG_BYTES).digest()
    return FIRST_TAGGED - int.from_bytes(digest, "big")


def make_group(whole: Communicator, ranks: tuple[int, ...], generation: int) -> Communicator:
    """Make a new group of these ranks; only they call."""
    if whole.rank not in ranks:
        raise ValueError(f"group: rank {whole.rank} is not a member of {list(ranks)}")
    place = whole.place.subgroup(ranks, generation)
    return Communicator(place, [whole.ranks[rank] for rank in ranks])


def mesh_dim(mesh: DeviceMesh, dim: int | str | None) -> int:
    """Return ``dim`` of ``mesh`` as an index from 0; None stands for the only dimension of a mesh."""
    names = mesh.mesh_dim_names or ()
    if dim is None:
        if mesh.ndim != 1:
            raise ValueError(f"group: a mesh of {mesh.ndim} dimensions needs a dim: (mesh, dim)")
        return 0
    if isinstance(dim, str):
        if dim not in names:
            raise ValueError(f"group: dim {dim!r} is not one of {list(names)}")
        return names.index(dim)
    return checks.index("group: dim", dim, mesh.ndim)


def rows(mesh: DeviceMesh, index: int) -> list[list[int]]:
    """Return the groups of ranks that ``mesh`` makes along one of its dimensions."""
    with _disable_current_modes():  # a tracer need not see that a mesh is a tensor
        ranks = mesh.mesh
        lists: list[list[int]] = ranks.movedim(index, -1).reshape(-1, ranks.shape[index]).tolist()
    return lists


def all_rows(mesh: DeviceMesh, index: int) -> list[list[int]]:
    """Return the :func:`rows` of the root mesh of ``mesh``, including groups without the caller."""
    whole = mesh._get_root_mesh()
    if whole is mesh:
        return rows(mesh, index)
    name = (mesh.mesh_dim_names or ())[index]
    names = whole.mesh_dim_names or ()
    if name not in names:
        raise ValueError(
            f"group: dim {name!r} must be one of {list(names)}, the dims of the mesh from which it comes; "
            "otherwise pass the lists of ranks"
        )
    return rows(whole, names.index(name))


def name(whole: Communicator, group_name: str, communicator: Communicator) -> None:
    """Make ``communicator`` known by name; raise ValueError if another group has the name."""
    known = _names.setdefault(whole, {})
    if group_name == DEFAULT_NAME or group_name in known:
        raise ValueError(f"name: there is a group named {group_name!r} on rank {whole.rank}")
    known[group_name] = communicator


def group_named(whole: Communicator, group_name: str) -> Communicator | None:
    """Return the group of that name, if interlace made it."""
    if group_name == DEFAULT_NAME:
        return whole
    return _names.get(whole, {}).get(group_name)


def name_of(whole: Communicator, communicator: Communicator) -> str:
    """Return a name of this group within ``whole``, equal on members that ask in the same order."""
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


_default: contextvars.ContextVar[Communicator | None] = contextvars.ContextVar(
    "interlace_default_group", default=None
)
_of_run: Communicator | None = None  # if the process is one rank; all its threads see it
_of_process: Communicator | None = None
_made_from: weakref.ref[Any] | None = None  # torch's default group, if the group came from there
_of_process_group: weakref.WeakKeyDictionary[object, Communicator] = weakref.WeakKeyDictionary()

Group = Communicator


def install(place: Place, *, all_threads: bool = False) -> Communicator:
    """Make a communicator on ``place`` the default group of this rank, or of its whole process."""
    global _of_run
    communicator = Communicator(place, range(place.world_size))
    _default.set(communicator)
    if all_threads:
        _of_run = communicator
    return communicator


def replace(old: Communicator, new: Communicator) -> None:
    """Make ``new`` the caller's default group if ``old`` is the default group."""
    global _of_run, _of_process
    if _default.get() is old:
        _default.set(new)
    _of_run = new if _of_run is old else _of_run
    _of_process = new if _of_process is old else _of_process


def default_group() -> Communicator:
    """Return the caller's default group; make it from a launcher's environment if there is none yet."""
    if _made_from is not None and _is_left_over():
        shutdown()
        if not dist.is_initialized():  # otherwise torch's next group is joined
            raise InterlaceError(
                "there is no default group any more: torch.distributed's default group, from which it "
                "came, was destroyed; call torch.distributed.init_process_group or interlace.init"
            )
    communicator = _default.get() or _of_run or _of_process
    if communicator is None:
        if not dist.is_initialized() and not launched():
            raise InterlaceError(
                "no group: call this inside a function run by interlace.run, or start the script "
                "with torchrun, srun or mpirun, or call torch.distributed.init_process_group first"
            )
        communicator = joined_group() or init()
    return communicator


def _is_left_over() -> bool:
    return _made_from is not None and (
        not dist.is_initialized() or _made_from() is not dist.group.WORLD
    )


def joined_group() -> Communicator | None:
    """Return the caller's default group, or None if it would have to be made first."""
    communicator = None if _is_left_over() else _default.get() or _of_run or _of_process
    if communicator is None and dist.is_initialized():
        # the backend may be interlace; not kept, because it ends with torch's group
        whole: dist.ProcessGroup | None = dist.group.WORLD
        communicator = whole.interlace_communicator if isinstance(whole, OnInterlace) else None
    return communicator


def simulated_ranks() -> int:
    """Return the number of ranks that torch's ``LocalTensorMode`` simulates in this process, or 0."""
    module: Any = sys.modules.get("torch.distributed._local_tensor")
    mode = module.enabled_local_tensor_mode() if module is not None else None
    return 0 if mode is None else len(mode.ranks)


class OnInterlace:
    """A torch process group whose collectives are interlace's."""

    interlace_communicator: Communicator

    def reunited(self, ranks: Sequence[int] | None) -> Any:
        """Return the group that takes this group's place after :func:`interlace.shrink`."""
        raise NotImplementedError  # returns the group after :func:`interlace.shrink`


def world_size_of(name: str) -> int:
    """Return the size of the group of that name. A group of torch need not be joined for it."""
    if dist.is_initialized() and (simulated_ranks() or joined_group() is None):
        if name == DEFAULT_NAME:
            return dist.get_world_size()
        with contextlib.suppress(RuntimeError, LookupError, ValueError):
            return int(torch_groups.resolve(name).size())
    elif name == DEFAULT_NAME and simulated_ranks():
        return simulated_ranks()
    return resolve(name).world_size


def init(
    *, timeout: float | timedelta = DEFAULT_TIMEOUT, device: str | torch.device | None = None
) -> Communicator:
    """Join the default group of a job with several processes, one rank each, on one host or several.

    The first use of the default group calls this. Rank, world size and store come from
    ``torch.distributed`` if that is initialized. Otherwise they come from the variables that ``torchrun``
    sets (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), or from another launcher
    (:func:`interlace.launched`). ``timeout``, in seconds, limits every wait of the group. ``device`` is the
    device of the group's tensors: "cpu", or "cuda" for GPUs, which ranks of one host may share. The default
    is "cuda" if every rank has its own GPU and torch's default group, if initialized, is not only for CPUs.

    Returns the group. Raises :class:`InterlaceError` if neither source is there, ValueError that names
    a wrong variable, and ``PlaceUnavailableError`` if ``device`` is "cuda" and some rank cannot use a GPU.

    >>> import interlace, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> interlace.init(timeout=60).ranks
    (0,)
    >>> interlace.shutdown()
    >>> dist.destroy_process_group()
    """
    global _of_process, _made_from
    seconds = positive_seconds("timeout", timeout)
    local_rank()  # checked here, because other ranks wait for one with a GPU when it is used
    if _of_process is not None:
        raise InterlaceError(
            "interlace.init was already called in this process; call shutdown() first"
        )
    if dist.is_initialized():
        if dist.get_backend() == "fake":
            raise InterlaceError(
                "torch's default group is a fake group without other ranks; under LocalTensorMode use "
                "interlace.functional, which needs no group"
            )
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store: Any = torch_groups.default_store()
    else:
        launched()
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in os.environ]:
            raise InterlaceError(
                f"interlace.init: {', '.join(missing)} not set; start the script with torchrun, or set "
                "them: docs/how-to/run/launching.md"
            )
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # torchrun's agent serves the store already; without torchrun rank 0 serves it
        agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        store = torch_groups.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0 and not agent_store,
            timeout=timedelta(seconds=seconds),
        )
    kind = None if device is None else torch.device(device)
    if kind is not None and kind.type not in ("cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda", got {device!r} on rank {rank}')
    place = connect_place(store, rank, world_size, timeout=seconds, name="default")
    if kind is None and _may_be_gpus() and connect.all_have_gpus(place):
        kind = torch.device("cuda")
    if kind is not None and kind.type == "cuda":
        device_of_rank = kind if kind.index is not None else None
        place = connect.on_gpu(place, device_of_rank, timeout=seconds)
    _of_process = Communicator(place, range(world_size))
    _made_from = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
    return _of_process


def _may_be_gpus() -> bool:
    """Return whether torch's default group, if there is one, serves GPUs; the same on all ranks."""
    if not dist.is_initialized():
        return True
    return any(device.type == "cuda" for device in dist.group.WORLD._device_types)  # type: ignore[union-attr]


def shutdown() -> None:
    """Leave the default group of this process, which :func:`init` made, and free its memory.

    Idempotent, not collective. Ranks of :func:`interlace.run` do not need it.

    >>> interlace.shutdown()
    """
    global _of_process, _made_from
    _made_from = None
    if _of_process is not None:
        close(_of_process)
        _of_process.close()
        _of_process = None


def resolve(group: object) -> Communicator:
    """Return the communicator that ``group`` names. Every op takes a group in each of these forms:

    ============================  ====================================================================
    None                          all ranks
    a group                       from :func:`interlace.new_group`, or a torch ``ProcessGroup``
    ``DeviceMesh``                of one dimension
    ``(DeviceMesh, dim)``         the caller's row along a dimension, by number or name
    ``[0, 2]``                    ranks of the default group; made by its members on first use
    ``[[0, 2], [1, 3]]``          the list with the caller's rank; all lists have the same length
    name                          "0" for all ranks, a ``name`` of ``new_group``, a torch group's name
    ============================  ====================================================================

    Raises TypeError for anything else, ValueError if the caller is not a member.
    """
    if group is None:
        return default_group()
    if isinstance(group, Communicator):
        return group
    if isinstance(group, dist.ProcessGroup):
        return _from_process_group(group)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: the calling rank is not a member of it")
    if isinstance(group, str):
        return _from_name(group)
    if isinstance(group, DeviceMesh):
        return _from_mesh(group, None)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _from_mesh(*group)
    if isinstance(group, (list, tuple)):
        whole = default_group()
        return group_of(whole, chosen(whole, group))
    raise TypeError(
        "group must be None, a group from interlace.new_group, a torch ProcessGroup, a DeviceMesh, "
        f"(DeviceMesh, dim), ranks, or a name, got {group!r} ({type(group).__name__})"
    )


def check_group(group: object, of_handle: object) -> None:
    """Raise unless ``group``, if it is not None, has the ranks of the group of a handle."""
    ranks = resolve(of_handle).ranks
    if group is not None and resolve(group).ranks != ranks:
        raise ValueError(
            f"group has ranks {list(resolve(group).ranks)}, the handle's group has {list(ranks)}"
        )


def _from_name(name: str) -> Communicator:
    whole = default_group()
    found = group_named(whole, name)
    if found is not None:
        return found
    try:
        torch_group = torch_groups.resolve(name)
    except (RuntimeError, LookupError, ValueError) as error:
        raise ValueError(
            f"group: there is no group named {name!r} on rank {whole.rank}. Use {DEFAULT_NAME!r} for all "
            f"ranks, the name of a new_group or of one of torch's groups, or bind the name to a group: "
            f"GroupSpec({name!r}, size).bind(group)"
        ) from error
    return _from_process_group(torch_group)


def _from_mesh(mesh: DeviceMesh, dim: int | str | None) -> Communicator:
    whole = default_group()
    with whole.accepting():
        index = mesh_dim(mesh, dim)
    row = next((row for row in rows(mesh, index) if whole.rank in row), None)
    if row is None:
        raise ValueError(f"group: rank {whole.rank} is not in the mesh {mesh.mesh.tolist()}")
    group = None
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the mesh was made without process groups
            group = mesh.get_group(dim)
    return group_of(whole, tuple(row)) if group is None else resolve(group)


def _from_process_group(group: dist.ProcessGroup) -> Communicator:
    if isinstance(group, OnInterlace):
        return group.interlace_communicator
    communicator = _of_process_group.get(group)
    if communicator is None:
        whole = default_group()
        ranks = dist.get_process_group_ranks(group)
        if ranks == list(range(whole.world_size)):
            return whole
        place = connect_place(
            torch_groups.default_store(),
            ranks.index(dist.get_rank()),
            len(ranks),
            timeout=DEFAULT_TIMEOUT,
            name=f"group {group.group_name}",
        )
        if whole.device_type == "cuda":
            place = connect.on_gpu(place, whole.place.device, timeout=DEFAULT_TIMEOUT)
        communicator = _of_process_group[group] = Communicator(place, ranks)
    return communicator


def get_rank(group: object = None) -> int:
    """Return the caller's rank within ``group``, by default within all ranks.

    Raises ValueError if the caller is not a member, TypeError if ``group`` is not a group,
    :class:`InterlaceError` if there is no default group. Semantics: ``torch.distributed.get_rank``, which
    returns -1 on ranks outside the group.

    >>> interlace.run(interlace.get_rank, 2)
    [0, 1]
    """
    return resolve(group).rank


def get_world_size(group: object = None) -> int:
    """Return the number of ranks of ``group``, by default of all ranks.

    Raises as :func:`get_rank`. Semantics: ``torch.distributed.get_world_size``, which returns -1
    on ranks outside the group.

    >>> interlace.run(interlace.get_world_size, 2)
    [2, 2]
    """
    return resolve(group).world_size


def device() -> torch.device:
    """Return the device of the calling rank's tensors.

    It is the CPU in ``sim`` and ``shm``, and the rank's GPU elsewhere.

    >>> interlace.run(lambda: str(interlace.device()), 1)
    ['cpu']
    """
    return default_group().place.device
