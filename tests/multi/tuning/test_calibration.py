"""Choices that ranks make by calibrations and tuning caches, and ``python -m interlace calibrate``."""

import itertools
import json
import pathlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import interlace
from interlace.cli import main
from interlace.cli.commands import calibrate as command
from interlace.groups.groups import default_group
from interlace.runtime.tuning import calibration, files, tuning
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh
from interlace.runtime.tuning.tuning import Problem
from interlace.tensor.calibration import CalibrationRequest, NoisyTimesError, measured_mesh, on_rank
from ranks import ranks
from stand_ins.replaced import environment, replaced
from support import under_torchrun
from tiers import thorough

SLOW, FAST = 1e6, 1.0
ROWS, INNER, COLUMNS = 64, 64, 8


def measurement(latency_us: float, mesh: tuple[int, ...] = (2,)) -> MeasuredMesh:
    """Every op takes about this long at every size."""
    line = (LinkProtocol(0, latency_us, 1000.0),)
    links = [Link(dim, ranks, op, line) for dim, ranks in enumerate(mesh) for op in calibration.OPS]
    return MeasuredMesh(calibration.OWN, mesh, "2026-11-22", "2.13", "0.1.0", "shm", tuple(links))


@contextmanager
def reading(variable: str, file: pathlib.Path, about: str) -> Iterator[list[str]]:
    """Read ``file`` anew on this rank; return the warnings that contain ``about``."""
    texts = list[str]()
    with environment(**{variable: str(file)}), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuning.forget()
        try:
            yield texts
        finally:
            tuning.forget()
            texts += [str(each.message) for each in said if about in str(each.message)]


def reading_calibration(
    folder: pathlib.Path, latency: float | None
) -> AbstractContextManager[list[str]]:
    """Read a calibration of this rank; None means that there is none."""
    file = folder / f"{interlace.get_rank()}.json"
    if latency is not None:
        calibration.add(measurement(latency), file)
    return reading(calibration.VARIABLE, file, "calibration")


def chosen() -> tuning.Choice:
    group = default_group()
    problem = tuning.gather_problem(group.world_size, torch.float32, ROWS, (COLUMNS,), INNER)
    return tuning.choose(group, problem)


FOUND = [((SLOW, SLOW), "pipelined"), ((FAST, FAST), "unfused"), ((None, None), "")]
WHERE_FILES_DIFFER = [((SLOW, FAST), "pipelined"), ((None, SLOW), "")]


@pytest.mark.parametrize(("latencies", "expected"), FOUND + WHERE_FILES_DIFFER)
@ranks(2)
def test_slow_links_are_worth_hiding_and_rank_0_counts(
    tmp_path: pathlib.Path, latencies: tuple[float | None, ...], expected: str
) -> None:
    """The algorithm of the call follows the links in the file of rank 0."""
    rank = interlace.get_rank()
    with reading_calibration(tmp_path, latencies[rank]) as said:
        choice = chosen()
        out = interlace.all_gather_matmul(
            torch.full((ROWS, INNER), rank + 1.0), torch.ones(INNER, COLUMNS)
        )
    whole = torch.arange(1.0, 3.0).repeat_interleave(ROWS)[:, None] * INNER
    assert torch.equal(out, whole.expand(-1, COLUMNS)) and choice.algorithm == expected
    if latencies[0] is None:
        assert choice.source.startswith("default")
    else:
        found = f"calibration of 2026-11-22: {latencies[0]:.0f} us until a shard is here"
        assert choice.source == found
    if rank and latencies[0] != latencies[1]:
        assert "calibrations differ between ranks: rank 1 has" in said[0]
    else:
        assert not said


@ranks(2)
def test_without_the_agreement_ranks_would_differ(tmp_path: pathlib.Path) -> None:
    """This is the negative control: each rank uses its own file."""
    rank, group = interlace.get_rank(), default_group()
    with reading_calibration(tmp_path, (SLOW, FAST)[rank]):
        own = tuning.own_gather(group.place)
        tuning._groups[group] = tuning._Agreed(None, (), asks=False, gather=own)
        assert chosen().algorithm == ("pipelined", "unfused")[rank]


# -- tuning caches -------------------------------------------------------------------------------------

PROBLEM = Problem("all_gather_matmul", torch.float32, 64, 32, 64, 3)
CHUNKS = 7  # that no default has
WORLD = PROBLEM.world_size
Found = tuple[str, int] | None


def cache_of(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank-{rank}.json"


def reading_cache(folder: pathlib.Path, found: Found) -> AbstractContextManager[list[str]]:
    """Read a tuning cache of this rank, with an algorithm and its programs."""
    file = cache_of(folder, interlace.get_rank())
    if found:
        algorithm, programs = found
        values = {"block_m": 16, "chunks": CHUNKS, "programs": programs}
        about = PROBLEM.op, "float32", "even", *tuning.bucket_of(PROBLEM)
        row = files.CacheRow(*about, algorithm, {algorithm: values})
        files.add(files.machine("shm", torch.device("cpu")), [row], file)
    return reading(files.VARIABLE, file, "tuning cache")


def chosen_twice() -> tuple[str, int, int]:
    """Return the choices of this rank at the first call and later."""
    first, again = [tuning.choose(default_group(), PROBLEM) for _ in range(2)]
    assert first == again
    return first.algorithm, first.configuration.chunks, first.configuration.programs


@pytest.mark.parametrize(
    "caches",
    [
        [("pipelined", 2)] * WORLD,
        [("pipelined", 2), ("unfused", 4), None],
        [None, None, ("unfused", 4)],
    ],
    ids=["equal", "different", "of another rank alone"],
)
@ranks(WORLD)
def test_rank_0_counts_and_the_op_is_right(tmp_path: pathlib.Path, caches: list[Found]) -> None:
    rank = interlace.get_rank()
    with reading_cache(tmp_path, caches[rank]) as said:
        choice = chosen_twice()
        x, rows = torch.full((64, 64), rank + 1.0), torch.arange(1.0, WORLD + 1)
        for algorithm in ("auto", "pipelined", "fused"):
            out = interlace.all_gather_matmul(x, torch.ones(64, 32), algorithm=algorithm)
            whole = (64 * rows.repeat_interleave(64))[:, None].expand(-1, 32)
            assert torch.equal(out, whole), algorithm
    choices: list[Any] = [None] * WORLD
    interlace.all_gather_object(choices, choice)
    assert choices == [choice] * WORLD
    if caches[0]:
        assert choice == ("pipelined", CHUNKS, 2)
        assert len(said) == (caches[rank] != caches[0])
        for text in said:
            assert f"rank {rank} has" in text and str(cache_of(tmp_path, 0)) in text
    else:
        assert choice != ("unfused", CHUNKS, 4)


@ranks(WORLD)
def test_without_the_agreement_tables_would_differ(tmp_path: pathlib.Path) -> None:
    """This is the negative control: ranks do not exchange their tables."""
    rank, group = interlace.get_rank(), default_group()
    with reading_cache(tmp_path, [("pipelined", 2), ("unfused", 4), None][rank]):
        tuning._groups[group] = tuning._Agreed(None, tuning.own_rows(group.place), asks=False)
        choice = chosen_twice()
    choices: list[Any] = [None] * WORLD
    interlace.all_gather_object(choices, choice)
    assert choices[0] != choices[1] != choices[2]


# -- the command ---------------------------------------------------------------------------------------


@thorough
def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "calibration.json"
    said = "python -m interlace calibrate --mesh 2x2"
    with replaced((command, "PATIENCE", 600.0)):  # until it is not all noise
        assert main.run([*said.split()[3:], "--repetitions", "3", "--cache", str(file)]) == 0
    (found,) = calibration.read(file=file)
    assert (found.backend, found.mesh, found.processes) == ("interlace", (2, 2), "shm")
    assert [(link.dim, link.op) for link in found.links] == list(
        itertools.product((0, 1), calibration.OPS)
    )
    for link in found.links:
        assert len(link.protocols) == 2 and link.us(1 << 20) > 0
    printed = capsys.readouterr().out
    assert "all_to_all" in printed and str(file) in printed.replace("\n", "")


def test_meshes_of_two_dimensions() -> None:
    request = CalibrationRequest((2, 2), small=(64, 128), large=(1024, 2048), repetitions=3)
    times = interlace.run(on_rank, 4, request, print_nothing, place="shm")
    assert all(set(each) == set(request.cases) for each in times)
    quiet = {key: [100.0 + key[2]] for key in request.cases}  # a measurement may be all noise
    found = measured_mesh(request, [quiet], "interlace", "shm")
    assert [(link.dim, link.ranks) for link in found.links] == [(0, 2)] * 4 + [(1, 2)] * 4


def print_nothing(done: int, total: int) -> None:
    """Progress, for nobody."""


def of_noise(times: list[Any]) -> Any:
    """Raise the error of noise until each case has six times."""
    if len(times[0]["case"]) < 6:
        raise NoisyTimesError("all_gather", 0, "none")
    return times


def test_times_that_are_noise_are_added_to() -> None:
    found = command._without_noise(lambda number: [{"case": [1.0, number]}] * 2, of_noise)
    assert found == [{"case": [1.0, 0, 1.0, 1, 1.0, 2]}] * 2  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("tries", "patience"), [(2, 0.0), (1, 600.0)])
def test_what_stays_noise_is_refused_after_tries_and_time(tries: int, patience: float) -> None:
    attempts: list[int] = []

    def attempt(number: int) -> list[Any]:
        attempts.append(number)
        return [{"case": [1.0, number]}]

    with replaced((command, "TRIES", tries), (command, "PATIENCE", patience)):
        if patience:  # enough of tries, but not of time
            assert command._without_noise(attempt, of_noise)
        else:
            with pytest.raises(NoisyTimesError, match="nothing is written"):
                command._without_noise(attempt, of_noise)
    assert len(attempts) == (3 if patience else tries)


@thorough
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "calibration.json"
    printed = under_torchrun(
        "torchrun --nproc-per-node 2 -m interlace calibrate --backend gloo",
        "--repetitions",
        "3",
        "--json",
        "--cache",
        str(file),
    )
    said = json.loads(printed)  # from rank 0 alone
    assert said["backend"] == "gloo" and said["mesh"] == [2] and said["file"] == str(file)
    (read,) = calibration.read(file=file)
    assert read.backend == "gloo" and read.processes == "torchrun"
