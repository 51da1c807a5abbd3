"""The page of ``--html`` and the log of ``--sarif``: what is in them, and the page in a browser."""

import contextlib
import functools
import html
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.cli.commands import demo as command
from interlace.output.page import PageEvent, PageView, Panel, write_page
from interlace.runtime.compiler.request import definition
from interlace.runtime.core.errors import SourceText
from interlace.verify import Fault, LintReport, ScheduleReport
from interlace_verify.command import sarif, verify
from interlace_verify.schedule_check import check as schedule_check
from interlace_verify.suite import jobs as suite
from interlace_verify.suite.jobs import CheckPlan, JobResult
from sim.verify.memory_kernels import fill
from sim.verify.test_memory_faults import loads

EXAMPLE = pathlib.Path(__file__).parents[3] / "docs" / "examples" / "one_shot_all_reduce.py"
MEETING = "    meet(pads_ptr, rank, WORLD_SIZE)\n"
TWO_PROGRAMS = """

def uneven():
    rank, output = interlace.get_rank(), torch.empty(32)
    handle = symmetric_memory.rendezvous(symmetric_memory.empty(32))
    tables = handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev
    one_shot_all_reduce[(2 - rank,)](*tables, torch.ones(32), output, rank, 2, BLOCK=16)
"""
SOURCE = EXAMPLE.read_text()
HEAD, TAIL = SOURCE.rsplit(MEETING, 1)
WRONG = HEAD + TAIL.partition("\nif __name__")[0] + TWO_PROGRAMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Make a repository with a wrong file in it."""
    folder = tmp_path_factory.mktemp("page")
    (folder / ".git").mkdir()
    (folder / "kernels").mkdir()
    (folder / "kernels" / "wrong.py").write_text(WRONG)
    return folder


@pytest.fixture(scope="module")
def results(folder: pathlib.Path) -> list[JobResult]:
    """Check one function with races and another with deadlocks."""
    plan, found = CheckPlan((2,), 1, 1, (90,)), []
    with contextlib.chdir(folder), mock.patch.object(schedule_check, "SHRINK_RUNS", 8):
        for name, check in (("three_rounds", "races"), ("uneven", "schedules")):
            target = f"kernels/wrong.py::{name}"
            jobs = suite.function_jobs(target, suite.load_function(target), plan)
            found += [job.result() for job in jobs if job.check == check]
    return found


@pytest.fixture(scope="module")
def written(folder: pathlib.Path, results: list[JobResult]) -> pathlib.Path:
    with contextlib.chdir(folder):
        verify.write_findings("report.html", "kernels/wrong.py", results)
    return folder / "report.html"


def data_of(path: pathlib.Path) -> Any:
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def deadlock_of(data: Any) -> int:
    """Return the panel of the one deadlock; the races are before it."""
    (number,) = (n for n, p in enumerate(data["panels"]) if p["title"].startswith("DeadlockError"))
    return number


def line_of(text: str) -> int:
    return WRONG.splitlines().index(text) + 1


LOADS = line_of("        total += tl.load(peer_buffer + offsets)")
STORES = line_of("    tl.store(rank_buffer + offsets, tl.load(input_ptr + offsets))")


# -- contents ------------------------------------------------------------------------------------


def test_a_race_is_two_red_accesses_and_an_arrow(written: pathlib.Path) -> None:
    data = data_of(written)
    found = data["panels"][:-1]
    assert data["bad"] and data["verdict"] == f"{len(found)} findings"
    race, overview = found[0], data["panels"][-1]
    assert race["title"].startswith("read-write")
    (view,) = race["views"]
    red = [number for number, event in enumerate(view["events"]) if event[6] == "red"]
    assert [arrow for arrow in view["arrows"] if arrow[2] == "red"] == [[*red, "red"]]
    lines = [data["frames"][view["events"][number][5][0]][1] for number in red]
    assert lines == [LOADS, STORES]
    (source,) = {data["frames"][event[5][0]][0] for event in view["events"]}
    assert data["files"][source] == {"name": "kernels/wrong.py", "lines": WRONG.splitlines()}
    assert len(overview["table"]) == 1 + 2 and not overview["bad"]


@pytest.mark.parametrize("faulty", [lambda: fill[(2,)](torch.ones(16), 0, 16), lambda: loads(4)])
def test_accesses_of_memory_of_one_rank_are_red_too(faulty: Any) -> None:
    report = interlace.verify.races(faulty, 1, seeds=1)
    (finding,) = report.findings
    (panel,) = verify.panels(JobResult("f", "races", "1 rank", "", (str(finding),), 0, report))
    (view,) = panel.views
    red = [number for number, event in enumerate(view.events) if event.mark]
    told = [each.lines for each in (finding.first, finding.second) if each is not None]
    assert [view.events[number].lines for number in red] == told
    assert view.arrows == ([(*red, "red")] if len(red) == 2 else [])


def test_waits_point_to_what_ended_them(written: pathlib.Path) -> None:
    """Each arrow goes from a release to a later acquire of the same word by another program."""

    def words(text: str) -> set[tuple[str, str]]:
        named = re.findall(r"(signal pad 0 of rank \d), ((?:(?: and )?byte \d+)+)", text)
        return {(memory, word) for memory, some in named for word in some.split(" and ")}

    (view,) = data_of(written)["panels"][0]["views"]
    arrows = [arrow for arrow in view["arrows"] if arrow[2] == "wait"]
    assert len(arrows) > 10
    for begin, end, _ in arrows:
        sent, seen = view["events"][begin], view["events"][end]
        assert sent[1] < seen[1] and sent[0] != seen[0]
        assert "(release, sys)" in sent[4] and "(acquire, sys)" in seen[4]
        assert words(sent[4]) & words(seen[4])


def test_a_failure_is_shown_as_found_and_shrunk(
    written: pathlib.Path, results: list[JobResult]
) -> None:
    data = data_of(written)
    deadlock = data["panels"][deadlock_of(data)]
    found, shrunk = deadlock["views"]
    report = results[-1].report
    assert isinstance(report, ScheduleReport) and report.failure is not None
    assert found["title"] == f"before shrinking, {report.failure.found_switches} context switches"
    assert shrunk["title"] == f"shrunk, {report.failure.switches} context switches"
    for view in (found, shrunk):
        blocked = [event for event in view["events"] if event[6] == "blocked"]
        lanes = [view["lanes"][event[0]] for event in blocked]
        assert lanes == [[0, "one_shot_all_reduce program 1"], [0, "user code"]]
        callers = [data["frames"][number][2] for number in blocked[0][5]]
        assert [text.partition(" in ")[2] for text in callers] == [
            "take",
            "meet",
            "one_shot_all_reduce",
        ]
        # user code waits for the program that waits
        (arrow,) = (arrow for arrow in view["arrows"] if arrow[2] == "blocked")
        assert [view["events"][number][4] for number in arrow[:2]] == [b[4] for b in blocked[::-1]]


def test_nothing_in_the_data_ends_its_element(tmp_path: pathlib.Path) -> None:
    evil = "</script><script>document.title = 'taken'</script><!--"
    for name, panels in (("page.html", [Panel(evil, evil, [])]), ("empty.html", [])):
        write_page(str(tmp_path / name), evil, evil, evil, panels, bad=False)
        assert (tmp_path / name).read_text().count("</script>") == 2
    assert data_of(tmp_path / "page.html")["panels"][0]["text"] == evil


def test_the_page_names_nothing_outside_of_it(written: pathlib.Path) -> None:
    template, _, _ = written.read_text().partition('id="data">')
    assert "default-src 'none'" in template
    assert set(re.findall(r"https?://[^\"' ]+", written.read_text())) == {
        "http://www.w3.org/2000/svg"
    }


def test_a_clean_run_is_shown_too(tmp_path: pathlib.Path) -> None:
    report = interlace.verify.schedules(interlace.all_reduce, 2, torch.ones(2), n=1, workers=1)
    result = JobResult("f.py::f", "schedules", "2 ranks", "1 schedule", (), 0.1, report)
    verify.write_findings(str(tmp_path / "page.html"), "f.py::f", [result])
    overview, panel = (data := data_of(tmp_path / "page.html"))["panels"]
    assert data["verdict"] == "no findings" and not data["bad"]
    assert overview["table"][1][0] == panel["title"].partition(",")[0] == "f.py::f"
    assert [view["title"] for view in panel["views"]] == ["the first schedule"]


@functools.cache
def demonstrated() -> Panel:
    options = command.DemoOptions(ranks=2, m=32, n=16, k=16)
    case = command.CASES[0]
    outcome = command.run_case(case, command._load(options), options)
    assert outcome.recording is not None
    return command.panel_of(case.title, case.story, outcome.recording)


def test_the_demo_shows_tiles_waits_and_their_lines() -> None:
    (view,) = demonstrated().views
    tiles = [event for event in view.events if event.kind == "tile"]
    assert {event.peer for event in tiles} == {0, 1}
    assert all(event.lines[0].frames for event in tiles)
    assert {line.partition(":")[0] for event in tiles for line in event.lines} >= {
        "all_gather_matmul.py"
    }
    assert view.arrows
    for begin, end, _ in view.arrows:
        assert view.events[end].kind == "wait"
        assert view.lanes[view.events[begin].lane] != view.lanes[view.events[end].lane]
        assert view.events[begin].end <= view.events[end].end


# -- SARIF ---------------------------------------------------------------------------------------

WAITS = """
import interlace
import torch
import triton
import triton.language as tl


@triton.jit
def waits(flag_ptr):
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass


def in_vain():
    waits[(1,)](torch.zeros(1, dtype=torch.int32))
"""


def written_log(results: list[JobResult]) -> Any:
    """Write ``log.sarif`` into the current folder, and return its run."""
    sarif.write("log.sarif", results)
    log = json.loads(pathlib.Path("log.sarif").read_text())
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "interlace" and {*run["originalUriBaseIds"]} == {"ROOT"}
    assert all(" " in rule["shortDescription"]["text"] for rule in driver["rules"])
    ids = [rule["id"] for rule in driver["rules"]]
    for result in run["results"]:
        assert result["ruleId"] in ids and result["level"] == "error" and result["message"]["text"]
    return run


def lines(places: list[Any]) -> list[int]:
    return [place["physicalLocation"]["region"]["startLine"] for place in places]


def test_sarif_names_lines(folder: pathlib.Path, results: list[JobResult]) -> None:
    relative = [JobResult(**{**vars(r), "subject": r.subject[8:]}) for r in results]
    linted = JobResult("wrong.py::uneven", "lint", "k sm_90", "1 variant", ("it spills",), 0.1)
    with contextlib.chdir(folder / "kernels"):
        by_rule = {r["ruleId"]: r for r in written_log([*relative, linted])["results"]}
    for result in by_rule.values():
        for place in (*result["locations"], *result["relatedLocations"]):
            file = place["physicalLocation"]["artifactLocation"]
            assert file == {"uri": "kernels/wrong.py", "uriBaseId": "ROOT"}
    race, deadlock = by_rule["races/read-write"], by_rule["schedules/DeadlockError"]
    assert (lines(race["locations"]), lines(race["relatedLocations"])) == ([STORES], [LOADS])
    (waits,) = lines(deadlock["locations"])
    assert "tl.inline_asm_elementwise" in WRONG.splitlines()[waits - 1]
    (flow,) = deadlock["codeFlows"][0]["threadFlows"]
    assert STORES in lines([each["location"] for each in flow["locations"]])
    assert lines(by_rule["lint"]["locations"]) == [line_of("def uneven():")]


@pytest.fixture
def vain(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Return a file with a kernel that waits in vain, in the current folder."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "vain.py").write_text(WAITS)
    with contextlib.chdir(tmp_path), mock.patch.object(schedule_check, "SHRINK_RUNS", 2):
        yield tmp_path / "vain.py"


def test_a_deadlock_that_several_checks_find_is_one_result(vain: pathlib.Path) -> None:
    plan, target = CheckPlan((2,), 1, 1, (90,)), "vain.py::in_vain"
    jobs = suite.function_jobs(target, suite.load_function(target), plan)
    results = [job.result() for job in jobs if job.check != "lint"]
    assert [bool(result.findings) for result in results] == [True] * 3
    (result,) = written_log(results)["results"]
    poll = WAITS.splitlines().index(next(x for x in WAITS.splitlines() if "while" in x)) + 1
    assert (result["ruleId"], lines(result["locations"])) == ("schedules/DeadlockError", [poll])
    assert "codeFlows" in result
    text = result["message"]["text"]
    assert "(again with schedules(..., seeds=[0])): " in text and "vain.py:10 in waits" in text
    assert len(text) < 1000 and "context switches" not in text


def test_a_fault_of_compiled_code_is_at_its_kernel(vain: pathlib.Path) -> None:
    """Its fingerprint is of the line and not of its number."""

    def found() -> tuple[str, str, str]:
        place = definition("vain.py", "waits")
        report = LintReport(kernel="waits", arch=90, findings=(Fault("spills", "3"),), place=place)
        result = JobResult("vain.py::in_vain", "lint", "waits sm_90", "", ("no",), 0.1, report)
        (found,) = written_log([result])["results"]
        (line,), source = lines(found["locations"]), vain.read_text().splitlines()
        mark = found["partialFingerprints"]["primaryLocationLineHash"]
        return found["ruleId"], source[line - 1], str(mark)

    first = found()
    assert first[:2] == ("lint/spills", "def waits(flag_ptr):")
    vain.write_text("# a line before it\n" + WAITS)
    assert found() == first
    vain.write_text(WAITS.replace("waits(flag_ptr)", "waits(flag_ptr, other=1)"))
    assert found()[2] != first[2]


def test_a_finding_in_a_library_is_where_it_was_called(folder: pathlib.Path) -> None:
    library = str(folder / ".venv/lib/python3/site-packages/interlace/signal.py"), 7
    own = str(folder / "kernels" / "wrong.py"), 3
    found = sarif.location([SourceText("signal.py:7 in put", (library, own))], folder)
    assert found is not None and found["physicalLocation"]["region"] == {"startLine": 3}
    assert sarif.location([SourceText("signal.py:7", (library,))], folder) is None
    elsewhere = [SourceText("signal.py:7", (("/elsewhere/signal.py", 7),))]
    assert sarif.location(elsewhere, folder) is None


# -- in a browser --------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BEFORE = """<head><script>
const faults = [];
addEventListener("error", event => faults.push(event.message));
addEventListener("securitypolicyviolation", event => faults.push(event.violatedDirective));
</script>"""
AFTER = pathlib.Path(__file__).with_name("report_page.js").read_text()


def shown(page: pathlib.Path, *steps: str, fragment: str = "", options: str = "") -> list[Any]:
    """Return the values of JavaScript expressions that a browser computes in turn in a page."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}, and none is on PATH")
    body = AFTER.replace("[STEPS]", f"[{', '.join(f'() => ({step})' for step in steps)}]")
    script = f"<script>{body}</script></body>"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = pathlib.Path(folder, "page.html")
        text = page.read_text().replace("<head>", BEFORE, 1)
        copy.write_text(script.join(text.rsplit("</body>", 1)))
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        arguments += ["--window-size=1400,1000", "--virtual-time-budget=5000", *options.split()]
        command = [program, *arguments, "--dump-dom", copy.as_uri() + fragment]
        dom = subprocess.run(command, capture_output=True, text=True).stdout
    (found,) = re.findall(r'<pre id="values">(.*?)</pre>', dom, re.DOTALL)
    *values, faults = json.loads(html.unescape(found))
    assert faults == []
    return values


def brightness(color: str) -> int:
    return sum(map(int, re.findall(r"\d+", color)[:3]))


def test_clicks_show_source_lines_and_moments(written: pathlib.Path) -> None:
    before, _, (said, line), place, early, late, _, later, _, back = shown(
        written,
        *("source()", "click('.event.red')", "source()", "location.hash", "at(3.5)", "at(40.5)"),
        *("click(\"button[title='one event on']\")", "find('.now').innerText"),
        *("click(\"button[title='one event back']\")", "find('.now').innerText"),
    )
    # the second access of the race is open from the start, and the first one is clicked
    assert "program" in before[0] and "stores 64 elements" in before[0]
    assert "tl.store(rank_buffer + offsets" in before[1] and str(STORES) in before[1]
    assert " loads " in said and "tl.load(peer_buffer" in line and str(LOADS) in line
    assert place.startswith("#panel=0&view=0&event=")
    assert early[0].startswith("3: rank ") and late[0].startswith("40: rank ")
    assert early[1] < late[1]
    assert later.startswith("41: rank ") and back.startswith("40: rank ")


def test_a_link_opens_a_moment_and_views_are_side_by_side(written: pathlib.Path) -> None:
    data = data_of(written)
    narrow, _, wide, text, _, (first, second), *counts = shown(
        written,
        *("find('.scroll svg').clientWidth", "click(\"button[title='wider']\")"),
        *("find('.scroll svg').clientWidth", "source()[0]"),
        f"click('nav a:nth-child({deadlock_of(data) + 1})')",
        "[...document.querySelectorAll('.view')].map(view => view.getBoundingClientRect().toJSON())",
        *("count('.event.blocked')", "count('.arrow.blocked')"),
        fragment="#panel=0&view=0&event=5",
    )
    assert wide > 1.4 * narrow and text.endswith(data["panels"][0]["views"][0]["events"][5][4])
    assert first["top"] == second["top"] and first["right"] < second["left"]
    assert counts == [4, 2]


def test_races_are_red_in_light_and_in_dark(written: pathlib.Path) -> None:
    body = "style('body', 'backgroundColor')"
    seen = []
    for options in (
        "--blink-settings=preferredColorScheme=1",
        "--blink-settings=preferredColorScheme=0",
    ):
        fill, stroke, paper, _, other = shown(
            written,
            *("style('.event.red', 'fill')", "style('.arrow.red', 'stroke')", body),
            *("click('#theme')", body),
            options=options,
        )
        red, green, blue = map(int, re.findall(r"\d+", fill)[:3])
        assert red > 2 * max(green, blue) * 0.8 and stroke == fill
        seen.append((brightness(paper), brightness(other)))
    (light, dark), swapped = seen
    assert light > 700 > 200 > dark and swapped == (dark, light)


def test_numbers_of_programs_are_seen_in_a_narrow_window(written: pathlib.Path) -> None:
    edge = "box => box.getBoundingClientRect().right"
    labels = f"[...document.querySelectorAll('.names text')].map({edge})"
    edges, right = shown(
        written, labels, f"({edge})(find('.names'))", options="--window-size=400,800"
    )
    assert edges and all(right - 20 < each <= right for each in edges)


def test_a_hint_is_no_alarm(tmp_path: pathlib.Path) -> None:
    view = PageView("v", "steps", [(0, "user code")], [PageEvent(0, 0, 1, "load", "loads")])
    failed = Panel("failed", "before it did anything", [PageView("v", "steps", [])], True)
    path = tmp_path / "page.html"
    write_page(str(path), "", "", "", [Panel("p", "", [view]), failed], bad=True)
    hint, plain, _, views = shown(
        path,
        *("style('.hint', 'color')", "style('.view small', 'color')"),
        *("click('nav a:nth-child(2)')", "count('.view, .source')"),
    )
    assert hint == plain and not views


def test_text_of_a_run_is_no_markup(tmp_path: pathlib.Path) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
    event = PageEvent(0, 0, 1, "load", evil)
    panel = Panel(evil, evil, [PageView(evil, "steps", [(0, evil)], [event])])
    write_page(str(tmp_path / "page.html"), "safe", evil, evil, [panel], bad=True)
    assert data_of(tmp_path / "page.html")["panels"][0]["text"] == evil
    steps = "document.title", "count('img')", "find('h2').innerText"
    assert shown(tmp_path / "page.html", *steps) == ["interlace: safe", 0, evil]


def test_the_demos_page_has_no_errors(tmp_path: pathlib.Path) -> None:
    (view,) = demonstrated().views
    write_page(str(tmp_path / "page.html"), "demo", "correct", "", [demonstrated()], bad=False)
    tile = next(n for n, event in enumerate(view.events) if event.kind == "tile")
    press = "dispatchEvent(new MouseEvent('click'))"
    steps = "count('.event')", f"find('[data-event=\"{tile}\"]').{press}", "source()[1]"
    count, _, line = shown(tmp_path / "page.html", *steps)
    assert count == len(view.events) and "store" in line
