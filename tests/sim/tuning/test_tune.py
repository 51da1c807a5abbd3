"""Lookup of configurations, files of measurements, and ``python -m interlace tune`` in the simulator."""

import functools
import io
import json
import multiprocessing
import os
import pathlib
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from rich.console import Console

import interlace
from cases.damage import read_100000_damaged
from interlace.benchmark import tune as measuring
from interlace.benchmark.requests import TUNED
from interlace.benchmark.tune import (
    CandidateError,
    Timed,
    TuneCandidate,
    Tuned,
    TuneRequest,
    candidate_of,
    candidates,
    search,
    untuned_choice,
)
from interlace.cli import main
from interlace.cli.commands import tune as command
from interlace.cli.commands.tune import TuneOptions, tune
from interlace.groups.groups import default_group
from interlace.ops.matmul.formats import FORMATS
from interlace.runtime.tuning import calibration, files, tuning
from interlace.runtime.tuning.calibration import Link, LinkProtocol, MeasuredMesh
from interlace.runtime.tuning.configuration import Configuration, gpu_default, why_not
from interlace.runtime.tuning.files import CacheRow, TunedMachine
from interlace.runtime.tuning.tuning import Problem, decide
from ranks import ranks
from stand_ins.replaced import environment, replaced
from tiers import thorough

HERE = TunedMachine("a GPU", "cuda", "3.7.1", "0.1.0")
GATHER = Problem("all_gather_matmul", torch.bfloat16, 1024, 3584, 8192, 8)


def row(problem: Problem = GATHER, algorithm: str = "fused", **values: Any) -> CacheRow:
    """Return a measurement of the bucket of ``problem``."""
    world, rows, columns, inner = tuning.bucket_of(problem)
    kind = (problem.op, tuning.dtype_name(problem), tuning.extents_of(problem))
    return CacheRow(*kind, world, rows, columns, inner, algorithm, {algorithm: values})


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    tuning.forget()
    yield
    tuning.forget()


# -- lookup ------------------------------------------------------------------------------------------


def test_the_order_of_lookup() -> None:
    # two buckets off every row of the table for 70B
    near = replace(GATHER, rows=4096, columns=8192)
    exact = (row(chunks=3), 0)
    assert decide(90, GATHER, exact).configuration.chunks == 3
    assert "exact row of the cache" in decide(90, GATHER, exact).source
    table = decide(90, GATHER, (row(chunks=3), 1))
    assert "exact row of the table" in table.source and table.configuration.chunks == 1
    cached = decide(90, near, (row(near, chunks=3), 2))
    assert "nearest row of the cache" in cached.source and cached.configuration.chunks == 3
    assert "nearest row of the table" in decide(90, near, None).source
    far = replace(GATHER, rows=32768)
    assert "cost model" in decide(90, far, None).source
    assert decide(86, GATHER, None).source == "default: the table's tiles for sm_86"
    assert decide(86, GATHER, None).configuration == gpu_default(86, torch.bfloat16, 1024)


def test_what_is_not_near_is_not_taken() -> None:
    rows = [row()]
    found = tuning.nearest(rows, tuning.bucket_of(GATHER))
    assert found == (rows[0], 0)
    for other, steps in (
        (replace(GATHER, rows=2048), 1),
        (replace(GATHER, rows=2048, inner=4096), 2),
        (replace(GATHER, world_size=4), 2),
        (replace(GATHER, rows=8192), None),
        (replace(GATHER, world_size=2), None),
    ):
        found = tuning.nearest(rows, tuning.bucket_of(other))
        assert (found and found[1]) == steps, other
    normed = replace(GATHER, op="matmul_reduce_scatter_norm")
    plain, own = row(replace(normed, op="matmul_reduce_scatter")), row(normed, "unfused")
    assert tuning.nearest_cached([plain], normed) == (plain, 0), "the products are the same"
    assert tuning.nearest_cached([plain, own], normed) == (own, 0)
    assert tuning.nearest_cached([own], replace(normed, op="matmul_reduce_scatter")) is None
    for change in ({"dtype": torch.float16}, {"op": "matmul_reduce_scatter"}, {"columns": 3583}):
        assert tuning.nearest_cached(rows, replace(GATHER, **change)) is None


def test_ties_do_not_depend_on_the_order_of_rows() -> None:
    rows = [row(replace(GATHER, rows=size), chunks=size) for size in (512, 2048)]
    bucket = tuning.bucket_of(GATHER)
    assert tuning.nearest(rows, bucket) == tuning.nearest(rows[::-1], bucket) == (rows[0], 1)


@pytest.mark.parametrize("capability", [70, 75, 110, 120, 999])
def test_an_unknown_chip_falls_back(capability: int) -> None:
    choice = decide(capability, GATHER, None)
    assert choice.source.startswith("default")
    assert why_not(choice.configuration, capability, 2) == ""


def test_a_row_that_does_not_fit_the_chip_is_passed_over() -> None:
    fits, does_not = row(num_stages=2), row(num_stages=6)
    assert decide(90, GATHER, (fits, 0)).configuration.num_stages == 2
    choice = decide(90, GATHER, (does_not, 0))
    assert "table" in choice.source and choice.configuration.num_stages == 3


def test_values_are_those_of_the_algorithm_that_runs() -> None:
    both = replace(row(chunks=3), values={"fused": {"chunks": 3}, "pipelined": {"chunks": 5}})
    assert decide(90, GATHER, (both, 0)).configuration.chunks == 3
    choice = decide(90, GATHER, (both, 0), algorithm="pipelined")
    assert choice.configuration.chunks == 5


def test_several_nodes_and_a_world_of_one_take_defaults() -> None:
    default = gpu_default(90, torch.bfloat16, 1024)
    assert decide(90, GATHER, None, one_node=False).configuration == default
    lone = replace(GATHER, world_size=1)
    assert decide(90, lone, (row(chunks=3), 0)).configuration == default


@ranks(2, place="sim")
def test_columns_of_all_ranks_count() -> None:
    columns = (64, 96) if interlace.get_rank() else (96, 64)
    found = tuning.gather_problem(2, torch.float32, 32, (*columns, 33), 64)
    assert (found.columns, found.extents) == (96, "odd N")


# -- explicit ----------------------------------------------------------------------------------------


SMALL = Problem("all_gather_matmul", torch.float32, 4, 4, 8, 2)


def chosen(problem: Problem = SMALL) -> Any:
    return tuning.choose(interlace.groups.groups.default_group(), problem)


def test_an_explicit_configuration_wins(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "files.json"
    machine = files.machine("sim", torch.device("cpu"))
    files.add(machine, [row(SMALL, block_m=32, programs=2)], file)

    def on_rank() -> None:
        for values, block_m, source in (
            ({}, 32, "exact row of the cache"),
            ({"block_m": 64}, 64, "explicit"),
        ):
            with interlace.configured(**values):
                choice = chosen()
            assert choice.configuration.block_m == block_m and choice.configuration.programs == 2
            assert choice.source.split(",")[0] == source

    with environment(**{files.VARIABLE: str(file)}):
        interlace.run(on_rank, 2)


def test_the_simulator_reads_no_cache_unless_one_is_named(tmp_path: pathlib.Path) -> None:
    def on_rank() -> int:
        return int(chosen().configuration.programs)

    with environment(**{files.VARIABLE: None, "XDG_CACHE_HOME": str(tmp_path)}):
        file = tmp_path / "interlace" / "tune.json"
        assert files.path() == file
        files.add(files.machine("sim", torch.device("cpu")), [row(SMALL, programs=2)], file)
        assert interlace.run(on_rank, 2) == [3, 3]
    with environment(**{files.VARIABLE: str(file)}):
        assert interlace.run(on_rank, 2) == [2, 2]


# -- the cache file ----------------------------------------------------------------------------------


def test_rows_come_back(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "new" / "folder" / "tune.json"
    first, second = row(chunks=3), row(replace(GATHER, rows=64), "unfused")
    files.add(HERE, [first], file)
    files.add(HERE, [second], file)
    files.add(replace(HERE, device="another"), [row(chunks=7)], file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = files.rows_for(HERE, file)
    assert list(found) == [first, second]
    newer = replace(first, values={"fused": {"chunks": 4}})
    files.add(HERE, [newer], file)
    assert list(files.rows_for(HERE, file)) == [newer, second]
    assert files.digest(found) == files.digest(found[::-1]) != files.digest([newer])
    assert sorted(p.name for p in file.parent.iterdir()) == ["tune.json", "tune.json.lock"]


def test_of_other_versions_it_is_said(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    files.add(replace(HERE, triton="3.5.0"), [row()], file)
    with pytest.warns(RuntimeWarning, match=r"measured with triton 3\.5\.0"):
        assert files.rows_for(HERE, file) == ()


def gather() -> None:
    assert interlace.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 4)).eq(8).all()


def test_a_damaged_cache_does_not_stop_an_op(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    file.write_text("{")
    with environment(**{files.VARIABLE: str(file)}), pytest.warns(RuntimeWarning) as said:
        for _ in range(2):
            interlace.run(gather, 2)
    assert len([w for w in said if "tuning cache" in str(w.message)]) == 1


def write_rows(file: str, writer: int, count: int) -> None:
    for number in range(count):
        problem = replace(GATHER, rows=1 << writer, columns=1 << number)
        files.add(HERE, [row(problem)], pathlib.Path(file))


def test_writers_at_the_same_time_lose_nothing(tmp_path: pathlib.Path) -> None:
    file, count = tmp_path / "tune.json", 12
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_rows, args=(str(file), n, count)) for n in range(3)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert [each.exitcode for each in writers] == [0, 0, 0]
    assert len(files.rows_for(HERE, file)) == 3 * count


@pytest.mark.parametrize(
    ("named", "cache", "file"),
    [
        (None, "/cache", "/cache/interlace/tune.json"),
        (None, None, "/home/.cache/interlace/tune.json"),
        ("/x.json", "/cache", "/x.json"),
    ],
)
def test_where_the_file_is(named: str | None, cache: str | None, file: str) -> None:
    assert files.path() is None  # conftest.py
    with environment(**{files.VARIABLE: named, "XDG_CACHE_HOME": cache, "HOME": "/home"}):
        assert files.path() == pathlib.Path(file)


# -- candidates and the search -----------------------------------------------------------------------


@pytest.mark.parametrize("format", ["", *FORMATS])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 999])
def test_candidates_for_a_gpu(op: str, capability: int, format: str) -> None:
    problem = TUNED[op].problem(torch.bfloat16, (8192, 3584, 8192), 8, format=format)
    found = candidates("cuda", capability, problem)
    assert found[0].default and not any(each.default for each in found[1:])
    assert len({(each.algorithm, each.values) for each in found}) == len(found)
    assert {"fused", "pipelined", "unfused"} == {each.algorithm for each in found}
    algorithm, choice = untuned_choice("cuda", capability, problem)
    assert found[0].algorithm == algorithm
    assert Configuration(**found[0].configuration) == choice.configuration
    tiles = [each.configuration for each in found if each.algorithm == "fused"]
    assert len({(each["block_m"], each["block_n"]) for each in tiles}) > 1
    for each in tiles:
        assert why_not(Configuration(**each), capability, 1 if format else 2) == ""
        assert not format or each["block_k"] == choice.configuration.block_k
    if format and op == "all_gather_matmul":
        assert problem.inner == FORMATS[format].row_bytes(8192)
        assert tuning.dtype_name(problem) == format


def test_a_candidate_that_cannot_run_is_skipped_with_its_reason() -> None:
    tried = [candidate_of("fused", Configuration(chunks=n)) for n in (1, 2, 3)]
    request = TuneRequest("all_gather_matmul", torch.float32, (8, 8, 8), tuple(tried), 1.0)
    runs: list[int] = []

    def run(given: TuneRequest) -> list[Timed]:
        runs.append(len(given.candidates))
        for index, each in enumerate(given.candidates):
            if each.configuration["chunks"] == 2:
                raise CandidateError(index, "OutOfResources: shared memory")
        return [Timed(each, [10.0 - 2 * i], 0.0, True) for i, each in enumerate(given.candidates)]

    outcome = search(request, run)
    assert runs == [3, 2]
    assert outcome.skipped == [(tried[1], "OutOfResources: shared memory")]
    assert outcome.best.candidate == tried[2] and outcome.factor == 10 / 8

    def none(given: TuneRequest) -> list[Timed]:
        raise CandidateError(0, "no")

    with pytest.raises(ValueError, match=r"the default, .* cannot be run: no"):
        search(request, none)


def outcome_of(*timed: Timed) -> Tuned:
    return Tuned(list(timed), [])


def test_only_right_and_clearly_faster_candidates_win() -> None:
    base, other = TuneCandidate("fused", (("chunks", 1),), True), TuneCandidate("unfused")
    default = Timed(base, [100.0, 101.0, 99.0], 0.5, True)
    assert outcome_of(default, Timed(other, [99.0], 0.5, True)).best is default
    assert outcome_of(default, Timed(other, [90.0], 2.0, True)).best is default
    assert outcome_of(default, Timed(other, [90.0], 0.5, False)).best is default
    won = outcome_of(default, Timed(other, [50.0], 0.5, True))
    assert won.best.candidate is other and won.factor == 2


# -- the command -------------------------------------------------------------------------------------


def run_tune(**options: Any) -> tuple[int, str]:
    out = io.StringIO()
    code = tune(Console(file=out, width=250), TuneOptions(**options))
    return code, out.getvalue()


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_rows_of_a_format_are_found_by_calls_with_it_alone(op: str, tmp_path: pathlib.Path) -> None:
    """Rows of other formats may have equally many bytes."""
    file, sizes = tmp_path / "tune.json", {"m": "8", "n": "16", "k": "160"}
    given: dict[str, Any] = {"op": (op,), "place": "sim", "format": "mxfp8", **sizes}
    code, text = run_tune(budget=0.5, cache=str(file), **given)
    assert code == 0 and "mxfp8 to float32" in text and "say nothing about a GPU" in text
    (found,) = files.rows_for(files.machine("sim", torch.device("cpu")), file)
    assert (found.dtype, found.inner, found.shape) == ("mxfp8", 512, (8, 16, 160))
    sources: list[str] = []
    choose = tuning.choose

    def spied(*about: Any) -> Any:
        choice = choose(*about)
        sources.append(choice.source)
        return choice

    def on_rank(format: Any) -> None:
        subject: Any = TUNED[op](default_group().place, torch.float32, 8, 16, 160, format=format)
        subject.ours("auto")(*subject.inputs(0))

    for format, ours in (("mxfp8", True), ("mxfp8_e5m2", False), ("", False)):
        sources.clear()
        tuning.forget()
        with environment(**{files.VARIABLE: str(file)}), replaced((tuning, "choose", spied)):
            interlace.run(on_rank, 2, format)
        assert len(sources) == 2
        assert [each.startswith("exact row of the cache") for each in sources] == [ours] * 2
    with environment(**{files.VARIABLE: str(file)}):
        code, text = run_tune(dry_run=True, **given)
    assert code == 0 and "mxfp8 to float32" in text and "by exact row of the cache" in text


def test_wrong_results_are_seen(tmp_path: pathlib.Path) -> None:
    """The negative control of the check is an op that is wrong by more than rounding."""
    op = measuring.TUNED["all_gather_matmul"]
    right = op.ours

    def wrong(self: Any, algorithm: str) -> Callable[..., Any]:
        run = right(self, algorithm)
        return lambda *inputs: run(*inputs) + 1

    file = tmp_path / "tune.json"
    sizes = {"m": "16", "n": "16", "k": "16"}
    with replaced((op, "ours", wrong)):
        code, text = run_tune(
            op=("all_gather_matmul",), place="sim", budget=0.5, cache=str(file), **sizes
        )
    assert code == 1 and "WRONG" in text and not file.exists()


def test_a_dry_run_for_a_gpu_that_is_not_here() -> None:
    code, text = run_tune(op=("all_gather_matmul",), dry_run=True, arch=90, world_size=8)
    assert code == 0 and "exact row of the table (model: h100x8" in text
    code, text = run_tune(op=("matmul_reduce_scatter",), dry_run=True, arch=80, world_size=8)
    assert code == 0 and "would try" in text and "128x128x32" in text


# -- files of others, and places that cannot be written -----------------------------------------------

ROW = CacheRow(
    "all_gather_matmul", "float32", "even", 2, 8, 16, 16, "fused", {"fused": {"chunks": 3}}
)
GOOD = {"format": files.FORMAT, "version": files.VERSION, "machines": []}


def with_row(**changes: Any) -> str:
    """Return a file whose one row is changed."""
    return with_machine(rows=[{**asdict(ROW), **changes}])


def with_machine(**changes: Any) -> str:
    return json.dumps({**GOOD, "machines": [{**vars(HERE), "rows": [], **changes}]})


FOREIGN = {
    "empty": "",
    "text": "hello",
    "text with the name of the format": 'see "interlace tuning" in the docs',
    "JSON of somebody else": json.dumps({"format": "other"}),
    "no object": "[1, 2]",
    "an older version": json.dumps({**GOOD, "version": 0}),
    "a newer version": json.dumps({**GOOD, "version": 99}),
    "no machines": json.dumps({"format": files.FORMAT, "version": files.VERSION}),
    "machines are a number": json.dumps({**GOOD, "machines": 3}),
    "cut off": json.dumps(GOOD)[:-3],
    "deep": "[" * 100_000,
    "no text": "\udcff\udcfe",
    "a device that is a list": with_machine(device=["a"]),
    "unknown column": with_row(colour="red"),
    "unknown algorithm": with_row(algorithm="magic"),
    **{
        f"{name} is {wrong}": with_row(**{name: wrong})
        for name, wrong in {
            "rows": 0, "op": 3, "dtype": None, "extents": ["even"], "date": 2026, "world": 3,
            "columns": 1 << 70, "inner": True, "algorithm": ["fused"], "shape": [1, "2"],
            "ranks": -1, "default_us": float("nan"), "microseconds": {"fused": "1"},
        }.items()
    },
    **{
        f"{name} is {wrong}": with_row(values={"fused": {name: wrong}})
        for name, wrong in {"block_q": 3, "chunks": "3", "num_stages": -1, "block_m": 48}.items()
    },
}  # fmt: skip


def tune_into(file: pathlib.Path, out: io.StringIO | None = None) -> int:
    sizes = {"m": "16", "n": "16", "k": "16"}
    options = TuneOptions(
        op=("all_gather_matmul",), place="sim", budget=0.2, cache=str(file), **sizes
    )
    return tune(Console(file=out or io.StringIO(), width=250), options)


@pytest.fixture
def unmeasured() -> Iterator[None]:
    def fail(*arguments: Any) -> Any:
        pytest.fail("measured, though nothing can be written")

    with replaced((command, "_measure", fail)):
        yield


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.usefixtures("unmeasured")
def test_what_is_no_cache_of_this_format_is_named_once_and_stays(
    what: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "notes.json"
    held = FOREIGN[what].encode(errors="surrogateescape")
    file.write_bytes(held)
    with pytest.warns(RuntimeWarning, match="tuning cache not used") as warned:
        assert files.rows_for(HERE, file) == ()
    assert len(warned) == 1 and str(file) in str(warned[0].message)
    for write in (lambda: files.add(HERE, [ROW], file), lambda: tune_into(file)):
        with pytest.raises(files.NotOursError, match="left as it is") as said:
            write()
        assert str(file) in str(said.value)
    assert file.read_bytes() == held


def test_the_row_that_damage_is_done_to_is_good(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    file.write_text(with_row())
    assert list(files.rows_for(HERE, file)) == [ROW]


def is_refused(file: pathlib.Path, why: str) -> None:
    with pytest.raises(files.NotOursError, match=why):
        tune_into(file)
    with pytest.warns(RuntimeWarning, match=why):
        assert files.rows_for(HERE, file) == ()


@pytest.mark.usefixtures("unmeasured")
def test_what_is_no_file(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (tmp_path, pipe, pathlib.Path("/dev/full")):
        is_refused(file, "is not a regular file")
    large = tmp_path / "large.json"
    files.add(HERE, [ROW], large)
    with replaced((files, "MOST_BYTES", 100)):
        is_refused(large, "more than 100")


@pytest.mark.usefixtures("unmeasured")
def test_a_place_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for file in ("/proc/interlace/tune.json", f"{tmp_path}/file/tune.json", f"{tmp_path}/loop"):
        with pytest.raises(OSError, match=file):
            tune_into(pathlib.Path(file))


@pytest.mark.usefixtures("unmeasured")
def test_a_file_or_folder_without_permission(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's answer counts, because root may write everywhere."""
    file = tmp_path / "tune.json"
    files.add(HERE, [ROW], file)
    read_only = replaced((os, "access", lambda path, mode: False))
    with read_only, pytest.raises(OSError, match="cannot be written: it is read-only"):
        tune_into(file)

    def refuse(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    with replaced((os, "open", refuse)):
        arguments = ["tune", "all_gather_matmul", "--place", "sim", "--cache", str(file)]
        assert main.run(arguments) == 2
    assert "cannot be written" in " ".join(capsys.readouterr().err.split())


def test_figures_are_printed_though_they_cannot_be_written(tmp_path: pathlib.Path) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    out = io.StringIO()
    with replaced((files, "add", full)), pytest.raises(OSError, match="No space left"):
        tune_into(tmp_path / "tune.json", out)
    assert "default" in out.getvalue() and "candidates tried" in out.getvalue()
    assert "written" not in out.getvalue()


@contextmanager
def umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


def test_the_mode_of_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "tune.json"
    with umask(0o022):
        files.add(HERE, [ROW], file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        file.chmod(0o664)
        files.add(HERE, [ROW], file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o664


def test_a_link_stays_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.json", tmp_path / "tune.json"
    link.symlink_to(target)
    for _ in range(2):  # to a file that is not there yet, then to one that is
        files.FILE.refuse_unwritable(link)
        files.add(HERE, [ROW], link)
        assert link.is_symlink() and not target.is_symlink()
        assert list(files.rows_for(HERE, target)) == [ROW]
    assert sorted(path.name for path in target.parent.iterdir()) == ["real.json", "real.json.lock"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["tune.json"]


def test_shapes_of_a_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "shapes"
    file.write_text("# Llama\n1K 3584 8192\n\n2048x1792x4096  # small\n")
    shapes = [(1024, 3584, 8192), (2048, 1792, 4096)]
    given = TuneOptions(("all_gather_matmul", "all_reduce_norm"), shapes=str(file), place="shm")
    jobs = [(op, shape[:end]) for op, end in zip(given.op, (3, 2), strict=True) for shape in shapes]
    assert command.jobs_of(given) == jobs, "each takes the sizes that it has"
    file.write_text("1 2 3\n4 5\n")
    with pytest.raises(ValueError, match=r"line 2: '4 5' must be three numbers"):
        command.jobs_of(TuneOptions(shapes=str(file), place="sim"))


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: pathlib.Path) -> None:
    precious, file = tmp_path / "precious", tmp_path / "tune.json"
    precious.write_text("all of it")
    (tmp_path / "tune.json.lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), files._hold_lock(file):
        pass
    assert precious.read_text() == "all of it"


def add_calibration(file: pathlib.Path) -> files.MeasuredFile[Any]:
    protocols = (LinkProtocol(0, 31.0, 1.9), LinkProtocol(1 << 16, 50.0, 3.5))
    links = tuple(Link(0, 2, op, protocols) for op in calibration.OPS)
    mesh = MeasuredMesh("interlace", (2,), "2026-11-22", "2.13.0", "0.1.0", "shm", links)
    calibration.add(mesh, file)
    return calibration.file_of("cpu")


@thorough
@pytest.mark.parametrize("kind", ["tune", "calibrate"])
def test_100000_damaged_ones_are_refused(kind: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file.json"
    files.add(HERE, [ROW], file)
    measured: Any = files.FILE
    if kind == "calibrate":
        file.unlink()
        measured = add_calibration(file)
    content = functools.partial(measured.content, file)
    assert content()
    assert read_100000_damaged(file, content, files.NotOursError) > 50_000
