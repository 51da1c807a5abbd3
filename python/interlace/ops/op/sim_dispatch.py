"""The ops for callers in Python: through torch's dispatcher, and on simulated ranks without it.

Simulated ranks share one stack of C++ frames, which must end in the order in which they began. One that
waited for others below the dispatcher would leave its frames under theirs. So there an op runs first, to
its end, and one node of autograd, in Python, records it: its backward is what the dispatcher would have
been given, and ``simulated_backward.py`` lets it wait.

=========  =========================================  =================================================
           through the dispatcher                     on simulated ranks
=========  =========================================  =================================================
runs       in a kernel of ``torch.ops.interlace``     here, before it is recorded
recorded   by ``torch.library.register_autograd``     by :class:`_RecordedOp`, with the same two functions
backward   calls ops of this module                   the same, so it has a gradient itself
seen by    compilers and modes                        nobody; under one of them the dispatcher is taken
=========  =========================================  =================================================
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from interlace.groups import groups, specs
from interlace.ops.op.async_tensor import AsyncTensor, wait
from interlace.ops.op.op import Op, tensors
from interlace.ops.op.pending import finish
from interlace.ops.op.registry import FACES, OPS
from interlace.ops.op.sim_backward import prepare
from interlace.runtime.compat.torch_modes import (
    PLAIN_TYPES,
    above_autograd,
    modes_active,
    transforms_active,
)
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.context import needing

_dispatched: Any = torch.ops.interlace

_TENSOR = object()  # in place of one, where only its position matters


def call(name: str, *args: Any) -> Any:
    """``torch.ops.interlace.<name>(*args)``, the last two being the size and the name of a group."""
    *own, size, group = args
    op = OPS[name]
    with needing(op.needs(dict(zip(op.kinds, own, strict=True)))):
        if not _simulated(own):
            return _through(name, name, args)
        return _run(op, specs.bind(group, size), own, size, group)


FACES["call"] = call


def call_out(name: str, *args: Any, out: torch.Tensor) -> None:
    """``torch.ops.interlace.<name>_out(*args, out=out)``, which records nothing."""
    *own, size, group = args
    if not _simulated([*own, out]):
        _through(name, f"{name}_out", args, out=out)
        return
    plain = tree_map_only(torch.Tensor, wait, own)
    finish(OPS[name].begin(specs.bind(group, size), plain, out=wait(out)))


_WRONG_TYPE = re.compile(r"interlace::\w+\(\) Expected .* for argument '(\w+)' .* type '(.*?)'")
_WORDS = {
    "Tensor": "a tensor", "str": "a str", "bool": "a bool", "float": "a number", "int": "an int",
    "SymInt": "an int", "ScalarType": "a torch.dtype",
}  # fmt: skip


def _through(name: str, overload: str, args: tuple[Any, ...], **out: torch.Tensor) -> Any:
    """Through the dispatcher. What a schema does not take, before anything runs, all ranks refuse."""
    try:
        return getattr(_dispatched, overload).default(*args, **out)
    except RuntimeError as error:
        wrong = _WRONG_TYPE.match(str(error))
        kinds = OPS[name].kinds
        if wrong is None or wrong[1] not in kinds:
            raise
        text = f"{wrong[1]} must be {_in_words(kinds[wrong[1]])}, got {wrong[2]}"
    if torch.compiler.is_compiling() or modes_active():
        raise TypeError(text)
    *_, size, group = args
    with specs.bind(group, size).accepting(name):
        raise TypeError(text)


def _in_words(kind: str) -> str:
    """What a type of a schema is."""
    if kind.endswith("?"):
        return f"{_in_words(kind[:-1])} or None"
    return f"a list, each {_in_words(kind[:-2])}" if kind.endswith("[]") else _WORDS[kind]


def _simulated(own: Sequence[Any]) -> bool:
    """Whether the caller is a simulated rank that has others beside it, and nobody else sees the call."""
    if torch.compiler.is_compiling() or modes_active() or above_autograd():
        return False
    rank = groups.joined()
    if rank is None or not rank.place.simulated or rank.world_size == 1:
        return False
    if transforms_active():  # torch's own way would leave its frames among those of other ranks
        raise NotImplementedError(
            f"rank {rank.rank}: interlace.functional in a transform of torch.func (vmap, grad, jvp) is not "
            f"supported; use autograd, outside of the transform"
        )
    return all(
        (type(each) in PLAIN_TYPES or type(each) is AsyncTensor) and not each.is_meta
        for each in tensors(own)
    )


def _run(op: Op, group: Communicator, own: list[Any], size: int, name: str) -> Any:
    own = tree_map_only(torch.Tensor, wait, own)
    with torch.no_grad():
        outputs = [each.detach() for each in finish(op.begin(group, own))]
    given = tensors(own)
    if torch.is_grad_enabled() and op.gradient and any(each.requires_grad for each in given):
        prepare(group, *given)
        outputs = _RecordedOp.apply(op, outputs, [*own, size, name], *given)  # type: ignore[no-untyped-call]
    return list(outputs) if op.several else outputs[0]


class _RecordedOp(torch.autograd.Function):
    """Arguments: the op, what it has returned, what it was given, and the tensors among that."""

    @staticmethod
    def forward(
        ctx: Any, op: Op, outputs: list[torch.Tensor], given: list[Any], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        op.setup_context(ctx, tuple(given), outputs if op.several else outputs[0])
        # which keeps no tensor alive
        ctx.given = tree_map_only(torch.Tensor, lambda tensor: _TENSOR, given)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.op.backward(ctx, grads if ctx.op.several else grads[0])
        of_tensors: list[Any] = []
        for given, grad in zip(ctx.given, found, strict=False):
            if given is _TENSOR:
                of_tensors.append(grad)
            elif isinstance(given, list):
                among = grad if isinstance(grad, (list, tuple)) else [None] * len(given)
                of_tensors += [g for each, g in zip(given, among, strict=True) if each is _TENSOR]
        return None, None, None, *of_tensors
