"""``python -m interlace verify``: verdicts, exit codes, JSON, and errors that say what to do."""

import functools
import io
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from cases.texts import texts_beside
from interlace import symmetric_memory
from interlace.cli import main
from interlace_verify.command.verify import Teller, VerifyOptions, _plan, render, verify
from interlace_verify.schedule_check import check as schedule_check
from interlace_verify.suite import jobs as suite
from interlace_verify.suite.jobs import CheckPlan, JobResult
from mutants.mutations import mutated
from mutants.protocol_mutants import CASES
from tiers import thorough

EXAMPLE = pathlib.Path(__file__).parents[3] / "docs" / "examples" / "one_shot_all_reduce.py"
PROGRAMS = texts_beside(__file__)
FAST: dict[str, Any] = {"ranks": (2,), "seeds": 1, "schedules": 2, "arch": (90,)}
LITTLE = ["--ranks", "2", "--seeds", "1", "--schedules", "2", "--arch", "90"]


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for fewer context switches has its own tests, and so have several compiling processes.

    Each of those would import torch because the user's file does.
    """
    monkeypatch.setattr(schedule_check, "SHRINK_RUNS", 3)
    monkeypatch.setattr(suite, "lint_many", functools.partial(suite.lint_many, workers=1))


def run(options: VerifyOptions) -> tuple[int, str]:
    out = io.StringIO()
    return verify(Console(file=out, width=160), options), out.getvalue()


def program(folder: pathlib.Path, name: str) -> str:
    (folder / f"{name}.py").write_text(PROGRAMS[name])
    return f"{folder}/{name}.py::f"


def command(line: str, *more: str) -> int:
    """The exit code of a command that pages show, from the root of the repository, with little to do."""
    _, _, _, *arguments = line.split()
    return main.run([*arguments, *LITTLE, *more])


def test_a_users_function_is_run_and_its_kernels_are_linted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLE.parents[2])
    line = "python -m interlace verify docs/examples/one_shot_all_reduce.py::three_rounds"
    code, facts = command(line, "--json"), json.loads(capsys.readouterr().out)
    assert code == 0 and facts["clean"] and facts["ranks"] == [2]
    checks = {result["check"]: result for result in facts["results"]}
    assert set(checks) == {"races", "schedules", "late stores", "lint"}
    assert checks["lint"]["variant"] == "one_shot_all_reduce sm_90"
    assert int(checks["races"]["count"].split()[0]) > 100


@thorough
def test_one_op_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code = command("python -m interlace verify all_gather")
    text = capsys.readouterr().out
    assert code == 0 and "No findings." in text
    assert "found" not in text and all(check in text for check in ("races", "late stores", "lint"))


@pytest.mark.parametrize("own", [False, True])
def test_it_does_less_unless_more_is_asked_for(own: bool) -> None:
    less, more = (_plan(VerifyOptions(full=full), own) for full in (False, True))
    assert less.seeds < more.seeds and less.schedules < more.schedules
    assert set(less.arches) < set(more.arches) and set(less.ranks) <= set(more.ranks)
    if not own:  # that of the page is for powers of two
        assert less.ranks == more.ranks == (2, 4)
        assert less.budget and not more.budget and not less.schedules


def test_schedules_of_a_function_are_run_when_they_are_asked_for() -> None:
    def checks(**options: Any) -> list[str]:
        jobs = suite.function_jobs("f", lambda: None, _plan(VerifyOptions(**options), False))
        return [f"{job.check}, {job.variant}" for job in jobs]

    races = ["races, 2 ranks", "races, 4 ranks"]
    assert checks() == races
    assert checks(full=True) == [*races, "schedules, 2 ranks", "late stores, 2 ranks"]
    assert checks(schedules=5) == checks(full=True)
    assert _plan(VerifyOptions(seeds=3), False).budget == 0.0
    assert _plan(VerifyOptions(arch=(90, 100)), False).run_for == (90, 100)


def a_store() -> None:
    symmetric_memory.empty(4).zero_()


def a_race() -> None:
    symmetric_memory.rendezvous(tensor := symmetric_memory.empty(4)).get_buffer(
        0, (4,), tensor.dtype
    ).zero_()


def of_torch() -> None:
    torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("fn", "budget", "seeds"),
    [(a_store, 1e-9, 1), (a_store, 600.0, 3), (a_store, 0.0, 3), (a_race, 600.0, 1)],
)
def test_a_budget_leaves_one_schedule_and_what_is_wrong_in_it_ends_it(
    fn: Any, budget: float, seeds: int
) -> None:
    plan = CheckPlan((2,), 3, 0, (90,), budget=budget)
    (job,) = suite.function_jobs("f", fn, plan)
    result = job.result()
    assert result.report.seeds == tuple(range(seeds)) and bool(result.findings) == (fn is a_race)
    assert result.count.endswith(f" in {seeds} schedule{'s' * (seeds > 1)}")
    less = [note for note in result.notes if "1 of 3 schedules" in note and "--seeds 3" in note]
    assert bool(less) == (seeds == 1 and fn is a_store)


def test_an_error_that_torchs_shim_would_save_says_so() -> None:
    plan = CheckPlan((2,), 1, 1, (90,))
    for job in suite.function_jobs("f", of_torch, plan):
        (text,) = job.result().findings
        assert "process group has not been initialized" in text
        assert text.endswith("; --shims torch stands in for it")


def test_a_thread_that_ends_while_children_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = pathlib.Path("/proc/self/task/0/children")
    monkeypatch.setattr(pathlib.Path, "glob", lambda *_: [gone])
    assert suite.running_children() == []


def test_seconds_are_processor_time_of_children_too() -> None:
    burn = "import time\nwhile time.process_time() < 0.15: pass"

    def seconds(code: str) -> float:
        def run() -> JobResult:
            subprocess.run([sys.executable, "-c", code], check=True)
            return JobResult("", "", "", "1 run", (), 0.0)

        return suite.Job("f", "races", "", run).result().seconds

    assert seconds(burn) > 0.14
    program = [sys.executable, "-c", f"{burn}\nprint(flush=True)\ninput()"]
    begin = suite.processor_seconds()
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert suite.processor_seconds() - begin > 0.14  # it has not ended
        child.communicate(b"\n")
    out = io.StringIO()
    render(
        Console(file=out, width=160),
        [JobResult("f", "races", "", "5 accesses in 2 schedules", (), 1)],
    )
    assert "CPU" in out.getvalue() and "5 in 2" in out.getvalue()


def test_what_is_found_is_printed_when_its_job_is_done_and_once() -> None:
    out = io.StringIO()
    tell, found = Teller(Console(file=out, width=160)), []

    def done(result: JobResult) -> None:
        tell(result)
        found.append((result, out.getvalue().count("write-write")))

    jobs = suite.function_jobs("f", a_race, CheckPlan((2, 4), 1, 0, (90,)))
    results = suite.run_jobs(jobs, on_done=done)
    assert found[0][1] > 0 and found[0][0].findings
    told = out.getvalue()
    render(Console(file=out, width=160), results, tell)
    assert "write-write" not in out.getvalue()[len(told) :]


def test_kernels_are_linted_as_the_races_saw_them_launched(tmp_path: pathlib.Path) -> None:
    """The function is run by the races alone, and lint knows the forms of another process."""
    target, plan = program(tmp_path, "counted_runs"), CheckPlan((2, 4), 1, 0, (90,))
    jobs = suite.function_jobs(target, suite.load_function(target), plan)
    results = suite.run_jobs(jobs)
    linted = suite.lint_launches(target, results, plan)
    assert [each.variant for each in linted] == ["fill sm_90"] * 2
    assert not any(each.refusals for each in linted)
    assert len((tmp_path / "runs").read_text()) == 2 + 4


def test_a_fault_in_our_own_op_is_found(tmp_path: pathlib.Path) -> None:
    case = next(case for case in CASES if case.mutant.name == "barrier dropped")
    with mutated(case.mutant, tmp_path):
        jobs = suite.shipped_jobs(["all_gather"], CheckPlan((2,), 1, 2, (90,)))
        results = suite.run_jobs([job for job in jobs if job.variant == "kernel 2 ranks"])
    found = {(result.check, result.variant): bool(result.findings) for result in results}
    assert found["races", "kernel 2 ranks"]
    assert found["late stores", "kernel 2 ranks"] and not found["schedules", "kernel 2 ranks"]


def test_protocols() -> None:
    job = next(
        job for job in suite.protocol_jobs(CheckPlan()) if job.variant.startswith("flag barrier")
    )
    result = job.result()
    assert not result.findings and int(result.count.split()[0]) > 10_000
    out = io.StringIO()
    render(Console(file=out, width=160), [result])
    assert "4 ranks, 3 rounds" in out.getvalue() and result.count.split()[0] in out.getvalue()


def test_findings_are_told_once() -> None:
    same = [JobResult("op", "races", variant, "5 accesses", ("the same",), 0.1) for variant in "ab"]
    out = io.StringIO()
    render(Console(file=out, width=160), same)
    assert out.getvalue().count("the same") == 1


@thorough
def test_every_form_of_a_kernel_is_linted_and_json_stays_json(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = program(tmp_path, "twice")
    assert main.run(["verify", target, *LITTLE, "--json"]) == 1
    facts = json.loads(capfd.readouterr().out)
    lints = [result for result in facts["results"] if result["check"] == "lint"]
    assert sorted(bool(result["findings"]) for result in lints) == [False, True]


def test_what_one_check_cannot_do_leaves_the_results_of_the_others(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["verify", program(tmp_path, "with_a_function"), *LITTLE, "--json"]) == 1
    facts = json.loads(capfd.readouterr().out)
    refusals = {result["check"]: result["refusals"] for result in facts["results"]}
    assert not facts["clean"] and not any(result["findings"] for result in facts["results"])
    assert not refusals["races"] and "FUNCTION of apply is" in refusals["lint"][0]

    def broken() -> Any:
        raise KeyError("no such thing")

    (result,) = suite.run_jobs([suite.Job("op", "races", "", broken)])
    assert result.refusals == ("the check ended with KeyError: 'no such thing'",)
    out = io.StringIO()
    render(Console(file=out, width=160), [result])
    assert "not checked: the check ended" in out.getvalue() and "1 not checked." in out.getvalue()


def test_a_function_that_ends_its_process_does_not_end_the_command(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--ranks", "2,3", *LITTLE[2:], "--json"]
    assert main.run(["verify", program(tmp_path, "ends_on_three"), *options]) == 1
    results = json.loads(capfd.readouterr().out)["results"]
    refusals = {(each["check"], each["variant"]): each["refusals"] for each in results}
    assert refusals.pop(("races", "3 ranks")) == ["its process ended with exit code 9"]
    assert len(refusals) == 3 and not any(refusals.values())


def test_a_function_that_does_nothing_is_not_checked() -> None:
    (races, *_) = suite.run_jobs(suite.function_jobs("f", lambda: None, CheckPlan((2,), 1, 1)))
    assert races.refusals == (
        "there is nothing to check: no kernel was launched, and no memory accessed",
    )


def test_a_script_sees_its_own_arguments(tmp_path: pathlib.Path) -> None:
    assert suite.load_function(program(tmp_path, "script"))() is None


@pytest.mark.parametrize(
    ("name", "error"), [("leaves", "SystemExit"), ("broken", "ModuleNotFoundError")]
)
def test_a_file_that_cannot_be_imported(name: str, error: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.py: importing it fails: {error}"):
        suite.load_function(program(tmp_path, name))


def test_ops_between_nodes_are_among_those_checked() -> None:
    """A quick check leaves out what only repeats moves, and nothing that a full one has is lost."""
    names = [name for name in suite.TARGETS if name.startswith("nodes.")]
    full, quick = (
        {(job.subject, job.variant) for job in suite.shipped_jobs(names, plan)}
        for plan in (CheckPlan((4,), 1, 1, (90,)), CheckPlan((4,), 1, 1, (90,), True))
    )
    assert quick < full and {variant for _, variant in quick} == {"late puts 4 ranks"}
    assert ("nodes.all_to_all", "stores puts 4 ranks") in full
    linted = {
        entry.kernel for entry in suite.shipped_entries(names, CheckPlan((4,), 1, 1, (90,), True))
    }
    assert {"node_sums_kernel", "move_kernel", "matmul_node_reduce_scatter_kernel"} <= linted
