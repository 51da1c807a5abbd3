"""An optimizer's state in checkpoints: moments lie as the parameters they belong to."""

from __future__ import annotations

from typing import Any

import torch

from interlace.nn.state_dicts import as_dtensor, shardings


def sharded_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """``{"weight.exp_avg": tensor, ...}``: the state by the parameters' keys, for
    ``torch.distributed.checkpoint``.

    What has a parameter's shape is a DTensor as in :func:`interlace.nn.sharded_state_dict`, anything else
    (step counts) a plain tensor. All are over the optimizer's memory, so a checkpoint is loaded into the
    optimizer in place, on any number of ranks. An optimizer that has made no step gets the state first that
    it starts with, zeros as a rule. Learning rates and other options are not in the dictionary.

    Raises ValueError for a parameter that ``module`` has not, and TypeError for state that is no tensor.

    >>> import interlace, torch
    >>> from interlace import nn
    >>> def keys():
    ...     layer = nn.RMSNorm(2)
    ...     return list(nn.sharded_optimizer_state_dict(layer, torch.optim.AdamW(layer.parameters())))
    >>> interlace.run(keys, 1)
    [['weight.step', 'weight.exp_avg', 'weight.exp_avg_sq']]
    """
    if not optimizer.state:
        _make_state(optimizer)
    own = shardings(module)
    names = {parameter: key for key, parameter in module.named_parameters()}
    result: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            key = names.get(parameter)
            if key is None:
                raise ValueError(
                    f"optimizer has a parameter of shape {tuple(parameter.shape)} that the module has not"
                )
            for name, value in optimizer.state.get(parameter, {}).items():
                if value is None:  # momentum that is off
                    continue
                if not isinstance(value, torch.Tensor):
                    raise TypeError(
                        f"optimizer: {name} of {key} is a {type(value).__name__}, not a tensor"
                    )
                if key in own and value.shape == parameter.shape:
                    value = as_dtensor(value, own[key])
                result[f"{key}.{name}"] = value
    return result


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """The state that ``optimizer`` starts with, by a step of which nothing else is left.

    Its gradients are zero, and so is the weight decay, which some optimizers add to them; learning rates
    stay, from which others make their state. The step is not counted.
    """
    decays: list[tuple[dict[str, Any], Any]] = []
    kept: list[tuple[torch.Tensor, Any, torch.Tensor]] = []
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            decays.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0
        for parameter in group["params"]:
            kept.append((parameter, parameter.grad, parameter.detach().clone()))
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        with torch.no_grad():
            for parameter, grad, value in kept:
                parameter.copy_(value)
                parameter.grad = grad
    for state in optimizer.state.values():
        for name, start in (("step", 0), ("mu_product", 1)):  # of NAdam
            if isinstance(state.get(name), torch.Tensor):
                state[name].fill_(start)
