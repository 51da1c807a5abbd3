"""Lookup of configurations, the cache file, and ``python -m interlace tune`` in the simulator."""

import io
import multiprocessing
import pathlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import interlace
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
from interlace.cli.commands.tune import TuneOptions, tune
from interlace.groups.groups import default_group
from interlace.ops.matmul.formats import FORMATS
from interlace.runtime.tuning import files, tuning
from interlace.runtime.tuning.configuration import Configuration, gpu_default, why_not
from interlace.runtime.tuning.files import CacheRow, TunedMachine
from interlace.runtime.tuning.tuning import Problem, decide
from ranks import ranks
from stand_ins.replaced import environment, replaced

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
