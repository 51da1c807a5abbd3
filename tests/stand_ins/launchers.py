"""srun, sbatch, mpirun and MPICH's mpiexec on this host: a process per task, with their variables.

    python launchers.py srun -n 2 python job.py
    python launchers.py sbatch job.sbatch          # runs it here and now, and prints its output

srun and the like read the option ``-n``, and sbatch the number of nodes and of tasks per node.
"""

import os
import pathlib
import re
import subprocess
import sys


def variables(launcher: str, rank: int, tasks: int) -> dict[str, str]:
    """Return the variables that ``launcher`` sets for a task."""
    if launcher == "mpirun":
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        values = (rank, tasks, rank, tasks)
        found = {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)}
        return {**found, "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1", "PMIX_RANK": str(rank)}
    if launcher == "mpiexec":
        found = {"PMI_RANK": rank, "PMI_SIZE": tasks, "MPI_LOCALRANKID": rank}
        return {name: str(value) for name, value in found.items()} | {"MPI_LOCALNRANKS": str(tasks)}
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    return {
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", str(os.getpid())),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % (tasks // nodes)),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": ",".join(["localhost"] * nodes),
    }


def start(launcher: str, arguments: list[str]) -> int:
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    while arguments[0].startswith("-"):
        option, *arguments = arguments
        if option == "-n":
            tasks, arguments = int(arguments[0]), arguments[1:]
    processes = [
        subprocess.Popen(arguments, env={**os.environ, **variables(launcher, rank, tasks)})
        for rank in range(tasks)
    ]
    return max(process.wait() for process in processes)


def submit(script: str) -> int:
    """Run a batch script, which is task number 0 of no step."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", pathlib.Path(script).read_text(), re.M))
    nodes = int(asked["nodes"])
    tasks = nodes * int(asked["ntasks-per-node"])
    job = {"SLURM_JOB_ID": os.getpid(), "SLURM_NNODES": nodes, "SLURM_NTASKS": tasks}
    own = {name: str(value) for name, value in job.items()} | {"SLURM_PROCID": "0"}
    return subprocess.call(["bash", script], env={**os.environ, **own})


if __name__ == "__main__":
    program, *rest = sys.argv[1:]
    sys.exit(submit(*rest) if program == "sbatch" else start(program, rest))
