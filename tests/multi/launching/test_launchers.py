"""The commands of docs/launching.md: torchrun, srun, sbatch, mpirun and Ray start its programs."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import interlace
import pages
from interlace.runtime.compat import launchers
from support import free_port
from tiers import few, thorough

PAGE = (pages.ROOT / "docs/launching.md").read_text()
STAND_IN = pages.ROOT / "tests/stand_ins/launchers.py"
AGENT = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:29500 job.py"
COMMANDS = {
    "torchrun --standalone --nproc-per-node 2 job.py": 2,
    "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py": 2,
    "srun -n 2 python job.py": 2,
    "sbatch docs/examples/job.sbatch": 4,
    "mpirun -n 2 python train.py": 2,
    "MASTER_PORT=29500 mpiexec -n 2 python train.py": 2,
}
# of Open MPI, where it is installed: tests may run as root, on fewer cores than ranks
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's programs, and launchers in ``.bin``: Open MPI if it is installed, else stand-ins."""
    for variable, value in OPEN_MPI.items():
        monkeypatch.setenv(variable, value)
    pages.prepared(tmp_path, PAGE)
    for block in pages.blocks(PAGE):
        pages.save(block, tmp_path)
    for name in ("srun", "sbatch", "mpirun", "mpiexec"):
        if name != "mpirun" or shutil.which(name) is None:
            script = tmp_path / ".bin" / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {STAND_IN} {name} "$@"\n')
            script.chmod(0o755)
    return tmp_path


def lines(command: str, folder: Path) -> list[str]:
    """What the ranks print, in their order. A port is one that is free."""
    text = command.replace("29500", str(free_port()))
    return sorted(pages.run_bash(text, folder).splitlines())


@pytest.mark.parametrize(
    ("command", "ranks"), few(COMMANDS.items(), ("srun -n 2 python job.py", 2))
)
def test_ranks_find_each_other(command: str, ranks: int, folder: Path) -> None:
    expected = [f"rank {rank} of {ranks}: {ranks}" for rank in range(ranks)]
    assert lines(command, folder) == expected


@thorough
def test_two_agents_are_one_job(folder: Path) -> None:
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        agents = [
            pool.submit(pages.run_bash, AGENT.replace("29500", port), folder) for _ in range(2)
        ]
    said = sorted(line for agent in agents for line in agent.result().splitlines())
    assert said == [f"rank {rank} of 4: 4" for rank in range(4)]


@thorough
def test_actors_of_ray_are_ranks(folder: Path) -> None:
    """Of Ray where it is installed, else of a stand-in for its actors."""
    try:
        import ray  # noqa: F401
    except ImportError:
        shutil.copy(pages.ROOT / "tests/stand_ins/ray_stand_in.py", folder / "ray.py")
    assert lines("python on_ray.py", folder)[-1] == "[(0, [20.0, 20.0]), (1, [20.0, 20.0])]"
    assert lines("python own_actors.py", folder)[-1] == "[[2.0, 2.0], [2.0, 2.0]]"


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03,07]",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}


def test_a_step_of_slurm_on_two_nodes() -> None:
    found = launchers.variables(STEP)
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03"}
    assert 20000 <= port < 30000
    other = launchers.variables({**STEP, "SLURM_STEP_ID": "1"})
    assert other["MASTER_PORT"] != str(port)  # steps of a job may run beside each other


def test_what_a_step_says_twice_is_one_rank() -> None:
    """srun with MPI support sets PMI's variables, too, which have no local rank."""
    pmi = {"PMI_RANK": STEP["SLURM_PROCID"], "PMI_SIZE": STEP["SLURM_STEP_NUM_TASKS"]}
    assert launchers.variables({**STEP, **pmi}) == launchers.variables(STEP)
    assert "LOCAL_RANK" not in launchers.variables({**STEP, **pmi, "PMI_RANK": "0"})


@pytest.mark.parametrize(
    ("more", "rank"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "3"),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, "2"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "1"),
    ],
)
def test_who_started_this_process_last_counts(
    more: dict[str, str], rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun and torchrun inside of a step of SLURM, which starts them once for a node."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**STEP, **more}.items():
        monkeypatch.setenv(name, value)
    assert interlace.launched()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (rank, "4")
    assert os.environ.get("MASTER_ADDR") == more.get("MASTER_ADDR", "gpu03")


def test_a_batch_script_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name in ("SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, STEP[name])
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert not interlace.launched()


def test_manifests_have_their_form() -> None:
    """What they start is there, with options that torchrun has."""
    yaml = pytest.importorskip("yaml")
    from torch.distributed.run import get_args_parser

    def containers(of: Any) -> list[Any]:
        if isinstance(of, list):
            return [found for each in of for found in containers(each)]
        if isinstance(of, dict):
            return of.get("containers", []) + [f for e in of.values() for f in containers(e)]
        return []

    folder = pages.ROOT / "docs/examples"
    for name, ranks in (("jobset", 1), ("pytorchjob", 2)):
        found = containers(yaml.safe_load((folder / f"{name}.yaml").read_text()))
        started = [each for each in found if "image" in each]
        assert len(started) >= ranks
        for each in started:
            program, *rest = each["command"]
            assert [one["name"] for one in each["env"]] == ["INTERLACE_SECRET"]
            if program == "torchrun":
                assert get_args_parser().parse_args(rest).training_script == "job.py"
            else:
                assert (program, rest) == ("python", ["job.py"])
    script = folder / "job.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
