"""Costs of collectives and redistributions on a device mesh, and the topology that they depend on.

docs/how-to/train/tensor.md has the formulas, in microseconds, and the sources of figures: the caller, a
calibration of this machine, torch's constants. The number of devices of a host decides which dimensions
cross hosts. A file of calibration has a line per op, dimension and protocol; the bandwidths and latencies
that a measured topology shows are of its all_gather of large messages.
"""

import math
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils as utilities

from interlace.runtime.tuning import calibration
from interlace.runtime.tuning.calibration import Link, MeasuredMesh
from interlace.tensor.mesh_collectives import spec_to_bytes

BANDWIDTH, BASE = 87.7, 6.6
GIB = float(1 << 30)
TORCH, GIVEN = "torch", "given"
PENALTY = 1.0  # torch's, us: makes a gather preferable to a change from shard to shard


@dataclass
class MeshTopoInfo:
    """By dimension of ``mesh``: ranks, GiB/s per rank, and us per hop, like torch's class of that name.

    Attributes
    ----------
    mesh : the DeviceMesh.
    mesh_dim_devices : ranks along each dimension.
    mesh_dim_bandwidth : GiB/s; torch's comment says GB/s, but it divides GiB by this figure.
    mesh_dim_latency : microseconds per hop.
    mesh_dim_base : microseconds of a collective before its first hop; 6.6 for torch.
    links : the measured line by dimension and op; it replaces the figures above.
    source : "given", "measured ..." or "torch".

    >>> from torch.distributed.device_mesh import DeviceMesh
    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=0)
    >>> topo = MeshTopoInfo.build_from_mesh(mesh, bandwidth=[10.0, 40.0], latency=[5.0, 1.0])
    >>> topo.mesh_dim_devices, topo.source
    ([2, 2], 'given')
    >>> topo.us("all_gather", 0.001, 0) is None  # nothing was measured
    True
    """

    mesh: DeviceMesh | None
    mesh_dim_devices: list[int]
    mesh_dim_bandwidth: list[float]
    mesh_dim_latency: list[float]
    mesh_dim_base: list[float] = field(default_factory=list)
    links: dict[tuple[int, str], Link] = field(default_factory=dict)
    source: str = TORCH

    def __post_init__(self) -> None:
        if not self.mesh_dim_base:
            self.mesh_dim_base = [BASE] * len(self.mesh_dim_devices)

    @staticmethod
    def build_from_mesh(
        mesh: DeviceMesh,
        *,
        bandwidth: float | Sequence[float] | None = None,
        latency: float | Sequence[float] | None = None,
        calibrated: bool | str | os.PathLike[str] | MeasuredMesh = True,
    ) -> "MeshTopoInfo":
        """Return the topology of ``mesh``, without communication.

        ``bandwidth`` in GiB/s and ``latency`` in us per hop: one number for all dimensions or one for each.
        If only one of the two is passed, the other comes from torch. ``calibrated``: whether to use this
        machine's file, or the path of another file, or a measurement. A path whose file lacks this mesh is
        an error. Every rank reads its own file: on several hosts, use copies of one file.

        Raises ValueError for a figure that is not positive and finite, or a wrong number of figures.
        """
        sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
        # without torch's cache, which would keep every mesh
        torchs = utilities.MeshTopoInfo.build_from_mesh.__wrapped__(mesh)
        base = MeshTopoInfo(mesh, sizes, torchs.mesh_dim_bandwidth, torchs.mesh_dim_latency)
        if bandwidth is not None or latency is not None:
            return MeshTopoInfo(
                mesh,
                sizes,
                _figures("bandwidth", bandwidth, base.mesh_dim_bandwidth),
                _figures("latency", latency, base.mesh_dim_latency),
                source=GIVEN,
            )
        if isinstance(calibrated, MeasuredMesh):
            return _of_measured(mesh, sizes, calibrated, range(mesh.ndim), "given")
        if calibrated is False:
            return base
        file = None if calibrated is True else pathlib.Path(calibrated)
        found = _calibration(mesh, sizes, file)
        if found is not None:
            where = file or calibration.path(mesh.device_type)
            return _of_measured(mesh, sizes, *found, str(where))
        if file is None:
            return base
        raise ValueError(
            f"calibrated: {file} has no measurement of a mesh {sizes} on backend {_backend(mesh)!r} of "
            "this machine; python -m interlace calibrate makes one"
        )

    def us(self, op: str, gib: float, mesh_dim: int) -> float | None:
        """Return the measured time of ``op`` on ``gib`` GiB; None if nothing was measured."""
        link = self.links.get((range(len(self.mesh_dim_devices))[mesh_dim], op))
        return None if link is None else link.us(gib * GIB)

    def explain(self) -> str:
        """Return a line about the source of the figures, and a line per dimension.

        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
        >>> print(MeshTopoInfo.build_from_mesh(mesh, bandwidth=10, latency=2).explain())
        source: given
        dim 0: 2 ranks, 10 GiB/s, 2 us per hop, 6.6 us per collective
        """
        lines = [f"source: {self.source}"]
        for dim, ranks in enumerate(self.mesh_dim_devices):
            lines.append(
                f"dim {dim}: {ranks} ranks, {self.mesh_dim_bandwidth[dim]:.4g} GiB/s, "
                f"{self.mesh_dim_latency[dim]:.4g} us per hop, "
                f"{self.mesh_dim_base[dim]:.4g} us per collective"
            )
        return "\n".join(lines)


Topology = MeshTopoInfo | utilities.MeshTopoInfo


def interlace_topology(topo: Topology) -> MeshTopoInfo:
    """Return ``topo`` as a MeshTopoInfo of interlace; torch's class of that name keeps its figures."""
    if isinstance(topo, MeshTopoInfo):
        return topo
    if not isinstance(topo, utilities.MeshTopoInfo):
        raise TypeError(
            f"mesh_topo must be a MeshTopoInfo, interlace's or torch's, got {type(topo).__name__}"
        )
    figures = (topo.mesh_dim_devices, topo.mesh_dim_bandwidth, topo.mesh_dim_latency)
    return MeshTopoInfo(topo.mesh, *figures)


def _figures(name: str, value: Any, otherwise: list[float]) -> list[float]:
    if value is None:
        return otherwise
    figures = list(value) if isinstance(value, Sequence) else [value] * len(otherwise)
    if len(figures) != len(otherwise):
        raise ValueError(
            f"{name} has {len(figures)} figures, but the mesh has {len(otherwise)} dimensions: {figures}"
        )
    for figure in figures:
        right = isinstance(figure, (int, float)) and not isinstance(figure, bool)
        if not right or not 0 <= figure < math.inf or (name == "bandwidth" and not figure):
            raise ValueError(f"{name} must be positive and finite, got {figure!r} in {value!r}")
    return [float(figure) for figure in figures]


def _backend(mesh: DeviceMesh) -> str:
    """Return the backend of the collectives of ``mesh``: a backend of torch, or interlace's own."""
    if not dist.is_initialized():
        return calibration.OWN
    try:
        return str(dist.get_backend(mesh.get_group(0)))
    except (RuntimeError, ValueError):
        return calibration.OWN


def _calibration(
    mesh: DeviceMesh, sizes: list[int], file: pathlib.Path | None
) -> tuple[MeasuredMesh, Sequence[int]] | None:
    """Return the file's times of this mesh, or of its root mesh, and the dimensions there."""
    meshes = calibration.read(mesh.device_type, file)
    backend, dims = _backend(mesh), list(range(mesh.ndim))
    found = calibration.find(meshes, backend, sizes)
    if found is None:
        root = mesh._get_root_mesh()
        names = root.mesh_dim_names or ()
        dims = [names.index(each) for each in mesh.mesh_dim_names or () if each in names]
        if root is not mesh and len(dims) == mesh.ndim:
            found = calibration.find(meshes, backend, tuple(root.mesh.shape))
    return None if found is None else (found, dims)


def _of_measured(
    mesh: DeviceMesh, sizes: list[int], measured: MeasuredMesh, dims: Sequence[int], where: str
) -> MeshTopoInfo:
    if [measured.mesh[dim] for dim in dims if dim < len(measured.mesh)] != sizes:
        raise ValueError(
            f"calibrated: the mesh has {sizes} ranks, but the measured mesh has {list(measured.mesh)}"
        )
    links = {(n, op): measured.link(of, op) for n, of in enumerate(dims) for op in calibration.OPS}
    bandwidth, latency = [], []
    for of, ranks in zip(dims, sizes, strict=True):
        gather = measured.link(of, "all_gather")
        bandwidth.append(gather.received_gbs * 1e9 / GIB if ranks > 1 else BANDWIDTH)
        latency.append(gather.protocols[-1].latency_us / max(1, ranks - 1))
    source = f"measured {measured.date} ({where})"
    return MeshTopoInfo(mesh, sizes, bandwidth, latency, [0.0] * len(sizes), links, source)


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
    """Return the microseconds of an all-gather along ``mesh_dim``; ``bytes_gb``: GiB of the gathered
    tensor.

    Semantics: ``torch.distributed.tensor._collective_utils.allgather_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(allgather_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("all_gather", bytes_gb, mesh_topo, mesh_dim, 1)


def reduce_scatter_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Return the microseconds of a reduce-scatter along ``mesh_dim``; ``bytes_gb``: GiB of a rank's input.

    Semantics: ``torch.distributed.tensor._collective_utils.reduce_scatter_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(reduce_scatter_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("reduce_scatter", bytes_gb, mesh_topo, mesh_dim, 1)


def allreduce_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Return the microseconds of an all-reduce along ``mesh_dim``; ``bytes_gb``: GiB of a rank's tensor.

    Semantics: ``torch.distributed.tensor._collective_utils.allreduce_cost``.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(allreduce_cost(0.001, topo, 0), 3)
    110.6
    """
    return _ring_us("all_reduce", bytes_gb, mesh_topo, mesh_dim, 2)


def alltoall_cost(bytes_gb: float, mesh_topo: Topology, mesh_dim: int) -> float:
    """Return the microseconds of an all-to-all along ``mesh_dim``; ``bytes_gb``: GiB of a rank's input.

    Every rank sends an n-th of its input to each of the n - 1 others. torch has no such function.

    >>> topo = MeshTopoInfo(None, mesh_dim_devices=[2], mesh_dim_bandwidth=[10], mesh_dim_latency=[2])
    >>> round(alltoall_cost(0.001, topo, 0), 3)
    58.6
    """
    return _ring_us("all_to_all", bytes_gb, mesh_topo, mesh_dim, 1)


def _step(
    current: Any, target: Any, topo: MeshTopoInfo, mesh_dim: int, gib: float
) -> tuple[float, float]:
    """Return the cost of a change of placement in one dimension, and the GiB of a rank after it."""
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
        return math.inf, gib  # DTensor never does this
    return 0.0, gib / ranks if current.is_replicate() and target.is_shard() else gib


def _topology(mesh: DeviceMesh, topo: Topology | None) -> MeshTopoInfo:
    return MeshTopoInfo.build_from_mesh(mesh) if topo is None else interlace_topology(topo)


def redistribute_cost(
    current_spec: Any, target_spec: Any, *, mesh_topo: Topology | None = None
) -> float:
    """Return the microseconds of communication from one ``DTensorSpec`` to another.

    The cost is 0 from a replicated tensor, to an equal layout, and on a rank outside the mesh. It is
    infinite between meshes, from a shard to a partial sum, and between kinds of partial sums. ``mesh_topo``
    may be interlace's or torch's; the default is :meth:`MeshTopoInfo.build_from_mesh`. Raises ValueError if
    a spec has no tensor_meta. Semantics and, with torch's topology, figures:
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
    for step in steps(current, target):
        took, gib = _step(*step.src_dst_placements, topo, step.mesh_dim, gib)
        cost += took
    return cost


def one_step_redistribute_cost(
    current_spec: Any, target_spec: Any, *, mesh_topo: Topology | None = None
) -> float:
    """Return the cost like :func:`redistribute_cost`, for specs that differ in one placement at most.

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
