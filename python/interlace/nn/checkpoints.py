"""State dicts of models that contain layers of ``interlace.nn``, and of their optimizers."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from interlace.nn.sharding import (
    ShardedModule,
    Sharding,
    _is_dtensor,
    _part_of,
    _split_as,
    layout,
)

_WRAPPER = "_checkpoint_wrapped_module."  # state dicts leave it out of their keys


def shardings(module: torch.nn.Module) -> dict[str, Sharding]:
    """Return the sharding of every parameter below ``module`` that has one, by its ``state_dict()`` key.

    ``module`` is any tree of ``torch.nn`` modules; only parameters of ``interlace.nn`` have a sharding.
    No communication.

    >>> def dims():
    ...     return {key: each.dim for key, each in nn.shardings(nn.RowParallelLinear(4, 2)).items()}
    >>> interlace.run(dims, 2)[0]
    {'weight': 1, 'bias': None}
    """
    found = {}
    for path, each in module.named_modules(remove_duplicate=False):
        if not isinstance(each, ShardedModule):
            continue
        for name, sharding in each._shardings.items():
            if each._parameters.get(name) is not None:
                key = f"{path}.{name}" if path else name
                found[key.replace(_WRAPPER, "")] = sharding
    return found


def full_state_dict(
    module: torch.nn.Module, *, group_dst: int | None = None
) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsharded model, which loads it with ``strict=True``. Collective.

    ``module`` is any tree of modules; parameters outside ``interlace.nn`` are taken as they are. The result
    is on all ranks, or only on rank ``group_dst`` of each layer's group, and empty elsewhere. Tensors that
    need no gathering are the model's own, not copies, as in ``state_dict()``.

    >>> def same():
    ...     torch.manual_seed(0)
    ...     layer = nn.ColumnParallelLinear(2, 4)
    ...     whole = torch.nn.Linear(2, 4)
    ...     print(whole.load_state_dict(nn.full_state_dict(layer)))
    >>> _ = interlace.run(same, 1)
    <All keys matched successfully>
    """
    by_key = shardings(module)
    result = {}
    alone = set()
    for key, value in module.state_dict().items():
        sharding = by_key.get(key)
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if sharding is not None:
                alone.add(group_dst is not None and sharding.group.rank != group_dst)
                whole = sharding.full(whole, group_dst=group_dst)
            value = whole
        result[key] = value
    return {} if alone == {True} else result


def sharded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict with this rank's parts as DTensors, for ``torch.distributed.checkpoint``.

    Nothing is copied or communicated. The DTensors share the parameters' memory, so loading a checkpoint
    into them updates the model in place. A checkpoint saved on any number of ranks loads on any other.
    Replicated parameters, and parameters on one rank without torch.distributed, are plain tensors. A
    parameter that ``fully_shard`` has split again is gathered over its own mesh. This is collective and
    makes a copy: then load with ``load_state_dict``.

    Raises ValueError if a group has several ranks and torch.distributed is not initialized, or has other
    ranks. Checkpoints need torch.distributed.

    >>> def keys():  # a group of one rank: plain tensors
    ...     return list(nn.sharded_state_dict(nn.ColumnParallelLinear(4, 6)))
    >>> interlace.run(keys, 1)
    [['weight', 'bias']]
    """
    by_key = shardings(module)
    result = dict(module.state_dict())
    for key, sharding in by_key.items():
        value = result.get(key)
        if value is not None:
            result[key] = as_dtensor(value, sharding)
    return result


def as_dtensor(local: torch.Tensor, sharding: Sharding) -> Any:
    """Return this rank's part as a DTensor over the same memory. Gather it if ``fully_shard`` split it."""
    from torch.distributed.tensor import DTensor

    if sharding.dim is None:
        return local
    if isinstance(local, DTensor):
        if sharding.group.world_size == 1:
            return local
        local = local.full_tensor()
    if sharding.group.world_size == 1 and not dist.is_initialized():
        return local
    mesh, placements = layout(sharding, local.device.type)
    shape = torch.Size(sharding.full_shape(tuple(local.shape)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride
    )


def sharded_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return ``{"weight.exp_avg": tensor, ...}``: the state by the parameters' keys, for
    ``torch.distributed.checkpoint``.

    State with a parameter's shape is a DTensor as in :func:`interlace.nn.sharded_state_dict`; other state
    (step counts) is a plain tensor. All share the optimizer's memory, so loading a checkpoint updates the
    optimizer in place, on any number of ranks. If the optimizer has made no step, its initial state, mostly
    zeros, is made first. Learning rates and other options are not in the dictionary. State that
    ``fully_shard`` has split again is gathered over its own mesh, which is collective and makes a copy:
    then pass the loaded dictionary to :func:`interlace.nn.load_optimizer_state_dict`.

    Raises ValueError for a parameter that ``module`` does not have. Also raises it before the first step
    for momentum with dampening, because torch's SGD starts this state from the first gradient. Raises
    TypeError for state that is not a tensor.

    >>> def keys():
    ...     layer = nn.RMSNorm(2)
    ...     return list(nn.sharded_optimizer_state_dict(layer, torch.optim.AdamW(layer.parameters())))
    >>> interlace.run(keys, 1)
    [['weight.step', 'weight.exp_avg', 'weight.exp_avg_sq']]
    """
    if not optimizer.state:
        _make_state(optimizer)
    by_key = shardings(module)
    result: dict[str, object] = {}
    for key, name, parameter, value in _entries(module, optimizer):
        if key in by_key and value.shape == parameter.shape:
            value = as_dtensor(value, by_key[key])
        result[f"{key}.{name}"] = value
    return result


@torch.no_grad()
def load_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object]
) -> None:
    """Load the result of :func:`sharded_optimizer_state_dict` after a checkpoint was loaded into it.

    This is needed only with ``fully_shard``, where the dictionary has copies; otherwise it shares the
    optimizer's memory. DTensors may have any layout, plain tensors are this rank's parts. Collective.

    Raises ValueError on all ranks for a missing entry, for another shape, or for a parameter that
    ``module`` does not have. Raises TypeError on all ranks for an entry that is not a tensor.

    >>> def copied():
    ...     layer = nn.RMSNorm(2)
    ...     optimizer = torch.optim.AdamW(layer.parameters())
    ...     state = nn.sharded_optimizer_state_dict(layer, optimizer)
    ...     state["weight.exp_avg"] = torch.tensor([1.0, 2.0])  # as if it had been loaded
    ...     nn.load_optimizer_state_dict(layer, optimizer, state)
    ...     return optimizer.state[layer.weight]["exp_avg"].tolist()
    >>> interlace.run(copied, 1)
    [[1.0, 2.0]]
    """
    if not optimizer.state:
        _make_state(optimizer)
    by_key = shardings(module)
    group = next((sharding.group for sharding in by_key.values()), None)
    op = "load_optimizer_state_dict"
    with contextlib.nullcontext() if group is None else group.accepting(op):
        copies = _copies(module, optimizer, state_dict, by_key)
    if group is not None:
        group.agree(op, None)  # otherwise ranks without an error would not learn of another's
    for value, found, sharding in copies:
        if sharding is not None and _is_dtensor(found):
            found = _part_of(found, sharding)
        if _is_dtensor(value) and not _is_dtensor(found):
            found = _split_as(value, found)
        value.copy_(found)


def _copies(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, object],
    by_key: Mapping[str, Sharding],
) -> list[tuple[torch.Tensor, torch.Tensor, Sharding | None]]:
    """Return each state, the entry to copy into it, and its sharding if it is split over a group."""
    result = []
    for key, name, parameter, value in _entries(module, optimizer):
        entry = f"{key}.{name}"
        if entry not in state_dict:
            raise ValueError(f"state_dict has no entry {entry}, which the optimizer has")
        found = state_dict[entry]
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"state_dict: {entry} is a {type(found).__name__}, not a tensor")
        sharding = by_key.get(key)
        if sharding is not None and (sharding.dim is None or value.shape != parameter.shape):
            sharding = None
        shape = tuple(value.shape)
        if sharding is not None and _is_dtensor(found):
            shape = sharding.full_shape(shape)
        if (here := tuple(found.shape)) != shape:
            raise ValueError(f"state_dict: {entry} must have shape {shape}, got {here}")
        if found is not value:
            result.append((value, found, sharding))
    return result


def _entries(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor]]:
    """Yield the parameter's key, the name of one of its states, the parameter, and the state."""
    names = {parameter: key for key, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            key = names.get(parameter)
            if key is None:
                raise ValueError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)}, the module does not"
                )
            for name, value in optimizer.state.get(parameter, {}).items():
                if value is None:  # momentum is off
                    continue
                if not isinstance(value, torch.Tensor):
                    kind = type(value).__name__
                    raise TypeError(f"optimizer: {name} of {key} is a {kind}, not a tensor")
                yield key, name, parameter, value


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the initial state of ``optimizer``, by a step that changes nothing else.

    The step's gradients are zero. So is the weight decay, as some optimizers add it to them. Learning rates
    stay, as some optimizers make their state from them.
    """
    for group in optimizer.param_groups:
        momentum, dampening = group.get("momentum", 0), group.get("dampening", 0)
        if momentum and dampening:
            raise ValueError(
                f"optimizer: momentum={momentum} with dampening={dampening} has no initial state: torch "
                "does not damp the first gradient, only later ones; make a step first"
            )
    decays = [(g, g["weight_decay"]) for g in optimizer.param_groups if "weight_decay" in g]
    parameters = [parameter for g in optimizer.param_groups for parameter in g["params"]]
    kept = [(each, each.grad, each.detach().clone()) for each in parameters]
    try:
        for group, _ in decays:
            group["weight_decay"] = 0.0
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        with torch.no_grad():
            for parameter, grad, value in kept:
                parameter.copy_(value)
                parameter.grad = grad
    for state in optimizer.state.values():
        for name, start in (("step", 0), ("mu_product", 1)):  # the latter is NAdam's
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(start)
