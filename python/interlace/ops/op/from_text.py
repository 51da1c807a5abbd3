"""Ops whose arguments are still a text: a dataclass is made of it, and their functions take positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from interlace.ops.op.op import Op, OpGradient

_TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "int": int,
    "bool": bool,
    "str": str,
    "float": float,
    "ScalarType": torch.dtype,
    "SymInt": torch.SymInt,
}


def _type(kind: str) -> Any:
    if kind.endswith("[]"):
        return list[_type(kind[:-2])]  # type: ignore[misc]
    return _type(kind[:-1]) | None if kind.endswith("?") else _TYPES[kind]


def from_text(
    name: str,
    text: str,
    start: Callable[..., Any],
    fake: Callable[..., Any],
    gradient: tuple[Callable[..., Any], Callable[..., Any]] | None,
    returns: str = "Tensor",
    communicates: dict[str, tuple[int, ...]] | None = None,
) -> Op:
    pairs = [each.split(" ") for each in text.split(", ")]
    names = [each for _, each in pairs]
    arguments = dataclasses.make_dataclass(name, [(each, _type(kind)) for kind, each in pairs])

    def values(given: Any) -> list[Any]:
        return [getattr(given, each) for each in names]

    by_name = None
    if gradient is not None:
        setup, backward = gradient
        by_name = OpGradient(
            lambda ctx, given, output: setup(ctx, (*values(given), ctx.size, ctx.name), output),
            lambda ctx, grad: dict(zip(names, backward(ctx, grad), strict=False)),
        )
    places = {"input": (0,)} if communicates is None else communicates
    return Op(
        name,
        arguments,
        lambda communicator, given, **out: start(communicator, *values(given), **out),
        lambda given, size: fake(*values(given), size),
        by_name,
        {words: tuple(names[place] for place in places[words]) for words in places},
        returns == "Tensor[]",
    )
