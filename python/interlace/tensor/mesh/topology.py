"""Topology of a device mesh: ranks, bandwidth and latency along each dimension.

The figures are the first of these that there are::

    given      bandwidth= and latency= of the caller
    measured   this machine's file of ``python -m interlace calibrate``, if it has just this mesh
    torch      the constants of ``torch.distributed.tensor``: NCCL's LL protocol on A100

torch's figures are 87.7 GB/s and 0.6 us per hop within a host, 0.22 times that and 2.7 us between hosts,
and 6.6 us for every collective; which dimensions cross hosts follows from the devices of a host. A file
has a line per op, dimension and protocol instead (``runtime/tuning/calibration.py``); the bandwidths and
latencies that a measured topology shows are those of its all_gather of large messages, in the same units.
"""

import math
import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils as utilities

from interlace.runtime.tuning import calibration
from interlace.runtime.tuning.calibration import Link, MeasuredMesh

BANDWIDTH, BASE = 87.7, 6.6
GIB = float(1 << 30)
TORCH, GIVEN = "torch", "given"


@dataclass
class MeshTopoInfo:
    """By dimension of ``mesh``: ranks, GiB/s per rank, and us per hop; as torch's class of that name.

    Attributes
    ----------
    mesh : the DeviceMesh.
    mesh_dim_devices : ranks along each dimension.
    mesh_dim_bandwidth : torch says GB/s, and divides GiB by it.
    mesh_dim_latency : microseconds per hop.
    mesh_dim_base : microseconds of a collective before its first hop; 6.6 for torch.
    links : by dimension and op the measured line, which then counts instead of the figures above.
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
        """The topology of ``mesh``, without communication.

        ``bandwidth`` in GiB/s and ``latency`` in us per hop, one for all dimensions or one for each: what
        is given counts, what is not comes from torch. ``calibrated``: whether this machine's file is
        asked, or another file's path, or a measurement; a path whose file lacks this mesh is an error.
        Every rank asks its own file: on several hosts, give them copies of one.

        Raises ValueError for a figure that is not positive and finite, or as many as no dimensions.
        """
        sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
        # not by its cache, which would keep every mesh
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
        """The measured time of ``op`` on ``gib`` GiB; None if nothing was measured."""
        link = self.links.get((range(len(self.mesh_dim_devices))[mesh_dim], op))
        return None if link is None else link.us(gib * GIB)

    def explain(self) -> str:
        """A line about where the figures come from, and one per dimension.

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
    """``topo``; of torch's class of that name, one with the same figures, which are torch's then.

    Raises TypeError for anything else.
    """
    if isinstance(topo, MeshTopoInfo):
        return topo
    if not isinstance(topo, utilities.MeshTopoInfo):
        raise TypeError(
            f"mesh_topo must be a MeshTopoInfo, interlace's or torch's, got {type(topo).__name__}"
        )
    figures = (topo.mesh_dim_devices, topo.mesh_dim_bandwidth, topo.mesh_dim_latency)
    return MeshTopoInfo(topo.mesh, *figures)


def _figures(name: str, given: Any, otherwise: list[float]) -> list[float]:
    if given is None:
        return otherwise
    figures = list(given) if isinstance(given, Sequence) else [given] * len(otherwise)
    if len(figures) != len(otherwise):
        raise ValueError(
            f"{name} has {len(figures)} figures, the mesh {len(otherwise)} dimensions: {figures}"
        )
    for each in figures:
        right = isinstance(each, (int, float)) and not isinstance(each, bool)
        if not right or not 0 <= each < math.inf or (name == "bandwidth" and not each):
            raise ValueError(f"{name} must be positive and finite, got {each!r} in {given!r}")
    return [float(each) for each in figures]


def _backend(mesh: DeviceMesh) -> str:
    """The backend of the collectives of ``mesh``: that of a group of torch, or interlace's own."""
    if not dist.is_initialized():
        return calibration.OWN
    try:
        return str(dist.get_backend(mesh.get_group(0)))
    except (RuntimeError, ValueError):
        return calibration.OWN


def _calibration(
    mesh: DeviceMesh, sizes: list[int], file: pathlib.Path | None
) -> tuple[MeasuredMesh, Sequence[int]] | None:
    """The file's times of this mesh, or of the mesh from which it was cut; and its dimensions there."""
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
            f"calibrated: the mesh has {sizes} ranks, measured was one of {list(measured.mesh)}"
        )
    links = {(n, op): measured.link(of, op) for n, of in enumerate(dims) for op in calibration.OPS}
    bandwidth, latency = [], []
    for of, ranks in zip(dims, sizes, strict=True):
        gather = measured.link(of, "all_gather")
        bandwidth.append(gather.received_gbs * 1e9 / GIB if ranks > 1 else BANDWIDTH)
        latency.append(gather.protocols[-1].latency_us / max(1, ranks - 1))
    source = f"measured {measured.date} ({where})"
    return MeshTopoInfo(mesh, sizes, bandwidth, latency, [0.0] * len(sizes), links, source)
