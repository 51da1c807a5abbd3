"""Reports: a finding is a cause, which names its signal and counts what it touches, in every form alike."""

import json
import linecache
import pathlib
import re

import pytest

from interlace.cli import main
from interlace.verify import races, schedules, shims
from interlace_verify.schedule_check.interleaving import Step, Story
from interlace_verify.suite.jobs import load_function
from mutants.mutations import mutant_of, mutated_function
from peers.test_peers import MUTANTS, PROGRESS, TWO_SHOTS
from tiers import thorough

NO_BARRIER = "    if AFTER_STORES:\n        tl.debug_barrier()\n", ""


@thorough
def test_two_faulty_calls_are_two_findings_that_name_their_signals(tmp_path: pathlib.Path) -> None:
    """Three meetings have no barrier in front, and what the last one orders is only loads."""
    with shims.installed("torch"):
        fn = TWO_SHOTS.loaded(TWO_SHOTS.mutant("no barrier", NO_BARRIER), tmp_path)
        report = races(fn, 2, seeds=3)
        assert not report.errors
    first, second = report.findings
    for finding in report.findings:
        assert finding.kind == "no barrier" and finding.signal and finding.extent
        functions = [line.rpartition(" ")[2] for line in finding.signal.written.lines]
        assert functions == ["swap", "meet", "two_shot_all_reduce"]
        assert finding.signal.memory.startswith("signal pad 0 of rank ")
        assert finding.signal.index * 4 == finding.signal.offset and finding.signal.writers == 2
        # parts of 16 elements of two tiles, in the buffers of two ranks, but for what signals itself
        assert (finding.extent.programs, finding.extent.ranks) == (4, 2)
        assert finding.extent.seeds == (0, 1, 2) and 60 <= finding.extent.elements <= 64
    assert first.signal != second.signal and str(first.signal) in str(first)
    assert [text.partition(" ")[0] for text in first.also] == ["stores"]


def test_a_word_that_a_stream_has_written_is_the_signal_of_its_copy(tmp_path: pathlib.Path) -> None:
    """Who writes it is a kernel of interlace behind the copy; the report has the line that enqueued it."""
    (edit,) = (edit for _, _, name, edit in MUTANTS if name == "a poll that acquires nothing")
    with shims.installed("torch"):
        report = races(PROGRESS.loaded(PROGRESS.mutant("weak", edit), tmp_path), 2, seeds=2)
    (finding,) = report.findings
    assert finding.kind == "weak order" and finding.signal and finding.first
    written, seen = finding.signal.written, finding.signal.seen
    assert written.who == "write_value_kernel program 0"
    own, line = written.lines[-1].frames[0], "handle.stream_write_value32(progress"
    assert linecache.getline(*own).strip().startswith(line)
    assert f"the wait, {seen.what} at {seen.lines[0]}, to sem" in finding.hint


def test_a_load_and_a_store_in_either_order_are_one_finding(tmp_path: pathlib.Path) -> None:
    """The word before the copy: schedules differ in who comes first, and one change mends both."""
    (edit,) = (edit for _, _, name, edit in MUTANTS if name == "the word before the copy")
    with shims.installed("torch"):
        report = races(PROGRESS.loaded(PROGRESS.mutant("early", edit), tmp_path), 2, seeds=3)
    (finding,) = (each for each in report.findings if each.first is not None)
    assert finding.extent and finding.extent.seeds == (0, 1, 2)
    assert finding.kinds == {"read-write", "write-read"}
    assert f"\n  reverse {finding.reverse}, where the second" in str(finding)


def test_neighbours_are_one_step() -> None:
    def told(*texts: str) -> tuple[str, ...]:
        steps = (Step("rank 0 k", 0, "k", text, nbytes=16) for text in texts)
        return Story(0, 0, tuple(steps)).lines()[1:]

    parts = [f"loads 4 elements at a buffer, byte {first}" for first in (0, 16, 32)]
    whole = "    loads 12 elements at a buffer, byte 0"
    assert told(*parts) == (whole,)
    assert told(*parts, parts[0]) == (whole, f"    {parts[0]}")
    assert told(parts[0], parts[2]) == (f"    {parts[0]}", f"    {parts[2]}")
    assert told(parts[0], parts[1].replace("loads", "stores"))[1].startswith("    stores 4")


def test_an_error_in_a_kernel_has_its_line(tmp_path: pathlib.Path) -> None:
    edit = "y = tl.load((mine", "y = tl.load(x) + tl.load((mine"
    wrong = mutant_of("tests/sim/verify/user_exchange.py", "of a value", edit)
    fn = mutated_function(wrong, "exchange", tmp_path)
    line = (
        f"{wrong.package}.py:{wrong.source()[: wrong.source().index(edit[1])].count(chr(10)) + 1}"
    )
    (error,) = [text for _, text in races(fn, 2, seeds=2).errors]
    assert f" at {line} in exchange_kernel" in error
    failure = schedules(fn, 2, n=1, workers=1, shrink=False).failure
    assert failure and f" at {line} in exchange_kernel" in failure.text


@thorough
def test_text_json_page_and_sarif_say_the_same(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TWO_SHOTS.mutant("no barrier in all", NO_BARRIER).write(tmp_path)
    (file,) = tmp_path.glob("*.py")
    page, log = tmp_path / "page.html", tmp_path / "log.sarif"
    arguments = ["verify", f"{file}::two_shots", "--shims", "torch", "--seeds", "1", "--arch", "90"]
    arguments += ["--schedules", "1", "--html", str(page), "--sarif", str(log)]
    assert main.run([*arguments, "--json"]) == 1
    results = json.loads(capsys.readouterr().out)["results"]
    texts = [text for each in results for text in each["findings"] if each["check"] == "races"]
    assert any("and     on 4 ranks" in text for text in texts)
    linted = [text for each in results for text in each["findings"] if each["check"] == "lint"]
    assert len(linted) == len({re.sub(r" \(and .*", "", text) for text in linted}) > 0
    messages = [r["message"]["text"] for r in json.loads(log.read_text())["runs"][0]["results"]]
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[0])
    panels = [panel["text"] for panel in data["panels"]]
    for told in (messages, panels):
        for text in texts + linted:
            assert sum(each.endswith(text) for each in told) == 1


@thorough
def test_memory_of_a_heap_has_the_names_of_a_kernels_arguments(tmp_path: pathlib.Path) -> None:
    kernels = pathlib.Path(__file__).with_name("iris_kernels.py").read_text()
    mutant = tmp_path / "relaxed_ring.py"
    raised = 'rank, to_rank, heap_bases, sem="re'
    mutant.write_text(kernels.replace(raised + 'lease"', raised + 'laxed"'))
    with shims.installed("iris"):
        (finding,) = races(load_function(f"{mutant}::two_rounds"), 2, seeds=2).findings
    part = finding.signal and finding.signal.part  # of one of two programs
    assert (finding.part, part) in (("inbox[0]", "ready[0]"), ("inbox[32]", "ready[1]"))
    places = (", byte 1024 (ready[0]), index 256\n", ", byte 1028 (ready[1]), index 257\n")
    assert places[part == "ready[1]"] in str(finding)

    stuck = tmp_path / "silent_ring.py"
    stuck.write_text(re.sub(r"(?m)^    iris.atomic_xchg\(ready.*$", "", kernels))
    with shims.installed("iris"):
        error = str(schedules(load_function(f"{stuck}::two_rounds"), 2, n=1))
    assert re.search(r"symmetric buffer 0 of rank \d, byte 1024 \(ready\[0\]\)", error), error
