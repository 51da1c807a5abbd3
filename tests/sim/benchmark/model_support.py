"""Modules of benchmarks/ for their tests, and the model's shapes, machines and predictions."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
BOTH = (GATHER, SCATTER)


def module(name: str) -> Any:
    """A module of ``benchmarks``, or any other."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def machine(name: str = "h100x8") -> Any:
    return module("model.simulation.machines").machine_named(name)


def shape(op: str, m: int = 4096, n: int = 1792, k: int = 4096, w: int = 8, nodes: int = 1) -> Any:
    return module("model.simulation.kernels").Shape(op, m, n, k, w, nodes)


def predict(*arguments: Any, **options: Any) -> Any:
    return module("model.predict").predict(*arguments, **options)


def configured(op_shape: Any, **values: Any) -> Any:
    """The default configuration of a shape, with other values."""
    return dataclasses.replace(module("model.predict").default_configuration(op_shape), **values)


class Usage(NamedTuple):
    """How busy the busiest GPU was, as fractions of the time that passed."""

    sms: float
    clock: float
    links: dict[str, float]
    most_sms: int


def usage(prediction: Any) -> Usage:
    now, gpus = prediction.cluster.simulation.now, prediction.cluster.gpus
    links: dict[str, float] = {}
    for gpu in gpus:
        for name in ("memory", "sends", "receives", "card_sends", "card_receives"):
            links[name] = max(links.get(name, 0.0), getattr(gpu, name).busy / now)
    cores = [gpu.cores for gpu in gpus]
    return Usage(
        max(each.held / (each.sms * now) for each in cores),
        max(each.worked / (each.budget * now) for each in cores),
        links,
        max(each.most_at_once for each in cores),
    )
