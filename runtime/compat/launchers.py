"""The environment variables by which launchers tell a process its rank: torchrun's and other launchers'.

docs/how-to/run/launching.md has a table. The order is torchrun, Open MPI, MPICH (also Intel MPI), SLURM.
The first with a rank and a world size is used, because an mpirun inside a SLURM step has its own ranks.
Ranks on one host meet at 127.0.0.1. All ranks must derive the same address. Open MPI starts its ranks on
other hosts by a SLURM step, but those on its own host without one, so the step's variables are not used.
"""

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

IDENTITY = ("RANK", "WORLD_SIZE")
VARIABLES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", ""),
}
HOSTS = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_NODELIST")
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")
JOBS = (("PMIX_NAMESPACE",), _STEP, _STEP)
NAMES = (*VARIABLES, "MASTER_ADDR", "MASTER_PORT")
FIRST_PORT, PORTS = 20000, 10000  # below the ephemeral ports of the system
LAST_PORT = 65535


class Said(NamedTuple):
    """The value of one of torchrun's variables, and the environment variable that it comes from."""

    by: str
    value: str

    def __str__(self) -> str:
        return f"{self.by}={self.value!r}"


def launched() -> bool:
    """Return whether a launcher has started this process as a rank, by torchrun's or other variables.

    For SLURM, Open MPI, MPICH and Intel MPI it also sets torchrun's variables that are unset, because torch
    needs them: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``,
    ``MASTER_PORT``. The address is known for jobs on one host and for SLURM, the port if the launcher
    numbers its jobs; otherwise set both yourself. If ``RANK`` and ``WORLD_SIZE`` are set and disagree with
    the launcher, as under ``srun torchrun``, only torchrun's variables are used and none is set.
    :func:`interlace.init` and functions that call it do not need this call.

    Raises ValueError that names the variable if one is empty, not a number or out of range. It also raises
    if only one of ``RANK`` and ``WORLD_SIZE`` is set, unless it matches the launcher's value.

    >>> interlace.launched()
    False
    """
    found = variables(os.environ)
    os.environ.update(found)
    return bool(found)


def local_rank() -> int | None:
    """Return ``LOCAL_RANK``, or None if it is unset. Raises ValueError like :func:`launched`."""
    text = os.environ.get("LOCAL_RANK")
    return None if text is None else _number(Said("LOCAL_RANK", text))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a process with the variables ``environment``; {} if it is not a rank.

    >>> variables({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    {'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}
    >>> variables({"RANK": "0", "WORLD_SIZE": "1"})
    {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}
    """
    standard = {name: Said(name, environment[name]) for name in NAMES if name in environment}
    _check(standard)
    foreign = {} if len(standard) == len(NAMES) else _of_other_launchers(environment)
    identity = [name for name in IDENTITY if name in standard]
    if identity and not (foreign and _same_rank(standard, foreign)):
        if len(identity) < len(IDENTITY):
            (unset,) = {*IDENTITY} - {*identity}
            conflict = " and ".join(str(foreign[name]) for name in IDENTITY if name in foreign)
            raise ValueError(
                f"{standard[identity[0]]} is in the environment without {unset}"
                f"{conflict and f', against {conflict}'}: unset {identity[0]}, or set both"
            )
        foreign = {}
    found = {**foreign, **standard}
    if "RANK" not in found:
        return {}
    if (by := _on_one_host(found)) is not None:
        found.setdefault("MASTER_ADDR", Said(by, "127.0.0.1"))
    if found["WORLD_SIZE"].value == "1":
        found.setdefault("MASTER_PORT", Said(found["WORLD_SIZE"].by, "0"))  # any free port
    _check(found)
    return {name: conflict.value for name, conflict in found.items()}


def _on_one_host(found: Mapping[str, Said]) -> str | None:
    ranks = found["WORLD_SIZE"]
    here = ranks if ranks.value == "1" else found.get("LOCAL_WORLD_SIZE")
    return here.by if here is not None and here.value == ranks.value else None


def _same_rank(one: Mapping[str, Said], other: Mapping[str, Said]) -> bool:
    return all(one[n].value == other[n].value for n in IDENTITY if n in one and n in other)


def _of_other_launchers(environment: Mapping[str, str]) -> dict[str, Said]:
    found: dict[str, Said] = {}
    hosts = ""
    job: tuple[str, ...] = ()
    for column, names in enumerate(zip(*VARIABLES.values(), strict=True)):
        pairs = zip(VARIABLES, names, strict=True)
        variables_set = {
            to: Said(name, environment[name]) for to, name in pairs if name in environment
        }
        if any(name not in variables_set for name in IDENTITY) or not _same_rank(
            found, variables_set
        ):
            continue
        if not found:
            hosts, job = HOSTS[column], JOBS[column]
        found = {
            **variables_set,
            **found,
        }  # srun may also set PMI's variables, without the local rank
    if not found:
        return found
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        found.setdefault("LOCAL_WORLD_SIZE", found["WORLD_SIZE"])
    if hosts in environment and _on_one_host(found) is None:
        found["MASTER_ADDR"] = Said(hosts, first_host(environment[hosts]))
    if parts := {name: environment[name] for name in job if name in environment}:
        port = FIRST_PORT + zlib.crc32("/".join(parts.values()).encode()) % PORTS
        empty = (Said(*part) for part in parts.items() if not part[1])
        found["MASTER_PORT"] = next(empty, Said(job[0], str(port)))
    return found


def _check(found: Mapping[str, Said]) -> None:
    """Raise ValueError with the name of a variable whose value is impossible."""
    numbers = {
        name: _number(entry, least=1 if name.endswith("SIZE") else 0)
        for name, entry in found.items()
        if name != "MASTER_ADDR"
    }
    ranks = numbers.get("WORLD_SIZE")
    if ranks is not None and numbers.get("RANK", 0) >= ranks:
        raise ValueError(
            f"{found['RANK']} in the environment must be less than {found['WORLD_SIZE']}"
        )
    first = 0 if ranks == 1 else 1  # a single rank may use any free port
    if not first <= numbers.get("MASTER_PORT", first) <= LAST_PORT:
        raise ValueError(
            f"{found['MASTER_PORT']} in the environment must be within {first}..{LAST_PORT}"
        )
    if "MASTER_ADDR" in found and not found["MASTER_ADDR"].value.strip():
        raise ValueError(f"{found['MASTER_ADDR']} in the environment is not the name of a host")


def _number(entry: Said, least: int = 0) -> int:
    try:
        number = int(entry.value)
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{entry} in the environment must be a whole number, at least {least}")
    return number


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's list of hosts.

    >>> first_host("gpu[03-07,12],login"), first_host("n1.site,n2.site")
    ('gpu03', 'n1.site')
    """
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", hosts)[0])
