"""Fused matmuls on tensors that require gradients: what ``ops/op/recorded.py`` does not know of.

The ops themselves compute the gradients; a gather does of equal shards, so others get zeros behind them
first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.arguments import checks
from interlace.arguments.norms import taken_apart
from interlace.groups.groups import resolve
from interlace.ops.matmul import gather, norms
from interlace.ops.op import registry
from interlace.ops.op.gradients import longest, padded
from interlace.ops.op.recorded import FIRST, agreed, run, started
from interlace.runtime.numerics.activations import activate
from interlace.runtime.numerics.norms import unrounded


def shard_lengths(group: Any, input: torch.Tensor, weight: Any, gather_dim: Any) -> list[int]:
    """All ranks' shards' lengths, as ranks agree on them; none of what the op refuses. One host message."""
    communicator = resolve(group)
    if not isinstance(gather_dim, int) or not -input.dim() <= gather_dim < input.dim():
        return []
    weights = [each for each in tree_leaves(weight) if isinstance(each, torch.Tensor)]

    def lengths() -> list[int]:
        return communicator.parts(communicator.call_of(gather.OP, (), input.shape[gather_dim]))

    return agreed(communicator, gather.OP, (input, weights), lengths)  # type: ignore[no-any-return]


class UnequalShards(NamedTuple):
    """Shards of these lengths along ``dim``, which travel with zeros behind the shorter ones."""

    lengths: list[int]
    dim: int

    def equal(self, input: torch.Tensor, weight: Any) -> tuple[torch.Tensor, Any]:
        """Factors with zeros behind; of a weight where its rows meet them. ValueError if it has others."""
        most, along_k = max(self.lengths), self.dim == input.dim() - 1
        inner = sum(self.lengths) if along_k else input.shape[-1]

        def met(weight: torch.Tensor) -> torch.Tensor:
            if weight.dim() != 2 or weight.shape[0] != inner:
                shape = tuple(weight.shape)
                raise ValueError(f"weight has shape {shape}, the gathered input has k = {inner}")
            if not along_k:
                return weight
            return torch.cat([padded(p, 0, most) for p in torch.split(weight, self.lengths)])

        return padded(input, self.dim, most), tree_map_only(torch.Tensor, met, weight)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was gathered, without the zeros."""
        parts = zip(torch.split(tensor, max(self.lengths), self.dim), self.lengths, strict=True)
        return torch.cat([part.narrow(self.dim, 0, length) for part, length in parts], self.dim)


def gathered(
    tensors: Sequence[Any],
    lengths: list[int],
    options: gather.GatherMatmulOptions,
    group: Any,
    async_op: bool,
) -> Any:
    """A gather of shards of these lengths, and a matmul, of input, weight and bias; torch's activation."""
    input, weight, bias = tensors
    several = not isinstance(weight, torch.Tensor)
    shards = UnequalShards(lengths, options.gather_dim % input.dim())
    unequal = min(lengths) < max(lengths)
    with resolve(group).accepting(gather.OP):
        count = len(weight) if several else 1
        names = checks.activations(options.activation, count, several)
        if unequal:
            input, weight = shards.equal(input, weight)

    def then(result: Any) -> Any:
        whole, outputs = result if options.return_gathered else (None, result)
        outputs = outputs if several else [outputs]
        if unequal and shards.dim < input.dim() - 1:
            outputs = [shards.cut(each) for each in outputs]
        if unequal and whole is not None:
            whole = shards.cut(whole)
        done = [activate(output, name) for output, name in zip(outputs, names, strict=True)]
        made = done if several else done[0]
        return (whole, made) if options.return_gathered else made

    about = {"bias": bias, "group": group, "return_gathered": options.return_gathered}
    return run(gather.OP, async_op, (input, weight, options.gather_dim), then, options, **about)


def reduced(
    op: str,
    tensors: Sequence[Any],
    options: Any,
    normed: tuple[Any, Any, Any, Any],
    group: Any,
    async_op: bool,
) -> Any:
    """A reduction of factors, the last of ``tensors`` being a bias; ``normed`` as the op's arguments are.

    An activation is torch's, after the op, because its gradient needs what it was taken of; so then is a
    norm.
    """
    (*given, bias), (residual, norm, quantize, gather) = tensors, normed
    factors = tuple(given)
    how = {"bias": bias, "group": group, **options._asdict()}
    for name in ("op", "length"):
        how.pop(name, None)
    activation = how.pop("activation", None)
    dims = {} if how["scatter_dim"] is None else {"scatter_dim": how.pop("scatter_dim")}
    how.pop("scatter_dim", None)
    communicator = resolve(group)
    with communicator.accepting(op):
        name = checks.activation("activation", activation)
    if norm is not None and not name:
        how |= {"norm": norm, "residual": residual, "quantize": quantize}
        how |= {"gather_normed": gather} if dims else {}
        return started(op, async_op, factors, **how, **dims)
    with communicator.accepting(op):
        if norm is not None:
            if quantize is not None:
                raise ValueError("quantize has no gradient; call the op under torch.no_grad()")
            vectors, about = taken_apart(norm, residual, quantize, gather)
            request = norms.NormedReduce(communicator, (*factors, bias), vectors, options, about)
            request.more_terms = (*request.more_terms, *FIRST)
    if norm is not None:
        agreed(communicator, op, factors, request.agree)

    def finished(total: torch.Tensor) -> Any:
        total = activate(total, name)
        if norm is None:
            return total
        total = total if residual is None else total + residual
        made = unrounded(total, norm).to(total.dtype)
        if gather:
            dim = int(request.dim or 0)
            length = factors[0].shape[dim]
            part = padded(made, dim, longest(length, communicator.world_size))
            whole = registry.functional("wait")(
                registry.functional("all_gather")(part, dim, group=group)
            )
            made = whole.narrow(dim, 0, length)
        return made, total

    return started(op, async_op, factors, finished, **how, **dims)
