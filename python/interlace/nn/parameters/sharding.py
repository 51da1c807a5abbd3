"""Sharding of a parameter over a group: the part of it that a rank holds, and the DTensor that lies so."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from interlace.groups import rank_lists
from interlace.groups.groups import resolve
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives.rooted import _gather
from interlace.ops.collectives.rootless import _all_gather
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import Communicator


class HeldGroup:
    """A group as a module keeps it: as it was named, and resolved. Copies of the module share it."""

    def __init__(self, named: Any) -> None:
        self.named = named
        self.communicator: Communicator = resolve(named)
        self.replicas: dict[int, Communicator] = {}
        self.meshes: dict[tuple[int, str], Any] = {}

    def of_replicas(self, copies: int) -> Communicator:
        """The group of the ``copies`` neighbouring ranks of which this rank is one. Collective at first."""
        if copies not in self.replicas:
            for first in range(0, self.communicator.world_size, copies):
                part = self.communicator.split(range(first, first + copies))
                if part is not None:
                    self.replicas[copies] = part
        return self.replicas[copies]

    def __deepcopy__(self, memo: Any) -> "HeldGroup":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module of interlace.nn holds a group of running ranks and cannot be pickled; save its "
            "state_dict(), or interlace.nn.full_state_dict(module)"
        )


class OnGroup(torch.nn.Module):
    """A module that communicates over ``group``, which may be one that another module holds."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._held = group if isinstance(group, HeldGroup) else HeldGroup(group)

    @property
    def group(self) -> Communicator:
        return self._held.communicator

    def _on_all_ranks(self, step: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """``step(*given)``, in the middle of the layer: where it fails on one rank, it does on all."""
        if torch.compiler.is_compiling() or modes_active():
            return step(*given)
        with self.group.accepting(type(self).__name__):
            return step(*given)


@dataclass(frozen=True)
class Sharding:
    """A parameter's layout over a group: ``parameter.sharding`` of the layers of ``interlace.nn``.

    Attributes
    ----------
    dim : the dimension that is split as ``torch.chunk`` splits; None if every rank holds the whole.
    size : length of the whole along ``dim``; 0 if that is None.
    copies : so many neighbouring ranks hold the same part, as key-value heads that are fewer than ranks.

    Parts are those of ``torch.chunk``; a DTensor would have ``Shard(dim)``.

    >>> def shapes():
    ...     weight = nn.ColumnParallelLinear(4, 6).weight
    ...     whole = weight.sharding.full(weight.detach())
    ...     assert torch.equal(weight.sharding.local(whole), weight)
    ...     return tuple(weight.shape), tuple(whole.shape), weight.sharding.part()
    >>> interlace.run(shapes, 2)
    [((3, 4), (6, 4), (0, 3)), ((3, 4), (6, 4), (3, 3))]
    >>> def told():
    ...     sharding = nn.ColumnParallelLinear(4, 6).weight.sharding
    ...     return sharding.local_shape((6, 4)), sharding.full_shape((3, 4))
    >>> interlace.run(told, 2)[0]
    ((3, 4), (6, 4))
    """

    dim: int | None
    size: int
    held: HeldGroup = field(repr=False, compare=False)
    copies: int = 1

    @property
    def group(self) -> Communicator:
        """The group over which the whole is split, or replicated."""
        return self.held.communicator

    def part(self, rank: int | None = None) -> tuple[int, int]:
        """First index along ``dim`` and length of what ``rank`` holds, by default the calling one."""
        rank = self.group.rank if rank is None else rank
        parts = split_rows(self.size, self.group.world_size // self.copies)
        return parts[rank // self.copies]  # type: ignore[no-any-return]

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, a view of ``whole``, which has the unsharded shape. No communication.

        Raises RuntimeError, torch's, for a whole that is too short.
        """
        return whole if self.dim is None else whole.narrow(self.dim, *self.part())

    def _with_length(self, shape: tuple[int, ...], length: int) -> tuple[int, ...]:
        if self.dim is None:
            return shape
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this rank's part of a whole of ``shape``."""
        return self._with_length(shape, self.part()[1])

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole of which this rank has a part of ``shape``."""
        return self._with_length(shape, self.size)

    def full(self, local: torch.Tensor, *, group_dst: int | None = None) -> torch.Tensor | None:
        """The whole of every rank's ``local``: a parameter, its gradient, an optimizer's moment.

        ``local`` has this rank's shape. On all ranks, or on rank ``group_dst`` of the group alone and None
        on the others. Collective, unless every rank has the whole. No gradients flow through it.
        Raises ValueError or TypeError on every rank, before any data moves.
        """
        group = self.group.on(local)
        here = group_dst is None or group_dst == group.rank
        if self.dim is None or group.world_size == 1:
            return local.detach() if here else None
        local = local.detach().contiguous()
        lengths = [self.part(rank)[1] for rank in range(group.world_size)]
        parts = [local.new_empty(self._with_length(local.shape, each)) for each in lengths if here]
        if group_dst is None:
            _all_gather(group, (parts, local))
        else:
            _gather(group, (local, parts if here else None), (None, group_dst))
        return torch.cat(parts[:: self.copies], self.dim) if here else None


def layout(sharding: Sharding, device_type: str) -> tuple[Any, tuple[Any, ...]]:
    """The mesh and the placements under which a DTensor lies as a parameter of ``sharding``."""
    from torch.distributed.tensor import Replicate, Shard

    placements: tuple[Any, ...] = (Replicate() if sharding.dim is None else Shard(sharding.dim),)
    if sharding.copies > 1:
        placements += (Replicate(),)
    meshes = sharding.held.meshes
    key = (sharding.copies, device_type)
    if key not in meshes:
        meshes[key] = _mesh(sharding, device_type)
    return meshes[key], placements


def _mesh(sharding: Sharding, device_type: str) -> Any:
    """The mesh of the group's ranks: the caller's own, else one that makes no process groups."""
    from torch.distributed.device_mesh import DeviceMesh

    named, ranks = sharding.held.named, list(sharding.group.ranks)
    if not dist.is_initialized() or dist.get_world_size() <= max(ranks):
        raise ValueError(
            f"sharded_state_dict: a group of the ranks {ranks} needs torch.distributed to be initialized "
            "with them"
        )
    if sharding.copies > 1:
        rows = torch.tensor(ranks).view(-1, sharding.copies)
        return DeviceMesh(device_type, rows, _init_backend=False)
    if isinstance(named, DeviceMesh):
        return named
    if isinstance(named, str) and named != rank_lists.DEFAULT_NAME:
        with contextlib.suppress(RuntimeError, LookupError, ValueError):
            named = dist.distributed_c10d._resolve_process_group(named)  # type: ignore[attr-defined,arg-type]
    if isinstance(named, dist.ProcessGroup):
        return DeviceMesh.from_group(named, device_type)
    if ranks == list(range(dist.get_world_size())):
        return DeviceMesh.from_group(dist.group.WORLD, device_type)  # type: ignore[arg-type]
    if isinstance(named, tuple) and isinstance(named[0], DeviceMesh):
        mesh, dim = named
        names = mesh.mesh_dim_names
        if isinstance(dim, int) and names is None:
            return DeviceMesh.from_group(mesh.get_group(dim), device_type)
        return mesh[dim if isinstance(dim, str) else names[dim]]
    # torch's ops on such DTensors, full_tensor() among them, need a group of torch: name one
    return DeviceMesh(device_type, torch.tensor(ranks), _init_backend=False)


def positive(**sizes: Any) -> None:
    """TypeError or ValueError for the first of ``sizes``, by argument, that is no positive int."""
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{argument} must be positive, got {value}")


def divisible(argument: str, value: Any, group: Communicator) -> None:
    """Raise unless ``value`` is a positive multiple of the size of ``group``."""
    positive(**{argument: value})
    if value % group.world_size:
        raise ValueError(
            f"{argument} must be a positive multiple of the group's size {group.world_size}, got {value}"
        )
