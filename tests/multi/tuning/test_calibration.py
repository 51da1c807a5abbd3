"""``python -m interlace calibrate``, and what a calibration decides on ranks that are processes."""

import itertools
import json
import pathlib
from typing import Any

import pytest

import interlace
from interlace.cli import main
from interlace.cli.commands import calibrate as command
from interlace.runtime.tuning import calibration
from interlace.tensor.calibration import CalibrationRequest, NoisyTimesError, measured, on_rank
from multi.tuning import calibration_ranks
from support import under_torchrun
from tiers import thorough

SLOW, FAST = 1e6, 1.0


def files(folder: pathlib.Path, *latencies: float | None) -> list[str]:
    """A file per rank; None: there is none."""
    made = []
    for rank, latency in enumerate(latencies):
        file = folder / f"{rank}.json"
        if latency is not None:
            calibration.add(calibration_ranks.measurement(latency), file)
        made.append(str(file))
    return made


def chosen(names: list[str], agrees: bool = True) -> list[dict[str, Any]]:
    found: Any = interlace.run(calibration_ranks.choices, 2, names, agrees, place="shm")
    return list(found)


def test_slow_links_are_worth_hiding(tmp_path: pathlib.Path) -> None:
    """The same call, 16 KiB received: its algorithm is what the file says of the links."""
    (tmp_path / "a").mkdir()
    for found in chosen(files(tmp_path, SLOW, SLOW)):
        assert found["algorithm"] == "pipelined" and found["right"] and not found["said"]
        assert found["source"] == "calibration of 2026-11-22: 1000000 us until a shard is here"
    for found in chosen(files(tmp_path / "a", FAST, FAST)):
        assert found["algorithm"] == "unfused" and found["right"]
    for found in chosen(["off", "off"]):
        assert found["algorithm"] == "" and found["source"].startswith("default")


@pytest.mark.parametrize("latencies, expected", [((SLOW, FAST), "pipelined"), ((None, SLOW), "")])
def test_where_files_differ_rank_0_counts(
    tmp_path: pathlib.Path, latencies: tuple[float | None, ...], expected: str
) -> None:
    found = chosen(files(tmp_path, *latencies))
    assert [each["algorithm"] for each in found] == [expected] * 2
    assert [each["right"] for each in found] == [True, True]
    assert not found[0]["said"]
    assert "calibrations differ between ranks: rank 1 has" in found[1]["said"][0]


def test_without_the_agreement_ranks_would_differ(tmp_path: pathlib.Path) -> None:
    """The negative control."""
    found = chosen(files(tmp_path, SLOW, FAST), agrees=False)
    assert [each["algorithm"] for each in found] == ["pipelined", "unfused"]


@thorough
def test_the_command(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PATIENCE", 600.0)  # until it is not all noise
    file = tmp_path / "new" / "calibration.json"
    said = "python -m interlace calibrate --mesh 2x2"
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
    quiet = {key: [100.0 + key[2]] for key in request.cases}  # what was measured may be all noise
    found = measured(request, [quiet], "interlace", "shm")
    assert [(link.dim, link.ranks) for link in found.links] == [(0, 2)] * 4 + [(1, 2)] * 4


def print_nothing(done: int, total: int) -> None:
    """Progress, for nobody."""


def of_noise(times: list[Any]) -> Any:
    """Raises what is said of noise until each case has six times."""
    if len(times[0]["case"]) < 6:
        raise NoisyTimesError("all_gather", 0, "none")
    return times


def test_times_that_are_noise_are_added_to() -> None:
    found = command._without_noise(lambda number: [{"case": [1.0, number]}] * 2, of_noise)
    assert found == [{"case": [1.0, 0, 1.0, 1, 1.0, 2]}] * 2  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("tries", "patience"), [(2, 0.0), (1, 600.0)])
def test_what_stays_noise_is_refused_after_tries_and_time(
    tries: int, patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TRIES", tries)
    monkeypatch.setattr(command, "PATIENCE", patience)
    made: list[int] = []

    def attempt(number: int) -> list[Any]:
        made.append(number)
        return [{"case": [1.0, number]}]

    if patience:  # enough of tries, but not of time
        assert command._without_noise(attempt, of_noise)
    else:
        with pytest.raises(NoisyTimesError, match="nothing is written"):
            command._without_noise(attempt, of_noise)
    assert len(made) == (3 if patience else tries)


@thorough
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    """Its processes are the ranks."""
    file = tmp_path / "calibration.json"
    printed = under_torchrun(
        "torchrun --nproc-per-node 2 -m interlace calibrate --backend gloo",
        "--repetitions",
        "3",
        "--json",
        "--cache",
        str(file),
    )
    said = json.loads(printed)  # of rank 0 alone
    assert said["backend"] == "gloo" and said["mesh"] == [2] and said["file"] == str(file)
    (read,) = calibration.read(file=file)
    assert read.backend == "gloo" and read.processes == "torchrun"
