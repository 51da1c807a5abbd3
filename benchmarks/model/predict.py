"""The prediction for any algorithm: ``predict(machine, shape, algorithm)``.

Algorithms of interlace: ``fused`` (the copy engine sends), ``fused by SMs`` (copier programs send),
``pipelined``, ``interlace unfused``; on several nodes ``fused`` is the hierarchical one. Other libraries:
``unfused`` (NCCL and cuBLAS), ``symm_mem`` and the names of ``simulation.peers``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from interlace.kernels.tiling import owner_order
from interlace.runtime.tuning.configuration import Configuration, gpu_default
from model.simulation import nodes, one_node, peers
from model.simulation.engine import Cluster, Process
from model.simulation.kernels import Prediction, Shape, Span, alone_us, collective_us, unfused_us
from model.simulation.machines import ModelMachine

HOPPER = 90
NODE_SUMMERS = 16  # programs that sum for other nodes, see simulation/nodes.py
INTERLACE = ("fused", "fused by SMs", "pipelined", "interlace unfused")


def default_configuration(shape: Shape) -> Configuration:
    rows = max(shape.rows) if shape.op != "matmul_all_reduce" else shape.m
    chosen = gpu_default(HOPPER, torch.bfloat16, rows, shape.n, shape.k)
    return replace(chosen, copiers=0)


@dataclass(frozen=True)
class Simulated:
    """An algorithm as one process per rank, and what its host needs to issue it."""

    process: Callable[[Cluster, int, Shape], Process]
    host: peers.HostOps = peers.NO_HOST_OPS
    equal_rows: bool = True


def _pulled(variant: peers.Variant) -> Simulated:
    return Simulated(partial(peers.pulled_gather, variant=variant), peers.PULLED_GATHER_OPS)


def _pushed(variant: peers.Variant) -> Simulated:
    return Simulated(partial(peers.pushed_scatter, variant=variant), peers.PUSHED_SCATTER_OPS)


PEERS: dict[str, dict[str, Simulated]] = {
    "all_gather_matmul": {
        "symm_mem": Simulated(peers.symm_mem_gather, peers.SYMM_MEM_GATHER_OPS),
        "symm_mem multimem": Simulated(peers.multimem_gather),
        "symm_mem native": _pulled(peers.NATIVE),
        "SMR 128 x 128": _pulled(replace(peers.SMR, block_n=128)),
        "SMR 256 x 128": _pulled(replace(peers.SMR, block_m=256, block_n=128)),
        "SMR 128 x 256": _pulled(peers.SMR),
        "Kraken": _pulled(peers.KRAKEN),
        "Flux": _pulled(peers.FLUX),
        "Triton-distributed": _pulled(peers.TRITON_DISTRIBUTED),
        "Triton-distributed nodes": Simulated(peers.node_gather),
    },
    "matmul_reduce_scatter": {
        "symm_mem": Simulated(peers.symm_mem_scatter, peers.SYMM_MEM_SCATTER_OPS),
        "Kraken": _pushed(peers.KRAKEN_SCATTER),
        "Triton-distributed": _pushed(peers.TRITON_DISTRIBUTED_SCATTER),
        "Triton-distributed nodes": Simulated(peers.node_scatter),
    },
    "matmul_all_reduce": {},
}


def _own_first(rank: int, world_size: int) -> list[int]:
    owners: list[int] = owner_order(rank, world_size)
    return [rank, *owners[:-1]]


OWNER_ORDERS: dict[str, Callable[[int, int], Sequence[int]]] = {
    "owner_order": owner_order,
    "own first": _own_first,
    "rank 0 first": lambda rank, world_size: range(world_size),
}
_SUMMERS = {
    None: NODE_SUMMERS,
    "16 programs sum": NODE_SUMMERS,
    "8 programs sum": 8,
    "all sum at the end": 0,
}


def orders(shape: Shape) -> tuple[str, ...]:
    """Orders of ``fused`` to compare; the first is what the kernels do, or would."""
    if shape.op == "all_gather_matmul":
        return tuple(nodes.GATHER_ORDERS) if shape.nodes > 1 else ("interleaved", "by source")
    if shape.op == "matmul_reduce_scatter":
        return tuple(name for name in _SUMMERS if name) if shape.nodes > 1 else tuple(OWNER_ORDERS)
    return ()


def algorithms(op: str) -> tuple[str, ...]:
    own: tuple[str, ...] = ("fused",) if op == "matmul_all_reduce" else INTERLACE
    if op == "matmul_reduce_scatter":
        own = tuple(name for name in own if name != "fused by SMs")
    return ("unfused", *own, *PEERS[op])


def _process(
    shape: Shape, algorithm: str, configuration: Configuration, order: str | None
) -> Simulated:
    if algorithm in PEERS[shape.op]:
        return PEERS[shape.op][algorithm]
    if algorithm == "fused by SMs" and not configuration.copiers:
        configuration = replace(configuration, copiers=32)

    def one(cluster: Cluster, rank: int, shape: Shape) -> Process:
        if shape.op == "matmul_all_reduce":
            return one_node.all_reduce(cluster, rank, shape, configuration)
        gathers = shape.op == "all_gather_matmul"
        if algorithm == "pipelined":
            if gathers:
                return one_node.pipelined_gather(cluster, rank, shape, configuration)
            return one_node.pipelined_scatter(cluster, rank, shape)
        if algorithm == "interlace unfused":
            unfused = one_node.unfused_gather if gathers else one_node.unfused_scatter
            return unfused(cluster, rank, shape)
        if shape.nodes > 1:
            if gathers:
                taken = order or "node_order"
                return nodes.gather(cluster, rank, shape, configuration, order=taken)
            return nodes.scatter(cluster, rank, shape, configuration, summers=_SUMMERS[order])
        if gathers:
            taken = order or "interleaved"
            return one_node.fused_gather(cluster, rank, shape, configuration, taken)
        owners = None if order is None else OWNER_ORDERS[order](rank, shape.world_size)
        return one_node.fused_scatter(cluster, rank, shape, configuration, owners)

    return Simulated(one, equal_rows=False)


def predict(
    machine: ModelMachine,
    shape: Shape,
    algorithm: str = "fused",
    configuration: Configuration | None = None,
    *,
    everyone: bool = False,
    log: list[Span] | None = None,
    order: str | None = None,
) -> Prediction:
    """Return the model's prediction. ``everyone`` simulates every rank even if one can stand for all.

    ``order`` is one of ``orders(shape)`` instead of what the kernels do.
    """
    if order is not None and order not in orders(shape):
        raise ValueError(f"order is {order!r}, not one of {', '.join(orders(shape))}")
    if algorithm not in algorithms(shape.op):
        raise ValueError(
            f"{shape.op} has no algorithm {algorithm!r}; it has {', '.join(algorithms(shape.op))}"
        )
    alone = alone_us(machine, shape), collective_us(machine, shape)
    prediction = Prediction(shape, machine.name, algorithm, 0.0, *alone, log=log)
    if algorithm == "unfused":
        prediction.microseconds = unfused_us(machine, shape)
        return prediction
    configuration = configuration or default_configuration(shape)
    simulated = _process(shape, algorithm, configuration, order)
    unequal = len(set(shape.rows)) > 1  # then no rank stands for all
    if unequal and simulated.equal_rows:
        raise ValueError(f"{algorithm} is modelled for equal shards only, not {shape.rows}")
    each = everyone or unequal or order == "rank 0 first"
    cluster = Cluster(machine, shape.world_size, shape.nodes, everyone=each, log=log)
    for rank in cluster.ranks:
        cluster.spawn(simulated.process(cluster, rank, shape), f"rank {rank}")
    prediction.microseconds = max(cluster.run(), simulated.host.microseconds(cluster))
    prediction.cluster = cluster
    return prediction
