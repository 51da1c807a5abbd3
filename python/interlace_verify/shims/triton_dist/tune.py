"""``triton_dist.tune`` on a CPU: times mean nothing here, so the first configuration is used."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def autotune(
    config_space: Sequence[dict[str, Any]], key_fn: Any, prune_fn: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a function with the first configuration that ``prune_fn`` does not reject for the arguments."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_the_first(*args: Any, **kwargs: Any) -> Any:
            autotune_options = {
                name: kwargs.pop(name) for name in [*kwargs] if name.startswith("autotune")
            }
            fits = (
                prune_fn
                if prune_fn and autotune_options.get("autotune", True)
                else lambda *_, **__: True
            )
            config = next((c for c in config_space if fits(c, *args, **kwargs)), config_space[0])
            return function(*args, **{**config, **kwargs})

        return with_the_first

    return decorate


def to_hashable(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor that the choice depends on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
