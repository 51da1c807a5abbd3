"""The variables by which launchers tell a process which rank it is: torchrun's, and others' for them.

====================  ===========================  =================  ==================================
torchrun              Open MPI                     MPICH, Intel MPI   SLURM, of a step (``srun``)
====================  ===========================  =================  ==================================
RANK                  OMPI_COMM_WORLD_RANK         PMI_RANK           SLURM_PROCID
WORLD_SIZE            OMPI_COMM_WORLD_SIZE         PMI_SIZE           SLURM_STEP_NUM_TASKS
LOCAL_RANK            OMPI_COMM_WORLD_LOCAL_RANK   MPI_LOCALRANKID    SLURM_LOCALID
LOCAL_WORLD_SIZE      OMPI_COMM_WORLD_LOCAL_SIZE   MPI_LOCALNRANKS    WORLD_SIZE, of one node
MASTER_ADDR           127.0.0.1, of one host       the same           the first of SLURM_STEP_NODELIST
MASTER_PORT           of PMIX_NAMESPACE            none               of SLURM_JOB_ID and SLURM_STEP_ID
====================  ===========================  =================  ==================================

The first column with a rank and a world size counts: an mpirun inside of a SLURM step has its own.
"""

import os
import re
import zlib
from collections.abc import Mapping

VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", ""),
}
JOB = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
FIRST_PORT, PORTS = 20000, 10000  # below those that the system gives out


def launched() -> bool:
    """Whether a launcher has started this process as a rank, by torchrun's variables or others'.

    Of SLURM, Open MPI, MPICH and Intel MPI sets those of torchrun that are unset, as they are for
    torch: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
    The address is known of jobs on one host and of SLURM, the port where the launcher numbers its jobs; set
    both yourself elsewhere. :func:`interlace.init` and what calls it need no call of this.

    >>> interlace.launched()
    False
    """
    if "RANK" not in os.environ:
        for name, value in variables(os.environ).items():
            os.environ.setdefault(name, value)
    return "RANK" in os.environ


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for a process that has ``given``; none if no launcher has made it a rank.

    >>> variables({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
    """
    found: dict[str, str] = {}
    for names in zip(*VARIABLES.values(), strict=True):
        said = {to: given[name] for to, name in zip(VARIABLES, names, strict=True) if name in given}
        own = {name: said.get(name) for name in ("RANK", "WORLD_SIZE")}
        if None not in own.values() and own.items() <= (found or said).items():
            found = {**said, **found}  # srun may set PMI's, too, which lack the local rank
    if not found:
        return {}
    if given.get("SLURM_STEP_NUM_NODES") == "1":
        found.setdefault("LOCAL_WORLD_SIZE", found["WORLD_SIZE"])
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        found["MASTER_ADDR"] = "127.0.0.1"
    elif "SLURM_STEP_NODELIST" in given:
        found["MASTER_ADDR"] = first_host(given["SLURM_STEP_NODELIST"])
    if job := "/".join(given[name] for name in JOB if name in given):
        found["MASTER_PORT"] = str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)
    return found


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts.

    >>> first_host("gpu[03-07,12],login"), first_host("n1.site,n2.site")
    ('gpu03', 'n1.site')
    """
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", hosts)[0])
