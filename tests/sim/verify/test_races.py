"""``interlace.verify.races``: what is a race, what is not, and that reports are repeatable."""

import linecache
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.verify import KINDS, RaceReport, races
from interlace_verify.race_check.check import RaceTeller
from interlace_verify.race_check.findings import Access, Finding, Reach, by_cause
from sim.verify import race_kernels as kernels, test_memory_faults
from sim.verify.user_exchange import exchange, last_program


def kinds(report: RaceReport) -> set[str]:
    assert not report.errors, report.errors
    return test_memory_faults.kinds(report)


def test_correct_kernels_are_clean() -> None:
    for fn in (exchange, last_program):
        report = races(fn, 2, seeds=6)
        assert report.clean and report.events > 100, str(report)
        assert report.seeds == tuple(range(6)) and "no findings" in str(report)


def test_a_buffer_that_is_used_again_too_early() -> None:
    """The race is found in a schedule whose results are right."""
    report = races(exchange, 2, 2, seeds=[0])
    assert not report.errors
    (finding,) = [f for f in report.findings if "read-write" in f.kinds]
    assert finding.first.what == "loads" and finding.second.what == "stores"
    assert finding.first.rank != finding.second.rank
    for access in (finding.first, finding.second):
        assert access.who.startswith("exchange_kernel program ")
        assert access.lines[0].startswith("user_exchange.py:")
    assert finding.memory.startswith("symmetric buffer 0 of rank ")
    assert 256 <= finding.offset < 256 + 4 * 64 and finding.count == 16 and finding.seed == 0


def test_reports_are_repeatable() -> None:
    first, again = (races(exchange, 2, 2, seeds=5) for _ in range(2))
    assert first == again and not first.clean
    seed = first.findings[-1].seed
    alone = races(exchange, 2, 2, seeds=[seed])
    assert first.findings[-1].key in {finding.key for finding in alone.findings}


def test_the_story_of_a_finding_is_of_the_same_conflict() -> None:
    finding = Finding("uninitialised", None, Access(0, "user", "loads", ()), "memory", 0, 1, 0)
    detector = RaceTeller(0, [finding], {finding.key: (3, -1)}).detector
    found = []
    for detector.events in (2, 3):
        detector._found(finding, np.arange(1), 1)
        found.append(len(detector.found))
    assert found == [0, 1] and not detector.done  # it has to name memory until the end


def test_what_a_rule_explains_is_told_first() -> None:
    def between(first: str, second: str, kind: str) -> Finding:
        accesses = [Access(rank, "k", f"{what}s", ()) for rank, what in enumerate((first, second))]
        return Finding(kind, *accesses, "memory", 0, 1, 0, "write-read", hint="do")

    bare, explained = between("store", "load", "write-read"), between("put", "load", "no barrier")
    reaches = {each.key: Reach() for each in (bare, explained)}
    told = by_cause([bare, explained], reaches)
    assert [each.kind for each in told] == ["no barrier", "write-read"]
    assert [each.hint for each in told] == [
        "do",
        "do; a finding above may also be the cause of this one",
    ]
    assert by_cause([bare], reaches)[0].hint == "do"


# -- what orders accesses ----------------------------------------------------------------------------


def buffer() -> Any:
    return default_group().place.allocate(1024)


def write_then(order: Callable[[], None]) -> Callable[[], None]:
    """Rank 0 writes into rank 1's memory by a torch operator; rank 1 reads after ``order``."""

    def on_rank() -> None:
        memory, rank = buffer(), interlace.get_rank()
        if rank == 0:
            memory.view(1, 0, (8,), torch.float32).fill_(1.0)
        order()
        if rank == 1:
            memory.view(1, 0, (8,), torch.float32).sum()

    return on_rank


def test_a_barrier_and_an_allocation_order_and_a_host_message_does_not() -> None:
    for order in (interlace.barrier, lambda: buffer() and None):
        assert races(write_then(order), 2, seeds=3).clean
    exchanged = write_then(lambda: default_group().agree("talk", None) and None)
    assert kinds(races(exchanged, 2, seeds=3)) == {"write-read"}


def test_output_used_before_its_op_was_waited_for() -> None:
    def on_rank(waits: bool) -> None:
        x = torch.ones(20)
        work = interlace.all_reduce(x, async_op=True)
        torch.empty(0).set_(x).unsqueeze_(0)  # says where a tensor is, and does nothing to memory
        if waits:
            work.wait()
        x.sum()
        work.wait()

    assert races(on_rank, 2, True, seeds=3).clean
    report = races(on_rank, 2, False, seeds=3)
    assert kinds(report) and kinds(report) <= {"write-read", "read-write"}  # by who came first
    assert any("test_races.py:" in str(finding) for finding in report.findings)


def test_input_overwritten_while_an_op_reads_it() -> None:
    def on_rank() -> None:
        x, out = torch.ones(20), torch.empty(40)
        work = interlace.all_gather(out, x, async_op=True)
        x.zero_()
        work.wait()

    found = kinds(races(on_rank, 2, seeds=6))
    assert found and found <= {"write-read", "read-write"}  # by who came first


def test_ops_of_two_groups_share_nothing() -> None:
    def on_rank() -> None:
        pair = interlace.new_group([0, 1])
        everyone = interlace.all_reduce(torch.ones(20), algorithm="copy", async_op=True)
        if interlace.get_rank() < 2:
            interlace.all_reduce(torch.ones(20), group=pair, algorithm="copy")
        everyone.wait()

    assert races(on_rank, 3, seeds=3).clean


def launch(kernel: Any, *arguments: Any) -> Callable[[], None]:
    def on_rank() -> None:
        memory, rank = buffer(), interlace.get_rank()
        kernel[(2,)](memory.peers, rank, *arguments)

    return on_rank


PASSED, WITHIN = kernels.passed, kernels.fenced_within_a_gpu
VERDICTS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "all write one place": (kernels.all_write_one_place, (), {"write-write"}),
    "plain flag": (PASSED, ("block", "plain", "volatile"), {"mixed access"}),
    "mixed flag": (PASSED, ("nothing", "release", "plain"), {"mixed access"}),
    "volatile flag": (PASSED, ("block", "release", "volatile"), {"weak order"}),
    "fenced volatile flag": (PASSED, ("block", "release", "volatile", "", "sys"), set()),
    "fenced relaxed flag": (PASSED, ("block", "relaxed", "relaxed", "sys", "sys"), set()),
    "no fence": (PASSED, ("block", "relaxed", "relaxed"), {"weak order"}),
    "narrow fence": (PASSED, ("block", "relaxed", "relaxed", "gpu", "sys"), {"narrow scope"}),
    "narrow wait": (PASSED, ("block", "relaxed", "relaxed", "sys", "gpu"), {"narrow scope"}),
    "scalar without barrier": (PASSED, ("scalar", "release", "acquire"), set()),
    "scalar and flags of a block": (PASSED, ("scalar", "several", "acquire"), {"no barrier"}),
    "block of atomics": (PASSED, ("atomics", "release", "acquire"), {"no barrier"}),
    "atomics of two sizes": (PASSED, ("block", "wide", "acquire"), {"write-read"}),
    "fences of a gpu within it": (WITHIN, ("gpu",), set()),
    "fence of a cta between programs": (WITHIN, ("cta",), {"narrow scope"}),
    "all look at one flag": (kernels.all_look_at_one_flag, (), set()),
    "passed on by a third": (kernels.passed_on_by_a_third, (), set()),
    "own bytes of one word": (kernels.own_bytes_of_one_word, (), set()),
    "same bytes of two types": (kernels.same_bytes_of_two_types, (), {"write-write"}),
    "scalar load, then credit": (kernels.scalar_load_then_credit, (), {"no barrier"}),
    "flags taken": (kernels.take_flags_that_are_not_set_yet, (), set()),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name: str) -> None:
    kernel, how, expected = VERDICTS[name]
    found: set[str] = set()
    for seed in range(6):
        found |= kinds(races(launch(kernel, *how), 3, seeds=[seed]))
    assert expected <= found and (expected or not found), found
    assert found <= set(KINDS)


def test_every_kind_has_a_kernel() -> None:
    """``no barrier`` is in test_protocol_mutants.py, ``no proxy fence`` in test_tma.py, one above.

    ``stale load`` is in test_ptx_races.py, what is left in ptx/verdicts.txt.
    """
    seen = set().union(*(kinds for *_, kinds in VERDICTS.values()))
    seen |= set(test_memory_faults.MUTANTS.values())
    elsewhere = {"no barrier", "no proxy fence", "read-write", "different values"}
    elsewhere |= {"stale load", "unfinished copy", "absent lane"}
    assert seen | elsewhere == set(KINDS)


def test_memory_that_is_freed_and_given_out_again_is_new() -> None:
    def on_rank() -> None:
        for _ in range(20):
            torch.ones(1024).sum()
            interlace.barrier()

    assert races(on_rank, 4, seeds=3).clean


# -- errors of the run, and misuse ---------------------------------------------------------------------


def test_barriers_that_order_nothing_are_named() -> None:
    """Of threads that are told apart. An interpreted program is one agent, and nothing is known of them."""

    def turned(several: bool) -> None:
        kernels.turned_by_way_of_memory[(1,)](torch.ones(128), torch.empty(128), 128, several)

    def numbers(report: RaceReport) -> list[str]:
        assert report.clean, str(report)
        assert len(report.notes) == len(report.superfluous) == str(report).count("superfluous")
        marked = (linecache.getline(*line.frames[0]).split("# ")[1] for line in report.superfluous)
        return [each.strip() for each in marked]

    assert numbers(races(turned, 1, True, seeds=3, arch=80)) == ["1", "3"]
    assert numbers(races(turned, 1, False, seeds=3, arch=80)) == []
    assert numbers(races(turned, 1, True, seeds=1)) == []


def test_an_exception_is_part_of_the_report() -> None:
    def on_rank() -> None:
        if interlace.get_rank() == 1:
            raise ZeroDivisionError("here")
        interlace.barrier()

    report = races(on_rank, 2, seeds=[3, 4])
    assert not report.clean and [seed for seed, _ in report.errors] == [3]  # once
    assert "rank 1: ZeroDivisionError: here" in str(report)
    assert report.to_dict()["errors"][0]["seed"] == 3


def test_what_cannot_be_run_is_not_checked() -> None:
    def refused() -> None:
        raise NotImplementedError(f"no such instruction on rank {interlace.get_rank()}")

    report = races(refused, 2, seeds=5)
    assert not report.clean and not report.errors and not report.findings
    assert [seed for seed, _ in report.refusals] == [0]  # once
    assert "1 not checked" in str(report) and "no such instruction" in str(report)
    assert report.to_dict()["refusals"][0]["seed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "fn must be callable, got int"),
        ({"world_size": 0}, r"world_size must be within 1\.\.64, got 0"),
        ({"world_size": True}, "world_size must be an int, got True"),
        ({"seeds": 10**9}, "at most 1,000,000 schedules"),
        ({"seeds": 0}, "seeds must name at least one schedule, got 0"),
        ({"seeds": []}, "seeds must name at least one schedule"),
        ({"seeds": 1.5}, "seeds must be a number of schedules or seeds, got 1.5"),
        ({"seeds": ["a"]}, "seeds must be ints, got 'a'"),
        ({"timeout": 0}, "timeout must be positive, got 0"),
    ],
)
def test_misuse(arguments: dict[str, Any], message: str) -> None:
    given = {"fn": exchange, "world_size": 2, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        races(given.pop("fn"), given.pop("world_size"), **given)


@pytest.mark.parametrize("arch", [None, 80])
@pytest.mark.parametrize(
    ("launches", "kind"),
    [
        (["read", "meet", "write"], ""),
        (["read, meet", "write"], "weak order"),
        (["read", "meet, write"], "note"),
        (["read, meet, write"], "weak order"),
    ],
)
def test_loads_of_a_launch_that_has_ended_are_done(
    launches: list[str], kind: str, arch: int | None
) -> None:
    """After a relaxed meeting, a note says which GPU it would fail on."""

    def on_rank(sem: str) -> None:
        memory, rank, out = buffer(), interlace.get_rank(), torch.zeros(16)
        for steps in launches:
            chosen = [step in steps for step in ("read", "meet", "write")]
            kernels.read_meet_write[(1,)](memory.peers, out, rank, sem, *chosen)

    for seed in range(2):
        report = races(on_rank, 2, "relaxed", seeds=[seed], arch=arch)
        assert kinds(report) == ({kind} - {"note", ""}), report
        noted = [note for note in report.notes if note.startswith("weak order")]
        assert len(noted) == (kind == "note")
        assert all("fails only on" in note and "the signal" not in note for note in noted)
        report = races(on_rank, 2, "acq_rel", seeds=[seed], arch=arch)
        assert report.clean and not any("weak order" in note for note in report.notes)


@pytest.mark.parametrize("arch", [None, 80])
@pytest.mark.parametrize(
    ("wait", "scope", "kind"),
    [(True, "sys", set()), (False, "sys", {"mixed access"}), (True, "gpu", {"narrow scope"})],
)
@pytest.mark.parametrize("count", [1, 4])
def test_who_has_seen_signals_comes_after_them(
    count: int, wait: bool, scope: str, kind: set[str], arch: int | None
) -> None:
    """PTX: a write comes before what follows in program order on who has read its value."""

    def on_rank() -> None:
        memory = buffer()
        kernels.reset_signals[(1,)](memory.peers, interlace.get_rank(), count, wait, scope)

    assert kinds(races(on_rank, 2, seeds=6, arch=arch)) == kind


def test_a_reset_is_told_as_no_signal() -> None:
    def on_rank() -> None:
        memory = buffer()
        kernels.reset_unseen[(1,)](memory.peers, interlace.get_rank())

    findings = races(on_rank, 2, seeds=6).findings
    assert {each.kind for each in findings} == {"mixed access"}
    assert all(each.hint.startswith("no signal that was sent") for each in findings), findings
