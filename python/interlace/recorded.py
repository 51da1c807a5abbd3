"""The fused ops on tensors that require gradients: as ``interlace.functional``, which records them.

The ops themselves compute the gradients; a gather does of equal shards, so others get zeros behind them
first. All ranks' tensors must require gradients alike: it is in what ranks agree on before they start.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from interlace.arguments import checks
from interlace.arguments.norms import taken_apart
from interlace.fused import gather, norms
from interlace.groups.groups import resolve
from interlace.runtime.compat.torch_groups import Work as TorchWork
from interlace.runtime.compat.torch_modes import modes_active
from interlace.runtime.core.call import Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing
from interlace.runtime.core.stream import Outcome
from interlace.runtime.numerics.activations import activate
from interlace.runtime.numerics.norms import unrounded

FIRST: Terms = (("whether ranks agree before they record", True),)
"""In what they agree on then, if it has the op's own terms: who does not record goes on to the op."""


def agreed(
    communicator: Communicator, op: str, operands: Sequence[Any], agree: Callable[[], Any]
) -> Any:
    """What ``agree`` gives, which all ranks call before they record ``op``: who needs no gradient is told.

    ``operands``: the first arguments of the op, by its schema.
    """
    from interlace.ops.library import BY_NAME

    needs = BY_NAME[op].needs(operands) or "another tensor"

    def start() -> Outcome:
        with needing(needs):
            return Outcome(agree(), None)

    return communicator.run(op, start)


def matrices(*tensors: Any) -> bool:
    """Whether a call with these is one that autograd can know of."""
    return not modes_active() and all(
        isinstance(each, torch.Tensor) and each.dim() > 1 for each in tensors
    )


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
        from interlace.ops.gradients import padded

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


def run(
    op: str,
    async_op: bool,
    operands: tuple[Any, ...],
    then: Callable[[Any], Any],
    options: Any,
    **more: Any,
) -> Any:
    """Plain tensors, or a Work that returns them; ``then`` is done when complete, and seen by autograd."""
    how = {"algorithm": options.algorithm, "out_dtype": options.out_dtype, **more}
    return started(op, async_op, operands, then, **how)


def started(
    op: str,
    async_op: bool,
    operands: tuple[Any, ...],
    then: Callable[[Any], Any] = lambda result: result,
    **how: Any,
) -> Any:
    """As :func:`run`, of any op of ``interlace.functional``."""
    from interlace import functional
    from interlace.ops.eager import pending

    with pending.watched() as works:
        result = getattr(functional, op)(*operands, **how)
    work = RecordedWork(op, result, works, then)
    return work if async_op else work.wait()


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
            from interlace import functional
            from interlace.ops.gradients import longest, padded

            dim = int(request.dim or 0)
            length = factors[0].shape[dim]
            part = padded(made, dim, longest(length, communicator.world_size))
            whole = functional.wait(functional.all_gather(part, dim, group=group))
            made = whole.narrow(dim, 0, length)
        return made, total

    return started(op, async_op, factors, finished, **how, **dims)


class RecordedWork(TorchWork):
    """The handle of an op whose result has a history."""

    def __init__(self, op: str, result: Any, works: list[Any], then: Callable[[Any], Any]) -> None:
        super().__init__()
        self._op, self._result, self._works, self._then = op, result, works, then
        self._waited = False

    def wait(self, timeout: timedelta | float | None = None) -> Any:
        """The result, complete. Raises what the op failed with."""
        from interlace.ops.async_tensor import wait

        if not self._waited:
            for work in self._works:
                work.wait(timeout)
            self._result = self._then(tree_map_only(torch.Tensor, wait, self._result))
            self._waited = True
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        found = [work.exception() for work in self._works]
        return next((error for error in found if error is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        if not self._works:
            future.set_result(self._result)
            return future
        return self._works[-1].get_future().then(lambda _: self.wait())  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Work {self._op}: {'completed' if self.is_completed() else 'in progress'}>"
