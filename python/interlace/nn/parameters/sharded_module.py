"""The base of the layers: parameters that are parts of unsharded ones.

Initialisation makes each unsharded parameter, as the unsharded layer does and with its draws from torch's
generator, and keeps this rank's part. So for one seed the weights are those of the unsharded model on any
number of ranks, and so is what is drawn next. At most one unsharded layer is in memory at a time.
"""

import abc
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from interlace.nn.parameters.sharding import OnGroup, Sharding, layout
from interlace.runtime.core.communicator import Communicator


@dataclass(frozen=True)
class _Drawn:
    """What parameters were initialised from: the ``state`` of torch's generator, if it was used."""

    state: torch.Tensor
    versions: list[Any]


class ShardedModule(OnGroup):
    """A module whose own parameters carry a :class:`Sharding`.

    ``state_dict()`` gives this rank's parts. ``load_state_dict`` takes for each of them this rank's part,
    the unsharded tensor (told by its shape), or a DTensor.

    Raises ValueError or TypeError for a ``group`` that is none; ``load_state_dict`` RuntimeError, as
    torch's, for other shapes. The keys are those of the unsharded ``torch.nn`` layers.

    >>> def loaded():
    ...     layer = nn.ColumnParallelLinear(2, 4)  # a ShardedModule, as all layers of interlace.nn
    ...     layer.load_state_dict(torch.nn.Linear(2, 4).state_dict())
    ...     return isinstance(layer, nn.ShardedModule), tuple(layer.state_dict()["weight"].shape)
    >>> interlace.run(loaded, 2)
    [(True, (2, 2)), (True, (2, 2))]
    """

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._shardings: dict[str, Sharding] = {}
        self._found_alike = False
        self._drawn: _Drawn | None = None

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], dim: int | None, copies: int = 1, **made: Any
    ) -> None:
        """This rank's part of a parameter of ``shape``, not initialised; ``made``: as ``torch.empty``'s."""
        size = 0 if dim is None else shape[dim]
        sharding = self._shardings[name] = Sharding(dim, size, self._held, copies)
        local = torch.empty(sharding.local_shape(shape), **made)
        self.register_parameter(name, torch.nn.Parameter(local))
        self._attach()

    def _attach(self) -> None:
        """Parameters that torch has replaced get their shardings again."""
        for name, sharding in self._shardings.items():
            parameter: Any = self._parameters.get(name)
            if parameter is not None:
                parameter.sharding = sharding

    @abc.abstractmethod
    def _initial(self, device: torch.device, dtype: torch.dtype) -> Iterable[tuple[str, Any]]:
        """Name and whole value of each parameter, in the order in which the unsharded layer draws."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise, as the unsharded layer would under the generator's state. Nothing on ``meta``."""
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

    def _versions(self) -> list[Any]:
        """They change with the values of the parameters."""
        there = [each for each in self._parameters.values() if each is not None]
        return [(id(each), each._version, _beginning(each)) for each in there]

    def _check_alike(self, group: Communicator, *names: str, layer: Any = None) -> None:
        """Raise on all ranks unless parameters are equal: one host message, before the first forward.

        Those called ``names`` themselves; of the others, which are parts, the state of torch's generator
        that they were drawn from, if they are still what was drawn. ``layer``: whose part this module is.
        """
        if self._found_alike or group.world_size == 1:
            return
        kind, drawn = type(layer or self).__name__, self._drawn
        there = {name: self._parameters.get(name) for name in names}
        said = {name: f"{name} of {kind} has other values" for name in names}
        mine: dict[str, torch.Tensor]
        mine = {said[name]: each for name, each in there.items() if each is not None}
        if drawn is not None and drawn.versions == self._versions():
            mine[f"{kind} was initialised from another state of torch's generator"] = drawn.state
        check_equal(kind, group, mine)
        self._found_alike, self._drawn = True, None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._attach()
        return result

    def __getstate__(self) -> dict[str, Any]:
        drawn = self._drawn
        still = drawn if drawn is not None and drawn.versions == self._versions() else None
        return {**self.__dict__, "_drawn": still}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._drawn is not None:
            self._drawn = _Drawn(self._drawn.state, self._versions())
        self._attach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = dict(state_dict)
        for name, sharding in self._shardings.items():
            parameter, value = self._parameters.get(name), own.get(prefix + name)
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            again = _is_dtensor(parameter)  # split once more, by fully_shard
            if _is_dtensor(value):
                if again and _lie_alike(value, parameter):
                    continue
                value = _part_of(value, sharding)
            here = tuple(parameter.shape)
            whole = sharding.full_shape(here)
            if tuple(value.shape) in (here, whole):
                if tuple(value.shape) != here:
                    value = sharding.local(value).clone()
                own[prefix + name] = _split_as(parameter, value) if again else value
                continue
            own[prefix + name] = parameter
            error_msgs.append(
                f"size mismatch for {prefix + name}: got shape {tuple(value.shape)}; rank "
                f"{self.group.rank} of {self.group.world_size} takes its part, {here}, or the whole, "
                f"{whole}."
            )
        super()._load_from_state_dict(
            own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._attach()


def _beginning(parameter: torch.Tensor) -> list[float]:
    """The first values, as ``parameter.data`` is changed without another version; of plain memory."""
    plain = type(parameter) is torch.nn.Parameter and not parameter.is_meta
    there = plain and parameter.untyped_storage().nbytes()
    return parameter.detach().flatten()[:8].tolist() if there else []


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def check_equal(kind: str, group: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on all ranks unless each of ``tensors`` has the same bytes on all; keys are what is said then.

    One host message. A rank may have no tensor of a key.
    """
    found = group.agree(kind, {said: _digest(each) for said, each in tensors.items()})
    for said in dict.fromkeys(said for own in found for said in own):
        having = [(rank, own[said]) for rank, own in enumerate(found) if said in own]
        for rank, digest in having:
            if digest != having[0][1]:
                raise ValueError(
                    f"{said} on rank {rank} of the group than on rank {having[0][0]}: call "
                    "torch.manual_seed with one seed on all ranks before the layer is made, or load a "
                    "state dict"
                )


def _digest(tensor: torch.Tensor) -> str:
    # a copy: numpy would pin memory that fully_shard wants to give back
    data = tensor.detach().flatten().clone().view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def _is_dtensor(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether two DTensors have their parts on the same ranks."""
    alike = one.shape == other.shape and one.device_mesh == other.device_mesh
    return alike and tuple(one.placements) == tuple(other.placements)


def _split_as(parameter: Any, value: torch.Tensor) -> Any:
    """``value``, which all ranks of the parameter's own mesh have, as that DTensor."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _part_of(value: Any, sharding: Sharding) -> torch.Tensor:
    """A DTensor's part on this rank, or on all of them; communicates if it lies otherwise."""
    mesh, placements = layout(sharding, value.device_mesh.device_type)
    same_ranks = torch.equal(value.device_mesh.mesh, mesh.mesh)
    same = same_ranks and tuple(value.placements) == tuple(placements)
    return value.to_local() if same else _gathered(value)


@torch.no_grad()
def _gathered(value: Any) -> torch.Tensor:
    """All of a DTensor, also on a mesh that has no process groups of torch, as of a list of ranks."""
    from interlace.tensor import from_dtensor

    try:
        value.device_mesh.get_all_groups()
    except RuntimeError:
        return from_dtensor(value).full_tensor()
    return value.full_tensor()  # type: ignore[no-any-return]
