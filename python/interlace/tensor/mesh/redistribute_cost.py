"""Torch's costs of collectives and redistributions of a DTensor, in microseconds, on a mesh's topology.

With n ranks on the dimension, B GiB, and of the topology a base, a latency per hop and a bandwidth::

    all_gather      base + (n - 1) * latency + B * (n - 1) / n / bandwidth          B gathered
    reduce_scatter  the same                                                        B before
    all_reduce      base + 2 (n - 1) * latency + B * 2 (n - 1) / n / bandwidth
    all_to_all      as all_gather: each rank sends n - 1 of the n parts of its B

torch has no formula for all_to_all: from shard to shard it takes that of all_gather and 1 us more. Where
the topology was measured, the line of the op itself counts instead. ``redistribute_cost`` takes the steps
that DTensor of the installed torch would take. A topology may be one of torch's own ``MeshTopoInfo``.
"""

import math
from typing import Any

from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh

from interlace.tensor.mesh.shards import spec_to_bytes
from interlace.tensor.mesh.topology import GIB, MeshTopoInfo, Topology, interlace_topology

PENALTY = 1.0  # torch's, us: from shard to shard it would rather gather


def _ring_us(op: str, bytes_gb: float, mesh_topo: Topology, mesh_dim: int, rounds: int) -> float:
    topo = interlace_topology(mesh_topo)
    measured = topo.us(op, bytes_gb, mesh_dim)
    if measured is not None:
        return measured
    ranks = topo.mesh_dim_devices[mesh_dim]
    hops = rounds * (ranks - 1)
    latency = topo.mesh_dim_base[mesh_dim] + hops * topo.mesh_dim_latency[mesh_dim]
    return latency + (bytes_gb * hops / ranks) / topo.mesh_dim_bandwidth[mesh_dim] * 1e6


def allgather_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Microseconds of an all-gather along ``mesh_dim``; ``bytes_gb``: GiB of the gathered tensor.

    Semantics: ``torch.distributed.tensor._collective_utils.allgather_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(allgather_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("all_gather", bytes_gb, mesh_topo, mesh_dim, 1)


def reduce_scatter_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Microseconds of a reduce-scatter along ``mesh_dim``; ``bytes_gb``: GiB of a rank's input.

    Semantics: ``torch.distributed.tensor._collective_utils.reduce_scatter_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(reduce_scatter_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("reduce_scatter", bytes_gb, mesh_topo, mesh_dim, 1)


def allreduce_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Microseconds of an all-reduce along ``mesh_dim``; ``bytes_gb``: GiB of a rank's tensor.

    Semantics: ``torch.distributed.tensor._collective_utils.allreduce_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(allreduce_cost(0.001, topo, 0), 3)
    110.6
    """
    return _ring_us("all_reduce", bytes_gb, mesh_topo, mesh_dim, 2)


def alltoall_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Microseconds of an all-to-all along ``mesh_dim``; ``bytes_gb``: GiB of a rank's input.

    Every rank sends each of the n - 1 others its n-th part. torch has no such function.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(alltoall_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("all_to_all", bytes_gb, mesh_topo, mesh_dim, 1)


def _step(
    current: Any, target: Any, topo: MeshTopoInfo, mesh_dim: int, gib: float
) -> tuple[float, float]:
    """A change of placement in one dimension: its cost, and the GiB of a rank after it."""
    ranks = topo.mesh_dim_devices[mesh_dim]
    if current == target:
        return 0.0, gib
    if current.is_shard() and target.is_replicate():
        gib *= ranks
        return allgather_cost(gib, topo, mesh_dim), gib
    if current.is_shard() and target.is_shard():
        penalty = 0.0 if topo.links else PENALTY
        return alltoall_cost(gib, topo, mesh_dim) + penalty, gib
    if current.is_partial() and target.is_replicate():
        return allreduce_cost(gib, topo, mesh_dim), gib
    if current.is_partial() and target.is_shard():
        return reduce_scatter_cost(gib, topo, mesh_dim), gib / ranks
    if target.is_partial() and (current.is_shard() or current.is_partial()):
        return math.inf, gib  # nobody does that
    return 0.0, gib / ranks if current.is_replicate() and target.is_shard() else gib


def _topology(mesh: DeviceMesh, topo: Topology | None) -> MeshTopoInfo:
    return MeshTopoInfo.build_from_mesh(mesh) if topo is None else interlace_topology(topo)


def redistribute_cost(
    current_spec: Any, target_spec: Any, *, mesh_topo: Topology | None = None
) -> float:
    """Microseconds of communication from one ``DTensorSpec`` to another.

    0 from a replicated tensor, to an equal layout, and on a rank outside the mesh; infinite between meshes,
    from a shard to a partial sum, between kinds of partial sums. ``mesh_topo``, interlace's or torch's: by
    default that of :meth:`MeshTopoInfo.build_from_mesh`. Raises ValueError if a spec has no tensor_meta.
    Semantics and, with torch's topology, figures:
    ``torch.distributed.tensor._collective_utils.redistribute_cost``.

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    >>> mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    >>> meta = TensorMeta(torch.Size([1024, 1024]), (1024, 1), torch.float32)
    >>> shards, whole = (DTensorSpec(mesh, (p,), tensor_meta=meta) for p in (Shard(0), Replicate()))
    >>> topo = MeshTopoInfo.build_from_mesh(mesh, bandwidth=10, latency=2)
    >>> round(redistribute_cost(shards, whole, mesh_topo=topo), 2)
    203.91
    """
    from torch.distributed.tensor._redistribute import (
        _gen_transform_infos,
        _gen_transform_infos_non_cached,
    )

    current, target = current_spec, target_spec
    if current.mesh != target.mesh:
        return math.inf
    same = (current.placements, current.shard_order) == (target.placements, target.shard_order)
    if same or current.is_replicated() or not current.mesh._is_current_rank_part_of_mesh():
        return 0.0
    if current.shard_order is None or target.shard_order is None:
        return math.inf
    topo = _topology(current.mesh, mesh_topo)
    gib = spec_to_bytes(current) / current.num_shards / GIB
    steps = _gen_transform_infos_non_cached if _are_we_tracing() else _gen_transform_infos
    cost = 0.0
    for each in steps(current, target):
        took, gib = _step(*each.src_dst_placements, topo, each.mesh_dim, gib)
        cost += took
    return cost


def one_step_redistribute_cost(
    current_spec: Any, target_spec: Any, *, mesh_topo: Topology | None = None
) -> float:
    """The cost as :func:`redistribute_cost`, for specs that differ in one placement at most.

    Raises ValueError if they differ in more. Semantics:
    ``torch.distributed.tensor._collective_utils.one_step_redistribute_cost``.

    >>> from torch.distributed.tensor import Replicate
    >>> from torch.distributed.tensor._dtensor_spec import DTensorSpec
    >>> spec = DTensorSpec(None, (Replicate(),))
    >>> one_step_redistribute_cost(spec, spec)
    0.0
    """
    if current_spec.mesh != target_spec.mesh:
        return math.inf
    pairs = list(zip(current_spec.placements, target_spec.placements, strict=True))
    differing = [dim for dim, (current, target) in enumerate(pairs) if current != target]
    if not differing:
        return 0.0
    if len(differing) > 1:
        raise ValueError(
            "one_step_redistribute_cost: specs must differ in one placement, got "
            f"{current_spec.placements} and {target_spec.placements}"
        )
    topo = _topology(current_spec.mesh, mesh_topo)
    gib = spec_to_bytes(current_spec) / current_spec.num_shards / GIB
    return _step(*pairs[differing[0]], topo, differing[0], gib)[0]
