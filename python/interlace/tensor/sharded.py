"""A tensor in parts of any length on the ranks of a mesh."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups import groups
from interlace.ops.collectives.all_to_all import whole_numbers
from interlace.runtime.core.communicator import Communicator
from interlace.tensor import blocks, facts
from interlace.tensor.blocks import (
    MeshSharding,
    Placements,
    checked_placements,
    chunk_sharding,
    for_dims,
    from_shapes,
    of_plain_form,
    plain_form,
    unlike_chunks,
    with_sizes,
)
from interlace.tensor.mesh_collectives import all_gather_v, gather_blocks, scatter_block


@dataclass(frozen=True)
class _Ranks:
    """The mesh that the user passed, its shape, and the group of all its ranks in row-major order."""

    given: Group
    shape: tuple[int, ...]
    communicator: Communicator

    def row(self, mesh_dim: int) -> Group:
        return (self.given, mesh_dim) if isinstance(self.given, DeviceMesh) else self.given


def _ranks(mesh: Group) -> _Ranks:
    if isinstance(mesh, DeviceMesh):
        members = mesh.mesh.flatten().tolist()
        return _Ranks(mesh, tuple(mesh.mesh.shape), groups.resolve(members))
    communicator = groups.resolve(mesh)
    return _Ranks(mesh, (communicator.world_size,), communicator)


class ShardedTensor:
    """This rank's part of a tensor, made by :func:`from_local`, :func:`scatter` or :func:`from_dtensor`.

    Attributes
    ----------
    shape : the shape of the whole tensor; ``dtype`` and ``device`` are as in the part.
    mesh : the DeviceMesh or group whose ranks hold the parts.
    placements : one per mesh dim, ``Shard`` or ``Replicate``.
    sizes : by mesh dim that shards, the lengths of the parts in this rank's row of the mesh.

    ``local``, this rank's part, may have any length along the dims that are sharded. Raises
    ValueError or TypeError on every rank when it is made or gathered, not here. Semantics: ``DTensor``.

    >>> from torch.distributed.tensor import Shard
    >>> def methods():
    ...     local = torch.full((1 + interlace.get_rank(),), 1.0 + interlace.get_rank())
    ...     sharded = interlace.tensor.from_local(local, None, [Shard(0)])
    ...     assert sharded.to_local() is local
    ...     return sharded.full_tensor().tolist(), tuple(sharded.gather(group_dst=1).shape)
    >>> interlace.run(methods, 2)[0]
    ([1.0, 2.0, 2.0], (3,))
    """

    def __init__(self, local: torch.Tensor, ranks: _Ranks, sharding: MeshSharding) -> None:
        self._local, self._ranks, self._sharding = local, ranks, sharding
        self.shape = torch.Size(sharding.shape)
        self.mesh, self.placements = ranks.given, sharding.placements
        self.sizes = sharding.sizes(ranks.communicator.rank)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this rank's part and of the whole."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        """The device of this rank's part."""
        return self._local.device

    @property
    def requires_grad(self) -> bool:
        """Whether this rank's part requires gradients."""
        return self._local.requires_grad

    def __repr__(self) -> str:
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements}, "
            f"sizes={self.sizes}, local={tuple(self._local.shape)} on rank {self._ranks.communicator.rank})"
        )

    def to_local(self) -> torch.Tensor:
        """Return this rank's part, the tensor itself."""
        return self._local

    def full_tensor(self, *, accumulate: str | None = "fp32") -> torch.Tensor:
        """Return the whole tensor on every rank; gather parts over the mesh dims that shard, last first.

        The gradient of a part sums the losses of all ranks in its rows of the mesh, by ``accumulate``, see
        :func:`all_gather_v`. For a whole that every rank has (``Replicate``), only the rank's own loss
        counts. ``DTensor.full_tensor`` assumes equal gradients on all ranks and does not sum them.
        """
        whole = self._local
        for mesh_dim, lengths in reversed(self.sizes.items()):
            placement = self.placements[mesh_dim]
            assert isinstance(placement, Shard)
            row = self._ranks.row(mesh_dim)
            whole = all_gather_v(whole, lengths, placement.dim, group=row, accumulate=accumulate)
        return whole

    def gather(self, *, group_dst: int = 0) -> torch.Tensor:
        """Return the whole tensor on one rank, a :class:`Placeholder` on the others.

        ``group_dst`` counts the ranks of the mesh in row-major order. Every part is sent once. If ranks
        hold replicas, the ranks with the receiver's replica coordinates send, and the gradients of the
        others are zeros. Raises ValueError or TypeError on every rank before the parts move.
        """
        op, communicator = "gather", self._ranks.communicator.on(self._local)
        with communicator.accepting(op):
            root = checks.group_rank("dst", None, group_dst, communicator)
            local = facts.with_data("local", self._local, communicator)
        needs = local.requires_grad and torch.is_grad_enabled()
        terms = (
            ("group_dst", root),
            ("shape", tuple(self.shape)),
            ("dtype", self.dtype),
            ("where parts lie", self._sharding.blocks),  # sizes= may differ between ranks
            facts.gradient_mode(),
        )
        wanted = facts.exchange(communicator, op, terms, needs)
        senders = self._sharding.replicas_of(root)
        cuts = [b if r in senders else None for r, b in enumerate(self._sharding.blocks)]
        whole = blocks.CutTensor(communicator, tuple(self.shape), self.dtype, cuts)
        return gather_blocks(whole, local, root, any(wanted))

    def to_dtensor(self) -> DTensor:
        """Return this tensor as torch's ``DTensor``, on the same memory. Differentiable, sends nothing.

        Raises ValueError, with the ranks and lengths, unless all parts are as long as ``torch.chunk`` makes
        them; TypeError unless the mesh is a ``DeviceMesh``.
        """
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(
                f"to_dtensor needs a DeviceMesh, but the mesh is a {type(self.mesh).__name__} on rank "
                f"{self._ranks.communicator.rank}"
            )
        if differing := unlike_chunks(self._sharding):
            raise ValueError(
                f"to_dtensor: a DTensor of shape {tuple(self.shape)} and placements {self.placements} has "
                f"parts as torch.chunk cuts them; {'; '.join(differing)}"
            )
        return DTensor.from_local(
            self._local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=torch.empty(self.shape, device="meta").stride(),
        )


def from_local(
    local: torch.Tensor,
    mesh: Group,
    placements: Placement | Sequence[Placement],
    sizes: str | dict[int, Sequence[int]] = "infer",
    *,
    shape: Sequence[int] | None = None,
) -> ShardedTensor:
    """Make a tensor of which every rank has the part ``local``.

    Parameters
    ----------
    local : any dtype. Gradients of the result go to it.
    mesh : a ``DeviceMesh``, or a group in any form, which is a mesh of one dim.
    placements : one per mesh dim, ``Shard(dim)`` or ``Replicate()``; ``Partial`` is refused.
    sizes : "infer" means parts of any length, which the ranks exchange in one small message. "chunk" means
        the lengths of ``torch.chunk`` of ``shape``, and ``{mesh_dim: lengths}`` has the lengths for every
        mesh dim that shards; both send nothing.
    shape : the whole tensor's, for "chunk"; the default assumes that all parts are like ``local``.

    Raises ValueError or TypeError, on every rank, if parts do not fit together, or ``local`` is not as long
    as ``sizes`` says. If ranks pass different ``sizes``, the next op that communicates raises the error.
    Semantics: ``DTensor.from_local``, of any lengths.

    >>> from torch.distributed.tensor import Shard
    >>> def shards():
    ...     local = torch.ones(1 + 2 * interlace.get_rank(), 3)
    ...     sharded = interlace.tensor.from_local(local, None, [Shard(0)])
    ...     return tuple(sharded.shape), sharded.sizes
    >>> interlace.run(shards, 2)[1]
    ((4, 3), {0: (1, 3)})
    """
    op, ranks = "from_local", _ranks(mesh)
    communicator = ranks.communicator
    with communicator.accepting(op):
        local = facts.with_data("local", local, communicator.on(local))
        local_shape = tuple(local.shape)
        checked = for_dims(checked_placements(placements, len(ranks.shape)), len(local_shape))
        if shape is not None and sizes != "chunk":
            raise ValueError(f'shape is for sizes="chunk", got sizes={sizes!r}')
        sharding = None
        if sizes != "infer":
            sharding = _given_sharding(ranks, checked, local_shape, sizes, shape)
    if sharding is None:
        terms = (("placements", str(checked)), ("mesh", ranks.shape), ("dtype", local.dtype))
        together = functools.partial(from_shapes, ranks.shape, checked)
        sharding = together(facts.exchange(communicator, op, terms, local_shape, together))
    return ShardedTensor(local, ranks, sharding)


def _given_sharding(
    ranks: _Ranks,
    placements: Placements,
    local_shape: tuple[int, ...],
    sizes: object,
    shape: Sequence[int] | None,
) -> MeshSharding:
    rank = ranks.communicator.rank
    if sizes == "chunk":
        whole = list(local_shape if shape is None else shape)
        if shape is None:
            for mesh_dim, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    whole[placement.dim] *= ranks.shape[mesh_dim]
        if len(whole) != len(local_shape):
            raise ValueError(f"shape {tuple(whole)} for a local of shape {local_shape}")
        sharding = chunk_sharding(ranks.shape, placements, whole)
    else:
        sharding = with_sizes(ranks.shape, placements, _whole_sizes(sizes), local_shape)
    expected = blocks.shape_of(sharding.blocks[rank])
    if expected != local_shape:
        raise ValueError(f"local has shape {local_shape}, but sizes={sizes!r} makes it {expected}")
    return sharding


def _whole_sizes(sizes: object) -> dict[int, Sequence[int]]:
    if not isinstance(sizes, dict):
        raise TypeError(f'sizes must be "infer", "chunk" or {{mesh_dim: lengths}}, got {sizes!r}')
    return {m: whole_numbers(f"sizes[{m}]", lengths) for m, lengths in sizes.items()}


def scatter(
    tensor: torch.Tensor | None,
    mesh: Group,
    placements: Placement | Sequence[Placement],
    sizes: dict[int, Sequence[int]] | None = None,
    *,
    group_src: int = 0,
) -> ShardedTensor:
    """Scatter the tensor of rank ``group_src`` of the mesh; every rank gets only its own part.

    Parameters
    ----------
    tensor : on the source. Elsewhere None or a :class:`Placeholder`; receivers need to know nothing.
    mesh, placements : as for :func:`from_local`, the same on every rank.
    sizes : ``{mesh_dim: lengths}``, on the source; the default is the lengths of ``torch.chunk``.
    group_src : counts the ranks of the mesh in row-major order.

    Differentiable: the source gets the gradients of all parts, summed over replicas in fp32. Raises
    ValueError or TypeError on every rank before the tensor moves. Semantics: ``distribute_tensor`` of
    ``torch.distributed.tensor``, for one rank's tensor.

    >>> from torch.distributed.tensor import Shard
    >>> def local():
    ...     whole = torch.arange(6).view(2, 3) if interlace.get_rank() == 0 else None
    ...     return interlace.tensor.scatter(whole, None, [Shard(1)]).to_local().tolist()
    >>> interlace.run(local, 2)
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    op, ranks = "scatter", _ranks(mesh)
    communicator = ranks.communicator
    rank = communicator.rank
    own_facts = facts.TensorFacts()
    with communicator.accepting(op):
        root = checks.group_rank("src", None, group_src, communicator)
        checked = checked_placements(placements, len(ranks.shape))
        tensor = facts.source_tensor(tensor, root, communicator)
        if tensor is not None:
            own_facts = facts.facts_of(tensor)
        if rank == root:
            own_facts = replace(own_facts, sizes=None if sizes is None else _whole_sizes(sizes))
            _cut(ranks, checked, own_facts)

    def check(parts: list[tuple[facts.TensorFacts, tuple[int | None, ...]]]) -> None:
        source = parts[root][0]
        assert source.shape is not None
        facts.check_like_source([each for each, _ in parts], root)
        ndim, placed = len(source.shape), parts[root][1]
        same = [{p} if p is None else {p % ndim, p % ndim - ndim} for p in placed]
        for other, (_, dims) in enumerate(parts):
            if not all(d in each for d, each in zip(dims, same, strict=True)):
                raise ValueError(
                    f"placements are {of_plain_form(dims)} on rank {other}, but {of_plain_form(placed)} on "
                    f"the source, group rank {root}"
                )

    terms = (("group_src", root), ("mesh", ranks.shape), facts.gradient_mode())
    everyone = facts.exchange(communicator, op, terms, (own_facts, plain_form(checked)), check)
    source: facts.TensorFacts = everyone[root][0]
    sharding = _cut(ranks, checked, source)
    local = scatter_block(communicator, tensor, sharding.blocks, root, source)
    return ShardedTensor(local, ranks, sharding)


def _cut(ranks: _Ranks, placements: Placements, source: facts.TensorFacts) -> MeshSharding:
    shape, sizes = source.shape, source.sizes
    assert shape is not None
    placements = for_dims(placements, len(shape))
    if sizes is None:
        return chunk_sharding(ranks.shape, placements, shape)
    sharding = with_sizes(ranks.shape, placements, sizes, shape)
    if sharding.shape != shape:
        raise ValueError(f"sizes={sizes} add up to shape {sharding.shape}, but tensor has {shape}")
    return sharding


def from_dtensor(dtensor: DTensor) -> ShardedTensor:
    """Return a ShardedTensor of torch's ``dtensor``, of any shape, on the same memory.

    Differentiable, sends nothing. Raises TypeError for anything else, ValueError for ``Partial``
    placements. The reverse is :meth:`ShardedTensor.to_dtensor`.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> from torch.distributed.tensor import DTensor, Placement, Shard
    >>> def on_rank():
    ...     mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=interlace.get_rank())
    ...     dtensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    ...     sharded = interlace.tensor.from_dtensor(dtensor)
    ...     return tuple(sharded.shape), sharded.sizes, type(sharded.to_dtensor()).__name__
    >>> interlace.run(on_rank, 2)[1]
    ((4, 3), {0: (2, 2)}, 'DTensor')
    """
    with groups.default_group().accepting():
        if not isinstance(dtensor, DTensor):
            raise TypeError(f"dtensor must be a DTensor, got {type(dtensor).__name__}")
        ranks = _ranks(dtensor.device_mesh)
        placements = checked_placements(tuple(dtensor.placements), len(ranks.shape))
        placements = for_dims(placements, dtensor.dim())
    sharding = chunk_sharding(ranks.shape, placements, tuple(dtensor.shape))
    return ShardedTensor(dtensor.to_local(), ranks, sharding)
