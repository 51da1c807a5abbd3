"""The page of ``--html`` and the log of ``--sarif``: what is in them, and the page in a browser."""

import contextlib
import functools
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace.cli.commands import demo as command
from interlace.output.page import PageEvent, PageView, Panel, write_page
from interlace.runtime.core.errors import SourceText
from interlace.verify import ScheduleReport
from interlace_verify.command import sarif, verify
from interlace_verify.schedule_check import check as schedule_check
from interlace_verify.suite import jobs as suite
from interlace_verify.suite.jobs import CheckPlan, JobResult
from sim.cli import browser
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
    panel = Panel(
        evil, evil, [PageView("v", "steps", [(0, evil)], [PageEvent(0, 0, 1, "load", evil)])]
    )
    write_page(str(tmp_path / "page.html"), evil, evil, evil, [panel], bad=False)
    write_page(str(tmp_path / "empty.html"), "", "", "", [], bad=False)
    text = (tmp_path / "page.html").read_text()
    assert text.count("</script>") == (tmp_path / "empty.html").read_text().count("</script>") == 2
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


@pytest.fixture
def log(folder: pathlib.Path, results: list[JobResult]) -> Any:
    relative = [JobResult(**{**vars(r), "subject": r.subject[8:]}) for r in results]
    linted = JobResult("wrong.py::uneven", "lint", "k sm_90", "1 variant", ("it spills",), 0.1)
    with contextlib.chdir(folder / "kernels"):
        sarif.write("log.sarif", [*relative, linted])
        return json.loads(pathlib.Path("log.sarif").read_text())


def test_sarif_has_what_its_schema_requires(log: Any) -> None:
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "interlace"
    ids = [rule["id"] for rule in driver["rules"]]
    assert {"races/read-write", "schedules/DeadlockError", "lint"} <= set(ids)
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    for result in run["results"]:
        assert result["ruleId"] in ids and result["level"] == "error" and result["message"]["text"]
        for place in (*result["locations"], *result["relatedLocations"]):
            physical = place["physicalLocation"]
            assert physical["artifactLocation"] == {"uri": "kernels/wrong.py", "uriBaseId": "ROOT"}
            assert physical["region"]["startLine"] >= 1
    assert set(run["originalUriBaseIds"]) == {"ROOT"}


def test_sarif_names_lines(log: Any) -> None:
    by_rule = {result["ruleId"]: result for result in log["runs"][0]["results"]}
    race, deadlock = by_rule["races/read-write"], by_rule["schedules/DeadlockError"]
    linted = by_rule["lint"]

    def lines(places: list[Any]) -> list[int]:
        return [place["physicalLocation"]["region"]["startLine"] for place in places]

    assert (lines(race["locations"]), lines(race["relatedLocations"])) == ([STORES], [LOADS])
    (waits,) = lines(deadlock["locations"])
    assert "tl.inline_asm_elementwise" in WRONG.splitlines()[waits - 1]
    (flow,) = deadlock["codeFlows"][0]["threadFlows"]
    assert STORES in lines([each["location"] for each in flow["locations"]])
    assert lines(linted["locations"]) == [line_of("def uneven():")]


def test_a_finding_in_a_library_is_where_it_was_called(folder: pathlib.Path) -> None:
    library = str(folder / ".venv/lib/python3/site-packages/interlace/signal.py"), 7
    own = str(folder / "kernels" / "wrong.py"), 3
    found = sarif.location([SourceText("signal.py:7 in put", (library, own))], folder)
    assert found is not None and found["physicalLocation"]["region"] == {"startLine": 3}
    assert sarif.location([SourceText("signal.py:7", (library,))], folder) is None
    elsewhere = [SourceText("signal.py:7", (("/elsewhere/signal.py", 7),))]
    assert sarif.location(elsewhere, folder) is None


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    if browser.PROGRAM is None:
        pytest.skip(f"needs one of {', '.join(browser.NAMES)}, and none is on PATH")
    with browser.browser() as there:
        yield there


SHOWN = (
    "[document.querySelector('.source .what').innerText, document.querySelector('.here').innerText]"
)


def test_a_click_shows_the_source_line(chromium: browser.Browser, written: pathlib.Path) -> None:
    chromium.open(written)
    said, line = chromium.js(SHOWN)  # the second access of the race is open from the start
    assert "program" in said and "stores 64 elements" in said
    assert "tl.store(rank_buffer + offsets" in line and str(STORES) in line
    chromium.click(".event.red")  # the first one
    said, line = chromium.js(SHOWN)
    assert " loads " in said and "tl.load(peer_buffer" in line and str(LOADS) in line
    assert chromium.js("location.hash").startswith("#panel=0&view=0&event=")
    assert chromium.said == []
    assert all(url.startswith("file:") for url in chromium.asked)


def test_races_are_red_in_light_and_in_dark(
    chromium: browser.Browser, written: pathlib.Path
) -> None:
    chromium.open(written)
    seen = []
    for dark in (False, True):
        chromium.dark(dark)
        fill, stroke, paper = chromium.js(
            "['.event.red', '.arrow.red', 'body'].map((s, i) => "
            "getComputedStyle(document.querySelector(s))[['fill', 'stroke', 'backgroundColor'][i]])"
        )
        red, green, blue = map(int, re.findall(r"\d+", fill)[:3])
        assert red > 2 * max(green, blue) * 0.8 and stroke == fill
        seen.append(sum(map(int, re.findall(r"\d+", paper)[:3])))
    assert seen[0] > 700 > 200 > seen[1]
    chromium.click("#theme")
    paper = chromium.js("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper)[:3])) == seen[0]
    chromium.dark(False)


def test_the_slider_goes_through_the_steps(
    chromium: browser.Browser, written: pathlib.Path
) -> None:
    chromium.open(written)
    at = (
        "(time => {const s = document.querySelector('input[type=range]'); s.value = time;"
        "s.dispatchEvent(new Event('input')); return [document.querySelector('.now').innerText,"
        "Number(document.querySelector('.later').getAttribute('x'))]})"
    )
    early, late = chromium.js(f"{at}(3.5)"), chromium.js(f"{at}(40.5)")
    assert early[0].startswith("3: rank ") and late[0].startswith("40: rank ")
    assert early[1] < late[1]
    chromium.click("button[title='one event on']")
    assert chromium.js("document.querySelector('.now').innerText").startswith("41: rank ")
    chromium.click("button[title='one event back']")
    assert chromium.js("document.querySelector('.now').innerText").startswith("40: rank ")
    narrow = chromium.js("document.querySelector('.scroll svg').clientWidth")
    chromium.click("button[title='wider']")
    assert chromium.js("document.querySelector('.scroll svg').clientWidth") > 1.4 * narrow


def test_numbers_of_programs_are_seen_in_a_narrow_window(
    chromium: browser.Browser, written: pathlib.Path
) -> None:
    chromium.open(written)
    chromium(
        "Emulation.setDeviceMetricsOverride",
        width=400,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )
    edges = chromium.js(
        "(box => [box.getBoundingClientRect().right, "
        "...[...box.querySelectorAll('text')].map(each => each.getBoundingClientRect().right)])"
        "(document.querySelector('.names'))"
    )
    chromium("Emulation.clearDeviceMetricsOverride")
    right, *labels = edges
    assert labels and all(right - 20 < label <= right for label in labels)


def test_both_schedules_of_a_failure_are_side_by_side(
    chromium: browser.Browser, written: pathlib.Path
) -> None:
    chromium.open(written)
    chromium.click(f"nav a:nth-child({deadlock_of(data_of(written)) + 1})")
    chromium.until("document.querySelectorAll('.view').length === 2")
    boxes = chromium.js(
        "[...document.querySelectorAll('.view')].map(v => v.getBoundingClientRect().toJSON())"
    )
    first, second = boxes
    assert first["top"] == second["top"] and first["right"] < second["left"]
    assert chromium.js("document.querySelectorAll('.event.blocked').length") == 4
    assert chromium.js("document.querySelectorAll('.arrow.blocked').length") == 2
    assert chromium.said == []


def test_a_link_opens_a_moment(chromium: browser.Browser, written: pathlib.Path) -> None:
    event = 5
    (view,) = data_of(written)["panels"][0]["views"]
    chromium.open(written, f"#panel=0&view=0&event={event}")
    text = view["events"][event][4]
    assert chromium.js("document.querySelector('.source .what').innerText").endswith(text)


def test_a_hint_is_no_alarm(chromium: browser.Browser, tmp_path: pathlib.Path) -> None:
    view = PageView("v", "steps", [(0, "user code")], [PageEvent(0, 0, 1, "load", "loads")])
    failed = Panel("failed", "before it did anything", [PageView("v", "steps", [])], True)
    path = tmp_path / "page.html"
    write_page(str(path), "", "", "", [Panel("p", "", [view]), failed], bad=True)
    chromium.open(path)
    hint, plain = chromium.js(
        "['.hint', '.view small'].map(s => getComputedStyle(document.querySelector(s)).color)"
    )
    assert hint == plain
    chromium.open(path, "#panel=1")
    assert not chromium.js("document.querySelectorAll('.view, .source').length")
    assert chromium.said == []


def test_text_of_a_run_is_no_markup(chromium: browser.Browser, tmp_path: pathlib.Path) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"
    panel = Panel(
        evil, evil, [PageView(evil, "steps", [(0, evil)], [PageEvent(0, 0, 1, "load", evil)])]
    )
    write_page(str(tmp_path / "page.html"), "safe", evil, evil, [panel], bad=True)
    chromium.open(tmp_path / "page.html")
    assert chromium.js("document.title") == "interlace: safe"
    assert chromium.js("document.querySelectorAll('img').length") == 0
    assert chromium.js("document.querySelector('h2').innerText") == evil


def test_the_demos_page_has_no_errors(chromium: browser.Browser, tmp_path: pathlib.Path) -> None:
    write_page(str(tmp_path / "page.html"), "demo", "correct", "", [demonstrated()], bad=False)
    chromium.open(tmp_path / "page.html")
    count = len(demonstrated().views[0].events)
    assert chromium.js("document.querySelectorAll('.event').length") == count
    tile = next(n for n, e in enumerate(demonstrated().views[0].events) if e.kind == "tile")
    chromium.js(
        f"document.querySelector('[data-event=\"{tile}\"]').dispatchEvent(new MouseEvent('click'))"
    )
    assert "store" in chromium.js("document.querySelector('.here').innerText")
    assert chromium.said == []
