"""Collectives along a dimension of a device mesh, padding of shards, and metadata that ranks compare.

Signatures and semantics are as in ``torch/distributed/tensor/_collective_utils.py``, with these
differences: meta tensors are traced, ``group_src=None`` does what torch documents, and
``shard_dim_alltoall`` can be asynchronous and moves only the data that a rank needs, 1/n-th of an
all-gather followed by a chunk.

The file also has differentiable collectives of parts that differ in length along a dim. They exchange
dtype, shape, lengths and whether gradients are required in one small message (docs/how-to/train/uneven.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils as utilities

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups
from interlace.groups.groups import resolve, simulated_ranks
from interlace.groups.specs import bound
from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import rootless
from interlace.ops.collectives.all_to_all import _all_to_all, one_length_per_rank
from interlace.ops.collectives.functional import all_to_all, broadcast, scatter
from interlace.ops.collectives.rooted import _broadcast, _scatter
from interlace.ops.op.async_tensor import AsyncTensor, wait, wrap
from interlace.ops.op.calls import direct
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.compat.torch_modes import PLAIN_TYPES, modes_active
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.work import Work
from interlace.tensor import blocks, facts
from interlace.tensor.placeholder import Placeholder


def _completed_work(op: str, tensor: torch.Tensor, async_op: bool) -> Work | None:
    """Return the Work of an op that needed no communication; None unless ``async_op``."""
    return Work(op, cast(Any, _Nowhere()), None, [tensor]) if async_op else None


class _Nowhere:
    rank, calls = 0, 0


def _is_traced(tensor: object) -> bool:
    """Return whether to use the traceable op; the other op reports a ``tensor`` that is not a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return torch.compiler.is_compiling() or bool(modes_active()) or type(tensor) not in PLAIN_TYPES


def _row(op: str, mesh: object, mesh_dim: object) -> Communicator:
    """Return the caller's row of ``mesh``. On a 1-D mesh all ranks raise for a wrong ``mesh_dim``."""
    try:
        return bound((mesh, mesh_dim))
    except (TypeError, ValueError) as error:
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
            bound((mesh, 0)).refuse(op, error)
        raise


def mesh_broadcast(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int | None = 0,
) -> Work | None:
    """Copy the ``tensor`` of rank ``group_src`` of the caller's row of ``mesh`` along ``mesh_dim`` to all.

    On a mesh ``[[0, 1], [2, 3]]`` with ``mesh_dim=1`` ranks 0 and 2 send, to 1 and 3. With
    ``group_src=None`` every rank keeps its tensor, and nothing is sent; neither is a meta tensor. Returns a
    :class:`interlace.Work` if ``async_op``, in every case; otherwise None. Raises ValueError or TypeError
    on every rank of the row if shapes, dtypes or ``group_src`` differ, before any data moves.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> def on_rank():
    ...     tensor = torch.tensor(interlace.get_rank())
    ...     mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=tensor.item())
    ...     mesh_broadcast(tensor, mesh, mesh_dim=1)
    ...     return tensor.item()
    >>> interlace.run(on_rank, 4)
    [0, 0, 2, 2]
    """
    if group_src is None or (isinstance(tensor, torch.Tensor) and tensor.is_meta):
        return _completed_work("broadcast", tensor, async_op)
    group = (mesh, mesh_dim)
    if _is_traced(tensor):
        broadcast(tensor, group_src, group=group, out=tensor)
        return _completed_work("broadcast", tensor, async_op)
    communicator = _row("broadcast", *group).on(tensor)
    return _broadcast(communicator, (tensor,), (None, group_src), async_op)


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: list[torch.Tensor] | None,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int | None = 0,
) -> Work | None:
    """Copy entry r of the ``scatter_list`` of rank ``group_src`` to ``output`` on rank r of the row.

    The row is the caller's, of ``mesh`` along ``mesh_dim``. Lists of other ranks are not read, and may be
    None. With ``group_src=None`` every rank takes entry r of the list that it passes, without
    communication. A meta ``output`` is not changed. Returns a :class:`interlace.Work` if ``async_op``, in
    every case; otherwise None. Raises ValueError or TypeError on every rank of the row, before any data
    moves; with ``group_src=None`` only on the caller.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> def on_rank():
    ...     rank = interlace.get_rank()
    ...     mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
    ...     part, whole = torch.empty(2), torch.arange(4.0)
    ...     mesh_scatter(part, list(whole.chunk(2)) if rank == 0 else None, mesh)
    ...     return part.tolist()
    >>> interlace.run(on_rank, 2)
    [[0.0, 1.0], [2.0, 3.0]]
    """
    if isinstance(output, torch.Tensor) and output.is_meta:
        return _completed_work("scatter", output, async_op)
    group = (mesh, mesh_dim)
    if group_src is None:
        _take(output, scatter_list, _local_rank(mesh, mesh_dim))
        return _completed_work("scatter", output, async_op)
    if _is_traced(output):
        if scatter_list is None:  # only its shape counts here
            rows = output.new_empty((mesh.size(mesh_dim), output.numel()))
        else:
            rows = torch.stack([each.reshape(-1) for each in scatter_list])
        output.copy_(scatter(rows, group_src, group=group).view(output.shape))
        return _completed_work("scatter", output, async_op)
    communicator = _row("scatter", *group).on(output)
    parts = scatter_list if communicator.rank == group_src else None
    return _scatter(communicator, (output, parts), (None, group_src), async_op)


def _take(output: torch.Tensor, scatter_list: list[torch.Tensor] | None, rank: int) -> None:
    if scatter_list is None or len(scatter_list) <= rank:
        count = "None" if scatter_list is None else f"{len(scatter_list)} tensors"
        raise ValueError(
            "scatter_list must have a tensor for each rank of the mesh dimension if group_src is None, "
            f"because rank {rank} takes scatter_list[{rank}]; got {count} on rank {rank}"
        )
    if scatter_list[rank].shape != output.shape:
        raise ValueError(
            f"scatter_list[{rank}] has shape {tuple(scatter_list[rank].shape)}, but output has "
            f"{tuple(output.shape)}, on rank {rank}"
        )
    output.copy_(scatter_list[rank])


def _local_rank(mesh: DeviceMesh, mesh_dim: int) -> int:
    if dist.is_initialized() and not simulated_ranks():
        return int(mesh.get_local_rank(mesh_dim))
    return bound((mesh, mesh_dim)).rank


def shard_dim_alltoall(
    input: torch.Tensor,
    gather_dim: int,
    shard_dim: int,
    mesh: DeviceMesh,
    mesh_dim: int,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    """Change shards along ``gather_dim`` to shards along ``shard_dim``, by an all-to-all.

    The result is the caller's chunk along ``shard_dim`` of the ranks' ``input``, joined along
    ``gather_dim``. It is contiguous. The ranks are the caller's row of ``mesh``; their inputs must have
    equal shapes. Chunks are as in ``torch.chunk``, and empty on the last ranks if there are too few. Any
    dtype; differentiable.

    With ``async_op`` it returns an :class:`interlace.functional.AsyncTensor`, which waits when it is first
    used; do not change the input before. With a gradient the result is complete, and in a graph it waits at
    the place that the compiler chose. A meta tensor returns a meta tensor of the right shape.

    Raises ValueError or TypeError on every rank of the row before any data moves. Semantics:
    ``torch.distributed.tensor._collective_utils.shard_dim_alltoall``.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> def on_rank():
    ...     rank = interlace.get_rank()
    ...     mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=rank)
    ...     return shard_dim_alltoall(torch.arange(2)[None] + 2 * rank, 0, 1, mesh, 0).tolist()
    >>> interlace.run(on_rank, 2)
    [[[0], [2]], [[1], [3]]]
    """
    if isinstance(input, torch.Tensor) and not direct([input]):
        result = _functional(input, gather_dim, shard_dim, mesh, mesh_dim)
        return wrap(result) if async_op and not result.is_meta else result
    communicator = _row("all_to_all", mesh, mesh_dim).on(input)
    ranks, rank = communicator.world_size, communicator.rank
    with communicator.accepting("all_to_all"):
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input must be a tensor, got {type(input).__name__}")
        gather_dim = checks.index("gather_dim", gather_dim, input.dim())
        shard_dim = checks.index("shard_dim", shard_dim, input.dim())
        sizes = [count for _, count in split_rows(input.shape[shard_dim], ranks)]
    if gather_dim == shard_dim:  # this rank's shard is that chunk
        same = input.clone(memory_format=torch.contiguous_format)
        return (
            AsyncTensor(same, cast(Work, _completed_work("all_to_all", same, True)))
            if async_op
            else same
        )
    shape = list(input.shape)
    shape[shard_dim], shape[gather_dim] = sizes[rank], ranks * shape[gather_dim]
    output, length = input.new_empty(shape), input.shape[gather_dim]
    into = list(torch.split(output, length, gather_dim)) if length else [output] * ranks
    sent = list(torch.split(input, sizes, shard_dim))
    work = _all_to_all(communicator, (into, sent), async_op=True)
    result = AsyncTensor(output, work)
    return result if async_op else result.wait()


def _functional(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Use the traceable op, which works along dim 0: permute before and after."""
    ranks, index = mesh.size(mesh_dim), groups.mesh_dim(mesh, mesh_dim)
    gather_dim = checks.index("gather_dim", gather_dim, input.dim())
    shard_dim = checks.index("shard_dim", shard_dim, input.dim())
    if gather_dim == shard_dim:
        return input.clone(memory_format=torch.contiguous_format)
    length = input.shape[shard_dim]
    rows = input.movedim(shard_dim, 0).contiguous()
    sent = received = None
    own_length = length // ranks
    if isinstance(length, int) and length % ranks:
        sent = [count for _, count in split_rows(length, ranks)]
        own_length = sent[_local_rank(mesh, index)]
        received = [own_length] * ranks
    if input.is_meta:  # no rank needs to take part
        parts = rows.new_empty((ranks * own_length, *rows.shape[1:]))
    else:
        parts = wait(all_to_all(rows, received, sent, group=(mesh, index)))
    parts = parts.view(ranks, own_length, *rows.shape[1:]).movedim(1, 1 + shard_dim)
    return parts.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def _checked(name: str, tensor: torch.Tensor, dim: int, size: Any, *, within: bool = False) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: tensor must be a tensor, got {type(tensor).__name__}")
    dim = checks.index(f"{name}: pad_dim", dim, tensor.dim())
    most = tensor.size(dim) if within else "any"
    if isinstance(size, int) and (size < 0 or (isinstance(most, int) and size > most)):
        raise ValueError(
            f"{name}: pad_size must be within 0..{most} for shape {tuple(tensor.shape)}, got {size}"
        )
    return dim


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """Return ``tensor`` with ``pad_size`` more zeros at the end of ``pad_dim``; ``tensor`` if it is 0.

    Differentiable. Raises ValueError for a dimension that does not exist, or a negative size.

    >>> pad_tensor(torch.ones(2), 0, 1)
    tensor([1., 1., 0.])
    """
    dim = _checked("pad_tensor", tensor, pad_dim, pad_size)
    return utilities.pad_tensor(tensor, dim, pad_size)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int | torch.SymInt) -> torch.Tensor:
    """Return a view of ``tensor`` without the last ``pad_size`` of ``pad_dim``; ``tensor`` if it is 0.

    Raises ValueError for a dimension that does not exist, or a size that is negative or too large.

    >>> unpad_tensor(torch.arange(3), 0, 1)
    tensor([0, 1])
    """
    dim = _checked("unpad_tensor", tensor, pad_dim, pad_size, within=True)
    return utilities.unpad_tensor(tensor, dim, pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """Append ``num_empty_tensors`` tensors of length 0 along ``shard_dim`` to ``shards``; return the list.

    Raises ValueError if ``shards`` is empty, because no shape is known, or has no such dimension.
    Semantics: ``torch.distributed.tensor._collective_utils.fill_empty_tensor_to_shards``.

    >>> [each.shape[0] for each in fill_empty_tensor_to_shards([torch.ones(2, 3)], 0, 2)]
    [2, 0, 0]
    """
    if not num_empty_tensors:
        return shards
    if not shards:
        raise ValueError("fill_empty_tensor_to_shards: shards is empty, so no shape is known")
    dim = _checked("fill_empty_tensor_to_shards", shards[0], shard_dim, 0)
    return utilities.fill_empty_tensor_to_shards(shards, dim, num_empty_tensors)


def check_tensor_meta(
    local_tensor: torch.Tensor, check_shape_stride: bool = False, *, group: Group = None
) -> None:
    """Raise ValueError, on all ranks of ``group``, unless their ``local_tensor`` agree. Collective.

    Raises TypeError if it is not a tensor. The host compares dtype and requires_grad, and with
    ``check_shape_stride`` also shape and strides. ``group`` may have any form; the default is all ranks.
    The message names the property, both values and a rank. The data is not read, so it may be a meta
    tensor.

    >>> interlace.run(lambda: check_tensor_meta(torch.ones(2, device="meta")), 2)
    [None, None]
    """
    communicator = bound(group)
    with communicator.accepting("check_tensor_meta"):
        if not isinstance(local_tensor, torch.Tensor):
            raise TypeError(f"local_tensor must be a tensor, got {type(local_tensor).__name__}")
        terms: list[tuple[str, object]] = [
            ("check_shape_stride", check_shape_stride),
            ("the dtype of local_tensor", local_tensor.dtype),
            ("requires_grad of local_tensor", local_tensor.requires_grad),
        ]
        if check_shape_stride:
            terms.append(("shape of local_tensor", tuple(local_tensor.shape)))
            terms.append(("stride of local_tensor", tuple(local_tensor.stride())))
    communicator.told(Call("check_tensor_meta", tuple(terms)))


def spec_to_bytes(spec: Any) -> int:
    """Return the bytes of the whole tensor that a ``DTensorSpec`` describes.

    Raises ValueError if it has no tensor_meta. Semantics:
    ``torch.distributed.tensor._collective_utils.spec_to_bytes``.

    >>> from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    >>> meta = TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32)
    >>> spec_to_bytes(DTensorSpec(None, (), tensor_meta=meta))
    32
    """
    if spec.tensor_meta is None:
        raise ValueError(f"spec: {spec} has no tensor_meta, which holds the dtype and the shape")
    return int(utilities.spec_to_bytes(spec))


def scatter_v(
    tensor: torch.Tensor | None,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    src: int | None = None,
    group_src: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Scatter the tensor of rank ``src``; return this rank's part, ``sizes[rank]`` long along ``dim``.

    Parameters
    ----------
    tensor : on the source, of any dtype and shape but 0-dim. Elsewhere None, or a :class:`Placeholder`,
        whose shape and dtype are compared with the source's tensor. Receivers need to know nothing else.
    sizes : lengths by rank; the default is as in ``torch.chunk``, with zeros at the end. Other ranks may
        leave them out.
    dim : the same on every rank; may count from the end.
    src, group_src : the source as a rank of the default group (default 0), or of ``group``.

    The result is a new, dense tensor, and requires gradients if the source's tensor does. Raises ValueError
    or TypeError on every rank before the tensor moves. Semantics: ``torch.distributed.scatter`` with
    unequal parts.

    >>> def part():
    ...     whole = torch.arange(5.0) if interlace.get_rank() == 0 else None
    ...     return interlace.tensor.scatter_v(whole, [3, 2] if whole is not None else None)
    >>> interlace.run(part, 2)
    [tensor([0., 1., 2.]), tensor([3., 4.])]
    """
    op = "scatter_v"
    communicator = resolve(group)
    with communicator.accepting(op):
        root = checks.group_rank("src", src, group_src, communicator, default=0)
        tensor = facts.source_tensor(tensor, root, communicator)
        own_facts = facts.checked_facts(tensor, dim, sizes, communicator)
    terms = (("root", root), facts.gradient_mode())
    parts = facts.exchange(
        communicator, op, terms, own_facts, lambda parts: facts.check_source(parts, root)
    )
    source: facts.TensorFacts = parts[root]
    assert source.shape is not None
    total = source.shape[source.dim]
    lengths = source.sizes or blocks.chunk_lengths(total, communicator.world_size)
    cuts = blocks.along(source.shape, source.dim, lengths)
    return scatter_block(communicator, tensor, cuts, root, source)


def scatter_block(
    communicator: Communicator,
    tensor: torch.Tensor | None,
    cuts: Sequence[blocks.Block],
    root: int,
    source: facts.TensorFacts,
) -> torch.Tensor:
    """Return this rank's block of ``tensor`` of ``root`` (see ``source``); in backward sum to ``root``."""
    assert source.shape is not None and source.dtype is not None
    communicator = communicator.on(Placeholder((), device=source.device))
    whole = blocks.CutTensor(communicator, source.shape, source.dtype, cuts)
    is_root = communicator.rank == root
    part = whole.scatter(tensor.detach() if is_root and tensor is not None else None, root)
    assert part is not None
    if not source.requires_grad:
        return part

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        own_grad = facts.gradient_here(communicator, "scatter_v", grad, part.shape, whole.dtype)
        total = whole.gather_sum(own_grad, root)
        if is_root:
            return total
        device, ranks = communicator.place.device, [communicator.ranks[root]]
        return Placeholder(whole.shape, dtype=whole.dtype, device=device, ranks=ranks)

    return facts.record(communicator, "scatter_v", part, tensor, gradient)


def gather_v(
    tensor: torch.Tensor,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    dst: int | None = None,
    group_dst: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Return every rank's ``tensor``, joined along ``dim``, on rank ``dst``; elsewhere a Placeholder.

    Parameters
    ----------
    tensor : any dtype, any length along ``dim``, otherwise the same shape on all ranks.
    sizes : lengths by rank, if they are known; compared with the tensors'.
    dst, group_dst : the receiver as a rank of the default group (default 0), or of ``group``.

    The :class:`Placeholder` has the shape and dtype of the whole, and requires gradients if the whole does.
    ``backward`` of a result computed from it takes part in the gradients of all ranks, which ``dst`` sends.
    Raises ValueError or TypeError on every rank before the tensors move. Semantics:
    ``torch.distributed.gather`` with unequal parts.

    >>> def whole():
    ...     return interlace.tensor.gather_v(torch.ones(1 + interlace.get_rank()))
    >>> interlace.run(whole, 2)
    [tensor([1., 1., 1.]), Placeholder(shape=(3,), dtype=torch.float32, device=cpu, ranks=(0,))]
    """
    op = "gather_v"
    communicator = resolve(group).on(tensor)
    with communicator.accepting(op):
        root = checks.group_rank("dst", dst, group_dst, communicator, default=0)
    whole, needs = facts.share_facts(op, tensor, sizes, dim, communicator, (("root", root),))
    return gather_blocks(whole, tensor, root, needs)


def gather_blocks(
    whole: blocks.CutTensor, tensor: torch.Tensor, root: int, requires_grad: bool
) -> torch.Tensor:
    """Return the whole on ``root``, a Placeholder elsewhere; in backward send each block's gradient."""
    communicator, data = whole.communicator, tensor.detach()
    result = whole.gather(data, root)
    is_root = result is not None
    if result is None:
        ranks = [communicator.ranks[root]]
        result = Placeholder(whole.shape, dtype=data.dtype, device=data.device, ranks=ranks)
    if not requires_grad:
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor | None:
        whole_grad = None
        if is_root:
            whole_grad = facts.gradient_here(
                communicator, "gather_v", grad, whole.shape, data.dtype
            )
        part = whole.scatter(whole_grad, root)
        return torch.zeros_like(data) if part is None else part

    return facts.record(communicator, "gather_v", result, tensor, gradient)


def all_gather_v(
    tensor: torch.Tensor,
    sizes: facts.Sizes = None,
    dim: int = 0,
    *,
    group: Group = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """Return every rank's ``tensor``, joined along ``dim``, on all ranks.

    Parameters
    ----------
    tensor, sizes : as for :func:`gather_v`, with any length along ``dim``.
    accumulate : how gradients are summed over ranks, in rank order. "fp32" rounds the sum once to their
        dtype (wider dtypes stay), None rounds to their dtype after each addition.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> def whole():
    ...     return interlace.tensor.all_gather_v(torch.ones(1 + interlace.get_rank())).tolist()
    >>> interlace.run(whole, 2)
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    op = "all_gather_v"
    communicator = resolve(group).on(tensor)
    with communicator.accepting(op):
        facts.check_accumulate(accumulate)
    terms = (("accumulate", accumulate),)
    whole, needs = facts.share_facts(op, tensor, sizes, dim, communicator, terms)
    data, result = tensor.detach(), whole.empty(whole.shape)
    in_rank(lambda: rootless._all_gather(communicator, (whole.parts(result), data)))
    if not needs:
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        whole_grad = facts.gradient_here(communicator, op, grad, whole.shape, data.dtype)
        return _reduce(communicator, whole.parts(whole_grad), data, accumulate)

    return facts.record(communicator, op, result, tensor, gradient)


def _reduce(
    communicator: Communicator,
    parts: list[torch.Tensor],
    like: torch.Tensor,
    accumulate: str | None,
) -> torch.Tensor:
    """Return the sum over ranks of their ``parts[own rank]``, in rank order."""
    if blocks.wide(like.dtype) == blocks.wide(like.dtype, accumulate):
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        rootless._reduce_scatter(communicator, (out, parts))
        return out
    received = [torch.empty_like(like) for _ in parts]
    _all_to_all(communicator, (received, parts))
    total = torch.zeros_like(like)
    for each in received:
        total.add_(each)
    return total


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]] | None = None,
    dim: int = 0,
    *,
    group: Group = None,
    accumulate: str | None = "fp32",
) -> torch.Tensor:
    """Return the parts that all ranks select from their tensors for this rank, along ``dim``, by rank.

    Parameters
    ----------
    tensor : any dtype, the same shape on all ranks except along ``dim``.
    indices : for each rank, the positions along ``dim`` that it gets, a 1-D tensor of ints. A position may
        go to several ranks, or several times to one, or to none.
    sizes : ``sizes[s][r]`` is the number that rank s selects for rank r, if known; compared with
        ``indices``.
    accumulate : how gradients are summed over all copies of a position, as for :func:`all_gather_v`.

    Raises ValueError or TypeError on every rank before the tensors move.

    >>> def picked():
    ...     own = torch.arange(3) + 10 * interlace.get_rank()
    ...     return interlace.tensor.indexed_all_to_all_v(own, [torch.tensor([2]), torch.tensor([0, 1])])
    >>> interlace.run(picked, 2)
    [tensor([ 2, 12]), tensor([ 0,  1, 10, 11])]
    """
    op = "indexed_all_to_all_v"
    communicator = resolve(group).on(tensor)
    rank = communicator.rank
    with communicator.accepting(op):
        facts.check_accumulate(accumulate)
        facts.with_data("tensor", tensor, communicator)
        about = facts.checked_facts(tensor, dim, None, communicator)
        assert about.shape is not None
        dim = about.dim
        picked = _checked_indices(indices, about.shape[dim], communicator)
        matrix = None
        if sizes is not None:
            rows = list(sizes)
            if len(rows) != communicator.world_size:
                raise ValueError(
                    f"sizes must have one row per rank, {communicator.world_size}, got {len(rows)}"
                )
            matrix = tuple(one_length_per_rank("sizes", row, len(rows)) for row in rows)
    counts = tuple(len(each) for each in picked)
    named = (("dtype of tensor", about.dtype), ("dim", dim), ("accumulate", accumulate))
    terms = (*named, facts.gradient_mode())
    request = replace(about, sizes=(counts, matrix))
    parts: list[facts.TensorFacts] = facts.exchange(communicator, op, terms, request, _check)
    data = tensor.detach()
    picked = [each.to(device=data.device, dtype=torch.int64) for each in picked]
    lengths = [part.sizes[0][rank] for part in parts]
    shape = (*about.shape[:dim], sum(lengths), *about.shape[dim + 1 :])
    whole = blocks.CutTensor(communicator, shape, data.dtype, blocks.along(shape, dim, lengths))
    result = whole.empty(shape)
    bits = blocks.bits(data)  # torch selects elements of some dtypes only
    sent = [bits.index_select(dim, each).view(data.dtype) for each in picked]
    in_rank(lambda: _all_to_all(communicator, (whole.parts(result), sent)))
    if not any(part.requires_grad for part in parts):
        return result

    def gradient(grad: torch.Tensor | None) -> torch.Tensor:
        whole_grad = facts.gradient_here(communicator, op, grad, whole.shape, data.dtype)
        back = [torch.empty_like(each) for each in sent]
        _all_to_all(communicator, (back, whole.parts(whole_grad)))
        wide = blocks.wide(data.dtype, accumulate)
        total = torch.zeros(data.shape, dtype=wide, device=data.device)
        for where, each in zip(picked, back, strict=True):
            total.index_add_(dim, where, each.to(wide))
        return total.to(data.dtype)

    return facts.record(communicator, op, result, tensor, gradient)


def _checked_indices(indices: Any, length: int, communicator: Communicator) -> list[torch.Tensor]:
    count = communicator.world_size
    if not isinstance(indices, (list, tuple)) or len(indices) != count:
        found = len(indices) if isinstance(indices, (list, tuple)) else type(indices).__name__
        raise TypeError(f"indices must be a list of {count} tensors, got {found}")
    for peer, each in enumerate(indices):
        if not isinstance(each, torch.Tensor) or each.dtype not in (torch.int64, torch.int32):
            kind = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
            raise TypeError(f"indices[{peer}] must be a tensor of ints, got {kind}")
        if each.dim() != 1:
            raise ValueError(f"indices[{peer}] must be 1-D, got shape {tuple(each.shape)}")
        if len(each) and not 0 <= int(each.min()) <= int(each.max()) < length:
            raise ValueError(
                f"indices[{peer}] must be within 0..{length - 1}, got {int(each.min())}.."
                f"{int(each.max())}"
            )
    return list(indices)


def _check(parts: list[facts.TensorFacts]) -> None:
    """Check parts whose ``sizes`` are the numbers of positions by receiver, and the caller's sizes."""
    facts.check_equal_beside(parts)
    for rank, receiver in enumerate(parts):
        for sender, wanted in enumerate(receiver.sizes[1] or ()):
            if wanted != (counts := parts[sender].sizes[0]):
                raise ValueError(
                    f"sizes[{sender}] is {list(wanted)} on rank {rank}, but indices of rank {sender} "
                    f"select {list(counts)}"
                )
