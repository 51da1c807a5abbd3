"""Parameters that are parts of unsharded ones: their layout over a group, and the base of the layers.

Initialisation makes each unsharded parameter as the unsharded layer does, with the same draws from torch's
generator, and keeps this rank's part. So for one seed, the weights equal the unsharded model's on any
number of ranks, and later draws are the same. At most one unsharded layer is in memory at a time.
"""

import abc
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups
from interlace.groups.groups import resolve
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives.rooted import _gather
from interlace.ops.collectives.rootless import _all_gather
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.communicator import Communicator


class HeldGroup:
    """A group as a module keeps it: its name and the resolved group. Copies of the module share it."""

    def __init__(self, named: Group) -> None:
        self.named = named
        self.communicator: Communicator = resolve(named)
        self.replicas: dict[int, Communicator] = {}
        self.meshes: dict[tuple[int, str], Any] = {}

    def of_replicas(self, copies: int) -> Communicator:
        """Return the group of ``copies`` neighbouring ranks with this rank. Collective at first."""
        if copies not in self.replicas:
            for first in range(0, self.communicator.world_size, copies):
                part = self.communicator.split(range(first, first + copies))
                if part is not None:
                    self.replicas[copies] = part
        return self.replicas[copies]

    def __deepcopy__(self, memo: object) -> "HeldGroup":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module of interlace.nn holds a group of running ranks and cannot be pickled; save its "
            "state_dict(), or interlace.nn.full_state_dict(module)"
        )


class OnGroup(torch.nn.Module):
    """A module that communicates over ``group``, which several modules may share."""

    def __init__(self, group: Group | HeldGroup) -> None:
        super().__init__()
        self._held = group if isinstance(group, HeldGroup) else HeldGroup(group)

    @property
    def group(self) -> Communicator:
        return self._held.communicator

    def _on_all_ranks(self, step: Callable[..., torch.Tensor], *given: object) -> torch.Tensor:
        """Run ``step(*given)``, a part of the layer. If it fails on one rank, it fails on all ranks."""
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
    size : length of the whole along ``dim``; 0 if ``dim`` is None.
    copies : so many neighbouring ranks hold the same part, if there are fewer key-value heads than ranks.

    Parts are as in ``torch.chunk``; the placement of a DTensor would be ``Shard(dim)``.

    >>> def shapes():
    ...     weight = nn.ColumnParallelLinear(4, 6).weight
    ...     whole = weight.sharding.full(weight.detach())
    ...     assert torch.equal(weight.sharding.local(whole), weight)
    ...     return tuple(weight.shape), tuple(whole.shape), weight.sharding.part()
    >>> interlace.run(shapes, 2)
    [((3, 4), (6, 4), (0, 3)), ((3, 4), (6, 4), (3, 3))]
    >>> def shapes_of_parts():
    ...     sharding = nn.ColumnParallelLinear(4, 6).weight.sharding
    ...     return sharding.local_shape((6, 4)), sharding.full_shape((3, 4))
    >>> interlace.run(shapes_of_parts, 2)[0]
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
        """Return the first index along ``dim`` and the length of the part of ``rank`` (default: own)."""
        rank = self.group.rank if rank is None else rank
        parts = split_rows(self.size, self.group.world_size // self.copies)
        return parts[rank // self.copies]  # type: ignore[no-any-return]

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, a view of ``whole``, which has the unsharded shape. No communication.

        Raises RuntimeError (torch's) if ``whole`` is too short.
        """
        return whole if self.dim is None else whole.narrow(self.dim, *self.part())

    def _with_length(self, shape: tuple[int, ...], length: int) -> tuple[int, ...]:
        if self.dim is None:
            return shape
        return (*shape[: self.dim], length, *shape[self.dim + 1 :])

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this rank's part if the whole has ``shape``."""
        return self._with_length(shape, self.part()[1])

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole if this rank's part has ``shape``."""
        return self._with_length(shape, self.size)

    def full(self, local: torch.Tensor, *, group_dst: int | None = None) -> torch.Tensor | None:
        """Gather the whole from every rank's ``local``: a parameter, a gradient or an optimizer's moment.

        ``local`` has this rank's shape. The result is on all ranks, or only on rank ``group_dst`` of the
        group, and None on the others. Collective, unless every rank has the whole. No gradients flow
        through it. Raises ValueError or TypeError on every rank, before any data moves.
        """
        group = self.group.on(local)
        here = group_dst is None or group_dst == group.rank
        if self.dim is None or group.world_size == 1:
            return local.detach() if here else None
        local = local.detach().contiguous()
        lengths = [self.part(rank)[1] for rank in range(group.world_size)]
        parts = [
            local.new_empty(self._with_length(local.shape, length)) for length in lengths if here
        ]
        if group_dst is None:
            _all_gather(group, (parts, local))
        else:
            _gather(group, (local, parts if here else None), (None, group_dst))
        return torch.cat(parts[:: self.copies], self.dim) if here else None


def layout(sharding: Sharding, device_type: str) -> tuple[Any, tuple[Any, ...]]:
    from torch.distributed.tensor import Replicate, Shard

    placements: tuple[object, ...] = (Replicate() if sharding.dim is None else Shard(sharding.dim),)
    if sharding.copies > 1:
        placements += (Replicate(),)
    meshes = sharding.held.meshes
    key = (sharding.copies, device_type)
    if key not in meshes:
        meshes[key] = _mesh(sharding, device_type)
    return meshes[key], placements


def _mesh(sharding: Sharding, device_type: str) -> Any:
    """Return the mesh of the group's ranks: the caller's, or a new one that makes no process groups."""
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
    if isinstance(named, str) and named != groups.DEFAULT_NAME:
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
    # torch's ops on such DTensors, such as full_tensor(), need a group of torch: name one
    return DeviceMesh(device_type, torch.tensor(ranks), _init_backend=False)


def positive(**sizes: object) -> None:
    """Raise TypeError or ValueError for the first of ``sizes`` (by argument) that is not a positive int."""
    for argument, value in sizes.items():
        if checks.integer(argument, value) < 1:
            raise ValueError(f"{argument} must be positive, got {value}")


def divisible(argument: str, value: int, group: Communicator) -> None:
    positive(**{argument: value})
    if value % group.world_size:
        raise ValueError(
            f"{argument} must be a positive multiple of the group's size {group.world_size}, got {value}"
        )


@dataclass(frozen=True)
class _Drawn:
    """The ``state`` of torch's generator before parameters were initialised, if that used it."""

    state: torch.Tensor
    versions: list[tuple[int, int, list[float]]]


class ShardedModule(OnGroup):
    """A module whose own parameters carry a :class:`Sharding`.

    ``state_dict()`` returns this rank's parts. For each of them, ``load_state_dict`` accepts this rank's
    part, the unsharded tensor (recognised by its shape), or a DTensor.

    Raises ValueError or TypeError for a ``group`` that is not a group; ``load_state_dict`` raises torch's
    RuntimeError for other shapes. The keys are those from the unsharded ``torch.nn`` layers.

    >>> def loaded():
    ...     layer = nn.ColumnParallelLinear(2, 4)  # a ShardedModule, as all layers of interlace.nn
    ...     layer.load_state_dict(torch.nn.Linear(2, 4).state_dict())
    ...     return isinstance(layer, nn.ShardedModule), tuple(layer.state_dict()["weight"].shape)
    >>> interlace.run(loaded, 2)
    [(True, (2, 2)), (True, (2, 2))]
    """

    def __init__(self, group: Group | HeldGroup) -> None:
        super().__init__(group)
        self._shardings: dict[str, Sharding] = {}
        self._found_alike = False
        self._drawn: _Drawn | None = None

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], dim: int | None, copies: int = 1, **made: Any
    ) -> None:
        """Add this rank's uninitialised part of a parameter of ``shape``; ``made``: for torch.empty."""
        size = 0 if dim is None else shape[dim]
        sharding = self._shardings[name] = Sharding(dim, size, self._held, copies)
        local = torch.empty(sharding.local_shape(shape), **made)
        self.register_parameter(name, torch.nn.Parameter(local))
        self._attach()

    def _attach(self) -> None:
        """Attach shardings again to parameters that torch has replaced."""
        for name, sharding in self._shardings.items():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter.sharding = sharding

    @abc.abstractmethod
    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Any]]:
        """Yield name and whole value of each parameter, in the order of the unsharded layer's draws."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as the unsharded layer would with the generator's state. Do nothing on ``meta``."""
        some = next(iter(self._parameters.values()), None)
        if some is None or some.is_meta:
            return
        before = _generator_state(some.device)
        for name, whole in self._initial(some.device, some.dtype):
            parameter = self._parameters[name]
            assert parameter is not None
            parameter.copy_(self._shardings[name].local(whole.detach()))
        drew = not torch.equal(before, _generator_state(some.device))
        counted = not some.is_inference()
        self._found_alike = False
        self._drawn = _Drawn(before, self._versions()) if drew and counted else None

    def _versions(self) -> list[tuple[int, int, list[float]]]:
        parameters = [parameter for parameter in self._parameters.values() if parameter is not None]
        return [
            (id(parameter), parameter._version, _beginning(parameter)) for parameter in parameters
        ]

    def _check_alike(self, group: Communicator, *names: str, layer: object = None) -> None:
        """Raise on all ranks unless parameters are equal: one host message, before the first forward.

        Parameters in ``names`` are compared by value. Other parameters are parts: if they have not changed
        since they were drawn, ranks compare the state of torch's generator before. ``layer``: the layer
        that contains this module.
        """
        if self._found_alike or group.world_size == 1:
            return
        kind, drawn = type(layer or self).__name__, self._drawn
        parameters = {name: self._parameters.get(name) for name in names}
        messages = {name: f"{name} of {kind} has other values" for name in names}
        by_message: dict[str, torch.Tensor]
        by_message = {messages[name]: each for name, each in parameters.items() if each is not None}
        if drawn is not None and drawn.versions == self._versions():
            by_message[f"{kind} was initialised from another state of torch's generator"] = (
                drawn.state
            )
        check_equal(kind, group, by_message)
        self._found_alike, self._drawn = True, None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._attach()
        return result

    def __getstate__(self) -> dict[str, object]:
        drawn = self._drawn
        still = drawn if drawn is not None and drawn.versions == self._versions() else None
        return {**self.__dict__, "_drawn": still}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._drawn is not None:
            self._drawn = _Drawn(self._drawn.state, self._versions())
        self._attach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: object,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        split = dict(state_dict)
        for name, sharding in self._shardings.items():
            parameter, value = self._parameters.get(name), split.get(prefix + name)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            again = _is_dtensor(parameter)  # fully_shard has split it once more
            if _is_dtensor(value):
                if again and _lie_alike(value, parameter):
                    continue
                value = _part_of(value, sharding)
            here = tuple(parameter.shape)
            whole = sharding.full_shape(here)
            if tuple(value.shape) in (here, whole):
                if tuple(value.shape) != here:
                    value = sharding.local(value).clone()
                split[prefix + name] = _split_as(parameter, value) if again else value
                continue
            split[prefix + name] = parameter
            error_msgs.append(
                f"size mismatch for {prefix + name}: got shape {tuple(value.shape)}; rank "
                f"{self.group.rank} of {self.group.world_size} accepts its part, {here}, or the whole, "
                f"{whole}."
            )
        super()._load_from_state_dict(
            split, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._attach()


def _beginning(parameter: torch.Tensor) -> list[float]:
    """Return the first values, which also show changes of ``parameter.data``; [] unless memory is plain."""
    plain = type(parameter) is torch.nn.Parameter and not parameter.is_meta
    has_data = plain and parameter.untyped_storage().nbytes()
    return parameter.detach().flatten()[:8].tolist() if has_data else []


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def check_equal(kind: str, group: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on all ranks unless each of ``tensors`` has the same bytes on all ranks that have it.

    The keys begin the error messages. Ranks exchange one host message.
    """
    found = group.agree(kind, {message: _digest(each) for message, each in tensors.items()})
    for message in dict.fromkeys(message for digests in found for message in digests):
        having = [
            (rank, digests[message]) for rank, digests in enumerate(found) if message in digests
        ]
        for rank, digest in having:
            if digest != having[0][1]:
                raise ValueError(
                    f"{message} on rank {rank} of the group than on rank {having[0][0]}: call "
                    "torch.manual_seed with one seed on all ranks before the layer is made, or load a "
                    "state dict"
                )


def _digest(tensor: torch.Tensor) -> str:
    # a copy: numpy would pin memory that fully_shard has to release
    data = tensor.detach().flatten().clone().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _is_dtensor(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _lie_alike(one: Any, other: Any) -> bool:
    """Return whether two DTensors have their parts on the same ranks."""
    alike = one.shape == other.shape and one.device_mesh == other.device_mesh
    return alike and tuple(one.placements) == tuple(other.placements)


def _split_as(parameter: Any, value: torch.Tensor) -> Any:
    """Return ``value``, which all ranks of the parameter's own mesh have, as a DTensor like it."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _part_of(value: Any, sharding: Sharding) -> torch.Tensor:
    """Return a DTensor's part on this rank, or the whole. Communicates if its layout is another one."""
    mesh, placements = layout(sharding, value.device_mesh.device_type)
    same_ranks = torch.equal(value.device_mesh.mesh, mesh.mesh)
    same = same_ranks and tuple(value.placements) == tuple(placements)
    return value.to_local() if same else _gather_whole(value)


@torch.no_grad()
def _gather_whole(value: Any) -> torch.Tensor:
    """Return the whole of a DTensor, even on a mesh without torch's process groups, as for a rank list."""
    from interlace.tensor import from_dtensor

    try:
        value.device_mesh.get_all_groups()
    except RuntimeError:
        return from_dtensor(value).full_tensor()
    return value.full_tensor()  # type: ignore[no-any-return]
