"""Machines as the model sees them: each parameter with the place it comes from.

Every parameter has a source, which begins with one of

``published``  a figure that somebody has published, named
``fitted``     chosen by ``fit.py`` so that the model gives figures that somebody has published; which
               figures is said, and all others are held out
``measured``   from a file in ``benchmarks/results`` (``calibration.py``)
``assumed``    a guess; nothing here was measured

One set of parameters per machine: none is chosen per shape, op or algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

KINDS = ("published", "fitted", "measured", "assumed")
Value = tuple[float, str]


@dataclass(frozen=True)
class ModelMachine:
    """Parameters; ``sources[name]`` says where each comes from. Bandwidths are per direction."""

    name: str
    title: str
    gpus_per_node: int
    virtual_ranks: bool
    sources: dict[str, str] = field(compare=False, repr=False)

    # one GPU
    sms: float  # streaming multiprocessors
    clock_tflops: float  # bf16 matmul of all SMs at full clock
    power_tflops: float  # bf16 matmul that the power limit sustains
    hbm_gbs: float  # GB/s that a kernel gets from memory
    l2_mb: float  # the model lets a whole weight use half of it
    sharing_mb: float  # how far ahead of a follower a reader of the same columns may be
    tile_us: (
        float  # per tile of a persistent Triton matmul: what its loads and stores do not overlap
    )
    library_tile_us: float  # the same of cuBLAS
    small_tile_rate: float  # rate of a 128 x 128 tile of cuBLAS relative to 128 x 256
    triton_small_tile_rate: float  # the same of Triton
    sum_gbs: float  # one SM that reads contributions and adds them
    launch_us: float  # from the end of a kernel to the start of the next on its stream
    # copies and signals
    copy_issue_us: float  # before each copy of a copy engine's stream, and its signal
    local_copy_gbs: float  # copy within one GPU's memory
    signal_us: float  # from a publish to its sight at the peer
    barrier_us: float  # all ranks of a node, on the stream
    nvshmem_barrier_us: float  # all ranks, on the stream, by NVSHMEM
    interference_us_per_mb: float  # matmul time lost per 10**6 bytes that a GPU sends or receives
    # links
    link_gbs: float  # GPU to GPU within a node, by copy engine
    sm_copy_gbs: float  # one SM that loads locally and stores to a peer
    sm_store_gbs: float  # one SM that stores its results to a peer
    nic_gbs: float  # one GPU's network card
    nic_us: float  # latency of an RDMA put with signal
    # NCCL
    nccl_gbs: float  # received per rank and second, of a ring in a node, large messages
    nccl_base_us: float
    nccl_hop_us: float
    nccl_node_hop_us: float
    nccl_short_base_us: float  # the protocol for short messages, with 92 % of the rate
    nccl_short_hop_us: float
    nccl_short_node_hop_us: float
    # host
    torch_op_us: float  # to issue a torch operator
    driver_op_us: float  # to issue a copy or stream memory operation through the driver

    @property
    def budget(self) -> float:
        return min(self.sms, self.sms * self.power_tflops / self.clock_tflops)

    def with_values(self, source: str, **values: float) -> ModelMachine:
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, sources=sources, **values)  # type: ignore[arg-type]


PARAMETERS = tuple(each.name for each in fields(ModelMachine) if each.type == "float")

_COMMON: dict[str, Value] = {
    "sms": (132, "published: NVIDIA data sheets, H100, H200 and H800 SXM"),
    "clock_tflops": (840, "assumed: 85 % of the 989 TFLOP/s of the data sheet"),
    "power_tflops": (
        750,
        "fitted: cuBLAS 721.6 TFLOP/s at 8192 x 4096 x 4096 (triton-lang/triton#2339)",
    ),
    "hbm_gbs": (3000, "assumed: 90 % of the 3350 GB/s of the data sheet"),
    "l2_mb": (50, "published: NVIDIA data sheets"),
    "sharing_mb": (7, "fitted: on h100x8-500w, and taken over"),
    "tile_us": (2.0, "assumed"),
    "library_tile_us": (1.0, "assumed"),
    "small_tile_rate": (0.92, "assumed"),
    "triton_small_tile_rate": (
        0.83,
        "published: SMR README, cuBLAS / Triton 'mm only' of its three rows with such tiles",
    ),
    "sum_gbs": (20, "assumed: two loads of 8 KiB in flight per 0.8 us"),
    "launch_us": (3.0, "assumed"),
    "copy_issue_us": (3.0, "assumed"),
    "local_copy_gbs": (1300, "assumed: a copy reads and writes HBM"),
    "signal_us": (1.5, "assumed"),
    "barrier_us": (6.0, "assumed"),
    "nvshmem_barrier_us": (51, "fitted: on h800x8, and taken over"),
    "interference_us_per_mb": (0.461, "fitted: on h100x8-500w, and taken over"),
    "link_gbs": (
        375,
        "published: 749 GB/s in both directions of 900 (NVIDIA/nccl#1264, p2pBandwidthLatencyTest)",
    ),
    "sm_copy_gbs": (4.6, "published: 76 SMs saturate 350 GB/s with ld/st (arXiv 2511.13940)"),
    "sm_store_gbs": (15, "assumed: stores wait for nothing, unlike copies"),
    "nic_gbs": (45, "published: 43 of 50 GB/s over ConnectX-7 400 Gb/s (DeepEP docs/legacy.md)"),
    "nic_us": (6.0, "assumed"),
    "nccl_gbs": (360, "published: NVIDIA/nccl-tests#326, expected on H100 by NCCL's maintainers"),
    "nccl_base_us": (8.4, "published: NCCL src/graph/tuning.cc, ring, Simple"),
    "nccl_hop_us": (3.4, "published: NCCL src/graph/tuning.cc, ring, Simple, NVLink"),
    "nccl_node_hop_us": (9.6, "published: NCCL src/graph/tuning.cc, ring, Simple, network"),
    "nccl_short_base_us": (10.0, "published: NCCL src/graph/tuning.cc, ring, LL128"),
    "nccl_short_hop_us": (1.9, "published: NCCL src/graph/tuning.cc, ring, LL128, NVLink"),
    "nccl_short_node_hop_us": (4.0, "published: NCCL src/graph/tuning.cc, ring, LL128, network"),
    "torch_op_us": (12.2, "fitted: on h100x8-500w, and taken over"),
    "driver_op_us": (6.0, "published: 5-7 us per cudaMemcpyAsync (arXiv 2602.21548)"),
}


def _machine(
    name: str,
    title: str,
    base: ModelMachine | None = None,
    *,
    virtual_ranks: bool = False,
    **changed: Value,
) -> ModelMachine:
    known = dict(_COMMON)
    if base is not None:
        known = {key: (getattr(base, key), base.sources[key]) for key in PARAMETERS}
    unknown = changed.keys() - set(PARAMETERS)
    if unknown:
        raise ValueError(f"{name}: no parameter is called {', '.join(sorted(unknown))}")
    values = {**known, **changed}
    return ModelMachine(
        name=name,
        title=title,
        gpus_per_node=8,
        virtual_ranks=virtual_ranks,
        sources={key: source for key, (_, source) in values.items()},
        **{key: value for key, (value, _) in values.items()},
    )


_H100 = _machine("h100x8", "8 x H100 SXM 700 W, NVLink 4, one 400 Gb/s card per GPU")
_META = "SMR README, 8 x H100 500 W"
_H100_500W = _machine(
    "h100x8-500w",
    "8 x H100 96 GB HBM2e 500 W (Grand Teton), on which SMR, Kraken and async-TP were measured",
    _H100,
    power_tflops=(608, f"fitted: the nine 'cublas mm only' of {_META}"),
    hbm_gbs=(2160, "published: 2.4 TB/s peak (torchtitan benchmarks), of which 90 %"),
    nccl_gbs=(274, f"fitted: the nine 'cublas + nccl' less 'cublas mm only' of {_META}"),
    interference_us_per_mb=(
        0.461,
        f"fitted: 'triton fused' of 70B and 105B at M = 16384 of {_META}; all others held out",
    ),
    sharing_mb=(7, "fitted: 395 us of Kraken PR #2 with 128 rows per rank and K = 8192"),
    torch_op_us=(12.2, "fitted: async-TP 354 us at (2048, 3584, 8192), pytorch PR #143160"),
)
_H800 = _machine(
    "h800x8",
    "8 x H800 SXM, NVLink at 200 GB/s, one 400 Gb/s card per GPU",
    _H100,
    link_gbs=(160, "published: about 160 GB/s NVLink maximum (DeepEP docs/legacy.md)"),
    nccl_gbs=(160, "published: the same; NCCL cannot be faster than the link"),
    nvshmem_barrier_us=(
        51,
        "fitted: Triton-distributed's speedup of 1.06 at matmul + reduce-scatter, N = 3584",
    ),
)
_H200 = _machine(
    "h200x8",
    "8 x H200 SXM 700 W, NVLink 4, one 400 Gb/s card per GPU",
    _H100,
    hbm_gbs=(4300, "assumed: 90 % of the 4800 GB/s of the data sheet"),
    local_copy_gbs=(1900, "assumed: a copy reads and writes HBM"),
)
_H200_ONE = _machine(
    "h200x1",
    "one H200, ranks are virtual: they share its SMs, and links are copies in its memory",
    _H200,
    virtual_ranks=True,
    link_gbs=(1900, "assumed: a copy reads and writes HBM"),
    sm_copy_gbs=(20, "assumed: 8 KiB in flight per load latency, twice"),
    sm_store_gbs=(60, "assumed"),
    signal_us=(1.0, "assumed"),
    nccl_gbs=(1900, "assumed: instead of NCCL, which takes one rank per GPU: copies in memory"),
    nccl_base_us=(3.0, "assumed: as launch_us"),
    nccl_hop_us=(0.0, "assumed: see nccl_base_us"),
    nccl_short_base_us=(3.0, "assumed: as launch_us"),
    nccl_short_hop_us=(0.0, "assumed: see nccl_base_us"),
)
_H200_PCIE = _machine(
    "h200-pcie",
    "one H200 whose peers' shards lie in pinned host memory, read over PCIe 5 by copy engine",
    _H200,
    link_gbs=(53, "assumed: 85 % of the 63 GB/s of PCIe 5 x 16"),
    nccl_gbs=(53, "assumed: as link_gbs"),
    nccl_base_us=(3.0, "assumed: as launch_us"),
    nccl_hop_us=(3.0, "assumed: as copy_issue_us"),
    nccl_short_hop_us=(3.0, "assumed: as copy_issue_us"),
)

MACHINES = {
    machine.name: machine for machine in (_H100, _H100_500W, _H800, _H200, _H200_ONE, _H200_PCIE)
}


def machine_named(name: str) -> ModelMachine:
    if name not in MACHINES:
        raise ValueError(f"machine {name!r} is not known; known are {', '.join(MACHINES)}")
    return MACHINES[name]
