"""The commands of docs/how-to/run/launching.md: torchrun, srun, sbatch, mpirun, Ray start its programs."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import interlace
import pages
from interlace.integrations import ray as on_ray
from interlace.runtime.compat import launchers
from interlace.runtime.core.errors import InterlaceError, PeerDiedError
from interlace.runtime.places import uncaught
from support import free_port
from tiers import few, thorough

PAGE = (pages.ROOT / "docs/how-to/run/launching.md").read_text()
STAND_IN = pages.ROOT / "tests/stand_ins/launchers.py"
AGENT = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:29500 job.py"
MAKE_SECRET = ["install -m 600 /dev/null secret", "head -c 32 /dev/urandom | base64 > secret"]
PASS_SECRET = "export INTERLACE_SECRET=$(cat secret)"
COMMANDS = {
    "torchrun --standalone --nproc-per-node 2 job.py": 2,
    "torchrun --standalone --nproc-per-node 2 --max-restarts 3 launched.py": 2,
    "srun -n 2 python job.py": 2,
    "sbatch docs/examples/job.sbatch": 4,
    "mpirun -n 2 python launched.py": 2,
    "MASTER_PORT=29500 mpiexec -n 2 python launched.py": 2,
}
# for Open MPI, if it is installed: tests may run as root, on fewer cores than ranks
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The page's programs, and launchers in ``.bin``: Open MPI if it is installed, otherwise stand-ins."""
    pages.prepared(tmp_path, PAGE)
    for block in pages.blocks(PAGE):
        pages.save(block, tmp_path)
    for name in ("srun", "sbatch", "mpirun", "mpiexec"):
        if name != "mpirun" or shutil.which(name) is None:
            script = tmp_path / ".bin" / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {STAND_IN} {name} "$@"\n')
            script.chmod(0o755)
    with mock.patch.dict(os.environ, OPEN_MPI):
        yield tmp_path


def only(variables: Mapping[str, str] | None = None) -> Any:
    return mock.patch.dict(os.environ, variables or {}, clear=True)


def lines(command: str, folder: Path) -> list[str]:
    """Return the lines of the ranks in their order; a port is replaced by a free one."""
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
def test_one_machine_is_two_hosts_with_unshare(folder: Path) -> None:
    if subprocess.run(["unshare", "--user", "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces")
    script = "print(interlace.groups.groups.default_group().place.name)"
    job = folder / "job.py"
    job.write_text(
        job.read_text().replace("interlace.shutdown()", f"{script}\ninterlace.shutdown()")
    )
    agent = AGENT.replace("29500", str(free_port())).replace("node 2", "node 1")
    assert f"`{PASS_SECRET}`" in PAGE
    pages.run_bash("\n".join(MAKE_SECRET), folder)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    with ThreadPoolExecutor(2) as pool:
        agents = [
            pool.submit(pages.run_bash, f"{PASS_SECRET}\n{line}", folder)
            for line in (agent, f"unshare --user {agent}")
        ]
    output = sorted(line for agent in agents for line in agent.result().splitlines())
    assert output == ["hosts", "hosts", "rank 0 of 2: 2", "rank 1 of 2: 2"]


@thorough
def test_actors_of_ray_are_ranks(folder: Path) -> None:
    """A stand-in for Ray's actors runs where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        shutil.copy(pages.ROOT / "tests/stand_ins/ray_stand_in.py", folder / "ray.py")
    assert lines("python on_ray.py", folder)[-1] == "[(0, [20.0, 20.0]), (1, [20.0, 20.0])]"
    assert lines("python own_actors.py", folder)[-1] == "[[2.0, 2.0], [2.0, 2.0]]"


MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "INTERLACE_SECRET": "s"}


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((2, 2, MEETING), ValueError, "rank must be at least 0 and less than world_size 2, got 2"),
        ((0, 0, MEETING), ValueError, "less than world_size 0, got 0"),
        (("0", 2, MEETING), TypeError, "rank must be an int, got '0'"),
        ((0, 2.0, MEETING), TypeError, "world_size must be an int, got 2.0"),
        ((0, 2, None), TypeError, "meeting must be the result of meeting(), got NoneType"),
        ((0, 2, {**MEETING, "MASTER_PORT": 1}), TypeError, "must be the result of meeting()"),
        ((0, 2, {"MASTER_ADDR": "a"}), ValueError, "result of meeting(), but has no MASTER_PORT"),
        ((0, 2, {**MEETING, "MASTER_ADDR": ""}), ValueError, "meeting: MASTER_ADDR=''"),
        ((0, 2, {**MEETING, "MASTER_PORT": "x"}), ValueError, "meeting: MASTER_PORT='x'"),
    ],
)
def test_actors_are_told_what_is_wrong(arguments: Any, error: type[Exception], named: str) -> None:
    with only(), pytest.raises(error, match=re.escape(named)):
        try:
            on_ray.join(*arguments)
        finally:
            assert not os.environ


def test_options_of_actors_are_a_mapping() -> None:
    with pytest.raises(TypeError, match="options must be a mapping or None, got int"):
        on_ray.run(print, 2, options=1)  # type: ignore[arg-type]


def test_actors_that_find_no_room_are_an_error() -> None:
    modules: dict[str, Any] = {}
    if importlib.util.find_spec("ray") is None:
        modules["ray"] = importlib.import_module("stand_ins.ray_stand_in")
        modules["ray.util"] = None  # which the stand-in replaces
    text = r"0 of 2 actors in 2 s; .*'num_cpus': 9"
    with mock.patch.dict(sys.modules, modules):
        with pytest.raises(interlace.PlaceUnavailableError, match=text):
            on_ray.run(print, 2, options={"num_cpus": 9999}, start_timeout=2)
        with pytest.raises(ValueError, match="start_timeout must be positive, got 0"):
            on_ray.run(print, 2, start_timeout=0)


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
    """srun with MPI support also sets the variables of PMI, which have no local rank."""
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
def test_who_started_this_process_last_counts(more: dict[str, str], rank: str) -> None:
    """mpirun and torchrun run inside a step of SLURM, which starts them once for each node."""
    with only({**STEP, **more}):
        assert interlace.launched()
        found = {**os.environ}
    assert (found["RANK"], found["WORLD_SIZE"]) == (rank, "4")
    meets = {"PMI_RANK": "gpu03", "RANK": "here"}
    assert found.get("MASTER_ADDR") == meets.get(next(iter(more)))


OF_RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
# variables, their changes, and the words of the error
WRONG: list[tuple[dict[str, str], dict[str, str], str]] = [
    (OF_RANK, {"RANK": "4"}, "must be less than WORLD_SIZE='4'"),
    (OF_RANK, {"RANK": "-1"}, "must be a whole number, at least 0"),
    (OF_RANK, {"WORLD_SIZE": "four"}, "must be a whole number"),
    (OF_RANK, {"WORLD_SIZE": "0"}, "must be a whole number, at least 1"),
    (OF_RANK, {"LOCAL_RANK": "cuda:0"}, "must be a whole number"),
    (OF_RANK, {"LOCAL_WORLD_SIZE": ""}, "must be a whole number"),
    (OF_RANK, {"MASTER_ADDR": " "}, "is not the name of a host"),
    (OF_RANK, {"MASTER_PORT": "http"}, "must be a whole number"),
    (OF_RANK, {"MASTER_PORT": "65536"}, "must be within 1..65535"),
    (STEP, {"SLURM_PROCID": "8"}, "must be less than SLURM_STEP_NUM_TASKS='8'"),
    (STEP, {"SLURM_STEP_NUM_TASKS": ""}, "must be a whole number"),
    (STEP, {"SLURM_LOCALID": "x"}, "must be a whole number"),
    (STEP, {"SLURM_STEP_NODELIST": ""}, "is not the name of a host"),
    (STEP, {"SLURM_STEP_ID": ""}, "must be a whole number"),
    ({**STEP, "PMI_SIZE": "4"}, {"PMI_RANK": "-2"}, "must be a whole number"),
    (STEP, {"OMPI_COMM_WORLD_SIZE": "0", "OMPI_COMM_WORLD_RANK": "0"}, "must be a whole number"),
]
# half of torchrun's, such as one that the shell before the launcher has exported
HALVES = [
    (
        {**STEP, "WORLD_SIZE": "4"},
        "WORLD_SIZE='4' is in the environment without RANK, against SLURM_PROCID='5' and "
        "SLURM_STEP_NUM_TASKS='8': unset WORLD_SIZE, or set both",
    ),
    (
        {**STEP, "RANK": "0"},
        "RANK='0' is in the environment without WORLD_SIZE, against SLURM_PROCID='5'",
    ),
    ({"RANK": "0"}, "RANK='0' is in the environment without WORLD_SIZE: unset"),
]


@pytest.mark.parametrize(("whole", "wrong", "words"), WRONG)
def test_a_wrong_variable_is_named(
    whole: dict[str, str], wrong: dict[str, str], words: str
) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} in the environment {words}")):
        launchers.variables({**whole, **wrong})


@pytest.mark.parametrize("join", [interlace.launched, interlace.init, interlace.barrier])
def test_it_is_named_before_anybody_is_waited_for(join: Any) -> None:
    with only({**OF_RANK, "RANK": "4"}), pytest.raises(ValueError, match="RANK='4' in the env"):
        join()


@pytest.mark.parametrize(("given", "named"), HALVES)
def test_half_of_a_rank_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        launchers.variables(given)


def test_what_fits_a_launcher_is_filled_in() -> None:
    """Scripts for SLURM often export WORLD_SIZE, or RANK for each task, and nothing else."""
    whole = launchers.variables(STEP)
    for own in ({"WORLD_SIZE": "8"}, {"RANK": "5"}, {"RANK": "5", "WORLD_SIZE": "8"}):
        assert launchers.variables({**STEP, **own}) == whole
    torchruns = {"RANK": "0", "WORLD_SIZE": "2"}
    assert launchers.variables({**STEP, **torchruns}) == torchruns


def test_mpirun_on_hosts_of_slurm() -> None:
    """These are the variables of Open MPI 4.1 in a batch job of SLURM 22.05: ranks of the first host have
    no step.
    """
    job = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2"}
    step |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    meeting = set()
    for rank in range(4):
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        values = (rank, 4, rank % 2, 2)
        own = {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in zip(names, values, strict=True)}
        given = {**job, **(step if rank > 1 else {}), **own, "PMIX_NAMESPACE": "1467416577"}
        found = launchers.variables(given)
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        meeting.add((found["MASTER_ADDR"], found["MASTER_PORT"]))
    assert {address for address, _ in meeting} == {"n1"} and len(meeting) == 1


@pytest.mark.parametrize(
    ("rank", "variables", "named"),
    [
        (2, {}, r"rank must be within 0\.\.1, world size 2, got 2"),
        (0, {"LOCAL_RANK": ""}, "LOCAL_RANK='' in the environment"),
    ],
)
def test_a_group_of_torch_knows_its_ranks(rank: int, variables: dict[str, str], named: str) -> None:
    with mock.patch.dict(os.environ, variables), pytest.raises(ValueError, match=named):
        dist.init_process_group("interlace", store=dist.HashStore(), rank=rank, world_size=2)
    assert not dist.is_initialized()


def test_a_batch_script_is_no_rank() -> None:
    job = {name: STEP[name] for name in ("SLURM_PROCID", "SLURM_JOB_ID")}
    with only({**job, "SLURM_NTASKS": "8"}):
        assert not interlace.launched()


def test_manifests_have_their_form() -> None:
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


FAILING = """
import interlace, torch

def one_op():
    if interlace.get_rank() == 1:
        raise RuntimeError("no such file")
    interlace.all_reduce(torch.ones(4))

interlace.barrier()
one_op()
"""


def failed_under_torchrun(folder: Path, ranks: int, script: str, *arguments: str) -> str:
    """Return the output of torchrun and of its ranks; torchrun must blame rank 1."""
    (folder / "fails.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(folder / "fails.py"), *arguments]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert re.search(r"rank +: 1 ", said.split("Root Cause")[1]), said
    return said


@thorough
def test_torchrun_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    said = failed_under_torchrun(tmp_path, 2, FAILING)
    assert "AbortedError: rank 1 aborted" in said and "no such file" in said
    assert 'fails.py", line 7, in one_op' in said
    assert "INTERLACE_DEBUG=debug shows them" in said
    assert not re.search(r'File ".*/interlace/', said)


@pytest.mark.parametrize("of_another", [False, True])
def test_who_fails_because_of_another_rank_ends_after_it(of_another: bool, tmp_path: Path) -> None:
    """torchrun's root cause is the earliest timestamp, or otherwise the first process that ended."""
    said, error = tmp_path / "error.json", InterlaceError("own")
    if of_another:
        error.__cause__ = PeerDiedError(1, 77, "barrier")
    before = time.time()
    with (
        mock.patch.dict(os.environ, {"TORCHELASTIC_ERROR_FILE": str(said)}),
        mock.patch.object(uncaught.atexit, "register") as at_exit,
        mock.patch.object(sys, "excepthook"),
    ):
        uncaught.install()
        sys.excepthook(InterlaceError, error, None)
    if not of_another:
        assert not said.exists() and not at_exit.called
        return
    message = json.loads(said.read_text())["message"]
    assert message["message"] == "own" and int(message["extraInfo"]["timestamp"]) > before + 5
    assert at_exit.call_args == mock.call(time.sleep, uncaught.LATER)


def test_frames_of_interlace_are_hidden_where_it_says_raise() -> None:
    program = "import interlace\ninterlace.run(print, 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "2 frames of interlace are not shown" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ValueError: world_size must be within")
    assert not re.search(r'File ".*/interlace/', done.stderr)


ENDS = """
import sys
import torch
import interlace

interlace.barrier()
rank, ones = interlace.get_rank(), torch.ones(4)
try:
    if sys.argv[1] == "exits" and rank == 1:
        sys.exit(3)
    if sys.argv[1] == "wrapped" and rank == 1:
        raise KeyError("mine")
    interlace.all_reduce(ones, op="nonsense" if sys.argv[1] == "misused" and rank == 1 else "sum")
except Exception as error:
    raise RuntimeError("wrapped") from error
"""


@thorough
@pytest.mark.parametrize("how", ["exits", "wrapped", "misused"])
def test_torchrun_names_it_whatever_others_end_with(how: str, tmp_path: Path) -> None:
    failed_under_torchrun(tmp_path, 3, ENDS, how)
