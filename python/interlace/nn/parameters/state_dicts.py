"""State dicts of models with layers of ``interlace.nn`` in them: unsharded, and as DTensors."""

from typing import Any

import torch
import torch.distributed as dist

from interlace.nn.parameters.sharded_module import ShardedModule
from interlace.nn.parameters.sharding import Sharding, layout

_WRAPPER = "_checkpoint_wrapped_module."  # which state dicts leave out of their keys


def shardings(module: torch.nn.Module) -> dict[str, Sharding]:
    """The sharding of every parameter below ``module`` that has one, by its key in ``state_dict()``.

    ``module`` is any tree of ``torch.nn`` modules; parameters that are not of ``interlace.nn`` have none.
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
    """The state dict of the unsharded model, which loads into that with ``strict=True``. Collective.

    ``module`` is any tree of modules; parameters that are not of ``interlace.nn`` are taken as they are. On
    all ranks, or on rank ``group_dst`` of each layer's group alone, and empty elsewhere. Tensors that need
    no gathering are those of the model, not copies, as in ``state_dict()``.

    >>> def same():
    ...     torch.manual_seed(0)
    ...     layer = nn.ColumnParallelLinear(2, 4)
    ...     whole = torch.nn.Linear(2, 4)
    ...     print(whole.load_state_dict(nn.full_state_dict(layer)))
    >>> _ = interlace.run(same, 1)
    <All keys matched successfully>
    """
    own = shardings(module)
    result = {}
    alone = set()
    for key, value in module.state_dict().items():
        sharding = own.get(key)
        if isinstance(value, torch.Tensor):
            whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
            if sharding is not None:
                alone.add(group_dst is not None and sharding.group.rank != group_dst)
                whole = sharding.full(whole, group_dst=group_dst)
            value = whole
        result[key] = value
    return {} if alone == {True} else result


def sharded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The state dict with this rank's parts as DTensors, for ``torch.distributed.checkpoint``.

    Nothing is copied or communicated: the DTensors are over the parameters' memory, so a checkpoint is
    loaded into the model in place. Saved on any number of ranks, it loads on any other. Replicated
    parameters, and those of groups of one rank without torch.distributed, are plain tensors. What
    ``fully_shard`` has split again is gathered over its own mesh, which is collective and copies: load with
    ``load_state_dict`` then.

    Raises ValueError if a group has several ranks and torch.distributed, on which checkpoints are built, is
    not initialized, or has other ranks.

    >>> def keys():  # of a group of one rank: plain tensors
    ...     return list(nn.sharded_state_dict(nn.ColumnParallelLinear(4, 6)))
    >>> interlace.run(keys, 1)
    [['weight', 'bias']]
    """
    own = shardings(module)
    result = dict(module.state_dict())
    for key, sharding in own.items():
        value = result.get(key)
        if value is not None:
            result[key] = as_dtensor(value, sharding)
    return result


def as_dtensor(local: torch.Tensor, sharding: Sharding) -> Any:
    """This rank's part as a DTensor over the same memory. One that ``fully_shard`` split is gathered."""
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
