"""The plain collectives as ops: arguments, results, how they start, gradients, and references.

==============  ==========================================================================================
op              gradient of its input
==============  ==========================================================================================
all_reduce      all_reduce of the gradients; for max and min to the ranks that had the value, in equal
                parts; for product times what the other ranks multiplied with
reduce_scatter  all_gather, and so on as for all_reduce
all_gather      reduce_scatter
all_to_all      all_to_all with the sizes exchanged
broadcast       reduce; of reduce: broadcast
gather          scatter; of scatter: gather
permute         permute, back
==============  ==========================================================================================

A part along another dimension than 0 is passed as a list of slices; the op gathers and scatters them.
References have the shapes, the rounding and the order of sums of the ops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from interlace.arguments import checks, words
from interlace.arguments.checks import check_not_quantized
from interlace.ops.collectives import rooted, rootless
from interlace.ops.collectives.all_to_all import _all_to_all_single
from interlace.ops.op import shapes
from interlace.ops.op.op import Example, Op, OpGradient, Started, own_rows, wait
from interlace.ops.op.recording import Ops
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.memory import contiguous, movable
from interlace.runtime.core.work import Work
from interlace.runtime.numerics import reductions

_ops: Any = Ops()
Tensor = torch.Tensor
Length = torch.SymInt
Tensors = list[Tensor]
ALGORITHMS = ("kernel", "copy", "multimem")
Outputs = list[Tensors]
OPS: list[Op] = []


def _record(
    name: str,
    arguments: type,
    gradient: Callable[[Any, Tensor], Tensor] | None,
    reference: Callable[[Sequence[Any], int], Outputs],
    algorithms: Sequence[str] = (),
    **examples: Example,
) -> Op:
    """Return a collective's record. Each of the ``algorithms`` but "copy" has a kernel."""

    def start(communicator: Communicator, record: Any, out: Tensor | None = None) -> Started:
        try:
            check_not_quantized("input", record.input.dtype)
            if record.input.is_conj() or record.input.is_neg():  # its memory holds other numbers
                record = replace(record, input=record.input.resolve_conj().resolve_neg())
            expected = record.outputs(communicator.world_size)
            if out is None:
                out = expected
            elif (
                out.shape != expected.shape
                or out.dtype != expected.dtype
                or out.device != expected.device
            ):
                raise ValueError(
                    f"out must be {tuple(expected.shape)} of {expected.dtype} on {expected.device}, got "
                    f"{tuple(out.shape)} of {out.dtype} on {out.device}"
                )
        except Exception as error:
            communicator.refuse(name, error)
            raise
        return Started([out], record.fill(communicator, out))

    by_name = None
    if gradient is not None:
        by_name = OpGradient(_save, lambda ctx, grad: {"input": gradient(ctx, grad)})
    op = Op(
        name,
        arguments,
        start,
        lambda given, size: given.outputs(size),
        by_name,
        communicates={},
        reference=reference,
        algorithms={algorithm: _kernels(name, algorithm) for algorithm in algorithms},
        examples=examples,
    )
    OPS.append(op)
    return op


def _kernels(op: str, algorithm: str) -> tuple[str, ...]:
    names = {"kernel": f"{op}_kernel", "copy": ""}
    return tuple(filter(None, [names.get(algorithm, f"{algorithm}_{op}_kernel")]))


def _save(ctx: Any, record: Any, output: Tensor) -> None:
    """Save the arguments, without the tensors unless the reduction's gradient needs them."""
    tensors, reduce_op = [], getattr(record, "reduce_op", "")
    if type(record) in (AllReduceArguments, ReduceScatterArguments):
        tensors += [record.input] if reduce_op in ("max", "min", "product") else []
        tensors += [output] if reduce_op in ("max", "min") else []
    ctx.save_for_backward(*tensors)
    ctx.call, ctx.input_dim = {**vars(record), "input": None}, record.input.dim()


def inputs(ranks: Sequence[Any]) -> Tensors:
    return [each.input for each in ranks]


def alike(op: str, name: str, tensors: Sequence[Tensor], but: int | None = None) -> None:
    """Raise ValueError or TypeError unless dtypes and shapes, except dimension ``but``, are equal."""
    for quality, kind, values in (
        ("dtype", TypeError, [tensor.dtype for tensor in tensors]),
        ("shape", ValueError, [_lengths(tensor, but) for tensor in tensors]),
    ):
        checks.equal_on_all(op, f"{quality} of {name}", values, kind=kind)


def _lengths(tensor: Tensor, but: int | None) -> tuple[Any, ...]:
    skipped = None if but is None else but % tensor.dim()
    return tuple(n for i, n in enumerate(tensor.shape) if i != skipped)


def _check_root(name: str, root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"{name} must be within 0..{size - 1}, a rank of the group, got {root}")


def _copies(tensor: Tensor, size: int) -> Outputs:
    return [[tensor]] + [[tensor.clone()] for _ in range(size - 1)]


def _only_on(root: int, tensor: Tensor, size: int) -> Outputs:
    _check_root("dst", root, size)
    return [[tensor if rank == root else torch.zeros_like(tensor)] for rank in range(size)]


def _calls(op: str, *arguments: str) -> Callable[[Any, Tensor], Tensor]:
    """Return a gradient that calls ``op`` on the output's gradient; ``arguments``: names, or "sum"."""

    def gradient(ctx: Any, grad: Tensor) -> Tensor:
        given = [ctx.call.get(name, name) for name in arguments]
        part = wait(getattr(_ops, op)(grad, *given, ctx.size, ctx.name))
        return part if ctx.input_dim else part.reshape(())

    return gradient


@dataclass
class AllReduceArguments:
    input: Tensor
    reduce_op: str

    def outputs(self, size: Any) -> Tensor:
        return shapes.like(self.input)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        if output is not self.input:
            with group.accepting("all_reduce"):
                output.copy_(self.input)
        return rootless._all_reduce(group, (output,), (self.reduce_op,), True)


def _gradient_of_all_reduce(ctx: Any, grad: Tensor) -> Tensor:
    total = wait(_ops.all_reduce(grad, "sum", ctx.size, ctx.name))
    return _of_reduced(ctx, "all_reduce", total, lambda output: output)


def _of_reduced(ctx: Any, op: str, total: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the input's gradient from the gradient of the whole reduced tensor, which ``whole`` makes."""
    size, name, reduce_op = ctx.size, ctx.name, ctx.call["reduce_op"]
    result: Tensor
    if reduce_op == "sum":
        return total
    if reduce_op == "avg":
        result = total / size
        return result
    if reduce_op in ("max", "min"):
        saved, output = ctx.saved_tensors
        is_extreme: Tensor = (saved == whole(wait(output))).to(total.dtype)
        return total * is_extreme / wait(_ops.all_reduce(is_extreme, "sum", size, name))
    if reduce_op == "product":
        (saved,) = ctx.saved_tensors
        # the product of the others, not a quotient, which has no derivative if a factor is 0
        factors = wait(_ops.all_gather(saved.unsqueeze(0), 0, size, name))
        ranks = torch.arange(size, device=saved.device).view(size, *[1] * saved.dim())
        product = torch.where(ranks == _ops.rank(saved, size, name), 1, factors).prod(0)
        return total * product.conj()
    raise RuntimeError(f"interlace.{op} with reduce_op {reduce_op!r} has no gradient")


def reduce_all(op: str, inputs: Tensors, reduce_op: Any) -> Tensor:
    alike(op, "input", inputs)
    name, _ = checks.reduce_op(reduce_op)
    words.check_dtype(op, name, "input", inputs[0].dtype)
    total = shapes.like(inputs[0])
    if not (total.is_meta or isinstance(total, FakeTensor)):
        reductions.fold(name, [each.contiguous() for each in inputs], total)
    return total


ALL_REDUCE = _record(
    "all_reduce",
    AllReduceArguments,
    _gradient_of_all_reduce,
    lambda ranks, size: _copies(reduce_all("all_reduce", inputs(ranks), ranks[0].reduce_op), size),
    (*ALGORITHMS, "low_latency"),
)


@dataclass
class ReduceScatterArguments:
    input: Tensor
    reduce_op: str
    scatter_dim: int

    def outputs(self, size: Any) -> Tensor:
        return shapes.scattered_tensor(self.input, self.scatter_dim, size)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        dim = self.scatter_dim % self.input.dim()
        whole: Any = self.input
        if dim or not whole.is_contiguous():
            whole = list(whole.tensor_split(group.world_size, dim))
        return rootless._reduce_scatter(group, (output, whole), (self.reduce_op,), True)


def _gradient_of_reduce_scatter(ctx: Any, grad: Tensor) -> Tensor:
    def gather(tensor: Tensor) -> Tensor:
        return wait(_ops.all_gather(tensor, ctx.call["scatter_dim"], ctx.size, ctx.name))

    return _of_reduced(ctx, "reduce_scatter", gather(grad), gather)


def scatter_all(inputs: Tensors, reduce_op: str, dim: int, size: int) -> Outputs:
    shapes.scattered_tensor(inputs[0], dim, size)  # raises if the size does not divide
    return _slices(reduce_all("reduce_scatter", inputs, reduce_op), dim, size)


def _slices(tensor: Tensor, dim: int, size: int) -> Outputs:
    return [[shapes.like(part).copy_(part)] for part in tensor.tensor_split(size, dim)]


REDUCE_SCATTER = _record(
    "reduce_scatter",
    ReduceScatterArguments,
    _gradient_of_reduce_scatter,
    lambda ranks, size: scatter_all(inputs(ranks), ranks[0].reduce_op, ranks[0].scatter_dim, size),
    ALGORITHMS,
)


@dataclass
class ReduceArguments(AllReduceArguments):
    dst: int

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        """Reduce to ``dst``; other ranks get zeros."""
        if group.rank == self.dst:
            with group.accepting("reduce"):
                reduced = output.copy_(self.input)
        else:
            reduced = self.input.contiguous()  # an expanded gradient is not contiguous
            output.zero_()
        return rooted._reduce(group, (reduced,), (None, self.dst, self.reduce_op), True)


def _gradient_of_reduce(ctx: Any, grad: Tensor) -> Tensor:
    reduce_op = ctx.call["reduce_op"]
    if reduce_op not in ("sum", "avg"):
        raise RuntimeError(f"interlace.reduce with reduce_op {reduce_op!r} has no gradient")
    result = wait(_ops.broadcast(grad, ctx.call["dst"], ctx.size, ctx.name))
    return result if reduce_op == "sum" else result / ctx.size


REDUCE = _record(
    "reduce",
    ReduceArguments,
    _gradient_of_reduce,
    lambda ranks, size: _only_on(
        ranks[0].dst, reduce_all("reduce", inputs(ranks), ranks[0].reduce_op), size
    ),
)


@dataclass
class AllGatherArguments:
    input: Tensor
    gather_dim: int

    def outputs(self, size: Any) -> Tensor:
        return shapes.gathered_tensor(self.input, self.gather_dim, size)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        dim = self.gather_dim % max(self.input.dim(), 1)
        whole: Any = output
        if dim or not output.is_contiguous():
            whole = list(output.tensor_split(group.world_size, dim))
        return rootless._all_gather(group, (whole, self.input), (), True)


def gather_all(op: str, inputs: Tensors, dim: int, size: int) -> Tensor:
    alike(op, "input", inputs)
    whole = shapes.gathered_tensor(inputs[0], dim, size)
    for part, input in zip(whole.tensor_split(size, dim), inputs, strict=True):
        part.copy_(input)
    return whole


ALL_GATHER = _record(
    "all_gather",
    AllGatherArguments,
    _calls("reduce_scatter", "sum", "gather_dim"),
    lambda ranks, size: _copies(
        gather_all("all_gather", inputs(ranks), ranks[0].gather_dim, size), size
    ),
    (*ALGORITHMS, "low_latency"),
    input=own_rows,
)


@dataclass
class GatherArguments:
    input: Tensor
    dst: int
    gather_dim: int

    def outputs(self, size: Any) -> Tensor:
        return shapes.gathered_tensor(self.input, self.gather_dim, size)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        """Gather along ``gather_dim`` on ``dst``; other ranks get zeros of the same shape."""
        parts = None
        if group.rank == self.dst:
            parts = list(output.tensor_split(group.world_size, self.gather_dim))
            if not self.input.dim():
                parts = list(output.unbind())
        else:
            movable(output).zero_()
        return rooted._gather(group, (self.input, parts), (None, self.dst), True)


GATHER = _record(
    "gather",
    GatherArguments,
    _calls("scatter", "dst", "gather_dim"),
    lambda ranks, size: _only_on(
        ranks[0].dst, gather_all("gather", inputs(ranks), ranks[0].gather_dim, size), size
    ),
    input=own_rows,
)


@dataclass
class ScatterArguments:
    input: Tensor
    src: int
    scatter_dim: int

    def outputs(self, size: Any) -> Tensor:
        return shapes.scattered_tensor(self.input, self.scatter_dim, size)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        """Fill with this rank's slice of ``src``'s input along ``scatter_dim``; other inputs are unused."""
        parts = None
        if group.rank == self.src:
            parts = list(self.input.tensor_split(group.world_size, self.scatter_dim))
        return rooted._scatter(group, (output, parts), (None, self.src), True)


def _scatter_on_all(ranks: Sequence[Any], size: int) -> Outputs:
    src, dim = ranks[0].src, ranks[0].scatter_dim
    _check_root("src", src, size)
    alike("scatter", "input", inputs(ranks))
    shapes.scattered_tensor(ranks[0].input, dim, size)
    return _slices(ranks[src].input, dim, size)


SCATTER = _record(
    "scatter", ScatterArguments, _calls("gather", "src", "scatter_dim"), _scatter_on_all
)


@dataclass
class BroadcastArguments:
    input: Tensor
    src: int

    def outputs(self, size: Any) -> Tensor:
        return shapes.like(self.input)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        if group.rank == self.src and output is not self.input:
            with group.accepting("broadcast"):
                movable(output).copy_(movable(self.input))
        return rooted._broadcast(group, (output,), (None, self.src), True)


def _broadcast_on_all(ranks: Sequence[Any], size: int) -> Outputs:
    src = ranks[0].src
    _check_root("src", src, size)
    alike("broadcast", "input", inputs(ranks))
    source = ranks[src].input
    return [[shapes.like(source).copy_(source)] for _ in range(size)]


BROADCAST = _record(
    "broadcast",
    BroadcastArguments,
    _calls("reduce", "sum", "src"),
    _broadcast_on_all,
    ("copy", "low_latency"),
)


@dataclass
class AllToAllArguments:
    input: Tensor
    output_split_sizes: list[Length] | None
    input_split_sizes: list[Length] | None

    @property
    def splits(self) -> Any:
        return self.output_split_sizes, self.input_split_sizes

    def outputs(self, size: Any) -> Tensor:
        received, sent = self.splits
        return shapes.exchanged_tensor(self.input, received, sent, size)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        return _all_to_all_single(group, (output, self.input), self.splits, True)


def _all_to_all_on_all(ranks: Sequence[Any], size: int) -> Outputs:
    outputs = [each.outputs(size) for each in ranks]
    alike("all_to_all", "input", inputs(ranks), but=0)
    parts = [
        _split(rank, each.input, each.input_split_sizes, size) for rank, each in enumerate(ranks)
    ]
    for target, (output, arguments_of) in enumerate(zip(outputs, ranks, strict=True)):
        for source, place in enumerate(
            _split(target, output, arguments_of.output_split_sizes, size)
        ):
            part = parts[source][target]
            if part.shape != place.shape:
                raise ValueError(
                    f"all_to_all: rank {source} sends {part.shape[0]} rows to rank {target}, which "
                    f"expects {place.shape[0]}"
                )
            place.copy_(part)
    return [[output] for output in outputs]


def _split(rank: int, tensor: Tensor, sizes: Sequence[int] | None, size: int) -> Sequence[Tensor]:
    lengths = [tensor.shape[0] // size] * size if sizes is None else list(sizes)
    if sum(lengths) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all: input_split_sizes {lengths} of rank {rank} do not add up to the "
            f"{tensor.shape[0]} rows of its input"
        )
    return torch.split(tensor, lengths)


ALL_TO_ALL = _record(
    "all_to_all",
    AllToAllArguments,
    _calls("all_to_all", "input_split_sizes", "output_split_sizes"),
    _all_to_all_on_all,
    input_split_sizes=lambda setting: list(setting.rows) if setting.uneven else None,
    output_split_sizes=lambda setting: [setting.own] * setting.size if setting.uneven else None,
)


@dataclass
class PermuteArguments:
    input: Tensor
    src_dst: list[int]

    def outputs(self, size: Any) -> Tensor:
        if isinstance(size, int):
            shapes.permutation(self.src_dst, size)
        return shapes.like(self.input)

    def fill(self, group: Communicator, output: Tensor) -> Work | None:
        """Send rank r's input to rank ``src_dst[r]``."""
        size, rank, input = group.world_size, group.rank, self.input
        sent, received = [0] * size, [0] * size
        sent[self.src_dst[rank]] = received[list(self.src_dst).index(rank)] = 1
        whole = output.unsqueeze(0), contiguous(input).unsqueeze(0)  # so that shapes are compared
        return _all_to_all_single(group, whole, (received, sent), True)


def _gradient_of_permute(ctx: Any, grad: Tensor) -> Tensor:
    src_dst = ctx.call["src_dst"]
    back = [src_dst.index(rank) for rank in range(len(src_dst))]
    return wait(_ops.permute(grad, back, ctx.size, ctx.name))


def _permute_on_all(ranks: Sequence[Any], size: int) -> Outputs:
    targets = list(ranks[0].src_dst)
    alike("permute", "input", inputs(ranks))
    shapes.permutation(targets, size)
    sources = [ranks[targets.index(rank)].input for rank in range(size)]
    return [[shapes.like(source).copy_(source)] for source in sources]


PERMUTE = _record("permute", PermuteArguments, _gradient_of_permute, _permute_on_all)


@dataclass
class RankArguments:
    input: Tensor

    def outputs(self, size: Any) -> Tensor:
        return torch.empty((), dtype=torch.int64, device=self.input.device)

    def fill(self, group: Communicator, output: Tensor) -> None:
        output.fill_(group.rank)


RANK = _record(
    "rank",
    RankArguments,
    None,
    lambda ranks, size: [
        [torch.tensor(rank, device=ranks[0].input.device)] for rank in range(size)
    ],
)
