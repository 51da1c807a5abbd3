"""Blocks of a whole tensor, one per rank of a mesh: their positions, by arithmetic alone, and their moves.

A block is the position of a rank's part in the whole, ``(start, length)`` along each dim. Several ranks may
have the same block and hold replicas of it. Nothing here is recorded for backward.

Along a mesh dim of placement ``Shard(d)`` ranks hold parts of tensor dim d, one after another; along
``Replicate()`` they hold the same. If several mesh dims shard one tensor dim, it is cut along the first of
them, and each part along the next, as ``DTensor`` does. Ranks that hold the same part of a dim have the
same length of it; otherwise lengths are free.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from interlace.kernels.tiling import split_rows
from interlace.ops.collectives import rooted
from interlace.ops.collectives.all_to_all import one_length_per_rank
from interlace.ops.op.sim_backward import in_rank
from interlace.runtime.core.communicator import Communicator

Block = tuple[tuple[int, int], ...]
Dims = tuple[int, ...]
Placements = tuple[Placement, ...]


def shape_of(block: Block) -> tuple[int, ...]:
    return tuple(length for _, length in block)


def cut(whole: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, (start, length) in enumerate(block):
        whole = whole.narrow(dim, start, length)
    return whole


def along(shape: Sequence[int], dim: int, lengths: Sequence[int]) -> list[Block]:
    starts = [0, *accumulate(lengths)]
    spans = [(0, length) for length in shape]
    return [
        (*spans[:dim], (start, length), *spans[dim + 1 :])
        for start, length in zip(starts, lengths, strict=False)
    ]


def chunk_lengths(total: int, count: int) -> list[int]:
    """Return the lengths of ``torch.chunk`` of ``total``, with zeros if it makes fewer than ``count``."""
    return [length for _, length in split_rows(total, count)]


def wide(dtype: torch.dtype, accumulate: str | None = "fp32") -> torch.dtype:
    """Return the dtype for sums of ``dtype``: fp32 if it is wider and ``accumulate`` is not None."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow and accumulate is not None else dtype


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory in a dtype of that size whose elements all functions of torch move."""
    return tensor.view(_BITS[tensor.element_size()])


@dataclass(frozen=True)
class CutTensor:
    """A tensor in blocks on the ranks of a group; some ranks may have no block."""

    communicator: Communicator
    shape: Dims
    dtype: torch.dtype
    blocks: Sequence[Block | None]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, device=self.communicator.place.device)

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' blocks of ``whole``; an empty tensor for a rank without a block."""
        return [whole.new_empty(0) if block is None else cut(whole, block) for block in self.blocks]

    def scatter(self, whole: torch.Tensor | None, root: int) -> torch.Tensor | None:
        """Return this rank's block of ``whole``, which is on ``root``; None if there is none."""
        block = self.blocks[self.communicator.rank]
        out = self.empty((0,) if block is None else shape_of(block))
        parts = None if whole is None else self.parts(whole)
        in_rank(lambda: rooted._scatter(self.communicator, (out, parts), (None, root)))
        return None if block is None else out

    def gather(self, part: torch.Tensor, root: int) -> torch.Tensor | None:
        """Return the whole of all ranks' ``part`` on ``root``, otherwise None. Others may send nothing."""
        if self.blocks[self.communicator.rank] is None:
            part = part.new_empty(0)
        whole = self.empty(self.shape) if self.communicator.rank == root else None
        outputs = None if whole is None else self.parts(whole)
        in_rank(lambda: rooted._gather(self.communicator, (part, outputs), (None, root)))
        return whole

    def gather_sum(self, part: torch.Tensor, root: int) -> torch.Tensor | None:
        """Gather; sum the parts of ranks with the same block, in fp32, in rank order."""
        blocks = [each for each in self.blocks if each is not None]
        if len(set(blocks)) == len(blocks):
            return self.gather(part, root)
        outputs = None
        if self.communicator.rank == root:
            outputs = [self.empty(shape_of(each)) for each in blocks]
        in_rank(lambda: rooted._gather(self.communicator, (part, outputs), (None, root)))
        if outputs is None:
            return None
        whole = torch.zeros(self.shape, dtype=wide(self.dtype), device=part.device)
        for block, replica in zip(blocks, outputs, strict=True):
            cut(whole, block).add_(replica)
        return whole.to(self.dtype)


@dataclass(frozen=True)
class MeshSharding:
    """``shape`` of the whole, ``blocks`` by rank of the mesh, in row-major order of ``mesh_shape``."""

    mesh_shape: Dims
    placements: Placements
    shape: Dims
    blocks: tuple[Block, ...]

    def sizes(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Return, by mesh dim that shards, the lengths of the parts in the row of ``rank``."""
        position = coordinates(self.mesh_shape)[rank]
        found = {}
        for mesh_dim, placement in enumerate(self.placements):
            if not isinstance(placement, Shard):
                continue
            inner = [m for m in _sharding(self.placements, placement.dim) if m > mesh_dim]
            lengths = [0] * self.mesh_shape[mesh_dim]
            for coordinate, block in zip(coordinates(self.mesh_shape), self.blocks, strict=True):
                apart = [
                    m for m, (c, o) in enumerate(zip(coordinate, position, strict=True)) if c != o
                ]
                if set(apart) <= {mesh_dim, *inner}:
                    lengths[coordinate[mesh_dim]] += block[placement.dim][1]
            found[mesh_dim] = tuple(lengths)
        return found

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return one rank for each part of the whole, all with the replica coordinates of ``rank``."""
        position = coordinates(self.mesh_shape)[rank]
        copied = [m for m, p in enumerate(self.placements) if isinstance(p, Replicate)]
        return tuple(
            other
            for other, coordinate in enumerate(coordinates(self.mesh_shape))
            if all(coordinate[m] == position[m] for m in copied)
        )


def coordinates(mesh_shape: Sequence[int]) -> list[Dims]:
    return list(itertools.product(*map(range, mesh_shape)))


def _sharding(placements: Placements, dim: int) -> list[int]:
    return [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]


def checked_placements(placements: object, mesh_ndim: int) -> Placements:
    """Return one placement per mesh dim; raise ValueError or TypeError otherwise."""
    listed = [placements] if isinstance(placements, Placement) else placements
    if not isinstance(listed, (list, tuple)) or len(listed) != mesh_ndim:
        raise ValueError(
            f"placements must be one for each of the {mesh_ndim} mesh dims, got {placements!r}"
        )
    for each in listed:
        if isinstance(each, Partial):
            raise ValueError(
                f"placements: {each} is a part of a sum, not of a tensor; reduce it first with "
                "interlace.functional.all_reduce"
            )
        if type(each) not in (Shard, Replicate):
            raise TypeError(f"placements must be Shard or Replicate, got {each!r}")
    return tuple(listed)


def plain_form(placements: Placements) -> tuple[int | None, ...]:
    """Return the dims that are sharded, and None for a replica, in the form that ranks exchange."""
    return tuple(
        placement.dim if isinstance(placement, Shard) else None for placement in placements
    )


def of_plain_form(dims: Sequence[int | None]) -> Placements:
    return tuple(Replicate() if dim is None else Shard(dim) for dim in dims)


def for_dims(placements: Placements, ndim: int) -> Placements:
    """Return ``placements`` with dims from 0; raise ValueError if a tensor of ``ndim`` lacks them."""
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if not -ndim <= placement.dim < ndim:
                raise ValueError(f"placements: {placement} does not fit a tensor with {ndim} dims")
            placement = Shard(placement.dim % ndim)
        found.append(placement)
    return tuple(found)


def from_shapes(mesh_shape: Dims, placements: Placements, shapes: Sequence[Dims]) -> MeshSharding:
    """Return the sharding whose shards have these shapes by rank; raise ValueError if they do not fit."""
    first = shapes[0]
    places = coordinates(mesh_shape)
    blocks: list[list[tuple[int, int]]] = [[] for _ in shapes]
    whole = []
    for rank, shape in enumerate(shapes):
        if len(shape) != len(first):
            raise ValueError(
                f"local has {len(first)} dims on rank 0, {len(shape)} on rank {rank}: {first} and {shape}"
            )
    for dim in range(len(first)):
        along = _sharding(placements, dim)
        keys = [tuple(place[m] for m in along) for place in places]
        lengths: dict[Dims, tuple[int, int]] = {}
        for rank, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
            length, other = lengths.setdefault(key, (shape[dim], rank))
            if length != shape[dim]:
                raise ValueError(
                    f"local has length {length} along dim {dim} on rank {other}, {shape[dim]} on rank "
                    f"{rank}: with placements {placements} over a mesh of {mesh_shape} both hold the same "
                    "part of it"
                )
        starts, total = {}, 0
        for key in sorted(lengths):
            starts[key] = total
            total += lengths[key][0]
        whole.append(total)
        for block, key, shape in zip(blocks, keys, shapes, strict=True):
            block.append((starts[key], shape[dim]))
    return MeshSharding(mesh_shape, placements, tuple(whole), tuple(tuple(each) for each in blocks))


def chunk_sharding(mesh_shape: Dims, placements: Placements, shape: Sequence[int]) -> MeshSharding:
    """Return the sharding of a tensor of ``shape`` that ``torch.chunk`` and ``DTensor`` make."""
    shapes = []
    for place in coordinates(mesh_shape):
        found = list(shape)
        for placement, count, at in zip(placements, mesh_shape, place, strict=True):
            if isinstance(placement, Shard):
                found[placement.dim] = chunk_lengths(found[placement.dim], count)[at]
        shapes.append(tuple(found))
    return from_shapes(mesh_shape, placements, shapes)


def with_sizes(
    mesh_shape: Dims, placements: Placements, sizes: dict[int, Sequence[int]], shape: Sequence[int]
) -> MeshSharding:
    """Return the sharding with lengths ``sizes[mesh_dim]``; ``shape`` has the dims without shards."""
    expected = {m for m, p in enumerate(placements) if isinstance(p, Shard)}
    if set(sizes) != expected:
        raise ValueError(
            f"sizes must have the lengths for each mesh dim that shards, {sorted(expected)}, got lengths "
            f"for {sorted(sizes)}"
        )
    for mesh_dim, lengths in sizes.items():
        placement = placements[mesh_dim]
        assert isinstance(placement, Shard)
        if len(_sharding(placements, placement.dim)) > 1:
            raise ValueError(
                f"sizes: several mesh dims shard dim {placement.dim}, whose lengths differ between rows of "
                'the mesh; use sizes="infer"'
            )
        one_length_per_rank(f"sizes[{mesh_dim}]", lengths, mesh_shape[mesh_dim])
    shapes = []
    for place in coordinates(mesh_shape):
        of_rank = list(shape)
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                of_rank[placement.dim] = sizes[mesh_dim][place[mesh_dim]]
        shapes.append(tuple(of_rank))
    return from_shapes(mesh_shape, placements, shapes)


def unlike_chunks(sharding: MeshSharding) -> list[str]:
    """Return a line for each rank whose shape differs from the shape that ``torch.chunk`` makes."""
    usual = chunk_sharding(sharding.mesh_shape, sharding.placements, sharding.shape)
    both = zip(map(shape_of, sharding.blocks), map(shape_of, usual.blocks), strict=True)
    return [
        f"rank {rank} has {length}, torch.chunk gives it {other}"
        for rank, (length, other) in enumerate(both)
        if length != other
    ]
