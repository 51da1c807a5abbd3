"""Faults in the patterns of kernels/signal.py that the protocol explorer must find.

Each is the pattern with its steps rewritten by a rule; the patterns themselves are clean at these sizes
(``test_protocol.py``).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from interlace_verify.protocols.explorer import (
    EMPTY,
    BeginRead,
    BeginWrite,
    CompareAndSwap,
    EndRead,
    EndWrite,
    Process,
    Protocol,
    ProtocolStep,
    Publish,
    Wait,
    explore,
)
from interlace_verify.protocols.patterns import (
    credit,
    flag_barrier,
    giving_up,
    peers_of,
    pull,
    push,
    push_after_pull,
    push_on_streams,
    slot,
    two_shot,
)

Rule = Callable[[Process], Iterable[ProtocolStep]]
Test = Callable[[Any], bool]


def waits(step: ProtocolStep, kind: str = "") -> bool:
    return isinstance(step, Wait) and step.word.startswith(kind)


def publishes(step: ProtocolStep, kind: str) -> bool:
    return isinstance(step, Publish) and step.word.startswith(kind)


def swaps(step: ProtocolStep) -> bool:
    return isinstance(step, CompareAndSwap)


def without(unwanted: Test) -> Rule:
    return lambda process: [step for step in process.steps if not unwanted(step)]


def each(change: Callable[[Any], ProtocolStep]) -> Rule:
    return lambda process: [change(step) for step in process.steps]


def changed(wanted: Test, **changes: Any) -> Rule:
    return each(lambda step: replace(step, **changes) if wanted(step) else step)


def renamed(name: Callable[[str], str]) -> Rule:
    def rename(step: Any) -> ProtocolStep:
        if isinstance(step, Publish | Wait | CompareAndSwap):
            return replace(step, word=name(step.word))
        return replace(step, cells=tuple(map(name, step.cells)))

    return each(rename)


def in_one_place(wanted: Test) -> Rule:
    def rule(process: Process) -> Iterable[ProtocolStep]:
        short = renamed(lambda name: name.partition(" on ")[0])(process)
        for step, other in zip(process.steps, short, strict=True):
            yield other if wanted(step) else step

    return rule


def epoch_never_advances(process: Process) -> Iterable[ProtocolStep]:
    for step in process.steps:
        if waits(step, "credit"):
            yield replace(step, value=0)
        else:
            yield replace(step, value=1) if isinstance(step, Publish | Wait) else step


def waits_for_another(kind: str) -> Rule:
    """For the slot or the credit of the next peer instead of the one that it means."""
    name = slot if kind == "slot" else credit

    def rule(process: Process) -> Iterable[ProtocolStep]:
        rank, ranks = int(process.name.split()[1]), 3
        peers = peers_of(rank, ranks)
        nexts = {name(rank, peer): name(rank, peers[i - 1]) for i, peer in enumerate(peers)}
        for step in process.steps:
            yield replace(step, word=nexts[step.word]) if waits(step, kind) else step

    return rule


def too_early(moved: str, before: type[ProtocolStep]) -> Rule:
    """Publishes of such words come before the end of the access that they come right after."""

    def rule(process: Process) -> Iterable[ProtocolStep]:
        end: ProtocolStep | None = None
        for step in process.steps:
            if end is not None and not publishes(step, moved):
                yield end
                end = None
            if isinstance(step, before):
                end = step
            else:
                yield step
        if end is not None:
            yield end

    return rule


def credit_of_the_receiver_only(process: Process) -> Iterable[ProtocolStep]:
    """What a push does by itself; the host's wait for all credits is left out before it."""
    steps = process.steps
    pushing = False
    for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True):
        pushing = pushing or (waits(step, "credit") and step.value == 1)
        if not pushing or not waits(step, "credit") or isinstance(following, BeginWrite):
            yield step


def flags_become_epochs(process: Process) -> Iterable[ProtocolStep]:
    """The same barrier in interlace's way: put number n publishes n, and is waited for by ``>=``."""
    times: Counter[str] = Counter()
    for step in process.steps:
        if isinstance(step, CompareAndSwap):
            times[step.word] += 1
            kind = Publish if step.new == 1 else Wait
            yield kind(step.word, times[step.word])
        else:
            yield step


def epochs_are_reset(process: Process) -> Iterable[ProtocolStep]:
    """0 and 1, reset by who has waited, instead of epochs that grow."""
    for step in process.steps:
        if isinstance(step, Publish | Wait):
            yield replace(step, value=1)
            if isinstance(step, Wait):
                yield Publish(step.word, 0)
        else:
            yield step


def only_the_first_barrier(process: Process) -> Iterable[ProtocolStep]:
    held = False
    for step in process.steps:
        if isinstance(step, EndRead | BeginWrite):
            held = isinstance(step, EndRead)
        if not (held and isinstance(step, CompareAndSwap)):
            yield step


def claim_without_swap(process: Process) -> Iterable[ProtocolStep]:
    for step in process.steps:
        if isinstance(step, CompareAndSwap) and step.word.startswith("claim"):
            yield replace(step, new=0, otherwise=step.otherwise + 1)
            yield Publish(step.word, 1)
        else:
            yield replace(step, giving_up=step.giving_up + 1) if isinstance(step, Wait) else step


def credit_before_collecting(process: Process) -> Iterable[ProtocolStep]:
    """The copy stream gives the credit of an op, when its own pushes are over."""
    if process.name.endswith("computing"):
        return [step for step in process.steps if not publishes(step, "credit")]
    rank, steps = int(process.name.split()[1]), list[ProtocolStep]()
    for step in process.steps:
        steps.append(step)
        if publishes(step, "slot"):
            where = step.word.partition(" on ")[2]
            steps.append(Publish(f"credit {rank} of rank {1 - rank} on {where}", step.value))
    return steps


def no_wait(kind: str) -> Rule:
    return without(lambda step: waits(step, kind))


def no_publish(word: str) -> Rule:
    return without(lambda step: isinstance(step, Publish) and step.word == word)


def stored(step: Any) -> ProtocolStep:
    """A flag that is raised is stored, not swapped."""
    return Publish(step.word, 1) if swaps(step) and step.new == 1 else step


waits_exactly = changed(waits, exact=True)
last_epoch = each(lambda step: replace(step, value=step.value - 1) if waits(step, "slot") else step)
# nobody waits for the slot that is for rank 2 itself
out_of_place = changed(lambda step: publishes(step, slot(2, 1)), word=slot(2, 2))
told_nobody = changed(lambda step: step == Publish("abort of rank 1", 1), word="abort of nobody")
patient = changed(lambda step: waits(step) and step.only_after, only_after="abort of nobody")
nothing_recorded = changed(lambda step: isinstance(step, BeginWrite), content=EMPTY)
no_wait_for_inputs = without(lambda step: waits(step) and "staged" in step.word)
rank_2_skips_rank_0 = without(lambda step: step == CompareAndSwap("flag 2 of rank 0", 0, 1))
one_memory = in_one_place(
    lambda step: isinstance(step, BeginRead | BeginWrite | EndRead | EndWrite)
)
one_set_of_slots = in_one_place(lambda step: waits(step, "slot") or publishes(step, "slot"))
same_slot = renamed(lambda name: name.replace("slot 1 of", "slot 2 of"))
sums_are_staged = renamed(lambda name: name.replace(", summed", ", staged"))

PUSH, STREAMS, PULL, BROADCAST = push(3, 2), push_on_streams(2, 3), pull(3, 2), pull(3, 3, [0])
MIXED, TWO_SHOT, GIVING_UP = push_after_pull(3, 2), two_shot(3, 2), giving_up(3, 2)
FLAGS = flag_barrier(3, 2)
EPOCHS = FLAGS.rewritten("by epochs", flags_become_epochs)

# Each with what is found, and a part of its text.
FAULTS: list[tuple[Protocol, str, Rule, str, str]] = [
    (PUSH, "no wait", no_wait("slot"), "violation", "read"),
    (PUSH, "no credit", no_wait("credit"), "violation", "is reading"),
    (PUSH, "epoch never advances", epoch_never_advances, "violation", "is reading"),
    (PUSH, "waits for the last epoch", last_epoch, "violation", "read"),
    (PUSH, "waits for another slot", waits_for_another("slot"), "violation", "read"),
    (PUSH, "waits for another credit", waits_for_another("credit"), "violation", "is reading"),
    (PUSH, "slot out of place", out_of_place, "deadlock", slot(2, 1)),
    (PUSH, "one slot for two sources", same_slot, "violation", "read"),
    (PUSH, "rank 0 skips rank 1", no_publish(slot(1, 0)), "deadlock", slot(1, 0)),
    (PUSH, "rank 2 gives rank 0 no credit", no_publish(credit(0, 2)), "deadlock", credit(0, 2)),
    (PUSH, "published too early", too_early("slot", EndWrite), "violation", "is writing"),
    (PUSH, "credit too early", too_early("credit", EndRead), "violation", "is reading"),
    (STREAMS, "no wait", no_wait("slot"), "violation", "reads nothing"),
    (STREAMS, "no credit", no_wait("credit"), "violation", "is reading"),
    (STREAMS, "credit too early", credit_before_collecting, "violation", "is reading"),
    (STREAMS, "one memory for both channels", one_memory, "violation", "is writing"),
    (STREAMS, "one set of slots", one_set_of_slots, "violation", "is writing"),
    (PULL, "no wait", no_wait("slot"), "violation", "read"),
    (PULL, "no credit", no_wait("credit"), "violation", "is reading"),
    (PULL, "rank 1's credit not waited for", no_wait("credit 1"), "violation", "rank 1 is reading"),
    (PULL, "told before it is staged", too_early("slot", EndWrite), "violation", "is writing"),
    (PULL, "credit too early", too_early("credit", EndRead), "violation", "is reading"),
    (PULL, "rank 0 skips rank 1", no_publish(slot(1, 0)), "deadlock", slot(1, 0)),
    (BROADCAST, "waits exactly", waits_exactly, "deadlock", "== 0 (it is 1)"),
    (MIXED, "receiver's credit only", credit_of_the_receiver_only, "violation", "is reading"),
    (TWO_SHOT, "one set of slots", sums_are_staged, "violation", "sums"),
    (TWO_SHOT, "no wait for inputs", no_wait_for_inputs, "violation", "input"),
    (FLAGS, "stored, not swapped", each(stored), "deadlock", "from 1 to 0 (it is 0)"),
    (FLAGS, "never reset", changed(swaps, new=1), "deadlock", "from 0 to 1 (it is 1)"),
    (FLAGS, "no barrier after reading", only_the_first_barrier, "violation", "is reading"),
    (FLAGS, "rank 2 skips rank 0", rank_2_skips_rank_0, "deadlock", "flag 2 of rank 0"),
    (EPOCHS, "waits exactly", waits_exactly, "deadlock", "=="),
    (EPOCHS, "reset by who waits", epochs_are_reset, "deadlock", ">= 1 (it is 0)"),
    (GIVING_UP, "claim without swap", claim_without_swap, "violation", "record of rank 0"),
    (GIVING_UP, "rank 1 is not told", told_nobody, "deadlock", "rank 1 program 0"),
    (GIVING_UP, "abort not looked at", patient, "deadlock", "rank 1 program 0"),
    (GIVING_UP, "nothing recorded", nothing_recorded, "violation", "no rank has recorded"),
]


@pytest.mark.parametrize(
    ("protocol", "fault", "rule", "kind", "text"),
    FAULTS,
    ids=[f"{protocol.name}: {fault}" for protocol, fault, *_ in FAULTS],
)
def test_faults_are_found(protocol: Protocol, fault: str, rule: Rule, kind: str, text: str) -> None:
    """By either way of exploring; a fault that only blocks is blocked in the same states."""
    mutant = protocol.rewritten(fault, rule)
    full, reduced = explore(mutant), explore(mutant, reduced=True)
    for result in (full, reduced):
        found = result.deadlocks if kind == "deadlock" else result.violations
        assert any(text in one.text for one in found), result
        assert all(one.steps for one in found)
    if kind == "deadlock":
        assert not full.violations and not reduced.violations
        assert {one.text for one in full.deadlocks} == {one.text for one in reduced.deadlocks}


def test_the_protocols_without_the_faults_are_clean() -> None:
    """At these very sizes, so that it is the fault that is found."""
    for protocol in {protocol.name: protocol for protocol, *_ in FAULTS}.values():
        assert explore(protocol, reduced=True).clean, protocol.name


def test_two_ranks_cannot_show_that_a_push_after_a_pull_needs_all_credits() -> None:
    """The reader that is harmed is a third rank: sizes matter, and 2 would say nothing."""
    fault = "receiver's credit only"
    assert explore(push_after_pull(2, 2).rewritten(fault, credit_of_the_receiver_only)).clean
